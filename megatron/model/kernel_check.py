"""The self-check of a model's attention, block and loss kernels on all ranks (see
`kerple.attention.self_check`).
"""

from collections.abc import Callable
from itertools import chain

import torch
from torch import nn

from kerple.attention import Heads, Requirements, self_check
from kerple.attention import check_kernels as check_attention_kernels
from megatron.model import fused_block, loss
from megatron.model.attention import SelfAttention
from megatron.model.gpt import TransformerBlock
from megatron.utils.errors import UserError
from megatron.utils.ranks import run_on_all_ranks


def check_kernels(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    *,
    training: bool,
    report: Callable[[str], None],
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
    layers = {}
    for module in model.modules():
        if isinstance(module, SelfAttention):
            method = getattr(module.positional, "method", module.positional)
            parameters = tuple(name for name, _ in method.named_parameters())
            layers[type(method), parameters, module.window] = module
    layer = next(iter(layers.values()), None)
    block = next(
        (module for module in model.modules() if isinstance(module, TransformerBlock)), None
    )

    # The kernels of one attention layer, of a block, and of all attention layers on this rank.
    def check(layer: SelfAttention) -> list[self_check.Verdict]:
        heads = (layer.local_heads.stop - layer.local_heads.start) * layer.tp.size
        # Dropout needs another backend, so only validation runs the kernels.
        with_gradients = training and not layer.dropout
        try:
            return check_attention_kernels(
                layer.positional,
                Heads(heads, heads // layer.queries_per_key, layer.head_size),
                device,
                dtype,
                training=with_gradients,
                backend=layer.backend,
                windowed=layer.window is not None,
                documents=documents,
            )
        except NotImplementedError as error:
            raise UserError(str(error)) from None

    def check_block() -> str | None:
        return (
            fused_block.kernel_failure(block, device, dtype)
            if training and block is not None
            else None
        )

    def check_attention() -> list[self_check.Verdict]:
        return list(chain.from_iterable(check(layer) for layer in layers.values()))

    # All ranks decide alike: the first failure on any rank counts.
    results = run_on_all_ranks(
        lambda: (check_attention(), loss.kernel_failure(device, dtype), check_block())
    )
    for index, (kernels, what) in enumerate(
        ((loss, "the loss"), (fused_block, "transformer blocks")), start=1
    ):
        failure = next((rank[index] for rank in results if rank[index] is not None), None)
        if failure is not None:
            kernels.KERNEL_DEVICES.remove(device.type)  # in this process
            report(
                f"self-check of the kernels for {what} FAILED: {failure}; PyTorch operations "
                f"replace them, which is slower; {self_check.HOW_TO_REPORT}"
            )

    # The attention kernels. Report a failure, or else one of the checks that passed.
    verdicts = [verdict for rank, *_ in results for verdict in rank]
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
