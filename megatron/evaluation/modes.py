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


def parse_modes(names: Sequence[str], train_length: int | None = None) -> list[Mode]:
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
        model = config.model
        methods = build_layers(model.pos_emb, model.shape, **model.positional_options)
        modes = {name: parse_modes([name], model.seq_length)[0] for name in names}
        reasons = {
            name: unsupported_reason(mode.attention, methods, model) for name, mode in modes.items()
        }
        supported |= {name for name, reason in reasons.items() if reason is None}
        unsupported = {
            modes[name].name: reason for name, reason in reasons.items() if reason is not None
        }
        first_reasons = {**reasons, **first_reasons}
        unique = {mode.name: mode for mode in modes.values()}
        result.append(
            ([mode for name, mode in unique.items() if name not in unsupported], unsupported)
        )
    for name in names:
        if name not in supported and not skip_unsupported:
            raise UserError(f"inference mode {name} {first_reasons[name]}")
    return result
