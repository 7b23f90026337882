"""The self-check of a model's kernels on all ranks (see `kerple.attention.self_check`)."""

from itertools import chain
from typing import Any

import torch
from torch import nn

from kerple.attention import Requirements, self_check
from kerple.attention import check_kernels as check_attention_kernels
from megatron.model import fused_block, loss
from megatron.model.attention import SelfAttention
from megatron.model.gpt import TransformerBlock
from megatron.utils.errors import UserError
from megatron.utils.ranks import Report, run_on_all_ranks


def check_kernels(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    *,
    training: bool,
    report: Report,
    documents: bool = False,
) -> None:
    """Check the fused attention kernels that the model needs, and the kernel of the loss, on every
    rank's device. A collective.

    If a check fails on any rank, no rank uses these kernels. A pipeline stage without transformer
    blocks checks only the loss.

    Args:
        model: its positional method is on `device`.
        dtype: of queries, keys and values.
        training: for training steps; otherwise for evaluation and generation.
        documents: training keeps the documents of a row apart.
        report: prints one line, which may differ between ranks. It is not called if nothing was
            checked.

    Raises UserError if the configured backend does not support the device, or if it is fused and
    the check fails.
    """
    # One of the layers with the same kernels. With `per_layer`, layers have different methods.
    layers: dict[Any, SelfAttention] = {}
    block: TransformerBlock | None = None
    for module in model.modules():
        if isinstance(module, SelfAttention):
            method = getattr(module.positional, "method", module.positional)
            parameters = tuple(name for name, _ in method.named_parameters())
            layers[type(method), parameters, module.window] = module
        elif isinstance(module, TransformerBlock):
            block = module
    layer = next(iter(layers.values()), None)

    # The kernels of one attention layer, of a block, and of all attention layers on this rank.
    def check(layer: SelfAttention) -> list[self_check.Verdict]:
        # Dropout needs another backend, so only validation runs the kernels.
        with_gradients = training and not layer.dropout
        expected = layer.expected_calls(device, dtype, training=with_gradients, documents=documents)
        try:
            return check_attention_kernels(expected, layer.backend)
        except NotImplementedError as error:
            raise UserError(str(error)) from None

    def check_all() -> tuple[list[self_check.Verdict], str | None, str | None]:
        verdicts = list(chain.from_iterable(map(check, layers.values())))
        of_loss, of_block = loss.kernel_failure(device, dtype), None
        if training and block is not None:
            norm, mlp = block.input_layernorm, block.mlp
            of_block = fused_block.kernel_failure(norm, mlp, device, dtype)
        return verdicts, of_loss, of_block

    # All ranks decide alike: the first failure on any rank counts.
    of_attention, of_loss, of_blocks = zip(*run_on_all_ranks(check_all), strict=True)
    for kernels, what, failures in (
        (loss, "the loss", of_loss),
        (fused_block, "transformer blocks", of_blocks),
    ):
        failure = next((failure for failure in failures if failure is not None), None)
        if failure is not None:
            kernels.KERNEL_DEVICES.remove(device.type)  # in this process
            report(
                f"self-check of the kernels for {what} FAILED: {failure}; PyTorch operations "
                f"replace them, which is slower; {self_check.HOW_TO_REPORT}"
            )

    # The attention kernels. Report a failure, or else one of the checks that passed.
    verdicts = list(chain.from_iterable(of_attention))
    failed = next((verdict for verdict in verdicts if verdict.failure is not None), None)
    if verdicts:
        report(str(failed or verdicts[0]))
    if layer is None:
        return
    if failed is not None:
        self_check.reject(dtype, layer.head_size, f"{failed.failure} ({failed.subject})")
    reason = self_check.failure(Requirements(dtype=dtype, head_size=layer.head_size, device=device))
    if reason is not None and layer.backend == "fused":
        raise UserError(f"attention-backend 'fused' {reason}; auto uses another backend")
