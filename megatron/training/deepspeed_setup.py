"""The configuration of DeepSpeed, derived from ours, and patches of DeepSpeed.

Its keys: https://www.deepspeed.ai/docs/config-json/. Each patch names the upstream behaviour that
it replaces and the reason. Importing this module with another version than that of `VERSIONS` is an
error; compare each patch with the source of a new version before updating.
"""

import difflib
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import PipelineEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from megatron.config import Config, UserError
from megatron.utils.environment import check_parameters, check_version
from megatron.utils.errors import shortened

check_version("deepspeed")


def disable_shared_memory_collectives() -> None:
    """Use gloo for collectives between CPU ranks.

    Upstream: `deepspeed.comm.torch.TorchBackend` compiles a C++ extension with shared-memory
    collectives when it is created on a CPU, which requires a compiler. gloo does not.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def global_norm(gradients: list[torch.Tensor], mpu: Any) -> torch.Tensor:
    """L2 norm of the gradients of all ranks in the model-parallel group of `mpu`: a float32 scalar
    on the device.

    Every gradient must be passed by exactly one rank of the group. A rank may have none.
    """
    device = get_accelerator().current_device_name()
    if gradients:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).float()
    else:
        norm = torch.zeros((), device=device)
    if mpu is None:
        return norm
    squared = norm.square().to(device)
    dist.all_reduce(squared, group=mpu.get_model_parallel_group())
    return squared.sqrt()


class PatchedEngine(DeepSpeedEngine):
    """DeepSpeed's engine for a model that is not a pipeline."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        """Take the arguments of DeepSpeedEngine. Turn the optimizer that it builds into a
        `PatchedBF16Optimizer`, `DeviceOnlyBF16Optimizer` or `PatchedZeroOptimizer`.

        Upstream: BF16_Optimizer's constructor prints memory reports and runs the garbage collector
            for each of them.
        """
        with patch.object(bf16_optimizer, "see_memory_usage"):
            super().__init__(*args, **keywords)
        optimizer = self.optimizer
        on_device = getattr(self.basic_optimizer, "_step_supports_amp_scaling", False)
        if on_device:
            adam = sys.modules["torch.optim.adam"]
            check_parameters("torch", adam, "adam", "grad_scale", "found_inf")

        # The classes change after construction. `_configure_bf16_optimizer` and
        # `_configure_zero_optimizer` of DeepSpeedEngine name the classes that they build; no key
        # and no argument selects a subclass (`zero_allow_untested_optimizer` is about the optimizer
        # inside). And PipelineEngine.__init__ compares the type: with a subclass of BF16_Optimizer
        # it would set `using_bf16_optimizer` to False, and then look for gradients in
        # `parameter.grad`.
        if type(optimizer) is BF16_Optimizer:
            optimizer.__class__ = PatchedBF16Optimizer
            if on_device:
                optimizer.__class__ = DeviceOnlyBF16Optimizer
        is_zero = type(optimizer) is DeepSpeedZeroOptimizer
        if is_zero and optimizer.compute_grad_norm and not optimizer.cpu_offload:
            optimizer.__class__ = PatchedZeroOptimizer

    def _do_sanity_check(self) -> None:
        """Allow fp16 on a CPU.

        Upstream: raises if the CPU has no fp16 instructions. PyTorch computes fp16 on such CPUs
            too, only slower.
        """
        accelerator = get_accelerator()
        if accelerator.device_name() != "cpu":
            super()._do_sanity_check()
            return
        with patch.object(accelerator, "is_fp16_supported", lambda: True):
            super()._do_sanity_check()

    def allreduce_and_copy(
        self,
        small_bucket: list[torch.Tensor],
        dp_group: dist.ProcessGroup,
        dp_world_size: float | None = None,
    ) -> None:
        """Average gradients over the replicas, if there are several.

        Upstream: with a single replica too, copies all gradients to a buffer and back.
        """
        if dist.get_world_size(dp_group) > 1:
            super().allreduce_and_copy(small_bucket, dp_group, dp_world_size)

    @torch.no_grad()
    def clip_fp32_gradients(self) -> None:
        """Clip fp32 gradients without ZeRO by the norm of the whole model, and record the norm for
        the log. Gradients that are not finite are removed, so that the optimizer skips the step;
        torch's fused optimizers find out on the device.

        Upstream: `deepspeed.runtime.utils.clip_grad_norm_` counts only the parameters of
        model-parallel rank 0, which in a pipeline are those of the first stage, and discards the
        norm; the step is not skipped. The ZeRO and bf16 optimizers do none of this.
        """
        # All gradients, and those that count: each parameter of the whole model once.
        tensor_rank = 0
        if self.mpu is not None:
            tensor_rank = self.mpu.get_slice_parallel_rank()
        gradients, counted = [], []
        for parameter in self.module.parameters():
            if parameter.grad is None:
                continue
            gradients.append(parameter.grad)
            is_slice = tensor_rank == 0 or getattr(parameter, "tensor_model_parallel", False)
            if is_slice and not getattr(parameter, "ds_pipe_replicated", False):
                counted.append(parameter.grad)
        norm = self._global_grad_norm = global_norm(counted, self.mpu)

        # Without found_inf, the host decides.
        overflow = ~torch.isfinite(norm)
        if getattr(self.basic_optimizer, "_step_supports_amp_scaling", False):
            self.basic_optimizer.found_inf = overflow.float()
        elif overflow:
            self.zero_grad()
            return
        scale = (self.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)


class PatchedPipelineEngine(PatchedEngine, PipelineEngine):
    """DeepSpeed's engine for one stage of a pipeline."""


