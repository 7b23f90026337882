"""The model under DeepSpeed: a training step, a validation loss, logits, and the numbers to log.

DeepSpeed has one engine for a plain model (ZeRO stages 0 to 3) and one for a pipeline; `Engine`
hides the difference.

Legend: b batch, s tokens, v padded vocabulary.
"""

import contextlib
import io
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    register_external_parameter,
)
from torch import Tensor, nn

from kerple.attention import Documents
from kerple.positional import PositionalMethod, project
from megatron.checkpoint.layers import DTYPES, tied_output
from megatron.checkpoint.optimizer import parameter_names
from megatron.config import Config, UserError
from megatron.data.datasets import Samples
from megatron.data.loader import Loader
from megatron.model.attention import describe_backends
from megatron.model.gpt import GPT, positional_methods, text_length
from megatron.model.initialization import initialize
from megatron.model.kernel_check import check_kernels
from megatron.model.pipeline import GPTPipeline
from megatron.model.settings import Layout, ModelSettings
from megatron.optimizers.whole_parameters import WholeParameterOptimizer
from megatron.training.deepspeed_setup import (
    PatchedEngine,
    PatchedPipelineEngine,
    deepspeed_config,
    deepspeed_curriculum,
    deepspeed_dict,
)
from megatron.training.optimizer import attach, configure_optimizer, project_masters
from megatron.utils.environment import slow_dtype_notice
from megatron.utils.ranks import Report

Batch = dict[str, Tensor]  # see `Loader`


class GPTWithLoss(GPT):
    """A GPT whose forward returns the training loss, which is what DeepSpeed's engine wraps."""

    def forward(  # type: ignore[override]  # DeepSpeed's engine calls forward for the loss
        self,
        tokens: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
        *,
        documents: Documents | None = None,
    ) -> Tensor:
        return self.loss(tokens, labels, mask, documents=documents)


def build_engine(
    config: Config, padded_vocab_size: int, layout: Layout, report: Report
) -> "Engine":
    """Build and initialize the model, the optimizer and DeepSpeed's engine. `report` prints once
    per run.

    Raises UserError if the batch sizes do not fit the layout, the device does not support the
    configured attention backend, or apex is required but not installed.
    """
    # The model.
    settings = ModelSettings(config.model, padded_vocab_size, layout.tensor_parallel)
    deepspeed_settings = deepspeed_dict(config, layout.data_size)
    topology = PipeModelDataParallelTopology(
        num_pp=layout.pipeline_size, num_mp=layout.tensor_size, num_dp=layout.data_size
    )
    model = _build_model(config, settings, layout, topology)

    # Its kernels, and what the log says about them.
    dtype = DTYPES[config.precision.dtype]
    if notice := slow_dtype_notice(layout.device, dtype):
        report(notice)
    documents = config.data.reset_attention_mask
    check_kernels(model, layout.device, dtype, training=True, documents=documents, report=report)
    if choices := describe_backends(model, layout.device, dtype, documents=documents):
        report(f"attention: {choices}")
    if deepspeed_settings["zero_optimization"]["stage"] != config.optimizer.zero_stage:
        report(
            f"ZeRO stage 1 is used instead of 0, because training is in {config.precision.dtype} "
            "(zero_optimization.stage; same arithmetic, the optimizer state is partitioned among "
            "replicas)"
        )

    # The optimizer, and DeepSpeed's engine.
    optimizer, description = configure_optimizer(config, model)
    report(f"optimizer: {description}")
    deepspeed = _wrap_with_deepspeed(model, optimizer, deepspeed_settings, layout, topology)
    if isinstance(optimizer, WholeParameterOptimizer):
        names = parameter_names(model.layers(), tied_output(config.model))
        attach(optimizer, deepspeed, names, layout)
        if optimizer.num_exchanged:
            report(
                f"optimizer: it updates whole parameters; {optimizer.num_exchanged:,} elements of "
                "parameters that are split over ranks are gathered for each step"
            )
    return Engine(config, layout, settings, model, deepspeed, deepspeed_settings)


