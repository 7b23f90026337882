"""Matrix products in bfloat16 and float16 on processors without instructions for them.

On most laptops, torch multiplies such matrices with a plain loop: on an AVX2 processor, 15 to 80 times slower than in
float32. Here, they are converted to float32, multiplied, and the result is rounded. The arithmetic is that of
processors with such instructions: products and sums in float32, and one rounding at the end.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import DispatchKeySet, Tensor

OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "mm.out", "addmm.out", "bmm.out", "baddbmm.out")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

# Contains the replacements of torch's operators, which are removed when it is deleted.
_library: torch.library.Library | None = None


def multiply_in_float32(device: torch.device, dtype: torch.dtype, report: Callable[[str], None]) -> None:
    """Multiply matrices of this dtype in float32 from now on, in the whole process, if they are on a CPU without fast
    products of the dtype. `report` prints that.
    """
    global _library
    if device.type == "cpu" and dtype in NAMES and not has_fast_products(dtype):
        _library = _library or _replace_operators()
        name = NAMES[dtype]
        report(
            f"matrix products: computed in fp32 and rounded to {name}, because this processor has no instructions for "
            f"them in {name}"
        )


def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of bfloat16 or float16 on this CPU with instructions for them."""
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{NAMES[dtype]}_supported")())


def _replace_operators() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name in OPERATORS:
            library.impl(name, _product(name), "CPU", with_keyset=True, allow_override=True)
    return library


def _product(name: str) -> Callable[..., Tensor]:
    """torch's CPU implementation of an operator, with dtypes without fast products replaced by float32."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    operator = getattr(torch, name.removesuffix(".out"))
    slow = {dtype for dtype in NAMES if not has_fast_products(dtype)}

    def product(keys: DispatchKeySet, *arguments: Tensor, out: Tensor | None = None, **factors: Any) -> Tensor:
        tensors = arguments if out is None else (*arguments, out)
        dtype = tensors[0].dtype
        if dtype not in slow or any(tensor.dtype != dtype for tensor in tensors):  # if they differ, torch raises errors
            destination = {} if out is None else {"out": out}
            return kernel.call_boxed(keys, *arguments, **factors, **destination)
        result: Tensor = operator(*(tensor.float() for tensor in arguments), **factors)
        if out is None:
            return result.to(dtype)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return product
