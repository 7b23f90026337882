"""Matrix products of linear layers, on a CPU by the faster of PyTorch's two libraries.

PyTorch hands float32 products to Intel's MKL, which keeps to AVX2 on other makers' processors. Where those have
AVX-512, oneDNN, which PyTorch carries too and which writes its code for the processor it finds, is twice as fast.

Legend: n rows, i input features, o output features.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Multiplications in a product from which on oneDNN's fixed cost, some 10 microseconds, no longer counts.
FEWEST = 2**21


def _onednn_is_faster() -> bool:
    """MKL is built in and has no AVX-512 kernels for this processor, which has AVX-512."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "GenuineIntel" not in processor and "avx512f" in processor


ONEDNN_IS_FASTER = _onednn_is_faster()


def _takes_onednn(left: Tensor, right: Tensor) -> bool:
    return (
        left.device.type == "cpu"
        and left.dim() > 1
        and left.dtype == right.dtype == torch.float32
        and left.numel() * len(right) >= FEWEST
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled("cpu")
        and ONEDNN_IS_FASTER
    )


def choice(device: torch.device, dtype: torch.dtype) -> str | None:
    """What large products are computed by where that is not PyTorch's own choice: to be printed once."""
    if device.type != "cpu" or dtype != torch.float32 or not torch.backends.mkldnn.enabled or not ONEDNN_IS_FASTER:
        return None
    return "oneDNN (MKL, which PyTorch takes, has no AVX-512 kernels for this processor)"


# As an operator of our own, a compiled graph takes it for one step; PyTorch's is there for weights that are constants.
_LIBRARY = torch.library.Library("kerple", "FRAGMENT")
_LIBRARY.define("onednn_product(Tensor left, Tensor right, Tensor? bias) -> Tensor")


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[..., k]`, `[m, k]` -> left right^T + bias, `[..., m]`. Knows no gradient; both may have any strides."""
    return torch.ops.kerple.onednn_product(left, right, bias)


def _run_onednn(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def _shape_of_product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return left.new_empty(*left.shape[:-1], len(right))


_LIBRARY.impl("onednn_product", _run_onednn, "CPU")
torch.library.register_fake("kerple::onednn_product", _shape_of_product, lib=_LIBRARY)


def product(left: Tensor, right: Tensor) -> Tensor:
    """left right^T of `[n, k]` and `[m, k]`, outside of autograd; transposed views are as fast."""
    return _onednn(left, right) if _takes_onednn(left, right) else left @ right.T


class Linear(nn.Linear):
    """`[..., i] -> [..., o]`: torch's layer, its products by the faster library."""

    def forward(self, states: Tensor) -> Tensor:
        if _takes_onednn(states, self.weight):
            return _OneDNNLinear.apply(states, self.weight, self.bias)
        return F.linear(states, self.weight, self.bias)


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight)
        return _onednn(states, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        of_states, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            product(rows, weight.T).view(states.shape) if of_states else None,
            product(rows.T, states.flatten(0, -2).T) if of_weight else None,
            rows.sum(dim=0) if of_bias else None,
        )
