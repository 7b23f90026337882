"""Matrix products and attention in bfloat16 and float16 on processors for which torch has no fast products of them.

On an x86 processor without AVX512, torch multiplies such matrices with plain loops, and training in bfloat16 is 9 times
slower than in float32. Here, the operands are converted to float32 and the result is rounded. The arithmetic is that of
processors with instructions for such products (products and sums in float32, and one rounding at the end), except that
attention does not round its probabilities.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import DispatchKeySet, Tensor
from torch.utils._pytree import tree_map_only

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mm.out", "addmm.out", "bmm.out", "baddbmm.out")
ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

# Contains the replacements of torch's operators, which are removed when it is deleted.
_library: torch.library.Library | None = None
_reported: set[torch.dtype] = set()


def multiply_in_float32(device: torch.device, dtype: torch.dtype, report: Callable[[str], None]) -> None:
    """From now on, multiply matrices of this dtype in float32 in the whole process, if they are on a CPU for which
    torch has no fast products of the dtype. `report` prints that, once per process and dtype.
    """
    global _library
    if device.type == "cpu" and dtype in NAMES and not has_fast_products(dtype):
        _library = _library or _replace_operators()
        if dtype not in _reported:
            _reported.add(dtype)
            name = NAMES[dtype]
            report(
                f"matrix products: computed in fp32 and rounded to {name}, because torch has no fast products in "
                f"{name} on this processor"
            )


def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of bfloat16 or float16 with oneDNN's kernels for this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{NAMES[dtype]}_supported")())


def _replace_operators() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    slow = {dtype for dtype in NAMES if not has_fast_products(dtype)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name in PRODUCTS:
            library.impl(name, _product(name, slow), "CPU", with_keyset=True, allow_override=True)
        for name in ATTENTION:
            library.impl(name, _attention(name, slow), "CPU", with_keyset=True, allow_override=True)
    return library


def _product(name: str, slow: set[torch.dtype]) -> Callable[..., Tensor]:
    """torch's CPU implementation of a product, with the dtypes in `slow` replaced by float32."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    operator = getattr(torch, name.removesuffix(".out"))

    def product(keys: DispatchKeySet, *arguments: Tensor, out: Tensor | None = None, **factors: Any) -> Tensor:
        tensors = arguments if out is None else (*arguments, out)
        dtype = tensors[0].dtype
        # If the dtypes differ, torch raises an error.
        if dtype not in slow or any(tensor.dtype != dtype for tensor in tensors) or _is_fast(*arguments[-2:]):
            destination = {} if out is None else {"out": out}
            return kernel.call_boxed(keys, *arguments, **factors, **destination)
        result: Tensor = operator(*(tensor.float() for tensor in arguments), **factors)
        if out is None:
            return result.to(dtype)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return product


def _is_fast(left: Tensor, right: Tensor) -> bool:
    """Whether torch multiplies with dot products of contiguous vectors: the row of a single token with a weight, as in
    generation. That is faster than the conversion of the weight.
    """
    return left.shape[-2:-1] == (1,) and right.stride()[-2:-1] == (1,)


def _attention(name: str, slow: set[torch.dtype]) -> Callable[..., tuple[Tensor, ...]]:
    """torch's CPU implementation of attention or its gradient, with the dtypes in `slow` replaced by float32."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    operator = getattr(torch.ops.aten, name).default

    def attention(keys: DispatchKeySet, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        dtype = arguments[0].dtype
        if dtype not in slow:
            return tuple(kernel.call_boxed(keys, *arguments, **options))
        values, settings = tree_map_only(Tensor, Tensor.float, (arguments, options))
        first, *others = operator(*values, **settings)
        if name == ATTENTION[0]:
            return first.to(dtype), *others  # the logarithms of the sums stay in float32
        return tuple(gradient.to(dtype) for gradient in (first, *others))

    return attention
