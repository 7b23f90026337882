"""PyTorch's FlexAttention: as a backend, and `score_mod` for models that call FlexAttention
themselves.

On a GPU FlexAttention is compiled, for each number of queries and keys, and sums the tables'
gradients with atomics, so two runs may differ in the last bits. For a single query it is not
compiled: in decoding, each token would need another kernel, and there is only one row of scores. On
a CPU it is not compiled and has no backward pass.

Legend: b batch, s query length, t key length, h heads, g key/value heads, d head size, δ distance.
"""

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kerple.attention.backend import Backend
from kerple.attention.call import AttentionCall
from kerple.attention.documents import Documents
from kerple.attention.tables import tables
from kerple.positional import PositionalMethod

# Queries and keys of a block: FlexAttention skips blocks without visible pairs.
BLOCK = 128
# torch.compile's limit is 8, after which it would run FlexAttention uncompiled, with all scores in
# memory.
MAX_KERNELS = 64
# FlexAttention's score_mod: (score, batch, head, query index, key index) -> score.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# (batch, query index, key index) -> distance.
Distance = Callable[[Tensor, Tensor, Tensor], Tensor]


def score_mod(
    method: PositionalMethod, query: Tensor, key: Tensor, *, offset: int | None = None
) -> ScoreMod:
    """A positional method as a `score_mod`: weight(δ) * score + bias(δ), and -inf for keys after
    the query.

        flex_attention(query, key, value, score_mod=score_mod(method, query, key),
        block_mask=block_mask)

    Bias and weight are evaluated here, as tables over the distances 0 ... t - 1. Create a new
    score_mod after each optimizer step and for other lengths. Gradients reach the method's
    parameters where FlexAttention computes gradients: compiled, on a GPU.

    Args:
        method: a method whose bias or weight is a function of the distance.
        query, key: `[b, h, s, d]` and `[b, g, t, d]`, as for FlexAttention.
        offset: the position of the first query. By default t - s: the queries are the last
            positions. In a cache with free places behind the last position, the number of positions
            before the queries.

    Attention is causal without a `block_mask`, too; a causal `block_mask` saves the time for masked
    keys. Positions beyond the t keys give NaN: the score_mod was created for shorter tensors. Fewer
    queries than s are the first of them, because FlexAttention tells a score_mod the index of a
    query, but not the number of queries.

    Raises ValueError for a method that has neither bias nor weight, and for queries beyond the
    keys.
    """
    if not method.hooks & {"bias", "weight"}:
        hint = ""
        if "rotate" in method.hooks:
            hint = "; apply its rotate to queries and keys before attention"
        if "modify_scores" in method.hooks:
            hint = (
                "; its modify_scores uses the scores of other heads or keys, which a score_mod "
                "cannot access"
            )
        if "decay" in method.hooks:
            hint = (
                "; append its decay to queries, keys and values before attention "
                "(kerple.positional.append_decay)"
            )
        raise ValueError(
            f"{type(method).__name__} has no bias or weight over distance, so it has no "
            f"score_mod{hint}"
        )

    # Where the queries are among the keys.
    s = query.shape[-2]
    t = key.shape[-2]
    first = t - s
    if offset is not None:
        first = offset
    if not 0 <= first <= t - s:
        raise ValueError(
            f"score_mod: {s} queries from position {first} do not fit into {t} keys; check offset"
        )
    bias, weight = tables(method, t, key.device)
    modify = table_score_mod(bias, weight, lambda batch, query, key: query + first - key)

    def causal(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        known = (query + first < t) & (key < t)
        score = torch.where(known, modify(score, batch, head, query, key), float("nan"))
        return torch.where(known & (query + first < key), float("-inf"), score)

    return causal


def table_score_mod(
    bias: Tensor | None, weight: Tensor | None, distance_of: Distance, causal: bool = True
) -> ScoreMod:
    """weight(δ) * score + bias(δ) with tables over distance, `[h, length]`; see `score_mod`.

    Keys beyond the tables, which a mask excludes, get the values of the last distance.
    """
    last = min(table.shape[-1] for table in (bias, weight) if table is not None) - 1
    nearest = -last
    if causal:
        nearest = 0

    def value(table: Tensor, head: Tensor, distance: Tensor) -> Tensor:
        if causal:
            return table[head, distance]
        if table.dim() == 2:
            return table[head, distance.abs()]
        return table[(distance < 0).long(), head, distance.abs()]

    def modify(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = distance_of(batch, query, key).clamp(min=nearest, max=last)
        if weight is not None:
            score = score * value(weight, head, distance)
        if bias is not None:
            score = score + value(bias, head, distance)
        return score

    return modify


def flex_attention(call: AttentionCall) -> Tensor:
    """Like `attend`, without dropout, and without gradients on a CPU.

    Raises RuntimeError if more than MAX_KERNELS kernels would have to be compiled.
    """
    # Which pairs are visible, and their distances.
    span = call.span
    device = call.query.device
    if call.documents is not None:
        mask, distance_of = _document_mask(call, call.documents)
    else:
        mask = _block_mask(call.q_len, call.kv_len, span.window, device, span.causal)
        distance_of = lambda batch, query, key: query + call.offset - key  # noqa: E731

    # What happens to their scores.
    modify = None
    if call.has_tables:
        modify = table_score_mod(call.tables.bias, call.tables.weight, distance_of, span.causal)
    if call.key_mask is not None:
        modify = _masked_score_mod(modify, call.key_mask)

    run = _flex_module().flex_attention
    if device.type == "cuda" and call.q_len > 1 and not torch.compiler.is_compiling():
        run = _run_compiled
    context: Tensor = run(
        call.query,
        call.key,
        call.value,
        score_mod=modify,
        block_mask=mask,
        scale=call.scale,
        enable_gqa=call.queries_per_kv > 1,
    )
    return context


def _masked_score_mod(modify: ScoreMod | None, key_mask: Tensor) -> ScoreMod:
    """The same score_mod, with -inf for the keys that take no part."""

    def masked(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if modify is not None:
            score = modify(score, batch, head, query, key)
        return torch.where(key_mask[batch, key], score, float("-inf"))

    return masked


def _flex_module() -> ModuleType:
    """Imported on first use, since the import takes a second."""
    import torch.nn.attention.flex_attention as flex

    return flex


@lru_cache(maxsize=1)
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(_flex_module().flex_attention, dynamic=False, fullgraph=True)


def _run_compiled(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Compiled FlexAttention. Raises RuntimeError instead of running it uncompiled."""
    from torch._dynamo import config, exc  # the import takes a second

    limit = max(MAX_KERNELS, config.recompile_limit)
    with config.patch(recompile_limit=limit):
        try:
            context: Tensor = _compiled_flex_attention()(query, key, value, **options)
        except exc.FailOnRecompileLimitHit as error:
            raise RuntimeError(
                "attention-backend 'flex' compiles a kernel for each number of queries and keys, "
                f"and this process has compiled {limit}; use another backend or fewer different "
                "lengths, or raise torch._dynamo.config.recompile_limit"
            ) from error
    return context


def _document_mask(call: AttentionCall, documents: Documents) -> tuple[Any, Distance]:
    """The `BlockMask` of a call with documents, and the distances in them."""
    places = documents.places(slice(call.offset, call.kv_len), call.offset)
    query_ids = documents.ids[:, places]
    query_positions = documents.positions[:, places]
    distances, nearest = _visible_distances(call.kv_len, call.span.window, call.span.causal)

    def distance_of(batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query_positions[batch, query] - documents.positions[batch, key]

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = distance_of(batch, query, key)
        same = query_ids[batch, query] == documents.ids[batch, key]
        return same & (distance >= nearest) & (distance < distances)

    shape = (len(documents.ids), None, call.q_len, call.kv_len)
    mask = _flex_module().create_block_mask(visible, *shape, device=call.query.device)
    return mask, distance_of


def _visible_distances(length: int, window: int | None, causal: bool) -> tuple[int, int]:
    """The smallest distance that is too large to be visible, and the smallest visible one."""
    distances = length
    if window is not None:
        distances = window
    if causal:
        return distances, 0
    return distances, 1 - distances


@lru_cache(maxsize=64)
def _block_mask(
    s: int, t: int, window: int | None, device: torch.device, causal: bool = True
) -> Any:
    """The `BlockMask` of s queries, the last (if not causal, the first) of t positions.
    `create_block_mask` would need a matrix `[s, t]`.
    """
    distances, nearest = _visible_distances(max(s, t), window, causal)
    offset = 0
    if causal:
        offset = t - s

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + offset - key
        return (distance >= nearest) & (distance < distances)

    # Autograd cannot save inference tensors, and training may use a mask that an evaluation cached.
    with torch.inference_mode(False):
        # The first and last positions of each block, [n, 1] of queries and [m] of keys.
        first_query = torch.arange(0, s, BLOCK, device=device)[:, None] + offset
        last_query = (first_query + BLOCK - 1).clamp(max=offset + s - 1)
        first_key = torch.arange(0, t, BLOCK, device=device)
        last_key = first_key + BLOCK - 1

        # Blocks with some visible pairs, and blocks whose pairs are all visible.
        some = (first_key + nearest <= last_query) & (last_key > first_query - distances)
        complete = (last_key < t) & (first_query + BLOCK <= offset + s)
        every = (
            complete & (last_key + nearest <= first_query) & (first_key > last_query - distances)
        )
        blocks = *_visible_first(some & ~every), *_visible_first(every)
        return _flex_module().BlockMask.from_kv_blocks(
            *blocks, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(s, t)
        )


def _visible_first(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Bool `[blocks of queries, blocks of keys]` -> the number of True blocks of keys in each row,
    and the indices of all, the True ones first; int32, for one sample and head.
    """
    counts = blocks.sum(dim=1)
    indices = blocks.int().argsort(dim=1, descending=True, stable=True)
    return counts.int()[None, None], indices.int()[None, None]


FLEX = Backend("flex", flex_attention, dropout=False, masks_documents=True, training_on_cpu=False)
