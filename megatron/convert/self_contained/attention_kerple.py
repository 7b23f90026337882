"""Causal attention with a positional method: softmax(weight * q.k / sqrt(d) + bias) v, or with scores from the method.

`attn_implementation` selects how it is computed:

    eager             in PyTorch operations: scores are float32, for a few queries at a time
    sdpa              PyTorch's scaled_dot_product_attention, with the bias in its mask
    flex_attention    PyTorch's FlexAttention, with bias and weight in its score_mod

In an inference mode, attention is that of `attention_attend.py`, or PyTorch's where that is possible. Keys are
cached before rotation.

Legend: b batch, s new tokens, t all tokens (cached and new), h heads (there may be fewer of keys and values), d head
size, e hidden size, c and l queries and keys of a chunk.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv

from .attention_attend import Pairs, attend_in_mode, key_ranges, missing_keys, stored
from .attention_mode import AttentionMode
from .attention_tables import lookup
from .attention_tables import tables as tables_of
from .cache_kerple import BoundedLayer
from .positional_decay import append_decay, appended_sums, decay_sums, extra_dimensions

# Number of queries whose scores or masks are in memory at a time.
CHUNK = 128


def is_relative(method, mode):
    """Whether the mode counts the positions of rotated queries and keys as in the text."""
    return mode is None or not ("rotate" in method.hooks and (mode.reindexed or mode.distance_map is not None))


# Name -> whether it can compute a method's attention in a mode (None: as in training).
IMPLEMENTATIONS = {
    "eager": lambda method, mode: True,
    "sdpa": lambda method, mode: (
        not method.hooks & {"modify_scores", "scale_qk", "weight"} and is_relative(method, mode)
    ),
    "flex_attention": lambda method, mode: mode is None and not method.hooks & {"modify_scores", "scale_qk"},
}


@dataclass
class Layout:
    """Which of the keys are padding, and the positions of the tokens.

    The distance of two tokens of a row is the number of tokens between them that are not padding, wherever the padding
    is. Positions themselves only matter to methods that change the embeddings, queries, keys or scores.

    Attributes:
        cached: number of tokens in the cache; a tensor in a compiled graph with a static cache.
        total: number of keys, t; the size of a static cache in a compiled graph.
        window: number of keys that a query sees, including its own; None: all.
        positions: int64 `[b, s]`, or `[1, s]` if all rows have the same, on the CPU; None if the method needs none.
        padded: bool `[b, t]`, True for padding; None if there is none.
        text_positions: int64 `[b, t]`, positions of all tokens from 0 on; None if distances are those of the indices.
        starts: for each row, the index of its position 0; None if it is 0 in all rows.
        texts: (row, indices among the new tokens, indices among the keys, layout) of texts to attend to one by one.
        mode: the inference mode, for texts of a length; None: as in training.
        uncacheable: why the keys of these tokens cannot be cached; None if they can.
    """

    cached: int | Tensor
    total: int
    window: int | None = None
    positions: Tensor | None = None
    padded: Tensor | None = None
    text_positions: Tensor | None = None
    starts: list[int] | None = None
    texts: list[tuple[int, Tensor, Tensor, "Layout"]] = field(default_factory=list)
    mode: AttentionMode | None = None
    uncacheable: str | None = None

    @classmethod
    def of(cls, methods, hidden, attention_mask, position_ids, cache, window, mode=None) -> "Layout":
        """For new tokens `hidden` `[b, s, e]` and the methods of all layers. Raises ValueError for a mask that is not
        `[b, t]`, for positions that are not consecutive in a text, and for a cache that does not fit the mode.
        """
        batch, new = hidden.shape[:2]
        if mode is not None and any(hasattr(layer, "max_cache_len") for layer in getattr(cache, "layers", ())):
            raise ValueError("static caches are not supported in an inference mode; use a dynamic one")
        by_text = mode is not None or any(method.hooks & {"modify_scores", "scale_qk"} for method in methods)
        needs_positions = by_text or any(method.hooks & {"embed", "rotate"} for method in methods)
        # Graphs without breaks, in which values are unknown, are only possible for methods that need no positions.
        traced = torch.compiler.is_compiling() and not needs_positions
        cached = 0 if cache is None else cache.get_seq_length()
        if isinstance(cached, Tensor):
            # A static cache changes its length in place.
            cached = cached.clone() if traced else int(cached)
        layout = cls(cached, cache.layers[0].max_cache_len if isinstance(cached, Tensor) else cached + new, window)
        if attention_mask is not None:
            # The mask of a static cache is longer, as its last places are empty.
            if attention_mask.dim() != 2 or attention_mask.shape[1] < layout.total:
                raise ValueError(
                    f"attention_mask must be [batch, {layout.total}] (cached and new tokens), not "
                    f"{[*attention_mask.shape]}"
                )
            layout._set_padding(attention_mask[:, : layout.total].bool(), traced)
        if position_ids is not None and new > 1:
            layout._check_positions(position_ids.expand(batch, new))
        if needs_positions:
            layout._set_positions(position_ids, batch, new)
            padding = layout.text_positions if mode is None else layout.padded
            if padding is not None and by_text:
                layout._set_texts(cache)
        if mode is not None:
            layout._set_mode(mode, cache)
        return layout

    def _set_padding(self, text: Tensor, traced: bool) -> None:
        if not traced:
            if text.all():
                return
            segments = text[:, 0].long() + (text[:, 1:] & ~text[:, :-1]).sum(dim=1)
        self.padded = ~text
        if traced or (segments > 1).any():
            self.text_positions = (text.long().cumsum(dim=1) - 1).clamp(min=0)

    def _check_positions(self, positions: Tensor) -> None:
        jumps, new = positions.diff(dim=1) != 1, positions.shape[1]
        if self.padded is not None:
            jumps = jumps & ~(self.padded[:, -new + 1 :] | self.padded[:, -new:-1])
        if not jumps.any():
            return
        if self.padded is not None or self.cached:
            raise ValueError(
                "position_ids must be consecutive in each text; to pack several texts in a row, give neither "
                "attention_mask nor cached tokens"
            )
        self.uncacheable = "packed sequences (position_ids with jumps) cannot be cached; use use_cache=False"
        for row, row_jumps in enumerate(jumps):
            borders = [0, *(row_jumps.nonzero().flatten() + 1).tolist(), new]
            for first, last in pairwise(borders):
                indices = torch.arange(first, last, device=positions.device)
                layout = Layout(0, last - first, self.window, starts=[-int(positions[row, first])])
                self.texts.append((row, indices, indices, layout))

    def _set_positions(self, positions: Tensor | None, batch: int, new: int) -> None:
        if positions is None and self.padded is None:
            self.positions = torch.arange(self.cached, self.cached + new, device="cpu")[None]
            return
        if positions is None:
            positions = ((~self.padded).long().cumsum(dim=1) - 1).clamp(min=0)[:, -new:]
        # Methods read positions on the CPU.
        positions = positions.cpu().expand(batch, new)
        first = torch.zeros(batch, 1, dtype=torch.int64, device="cpu")
        if self.padded is not None:
            first = (~self.padded[:, -new:]).long().argmax(dim=1, keepdim=True).cpu()
        starts = self.cached + first - positions.gather(1, first)
        self.starts = starts.flatten().tolist() if starts.any() else None
        self.positions = positions[:1] if (positions == positions[:1]).all() else positions

    def _set_texts(self, cache) -> None:
        first, sinks = 0, 0
        if cache is not None and cache.layers and isinstance(cache.layers[0], BoundedLayer):
            first, sinks = cache.layers[0].first, cache.layers[0].sinks
        for row, padded in enumerate(self.padded):
            keys = (~padded).nonzero().flatten()
            queries = keys[keys >= self.cached] - self.cached
            if len(queries):
                cached = len(keys) - len(queries)
                position = self.positions[row % len(self.positions), int(queries[0])]
                layout = Layout(cached, len(keys), self.window, starts=[cached - int(position)])
                if first:  # the cache has lost tokens between the sinks and this one
                    kept = keys[(keys < first) & (keys < keys[0] + sinks)] - keys[0]
                    keys = torch.cat((kept, keys[keys >= first] - first + sinks))
                self.texts.append((row, queries, keys, layout))

    def _set_mode(self, mode, cache) -> None:
        texts = [layout for *_, layout in self.texts]
        starts = self.starts if self.padded is None and not texts else [text.starts[0] for text in texts]
        if any(starts or ()):
            raise ValueError("in an inference mode, position_ids must count the tokens of each text from 0")
        padded = self.padded
        if mode.span.window is not None and padded is not None and (padded[:, 1:] & ~padded[:, :-1]).any():
            self.uncacheable = (
                "in an inference mode with a window, tokens that are followed by padding cannot be cached; pad on the "
                "left, or use use_cache=False"
            )
        length = getattr(cache, "max_length", None)
        if mode.length_dependent and (length is None or length < self.total):
            length = None
            self.uncacheable = (
                f"this inference mode depends on the length of the text: give past_key_values="
                f"model.new_cache(max_length=N) with N of at least {self.total} tokens, or use_cache=False"
            )
        for layout in (self, *texts):
            layout.mode = mode.at_length(layout.total if length is None else length)

    def embed(self, method: nn.Module, hidden: Tensor) -> Tensor:
        """The method's position embeddings added to `hidden` `[b, s, e]`."""
        if "embed" not in method.hooks:
            return hidden
        rows = hidden.split(1) if len(self.positions) > 1 else [hidden]
        return torch.cat([method.embed(row, positions) for row, positions in zip(rows, self.positions, strict=True)])

    def rotate(self, method: nn.Module, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The method's rotation of query and key, `[b, h, s, d]`. In an inference mode, which rotates cached keys too,
        queries are only scaled.
        """
        if self.mode is not None:
            return self.mode.scale_query(query, self.positions[:, None]), key
        if "rotate" not in method.hooks:
            return query, key
        rows = zip(query.split(1), key.split(1), strict=True) if len(self.positions) > 1 else [(query, key)]
        rotated = [method.rotate(*row, p, p) for row, p in zip(rows, self.positions, strict=True)]
        queries, keys = zip(*rotated, strict=True)
        return torch.cat(queries), torch.cat(keys)

    def append_decay(self, method, hidden, query, key, value, cache, layer):
        """Query, key and value with the dimensions of the method's decay, if it has one. Padding has no decay."""
        if "decay" not in method.hooks:
            return query, key, value
        decay, scale = method.decay(hidden), query.shape[3] ** -0.5
        if self.padded is not None:
            new = torch.arange(decay.shape[2], device=decay.device) + self.cached
            decay = decay.masked_fill(self.padded[:, None, new], 0.0)
        last_key = None
        if cache is not None and isinstance(self.cached, Tensor):
            last_key = cache.layers[layer].keys[:, :, (self.cached - 1).clamp(min=0).reshape(1)] * (self.cached > 0)
        elif cache is not None and self.cached:
            keys = cache.layers[layer].keys
            end = self.cached if self.mode is None else keys.shape[2]
            last_key = keys[:, :, end - 1 : end]
        previous = None if last_key is None else appended_sums(last_key, query.shape[1] // key.shape[1], scale)
        return append_decay(query, key, value, decay_sums(decay, previous), scale)


class Tables(NamedTuple):
    """A method's values for distances 0 ... t-1: float32 `bias` `[h, t]`, or the table for modify_scores; `weight`."""

    bias: Tensor | None
    weight: Tensor | None

    @classmethod
    def of(cls, method: nn.Module, layout: Layout, device: torch.device) -> "Tables":
        if layout.mode is not None:
            return cls(None, None)
        distance = torch.arange(layout.total, dtype=torch.float32, device=device)
        with torch.autocast(device.type, enabled=False):
            if "modify_scores" in method.hooks:
                return cls(method.table(distance), None)
            return cls(
                method.bias(distance) if "bias" in method.hooks else None,
                method.weight(distance) if "weight" in method.hooks else None,
            )


def attend(query, key, value, method, tables, layout, dropout, implementation, output_attentions):
    """The context `[b, h, s, d]` and the probabilities `[b, h, s, t]`, or None without `output_attentions`.

    query `[b, h, s, d]` are the new tokens. key and value `[b, h, t, d]` are the cached and new ones. If a static cache
    has unused places after them, their probabilities are 0.
    """
    places = key.shape[2]
    if layout.texts:
        return attend_to_texts(query, key, value, method, tables, layout, dropout, implementation, output_attentions)
    key, value = key[:, :, : layout.total], value[:, :, : layout.total]
    extra = extra_dimensions(key.dtype, query.shape[1] // key.shape[1]) if "decay" in method.hooks else 0
    scale = (query.shape[3] - extra) ** -0.5
    if layout.mode is not None:
        if dropout:
            raise ValueError("attention_dropout must be 0 in an inference mode")
        attention = sdpa_in_mode if implementation == "sdpa" else attend_in_mode
        mode = layout.mode.for_layer(method)
        return attention(query, key, value, method, mode, start=layout.cached, scale=scale), None
    if implementation == "eager" or output_attentions:
        places = places if output_attentions else 0
        with torch.autocast(query.device.type, enabled=False):
            return eager_attention(query, key, value, method, tables, layout, dropout, places, scale)
    attention = sdpa_attention if implementation == "sdpa" else flex_attention
    return attention(query, key, value, tables, layout, dropout, scale), None


def attend_to_texts(query, key, value, method, tables, layout, dropout, implementation, output_attentions):
    """`attend` to each text on its own."""
    context = torch.zeros_like(query)
    probabilities = query.new_zeros(*query.shape[:3], key.shape[2]) if output_attentions else None
    options = dropout, implementation, output_attentions
    for row, queries, keys, text_layout in layout.texts:
        states = query[row, :, queries], key[row, :, keys], value[row, :, keys]
        text_context, text_probabilities = attend(
            *(state[None] for state in states), method, tables, text_layout, *options
        )
        context[row, :, queries] = text_context[0]
        if probabilities is not None:
            probabilities[row, :, queries[:, None], keys] = text_probabilities[0]
    return context, probabilities


def chunks(layout, new, rows, device):
    """For each chunk of queries: (slice of the queries, number of keys, distances `[b or 1, c, l]`, mask).

    The mask `[b or 1, 1, c, l]` is True for keys that a query must not see. A padded query sees itself, so that its
    softmax is not empty.
    """
    for first in range(0, new, rows):
        last = min(first + rows, new)
        end = layout.total - new + last if isinstance(layout.cached, int) else layout.total
        queries = torch.arange(first, last, device=device) + layout.cached
        distance = queries[:, None] - torch.arange(end, device=device)
        later, other, distance = distance < 0, distance != 0, distance[None]
        if layout.text_positions is not None:
            distance = layout.text_positions[:, queries, None] - layout.text_positions[:, None, :end]
        mask = later[None, None] if layout.window is None else (later | (distance >= layout.window))[:, None]
        if layout.padded is not None:
            mask = mask | (layout.padded[:, None, None, :end] & other)
        yield slice(first, last), end, distance.clamp(min=0), mask


def eager_attention(query, key, value, method, tables, layout, dropout, places, scale):
    """`attend` in float32 (float64 for float64 inputs). places: last dimension of the probabilities; 0 for None."""
    new = query.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    keys, values = (repeat_kv(states, query.shape[1] // key.shape[1]).to(dtype) for states in (key, value))
    contexts, all_probabilities = [], []
    rows = new if places else CHUNK
    rows = min(rows, method.segment) if "scale_qk" in method.hooks else rows
    for part, end, distance, mask in chunks(layout, new, rows, query.device):
        query_rows, key_rows = query[:, :, part], keys[:, :, :end]
        if method.hooks & {"scale_qk", "modify_scores"}:
            query_positions = torch.arange(end - (part.stop - part.start), end, device="cpu")
            key_positions = torch.arange(end, device="cpu")
        if "scale_qk" in method.hooks:
            query_rows, key_rows = method.scale_qk(query_rows, key_rows, query_positions, key_positions)
        scores = query_rows.to(dtype) @ key_rows.transpose(-1, -2) * scale
        if "modify_scores" in method.hooks:
            scores = modified_scores(
                method, tables.bias, scores, query_rows, query_positions, key_positions, mask, layout.starts
            )
        else:
            if tables.weight is not None:
                scores = scores * lookup(tables.weight, distance)
            if tables.bias is not None:
                scores = scores + lookup(tables.bias, distance)
        probabilities = F.dropout(scores.masked_fill(mask, float("-inf")).softmax(dim=-1), dropout)
        contexts.append((probabilities @ values[:, :, :end]).to(query.dtype))
        if places > end:
            probabilities = F.pad(probabilities, (0, places - end))
        all_probabilities.append(probabilities.to(query.dtype) if places else None)
    if not places:
        return torch.cat(contexts, dim=2), None
    # Of one chunk, the tensor itself, so that its gradient can be retained.
    return torch.cat(contexts, dim=2), all_probabilities[0] if len(contexts) == 1 else torch.cat(
        all_probabilities, dim=2
    )


def modified_scores(method, table, scores, query, query_positions, key_positions, mask, starts):
    """The method's final scores `[b, h, c, l]`; row by row if the rows differ in their masks, or if their positions are
    not their indices.
    """
    if starts is None and (len(mask) == 1 or method.per_pair):
        return method.final_scores(scores, query, query_positions, key_positions, mask[0, 0], table)
    starts = [0] * len(scores) if starts is None else starts
    rows = zip(scores.split(1), query.split(1), mask[:, 0].expand(len(starts), -1, -1), starts, strict=True)
    return torch.cat(
        [
            method.final_scores(row_scores, row_query, query_positions - start, key_positions - start, row_mask, table)
            for row_scores, row_query, row_mask, start in rows
        ]
    )


def sdpa_attention(query, key, value, tables, layout, dropout, scale):
    """`attend` for methods with a bias at most. On a GPU, the bias is rounded to the dtype of the query."""
    new = query.shape[2]
    options = {"dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1], "scale": scale}
    if tables.bias is None and layout.padded is None and layout.window is None and new == layout.total:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    dtype = torch.promote_types(query.dtype, torch.float32) if query.device.type == "cpu" else query.dtype
    contexts = []
    for part, end, distance, mask in chunks(layout, new, CHUNK, query.device):
        if tables.bias is None:
            attn_mask = ~mask
        else:
            attn_mask = lookup(tables.bias, distance).masked_fill(mask, float("-inf")).to(dtype)
        keys, values = key[:, :, :end], value[:, :, :end]
        contexts.append(F.scaled_dot_product_attention(query[:, :, part], keys, values, attn_mask=attn_mask, **options))
    return torch.cat(contexts, dim=2)


def sdpa_in_mode(query, key, value, method, mode, *, start, scale):
    """`attend_in_mode` for methods with a bias at most, which is rounded on a GPU as in `sdpa_attention`."""
    new, device = query.shape[2], query.device
    missing = missing_keys(mode, start, new, key.shape[2])
    grouped = query.shape[1] != key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32) if device.type == "cpu" else query.dtype
    contexts = []
    for first in range(0, new, CHUNK):
        rows = query[:, :, first : first + CHUNK]
        queries = range(start + first, start + first + rows.shape[2])
        rotated_rows, keys, values, masks = rows, [], [], []
        for part in key_ranges(mode, queries):
            pairs, places = Pairs.of(mode, queries, part, device), stored(part, mode, missing)
            rotated = key[:, :, places]
            if "rotate" in method.hooks:
                positions = pairs.query_positions, pairs.key_positions
                rotated_rows, rotated = mode.rotation(method).rotate(rows, rotated, *positions)
            with torch.autocast(device.type, enabled=False):
                bias, _ = tables_of(
                    method, pairs.farthest + 1, device, distance_map=mode.distance_map, first=pairs.nearest
                )
            bias = torch.zeros(1, 1, 1, device=device) if bias is None else pairs.lookup(bias)
            masks.append(bias.masked_fill(pairs.mask, float("-inf")).to(dtype))
            keys.append(rotated)
            values.append(value[:, :, places])
        keys, values, mask = torch.cat(keys, dim=2), torch.cat(values, dim=2), torch.cat(masks, dim=2)
        contexts.append(
            F.scaled_dot_product_attention(rotated_rows, keys, values, attn_mask=mask, enable_gqa=grouped, scale=scale)
        )
    return torch.cat(contexts, dim=2)


def flex_attention(query, key, value, tables, layout, dropout, scale):
    """`attend` for methods with a bias and a weight at most. On a CPU it is not compiled and has no gradients."""
    from torch.nn.attention import flex_attention as flex
    from transformers.integrations.flex_attention import compile_friendly_flex_attention

    if dropout:
        raise ValueError("flex_attention has no dropout; set attention_dropout to 0 or use another attn_implementation")
    (bias, weight), cached, padded, positions = tables, layout.cached, layout.padded, layout.text_positions

    def distance_of(batch, query_index, key_index):
        if positions is None:
            return query_index + cached - key_index
        return positions[batch, query_index + cached] - positions[batch, key_index]

    def score_mod(score, batch, head, query_index, key_index):
        distance = distance_of(batch, query_index, key_index).clamp(min=0)
        score = score if weight is None else score * weight[head, distance]
        return score if bias is None else score + bias[head, distance]

    def visible(batch, head, query_index, key_index):
        seen = query_index + cached >= key_index
        if layout.window is not None:
            seen = seen & (distance_of(batch, query_index, key_index) < layout.window)
        return seen if padded is None else seen & (~padded[batch, key_index] | (query_index + cached == key_index))

    batch, _, new, _ = query.shape
    rows = None if padded is None else batch
    block_mask = flex.create_block_mask(visible, rows, None, new, key.shape[2], device=query.device)
    grouped = query.shape[1] != key.shape[1]
    options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": grouped, "scale": scale}
    if query.device.type == "cpu":
        return flex.flex_attention(query, key, value, **options)
    return compile_friendly_flex_attention(query, key, value, **options)
