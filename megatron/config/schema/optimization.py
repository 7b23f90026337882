"""The optimizer, its learning-rate schedule, and the number format."""

from typing import Annotated, Any, Literal

from pydantic import model_validator

from megatron.config.schema.base import Betas, CaseInsensitive, Group, Int, key
from megatron.optimizers import OPTIMIZERS, OptimizerType
from megatron.utils.errors import UserError

_DEFAULTS = OPTIMIZERS["adam"].defaults

# DeepSpeed's keys of ZeRO, and GPT-NeoX's cpu_offload.
ZeroKey = Literal[
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "cpu_offload",
    "elastic_checkpoint",
    "ignore_unused_parameters",
    "load_from_fp32_weights",
    "memory_efficient_linear",
    "offload_optimizer",
    "offload_param",
    "overlap_comm",
    "parameter_alignment",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "stage3_allgather_sequential",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
    "zero_hpz_partition_size",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_weights",
]


class OptimizerConfig(Group):
    """Optimizer"""

    type: Annotated[OptimizerType, CaseInsensitive] = key(
        "adam",
        "Adam or AdamW, upper or lower case: both Adam with decoupled weight decay, as in GPT-NeoX.",
        path="optimizer.type",
    )
    lr: float = key(
        _DEFAULTS["lr"], "Highest learning rate, reached after the warmup.", path="optimizer.params.lr", ge=0
    )
    betas: Betas = key(
        _DEFAULTS["betas"],
        "Decay of Adam's averages of the gradient and of its square.",
        path="optimizer.params.betas",
    )
    eps: float = key(_DEFAULTS["eps"], "Added to the root of Adam's second average.", path="optimizer.params.eps", gt=0)
    params: dict[Literal["apex", "adam_w_mode"], bool] = key(
        {},
        """apex: true takes NVIDIA apex's FusedAdam, which must be installed, instead of PyTorch's fused AdamW;
        adam_w_mode: false adds the weight decay to the gradient (L2) instead of decoupling it.""",
        path="optimizer.params.*",
    )
    weight_decay: float = key(
        0.1,
        "Weight decay, decoupled from the gradient. Norms, biases and positional parameters are exempt.",
        aliases=("optimizer.params.weight_decay",),
        ge=0,
    )
    gradient_clipping: float = key(1.0, "Gradients are scaled down to this global L2 norm. 0: no clipping.", ge=0)
    zero_stage: Int = key(
        0,
        """ZeRO: 0 none; 1 the optimizer's state is spread over data-parallel processes; 2 gradients too; 3 parameters
        too. 2 and 3 need pipe_parallel_size 0.""",
        path="zero_optimization.stage",
        ge=0,
        le=3,
    )
    zero: dict[ZeroKey, Any] = key(
        {},
        """Further keys of DeepSpeed's ZeRO, handed over as they are (https://www.deepspeed.ai/docs/config-json/);
        cpu_offload: true stands for offload_optimizer: {device: cpu}.""",
        path="zero_optimization.*",
    )


class ScheduleConfig(Group):
    """Learning-rate schedule"""

    train_iters: Int | None = key(None, "Optimizer steps to train for, in total. 0: only evaluate.", ge=0)
    lr_decay_iters: Int | None = key(None, "Step at which the decay ends. Default: train_iters.", ge=1)
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential"] = key("linear", "Shape of the decay.")
    min_lr: float = key(0.0, "The learning rate does not fall below this once it decays.", ge=0)
    warmup: float = key(0.01, "Share of lr_decay_iters over which the learning rate rises linearly from 0.", ge=0, le=1)


class PrecisionConfig(Group):
    """Precision"""

    precision: Literal["fp32", "fp16", "bfloat16"] | None = key(
        None, "Number format of weights and activations. Default: what fp16 and bf16 say, else fp32."
    )
    fp16_enabled: bool = key(False, "Mixed precision, in the format fp16.type names.", path="fp16.enabled")
    fp16_type: Literal["fp16", "float16", "bf16", "bfloat16"] = key(
        "fp16", "Number format of the fp16 key: bfloat16 makes it the same as bf16.", path="fp16.type"
    )
    bf16_enabled: bool = key(False, "Mixed precision in bfloat16, with float32 master weights.", path="bf16.enabled")
    loss_scale: float = key(
        0.0, "fp16: fixed factor of the loss. 0: adapted while training.", path="fp16.loss_scale", ge=0
    )
    loss_scale_window: Int = key(
        1000, "fp16: steps without overflow before the factor is doubled.", path="fp16.loss_scale_window", ge=1
    )
    initial_scale_power: Int = key(
        16, "fp16: the adapted factor starts at two to this power.", path="fp16.initial_scale_power", ge=0
    )
    hysteresis: Int = key(2, "fp16: overflows before the factor is halved.", path="fp16.hysteresis", ge=1)
    min_loss_scale: float = key(1.0, "fp16: the factor does not fall below this.", path="fp16.min_loss_scale", gt=0)

    @model_validator(mode="after")
    def _one_format(self) -> "PrecisionConfig":
        wanted = self._formats()
        if len(set(wanted.values())) > 1:
            raise UserError("contradictory precision: " + " but ".join(f"{k} asks for {v}" for k, v in wanted.items()))
        return self

    def _formats(self) -> dict[str, str]:
        wanted = {}
        if self.precision is not None:
            wanted["precision"] = {"bfloat16": "bf16"}.get(self.precision, self.precision)
        if self.fp16_enabled:
            wanted["fp16"] = "bf16" if self.fp16_type in ("bf16", "bfloat16") else "fp16"
        if self.bf16_enabled:
            wanted["bf16"] = "bf16"
        return wanted

    @property
    def dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        """The number format of weights and activations."""
        return next(iter(self._formats().values()), "fp32")
