"""From values per distance, and from positions, to values per pair of query and key.

Legend: c queries, l keys, n distances.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def line(table: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """The part of a table over distance `[..., n]`, from distance 0 on, that pairs of a chunk fall into: `[..., c + l -
    1]`, from the farthest distance (the last query's, of the first key) to the nearest. Positions are consecutive.

    Zero beyond the table, where no query sees a key, and for keys after the query.
    """
    farthest = int(query_positions[-1] - key_positions[0])
    nearest = farthest - (len(query_positions) + len(key_positions) - 2)
    last = table.shape[-1] - 1
    part = table[..., max(0, nearest) : min(farthest, last) + 1].flip(-1)
    return F.pad(part, (max(0, farthest - max(last, nearest - 1)), max(0, -nearest)))


def over_pairs(table: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """A table over distance as `[..., c, l]`: for every pair the value of its distance, as `line` has it.

    Nothing is looked up pair by pair: the rows are overlapping pieces of one line of values, so that the gradient is a
    sum in a fixed order.
    """
    # Row 0 of the pieces begins at the farthest pair, which is the last query's.
    return line(table, query_positions, key_positions).unfold(-1, len(key_positions), 1).flip(-2)


def distances(query_positions: Tensor, key_positions: Tensor, like: Tensor) -> Tensor:
    """Query position minus key position, `[c, l]`, with the dtype and device of `like`."""
    return on_device(query_positions, like)[:, None] - on_device(key_positions, like)


def on_device(positions: Tensor, like: Tensor) -> Tensor:
    """Consecutive positions `[n]`, given on the CPU, with the dtype and device of `like`.

    They are made there: for a copy the host would wait until the device has done all that came before.
    """
    first = int(positions[0])
    return torch.arange(first, first + len(positions), dtype=like.dtype, device=like.device)