class PatchedBF16Optimizer(BF16_Optimizer):
    """DeepSpeed's optimizer for bf16 weights with fp32 master weights, with few kernels.

    Upstream: `update_hp_grads` launches two kernels per parameter, and the fp32 gradients are set
    to zero twice per step. Here one call handles all parameters of a group, and the first
    micro-batch overwrites the fp32 gradients.
    """

    def backward_prologue(self) -> None:
        """Nothing: `update_hp_grads` has freed the bf16 gradients.

        Upstream: sets them to zero when the backward pass reaches the output of the last stage of a
            pipeline, which discards the gradients of the output layer: it is part of the loss.
        """

    @torch.no_grad()
    def update_hp_grads(self, clear_lp_grads: bool = False) -> None:
        """Add the bf16 gradients of a micro-batch to the fp32 ones, and free them.

        torch launches one kernel for many tensors in `_foreach_copy_`, but one kernel per tensor in
        `_foreach_add_`, because the dtypes differ.
        """
        groups = (self.bf16_groups, self.fp32_groups_gradients, self.fp32_groups_has_gradients)
        for parameters, gradients, received in zip(*groups, strict=True):
            # (fp32 gradients, bf16 gradients) of this step's first micro-batch, and of later ones.
            first: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
            later: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
            for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                if parameter.grad is not None:
                    total, added = first
                    if received[index]:
                        total, added = later
                    total.append(gradient)
                    added.append(parameter.grad.view(-1))
                    parameter.grad = None
                    parameter._hp_grad = gradient  # where the pipeline engine finds it
                    received[index] = True
                elif not received[index]:
                    gradient.zero_()  # of an earlier step
            if first[0]:
                torch._foreach_copy_(*first)
            if later[0]:
                torch._foreach_add_(*later)

    def clear_hp_grads(self) -> None:
        """Forget the fp32 gradients; the next micro-batch overwrites them."""
        for received in self.fp32_groups_has_gradients:
            received[:] = [False] * len(received)