def _build_model(
    config: Config, settings: ModelSettings, layout: Layout, topology: PipeModelDataParallelTopology
) -> "GPTWithLoss | GPTPipeline":
    """The initialized model, or this rank's stage of it, on the device of the rank. Raises
    UserError for an invalid `pipe_partition_method`.
    """
    # Recomputation of activations, in groups of blocks.
    training, checkpoint_every = config.training, 0
    if training.checkpoint_activations:
        checkpoint_every = training.checkpoint_num_layers
    model: GPTWithLoss | GPTPipeline
    if layout.pipeline_size > 1:
        method = config.parallel.pipe_partition_method
        try:
            # PipelineModule prints the layers of every stage.
            with contextlib.redirect_stdout(io.StringIO()):
                model = GPTPipeline(
                    settings,
                    topology=topology,
                    partition_method=method,
                    checkpoint_every=checkpoint_every,
                )
        except (re.error, RuntimeError) as error:
            if isinstance(error, re.error) or "Partitioning" in str(error):
                raise UserError(
                    f"pipe_partition_method {method}: {error}; use parameters, uniform or "
                    "type:transformer|mlp"
                ) from error
            raise
    else:
        model = GPTWithLoss(settings, checkpoint_every=checkpoint_every)

    # The same weights on all replicas, also in the copies that stages share.
    initialize(
        model.layers(),
        settings,
        seed=training.seed,
        init_method=config.model.init_method,
        output_init_method=config.model.output_layer_init_method,
        std=config.model.init_method_std,
    )
    model.to(layout.device)
    if isinstance(model, GPTPipeline):
        model.synchronize_shared()
    return model


def _wrap_with_deepspeed(
    model: "GPTWithLoss | GPTPipeline",
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    layout: Layout,
    topology: PipeModelDataParallelTopology,
) -> DeepSpeedEngine:
    """DeepSpeed's engine for the model. Raises UserError for `settings` that DeepSpeed rejects."""
    # The grid tells DeepSpeed which ranks are tensor-parallel slices of one model, and which are
    # replicas.
    if isinstance(model, GPTPipeline):
        engine_class, grid = PatchedPipelineEngine, model.mpu()
    else:
        engine_class, grid = PatchedEngine, None
        if layout.tensor_size > 1:
            grid = PipelineParallelGrid(topology=topology)

    # DeepSpeed prints its configuration.
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed: DeepSpeedEngine = engine_class(
            args=None,
            model=model,
            optimizer=optimizer,
            mpu=grid,
            config=settings,
            config_class=deepspeed_config(settings, grid),
            dist_init_required=False,
        )

    # What this model needs beside DeepSpeed's defaults.
    if settings["zero_optimization"]["stage"] == 3:
        _register_positional_parameters(model)
    if hasattr(deepspeed.optimizer, "loss_scaler"):
        # Instead of a bare Exception, `StepLog` raises a UserError that says what to change.
        deepspeed.optimizer.loss_scaler.raise_error_at_min_scale = False
    return deepspeed


