"""Keys of the optimizer with ZeRO, the learning-rate schedule and the precision."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from megatron.config.schema.base import Betas, CaseInsensitive, ConfigSection, Int, field
from megatron.optimizers.registry import (
    OPTIMIZERS,
    OptimizerName,
    OptimizerSpec,
    OptimizerType,
    optimizer_setting,
)
from megatron.utils.errors import UserError

# Keys with which DeepSpeed uses an optimizer of its own.
_OTHER_OPTIMIZERS = ("cpu_offload", "offload_optimizer", "zenflow")
_ZERO_3_KEYS = (
    "offload_param",
    "zero_hpz_partition_size",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_weights",
)
# What DeepSpeed, which converts types, reads as false. 0 equals False.
_FALSE = (False, "0", "off", "f", "false", "n", "no")


class OptimizerConfig(ConfigSection):
    """Optimizer"""

    # Which optimizer, and its parameters.
    type: Annotated[OptimizerType, CaseInsensitive] = field(
        "adam",
        """Case-insensitive. adam and adamw are the same and decouple the weight decay, as in
        GPT-NeoX. muon is for the weight matrices of the blocks, with Adam for embeddings, norms,
        biases and positional parameters.""",
        path="optimizer.type",
    )
    use_bnb_optimizer: bool = field(
        False,
        "With optimizer.type adam: 8-bit Adam of bitsandbytes, which must be installed.",
    )
    lr: float = field(
        OPTIMIZERS["adam"].defaults["lr"],
        "Peak learning rate, reached after the warmup.",
        path="optimizer.params.lr",
        ge=0,
    )
    betas: Betas | None = field(
        None,
        """Decay rates of the first and second moment of Adam (and of Adam in Muon), default [0.9,
        0.999]; of Lion's update and momentum, default [0.9, 0.99].""",
        path="optimizer.params.betas",
    )
    eps: float | None = field(
        None, "Adam's epsilon (also in Muon). Default: 1e-08.", path="optimizer.params.eps", gt=0
    )
    momentum: float | None = field(
        None,
        "Momentum of SGD, default 0, and Muon, default 0.95.",
        path="optimizer.params.momentum",
        ge=0,
        lt=1,
    )
    params: dict[Literal["apex", "adam_w_mode", "nesterov"], bool] = field(
        {},
        """apex: true uses NVIDIA apex's FusedAdam, which must be installed, instead of PyTorch's
        fused AdamW; adam_w_mode: false adds the weight decay to Adam's gradient (L2) instead of
        decoupling it; nesterov: Nesterov momentum, default false for SGD and true for Muon.""",
        path="optimizer.params.*",
    )

    # What all optimizers have.
    weight_decay: float = field(
        0.1,
        "Weight decay. Norms, biases and positional parameters have none, except matrices of "
        "positional layers.",
        aliases=("optimizer.params.weight_decay",),
        ge=0,
    )
    positional_lr_factor: float = field(
        1.0,
        "Learning rate of the positional method's parameters, relative to that of the other "
        "parameters. 0: frozen.",
        ge=0,
    )
    gradient_clipping: float = field(
        1.0, "Maximum global L2 norm of the gradients. 0: no clipping.", ge=0
    )

    # Partitioning of the state.
    zero_stage: Int = field(
        0,
        """ZeRO stage. 0: off; 1: shards the optimizer state over the data-parallel ranks; 2: also
        the gradients; 3: also the parameters. 2 and 3 require pipe_parallel_size 0.""",
        path="zero_optimization.stage",
        ge=0,
        le=3,
    )
    zero: dict[str, Any] = field(
        {},
        """Further ZeRO keys, passed to DeepSpeed unchanged
        (https://www.deepspeed.ai/docs/config-json/). Offloading the optimizer and zenflow are not
        supported, so cpu_offload must be false.""",
        path="zero_optimization.*",
    )

    @property
    def all_params(self) -> dict[str, Any]:
        """The parameters of the optimizer, with defaults for those that are not set."""
        named = {"lr": self.lr, "betas": self.betas, "eps": self.eps, "momentum": self.momentum}
        given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        given.update(self.params.items())
        return {**self.spec.defaults, **given}

    @property
    def name(self) -> OptimizerName:
        """The optimizer's name in the registry."""
        if self.use_bnb_optimizer:
            return "adam8bit"
        return self.type

    @property
    def spec(self) -> OptimizerSpec:
        return OPTIMIZERS[self.name]

    def contradictions(self) -> Iterator[str]:
        yield from self._zero_contradictions()
        if self.use_bnb_optimizer and OPTIMIZERS[self.type] is not OPTIMIZERS["adam"]:
            yield (
                '"use_bnb_optimizer": bitsandbytes is used only for Adam, but optimizer.type is '
                f"{self.type}; remove use_bnb_optimizer, or set optimizer.type to Adam"
            )
            return

        # Parameters of another optimizer.
        known, params = self.spec.defaults, self.all_params
        for name in params:
            if name not in known:
                accepted = ", ".join(sorted({*known, "weight_decay"}))
                yield (
                    f'"optimizer.params.{name}": {optimizer_setting(self.name)} does not have this '
                    f"parameter; remove it ({self.name} has {accepted})"
                )
        if "nesterov" in known and params["nesterov"] and not params["momentum"]:
            yield (
                '"optimizer.params.nesterov": Nesterov momentum needs optimizer.params.momentum '
                "above 0; set it"
            )

    def _zero_contradictions(self) -> Iterator[str]:
        """Keys of zero_optimization that do not fit the stage, or that would bypass the clamping of
        parameters.
        """
        for name, value in self.zero.items():
            if isinstance(value, dict) and name != "zenflow":
                value = value.get("device", "none")
            off: tuple[Any, ...] = (False, "none", None)
            if name == "zero_hpz_partition_size":
                off += (1,)
            is_on = value is True or value not in off
            if name in _OTHER_OPTIMIZERS and is_on:
                yield (
                    f"zero_optimization.{name} is not supported: DeepSpeed would replace this "
                    "project's optimizer, which bounds positional parameters; remove the key, and "
                    "use ZeRO on more GPUs"
                )
            if name in _ZERO_3_KEYS and is_on and self.zero_stage != 3:
                yield (
                    f"zero_optimization.{name} has no effect with stage {self.zero_stage}: "
                    "DeepSpeed uses it only with stage 3; remove the key, or use stage 3"
                )

        # Without the norm of the gradient, nothing can be clipped.
        norm = self.zero.get("compute_grad_norm")
        if isinstance(norm, str):
            norm = norm.lower()
        if norm not in _FALSE:
            return
        if self.gradient_clipping:
            yield (
                "zero_optimization.compute_grad_norm false needs gradient_clipping 0; set it, or "
                "remove the key"
            )
        if self.zero_stage == 3:
            yield (
                "zero_optimization.compute_grad_norm false with stage 3 is not supported by "
                "DeepSpeed; remove the key, or use stage 1 or 2"
            )


