"""The model card of an exported model: README.md with the metadata that the Hugging
Face hub reads.
"""

from kerple.attention import FULL_MODE
from megatron.config import Config
from megatron.model.gpt import GPT
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.templates import templates


def model_card(
    model: GPT,
    config: Config,
    *,
    architecture: str | None,
    tokenizer: TokenizerFiles | None,
    mode: str = FULL_MODE.name,
) -> str:
    """README.md: what the model is, how to load it, and what works.

    architecture: the class of transformers; None for a self-contained model. mode: of inference.
    """
    hooks = frozenset[str]().union(
        *(method.hooks for method in model.positional_methods().values())
    )
    implementations = ["eager"]
    if not hooks & {"weight", "modify_scores"}:
        implementations.append("sdpa")
    if "modify_scores" not in hooks and mode == FULL_MODE.name:
        implementations.append("flex_attention")
    return (
        templates("megatron.convert")
        .get_template("card.md.j2")
        .render(
            model=config.model,
            architecture=architecture,
            tokenizer=tokenizer,
            mode=mode,
            window=min(config.model.seq_length, config.model.windows[0] or config.model.seq_length),
            compiles=not hooks & {"embed", "rotate", "modify_scores", "scale_qk"},
            implementations=", ".join(implementations),
        )
    )
