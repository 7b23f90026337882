"""The model card of an exported model: README.md with the metadata that the Hugging Face hub reads."""

import yaml

from kerple.attention import FULL_MODE
from megatron.config import Config
from megatron.model.gpt import GPT

CARD = """---
{metadata}---

# {method} language model

A decoder-only language model: {layers} layers, hidden size {hidden}, {heads} heads, trained on sequences of {length}
tokens with the positional method `{method}`. Converted from a KERPLE-NeoX checkpoint.

```python
from transformers import AutoModelForCausalLM{tokenizer_class}

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER"{trust}){tokenizer_code}
```
{note}"""

TOKENIZER_CODE = """
tokenizer = {tokenizer_class}.from_pretrained("THIS_FOLDER"){comment}
prompt = tokenizer(["Once upon a time"], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**prompt, max_new_tokens=32)))"""

TESTED = "4.57.6, 5.0.0, 5.10.4 and 5.24.0"  # of transformers; see docs/huggingface.md
SELF_CONTAINED_NOTE = """
This folder contains the model's code (`modeling_kerple.py`, `attention_*.py`, and the positional method in
`positional_*.py`). It needs only torch and transformers, and was tested with versions {tested}. What works:

- `generate`, also beyond {length} tokens{limit}, with all its strategies, dynamic and static caches, and batches. Pad
  prompts on the left.
- Training: `labels`, gradient checkpointing, Trainer, and LoRA with peft (`target_modules=["query_key_value"]`).
- `AutoModel` and `AutoModelForSequenceClassification`, `device_map`, `torch.compile`{compiled}, `position_ids` (also of
  packed sequences), `output_attentions`, `output_hidden_states`.
- `attn_implementation`: {implementations}; others are rejected.
- Inference modes for longer texts, such as `inference_mode="window@{window}"` in `from_pretrained`, with a cache of
  constant size in `generate`. `attention_mode.py` lists them. The default is `{mode}` (`config.json`).

vLLM and TGI have not been tested. According to its documentation, vLLM's Transformers backend supports full and sliding
window attention, but not positional methods within attention such as this one. According to its documentation, TGI runs
models it does not know with transformers if `--trust-remote-code` is given, without its own attention kernels.
"""


STOCK_NOTE = """
This is a {architecture} of transformers, without own code. vLLM and TGI have not been tested; see their lists of
supported models.
"""


def model_card(
    model: GPT,
    config: Config,
    *,
    architecture: str | None,
    has_tokenizer: bool,
    mode: str = FULL_MODE.name,
) -> str:
    """README.md: what the model is, how to load it, and what works.

    architecture: the class of transformers; None for a self-contained model. mode: of inference.
    """
    # The hub reads the metadata.
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["kerple-neox", "length-extrapolation", config.model.pos_emb],
    }

    # A self-contained model has its own code, which limits how it can run.
    trust = "" if architecture else ", trust_remote_code=True"
    tokenizer_class = "AutoTokenizer" if architecture else "PreTrainedTokenizerFast"
    comment = "" if architecture else "  # AutoTokenizer reads config.json, and would ask to run this folder's code"
    hooks = frozenset[str]().union(*(method.hooks for method in model.positional_methods().values()))
    compiles = not hooks & {"embed", "rotate", "modify_scores", "scale_qk"}
    implementations = "eager" if "weight" in hooks else "eager, sdpa"
    note = SELF_CONTAINED_NOTE.format(
        length=config.model.seq_length,
        window=min(config.model.seq_length, config.model.windows[0] or config.model.seq_length),
        mode=mode,
        tested=TESTED,
        limit=f", up to {config.model.max_position_embeddings} tokens" if config.model.pos_emb == "learned" else "",
        compiled="" if compiles else " (with graph breaks)",
        implementations="eager" if "modify_scores" in hooks else f"{implementations}, flex_attention",
    )

    # Code to copy, and the rest of the page.
    tokenizer_code = ""
    if has_tokenizer:
        tokenizer_code = TOKENIZER_CODE.format(tokenizer_class=tokenizer_class, comment=comment)
    return CARD.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        layers=config.model.num_layers,
        hidden=config.model.hidden_size,
        heads=config.model.num_attention_heads,
        length=config.model.seq_length,
        method=config.model.pos_emb,
        tokenizer_class=f", {tokenizer_class}" if has_tokenizer else "",
        trust=trust,
        tokenizer_code=tokenizer_code,
        note=STOCK_NOTE.format(architecture=architecture) if architecture else note,
    )
