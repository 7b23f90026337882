"""DeepSpeed's configuration, derived from ours. Its keys: https://www.deepspeed.ai/docs/config-json/"""

from typing import Any

from megatron.config import Config, UserError


def deepspeed_dict(config: Config, data_parallel_size: int) -> dict[str, Any]:
    """The configuration for DeepSpeed's engine, without optimizer and learning-rate schedule, which we build ourselves.

    Raises UserError if the batch sizes do not fit `data_parallel_size` replicas, or if `deepspeed_extra_args` contains
    a key that is set here.
    """
    micro_batch, accumulation, global_batch = config.batch.resolve(data_parallel_size)
    precision, optimizer = config.precision, config.optimizer
    zero = {name: value for name, value in optimizer.zero.items() if name != "cpu_offload"}  # which is false
    # In half precision, stage 1 does the arithmetic of stage 0 on flat tensors instead of parameter by parameter.
    stage = 1 if optimizer.zero_stage == 0 and precision.dtype != "fp32" else optimizer.zero_stage
    settings: dict[str, Any] = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": optimizer.gradient_clipping,
        "steps_per_print": config.training.steps_per_print,
        "dump_state": config.training.dump_state,
        "wall_clock_breakdown": config.training.wall_clock_breakdown,
        "zero_optimization": {"stage": stage, **zero},
        "zero_allow_untested_optimizer": True,  # ZeRO requires it for optimizers that are not DeepSpeed's own
    }
    if stage == 0 and not optimizer.gradient_clipping:
        settings["gradient_clipping"] = float("inf")  # no clipping, but DeepSpeed still computes the norm for the log
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
    reserved = {*settings, "optimizer", "scheduler", "fp16", "bf16", "communication_data_type", "curriculum_learning"}
    reserved.add("pipeline")  # without pipeline parallelism, DeepSpeed takes any key in it and uses none
    for key, value in config.training.deepspeed_extra_args.items():
        if key in reserved:
            raise UserError(f'"deepspeed_extra_args.{key}": remove it; DeepSpeed\'s {key} is set from other keys')
        settings[key] = value
    # DeepSpeed's throughput timer would wait for the device before and after every micro-batch. Our log has its own.
    settings.setdefault("timers", {"throughput": {"enabled": False}})
    return settings


def deepspeed_curriculum(config: Config) -> dict[str, Any]:
    """The configuration of DeepSpeed's CurriculumScheduler, which counts steps from 1."""
    curriculum = config.curriculum
    names = ("difficulty", "max_step", "total_curriculum_step", "difficulty_step", "root_degree")
    return {
        "min_difficulty": curriculum.min_difficulty,
        "max_difficulty": curriculum.max_difficulty,
        "schedule_type": curriculum.schedule_type,
        "schedule_config": {name: value for name in names if (value := getattr(curriculum, name)) is not None},
    }
