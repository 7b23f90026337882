"""Cross entropy of the next token, and a memory-saving version fused with the output projection.

`linear_cross_entropy` processes a chunk of tokens at a time. The forward pass already computes the
gradients with respect to the hidden states and the weight, so each chunk's logits are computed only
once; the backward pass scales them. Under tensor parallelism each rank holds a slice of the
vocabulary: the ranks merge the log-sum-exp and the label logit of each token, and at the end the
gradient of the hidden states.

On a GPU, the kernel in `loss_kernel.py` reads the logits once and overwrites them with their
gradient. This is all the memory traffic between the matrix products, and chunks can be large.
Elsewhere PyTorch operations do the same.

Legend: b batch, s tokens of a sequence, n tokens, e hidden size, v vocabulary (of this rank), c
tokens of a chunk.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kerple.attention import Requirements
from kerple.attention.backends.triton.launch import unavailable_reason
from kerple.attention.self_check import MAX_ERROR, describe, wrong_result

# Devices on which the kernel runs; Triton's interpreter also runs it on a CPU, slowly, for tests.
KERNEL_DEVICES = ["cuda"]
# Bytes of a chunk's logits for the kernel. Every chunk after the first reads and writes the
# weight's gradient once more, so this is large: the 162M recipe (1.6 GiB of logits) has one chunk.
# A chunk has a multiple of 128 tokens.
KERNEL_CHUNK_BYTES, KERNEL_ROWS = 2**31, 128
# Logits of a chunk without the kernel. On a CPU, chunks that fit into the caches are faster than
# larger ones, but a chunk needs at least CPU_MIN_ROWS tokens, because it reads the weight and
# updates its entire gradient.
CHUNK_ELEMENTS, CPU_CHUNK_ELEMENTS, CPU_MIN_ROWS = 2**26, 2**21, 256


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each token in nats, `[b, s, v] -> [b, s]`, in at least float32."""
    flat_logits, flat_labels = logits.flatten(0, -2), labels.flatten()
    if not torch.is_grad_enabled() and _uses_kernel(logits.device, logits.dtype):
        lse, label_logits = _statistics(flat_logits.contiguous(), flat_labels)
        return (lse - label_logits).view_as(labels)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(flat_logits.to(dtype), flat_labels, reduction="none").view_as(labels)


