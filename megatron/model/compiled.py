"""torch.compile for the forward and backward passes of blocks in training, and CUDA graphs of a whole step.

Attention is part of the compiled graph where it can be traced (`is_traceable`): the fused backend is an operator of
torch.library. `compile_blocks` changes only the classes of the modules. Parameter names are unchanged, so checkpoints
are interchangeable with those of an uncompiled model. All layers with the same window share one compiled graph.

A CUDA graph replays recorded kernels with recorded arguments: the host launches two graphs instead of hundreds of
kernels. The work of DeepSpeed stays outside: accumulating and averaging gradients, clipping, and the optimizer with its
learning rate. `megatron/config/checks.py` rejects what a graph cannot contain. Not measured on a GPU.

Legend: b batch, s tokens, e hidden size.
"""

import torch
from torch import Tensor, nn

from kerple.attention import DEFAULT_MODE, AttentionMode, Documents, PositionTables
from megatron.model.attention import LayerCache, SelfAttention
from megatron.model.gpt import GPT, TransformerBlock

# Backends without a graph break. `chunked` is a loop in Python.
TRACEABLE = ("fused", "sdpa", "reference")


class _UncompiledAttention(SelfAttention):
    """Attention that is not traced: only its projections are part of the block's graph."""

    context = torch.compiler.disable(SelfAttention.context)


class _CompiledBlock(TransformerBlock):
    """`[b, s, e] -> [b, s, e]`, compiled in training only: evaluation would recompile for each of its many lengths."""

    compiled = True
    _compiled = torch.compile(TransformerBlock.forward, dynamic=False)

    def forward(
        self,
        hidden: Tensor,
        cache: LayerCache | None = None,
        mode: AttentionMode = DEFAULT_MODE,
        tables: PositionTables | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        if self.training and torch.is_grad_enabled() and cache is None and mode == DEFAULT_MODE:
            return self._compiled(hidden, tables=tables, documents=documents)
        return super().forward(hidden, cache, mode, tables, documents)


def compile_blocks(model: nn.Module, device: torch.device, *, documents: bool = False) -> bool:
    """Compile the model's blocks for this device, at their first call in training. Returns whether this includes
    attention. With documents, whose sizes change from step to step, it does not.

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
    blocks = [module for module in model.modules() if isinstance(module, TransformerBlock)]
    traceable = not documents and all(is_traceable(block.attention, device) for block in blocks)
    for block in blocks:
        block.__class__ = _CompiledBlock
        if not traceable:
            block.attention.__class__ = _UncompiledAttention
    return traceable


def is_traceable(layer: SelfAttention, device: torch.device) -> bool:
    """Whether a block has no graph break in attention. Rotary methods compare positions with those of their cached
    tables, and methods with `modify_scores` checkpoint chunks of the scores: neither can be traced.
    """
    method = getattr(layer, "rpe", None)
    if method is not None and method.hooks & {"rotate", "modify_scores"}:
        return False
    windowed = layer.window is not None
    return layer.attention.training_backend(device, layer.head_size, layer.dropout > 0, windowed=windowed) in TRACEABLE


class _Loss(nn.Module):
    """The model without DeepSpeed's hooks, which PyTorch does not capture."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model.loss(*inputs)


def capture(model: GPT, inputs: list[Tensor]) -> None:
    """Replace the model's `forward`, which returns the loss, with graphs of its forward and backward pass.

    inputs: a batch. Later batches must have the same shapes; the graph copies them to its own inputs.

    Call this after DeepSpeed has moved the parameters and checkpoints are loaded: a graph reads fixed addresses. Before
    the capture PyTorch runs the model a few times, so that everything is compiled and cached; this does not change the
    gradients or the state of the random number generators.

    Raises RuntimeError if the step does something that a graph cannot contain, such as waiting for the device.
    """
    loss = _Loss(model)
    with torch.random.fork_rng([tensor.device for tensor in inputs[:1] if tensor.is_cuda]):
        torch.cuda.make_graphed_callables(loss, tuple(tensor.clone() for tensor in inputs))  # replaces loss.forward
    model.forward = loss.forward  # type: ignore[assignment, method-assign]
