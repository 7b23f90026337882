"""README.md of a converted model."""

from megatron.config import Config

CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

A decoder-only language model: {layers} layers, hidden size {hidden}, {heads} heads, trained on sequences of {length}
tokens with the positional method `{method}`. Converted from a KERPLE-NeoX checkpoint.

```python
{code}
```
{note}"""

CODE = """from transformers import AutoModelForCausalLM{tokenizer}

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER"{trust})"""

TOKENIZER = """
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER"{trust})
prompt = tokenizer(["def main("], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**prompt, max_new_tokens=32)))"""

OWN_CODE = """
The model's code is in this folder (`modeling_kerple.py`, and the positional method in `positional_*.py`); it needs
torch and transformers alone. Batches of prompts are padded on the left.
"""


def model_card(config: Config, *, stock: bool, has_tokenizer: bool) -> str:
    """What the model is, and how it is loaded."""
    template = CODE + (TOKENIZER if has_tokenizer else "")
    code = template.format(
        tokenizer=", AutoTokenizer" if has_tokenizer else "", trust="" if stock else ", trust_remote_code=True"
    )
    model = config.model
    return CARD.format(
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        length=model.seq_length,
        method=model.pos_emb,
        code=code,
        note="" if stock else OWN_CODE,
    )
