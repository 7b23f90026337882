"""The masks of transformers, read as what they mean: texts, windows, and what is neither.

Legend: b batch, s query length, t key length.
"""

import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from kerple.attention import Attention, Documents, Span, position_tables
from kerple.attention.tables import PositionTables
from kerple.positional import PositionalMethod, project

# The name of the attention implementation.
IMPLEMENTATION = "kerple"
# The name of the module with the methods of a model.
MODULE = "kerple_positional"
# id of the configuration of a model or its part -> the configuration, and the model with a method,
# whose layers share the tables of a forward pass. A copy of a model is not found here; its layers
# compute their tables themselves.
_SHARED: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}


@dataclass(eq=False)
class Visible:
    """Which keys the queries of a forward pass see, in place of transformers' mask.

    Attributes:
        q_len, kv_len: s and t. A static cache has more keys, which are not in use.
        causal, window: as in `kerple.Attention`.
        total: the number of keys with those that are not in use; 0 if it is not known.
        kv_offset: the number of earlier keys, which a cache has dropped.
        documents: the texts of the t keys of each row; None if each row is one text.
        dense: bool `[b, 1, s, t]`, True for what a query sees, if it is anything else.
        positions: int64 `[b, t]` of the keys, for the distances of a dense mask.
        tables: Attention -> its tables for t keys, if they were computed for all layers at once.
            They and the other tensors are on `device`.
    """

    q_len: int
    kv_len: int
    device: torch.device
    causal: bool = True
    window: int | None = None
    total: int = 0
    kv_offset: int = 0
    documents: Documents | None = None
    dense: Tensor | None = None
    positions: Tensor | None = None
    tables: dict[Attention, PositionTables] = field(default_factory=dict)


class Mask(Tensor):
    """A `Visible` as transformers passes masks on: as tensors of four dimensions. It has no
    elements.
    """

    visible: Visible

    @classmethod
    def of(cls, visible: Visible, batch: int) -> "Mask":
        mask = torch.empty(batch, 1, visible.q_len, 0).as_subclass(cls)
        mask.visible = visible
        return mask

    def to(self, *args: Any, **kwargs: Any) -> "Mask":
        return self

    def detach(self) -> "Mask":
        return self


@dataclass
class Call:
    """What the inputs of a call ask for.

    Attributes:
        owner: the model with a method. called: it or the part of it that was called; the parts that
            this calls do not change what its inputs ask for.
        packed: several texts in a row.
        probabilities: those of all layers, by output_attentions.
    """

    owner: Any = None
    called: Any = None
    packed: bool = False
    probabilities: bool = False


class Calls(threading.local):
    """The calls of models with a method in a thread: the first entry is that of models without
    `note_inputs`, the others are within each other.
    """

    def __init__(self) -> None:
        self.stack = [Call()]

    @property
    def last(self) -> Call:
        return self.stack[-1]


CALLS = Calls()


