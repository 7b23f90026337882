"""CUDA graphs of a training step's forward and backward pass (`enable-cuda-graph`).

A graph replays recorded kernels with recorded arguments: the host launches two graphs instead of hundreds of kernels.
DeepSpeed's part stays outside: accumulating and averaging gradients, clipping, and the optimizer with its learning
rate. `megatron/config/checks.py` rejects what a graph cannot contain. Not measured on a GPU.
"""

import torch
from torch import Tensor, nn

from megatron.model.gpt import GPT


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
