"""Attention of this folder (`attention_*.py`) with the masks, positions and caches of transformers.

`attn_implementation` selects the backend:

    eager             in PyTorch operations: scores are float32, for some queries at a time
    sdpa              PyTorch's scaled_dot_product_attention, with the bias in its mask
    flex_attention    PyTorch's FlexAttention, with bias and weight in its score_mod

Modes with sinks, or with a map of a rotation's distances, have an implementation of their own.

Legend: b batch, s new tokens, t all tokens (cached and new), h heads, g heads of keys and values, d
head size, e hidden size.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_attend import attend_in_mode
from .attention_backend import Requirements, without_autocast
from .attention_chunked import CHUNKED
from .attention_documents import Documents
from .attention_flex import FLEX
from .attention_mode import AttentionMode
from .attention_parts import run, run_documents
from .attention_reference import REFERENCE
from .attention_sdpa import SDPA
from .attention_tables import position_tables
from .cache_kerple import ModeCache
from .positional_decay import append_decay, appended_sums, decay_sums

BACKENDS = {"eager": CHUNKED, "sdpa": SDPA, "flex_attention": FLEX}
POSITION_HOOKS = {"embed", "rotate", "modify_scores", "scale_qk"}
# Arguments without a meaning here. transformers 4 passes cache_position to all models; the others
# are those of kernels for packed sequences, which position_ids describe, too.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
IGNORED = ("cache_position", *PACKING)


def implementations(requirements, mode=None):
    """Those that support calls with these requirements, in an inference mode (None: as in
    training).
    """
    names = [name for name in BACKENDS if BACKENDS[name].unsupported_reason(requirements) is None]
    return [name for name in names if mode is None or name != "flex_attention"]


def check_ignored(arguments, position_ids):
    """Raises TypeError for arguments that `forward` does not have, and ValueError for packed
    sequences without position_ids.
    """
    for name in arguments:
        if name not in IGNORED:
            raise TypeError(f"forward() got an unexpected keyword argument {name!r}")
        if name in PACKING and position_ids is None:
            raise ValueError(
                f"{name}: packed sequences need position_ids that begin at 0 in each of them"
            )


def static_cache_length(cache):
    """The number of places of a static cache; None for other caches, and without one."""
    layers = getattr(cache, "layers", ())
    return getattr(next(iter(layers), None), "max_cache_len", None)


@dataclass
class Layout:
    """Where the tokens are in their texts. Padding counts for no distance and no position.

    Attributes:
        cached: number of tokens in the cache; a tensor in a compiled graph with a static cache.
        total: t; the size of a static cache in a compiled graph.
        mode: the inference mode, which rotates cached keys too; None: as in training.
        length: that of the mode's texts; None: that of each text.
        positions: int64 `[b, s]`, or `[1, s]` for all rows, on the CPU; None if no method needs it.
        padding: bool `[b, s]`, True for padding among the new tokens; None if there is none.
        documents: the texts of the keys; None if each row is one text without padding, from 0 on.
        uncacheable: why the keys of these tokens cannot be cached; None if they can.
    """

    cached: int | Tensor
    total: int
    mode: AttentionMode | None = None
    length: int | None = None
    positions: Tensor | None = None
    padding: Tensor | None = None
    documents: Documents | None = None
    uncacheable: str | None = None

    @classmethod
    def of(cls, methods, hidden, attention_mask, position_ids, cache, mode=None) -> "Layout":
        """For new tokens `hidden` `[b, s, e]` and the methods of all layers.

        Raises ValueError for a mask that is not `[b, t]`, for positions that are not consecutive in
        a text, and for a cache that does not fit the mode.
        """
        batch, new, _ = hidden.shape
        static_length = static_cache_length(cache)
        if mode is not None and static_length is not None:
            raise ValueError(
                "static caches are not supported in an inference mode; use a dynamic one"
            )
        reads_positions = any(method.hooks & POSITION_HOOKS for method in methods)
        needs_positions = reads_positions or mode is not None
        # In graphs without breaks values are unknown, so they are only possible without positions.
        traced = torch.compiler.is_compiling() and not needs_positions
        layout = cls._after_cache(cache, new, static_length, traced, mode)

        # Each row is one text, unless the mask or position_ids say otherwise. The unused places of
        # a static cache count as tokens in a graph.
        places = torch.arange(new, device=hidden.device) + layout.cached
        positions = torch.arange(layout.total, device=hidden.device).expand(batch, -1)
        rows = texts = Documents(torch.zeros_like(positions), positions, places)
        if attention_mask is not None:
            texts = layout._padded(texts, attention_mask, static_length, traced)
        if position_ids is not None and (needs_positions or new > 1):
            given = position_ids.expand(batch, new)
            texts = layout._renumbered(texts, given, needs_positions)
        if texts is not rows or isinstance(layout.cached, Tensor):
            layout.documents = texts

        # Only what is needed, because positions on the CPU wait for the device.
        if needs_positions and layout.documents is not None:
            layout.positions = texts.positions[:, places].cpu()
        elif needs_positions:
            layout.positions = torch.arange(layout.cached, layout.total, device="cpu")[None]
        if mode is not None:
            layout._fit_mode(cache)
        if layout.documents is not None and isinstance(cache, ModeCache):
            layout.documents = Documents(*cache.kept(texts.ids, texts.positions))
        return layout

    @classmethod
    def _after_cache(cls, cache, new, static_length, traced, mode):
        """The numbers of cached and of all tokens, for `new` tokens after those in a cache."""
        cached = 0
        if cache is not None:
            cached = cache.get_seq_length()
        # A static cache changes its number of tokens in place.
        if traced and isinstance(cached, Tensor):
            return cls(cached.clone(), static_length, mode)
        return cls(int(cached), int(cached) + new, mode)

    def _renumbered(self, texts, given, needs_positions):
        """The texts and positions that follow from position_ids `[b, s]`; `texts` themselves if
        these are the same. Raises ValueError if they are not possible.
        """
        # Every jump starts another text of the row; after padding, every position that is not
        # larger than the last one before it.
        is_text = texts.ids[:, texts.queries] == 0
        places_of_text = torch.arange(given.shape[1], device=given.device) * is_text
        last = given.gather(1, places_of_text.cummax(dim=1).values)[:, :-1]  # of text, so far
        step, after_text = given[:, 1:] - last, is_text[:, :-1]
        jumps = (after_text & (step != 1)) | (~after_text & (step <= 0))
        jumps = jumps & is_text[:, 1:] & (is_text.cumsum(dim=1)[:, :-1] > 0)
        if jumps.any():
            if self.cached:
                raise ValueError(
                    "position_ids must be consecutive in each text if tokens are cached"
                )
            self.uncacheable = (
                "packed sequences (position_ids with jumps) cannot be cached; use use_cache=False"
            )
            ids = F.pad(jumps, (1, 0)).cumsum(dim=1)
            return Documents(ids.masked_fill(~is_text, -1), given, texts.queries)

        # Without jumps, a row may start at another position.
        if not needs_positions:
            return texts
        first = is_text.long().argmax(dim=1, keepdim=True)
        shift = (given - texts.positions[:, texts.queries]).gather(1, first)
        shift = shift * is_text.any(dim=1, keepdim=True)
        if not shift.any():
            return texts
        if self.mode is not None:
            raise ValueError(
                "in an inference mode, position_ids must count the tokens of each text from 0"
            )
        return Documents(texts.ids, texts.positions + shift, texts.queries)

    def _padded(self, texts, attention_mask, static_length, traced):
        """The texts without the padding in the mask `[b, t]`; `texts` themselves if there is none.
        static_length: size of a static cache, whose mask may be as long, because its last places
        are empty. Raises ValueError for another shape or other values.
        """
        batch, length = texts.ids.shape
        if list(attention_mask.shape) not in ([batch, length], [batch, static_length]):
            raise ValueError(
                f"attention_mask must be {[batch, length]}, for cached and new tokens, not "
                f"{[*attention_mask.shape]}"
            )
        mask = attention_mask[:, :length]
        text = mask == 1
        if not traced and text.all():
            return texts

        # Additive masks, and masks that number documents.
        known = text | (mask == 0)
        message = (
            "attention_mask must contain only 1 for tokens and 0 for padding; to separate "
            "documents, give position_ids that begin at 0 in each of them"
        )
        if traced:
            torch._assert_async(known.all(), message)
        elif not known.all():
            raise ValueError(message)
        self.padding = ~text[:, texts.queries]
        positions = text.long().cumsum(dim=1) - 1
        return Documents(text.long() - 1, positions.clamp(min=0), texts.queries)

    def _fit_mode(self, cache) -> None:
        """The length of the mode's texts, and whether its cache can continue them."""
        if self.mode.span.window is not None and self.documents is not None:
            is_text = self.documents.ids >= 0
            if (is_text[:, :-1] & ~is_text[:, 1:]).any():
                self.uncacheable = (
                    "in an inference mode with a window, tokens that are followed by padding "
                    "cannot be cached; pad on the left, or use use_cache=False"
                )
        self.length = getattr(cache, "max_length", None)
        if self.mode.length_dependent and (self.length is None or self.length < self.total):
            self.length = None
            self.uncacheable = (
                "this inference mode depends on the length of the text: give past_key_values="
                f"model.new_cache(max_length=N) with N of at least {self.total} tokens, or "
                "use_cache=False"
            )

    def by_row(self, function, *states: Tensor) -> list[Tensor]:
        """The results of `function(positions, *states)`, by row if their positions differ."""
        rows = [states]
        if len(self.positions) > 1:
            rows = zip(*(part.split(1) for part in states), strict=True)
        results = [function(p, *row) for p, row in zip(self.positions, rows, strict=True)]
        return [torch.cat(parts) for parts in zip(*results, strict=True)]

    def embed(self, method, hidden: Tensor) -> Tensor:
        """The method's position embeddings added to `hidden` `[b, s, e]`."""
        if "embed" not in method.hooks:
            return hidden
        return self.by_row(lambda positions, row: [method.embed(row, positions)], hidden)[0]

    def rotate(self, method, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The method's rotation of query and key; in an inference mode, queries are only scaled."""
        if self.mode is not None:
            return self.mode.scale_query(query, self.positions[:, None]), key
        if "rotate" not in method.hooks:
            return query, key
        return self.by_row(lambda p, *row: method.rotate(*row, p, p), query, key)

    def append_decay(self, method, hidden, query, key, value, cache, layer):
        """Query, key and value with the dimensions of the decay, if any. Padding has none."""
        if "decay" not in method.hooks:
            return query, key, value
        decay, scale, previous = method.decay(hidden), query.shape[3] ** -0.5, None
        if self.padding is not None:
            decay = decay.masked_fill(self.padding[:, None], 0.0)
        if isinstance(self.cached, Tensor) or self.cached:
            keys = cache.layers[layer].keys
            if keys.shape[3] == key.shape[3]:
                raise ValueError(
                    "cached keys have no decays, as of prefix tuning; use prompt tuning"
                )
            last = torch.as_tensor(self.cached, device=keys.device).clamp(max=keys.shape[2]) - 1
            last_key = keys[:, :, last.clamp(min=0).reshape(1)] * (last >= 0)
            previous = appended_sums(last_key, query.shape[1] // key.shape[1], scale)
        return append_decay(query, key, value, decay_sums(decay, previous), scale)


def tables_of(method, length, device, distance_map=None):
    """The method's tables over the distances below `length`, without autocast."""
    with without_autocast(device):
        return position_tables(method, length, device, distance_map=distance_map)


def attend(call, implementation, output_attentions):
    """The context `[b, h, s, d]` of a call as in training, and the probabilities `[b, h, s, t]`, or
    None without `output_attentions`.

    The call's query `[b, h, s, d]` are the new tokens, its key and value `[b, g, t, d]` the cached
    and new ones. Raises ValueError for tensors that do not fit together, and for an implementation
    that does not support the call.
    """
    call.validate()
    if not output_attentions:
        backend = supporting_backend(call, implementation)
        return run(call, backend.compute, masks_documents=backend.masks_documents), None

    # The reference supports every call. If the value of a key has a dimension of its own, the
    # context is the probabilities.
    batch, heads, length, _ = call.key.shape
    own = torch.eye(length, dtype=call.key.dtype, device=call.key.device)
    values_of_keys = own.expand(batch, heads, -1, -1)
    probabilities = run(replace(call, value=values_of_keys), REFERENCE.compute)
    value = call.value.repeat_interleave(call.queries_per_kv, dim=1)
    return probabilities @ value, probabilities


def attend_in_inference_mode(call, method, layout, implementation):
    """The context `[b, h, s, d]` of a call without method and tables, in the layout's inference
    mode. Shapes and errors are those of `attend`.
    """
    call.validate()
    backend = supporting_backend(call, implementation)
    options = {"method": method, "layout": layout, "backend": backend}
    attend_to_text = partial(attend_to_text_in_mode, **options)
    if call.documents is None:
        return attend_to_text(call)
    return run_documents(call, call.documents, attend_to_text)


def supporting_backend(call, implementation):
    """The backend of an `attn_implementation`. Raises ValueError if it cannot compute the call."""
    requirements = Requirements.of_call(call)
    reason = BACKENDS[implementation].unsupported_reason(requirements)
    if reason is not None:
        supported = ", ".join(implementations(requirements))
        raise ValueError(f"attn_implementation {implementation} {reason}; choose from {supported}")
    return BACKENDS[implementation]


def attend_to_text_in_mode(call, method, layout, backend):
    """`attend_in_inference_mode` for one text of each row, with keys before rotation, and without
    keys that its cache has dropped.
    """
    if call.dropout_p:
        raise ValueError("attention_dropout must be 0 in an inference mode")
    query, key, first, total = call.query, call.key, call.dropped, call.dropped + call.kv_len
    mode = layout.mode.at_length(layout.length or total).for_layer(method)

    # Modes that change distances compute the scores explicitly.
    if mode.is_explicit(method):
        sums = None
        if "decay" in method.hooks:
            # The sums are in the dimensions of query and key, so none are added.
            sums = key.new_zeros(query.shape[0], query.shape[1], call.kv_len)
        return attend_in_mode(
            query,
            key,
            call.value,
            method,
            mode,
            start=first + call.offset,
            scale=call.scale,
            decay_sums=sums,
        )
    if "rotate" in method.hooks:
        positions = torch.arange(first, total, device="cpu")
        query, key = mode.rotation(method).rotate(query, key, positions[call.offset :], positions)

    # All others use a backend and tables over the distances.
    length, applied = mode.span.max_kv_len(total), method
    if "modify_scores" in method.hooks:
        length = total
    if "decay" in method.hooks:
        applied = None
    tables = tables_of(method, length, query.device, mode.distance_map)
    call = replace(call, query=query, key=key, method=applied, tables=tables, span=mode.span)
    return run(call, backend.compute)
