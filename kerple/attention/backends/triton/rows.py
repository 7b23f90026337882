"""What the backward pass needs of a row of queries: its denominator, and its products' sum.

Legend: b batch, h heads, s query length, d head size.
"""

import triton
import triton.language as tl

from kerple.attention.backends.triton.tiles import load_rows


@triton.jit
def rows_kernel(
    context, gradient, log_sum, pairs,
    context_b, context_h, context_s, gradient_b, gradient_h, gradient_s,
    heads, s, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Per query log_sum `[b, h, s]` and context . its gradient, which is the sum over keys of probability times its
    gradient: float32 `[b, h, rows, 2]`. Rows from s on get inf and 0, which makes their probabilities 0.
    """
    first = tl.program_id(0) * BLOCK_M
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    context += sample * context_b + head * context_h
    gradient += sample * gradient_b + head * gradient_h
    left = load_rows(context, first, context_s, s, SIZE, BLOCK_M, BLOCK_D).to(tl.float32)
    right = load_rows(gradient, first, gradient_s, s, SIZE, BLOCK_M, BLOCK_D).to(tl.float32)
    rows = first + tl.arange(0, BLOCK_M)
    denominator = tl.load(log_sum + (sample * heads + head) * s + rows, mask=rows < s, other=float("inf"))
    pairs += 2 * (sample * heads + head) * tl.num_programs(0) * BLOCK_M
    tl.store(pairs + 2 * rows, denominator)
    tl.store(pairs + 2 * rows + 1, tl.sum(left * right, 1))
