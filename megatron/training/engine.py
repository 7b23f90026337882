"""The model under DeepSpeed: one engine for a plain sequence of layers (ZeRO 0 to 3), one for a pipeline."""

from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed import PipelineEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import Tensor, nn

from megatron.config import Config, UserError
from megatron.model.gpt import GPT, SelfAttention, positional_methods
from megatron.model.initialization import initialize
from megatron.model.parallel import gather_vocabulary
from megatron.model.pipeline import GPTPipeline
from megatron.model.settings import ModelSettings
from megatron.training import metrics
from megatron.training.bf16 import DeviceOnlyBF16Optimizer
from megatron.training.deepspeed_config import deepspeed_dict
from megatron.training.distributed import Layout
from megatron.training.optimizer import configure_optimizer

Batch = dict[str, Tensor]


class TrainableGPT(GPT):
    """A GPT whose forward is the training loss, which is what DeepSpeed's engine wraps."""

    def forward(self, tokens: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.loss(tokens, labels, mask)


class Amended:
    """Mixed into DeepSpeed's engines, before them."""

    def _do_sanity_check(self) -> None:
        """DeepSpeed refuses fp16 on processors without instructions for it; PyTorch computes there too, only slower."""
        accelerator = get_accelerator()
        if accelerator.device_name() != "cpu":
            return super()._do_sanity_check()
        with patch.object(accelerator, "is_fp16_supported", lambda: True):
            return super()._do_sanity_check()

    @torch.no_grad()
    def clip_fp32_gradients(self) -> None:
        """Clipping in float32 without ZeRO, by the norm over the whole model.

        DeepSpeed's own counts the first pipeline stage alone (`deepspeed.runtime.utils.clip_grad_norm_`), and forgets
        the norm; its ZeRO and bf16 optimizers do both right.
        """
        tensor_rank = self.mpu.get_slice_parallel_rank() if self.mpu is not None else 0
        gradients, counted = [], []
        for parameter in self.module.parameters():
            if parameter.grad is None:
                continue
            gradients.append(parameter.grad)
            replica = getattr(parameter, "ds_pipe_replicated", False) or (
                tensor_rank > 0 and not getattr(parameter, "tensor_model_parallel", False)
            )
            if not replica:
                counted.append(parameter.grad)
        norm = torch.nn.utils.get_total_norm(counted)
        if self.mpu is not None:
            squared = norm.float().square().to(gradients[0].device)
            dist.all_reduce(squared, group=self.mpu.get_model_parallel_group())
            norm = squared.sqrt()
        scale = (self.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)
        self._global_grad_norm = norm


class SequenceEngine(Amended, DeepSpeedEngine):
    """DeepSpeed's engine for a plain sequence of layers."""


class StageEngine(Amended, PipelineEngine):
    """DeepSpeed's engine for one stage of a pipeline."""


class Engine:
    """What the training loop needs of a model: a step on a batch, a loss without one, and the numbers to log."""

    def __init__(self, config: Config, padded_vocab_size: int, layout: Layout, report: Callable[[str], None]):
        """Build the model, its optimizer and DeepSpeed's engine on this rank; `report` prints once per run."""
        self.config, self.layout = config, layout
        self.settings = ModelSettings.from_config(config, padded_vocab_size, layout.tensor_parallel)
        self.is_pipeline = layout.pipeline_size > 1
        _, self.accumulation, self.global_batch = config.batch.resolve(layout.data_size)
        self.seq_length = config.model.seq_length
        self.model = self._build_model()
        initialize(
            self.model.layers(),
            self.settings,
            seed=config.training.seed,
            init_method=config.model.init_method,
            output_init_method=config.model.output_layer_init_method,
            std=config.model.init_method_std,
        )
        self.model.to(layout.device)
        if self.is_pipeline:
            self.model.synchronize_shared()
        if config.training.torch_compile:
            self._compile()
            report("torch.compile: the blocks, in training; not attention")
        self.zero_stage = config.optimizer.zero_stage
        self.engine = self._build_engine(report)

    def _build_model(self) -> GPT | GPTPipeline:
        training = self.config.training
        every = training.checkpoint_num_layers if training.checkpoint_activations else 0
        if not self.is_pipeline:
            return TrainableGPT(self.settings, checkpoint_every=every)
        return GPTPipeline(
            self.settings,
            topology=self._topology(),
            partition_method=self.config.parallel.pipe_partition_method,
            checkpoint_every=every,
        )

    def _compile(self) -> None:
        from megatron.model.compiled import compile_blocks  # which loads torch's compiler

        try:
            compile_blocks(self.model, self.layout.device)
        except RuntimeError as error:
            raise UserError(f"torch_compile: {error}; install them, or leave torch_compile out") from error

    def _build_engine(self, report: Callable[[str], None]) -> DeepSpeedEngine:
        settings = deepspeed_dict(self.config, self.layout.data_size)
        if self.zero_stage == 0 and self.config.precision.dtype != "fp32":
            # Stage 0 in half precision keeps one master copy and one step per parameter; stage 1 does the same
            # arithmetic on flat groups.
            self.zero_stage = 1
            report(
                f"zero_optimization.stage: 0 in {self.config.precision.dtype} runs as stage 1 "
                "(the same arithmetic, its state spread over the replicas)"
            )
        settings["zero_optimization"] = {**settings.get("zero_optimization", {}), "stage": self.zero_stage}
        settings["zero_allow_untested_optimizer"] = True
        if self.config.precision.dtype == "bf16" and self.zero_stage == 1:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
        if self.zero_stage == 0 and not self.config.optimizer.gradient_clipping:
            # No clipping, but the norm is logged all the same.
            settings["gradient_clipping"] = float("inf")
        # DeepSpeed's clock would wait for the device before and after every micro-batch; the log has one that does not.
        settings.setdefault("timers", {"throughput": {"enabled": False}})
        if self.is_pipeline:
            settings["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
        optimizer, description = configure_optimizer(self.config, self.model)
        report(f"optimizer: {description}")
        if self.is_pipeline:
            mpu, kind = self.model.mpu(), StageEngine
        else:
            mpu, kind = self._tensor_parallel_grid(), SequenceEngine
        engine = kind(
            args=None,
            model=self.model,
            optimizer=optimizer,
            mpu=mpu,
            config=settings,
            config_class=DeepSpeedConfig(settings, mpu),
            dist_init_required=False,
        )
        if DeviceOnlyBF16Optimizer.serves(engine.optimizer):
            engine.optimizer.__class__ = DeviceOnlyBF16Optimizer
        return engine

    def _topology(self) -> PipeModelDataParallelTopology:
        layout = self.layout
        return PipeModelDataParallelTopology(
            num_pp=layout.pipeline_size, num_mp=layout.tensor_size, num_dp=layout.data_size
        )

    def _tensor_parallel_grid(self) -> PipelineParallelGrid | None:
        """Tells DeepSpeed which ranks are slices of one model, and which are replicas."""
        return PipelineParallelGrid(topology=self._topology()) if self.layout.tensor_size > 1 else None

    # -- training -----------------------------------------------------------------------------------------------------

    def train_step(self, batches: Iterator[Batch], learning_rate: float, iteration: int) -> Tensor:
        """One optimizer step over `accumulation` micro-batches, `iteration` steps having been made before; returns the
        mean loss over the global batch, on the device, not synchronized.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        for method in positional_methods(self.model.layers()).values():
            method.begin_step(iteration, self.config.training.seed)
        if self.is_pipeline:
            return self.engine.train_batch(_pipeline_batches(batches)).detach()
        self.engine.train()
        total = torch.zeros((), device=self.layout.device)
        for _ in range(self.accumulation):
            batch = self._to_device(next(batches))
            loss = self.engine(batch["tokens"], batch["labels"], batch.get("loss_mask"))
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach()
        return self.mean_over_replicas(total / self.accumulation)

    @torch.no_grad()
    def validate(self, batches: Iterator[Batch], count: int) -> float:
        """Mean loss over `count` micro-batches on every replica."""
        if self.is_pipeline:
            self.engine.reset_activation_shape()
            loss = self.engine.eval_batch(_pipeline_batches(batches), num_micro_batches=count)
            self.engine.reset_activation_shape()
            return float(loss)
        self.model.eval()
        total = torch.zeros((), device=self.layout.device)
        for _ in range(count):
            batch = self._to_device(next(batches))
            total += self.model.loss(batch["tokens"], batch["labels"], batch.get("loss_mask"))
        self.model.train()
        return float(self.mean_over_replicas(total / count))

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor | None:
        """Logits [batch, sequence, padded vocabulary] of int64 tokens [batch, sequence], without dropout; None on ranks
        that do not hold the last layer. Every rank calls it with the same tokens.
        """
        if not self.is_pipeline:
            self.model.eval()
            logits = self.model.logits(self.model.hidden(tokens.to(self.layout.device)))
            self.model.train()
            return logits
        batches = iter([{"tokens": tokens, "labels": tokens}])
        self.engine.reset_activation_shape()
        _, hidden = self.engine.eval_batch(_pipeline_batches(batches), return_logits=True, num_micro_batches=1)
        self.engine.reset_activation_shape()
        if hidden is None:
            return None
        return gather_vocabulary(self.model.output.final_linear(hidden), self.settings.tp)

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def grad_norm(self) -> float | None:
        """L2 norm of the last step's gradient before clipping."""
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    @property
    def loss_scale(self) -> float | None:
        """The factor of the loss in fp16; None in other formats."""
        return float(self.engine.optimizer.cur_scale) if self.config.precision.dtype == "fp16" else None

    def count_parameters(self) -> dict[str, int]:
        """Parameters of the whole model: `total`, `positional`, and `outside_embedding` (what each token is
        multiplied with).
        """
        return metrics.count_parameters(self.model.layers(), self.settings, self.layout)

    def kernel_statistics(self) -> dict[str, Tensor]:
        """Name -> values per head of the positional parameters of all layers. Every rank calls it together."""
        layers = self.model.layers()
        parameters = [p for method in positional_methods(layers).values() for p in method.parameters()]
        with GatheredParameters(parameters, enabled=self.zero_stage == 3):
            found = metrics.kernel_statistics(layers)
        return self.model.of_all_stages(found) if self.is_pipeline else found

    def attention_choice(self) -> str:
        """The attention backend, and what chose it; of a stage without blocks, nothing."""
        modules = (module for module in self.model.modules() if isinstance(module, SelfAttention))
        attention = next(modules, None)
        return "" if attention is None else attention.attention.choice(self.layout.device)

    def layers(self) -> dict[int, nn.Module]:
        """Layer index -> layer, those of this rank."""
        return self.model.layers()

    def refresh_masters(self) -> None:
        """Take the optimizer's float32 copies from the weights, after these were loaded."""
        if hasattr(self.engine.optimizer, "refresh_fp32_params"):
            self.engine.optimizer.refresh_fp32_params()

    def shape(self) -> dict[str, int]:
        """How the run is laid out over ranks."""
        return {
            "data_parallel": self.layout.data_size,
            "pipeline_stages": self.layout.pipeline_size,
            "tensor_parallel": self.layout.tensor_size,
            "zero_stage": self.zero_stage,
        }

    def _to_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.layout.device, non_blocking=True) for name, tensor in batch.items()}

    def mean_over_replicas(self, value: Tensor) -> Tensor:
        """The mean over data-parallel replicas, in place; every rank calls it together."""
        if self.layout.data_size > 1:
            from megatron.core import parallel_state

            dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
            value /= self.layout.data_size
        return value


def _pipeline_batches(batches: Iterator[Batch]) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    for batch in batches:
        mask = batch.get("loss_mask")
        yield (
            batch["tokens"],
            (batch["labels"], torch.ones_like(batch["labels"], dtype=torch.float32) if mask is None else mask),
        )
