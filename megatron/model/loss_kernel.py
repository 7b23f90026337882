"""A Triton kernel for the cross entropy of logits, which it can overwrite with their gradient.

It reads the logits from memory once, in their own dtype, and computes in float32. The second loop
of a program reads its row of logits again: 98 KiB for 50,304 tokens in half precision. Programs
have enough threads that the rows of all running programs fit into the second-level cache of a data
center GPU.

Under tensor parallelism a rank has a slice of the vocabulary, so the gradient needs the log-sum-exp
of all ranks. The kernel is then launched twice: the first launch computes each rank's `lse`, the
second one the gradient from the merged `lse`. Without it, one launch does both.

Legend: c tokens of a chunk, v vocabulary (of this rank).
"""

import triton
import triton.language as tl

# Logits that a program loads at once, and its warps.
BLOCK, WARPS = 8192, 16
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def cross_entropy_kernel(
    logits, labels, mask, lse, label_logits, vocabulary, first_token,
    MERGED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cross entropy of a token, whose logits are a row of `[c, v]`.

    Unless `lse` is MERGED, computes `lse` `[c]`, the log of the sum of exponentials, and
    `label_logits` `[c]`, which are 0 for labels outside the slice of the vocabulary that starts at
    `first_token`. The cross entropy is their difference. With GRADIENT, replaces the logits with
    its gradient, softmax - one_hot(label), times the mask `[c]` if that is not None.
    """
    # The row of logits of this program, and its label in this slice of the vocabulary.
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocabulary
    label = tl.load(labels + row) - first_token
    column = tl.arange(0, BLOCK)
    if MERGED:
        row_lse = tl.load(lse + row)
    else:
        # Each lane sums its own columns, relative to the maximum so far of all columns.
        maximum = float("-inf")
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            inside = start + column < vocabulary
            tile = tl.load(
                logits + start + column,
                mask=inside,
                other=float("-inf"),
                eviction_policy="evict_last",
            )
            tile = tile.to(tl.float32)
            new_maximum = tl.maximum(maximum, tl.max(tile, 0))
            sums = sums * tl.exp2((maximum - new_maximum) * LOG2_E) + tl.exp2(
                (tile - new_maximum) * LOG2_E
            )
            maximum = new_maximum

        # Merge the lanes. The sum waits for all threads, so the label's logit is read before its
        # gradient replaces it.
        label_logit = tl.load(logits + label, mask=(label >= 0) & (label < vocabulary), other=0.0)
        tl.store(label_logits + row, label_logit.to(tl.float32))
        row_lse = maximum + tl.log(tl.sum(sums, 0))
        tl.store(lse + row, row_lse)
    if GRADIENT:
        # A second pass over the logits replaces them with their gradient.
        factor = 1.0
        if mask is not None:
            factor = tl.load(mask + row).to(tl.float32)
        for start in range(0, vocabulary, BLOCK):
            inside = start + column < vocabulary
            tile = tl.load(
                logits + start + column, mask=inside, other=0.0, eviction_policy="evict_first"
            )
            softmax = tl.exp2((tile.to(tl.float32) - row_lse) * LOG2_E)
            gradient = (softmax - tl.where(start + column == label, 1.0, 0.0)) * factor
            tl.store(logits + start + column, gradient.to(logits.dtype.element_ty), mask=inside)


# Triton decides at a kernel's definition whether to compile or interpret it.
INTERPRETED = not isinstance(cross_entropy_kernel, triton.JITFunction)
