"""Attention as several calls: one per block of queries, per size of documents, or per segment with
its own scales.

Legend: b batch, s query length, t key length, h heads, g key/value heads, d head size, n blocks, B
block size.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kerple.attention.call import AttentionCall
from kerple.attention.documents import Documents
from kerple.attention.span import FULL
from kerple.positional import PositionalMethod
from kerple.positional.functional import positions_on

Run = Callable[[AttentionCall], Tensor]
# The largest number of batch rows times heads in one call: the largest second dimension of a CUDA
# grid.
MAX_BATCH_HEADS = 65_535


def run(call: AttentionCall, compute: Run, *, masks_documents: bool | None = None) -> Tensor:
    """Compute a validated call: by `compute`, in several calls if its documents, blocks or scales
    require them.

    masks_documents: see `Backend`.
    """
    # Documents with a mask stay one call; the others get calls of their own.
    scales = "scale_qk" in call.hooks
    if call.documents is not None and (scales or not _masks_documents(call, masks_documents)):
        if not call.documents.fill_rows:
            return run_documents(call, call.documents, partial(run, compute=compute))
        call = replace(call, documents=None)
    # xPos: segments whose scales stay finite.
    if call.method is not None and scales:
        return run_scaled(call, call.method, partial(run, compute=compute))
    # Blocks. Those of a method that computes the scores are masked instead: it reads positions.
    if call.span.block is not None and call.modify_scores is None:
        if call.kv_len > 2 * call.span.block:
            return run_blocks(call, call.span.block, compute)
        # All keys are in the first two blocks, so every query attends to all keys up to its own
        # position.
        call = replace(call, span=FULL)
    return compute(call)


def _masks_documents(call: AttentionCall, preference: bool | None) -> bool:
    """Whether a mask separates the documents. It costs the scores of masked pairs, but needs one
    call and no values of the ids on the host.
    """
    if call.modify_scores is not None or call.span.block is not None:
        return False
    if preference is not None:
        return preference
    return call.q_len < call.kv_len or torch.compiler.is_compiling()


def run_blocks(call: AttentionCall, block: int, run: Run) -> Tensor:
    """Blockwise causal attention as ordinary causal calls, one per block of queries.

    The keys of a block of queries are its own block and the previous one. All complete blocks have
    the same shape, so they form one call, with the blocks in the batch dimension; several calls if
    a GPU's grid cannot hold all of them.
    """
    offset = call.offset
    end = call.kv_len
    batch, heads, _, _ = call.query.shape
    batch_heads = max(1, batch * heads)
    most = MAX_BATCH_HEADS // batch_heads
    contexts = []
    first = offset
    while first < end:
        # As many complete blocks as one call holds, or the rest of a block.
        number = first // block
        first_key = call.span.first_key(first)
        # The first block of the text has no previous one, so its keys have another shape.
        complete = 0
        if number and first % block == 0:
            complete = min(most, (end - first) // block)
        last = min((number + 1) * block, end)
        if complete:
            last = first + complete * block
        # Within its keys, a block of queries is an ordinary causal call.
        queries = slice(first - offset, last - offset)
        keys = slice(first_key, last)
        part = replace(call.part(queries, keys), span=FULL)
        if complete > 1:
            part = _stacked(part, block)
        context = run(part)
        if complete > 1:
            context = context.unflatten(0, (batch, complete))  # [b, n, h, B, d]
            context = context.transpose(1, 2).flatten(2, 3)  # [b, h, n B, d]
        contexts.append(context)
        first = last
    return joined(contexts)


def joined(contexts: list[Tensor]) -> Tensor:
    """The contexts of consecutive queries as one, `[b, h, s, d]`. A single one is not copied."""
    if len(contexts) == 1:
        return contexts[0]
    return torch.cat(contexts, dim=2)


def _stacked(part: AttentionCall, block: int) -> AttentionCall:
    """Several blocks of queries, and the keys of each, in the batch dimension."""
    # The keys of a block are those of two blocks.
    width = 2 * block
    sums = part.decay_sums
    key_mask = part.key_mask
    if sums is not None:
        sums = _stack_blocks(sums[..., None], width, block)[..., 0]
    if key_mask is not None:
        key_mask = key_mask.unfold(1, width, block).flatten(0, 1)  # [b n, 2 B]
    return replace(
        part,
        query=_stack_blocks(part.query, block, block),
        key=_stack_blocks(part.key, width, block),
        value=_stack_blocks(part.value, width, block),
        decay_sums=sums,
        key_mask=key_mask,
    )


def _stack_blocks(states: Tensor, size: int, step: int) -> Tensor:
    """`[b, h, s, d]` -> `[b n, h, size, d]`: blocks of `size` positions, one starting every `step`
    positions.
    """
    blocks = states.unfold(2, size, step)  # [b, h, n, d, size]
    blocks = blocks.permute(0, 2, 1, 4, 3)  # [b, n, h, size, d]
    return blocks.flatten(0, 1)


def run_documents(call: AttentionCall, documents: Documents, run: Run) -> Tensor:
    """Attention as one call for all documents of equal size and position; zero for padding."""
    batch, heads, q_len, _ = call.query.shape
    groups = documents.groups(q_len)
    if not groups:
        # The sum of no numbers is zero, and has gradients.
        zeros = call.value.new_zeros(call.context_shape)
        tables = call.tables
        for tensor in (
            call.query,
            call.key,
            call.value,
            tables.bias,
            tables.weight,
            call.decay_sums,
        ):
            if tensor is not None:
                zeros = zeros + tensor[..., :0].sum()
        return zeros

    # One copy of all states in the order of the groups, of which each call gets a part.
    query_places, key_places, all_dropped = zip(*groups, strict=True)
    queries = _in_order(call.query, query_places)
    keys = _in_order(call.key, key_places)
    values = _in_order(call.value, key_places)
    all_sums = call.decay_sums
    if all_sums is not None:
        all_sums = all_sums.transpose(1, 2).flatten(0, 1)  # [b t, h]
    contexts = []
    for index, dropped in enumerate(all_dropped):
        sums = key_mask = None
        if all_sums is not None:
            sums = all_sums[key_places[index]].transpose(1, 2)  # [n, h, l]
        if call.key_mask is not None:
            key_mask = call.key_mask.flatten()[key_places[index]]  # [n, l]
        part = replace(
            call,
            query=queries[index],
            key=keys[index],
            value=values[index],
            decay_sums=sums,
            key_mask=key_mask,
            documents=None,
            dropped=dropped,
        )
        context = run(part).transpose(1, 2)  # [n, c, h, v]
        context = context.flatten(0, 1)  # [n c, h, v]
        contexts.append(context)

    # Back in the order of the rows.
    places = torch.cat([part.flatten() for part in query_places])
    context = call.value.new_zeros(batch * q_len, heads, call.value.shape[3])
    context = context.index_copy(0, places, torch.cat(contexts))
    context = context.view(batch, q_len, heads, -1)
    return context.transpose(1, 2)


def _in_order(states: Tensor, places: Sequence[Tensor]) -> list[Tensor]:
    """`[b, h, s, d]` -> `[n, h, c, d]` for each `[n, c]` of the places, as parts of one copy."""
    tokens = states.transpose(1, 2).flatten(0, 1)  # [b s, h, d]
    order = torch.cat([place.flatten() for place in places])
    sizes = [place.numel() for place in places]
    parts = tokens[order].split(sizes)
    ordered = []
    for part, place in zip(parts, places, strict=True):
        part = part.unflatten(0, place.shape)  # [n, c, h, d]
        ordered.append(part.transpose(1, 2))
    return ordered


def run_scaled(call: AttentionCall, method: PositionalMethod, run: Run) -> Tensor:
    """Attention with queries and keys scaled by the method's `scale_qk`.

    Scales are computed for `method.segment` queries at a time, since they must not overflow for the
    keys of these. Keys after a query have other scales than keys before it, so a backend computes
    the products in both directions.
    """
    if not call.span.causal:
        products = partial(_products_in_both_directions, method)
        return run(replace(call, method=None, products=products))
    contexts = []
    for first in range(0, call.q_len, method.segment):
        last = min(first + method.segment, call.q_len)
        position = call.offset + first
        end = call.offset + last
        # Only keys that one of these queries attends to.
        # With blocks, this is the start of a block, so block boundaries stay in place.
        first_key = call.span.first_key(position)
        part = call.part(slice(first, last), slice(first_key, end))
        queries = torch.arange(position, end, device="cpu") + call.dropped
        keys = torch.arange(first_key, end, device="cpu") + call.dropped
        query, key = method.scale_qk(part.query, part.key, queries, keys)
        part = replace(part, query=query, key=key, method=None)
        contexts.append(run(part))
    return joined(contexts)


def _products_in_both_directions(
    method: PositionalMethod,
    query: Tensor,
    key: Tensor,
    queries: Tensor,
    keys: Tensor,
    scale: float,
) -> Tensor:
    """The scaled products `[b, h, c, l]` of queries and keys at these positions, after `scale_qk`.

    Read from right to left, at negative positions, the keys after a query precede it. In each
    direction, the keys on the other side get the scale of the segment's end, since their own would
    overflow; these products are not used.
    """
    group = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group, dim=1)  # [b, h, l, d]
    segments = zip(
        query.split(method.segment, dim=2),
        queries.split(method.segment),
        strict=True,
    )
    products = []
    for part, positions in segments:
        # The scaled states of each direction.
        query_before, key_before = method.scale_qk(
            part, key, positions, keys.clamp(max=int(positions[-1]))
        )
        query_after, key_after = method.scale_qk(
            part, key, -positions, -keys.clamp(min=int(positions[0]))
        )
        # Each pair gets the product of its own direction.
        follows = positions_on(keys, key.device) > positions_on(positions, key.device)[:, None]
        following = query_after @ key_after.transpose(-1, -2)
        preceding = query_before @ key_before.transpose(-1, -2)
        products.append(torch.where(follows, following, preceding))
    return torch.cat(products, dim=2) * scale