class ScheduleConfig(ConfigSection):
    """Learning-rate schedule"""

    # How long.
    train_iters: Int | None = field(
        None, "Total number of optimizer steps. 0: evaluate only.", ge=0
    )
    lr_decay_iters: Int | None = field(
        None,
        """Step at which the decay ends. Default: train_iters. Afterwards, cosine stays at min_lr
        (in GPT-NeoX, it would rise again).""",
        ge=1,
    )

    # The shape, and its lowest value.
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential"] = field(
        "linear", "Shape of the decay."
    )
    lr_schedule: Literal["neox", "neox-2022"] | None = field(
        None,
        """Formulas of the schedule. neox: those of current GPT-NeoX; the decay ends at
        lr_decay_iters, and cosine ends at min_lr. neox-2022: those of the original KERPLE code; the
        decay is spread over lr_decay_iters steps after the warmup, so it does not complete, and
        min_lr is only a lower bound. Default: that of the checkpoint from which the run resumes
        (neox-2022 for the original KERPLE checkpoints), otherwise neox.""",
    )
    min_lr: float = field(
        0.0, "Learning rate at the end of the cosine decay; lower bound for every decay.", ge=0
    )
    decay_lr_to: float | None = field(
        None,
        "min_lr as a fraction of the learning rate, as in the configurations of Llemma.",
        ge=0,
        le=1,
    )

    # The warmup before it.
    warmup: float = field(0.01, "Fraction of lr_decay_iters for the linear warmup.", ge=0, le=1)
    warmup_iters: Int | None = field(None, "Steps of the linear warmup, instead of `warmup`.", ge=0)

    def contradictions(self) -> Iterator[str]:
        for key, alternative in (("min_lr", "decay_lr_to"), ("warmup", "warmup_iters")):
            if key in self.model_fields_set and getattr(self, alternative) is not None:
                yield f'"{key}" and "{alternative}" are both set; keep one of them'
        decay_iters, key = self.lr_decay_iters, "warmup"
        if self.warmup_iters is not None:
            key = "warmup_iters"
        if decay_iters is not None and self.warmup_steps(decay_iters) >= decay_iters:
            yield (
                f"{key} {getattr(self, key):g}: the warmup must end before the decay, at "
                f"lr_decay_iters {decay_iters:,}; lower {key}, or raise lr_decay_iters"
            )

    def warnings(self) -> Iterator[str]:
        # A decay that the run does not reach.
        decay_iters, train_iters = self.lr_decay_iters, self.train_iters or 0
        if decay_iters is not None and 0 < train_iters < decay_iters:
            yield (
                f"lr_decay_iters {decay_iters:,} is above train_iters {train_iters:,}: training "
                "ends before the learning rate has decayed; without lr_decay_iters, both end "
                "together"
            )

        # A decay that ends before the run.
        falls = self.lr_decay_style in ("linear", "cosine")
        if decay_iters is None or decay_iters >= train_iters or not falls:
            return
        if self.lowest_lr(1.0) == 0:
            rate = "0, so they change nothing"
            if self.lr_schedule == "neox-2022" and self.warmup_steps(decay_iters) > 0:
                rate = "that of the last step of the decay, so they change little"
            yield (
                f"lr_decay_iters {decay_iters:,} is below train_iters {train_iters:,}: the "
                f"learning rate of all later steps is {rate}; set min_lr, raise lr_decay_iters, or "
                "remove it"
            )

    @property
    def last_iteration(self) -> int:
        """`train_iters`. Raises UserError if it is not set."""
        if self.train_iters is None:
            raise UserError(
                "train-iters is not set; set it to the number of iterations (0: only evaluate)"
            )
        return self.train_iters

    def lowest_lr(self, lr: float) -> float:
        """The learning rate at the end of the cosine decay from `lr`."""
        if self.decay_lr_to is None:
            return self.min_lr
        return self.decay_lr_to * lr

    def warmup_steps(self, decay_iters: int) -> float:
        """Steps of the linear warmup, for a decay that ends at step `decay_iters`."""
        if self.warmup_iters is not None:
            return self.warmup_iters
        return self.warmup * decay_iters