class DeviceOnlyBF16Optimizer(PatchedBF16Optimizer):
    """`PatchedBF16Optimizer` without waiting for the device.

    Upstream: `step` reads the gradient norm on the host twice, to skip a step whose gradient is not
    finite and to clip, and `get_global_norm_of_tensors` copies a constant to the device. The device
    idles until the next kernels are launched. Here everything happens on the device. The inner
    optimizer must support `found_inf` and `grad_scale`, as torch's fused optimizers do.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        gradients, _ = self.get_grads_for_norm()
        norm = global_norm(gradients, self.mpu)
        overflow = ~torch.isfinite(norm)
        self._global_grad_norm = norm.masked_fill(overflow, float("inf"))
        if self.clip_grad > 0:
            divisor = (norm + 1e-6) / self.clip_grad
            self.optimizer.grad_scale = divisor.clamp(min=1.0)
        partitions = (self.fp32_groups_flat_partition, self.fp32_groups_gradient_flat_partition)
        for master, gradient in zip(*partitions, strict=True):
            master.grad = gradient
        self.optimizer.found_inf = overflow.float()
        self.optimizer.step()
        self._lazy_init_hp_params_optimizer_state()
        self.update_lp_params()
        self.clear_hp_grads()


class PatchedZeroOptimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's optimizer of ZeRO 1 and 2, for fp16 and bf16 weights, with fewer kernels and
    waits for the device.

    Upstream waits for the device five times per step in fp16 and copies a constant from the host
    per parameter group. Here it waits once, for the norm: dynamic loss scaling decides on the host
    whether to skip the step.
    """

    def independent_gradient_partition_epilogue(self) -> None:
        """Synchronize the streams on the device. Upstream: with overlap_comm, the host waits for
        all of them.
        """
        accelerator = get_accelerator()

        def wait_for_reduction() -> None:
            if self.reduction_stream is not None:
                accelerator.current_stream().wait_stream(self.reduction_stream)

        with patch.object(accelerator, "synchronize", wait_for_reduction):
            super().independent_gradient_partition_epilogue()

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Nothing: `step` looks at the norm. Upstream: about ten kernels per gradient."""

    def _squared_norm(
        self, gradients: list[torch.Tensor], params: list[torch.nn.Parameter]
    ) -> torch.Tensor:
        """The sum of the squares of a group's gradients on this rank, float32."""
        parts = [part for part in gradients if not getattr(part, "_zero_padding", False)]
        counted = []
        # Not strict: a rank without parameters of the group has a tensor of zeros.
        for gradient, parameter in zip(parts, params, strict=False):
            is_copy = self.model_parallel_rank > 0 and not is_model_parallel_parameter(parameter)
            if not is_copy and not getattr(parameter, "ds_pipe_replicated", False):
                counted.append(gradient)
        if not counted:
            return torch.zeros((), device=self.device)
        norms = torch.stack(torch._foreach_norm(counted, 2, torch.float32))
        return norms.square().sum()

    def scaled_global_norm(self, norm_type: int = 2) -> torch.Tensor:
        """The norm of all groups on all ranks, times the loss scale, on the CPU, which is the only
        wait; infinity if it is not finite.

        Upstream: two kernels per gradient, in float64; and the ranks add up each group by itself,
        so stages of a pipeline with different groups of parameters would wait for each other
        forever.
        """
        squared = torch.zeros((), device=self.device)
        for index, parameters in enumerate(self.params_in_partition):
            squared += self._squared_norm(self.averaged_gradients[index], parameters)
        dist.all_reduce(squared, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=squared, op=deepspeed.comm.ReduceOp.SUM)
        norm = squared.sqrt().cpu()
        if torch.isfinite(norm):
            return norm
        return norm.new_tensor(torch.inf)


