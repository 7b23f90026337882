"""Inference modes by name (`kerple/attention/inference/mode.py`), as users give them."""

from collections.abc import Sequence

from kerple.attention import Mode, parse_mode
from kerple.positional import build_layers
from megatron.config import Config
from megatron.inference.decoder import unsupported_reason
from megatron.utils.errors import UserError

# The start of `unsupported_reason`, and so of the note of a record in a mode that the model does
# not support.
UNSUPPORTED_NOTE = "is not supported"


def parse_modes(names: Sequence[str], train_length: int | None) -> list[Mode]:
    """The modes with these names, each once. Raises UserError for a name that
    `kerple.attention.parse_mode` rejects.
    """
    try:
        modes = [parse_mode(name, train_length) for name in names]
    except ValueError as error:
        raise UserError(str(error)) from error
    return list({mode.name: mode for mode in modes}.values())


def supported_modes(
    configs: Sequence[Config], names: Sequence[str], *, skip_unsupported: bool = False
) -> list[tuple[list[Mode], dict[str, str]]]:
    """For each model, the modes that it supports, each once, and for the names of the others why it
    does not.

    Unless `skip_unsupported` is set, raises UserError for a mode that no model supports.
    """
    result: list[tuple[list[Mode], dict[str, str]]] = []
    supported: set[str] = set()
    first_reasons: dict[str, str | None] = {}
    for config in configs:
        # Two names can stand for one mode.
        model = config.model
        methods = build_layers(model.pos_emb, model.shape, **model.positional_options)
        modes: dict[str, Mode] = {}
        unsupported: dict[str, str] = {}
        for name in names:
            (mode,) = parse_modes([name], model.seq_length)
            reason = unsupported_reason(mode.attention, methods, model)
            first_reasons.setdefault(name, reason)
            if reason is None:
                supported.add(name)
                modes[mode.name] = mode
            else:
                unsupported[mode.name] = reason
        result.append((list(modes.values()), unsupported))
    for name in names:
        if name not in supported and not skip_unsupported:
            raise UserError(f"inference mode {name} {first_reasons[name]}")
    return result