# Names of data types -> this project's.
_DTYPES: dict[str, Literal["fp32", "bf16", "fp16"]] = {
    "fp32": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}


class PrecisionConfig(ConfigSection):
    """Precision"""

    # The data type. Several keys may select it, if they agree.
    precision: Literal["fp32", "fp16", "bfloat16"] | None = field(
        None, "Data type of weights and activations. Default: set by fp16 and bf16, else fp32."
    )
    fp16_enabled: bool = field(
        False, "Mixed precision in the data type fp16.type.", path="fp16.enabled"
    )
    fp16_type: Literal["fp16", "float16", "bf16", "bfloat16"] = field(
        "fp16",
        "Data type that fp16.enabled selects; bfloat16 is equivalent to bf16.enabled.",
        path="fp16.type",
    )
    bf16_enabled: bool = field(
        False, "Mixed precision in bfloat16, with float32 master weights.", path="bf16.enabled"
    )

    # The loss scale of fp16.
    loss_scale: float = field(
        0.0,
        "fp16: constant loss scale. 0: dynamic loss scaling.",
        path="fp16.loss_scale",
        ge=0,
        le=1e19,
    )
    loss_scale_window: Int = field(
        1000,
        "fp16: steps without overflow before the loss scale is doubled.",
        path="fp16.loss_scale_window",
        ge=1,
    )
    initial_scale_power: Int = field(
        16,
        "fp16: the dynamic loss scale starts at 2 to this power.",
        path="fp16.initial_scale_power",
        ge=0,
        le=64,
    )
    hysteresis: Int = field(
        2, "fp16: overflows before the loss scale is halved.", path="fp16.hysteresis", ge=1
    )
    min_loss_scale: float = field(
        1.0, "fp16: minimum of the dynamic loss scale.", path="fp16.min_loss_scale", gt=0, le=1e19
    )

    def contradictions(self) -> Iterator[str]:
        dtypes = self._requested_dtypes()
        if len(set(dtypes.values())) > 1:
            requests = " but ".join(f"{key} requests {dtype}" for key, dtype in dtypes.items())
            yield f"contradictory precision: {requests}; keep one of them"

    def _requested_dtypes(self) -> dict[str, Literal["fp32", "bf16", "fp16"]]:
        dtypes: dict[str, Literal["fp32", "bf16", "fp16"]] = {}
        if self.precision is not None:
            dtypes["precision"] = _DTYPES[self.precision]
        if self.fp16_enabled:
            dtypes["fp16"] = _DTYPES[self.fp16_type]
        if self.bf16_enabled:
            dtypes["bf16"] = "bf16"
        return dtypes

    @property
    def dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        """Data type of weights and activations."""
        return next(iter(self._requested_dtypes().values()), "fp32")
