"""Triton kernels for the parts of a transformer block between its matrix products; `fused_block.py`
calls them.

They compute in float32 and round only what they store. Gradients of vectors (norm weights, biases)
are sums over rows: each program adds up the rows it handles, and `sum_rows_kernel` adds up the
programs' sums, so the order is fixed.

Legend: n rows (tokens), e columns (hidden size, or 4 times that in the MLP), p programs.
"""

import triton
import triton.language as tl

# Rows and columns of a tile of `activation_backward_kernel`, and columns of a program of the other
# kernels.
TILE_ROWS, TILE_COLUMNS, COLUMNS = 16, 128, 1024
# Programs that add up rows: a few for each multiprocessor of a GPU.
PROGRAMS = 528
SQRT_HALF, INVERSE_SQRT_2_PI = tl.constexpr(0.7071067811865476), tl.constexpr(0.3989422804014327)
TANH_FACTOR = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)


@triton.jit
def read(pointers, inside):
    """The values in float32; 0 where `inside` is false."""
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def write(pointers, values, inside):
    """Store the values, rounded to the dtype of the memory, where `inside` is true."""
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """(activation, derivative) of float32 x: gelu, gelu_tanh, relu or silu."""
    if ACTIVATION == "gelu":
        normal = 0.5 + 0.5 * tl.erf(x * SQRT_HALF)
        return x * normal, normal + x * INVERSE_SQRT_2_PI * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(z)) = sigmoid(2 z). Tensors are on the left of constants, as Triton's
        # interpreter requires.
        sigmoid = 1.0 / (1.0 + tl.exp((x + 0.044715 * x * x * x) * -TANH_FACTOR))
        slope = (1.0 + 3.0 * 0.044715 * x * x) * TANH_FACTOR
        return x * sigmoid, sigmoid + x * sigmoid * (1.0 - sigmoid) * slope
    elif ACTIVATION == "silu":
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        return x * sigmoid, sigmoid + x * sigmoid * (1.0 - sigmoid)
    else:
        positive = tl.where(x > 0.0, 1.0, 0.0)
        return x * positive, positive


