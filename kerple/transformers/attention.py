"""Attention with a positional method, for AttentionInterface of transformers.

Legend: b batch, s query length, t key length, h heads, g key/value heads, d head size.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kerple.attention import Attention
from kerple.attention.backend import without_autocast
from kerple.transformers.mask import (
    CALLS,
    IMPLEMENTATION,
    Mask,
    Visible,
    attention_mask,
    check_separated,
    dense_mask,
    for_layer,
    methods_of,
)

# Arguments of attention that change the scores in a way that no method here does.
REFUSED = {
    "softcap": "caps the scores",
    "s_aux": "has attention sinks",
    "sinks": "has attention sinks",
    "indices": "attends to selected keys",
    "block_indices": "attends to selected keys",
}
# Arguments that say nothing of the scores which the mask, or the key that it masks, does not say.
KNOWN = {
    "sliding_window",
    "position_ids",
    "cache_position",
    "is_causal",
    "seq_idx",
    "use_cache",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "deterministic",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "num_items_in_batch",
    "logits_to_keep",
}


class Probes(threading.local):
    """The function that takes the place of attention in a thread, to observe a model."""

    function: Callable[..., Tensor] | None = None


PROBES = Probes()
# Of layers without a method.
PLAIN = Attention()
# What masks that are added have for padding, or less.
PADDING = -1e4


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function for AttentionInterface: query `[b, h, s, d]`, key and value
    `[b, g, t, d]`; returns `[b, s, h, d]`, and the probabilities if `output_attentions` is set.
    """
    for name, argument in kwargs.items():
        if argument is not None and name not in KNOWN:
            reason = REFUSED.get(name, "passes an unknown argument to attention")
            raise ValueError(f"{type(module).__name__} {reason} ({name}), which is not supported")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if PROBES.function is not None:
        return PROBES.function(module, query, key, value, scaling, is_causal), None
    if "_kerple_attention" not in module.__dict__:
        raise ValueError(
            f"{type(module).__name__} has attn_implementation {IMPLEMENTATION!r}, but its model "
            "has no method; call use_positional or load_positional, or choose another one. If a "
            "part of the model with the same configuration has a method, give it to the model"
        )
    attention = PLAIN
    if module.__dict__["_kerple_attention"] is not None:
        owner, number = module.__dict__["_kerple_attention"]
        # A copy of a layer refers to a copy of the model, whose method is not trained or saved.
        if CALLS.last.owner is not None and CALLS.last.owner is not owner:
            raise ValueError(
                f"{type(module).__name__} was copied after use_positional, so it has the method of "
                "another model; copy layers first, and call use_positional then"
            )
        attention = methods_of(owner)[number]
    if position_bias is not None and getattr(module, "_kerple_removed", False):
        position_bias = None

    # Autocast leaves a rotated query in float32; the products of attention are in its dtype.
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)

    # A mask that is a tensor was given by the user, or made by the model.
    if isinstance(attention_mask, Mask):
        visible = getattr(attention_mask, "visible", None)
        if visible is None:
            raise ValueError(f"{type(module).__name__} changes masks, which is not supported")
        if key.shape[2] != visible.total:
            raise ValueError(
                f"attention has {key.shape[2]} keys, but the mask is for {visible.total}, so the "
                f"cache of {type(module).__name__} is not supported; pass use_cache=False"
            )
        # Where transformers leaves a mask out, it asks the layer whether attention is causal.
        is_plain = visible.documents is None and visible.dense is None
        is_plain = is_plain and 1 < visible.q_len == visible.kv_len
        if is_plain and visible.causal and not is_causal and not is_cross(module):
            raise ValueError(
                f"{type(module).__name__} has is_causal = False, but its mask is causal; set "
                "config.is_causal = False for attention to later tokens"
            )
        visible = for_layer(visible, query.device)
    else:
        check_separated(None)
        _check_mask(attention_mask, query.shape[2], key.shape[2], is_cross(module))
        visible = Visible(
            query.shape[2], key.shape[2], query.device, causal=is_causal, dense=attention_mask
        )
        visible.positions = _positions(attention_mask, query.shape[2])
    method = attention.positional
    if visible.kv_offset and method is not None and method.counts_from_start:
        raise NotImplementedError(
            f"{type(method).__name__} needs the places of keys in the text, which a cache that "
            "keeps a window does not tell; pass past_key_values=DynamicCache(), which keeps all "
            "keys, or use_cache=False"
        )
    key, value = key[:, :, : visible.kv_len], value[:, :, : visible.kv_len]
    probabilities = CALLS.last.probabilities or kwargs.get("output_attentions")
    if visible.dense is not None or position_bias is not None or probabilities:
        with without_autocast(query.device):
            return _dense_attention(
                module, attention, query, key, value, visible, position_bias, dropout, scaling
            )

    # The texts of cross-attention are those of the keys alone.
    documents, key_mask = visible.documents, None
    if documents is not None and is_cross(module):
        key_mask, documents = documents.ids >= 0, None
    context = attention(
        query,
        key,
        value,
        tables=visible.tables.get(attention),
        window=visible.window,
        documents=documents,
        key_mask=key_mask,
        causal=visible.causal,
        dropout_p=dropout,
        scale=scaling,
    )
    return context.transpose(1, 2).contiguous(), None