def mean_loss(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Mean over the tokens of the cross entropy in nats times the weight (float `[b, s]`; default:
    1); a scalar.
    """
    losses = token_losses(logits, labels)
    if weights is not None:
        losses = losses * weights
    return losses.mean()


def needs_chunks(device: torch.device, dtype: torch.dtype, tokens: int, vocabulary: int) -> bool:
    """Whether `linear_cross_entropy` is better than `mean_loss` of all logits, which has no
    overhead per chunk.
    """
    return _uses_kernel(device, dtype) or tokens > chunk_rows(device, dtype, vocabulary)


def chunk_rows(device: torch.device, dtype: torch.dtype, vocabulary: int) -> int:
    """Tokens of a chunk."""
    if _uses_kernel(device, dtype):
        rows = KERNEL_CHUNK_BYTES // (vocabulary * dtype.itemsize)
        return max(KERNEL_ROWS, rows // KERNEL_ROWS * KERNEL_ROWS)
    elements = CHUNK_ELEMENTS
    if device.type == "cpu":
        elements = min(elements, max(CPU_CHUNK_ELEMENTS, CPU_MIN_ROWS * vocabulary))
    return max(1, elements // vocabulary)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    *,
    first_token: int = 0,
    group: dist.ProcessGroup | None = None,
    rows: int | None = None,
) -> Tensor:
    """Sum of mask * cross entropy in nats over the tokens; a float32 scalar.

    hidden `[n, e]`, weight `[v, e]`, labels int64 `[n]`, mask float `[n]` without gradient, or None
    for all ones. With a process group, `weight` is this rank's slice of the vocabulary, which
    starts at token `first_token`. rows: tokens of a chunk, `chunk_rows` by default.
    """
    if rows is None:
        rows = chunk_rows(hidden.device, hidden.dtype, len(weight))
    if not torch.is_grad_enabled():  # the function below would compute gradients
        hidden, weight = hidden.detach(), weight.detach()
    return _LinearCrossEntropy.apply(hidden, weight, labels, mask, first_token, group, rows)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        mask: Tensor | None,
        first_token: int,
        group: dist.ProcessGroup | None,
        rows: int,
    ) -> Tensor:
        # Which gradients to compute. The loop fills them, as the logits are not kept for backward.
        hidden_needs_grad, weight_needs_grad = ctx.needs_input_grad[:2]
        needs_grad = hidden_needs_grad or weight_needs_grad
        cross_entropy = _torch_cross_entropy
        if _uses_kernel(hidden.device, hidden.dtype):
            cross_entropy = _kernel_cross_entropy
        losses, hidden_grads = [], []
        weight_grad: Tensor | None = None
        chunk_mask: Tensor | None = None
        for start in range(0, len(hidden), rows):
            # The losses [c] of a chunk. logits_grad [c, v] is in the memory of its logits.
            chunk = slice(start, start + rows)
            states, chunk_labels = hidden[chunk], labels[chunk]
            if mask is not None:
                chunk_mask = mask[chunk]
            chunk_losses, logits_grad = cross_entropy(
                states @ weight.T, chunk_labels, chunk_mask, first_token, group, needs_grad
            )
            if chunk_mask is not None:
                chunk_losses = chunk_losses * chunk_mask
            losses.append(chunk_losses)
            if logits_grad is None:
                continue

            # The chunk's part of the gradients.
            logits_grad = logits_grad.to(hidden.dtype)
            if hidden_needs_grad:
                hidden_grads.append(logits_grad @ weight)
            if weight_needs_grad:
                weight_grad = _add_product(weight_grad, logits_grad.T, states)
            del logits_grad  # before the next chunk's logits are allocated

        # Each rank has a slice of the vocabulary, and so a part of the sum over it.
        hidden_grad: Tensor | None = None
        if hidden_grads:
            hidden_grad = _joined(hidden_grads)
            if group is not None:
                dist.all_reduce(hidden_grad, group=group)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        return _joined(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        if hidden_grad is not None:
            hidden_grad = _scaled(hidden_grad, upstream, hidden_grad.dtype)
        if weight_grad is not None:
            weight_grad = _scaled(weight_grad, upstream, ctx.weight_dtype)
        return hidden_grad, weight_grad, None, None, None, None, None


def _joined(parts: list[Tensor]) -> Tensor:
    """The concatenation of tensors; a single one is not copied."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, float32 and in place; total is None for zeros."""
    # `out_dtype` needs an NVIDIA GPU and half-precision inputs.
    is_half_on_gpu = left.device.type == "cuda" and left.dtype != torch.float32
    if is_half_on_gpu and _uses_kernel(left.device, left.dtype):
        if total is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    product = left @ right
    if total is None:
        return product.float()
    return total.add_(product)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * factor in a dtype, computed in float32 in one kernel."""
    # A factor without dimensions would be rounded to the gradient's dtype.
    return torch.mul(gradient, factor.view(1), out=torch.empty_like(gradient, dtype=dtype))


def _merge(lse: Tensor, label_logits: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The log-sum-exp and the label logits `[c]` of all ranks, from those of their slices of the
    vocabulary.
    """
    maximum = lse.clone()
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack([(lse - maximum).exp(), label_logits])
    dist.all_reduce(sums, group=group)
    return maximum + sums[0].log(), sums[1]


def _torch_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    first_token: int,
    group: dist.ProcessGroup | None,
    needs_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """The losses `[c]` of logits `[c, v]`, and the gradient of mask * loss with respect to the
    logits, if needed.
    """
    # The label's logit [c]. A label outside this rank's slice is replaced by an arbitrary one in
    # it, with its contribution zeroed.
    logits = logits.float()
    local_labels = labels[:, None] - first_token
    is_local = ((local_labels >= 0) & (local_labels < logits.shape[1])).to(logits.dtype)
    local_labels = local_labels.clamp(0, logits.shape[1] - 1)
    label_logits = logits.gather(1, local_labels).mul_(is_local).squeeze(1)

    # The log-sum-exp [c], whose exponentials overwrite the logits.
    maximum = logits.amax(dim=1, keepdim=True)  # [c, 1]
    exponentials = logits.sub_(maximum).exp_()
    lse = exponentials.sum(dim=1).log_().add_(maximum.squeeze(1))
    if group is not None:
        lse, label_logits = _merge(lse, label_logits, group)
    losses = lse - label_logits
    if not needs_grad:
        return losses, None

    # The gradient: softmax - one_hot(label), times the mask [c, 1].
    factors = torch.ones_like(maximum)
    if mask is not None:
        factors = mask[:, None].to(maximum.dtype)
    normalizer = (maximum - lse[:, None]).exp_()
    logits_grad = exponentials.mul_(normalizer.mul_(factors))
    return losses, logits_grad.scatter_add_(1, local_labels, -is_local * factors)


def _kernel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    first_token: int,
    group: dist.ProcessGroup | None,
    needs_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Like `_torch_cross_entropy`, but the gradient overwrites the logits."""
    lse, label_logits = _statistics(
        logits, labels, mask, first_token, gradient=needs_grad and group is None
    )
    if group is not None:
        lse, label_logits = _merge(lse, label_logits, group)
        if needs_grad:
            _launch(
                logits, labels, mask, lse, label_logits, first_token, merged=True, gradient=True
            )
    losses = lse - label_logits
    if needs_grad:
        return losses, logits
    return losses, None


def _statistics(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    first_token: int = 0,
    *,
    gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp and the label logits `[c]` of `[c, v]`, both float32."""
    lse, label_logits = logits.new_empty(2, len(logits), dtype=torch.float32)
    _launch(logits, labels, mask, lse, label_logits, first_token, merged=False, gradient=gradient)
    return lse, label_logits


def _launch(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    lse: Tensor,
    label_logits: Tensor,
    first_token: int,
    *,
    merged: bool,
    gradient: bool,
) -> None:
    from megatron.model import loss_kernel  # it needs Triton

    rows, vocabulary = logits.shape
    labels = labels.contiguous()
    if mask is not None:
        mask = mask.contiguous()
    with torch.cuda.device_of(logits):
        loss_kernel.cross_entropy_kernel[(rows,)](
            logits,
            labels,
            mask,
            lse,
            label_logits,
            vocabulary,
            first_token,
            MERGED=merged,
            GRADIENT=gradient,
            BLOCK=loss_kernel.BLOCK,
            num_warps=loss_kernel.WARPS,
        )


def _uses_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type not in KERNEL_DEVICES or dtype not in MAX_ERROR:
        return False
    return unavailable_reason(Requirements(device=device)) is None


def kernel_failure(device: torch.device, dtype: torch.dtype) -> str | None:
    """Compare the loss of three chunks with PyTorch operations in float64. Returns why the kernel
    must not be used on a device; None if it may be, or is not used there anyway. Waits for the
    device.
    """
    if not _uses_kernel(device, dtype):
        return None

    # Random hidden states [8, 16] and a weight [9200, 16].
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad():
        states = torch.randn(8, 16, generator=generator, device="cpu")
        matrix = torch.randn(9200, 16, generator=generator, device="cpu") / 4
        hidden = states.to(device, dtype).requires_grad_()
        weight = matrix.to(device, dtype).requires_grad_()
        labels, mask = 1000 * torch.arange(8, device=device), torch.arange(1, 9, device=device) / 4
        if type(hidden) is not Tensor:  # a FakeTensor has no values
            return None

        # Any error of the compiler or the driver is a failure of the kernel.
        try:
            loss = linear_cross_entropy(hidden, weight, labels, mask, rows=3)
            actual = (loss, *torch.autograd.grad(loss, (hidden, weight)))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a kernel that does not compile, or that the GPU rejects
            return describe(error)

        # The same in float64.
        exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
        losses = F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="none")
        loss = (losses * mask).sum()
        expected = (loss, *torch.autograd.grad(loss, exact))

    # Relative errors, in the 2-norm.
    errors, names = {}, ("result", "hidden states", "weight")
    for name, result, reference in zip(names, actual, expected, strict=True):
        errors[name] = ((result.double() - reference).norm() / reference.norm()).item()
    return wrong_result(errors, dtype)
