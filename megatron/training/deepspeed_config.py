"""DeepSpeed's configuration, from ours. Keys: https://www.deepspeed.ai/docs/config-json/"""

from typing import TYPE_CHECKING, Any

from megatron.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.config.loader import Config


def deepspeed_dict(config: "Config", data_parallel_size: int) -> dict[str, Any]:
    """What deepspeed.initialize is given; the optimizer and the schedule are built by us, and so not in it.

    Raises UserError if the batch sizes do not fit this many data-parallel processes, or if deepspeed_extra_args holds
    what other keys set.
    """
    micro, accumulation, total = config.batch.resolve(data_parallel_size)
    precision = config.precision
    result: dict[str, Any] = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optimizer.gradient_clipping,
        "steps_per_print": config.training.steps_per_print,
        "wall_clock_breakdown": config.training.wall_clock_breakdown,
        "zero_optimization": {"stage": config.optimizer.zero_stage, **_zero(config)},
        # ZeRO asks for this before it takes an optimizer that is not DeepSpeed's own; torch's and apex's Adam are fine.
        "zero_allow_untested_optimizer": True,
    }
    if precision.dtype == "fp16":
        result["fp16"] = {
            "enabled": True,
            "loss_scale": precision.loss_scale,
            "loss_scale_window": precision.loss_scale_window,
            "initial_scale_power": precision.initial_scale_power,
            "hysteresis": precision.hysteresis,
            "min_loss_scale": precision.min_loss_scale,
        }
    elif precision.dtype == "bf16":
        result["bf16"] = {"enabled": True}
    if config.parallel.fp32_allreduce:
        result["communication_data_type"] = "fp32"
    for key, value in config.training.deepspeed_extra_args.items():
        if key in result or key in ("optimizer", "scheduler", "fp16", "bf16", "communication_data_type"):
            raise UserError(f'"deepspeed_extra_args.{key}": DeepSpeed\'s {key} is set from other keys; remove it')
        result[key] = value
    return result


def _zero(config: "Config") -> dict[str, Any]:
    """The further ZeRO keys. DeepSpeed has renamed GPT-NeoX's `cpu_offload` to `offload_optimizer: {device: cpu}`."""
    zero = dict(config.optimizer.zero)
    if zero.pop("cpu_offload", False):
        zero.setdefault("offload_optimizer", {"device": "cpu"})
    return zero
