"""What a call of attention requires, and what a backend supports.

Legend: b batch, s query length, t key length, h heads, d head size, v size of the value heads.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kerple.attention.call import AttentionCall
from kerple.positional import PositionalMethod, append_decay


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a call requires of a backend. None means unknown, for checks before the tensors exist.

    Attributes:
        causal: queries do not attend to the keys after them.
        modify_scores: the positional method computes the final scores, or the products.
        key_mask: some keys take no part.
        training: gradients are required.
        head_size, value_size, batch_heads: d, v and b * h.
    """

    causal: bool = True
    weight: bool = False
    modify_scores: bool = False
    decay: bool = False
    key_mask: bool = False
    dropout: bool = False
    training: bool = False
    dtype: torch.dtype | None = None
    head_size: int | None = None
    value_size: int | None = None
    batch_heads: int | None = None
    device: torch.device | None = None

    @classmethod
    def of(cls, *methods: PositionalMethod | None, **others: Any) -> "Requirements":
        """Those of positional methods, and others."""
        # The union: layers may have different methods.
        hooks: set[str] = set()
        for method in methods:
            if method is not None:
                hooks |= method.hooks
        return cls(
            weight="weight" in hooks,
            modify_scores="modify_scores" in hooks,
            decay="decay" in hooks,
            **others,
        )

    @classmethod
    def of_call(cls, call: AttentionCall) -> "Requirements":
        """Those of a call."""
        batch, heads, _, head_size = call.query.shape
        return cls(
            causal=call.span.causal,
            weight=call.tables.weight is not None,
            modify_scores=call.modify_scores is not None or call.products is not None,
            decay=call.decay_sums is not None,
            key_mask=call.key_mask is not None,
            dropout=call.dropout_p > 0,
            training=call.training,
            dtype=call.query.dtype,
            head_size=head_size,
            value_size=call.value.shape[3],
            batch_heads=batch * heads,
            device=call.query.device,
        )


@dataclass(frozen=True)
class Backend:
    """An implementation of attention, and what it supports.

    Attributes:
        name: its `attention-backend` name.
        run: computes a validated call that the backend supports.
        noncausal: whether it computes attention that is not causal.
        weight, modify_scores, dropout, key_mask: see `Requirements`.
        value_sizes: whether v may differ from d.
        decay: whether `run` computes the bias of `decay_sums`; for other backends, it becomes part
            of query and key.
        masks_documents: whether a mask separates the documents of a call (True), or each has calls
            of its own (False); None: masks for fewer queries than keys and in compiled code. The
            fused kernels read only the documents' own keys if the call `is_packed`.
        training_on_cpu: whether it computes gradients on a CPU.
        dtypes: supported dtypes of query, key and value; None: all.
        max_head_size, max_batch_heads: largest supported d and b * h.
        unavailable_reason: why the backend cannot run a call on its device, or None if it can. The
            device is known.
    """

    name: str
    run: Callable[[AttentionCall], Tensor]
    noncausal: bool = True
    weight: bool = True
    modify_scores: bool = False
    dropout: bool = True
    key_mask: bool = True
    value_sizes: bool = True
    decay: bool = False
    masks_documents: bool | None = None
    training_on_cpu: bool = True
    dtypes: tuple[torch.dtype, ...] | None = None
    max_head_size: float = math.inf
    max_batch_heads: float = math.inf
    unavailable_reason: Callable[[Requirements], str | None] = lambda requirements: None

    def compute(self, call: AttentionCall) -> Tensor:
        """Run a validated call that the backend supports."""
        with without_autocast(call.query.device):
            if call.decay_sums is None or self.decay:
                return self.run(call)
            return self._with_decay(call, call.decay_sums)

    def _with_decay(self, call: AttentionCall, decay_sums: Tensor) -> Tensor:
        # Only differences of the sums matter. Those to the sum of the middle query (in decoding, of
        # the only one) are small for the keys near it, so that products in float32 do not lose
        # them.
        sums = decay_sums - decay_sums[..., -1 - call.q_len // 2, None].detach()
        query = call.query
        key = call.key
        value = call.value
        if torch.is_grad_enabled() and sums.requires_grad and call.query.dtype.itemsize == 2:
            # The gradient of a decay is a sum of the gradients of all later sums, and of rounding
            # errors in half precision mostly these would remain.
            query = query.float()
            key = key.float()
            value = value.float()

        # The bias c_i - c_j is the product of additional dimensions, which the result loses again.
        query, key, value = append_decay(query, key, value, sums, call.scale)
        part = replace(call, query=query, key=key, value=value, decay_sums=None)
        context = self.run(part)  # [b, h, s, v + extra]
        return context[..., : call.value.shape[3]].to(call.query.dtype)

    def unsupported_reason(self, requirements: Requirements) -> str | None:
        """Why this backend cannot run such a call, as the rest of a sentence; None if it can."""
        # What the backend does not compute at all.
        if not requirements.causal and not self.noncausal:
            return "computes only causal attention"
        if requirements.weight and not self.weight:
            return "cannot multiply scores by a weight, which this positional method needs"
        if requirements.modify_scores and not self.modify_scores:
            return "does not support positional methods with modify_scores"
        if requirements.dropout and not self.dropout:
            return "does not support attention dropout"
        if requirements.key_mask and not self.key_mask:
            return "does not support a key mask; document_ids can mark padding"

        # Limits of dtypes and sizes, as far as these are known.
        dtype = requirements.dtype
        head_size = requirements.head_size
        if dtype is not None and self.dtypes is not None and dtype not in self.dtypes:
            return f"supports {', '.join(map(str, self.dtypes))}, not {dtype}"
        if (head_size or 0) > self.max_head_size:
            return f"supports head sizes up to {self.max_head_size}, not {head_size}"
        if not self.value_sizes and requirements.value_size not in (None, head_size):
            return (
                f"supports value heads of the size of key heads, {head_size}, not "
                f"{requirements.value_size}"
            )
        if (requirements.batch_heads or 0) > self.max_batch_heads:
            return (
                f"supports up to {self.max_batch_heads} for batch size times heads, not "
                f"{requirements.batch_heads}"
            )

        # The device.
        if requirements.device is None:
            return None
        if requirements.training and requirements.device.type == "cpu" and not self.training_on_cpu:
            return "cannot compute gradients on a CPU"
        return self.unavailable_reason(requirements)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Disable autocast, which would compute the matrix products of scores in half precision."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