def is_cross(module: nn.Module) -> bool:
    """Whether a module is cross-attention (see `probes.find_attention`)."""
    return "_kerple_cross" in module.__dict__


def _check_mask(mask: Tensor | None, s: int, t: int, is_cross: bool) -> None:
    """Raises ValueError for a mask of integers, or for another number of keys. Also if a mask that
    is a tensor has fewer queries than keys, and the last query does not see the last key: then the
    places of the queries are not known.
    """
    if mask is None:
        return
    if mask.shape[-1] != t:
        raise ValueError(
            f"attention_mask is for {mask.shape[-1]} keys, but a layer has {t}, as with a cache "
            "that keeps a window; for a mask of four dimensions, use a cache that keeps all keys"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"attention_mask of four dimensions must be bool or floating point, not {mask.dtype}"
        )
    if s == t or is_cross:
        return
    # True in a mask of bools, 0 in one that is added.
    last = mask[:, :, -1, t - 1]
    if last.dtype != torch.bool:
        last = last == 0
    if not bool(last.all()):
        raise ValueError(
            "attention_mask has keys after the last query, as with a static cache; for a mask of "
            "four dimensions, use a dynamic cache"
        )


def _positions(mask: Tensor | None, s: int) -> Tensor | None:
    """Int64 `[b, t]`: the positions of the keys of a mask `[b, 1, 1, t]` for all s queries, which
    is one of padding. None for another mask, whose keys have the positions of their places.
    """
    if mask is None or mask.shape[1:3] != (1, 1) or s == 1:
        return None
    is_text = mask[:, 0, 0]
    if is_text.dtype != torch.bool:
        is_text = is_text > PADDING
    return (is_text.cumsum(dim=1) - 1).clamp(min=0)


def _dense_attention(
    module: nn.Module,
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    position_bias: Tensor | None,
    dropout: float,
    scaling: float | None,
) -> tuple[Tensor, Tensor]:
    """Attention with a matrix of scores, for any mask and for biases of the model's own. Raises
    NotImplementedError for methods with more than biases and weights by distance.
    """
    method = attention.positional
    hooks: frozenset[str] = frozenset()
    if method is not None:
        hooks = method.hooks
    if hooks - {"bias", "weight"}:
        raise NotImplementedError(
            f"{type(method).__name__} supports masks of padding, texts and windows only, no "
            "padding between tokens in layers with a window, no output_attentions, no biases of "
            'the model\'s own; use another method, or attn_implementation="eager" without a method'
        )

    # Scores in float32, [b, h, s, t].
    s, t = query.shape[2], key.shape[2]
    group = query.shape[1] // key.shape[1]
    key, values = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if scaling is None:
        scaling = query.shape[3] ** -0.5
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ key.to(dtype).transpose(2, 3) * scaling

    # Bias and weight by distance: [h, b or 1, s, t], positive for keys before the query.
    if method is not None:
        positions = visible.positions
        if positions is None and visible.documents is not None:
            positions = visible.documents.positions
        if positions is None:
            positions = torch.arange(t, device=query.device)[None]
        distance = (positions[:, -s:, None] - positions[:, None, :]).float()
        if not method.signed:
            distance = distance.abs()
        if "weight" in hooks:
            scores = scores * method.weight(distance).transpose(0, 1)
        if "bias" in hooks:
            scores = scores + method.bias(distance).transpose(0, 1)
    if position_bias is not None:
        scores = scores + position_bias[..., :t]

    # What is visible: True in a mask of bools, 0 in one that is added.
    mask = visible.dense
    if mask is None:
        mask = dense_mask(visible, query.device, is_cross(module))
    mask = mask[..., :t]
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(dtype).min)
    else:
        scores = (scores + mask).clamp(min=torch.finfo(dtype).min)
    probabilities = scores.softmax(dim=-1)
    kept = F.dropout(probabilities, dropout).to(value.dtype)
    return (kept @ values).transpose(1, 2).contiguous(), probabilities.to(value.dtype)


AttentionInterface.register(IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, attention_mask)
