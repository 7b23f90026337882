"""How DeepSpeed's engine reads and writes its files here: safe to read, whole when written, weights in one file per
layer.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn

from megatron.checkpoint.layers import layer_file, layer_state, load_layers
from megatron.checkpoint.storage import load_file


class SafeCheckpointEngine(CheckpointEngine):
    """torch.save and a weights-only torch.load.

    A failed write is kept in `error` rather than raised, so that this rank still meets the others at DeepSpeed's
    barriers; the caller looks at it when the save is over, on every rank.
    """

    def __init__(self):
        super().__init__()
        self.name = "safe"
        self.error: Exception | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        self.error = None

    def save(self, state_dict: Any, path: str) -> None:
        if self.error is not None:
            return
        try:
            with open(path, "wb") as handle:
                torch.save(state_dict, handle)
                handle.flush()
                os.fsync(handle.fileno())
        except (OSError, RuntimeError) as error:
            self.error = error

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_file(path, map_location=map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


class LayerFiles:
    """Mixed into DeepSpeed's engines, before them: the module's weights are written and read by layer, whatever the
    engine.
    """

    def use_layer_files(self, model: nn.Module, layout: Any) -> None:
        """`model` has `layers()`; `layout` is `megatron.training.distributed.Layout`."""
        self._layered_model = model
        self._layer_layout = layout
        self.layers_directory: Path | None = None
        self._leaves_out = False
        self.checkpoint_engine = SafeCheckpointEngine()

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> None:
        """Called by DeepSpeed's save: writes the layers' files and leaves nothing for the rank's own file."""
        directory, layout = Path(self._curr_ckpt_path), self._layer_layout
        tied_output = (
            self._layered_model.settings.num_layers + 4 if self._layered_model.settings.tied_embeddings else None
        )
        for index, layer in self._layered_model.layers().items():
            with GatheredParameters(list(layer.parameters()), enabled=self.zero_optimization_partition_weights()):
                if layout.data_rank == 0 and index != tied_output:
                    self.checkpoint_engine.save(
                        layer_state(layer), str(layer_file(directory, index, layout.tensor_rank))
                    )

    def load_module_state_dict(self, checkpoint: dict | None, strict: bool = True, **_: Any) -> None:
        """Called by DeepSpeed's load: reads the layers' files from `layers_directory`."""
        layout, settings = self._layer_layout, self._layered_model.settings
        layers = dict(self._layered_model.layers())
        if settings.tied_embeddings:
            layers.pop(settings.num_layers + 4, None)
        parameters = [parameter for layer in layers.values() for parameter in layer.parameters()]
        with GatheredParameters(parameters, modifier_rank=0, enabled=self.zero_optimization_partition_weights()):
            load_layers(layers, self.layers_directory, tensor_size=layout.tensor_size, tensor_rank=layout.tensor_rank)
        if layout.pipeline_size > 1:
            self._layered_model.synchronize_shared()

    @contextlib.contextmanager
    def optimizer_left_out(self, leave_out: bool) -> Iterator[None]:
        """Within it, saving writes no optimizer state if `leave_out`."""
        writes_zero_files, self._leaves_out = self.save_zero_checkpoint, leave_out
        self.save_zero_checkpoint = writes_zero_files and not leave_out
        try:
            yield
        finally:
            self.save_zero_checkpoint, self._leaves_out = writes_zero_files, False

    def _common_checkpoint_state(self, *args: Any) -> dict:
        state = super()._common_checkpoint_state(*args)
        return {**state, "optimizer": None} if self._leaves_out else state

    def _copy_recovery_script(self, save_path: str) -> None:
        """DeepSpeed puts a script beside its ZeRO files; the layers' files make it needless."""
