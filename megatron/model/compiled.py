"""torch.compile for the blocks' forward and backward passes in training.

`compile_blocks` changes only the classes of the modules. Parameter names are unchanged, so checkpoints are
interchangeable with those of an uncompiled model. All layers share one compiled graph.

Legend: b batch, s tokens, e hidden size.
"""

import torch
from torch import Tensor, nn

from kerple.attention import FULL, Span
from megatron.model.gpt import LayerCache, PositionTables, SelfAttention, TransformerBlock


class _UncompiledAttention(SelfAttention):
    """Only the projections are part of the block's graph. Attention has its own kernels, and positional methods use
    Python code that cannot be traced.
    """

    context = torch.compiler.disable(SelfAttention.context)


class _CompiledBlock(TransformerBlock):
    """`[b, s, e] -> [b, s, e]`, compiled in training only: evaluation would recompile for each of its many lengths."""

    _compiled = torch.compile(TransformerBlock.forward, dynamic=False)

    def forward(
        self,
        hidden: Tensor,
        cache: LayerCache | None = None,
        span: Span = FULL,
        tables: PositionTables | None = None,
    ) -> Tensor:
        if self.training and torch.is_grad_enabled() and cache is None and span == FULL:
            return self._compiled(hidden, tables=tables)
        return super().forward(hidden, cache, span, tables)


def compile_blocks(model: nn.Module, device: torch.device) -> None:
    """Compile the model's blocks for this device, at their first call in training.

    Raises RuntimeError if torch.compile does not work on this machine.
    """
    try:
        torch.compile(lambda states: states.sin() + 1)(torch.ones(64, device=device))
    except Exception as error:  # a missing compiler, header or Triton surfaces as many different exceptions
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RuntimeError(
            f"torch.compile does not work on this machine ({reason}); it needs a C++ compiler (CXX, or g++) and "
            "Python's headers, and on a GPU also Triton"
        ) from error
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            module.__class__, module.attention.__class__ = _CompiledBlock, _UncompiledAttention
