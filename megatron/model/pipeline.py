"""The GPT model as stages of DeepSpeed's pipeline.

Layers, their indices and their names are those of `gpt.py`. This module handles the parameters that
several stages share: the shared positional method, and the embedding if it is tied to the output.
Each stage has a copy. The copies start from the same values and get the gradients of their own
layers; these are summed over the stages before the optimizer's step, so the copies stay identical.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kerple.attention import Documents
from megatron.model.gpt import (
    Embedding,
    Output,
    TransformerBlock,
    layer_factories,
    positional_methods,
)
from megatron.model.settings import ModelSettings


class _FactorySpec(LayerSpec):
    """A LayerSpec for a function that builds the layer, instead of a class and its arguments."""

    def __init__(self, layer_type: type[nn.Module], factory: Callable[[], nn.Module]):
        super().__init__(layer_type)
        self._factory = factory

    def build(self, log: bool = False) -> nn.Module:
        return self._factory()


def _identity(hidden: Tensor) -> Tensor:
    return hidden


def _mark_replicated(parameter: nn.Parameter, replicated: bool) -> None:
    """DeepSpeed counts a replicated parameter only once in the gradient norm."""
    parameter.ds_pipe_replicated = replicated  # type: ignore[attr-defined]


class GPTPipeline(PipelineModule):
    """This rank's stage of the model.

    Labels are tuples (labels int64 `[b, s]`, weights float `[b, s]`). The loss function includes
    the output layer, so that it can compute the logits in chunks: the output of DeepSpeed's last
    stage is the final hidden states. If inputs are tuples (tokens, document ids int64 `[b, s]`),
    the stages pass the ids on, beside the hidden states.
    """

    def __init__(
        self,
        settings: ModelSettings,
        *,
        topology: Any,
        partition_method: str,
        checkpoint_every: int = 0,
    ):
        """topology: a DeepSpeed PipeModelDataParallelTopology. partition_method: DeepSpeed's, such
        as "parameters" or "type:TransformerBlock". checkpoint_every: as for `GPT`.
        """
        # The type of a layer is what partition_method "type:TransformerBlock" counts.
        factories, num_layers = layer_factories(settings), settings.config.num_layers
        # Functions at 1 and L+2, layers everywhere else.
        specs: list[object] = [_identity] * (num_layers + 5)
        for index, factory in factories.items():
            layer_type: type[nn.Module] = nn.Module
            if 2 <= index < num_layers + 2:
                layer_type = TransformerBlock
            specs[index] = _FactorySpec(layer_type, factory)
        recomputed = None
        # With groups of one, only blocks are recomputed; larger groups may contain other layers,
        # too.
        if checkpoint_every == 1:
            recomputed = [TransformerBlock.__name__]
        self.settings = settings
        self._documents: Documents | None = None  # of the last inputs
        super().__init__(
            specs,
            topology=topology,
            loss_fn=self._loss,
            partition_method=partition_method,
            activation_checkpoint_interval=checkpoint_every,
            activation_checkpoint_func=partial(checkpoint, use_reentrant=False),
            checkpointable_layers=recomputed,
        )
        # The loss function calls the output layer, so its forward leaves the hidden states as they
        # are.
        if self.output is not None:
            self.output.in_loss = True
        # Document ids travel beside the hidden states: each layer splits them off, and appends them
        # to what it returns.
        for layer in self.layers().values():
            layer.register_forward_pre_hook(self._split_documents, with_kwargs=True)
            layer.register_forward_hook(self._append_ids, with_kwargs=True)
        self._shared = self._find_shared()

    def _split_documents(
        self,
        layer: nn.Module,
        inputs: tuple[Tensor | tuple[Tensor, Tensor]],
        options: dict[str, Any],
    ) -> tuple[tuple[Tensor], dict[str, Any]] | None:
        """Turn ids in the input of a layer into its argument `documents`, if it has that."""
        if not isinstance(inputs[0], tuple):
            return None
        states, ids = inputs[0]
        if not isinstance(layer, Embedding | TransformerBlock):
            return (states,), {}
        if self._documents is None or self._documents.ids is not ids:
            self._documents = Documents(ids)  # all layers of this stage share it
        return (states,), {"documents": self._documents}

    def _append_ids(
        self, layer: nn.Module, inputs: Any, options: dict[str, Any], states: Tensor
    ) -> Any:
        if "documents" not in options:
            return None
        return states, options["documents"].ids

    @property
    def output(self) -> Output | None:
        """The output layer; None on all stages but the last."""
        return cast("Output | None", self.layers().get(self.settings.config.num_layers + 4))

    def layers(self) -> dict[int, nn.Module]:
        """Layer index -> layer, for the layers of this stage."""
        return {int(name): self.forward_funcs[local] for name, local in self.fwd_map.items()}

    def _loss(self, hidden: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        assert self.output is not None  # DeepSpeed computes the loss on the last stage
        return self.output.loss(hidden, *labels)

    def of_all_stages(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Merge the stages' values by name, in the order of the stages. A collective."""
        stages: list[dict[str, Tensor]] = [{}] * self.num_stages
        dist.all_gather_object(stages, values, group=self._grid.get_pipe_parallel_group())
        return {name: value for stage in stages for name, value in stage.items()}

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, dist.ProcessGroup | None]]:
        """DeepSpeed calls this to sum the gradients of shared parameters after the backward passes
        of a batch.
        """
        return self._shared

    def synchronize_shared(self) -> None:
        """Copy the first stage's values to all stages: a loaded checkpoint has one value of each
        shared parameter.
        """
        for parameter, group in self._shared:
            assert group is not None  # this stage is in the groups of its own parameters
            with torch.no_grad():
                dist.broadcast(parameter.data, src=dist.get_global_rank(group, 0), group=group)

    def _find_shared(self) -> list[tuple[nn.Parameter, dist.ProcessGroup | None]]:
        """This stage's shared parameters, each with the group that sums its gradients."""
        if self.num_stages == 1:
            return []
        # The parameters of a positional method that the blocks share.
        pipe_group = self._grid.get_pipe_parallel_group()
        layers = self.layers()
        parameters: list[nn.Parameter] = []
        for method in positional_methods(layers).values():
            if method.shared and "embed" not in method.hooks:
                parameters.extend(method.parameters())

        # A stage with only the final norm or the output has no block, so it has no copy and is not
        # in the group.
        counts = [0] * self.num_stages
        dist.all_gather_object(counts, len(parameters), group=pipe_group)
        block_stages = [stage for stage, count in enumerate(counts) if count]
        group = pipe_group
        if len(set(counts)) > 1:
            group = self._group_of_stages(block_stages)
        for parameter in parameters:
            _mark_replicated(parameter, self.stage_id != block_stages[0])
        shared = [(parameter, group) for parameter in parameters]

        # The embedding, which is also the weight of a tied output.
        if not self.settings.config.no_weight_tying:
            group = self._group_of_stages([0, self.num_stages - 1])
            if 0 in layers:
                embedding = cast(Embedding, layers[0]).word_embeddings
                shared.append((embedding.get_parameter("weight"), group))
            elif self.output is not None:
                weight = self.output.final_linear.get_parameter("weight")
                _mark_replicated(weight, True)
                shared.append((weight, group))
        return shared

    def _group_of_stages(self, stages: list[int]) -> dist.ProcessGroup | None:
        """The process group of these stages for this rank's data-parallel and tensor-parallel
        position; None if this rank is not in it.

        torch.distributed requires that all ranks create all groups.
        """
        own_group = None
        # Every pipeline has such a group; this rank keeps its own.
        for pipeline_ranks in self._topo.get_axis_comm_lists("pipe"):
            ranks = [pipeline_ranks[stage] for stage in stages]
            group = dist.new_group(ranks)
            if self.global_rank in ranks:
                own_group = group
        return own_group
