"""Attention in modes with sinks, or with a distance map of a rotation, in chunks of queries.

A chunk of queries attends to at most two ranges of keys: the sinks, and the keys from its window
on. The scores of both are computed with all hooks of the positional method, at the distances that
the mode defines, and share one softmax. Methods whose scores depend on several keys get both ranges
at once, because the keys between them, which are masked, have no influence. The cost is
proportional to the number of keys in these ranges, but for DAPE, whose table has all distances up
to the query's position. Only the scores of one chunk are in memory.

Legend: b batch, s query length, t key length, h heads, g key/value heads, d head size; in a chunk:
c queries, l keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention.backend import without_autocast
from kerple.attention.backends.chunk_plan import MODIFY_MIN_ROWS, modify_rows
from kerple.attention.inference.mode import AttentionMode
from kerple.attention.tables import score_table, tables
from kerple.positional import Chunk, PositionalMethod
from kerple.positional.functional import positions_on

# (first, end) -> (bias, weight) at the distances first ... end-1, mapped if the mode has a map:
# `[h, n]` or None.
Tables = Callable[[int, int], tuple[Tensor | None, Tensor | None]]


def attend_in_mode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    method: PositionalMethod,
    mode: AttentionMode,
    *,
    start: int | None = None,
    scale: float | None = None,
    tables_at: Tables | None = None,
    decay_sums: Tensor | None = None,
) -> Tensor:
    """Attention of one positional method in any mode that it supports, `[b, h, s, d]`.

    Args:
        query: `[b, h, s, d]` at the positions from `start` on, before the method's rotation, scaled
            by the mode.
        key, value: `[b, g, t, d]` before rotation. If t < start + s, positions are missing: between
            the sinks and the window if the mode has sinks, otherwise before the window. No query
            may see a missing key.
        start: the position of the first query, t - s by default: the keys of all positions are
            there.
        scale: factor of q.k, 1 / sqrt(d) by default.
        tables_at: the method's bias and weight; by default those of all its heads.
        decay_sums: `[b, h, t]`, prefix sums of the keys' decays; None if the method has no decay.

    Raises ValueError if the method does not support the mode, for more keys than positions, and if
    a query sees a missing key.
    """
    # The mode, and which positions have no key.
    reason = mode.unsupported_reason(method)
    if reason is not None:
        raise ValueError(f"{type(method).__name__} {reason}")

    if "decay" in method.hooks and decay_sums is None:
        raise ValueError(f"{type(method).__name__} has a decay: pass decay_sums")
    s = query.shape[2]
    t = key.shape[2]
    device = query.device
    if start is None:
        start = t - s
    if scale is None:
        scale = query.shape[3] ** -0.5
    total = start + s
    missing = missing_keys(mode, start, s, t)
    if tables_at is None:

        def tables_at(first: int, end: int) -> tuple[Tensor | None, Tensor | None]:
            return tables(method, end, device, distance_map=mode.distance_map, first=first)

    # A chunk has at most as many keys more than one of its queries as it has queries.
    most_keys = mode.span.max_kv_len(total)
    most_rows = max(MODIFY_MIN_ROWS, most_keys)
    kv_len = min(total, 2 * most_keys)
    rows = min(most_rows, modify_rows(query, kv_len))
    if "scale_qk" in method.hooks:
        rows = min(rows, method.segment)

    # A chunk of queries at a time, with the keys they see, which may be in two parts.
    contexts = []
    with without_autocast(device):
        for first in range(0, s, rows):
            last = min(first + rows, s)
            queries = range(start + first, start + last)
            ranges = key_ranges(mode, queries)
            parts = [stored(keys, mode, missing) for keys in ranges]
            values = [value[:, :, part] for part in parts]
            scores = _scores(
                query[:, :, first:last],
                [key[:, :, part] for part in parts],
                method=method,
                mode=mode,
                queries=queries,
                ranges=ranges,
                scale=scale,
                tables_at=tables_at,
            )
            if decay_sums is not None:
                query_sums = decay_sums[:, :, -s:, None]
                query_sums = query_sums[:, :, first:last]  # [b, h, c, 1]
                sums_of_parts = [decay_sums[:, :, None, part] for part in parts]
                key_sums = torch.cat(sums_of_parts, dim=-1)  # [b, h, 1, l]
                scores = scores + (query_sums - key_sums).to(scores.dtype)  # [b, h, c, l]
            context = _by_kv_head(scores.softmax(dim=-1), torch.cat(values, dim=2))
            contexts.append(context.to(query.dtype))
    return torch.cat(contexts, dim=2)


def key_ranges(mode: AttentionMode, queries: range) -> list[range]:
    """The positions of the keys that a chunk of queries attends to, some of which may be masked."""
    sinks = mode.span.sinks
    first_key = mode.span.first_key(queries.start)
    end = queries.stop
    if sinks == 0:
        return [range(first_key, end)]
    if first_key <= sinks and not mode.reindexed:
        return [range(end)]
    ranges = range(min(sinks, end)), range(max(sinks, first_key), end)
    return [keys for keys in ranges if len(keys)]


def missing_keys(mode: AttentionMode, start: int, s: int, t: int) -> int:
    """How many keys are missing if there are t for the positions up to the last of s queries, the
    first at `start`.

    Raises ValueError if there are more keys than positions, and if a query sees a missing key.
    """
    sinks = mode.span.sinks
    missing = start + s - t
    if start < 0 or missing < 0:
        raise ValueError(
            f"{s} queries from position {start} on, and {t} keys: there must be at least {s} keys, "
            "and none after the last query; pass the keys of all positions up to it, and "
            f"start={max(0, t - s)} (the default)"
        )
    if missing and mode.span.first_key(start) < sinks + missing:
        raise ValueError(
            f"{t} keys for the positions 0 to {start + s - 1}: those of {sinks} to "
            f"{sinks + missing - 1} are missing, but the query at position {start} attends to the "
            f"keys from {mode.span.first_key(start)} on; pass them too"
        )
    return missing


def stored(keys: range, mode: AttentionMode, missing: int) -> slice:
    """The places of keys of `key_ranges` among those of a text that lacks `missing` keys, after the
    sinks and before the window.
    """
    begin = keys.start
    if begin >= mode.span.sinks:
        begin -= missing
    return slice(begin, begin + len(keys))


class Pairs(NamedTuple):
    """A chunk of queries and a range of keys.

    Attributes:
        mask: bool `[c, l]`, True where the query does not see the key.
        query_positions, key_positions: `[c]` and `[l]` on the CPU, as the mode counts them.
        distance: of visible pairs, before a map, `[c, l]`.
    """

    mask: Tensor
    query_positions: Tensor
    key_positions: Tensor
    distance: Tensor

    @classmethod
    def of(cls, mode: AttentionMode, queries: range, keys: range, device: torch.device) -> "Pairs":
        """For ranges of positions in the text."""
        span = mode.span
        mask = span.mask(queries, keys, device)  # [c, l]
        query_positions = torch.arange(queries.start, queries.stop, device="cpu")
        key_positions = torch.arange(keys.start, keys.stop, device="cpu")
        if mode.reindexed and keys.start < span.sinks:
            # In the cache, the query has the last of sinks + window positions, and the sinks have
            # the first ones.
            query_positions = query_positions.clamp(max=span.max_kv_len(queries.stop) - 1)
        query = positions_on(query_positions, device)
        key = positions_on(key_positions, device)
        distance = (query[:, None] - key).masked_fill(mask, 0)
        return cls(mask, query_positions, key_positions, distance)

    @property
    def nearest(self) -> int:
        """The smallest distance of visible pairs."""
        return max(0, int(self.query_positions[0] - self.key_positions[-1]))

    @property
    def farthest(self) -> int:
        """The largest distance of visible pairs."""
        return int(self.query_positions[-1] - self.key_positions[0])

    def lookup(self, table: Tensor) -> Tensor:
        """The values of a table `[h, n]` over the distances from `nearest` on, `[h, c, l]`."""
        index = self.distance - self.nearest
        index.clamp_(min=0)
        return table[:, index]


class _Range(NamedTuple):
    """A chunk of queries and a range of keys: queries after rotation `[b, h, c, d]`, and scale *
    q.k `[b, h, c, l]`.
    """

    query: Tensor
    scores: Tensor
    pairs: Pairs


def _scores(
    query: Tensor,
    parts: list[Tensor],
    method: PositionalMethod,
    mode: AttentionMode,
    queries: range,
    ranges: list[range],
    scale: float,
    tables_at: Tables,
) -> Tensor:
    """The final scores of a chunk `[b, h, c, l]`, -inf for masked pairs, for all ranges of keys
    together. parts: the keys of each range.
    """
    products = []
    for key, keys in zip(parts, ranges, strict=True):
        part = _range_products(
            query,
            key,
            method=method,
            mode=mode,
            queries=queries,
            keys=keys,
            scale=scale,
        )
        products.append(part)

    # All hooks of the method.
    finals: list[Tensor] = []
    if "modify_scores" not in method.hooks:
        for part in products:
            bias, weight = tables_at(part.pairs.nearest, part.pairs.farthest + 1)
            scores = part.scores
            if weight is not None:
                scores = scores * part.pairs.lookup(weight)
            if bias is not None:
                scores = scores + part.pairs.lookup(bias)
            finals.append(scores)
    elif method.per_pair or len(products) == 1:
        finals = [_modified(part, method, mode) for part in products]
    else:
        # Scores that depend on several keys. Masked keys affect others only if they are at most
        # `lookahead` keys away.
        sinks, window = products
        missing = min(method.lookahead, ranges[1].start - ranges[0].stop)
        final = _modified(_joined(sinks, window, missing), method, mode)
        sizes = [len(ranges[0]), missing, len(ranges[1])]
        first, _, second = final.split(sizes, dim=-1)
        finals = [first, second]
    masked = []
    for scores, part in zip(finals, products, strict=True):
        masked.append(scores.masked_fill(part.pairs.mask, float("-inf")))
    return torch.cat(masked, dim=-1)


def _range_products(
    query: Tensor,
    key: Tensor,
    method: PositionalMethod,
    mode: AttentionMode,
    queries: range,
    keys: range,
    scale: float,
) -> _Range:
    pairs = Pairs.of(mode, queries, keys, query.device)
    distance_map = mode.distance_map

    def products(query_positions: Tensor, key_positions: Tensor) -> tuple[Tensor, Tensor]:
        """(rotated queries, scale * q.k `[b, h, c, l]` in at least float32)."""
        states = query, key
        if "rotate" in method.hooks:
            rotation = mode.rotation(method)
            states = rotation.rotate(*states, query_positions, key_positions)
        rotated = states[0]
        if "scale_qk" in method.hooks:
            states = method.scale_qk(*states, query_positions, key_positions)
        left, right = states
        scores = _by_kv_head(left, right.transpose(-1, -2))
        return rotated, scores * scale

    # A rotation with a map has other positions for far pairs. Most ranges have both kinds of pairs.
    positions = pairs.query_positions, pairs.key_positions
    if distance_map is None or not method.turns or pairs.farthest < distance_map.near:
        return _Range(*products(*positions), pairs)
    _, far = products(*distance_map.far_positions(*positions))
    if pairs.nearest >= distance_map.near:
        return _Range(query, far, pairs)
    rotated, near = products(*positions)
    scores = torch.where(pairs.distance < distance_map.near, near, far)
    return _Range(rotated, scores, pairs)


def _joined(sinks: _Range, window: _Range, missing: int) -> _Range:
    """Both ranges, with `missing` masked keys between them, and without distances."""
    first = sinks.pairs
    second = window.pairs
    # The scores of the sinks and of the keys after them, and the same of the mask.
    scores = F.pad(sinks.scores, (0, missing))
    mask = F.pad(first.mask, (0, missing), value=True)
    between = first.key_positions[-1] + 1 + torch.arange(missing, device="cpu")
    pairs = second._replace(
        mask=torch.cat((mask, second.mask), dim=-1),
        key_positions=torch.cat((first.key_positions, between, second.key_positions)),
    )
    scores = torch.cat((scores, window.scores), dim=-1)
    return window._replace(scores=scores, pairs=pairs)


def _modified(part: _Range, method: PositionalMethod, mode: AttentionMode) -> Tensor:
    """The method's final scores."""
    pairs = part.pairs
    first = 0
    end = int(pairs.query_positions[-1]) + 1
    if method.shift_invariant:  # its table need not begin at distance 0
        first = pairs.nearest
        end = pairs.farthest + 1
    device = part.scores.device
    chunk = Chunk(
        scores=part.scores,
        query=part.query,
        query_positions=pairs.query_positions - first,
        key_positions=pairs.key_positions,
        mask=pairs.mask,
        table=score_table(method, end, device, distance_map=mode.distance_map, first=first),
    )
    return method.final_scores(chunk)


def _by_kv_head(left: Tensor, right: Tensor) -> Tensor:
    """`[b, h, c, n]` @ `[b, g, n, m]` -> `[b, h, c, m]` in at least float32. The rows of all heads
    that share a key/value head are one matrix.
    """
    dtype = torch.promote_types(right.dtype, torch.float32)
    rows = left.to(dtype).unflatten(1, (right.shape[1], -1))  # [b, g, h/g, c, n]
    rows = rows.flatten(2, 3)  # [b, g, h/g c, n]
    products: Tensor = rows @ right.to(dtype)
    products = products.unflatten(2, (-1, left.shape[2]))  # [b, g, h/g, c, m]
    return products.flatten(1, 2)
