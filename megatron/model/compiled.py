"""Blocks whose forward and backward passes in training are compiled by torch.compile.

The classes of a model's modules are exchanged, and nothing else: parameters keep their names, so that checkpoints are
those of a model that is not compiled. All layers share one compiled graph.

Legend: b batch, s tokens, e hidden size.
"""

import torch
from torch import Tensor, nn

from kerple.attention import FULL, Span
from megatron.model.block import PositionTables, SelfAttention, TransformerBlock
from megatron.model.cache import LayerCache


class _UncompiledAttention(SelfAttention):
    """Projections belong to the block's graph. What is between them has kernels of its own, and positional methods
    do what cannot be traced.
    """

    context = torch.compiler.disable(SelfAttention.context)


class _CompiledBlock(TransformerBlock):
    """`[b, s, e] -> [b, s, e]`, compiled in training; the many lengths of an evaluation are not worth it."""

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
    """Have the model's blocks compiled when they are first called in training, for this device.

    Raises RuntimeError where nothing can be compiled.
    """
    _try_compiler(device)
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            module.__class__, module.attention.__class__ = _CompiledBlock, _UncompiledAttention


def _try_compiler(device: torch.device) -> None:
    try:
        torch.compile(lambda states: states.sin() + 1)(torch.ones(64, device=device))
    except Exception as error:  # what a compiler, its headers or Triton can lack is wrapped in ever other classes
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RuntimeError(
            f"torch.compile does not work on this machine ({reason}); it takes a C++ compiler (CXX, or g++) and "
            "Python's headers, on a GPU Triton too"
        ) from error
