"""Whether the hooks of a positional method give the same values for a part of the distances, tokens
or queries as for all of them. Backends call them for parts of their own choice.

Legend: s tokens, n distances, h heads, d head size, e hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention.tables import score_table
from kerple.positional import Chunk, ModelShape, PositionalMethod

# The largest number of distances, and of tokens, that hooks are called for.
MAX_DISTANCES, MAX_TOKENS = 2048, 32
# Relative and absolute differences that are rounding.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}


@torch.no_grad()
def part_problem(method: PositionalMethod, shape: ModelShape, length: int) -> str | None:
    """Call the hooks of a method on the CPU, in float32, for all of at most `length` distances or
    tokens, and for each half of them.

    Returns a sentence that names the method and the hook whose values differ; None if none does.
    Exceptions of the method are not caught.
    """
    for name, values, maximum in (
        ("distances", _of_distances, MAX_DISTANCES),
        ("tokens", _of_tokens, MAX_TOKENS),
    ):
        size = min(maximum, length)
        middle = (size + 1) // 2
        whole = values(method, shape, slice(0, size))
        parts = [slice(0, middle)]
        if middle < size:
            parts.append(slice(middle, size))
        for places in parts:
            for hook, part in values(method, shape, places).items():
                expected = whole[hook][..., places]
                # A wrong shape is an error of attention.
                if part.shape != expected.shape:
                    continue
                if not torch.allclose(part, expected, **TOLERANCE, equal_nan=True):
                    return (
                        f"{type(method).__name__}.{hook} gives other values for a part of the "
                        f"{name} than for all of them, so results would depend on how attention "
                        "divides its work. Each value must depend only on its own distance, or on "
                        "its own query and the keys that it sees, not on how many there are or "
                        "which is the largest (see docs/adding-a-method.md)"
                    )
    return None


def _of_distances(method: PositionalMethod, shape: ModelShape, places: slice) -> dict[str, Tensor]:
    """The values of hooks at some distances, `[..., n]`."""
    distance = torch.arange(places.start, places.stop, dtype=torch.float32)
    values: dict[str, Tensor] = {}
    for hook in ("bias", "weight"):
        if hook in method.hooks:
            values[hook] = getattr(method, hook)(distance)
    table = method.table(distance)
    if table is not None:
        values["table"] = table
    return values


def _of_tokens(method: PositionalMethod, shape: ModelShape, places: slice) -> dict[str, Tensor]:
    """The values of hooks for some of the tokens of a text, `[..., s]`."""
    # The same states for every part.
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, MAX_TOKENS, shape.hidden_size, generator=generator)[:, places]
    states = torch.randn(1, shape.num_heads, MAX_TOKENS, shape.head_size, generator=generator)
    states = states[:, :, places]
    positions = torch.arange(places.start, places.stop)
    values: dict[str, Tensor] = {}
    if "embed" in method.hooks:
        values["embed"] = method.embed(hidden, positions).transpose(1, 2)
    if "rotate" in method.hooks and not method.length_dependent:
        rotated = torch.stack(method.rotate(states, states, positions, positions))
        values["rotate"] = rotated.transpose(3, 4)
    if "decay" in method.hooks:
        values["decay"] = method.decay(hidden)
    if "modify_scores" not in method.hooks:
        return values

    # A chunk has the keys up to its last query. The scores of others do not count.
    size = (1, shape.num_heads, MAX_TOKENS, MAX_TOKENS)
    keys = torch.arange(places.stop)
    mask = keys > positions[:, None]
    chunk = Chunk(
        scores=torch.randn(size, generator=generator)[:, :, places, : places.stop],
        query=states,
        query_positions=positions,
        key_positions=keys,
        mask=mask,
        table=score_table(method, places.stop, "cpu"),
    )
    scores = method.final_scores(chunk).masked_fill(mask, 0.0)
    values["modify_scores"] = F.pad(scores, (0, MAX_TOKENS - places.stop)).transpose(2, 3)
    return values
