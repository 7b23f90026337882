"""The GPT model as stages of DeepSpeed's pipeline.

The layers, their indices and their names are those of `gpt.py`. What is particular here is the parameters that live
on several stages: the shared positional method, and the embedding when it is tied to the output. Each stage holds a
copy, starts from the same values, sees the gradient of its own layers, and takes the sum over the stages before the
optimizer's step, so that a copy never differs from the others.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.model.block import TransformerBlock
from megatron.model.gpt import layer_factories, positional_methods
from megatron.model.output import Output
from megatron.model.settings import ModelSettings


class _Factory(LayerSpec):
    """A layer made by a function rather than by a class with arguments."""

    def __init__(self, name: str, layer_type: type[nn.Module] | None, build: Callable[[], nn.Module]):
        super().__init__(layer_type or nn.Module)
        self.name = name
        self._build = build

    def build(self, log: bool = False) -> nn.Module:
        return self._build()


def _identity(hidden: Tensor) -> Tensor:
    return hidden


class GPTPipeline(PipelineModule):
    """This rank's stage of the model.

    Labels are tuples (labels int64 [b, s], loss mask float [b, s]). The output layer's part is the loss function's, on
    the last stage, so that logits need not be whole; what DeepSpeed takes for logits are hidden states.
    """

    def __init__(
        self,
        settings: ModelSettings,
        *,
        topology,
        partition_method: str,
        checkpoint_every: int = 0,
    ):
        factories = layer_factories(settings)
        specs: list[object] = []
        for index in range(settings.num_layers + 5):
            if index not in factories:
                specs.append(_identity)
                continue
            kind = TransformerBlock if 2 <= index < settings.num_layers + 2 else None
            specs.append(_Factory(f"layer {index}", kind, factories[index]))
        self.settings = settings
        super().__init__(
            specs,
            topology=topology,
            loss_fn=lambda hidden, labels: self.output.loss(hidden, *labels),
            partition_method=partition_method,
            activation_checkpoint_interval=checkpoint_every,
            activation_checkpoint_func=partial(checkpoint, use_reentrant=False),
            checkpointable_layers=[TransformerBlock.__name__] if checkpoint_every == 1 else None,
        )
        if self.output is not None:
            self.output.in_loss = True
        self._shared = self._find_shared()

    @property
    def output(self) -> Output | None:
        """The output layer, on the last stage."""
        return self.layers().get(self.settings.num_layers + 4)

    def layers(self) -> dict[int, nn.Module]:
        """Layer index -> layer, those of this stage only."""
        return {int(name): self.forward_funcs[local] for name, local in self.fwd_map.items()}

    def of_all_stages(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The stages' values by name, in the order of the stages; every rank calls it together."""
        stages: list[dict[str, Tensor]] = [{}] * self.num_stages
        dist.all_gather_object(stages, values, group=self._grid.get_pipe_parallel_group())
        return {name: value for stage in stages for name, value in stage.items()}

    def _find_shared(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Parameters of which other stages hold a copy, with the group over which their gradients are summed."""
        if self.num_stages == 1:
            return []
        pipe_group = self._grid.get_pipe_parallel_group()
        shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        layers = self.layers()
        for method in positional_methods(layers).values():
            if method.shared and not method.embeds:
                shared.extend((parameter, pipe_group) for parameter in method.parameters())
        # Every stage takes part in every sum; a stage of the tail alone (norm, output) holds no block, and so no copy.
        holders = [None] * self.num_stages
        dist.all_gather_object(holders, len(shared), group=pipe_group)
        if len(set(holders)) > 1:
            group = self._group_of_stages([stage for stage, count in enumerate(holders) if count])
            shared = [(parameter, group) for parameter, _ in shared]
        first = next((stage for stage, count in enumerate(holders) if count), 0)
        for parameter, _ in shared:
            # DeepSpeed's gradient norm counts a replicated parameter once.
            parameter.ds_pipe_replicated = self.stage_id != first
        if self.settings.tied_embeddings:
            group = self._group_of_stages([0, self.num_stages - 1])
            embedding, output = layers.get(0), self.output
            if embedding is not None:
                shared.append((embedding.word_embeddings.weight, group))
            elif output is not None:
                output.final_linear.weight.ds_pipe_replicated = True
                shared.append((output.final_linear.weight, group))
        return shared

    def _group_of_stages(self, stages: list[int]) -> dist.ProcessGroup | None:
        """The group of the given stages among the ranks that share this rank's data and tensor coordinates.

        Groups are made by all ranks together, so every rank makes all of them.
        """
        mine = None
        for fiber in self._topo.get_axis_comm_lists("pipe"):
            ranks = [fiber[stage] for stage in stages]
            group = dist.new_group(ranks)
            if self.global_rank in ranks:
                mine = group
        return mine

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """DeepSpeed sums the gradients of these after the backward passes of a batch."""
        return self._shared

    def synchronize_shared(self) -> None:
        """Give every stage the first stage's values: the copies were initialized alike, and a loaded checkpoint holds
        one value each.
        """
        for parameter, group in self._shared:
            with torch.no_grad():
                dist.broadcast(parameter.data, src=dist.get_global_rank(group, 0), group=group)