@torch.compiler.disable
def note_inputs(owner: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of a model and of each part that can be called alone. Notes what the
    inputs ask for, which some models and caches ignore.

    owner: the model with a method.
    """
    # A call that the user interrupted was not forgotten.
    while len(CALLS.stack) > 1 and not _is_running(CALLS.last.called):
        CALLS.stack.pop()
    if CALLS.last.owner is owner and CALLS.last.called is not model:
        return
    inputs = _inputs_by_name(model, args, kwargs)
    asked = kwargs.get("output_attentions")
    if asked is None:
        asked = getattr(model.config, "output_attentions", False)
    packed = _has_texts(kwargs) or _restarts(inputs)
    CALLS.stack.append(Call(owner, model, packed, probabilities=bool(asked)))
    if owner.training and torch.is_grad_enabled():
        _keep_bounds(owner)


def _keep_bounds(owner: Any) -> None:
    """Clamp the parameters of the methods that the last step has moved beyond their bounds, because
    a Trainer does not know `project`. Methods within their bounds are not touched: a graph that is
    waiting for its backward pass may need their parameters as they are.
    """
    for attention in methods_of(owner):
        for method in attention.modules():
            if not isinstance(method, PositionalMethod):
                continue
            for name, (low, high) in method.bounds().items():
                parameter = method.get_parameter(name)
                if bool((parameter != parameter.clamp(low, high)).any()):
                    project(method)


def _is_running(model: Any) -> bool:
    """Whether a function of the model is on the stack of this thread."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False


def _inputs_by_name(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a call, also if `forward` takes them as `**kwargs`."""
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    return {**kwargs, **bound.arguments}


def _has_texts(kwargs: dict[str, Any]) -> bool:
    """Whether a row has several texts by what DataCollatorWithFlattening returns for attention of
    other kinds: their ends, or the number of each token's text.
    """
    ends, numbers = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
    if ends is not None and len(ends) > 2:
        return True
    return numbers is not None and bool((numbers[:, 1:] != numbers[:, :-1]).any())


def _restarts(inputs: dict[str, Any]) -> bool:
    """Whether position_ids start again within a row."""
    # Padding, or None. Other masks say themselves which keys a query sees.
    padding = inputs.get("attention_mask")
    if padding is not None and (not isinstance(padding, Tensor) or padding.dim() != 2):
        return False

    # Positions [b, s] or [1, s]. Those of models of images have three coordinates, [3, b, s], or
    # also the positions before them, [4, b, s].
    positions = inputs.get("position_ids")
    if positions is None or positions.dim() not in (2, 3) or positions.shape[-1] == 1:
        return False
    if positions.dim() == 3 and len(positions) == 4:
        positions = positions[0]
    rows, length = positions.shape[-2:]
    is_text = torch.ones(rows, length, dtype=torch.bool, device=positions.device)
    if padding is not None:
        is_text = padding[:, -length:].bool()

    # A text begins at a token that has no later position than all before, or that has the
    # coordinates 0. Padding has any position.
    if positions.dim() == 3:
        begins = (positions[..., 1:].amax(dim=0) == 0) & is_text[:, :-1]
    else:
        positions = positions.expand(len(is_text), -1)
        latest = positions.masked_fill(~is_text, -1).cummax(dim=1).values
        begins = positions[:, 1:] <= latest[:, :-1]
    return bool((begins & is_text[:, 1:]).any())


@torch.compiler.disable
def check_inputs(
    configs: list[Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """A forward pre-hook of a model and of each part that can be called alone. Raises ValueError if
    its attention was changed, so that it has no method, for a mask of padding with other numbers
    than 0 and 1, and for position_ids that do not fit a mask of four dimensions.

    configs: of the model and its parts.
    """
    for config in configs:
        if config._attn_implementation != IMPLEMENTATION:
            raise ValueError(
                f"the attention of the model was changed to {config._attn_implementation!r}, which "
                "does not use its positional method; change it before use_positional, or take the "
                "method away first: use_positional(model, None)"
            )
    inputs = _inputs_by_name(model, args, kwargs)
    for name in ("attention_mask", "decoder_attention_mask"):
        mask: Any = inputs.get(name)
        is_numbers = isinstance(mask, Tensor) and mask.dim() == 2 and mask.dtype != torch.bool
        if is_numbers and bool(((mask != 0) & (mask != 1)).any()):
            raise ValueError(
                f"{name} must be 1 for tokens and 0 for padding; to separate the texts of a row, "
                "pass position_ids that start again, without attention_mask"
            )
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if isinstance(mask, Mask) or not isinstance(mask, Tensor) or mask.dim() != 4:
        return
    if positions is not None and positions.dim() == 2 and mask.shape[2] == positions.shape[1]:
        _check_places(mask, positions)


def _check_places(mask: Tensor, positions: Tensor) -> None:
    """Raises ValueError if the distances by position_ids `[b, s]` are not those of the places, with
    a mask `[b, h, s, t]`: as of branches of a text, which the mask separates.
    """
    s = positions.shape[1]
    sees = mask
    if mask.dtype != torch.bool:
        sees = mask == 0
    sees = sees.any(dim=1)  # [b, s, t]
    # Padding at the end sees tokens, but not itself.
    is_text = sees[:, :, -s:].diagonal(dim1=1, dim2=2)  # [b, s]
    shift = positions - torch.arange(s, device=positions.device)  # [b, s]
    differs = (shift[:, :, None] != shift[:, None, :]) & is_text[:, :, None]
    # A query and a key have one shift, and so have all queries that see earlier keys in a cache.
    earlier = sees[:, :, :-s].any(dim=2) & is_text
    related = sees[:, :, -s:] | (earlier[:, :, None] & earlier[:, None, :])
    if bool((related & differs).any()):
        raise ValueError(
            "position_ids and attention_mask of four dimensions have several tokens for one place "
            "of a text, or places without a token, but the distances of the method are those "
            "between tokens in the row; give each text a row of its own"
        )


def forget_inputs(model: Any, *_: Any) -> None:
    """A forward hook: ends what `note_inputs` began."""
    if CALLS.last.called is model:
        CALLS.stack.pop()


def check_separated(ids: Tensor | None) -> None:
    """Raises ValueError if the inputs pack several texts in a row, but the mask has one; ids
    `[b, t]` of its texts.
    """
    packed, CALLS.last.packed = CALLS.last.packed, False
    if packed and (ids is None or not bool(ids.any())):
        raise ValueError(
            "the inputs have several texts in a row, but the model does not separate them; pass "
            "position_ids that start again, use_cache=False and no attention_mask, or give each "
            "text a row of its own"
        )


@torch.compiler.disable
def attention_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    cache_position: Tensor | None = None,
    config: Any = None,
    dtype: torch.dtype | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
) -> Mask:
    """The mask function for AttentionMaskInterface. Arguments as in transformers' `sdpa_mask`; a
    new one is a TypeError. The last three are about masks that are tensors, and not used.

    mask_function: whether a query sees a key, by row, head, and their places in the text. It says
        nothing of its structure, so that is found by asking it about a few pairs: neighbours, which
        tell where texts begin, and three queries with all keys, which tell the window.
    """
    if cache_position is not None:  # transformers 5.0
        q_length, q_offset = len(cache_position), cache_position[0]
        device = cache_position.device
    assert q_length is not None
    first = int(q_offset) - kv_offset  # the place of the first query among the keys
    used = first + q_length
    if mask_function is bidirectional_mask_function:
        used = kv_length
    visible = Visible(q_length, used, torch.device(device), total=kv_length, kv_offset=kv_offset)

    # Padding: False in the mask, which counts the tokens of the whole text.
    is_text = torch.ones(batch_size, used, dtype=torch.bool, device=device)
    if attention_mask is not None:
        part = attention_mask[:, kv_offset : kv_offset + used].bool().to(device)
        is_text = F.pad(part, (0, used - part.shape[1]))

    # The structure: causal or not, where texts begin, and the window.
    def sees(query: Tensor, key: Tensor) -> Tensor:
        row = torch.arange(batch_size, device=device)[:, None]
        return _evaluate(mask_function, row, query + kv_offset, key + kv_offset)

    ids = torch.zeros(batch_size, used, dtype=torch.int64, device=device)
    visible.causal = mask_function is not bidirectional_mask_function
    is_known = mask_function in (causal_mask_function, bidirectional_mask_function)
    if not is_known and not use_vmap:
        places = torch.arange(used, device=device)
        begins = ~sees(places[1:], places[:-1])
        ids[:, 1:] = begins.cumsum(dim=1)
        visible.causal = not bool(sees(places[:-1], places[1:]).any())
        is_known = _find_window(visible, sees, ids, local_size)

    check_separated(ids)

    # What no window and no texts describe, as a mask.
    inner = (is_text[:, 1:] & ~is_text[:, :-1]).sum(dim=1) > (~is_text[:, 0]).long()
    if not is_known or (visible.window is not None and bool(inner.any())):
        queries = torch.arange(first, first + q_length, device=device)
        keys = torch.arange(used, device=device)
        pairs = sees(queries[:, None].expand(-1, used).flatten(), keys.repeat(q_length))
        dense = pairs.view(batch_size, q_length, used) & is_text[:, None]
        visible.dense = dense[:, None]
        visible.positions = (is_text.cumsum(dim=1) - 1).clamp(min=0)
    elif bool(ids.any()) or not bool(is_text.all()):
        visible.documents = Documents(ids.masked_fill(~is_text, -1))
    if visible.dense is None:
        _add_tables(visible, config, torch.device(device))
    return Mask.of(visible, batch_size)


def _evaluate(mask_function: Callable[..., Any], row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Bool `[b, n]`: whether the queries `[n]` see the keys `[n]`, in the rows `[b, 1]`."""
    head = torch.zeros_like(row)
    found = mask_function(row, head, query[None], key[None])
    return torch.as_tensor(found, device=row.device).expand(len(row), len(query))


def _find_window(
    visible: Visible, sees: Callable[[Tensor, Tensor], Tensor], ids: Tensor, local_size: int | None
) -> bool:
    """Set the window with which `visible`, with texts `ids` `[b, t]`, is what three queries see.
    Returns False if there is none.
    """
    length = ids.shape[1]
    places = torch.arange(length, device=ids.device)
    sizes = []
    if local_size is not None:
        sizes = [size for size in (local_size, local_size + 1, local_size // 2 + 1) if size > 0]

    # Three queries with all keys; and at the edge of each window, all queries with one key, because
    # in packed rows the texts of the three may be shorter than the window.
    probes = []
    for query in sorted({0, length // 2, length - 1}):
        probes.append((torch.full_like(places, query), places))
    for size in sizes:
        for gap in (size - 1, size):
            if gap < length:
                probes.append((places[gap:], places[: length - gap]))
    found = [sees(queries, keys) for queries, keys in probes]

    # The window that explains all of them.
    for window in (None, *sizes):
        is_right = True
        for (queries, keys), seen in zip(probes, found, strict=True):
            distance = queries - keys
            expected = ids[:, queries] == ids[:, keys]
            if visible.causal:
                expected = expected & (distance >= 0)
            if window is not None:
                expected = expected & (distance.abs() < window)
            is_right = is_right and bool((expected == seen).all())
        if is_right:
            visible.window = window
            return True
    return False


def _add_tables(visible: Visible, config: Any, device: torch.device) -> None:
    """Compute the tables of all layers, so that they share them. This is outside of the layers,
    where gradient checkpointing would compute them again.
    """
    length = max(visible.q_len, visible.kv_len)
    with_jacobians = device.type == "cuda" and torch.is_grad_enabled()
    for attention in attention_of(config):
        visible.tables[attention] = position_tables(
            attention.positional,
            length,
            device,
            causal=visible.causal,
            with_jacobians=with_jacobians and not torch.compiler.is_compiling(),
        )


def attention_of(config: Any) -> list[Attention]:
    """The attention of the model with this configuration; empty if it has no method, or is no
    more.
    """
    shared = _SHARED.get(id(config))
    if shared is None:
        return []
    found, owner = shared
    model = owner()
    # The id may be that of an earlier configuration.
    if found() is not config or model is None:
        return []
    return methods_of(model)


def methods_of(model: Any) -> list[Attention]:
    """The attention with the methods of a model: one for all layers, or one for each. If peft
    trains a copy of them (`modules_to_save`), this copy.
    """
    container = getattr(model, MODULE)
    # For adapter_names, peft changes how it calls this module, which is not called.
    if container is not container.itself and container._forward_pre_hooks:
        raise ValueError(
            f"rows with different adapters (adapter_names) cannot have a {MODULE} each; call the "
            "model once for each adapter"
        )
    return list(container.methods)


def share_tables(config: Any, model: Any) -> None:
    """Let the layers of a model with a method share their tables; None: no more.

    config: of the model or its part.
    """
    key = id(config)

    def forget(_: object = None) -> None:
        _SHARED.pop(key, None)

    forget()
    if model is not None:
        _SHARED[key] = weakref.ref(config, forget), weakref.ref(model)


def for_layer(visible: Visible, device: torch.device) -> Visible:
    """The same on the device of a layer. Without tables where the layer must compute its own: on
    another device than the first layer, and in reentrant gradient checkpointing, which goes back
    through each layer on its own.
    """
    for tables in visible.tables.values():
        found = [each for each in (tables.bias, tables.weight, tables.scores) if each is not None]
        needs_grad = any(each.requires_grad for each in found)
        if needs_grad and not torch.is_grad_enabled():
            visible.tables.clear()
            break
    if visible.device == device:
        return visible
    moved = replace(visible, device=device, tables={})
    if visible.documents is not None:
        moved.documents = visible.documents.to(device)
    if visible.dense is not None:
        moved.dense = visible.dense.to(device)
    if visible.positions is not None:
        moved.positions = visible.positions.to(device)
    return moved


def dense_mask(visible: Visible, device: torch.device, is_cross: bool) -> Tensor:
    """Bool, broadcastable to `[b, 1, s, t]`, True for what a query sees. In cross-attention, these
    are all keys that are no padding.
    """
    s, t, documents = visible.q_len, visible.kv_len, visible.documents
    if is_cross:
        mask = torch.ones(1, 1, 1, t, dtype=torch.bool, device=device)
        if documents is not None:
            mask = (documents.ids >= 0)[:, None, None]
        return mask

    # The queries are the last s positions.
    span = Span(visible.window, causal=visible.causal)
    mask = ~span.mask(slice(t - s, t), slice(0, t), device)[None, None]  # [1, 1, s, t]
    if documents is not None:
        same = documents.ids[:, -s:, None] == documents.ids[:, None]
        mask = mask & same[:, None]
    return mask