@triton.jit
def norm_kernel(
    hidden, update, update_bias, weight, bias, new_hidden, normed, stats, size, eps,
    RMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of new_hidden = hidden + update + update_bias, of normed = norm(new_hidden), and of its
    stats `[n, 2]`: mean and inverse standard deviation. Without an update (None), new_hidden is
    hidden and not stored.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = read(hidden + row * size + column, inside)
    if update is not None:
        x += read(update + row * size + column, inside)
        if update_bias is not None:
            x += read(update_bias + column, inside)
        rounded = x.to(new_hidden.dtype.element_ty)
        tl.store(new_hidden + row * size + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    mean = 0.0
    if not RMS:
        mean = tl.sum(x, 0) / size
    centered = tl.where(inside, x - mean, 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(centered * centered, 0) / size + eps)
    y = centered * inverse * read(weight + column, inside)
    if bias is not None:
        y += read(bias + column, inside)
    write(normed + row * size + column, y, inside)
    tl.store(stats + 2 * row, mean)
    tl.store(stats + 2 * row + 1, inverse)


@triton.jit
def norm_backward_kernel(
    grad_normed, grad_hidden, hidden, weight, bias, stats, grad_input, normed, sums, rows, size,
    RMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the norm's input plus that of the residual, grad_hidden (None: zero); the
    recomputed output of the norm; and sums `[p, 3, e]` over each program's rows: the gradients of
    weight, bias and the update's bias.
    """
    # Sums over the rows of this program, kept in registers.
    column = tl.arange(0, BLOCK)
    inside = column < size
    w = read(weight + column, inside)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    input_sum = tl.zeros([BLOCK], tl.float32)
    for row_index in range(tl.program_id(0), rows, tl.num_programs(0)):
        # A row's input, the gradient of its normed output, and the saved statistics.
        row = tl.cast(row_index, tl.int64)
        x = read(hidden + row * size + column, inside)
        dy = read(grad_normed + row * size + column, inside)
        mean = tl.load(stats + 2 * row)
        inverse = tl.load(stats + 2 * row + 1)

        # Recompute the normed output.
        standardized = tl.where(inside, (x - mean) * inverse, 0.0)
        y = standardized * w
        if bias is not None:
            y += read(bias + column, inside)
        write(normed + row * size + column, y, inside)

        # Gradient of the input: remove the components that the norm makes constant.
        weighted = dy * w
        dx = weighted - standardized * (tl.sum(weighted * standardized, 0) / size)
        if not RMS:
            dx -= tl.sum(weighted, 0) / size
        dx *= inverse

        # Add the gradient of the residual stream.
        if grad_hidden is not None:
            dx += read(grad_hidden + row * size + column, inside)
        write(grad_input + row * size + column, dx, inside)

        # Sum the gradients of the vectors.
        weight_sum += dy * standardized
        bias_sum += dy
        input_sum += tl.where(inside, dx, 0.0)

    # Write the partial sums of this program.
    sums += tl.program_id(0) * 3 * size + column
    tl.store(sums, weight_sum, mask=inside)
    tl.store(sums + size, bias_sum, mask=inside)
    tl.store(sums + 2 * size, input_sum, mask=inside)


@triton.jit
def activation_kernel(x, bias, y, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of a row of y = activation(x + bias). The bias may be None."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    offsets = tl.program_id(0).to(tl.int64) * size + column
    value = read(x + offsets, inside)
    if bias is not None:
        value += read(bias + column, inside)
    value, _ = activate(value, ACTIVATION)
    write(y + offsets, value, inside)


@triton.jit
def activation_backward_kernel(
    x, bias, grad, y, sums, rows, size,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Replaces the gradient of y = activation(x + bias) with that of x, and recomputes y. Computes
    sums `[p, e]` over each program's rows: the gradient of the bias.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    b = tl.zeros([1, COLUMNS], tl.float32)
    if bias is not None:
        b = read(bias + column, column < size)
    total = tl.zeros([1, COLUMNS], tl.float32)
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < size)
        offsets = row.to(tl.int64) * size + column
        value, slope = activate(read(x + offsets, inside) + b, ACTIVATION)
        dx = read(grad + offsets, inside) * slope
        write(y + offsets, value, inside)
        write(grad + offsets, dx, inside)
        total += tl.sum(dx, 0, keep_dims=True)
    tl.store(sums + tl.program_id(1) * size + column, total, mask=column < size)


@triton.jit
def gated_kernel(x, y, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of a row of y = activation(gate) * up `[n, e]`, for x = [gate, up]
    `[n, 2 e]`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = read(x + row * 2 * size + column, inside)
    up = read(x + row * 2 * size + size + column, inside)
    value, _ = activate(gate, ACTIVATION)
    write(y + row * size + column, value * up, inside)


@triton.jit
def gated_backward_kernel(x, grad, y, grad_x, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of a row of the gradient of x, from that of y; recomputes y. For x and y see
    `gated_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = read(x + row * 2 * size + column, inside)
    up = read(x + row * 2 * size + size + column, inside)
    dy = read(grad + row * size + column, inside)
    value, slope = activate(gate, ACTIVATION)
    write(y + row * size + column, value * up, inside)
    write(grad_x + row * 2 * size + column, dy * up * slope, inside)
    tl.store(
        grad_x + row * 2 * size + size + column,
        (dy * value).to(grad_x.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def sum_rows_kernel(sums, total, rows, size, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """BLOCK columns of the sum of the rows of `[p, e]`."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    result = tl.zeros([1, BLOCK], tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        values = tl.load(sums + row * size + column, mask=(row < rows) & (column < size), other=0.0)
        result += tl.sum(values, 0, keep_dims=True)
    tl.store(total + column, result.to(total.dtype.element_ty), mask=column < size)
