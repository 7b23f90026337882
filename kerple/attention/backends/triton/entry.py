"""All kernels, for the one module that launches them."""

import triton

from kerple.attention.backends.triton.backward import key_value_kernel, query_kernel
from kerple.attention.backends.triton.forward import forward_kernel
from kerple.attention.backends.triton.rows import rows_kernel
from kerple.attention.backends.triton.table_gradient import sum_diagonals_kernel, sum_tiles_kernel
from kerple.attention.backends.triton.tiles import MARGIN

# Triton's decorator decides, when a kernel is defined, whether it is compiled or interpreted.
INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)

__all__ = [
    "INTERPRETED",
    "MARGIN",
    "forward_kernel",
    "key_value_kernel",
    "query_kernel",
    "rows_kernel",
    "sum_diagonals_kernel",
    "sum_tiles_kernel",
]