class Engine:
    """The model of this rank and its optimizer."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        settings: ModelSettings,
        model: GPT | GPTPipeline,
        deepspeed: DeepSpeedEngine,
        deepspeed_settings: dict[str, Any],
    ):
        self.config, self.layout, self.settings = config, layout, settings
        self.model, self.deepspeed = model, deepspeed
        self.is_pipeline = layout.pipeline_size > 1
        self.seq_length = config.model.seq_length
        # As DeepSpeed counts them: global = micro x accumulation x replicas.
        self.micro_batch: int = deepspeed_settings["train_micro_batch_size_per_gpu"]
        self.accumulation: int = deepspeed_settings["gradient_accumulation_steps"]
        self.global_batch: int = deepspeed_settings["train_batch_size"]
        self.zero_stage: int = deepspeed_settings["zero_optimization"]["stage"]
        self.data_failure: str | None = None  # why a data worker of this rank has ended
        self._curriculum: CurriculumScheduler | None = None
        if config.curriculum.enabled:
            self._curriculum = CurriculumScheduler(deepspeed_curriculum(config))

    def batches(self, dataset: Samples, consumed_samples: int) -> Iterator[Batch]:
        """An endless iterator over this replica's micro-batches after `consumed_samples`."""
        loader = Loader(
            dataset,
            micro_batch_size=self.micro_batch,
            data_parallel_rank=self.layout.data_rank,
            data_parallel_size=self.layout.data_size,
            consumed_samples=consumed_samples,
            num_workers=self.config.data.num_workers,
            pin_memory=self.layout.device.type == "cuda",
        )
        for batch in loader:
            self.data_failure = loader.failure or self.data_failure
            yield batch

    def length_at(self, iteration: int) -> int:
        """Sequence length of the step after `iteration` earlier steps."""
        if self._curriculum is None:
            return self.seq_length
        return int(self._curriculum.get_difficulty(iteration + 1))

    def train_step(self, batches: Iterator[Batch], learning_rate: float, iteration: int) -> Tensor:
        """One optimizer step over `accumulation` micro-batches, after `iteration` earlier steps.
        Uses the first `length_at(iteration)` tokens of each sequence.

        Returns the mean loss over the global batch as a scalar on the device, without waiting for
        it.
        """
        # What changes from step to step.
        if self._curriculum is not None:
            batches = _shortened(batches, self.length_at(iteration))
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_factor", 1.0)
        for method in positional_methods(self.model.layers()).values():
            method.begin_step(iteration, self.config.training.seed, self.length_at(iteration))
        batches = self._with_weights(batches, self.accumulation)

        # DeepSpeed's pipeline runs all micro-batches of a step itself.
        if self.is_pipeline:
            if self._curriculum is not None:
                self.deepspeed.reset_activation_shape()
            loss = self.deepspeed.train_batch(_pipeline_batches(batches)).detach()
            self.deepspeed.timers(TRAIN_BATCH_TIMER).reset()  # it keeps the time of every step
            return loss

        # Without a pipeline, the engine steps at the last of the micro-batches.
        self.deepspeed.train()
        total = torch.zeros((), device=self.layout.device)
        for _ in range(self.accumulation):
            inputs, documents = self._to_device(next(batches))
            loss = self.deepspeed(*inputs, **documents)
            self.deepspeed.backward(loss)
            self.deepspeed.step()
            total += loss.detach()
        return self.mean_over_replicas(total / self.accumulation)

    @torch.no_grad()
    def validate(self, batches: Iterator[Batch], num_micro_batches: int) -> float:
        """Mean loss over the tokens of `num_micro_batches` micro-batches on every replica."""
        batches = self._with_weights(batches, num_micro_batches)
        length = self.config.training.seq_length_val or self.seq_length
        with text_length(positional_methods(self.model.layers()).values(), length):
            if self.is_pipeline:
                self.deepspeed.reset_activation_shape()
                loss = self.deepspeed.eval_batch(
                    _pipeline_batches(batches), num_micro_batches=num_micro_batches
                )
                self.deepspeed.reset_activation_shape()
                return float(loss)
            self.model.eval()
            total = torch.zeros((), device=self.layout.device)
            for _ in range(num_micro_batches):
                inputs, documents = self._to_device(next(batches))
                total += self.model.loss(*inputs, **documents)
            self.model.train()
        return float(self.mean_over_replicas(total / num_micro_batches))

    def mean_over_replicas(self, value: Tensor) -> Tensor:
        """Average a tensor over data-parallel replicas, in place. A collective."""
        if self.layout.data_size > 1:
            from megatron.core import parallel_state

            dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
            value /= self.layout.data_size
        return value

    def project(self) -> None:
        """Clamp parameters to their bounds, which a checkpoint may exceed. Under ZeRO 3, the first
        step does this.
        """
        project(self.model)
        project_masters(self.deepspeed.optimizer)

    def refresh_masters(self) -> None:
        """Copy weights that were loaded into the optimizer's fp32 master weights."""
        if hasattr(self.deepspeed.optimizer, "refresh_fp32_params"):
            self.deepspeed.optimizer.refresh_fp32_params()

    def _with_weights(self, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        """The next `count` micro-batches with loss masks whose mean over all of them and all
        replicas is 1: the mean of their losses is then the mean over the tokens that are not
        masked. Batches without loss masks are not changed.
        """
        if not self.config.data.eod_mask_loss:
            return batches
        step = list(itertools.islice(batches, count))
        masks = [batch["loss_mask"] for batch in step if "loss_mask" in batch]
        if not masks:
            return iter(step)
        # The share of tokens that count, over all micro-batches and replicas.
        share = torch.stack(masks).mean().to(self.layout.device)
        divisor = self.mean_over_replicas(share).to(masks[0].device).clamp(min=1e-9)
        return iter([{**batch, "loss_mask": batch["loss_mask"] / divisor} for batch in step])

    def _to_device(self, batch: Batch) -> tuple[list[Tensor], dict[str, Any]]:
        """The arguments of `GPT.loss`, and its keyword argument if there are documents."""
        device = self.layout.device
        names = [name for name in ("tokens", "labels", "loss_mask") if name in batch]
        documents: dict[str, Any] = {}
        if "document_ids" in batch:
            documents["documents"] = Documents(batch["document_ids"]).to(device)
        return [batch[name].to(device, non_blocking=True) for name in names], documents

    def layers(self) -> dict[int, nn.Module]:
        """Layer index -> layer, for the layers of this rank."""
        return self.model.layers()

    def shape(self) -> dict[str, int]:
        """The parallel sizes and the ZeRO stage, as a checkpoint stores them."""
        return {
            "data_parallel": self.layout.data_size,
            "pipeline_stages": self.layout.pipeline_size,
            "tensor_parallel": self.layout.tensor_size,
            "zero_stage": self.zero_stage,
        }

    @property
    def grad_norm(self) -> Tensor | float | None:
        """L2 norm of the last step's gradient, before clipping: a number or a scalar on the device,
        not finite if the step was skipped. None if `compute_grad_norm` is false.
        """
        if not self.deepspeed.was_step_applied():
            return math.inf
        norm: Tensor | float | None = self.deepspeed.get_global_grad_norm()
        return norm

    def schedule_step(self, iteration: int) -> int:
        """The step of the learning-rate schedule after `iteration` optimizer steps. In fp16, steps
        that are skipped to lower the loss scale do not count, as in DeepSpeed.
        """
        if self.config.precision.dtype != "fp16":
            return iteration
        return iteration - int(self.deepspeed.skipped_steps)

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale in fp16; None in other formats."""
        if self.config.precision.dtype != "fp16":
            return None
        return float(self.deepspeed.optimizer.cur_scale)

    def kernel_statistics(self) -> dict[str, Tensor]:
        """Name -> values per head, float32 on the CPU, of the positional parameters of all layers.
        A collective.

        Methods whose parameters differ between layers have the layer's index in the name.
        """
        methods = positional_methods(self.model.layers())
        parameters = [parameter for method in methods.values() for parameter in method.parameters()]
        statistics: dict[str, Tensor] = {}
        # Under ZeRO 3, each rank has only a part of the parameters.
        with GatheredParameters(parameters, enabled=self.zero_stage == 3):
            for index, method in methods.items():
                for name, heads in method.statistics().items():
                    if not method.shared:
                        name = f"layer_{index:02d}/{name}"
                    statistics[name] = heads.detach().float().cpu()
        # A stage knows only the methods of its own layers.
        if isinstance(self.model, GPTPipeline):
            return self.model.of_all_stages(statistics)
        return statistics


def _register_positional_parameters(model: nn.Module) -> None:
    """Let ZeRO 3 gather a positional method's parameters for the call of the layer that reads them.

    The method itself is not called. DeepSpeed would discover that only in the first training step,
    and a validation before it would fail.
    """
    for module in model.modules():
        for child in module.children():
            if isinstance(child, PositionalMethod):
                for parameter in child.parameters():
                    register_external_parameter(module, parameter)


def _shortened(batches: Iterator[Batch], length: int) -> Iterator[Batch]:
    """The first `length` tokens of every sequence, int64 [b, length]."""
    for batch in batches:
        yield {name: tensor[:, :length].contiguous() for name, tensor in batch.items()}


def _pipeline_batches(batches: Iterator[Batch]) -> Iterator[tuple[Any, tuple[Tensor, Tensor]]]:
    """(tokens or (tokens, document ids), (labels, loss mask)), as DeepSpeed's pipeline expects."""
    for batch in batches:
        mask = batch.get("loss_mask")
        if mask is None:
            mask = torch.ones_like(batch["labels"], dtype=torch.float32)
        inputs: Any = batch["tokens"]
        if "document_ids" in batch:
            inputs = inputs, batch["document_ids"]
        yield inputs, (batch["labels"], mask)