def deepspeed_dict(config: Config, data_parallel_size: int) -> dict[str, Any]:
    """The configuration for DeepSpeed's engine, without optimizer and learning-rate schedule, which
    we build ourselves.

    Raises UserError if the batch sizes do not fit `data_parallel_size` replicas.
    """
    # Batch sizes, clipping, logging and ZeRO have the same meaning as in DeepSpeed.
    micro_batch, accumulation, global_batch = config.batch.resolve(data_parallel_size)
    precision, optimizer = config.precision, config.optimizer
    zero = dict(optimizer.zero)
    zero.pop("cpu_offload", None)  # which is false

    # In half precision, stage 1 does the arithmetic of stage 0 on flat tensors instead of parameter
    # by parameter.
    stage = optimizer.zero_stage
    if stage == 0 and precision.dtype != "fp32":
        stage = 1
    settings: dict[str, Any] = {
        **config.parallel.deepspeed_extra_args,
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": optimizer.gradient_clipping,
        "zero_optimization": {"stage": stage, **zero},
        # ZeRO requires it for optimizers that are not DeepSpeed's own.
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's timer would wait for the device before and after every micro-batch. Our log
        # has its own.
        "timers": {"throughput": {"enabled": False}},
    }

    # Keys that depend on others. Absent keys leave DeepSpeed's defaults.
    if stage == 0 and not optimizer.gradient_clipping:
        # No clipping, but DeepSpeed still computes the norm for the log.
        settings["gradient_clipping"] = float("inf")
    if precision.dtype == "fp16":
        settings["fp16"] = {
            "enabled": True,
            "loss_scale": precision.loss_scale,
            "loss_scale_window": precision.loss_scale_window,
            "initial_scale_power": precision.initial_scale_power,
            "hysteresis": precision.hysteresis,
            "min_loss_scale": precision.min_loss_scale,
        }
    elif precision.dtype == "bf16":
        settings["bf16"] = {"enabled": True}
    if config.parallel.fp32_allreduce:
        settings["communication_data_type"] = "fp32"
    if precision.dtype == "bf16" and stage == 1:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.parallel.pipe_parallel_size > 1:
        settings["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    return settings


def deepspeed_config(settings: dict[str, Any], grid: Any) -> DeepSpeedConfig:
    """DeepSpeed's own configuration. `grid` has the number of replicas; None: each rank is one.

    Raises UserError for keys and values that DeepSpeed rejects.
    """
    try:
        return DeepSpeedConfig(settings, grid)
    except (
        DeepSpeedConfigError,
        ValueError,
        TypeError,
        AssertionError,
        LookupError,
        AttributeError,
    ) as error:
        problem = shortened(" ".join(str(error).split()), 500)
        raise UserError(
            f"DeepSpeed rejects zero_optimization or deepspeed_extra_args: {problem}"
        ) from error


def check_deepspeed(config: Config, data_parallel_size: int) -> None:
    """Check the keys for DeepSpeed before anything is built. Raises UserError."""
    fields = DeepSpeedZeroConfig.model_fields
    known = {*fields, *(field.alias for field in fields.values() if field.alias)}
    for name in config.optimizer.zero:
        if name not in known:
            nearest = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.0)
            raise UserError(
                f'"zero_optimization.{shortened(name)}" is not a known key of DeepSpeed; nearest: '
                f"{', '.join(nearest)} (all keys: https://www.deepspeed.ai/docs/config-json/)"
            )
    grid = SimpleNamespace(get_data_parallel_world_size=lambda: data_parallel_size)
    deepspeed_config(deepspeed_dict(config, data_parallel_size), grid)


def deepspeed_curriculum(config: Config) -> dict[str, Any]:
    """The configuration of DeepSpeed's CurriculumScheduler, which counts steps from 1."""
    curriculum, options = config.curriculum, {}
    for name in (
        "difficulty",
        "max_step",
        "total_curriculum_step",
        "difficulty_step",
        "root_degree",
    ):
        if (value := getattr(curriculum, name)) is not None:
            options[name] = value
    return {
        "min_difficulty": curriculum.min_difficulty,
        "max_difficulty": curriculum.max_difficulty,
        "schedule_type": curriculum.schedule_type,
        "schedule_config": options,
    }
