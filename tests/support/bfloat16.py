"""bfloat16 without a GPU: exact products in Triton's interpreter, and bounds of the rounding
errors.

**Arithmetic.** A product of two bfloat16 numbers is exact in float32, so a product of bfloat16
matrices equals that of float32 matrices with the same values. Triton's interpreter multiplies the
bits as integers and truncates when it converts to bfloat16; `interpreted_bfloat16` corrects both.
With it, the interpreter computes what a GPU does, except for the order of float32 sums and the last
bits of exponentials.

**Bounds.** Let u = 2^-8 be the unit roundoff of bfloat16 (8 significant bits, round to nearest),
and e = 2^-23 that of a float32 sum (twice that of round to nearest, because tensor cores truncate).
A float32 sum of n terms has an error of at most n e times the sum of their absolute values, in any
order (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). The inputs are bfloat16
numbers and exact. With |.| elementwise, the kernels round as follows:

- Scores S = scale w (q.k) + bias are float32. Their error is at most (d + 8) e (scale |w| |q|.|k| +
  |bias| + |lse|), and each computed probability has at most the relative error `t`: this, that of
  exp2 (4 e, and 4 e more for each tile of keys whose maximum changes), and that of the row sum of n
  keys (n e).
- The context is the sum of P v with P rounded to bfloat16, divided by the row sum, rounded:
  E(O) = (u + t) |P| |V| + u |O|.
- delta = O.dO uses the rounded context: E(delta) = E(O).|dO| + d e |O|.|dO|. The gradient of the
  scores, G = P (dP - delta) with dP = dO V^T, is float32: E(G) = P (E(delta) + d e |dO||V|^T) + t
  |G|.
- The gradients of query, key and value are products with G or P rounded to bfloat16, rounded:
  E(dQ) = scale (|w| E(G) + (u + n e) |w G|) |K| + u |dQ|, in the same way dK, and E(dV) = (u + t)
  P^T |dO| + u |dV|.
- The gradients of tables are float32 sums of G, or of scale (q.k) G, over the pairs at a distance.
  They are not rounded to bfloat16: their error is the sum of E(G), and n e times the sum of |G|.
  The gradient of a decay's prefix sum is the difference of two such sums, over the pairs of its
  query and of its key.

Factors 1 + u account for all terms of second order. The chunked backend computes in float32 and
rounds only its results, so its bounds are the same with u = 0 in all terms except the last
rounding.

The loss rounds the logits z = H W^T, their gradient g = m (softmax(z) - one_hot), and the gradients
of H and W, that of H before and after it is multiplied by the upstream gradient:

- E(z) = u |z| + d e |H| |W|^T and E(lse) = p.E(z), so the loss of a token has the error E(z)[label]
  + E(lse).
- E(g) = m p (E(z) + E(lse)) + u |g|, E(dH) = E(g) |W| + 2 u |dH|, and E(dW) = E(g)^T |H| + u |dW|.

Legend: b batch, s query length, t key length, h heads, d head size or hidden size, n tokens, v
vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from kerple.attention import Span

BFLOAT16_UNIT, FLOAT32_UNIT = 2.0**-8, 2.0**-23


@contextmanager
def interpreted_bfloat16() -> Iterator[None]:
    """Make Triton's interpreter multiply bfloat16 numbers, and round to bfloat16, as a GPU does."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot
    cast_impl = InterpreterBuilder.cast_impl

    def as_float32(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        # bfloat16 is the upper half of float32.
        bits = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def dot(builder: Any, left: TensorHandle, right: TensorHandle, *options: Any) -> TensorHandle:
        return create_dot(builder, as_float32(left), as_float32(right), *options)

    def cast(builder: Any, source: TensorHandle, target: Any) -> TensorHandle:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            rounded = torch.tensor(source.data).to(torch.bfloat16)
            bits = rounded.view(torch.int16).numpy()
            return TensorHandle(bits.view(np.uint16), tl.bfloat16)
        return cast_impl(builder, source, target)

    with (
        patch.object(InterpreterBuilder, "create_dot", dot),
        patch.object(InterpreterBuilder, "cast_impl", cast),
    ):
        yield


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().double()


def attention_bounds(arguments: dict[str, Any], upstream: Tensor, unit: float) -> list[Tensor]:
    """Bounds of the absolute errors of `run_attend`'s results, elementwise: context, and the
    gradients of query, key, value, tables and decay sums, each in the shape of the result.

    Args:
        arguments: as for `attend`; query, key, value and upstream gradient `[b, h, s or t, d]` are
            bfloat16 numbers.
        unit: u of the terms other than the last rounding: BFLOAT16_UNIT for the kernels, 0 for the
            chunked backend.
    """
    query, key, value = (_exact(arguments[name]) for name in ("query", "key", "value"))
    upstream = _exact(upstream)
    batch, heads, s, d = query.shape
    t = key.shape[2]
    scale = d**-0.5
    mask = Span(arguments["window"]).mask(range(t - s, t), range(t), query.device)
    distance = torch.arange(t - s, t)[:, None] - torch.arange(t)
    distance = distance.masked_fill(mask, 0)

    def by_pair(table: Tensor | None, default: float) -> Tensor:
        if table is None:
            return torch.full((1, 1, 1), default, dtype=torch.float64)
        return _exact(table)[:, distance]

    bias = by_pair(arguments["bias_table"], 0.0)
    weight = by_pair(arguments["weight_table"], 1.0)
    if "decay_sums" in arguments:
        sums = arguments["decay_sums"].detach()
        bias = bias + sums[..., t - s :, None] - sums[..., None, :]

    # The exact values of the forward and backward pass.
    products = scale * query @ key.transpose(2, 3)
    absolute_products = scale * query.abs() @ key.abs().transpose(2, 3)
    scores = (weight * products + bias).masked_fill(mask, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    probabilities = scores.softmax(-1)
    context = probabilities @ value
    grad_probabilities = upstream @ value.transpose(2, 3)
    delta = (upstream * context).sum(-1, keepdim=True)
    grad_scores = probabilities * (grad_probabilities - delta)

    # The errors of scores and probabilities: t and u + t of the formulas above.
    e, u = FLOAT32_UNIT, unit
    magnitude = weight.abs() * absolute_products + bias.abs() + lse.abs()
    score_error = (d + 8) * e * magnitude
    largest_error = score_error.masked_fill(mask, 0.0).amax()
    key_tiles = -(-t // 16)
    tau = 4 * (largest_error + (t + 4 * key_tiles) * e)
    rho = u + tau * (1 + u)

    def rounded(exact: Tensor, error: Tensor, last_unit: float = BFLOAT16_UNIT) -> Tensor:
        return error + last_unit * (exact.abs() + error)

    # The errors of the context, of delta, and of the gradient of the scores.
    context_error = rho * (probabilities @ value.abs())
    by_element = rounded(context, context_error, u) + (t + d) * e * context.abs()
    delta_error = (by_element * upstream.abs()).sum(-1, keepdim=True)
    grad_probabilities_error = d * e * (upstream.abs() @ value.abs().transpose(2, 3))
    from_difference = probabilities * (delta_error + grad_probabilities_error)
    grad_scores_error = (1 + tau) * from_difference + tau * grad_scores.abs()

    # The gradients of query, key and value.
    weighted = weight * grad_scores
    weighted_error = (1 + u) * weight.abs() * grad_scores_error
    weighted_error = weighted_error + (u + (s + t) * e) * weighted.abs()
    grad_query = scale * weighted @ key
    grad_key = scale * weighted.transpose(2, 3) @ query
    grad_value = probabilities.transpose(2, 3) @ upstream
    bounds = [
        rounded(context, context_error),
        rounded(grad_query, scale * weighted_error @ key.abs()),
        rounded(grad_key, scale * weighted_error.transpose(2, 3) @ query.abs()),
        rounded(grad_value, rho * (probabilities.transpose(2, 3) @ upstream.abs())),
    ]

    # The gradients of tables: of the bias, the gradient of the scores; of the weight, its product
    # with the scaled product of query and key.
    visible = ~mask
    for name, factor, factor_error in (
        ("bias_table", torch.ones(()), torch.zeros(())),
        ("weight_table", products.abs(), d * e * absolute_products),
    ):
        table = arguments[name]
        if table is None:
            continue
        pair_error = grad_scores_error * (factor + factor_error)
        sum_error = factor_error + batch * s * e * factor
        pair_error = pair_error + grad_scores.abs() * sum_error
        by_head = pair_error.sum(0).expand(heads, s, t)
        summed = torch.zeros(table.shape, dtype=torch.float64)
        summed.index_add_(1, distance[visible], by_head[:, visible])
        bounds.append(summed)
    if "decay_sums" in arguments:
        pair_error = grad_scores_error + (s + t) * e * grad_scores.abs()
        summed = pair_error.sum(2)
        summed[..., t - s :] += pair_error.sum(3)
        bounds.append(summed)
    return bounds


def loss_bounds(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> list[Tensor]:
    """Bounds of the absolute errors of the sum of mask * cross entropy, and of its gradients with
    respect to hidden states `[n, d]` and weight `[v, d]`, which are bfloat16 numbers.
    """
    hidden, weight, mask = _exact(hidden), _exact(weight), _exact(mask)[:, None]
    e, u = FLOAT32_UNIT, BFLOAT16_UNIT
    n, d = hidden.shape
    v = len(weight)

    # Logits, and the logarithm of the sum of their exponentials.
    logits = hidden @ weight.T
    absolute_products = hidden.abs() @ weight.abs().T
    logits_error = u * logits.abs() + (1 + u) * d * e * absolute_products
    probabilities = logits.softmax(-1)
    # The mean value theorem: the softmax between exact and rounded logits is at most exp(2 max
    # error) as large.
    largest_ratio = (2 * logits_error.amax()).exp()
    lse_error = (probabilities * logits_error).sum(-1, keepdim=True) * largest_ratio

    # The loss.
    label_error = logits_error.gather(1, labels[:, None])
    float32_error = (n + v) * e * (logits.abs().amax() + 1)
    loss_error = (mask * (lse_error + label_error + float32_error)).sum()

    # The gradients of the logits, the hidden states and the weight.
    one_hot = torch.nn.functional.one_hot(labels, v)
    grad = mask * (probabilities - one_hot)
    grad_error = mask * probabilities * (logits_error + lse_error + float32_error).expm1()
    grad_error = grad_error + u * (grad.abs() + grad_error)
    hidden_error = (1 + 3 * u) * (grad_error + v * e * grad.abs()) @ weight.abs()
    hidden_error = hidden_error + u * (2 + u) * (grad @ weight).abs()
    weight_error = (1 + u) * (grad_error + n * e * grad.abs()).T @ hidden.abs()
    weight_error = weight_error + u * (grad.T @ hidden).abs()
    return [loss_error, hidden_error, weight_error]
