"""Keys of a training run: data, optimizer, schedule, precision, intervals, checkpoints and logs."""

import math
from typing import Annotated, Any, Literal

from pydantic import model_validator

from megatron.config.schema.base import (
    MAX_INT,
    Betas,
    Group,
    Int,
    Ints,
    NullIsEmpty,
    OptimizerTypeText,
    Paths,
    PathText,
    Steps,
    Weights,
    key,
)
from megatron.optimizers import OPTIMIZERS, OptimizerName, OptimizerSpec, optimizer_setting
from megatron.utils.errors import UserError, shortened

EXTRAPOLATION_TOKENS = 65_536
_NUM_SPLITS = 3
_MIN_FACTOR = 1.01

# DeepSpeed's ZeRO keys, and GPT-NeoX's cpu_offload.
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
# Those whose value is an integer, with the lowest value. The others are true or false, except for offloading.
_ZERO_SIZES = {
    "allgather_bucket_size": 1,
    "reduce_bucket_size": 1,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_model_persistence_threshold": 0,
    "stage3_module_granularity_threshold": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "sub_group_size": 1,
    "zero_hpz_partition_size": 1,
}
_OFFLOAD_DEVICES = ("none", "cpu", "nvme")


class DataConfig(Group):
    """Data"""

    data_path: PathText | None = key(None, "Prefix of the dataset (path without .bin and .idx), which `split` divides.")
    train_data_paths: Paths | None = key(None, "Prefixes of training datasets, instead of data_path.")
    valid_data_paths: Paths | None = key(None, "Prefixes of validation datasets.")
    test_data_paths: Paths | None = key(None, "Prefixes of test datasets.")
    train_data_weights: Weights | None = key(None, "Weights of the training datasets in the blend. Default: equal.")
    valid_data_weights: Weights | None = key(None, "Weights of the validation datasets. Default: equal.")
    test_data_weights: Weights | None = key(None, "Weights of the test datasets. Default: equal.")
    weight_by_num_documents: bool = key(
        False,
        """True: weight each dataset of a blend by (number of its documents)^weighted_sampler_alpha, instead of by the
        given weights. (This is GPT-NeoX's documented rule; its code also multiplies by 1 - weight.)""",
    )
    weighted_sampler_alpha: float = key(
        1.0, "Exponent of weight_by_num_documents: below 1 favors small datasets, 0 weights all equally.", ge=0, le=10
    )
    split: str = key("969, 30, 1", "Proportions of training, validation and test documents in data_path.")
    data_impl: Literal["infer", "mmap"] = key(
        "infer", "Format of the dataset: mmap (.bin and .idx) is the only one, so infer means the same."
    )
    num_workers: Int = key(
        2, "Processes per rank that prefetch batches. 0: read in the training process.", ge=0, le=256
    )
    data_cache_path: PathText | None = key(
        None, "Folder for the shuffled sample indices. Default: next to the dataset."
    )
    eod_mask_loss: bool = key(
        False,
        """True: exclude the token after each end-of-document token from the loss, which is the mean over all other
        tokens of the global batch. (GPT-NeoX takes the mean of the micro-batches' means.)""",
    )


def split_shares(split: str) -> list[float]:
    """Shares of training, validation and test documents from the key `split`. Not normalized; missing ones are 0.

    Raises UserError unless `split` is one to three non-negative numbers with a positive sum.
    """
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= _NUM_SPLITS or not all(0 <= share < math.inf for share in shares) or sum(shares) == 0:
        raise UserError(f"split {split!r} is not of the form TRAIN,VALID,TEST, for example 949,50,1")
    return shares + [0.0] * (_NUM_SPLITS - len(shares))


class TokenizerConfig(Group):
    """Tokenizer"""

    tokenizer_type: Literal[
        "GPT2BPETokenizer", "HFTokenizer", "SPMTokenizer", "HFGPT2Tokenizer", "CharLevelTokenizer"
    ] = key(
        "GPT2BPETokenizer",
        """GPT2BPETokenizer: vocab_file (JSON) and merge_file of GPT-2; HFTokenizer: vocab_file is a tokenizer.json of
        Hugging Face tokenizers; SPMTokenizer: vocab_file is a SentencePiece model; HFGPT2Tokenizer: vocab_file is a
        folder or a name on the Hugging Face hub, by default gpt2; CharLevelTokenizer: one token per UTF-8 byte, no
        files.""",
    )
    vocab_file: PathText | None = key(None, "Vocabulary file of the tokenizer.")
    merge_file: PathText | None = key(None, "Merges file of GPT-2's BPE.")


class OptimizerConfig(Group):
    """Optimizer"""

    type: OptimizerTypeText = key(
        "adam",
        """Case-insensitive. adam and adamw are the same and decouple the weight decay, as in GPT-NeoX. muon is for the
        weight matrices of the blocks, with Adam for embeddings, norms, biases and positional parameters.""",
        path="optimizer.type",
    )
    use_bnb_optimizer: bool = key(
        False,
        "With optimizer.type adam: 8-bit Adam of bitsandbytes, which must be installed.",
    )
    lr: float = key(
        OPTIMIZERS["adam"].defaults["lr"],
        "Peak learning rate, reached after the warmup.",
        path="optimizer.params.lr",
        ge=0,
    )
    betas: Betas | None = key(
        None,
        """Decay rates of the first and second moment of Adam (and of Adam in Muon), default [0.9, 0.999]; of Lion's
        update and momentum, default [0.9, 0.99].""",
        path="optimizer.params.betas",
    )
    eps: float | None = key(None, "Adam's epsilon (also in Muon). Default: 1e-08.", path="optimizer.params.eps", gt=0)
    momentum: float | None = key(
        None, "Momentum of SGD, default 0, and Muon, default 0.95.", path="optimizer.params.momentum", ge=0, lt=1
    )
    params: dict[Literal["apex", "adam_w_mode", "nesterov"], bool] = key(
        {},
        """apex: true uses NVIDIA apex's FusedAdam, which must be installed, instead of PyTorch's fused AdamW;
        adam_w_mode: false adds the weight decay to Adam's gradient (L2) instead of decoupling it; nesterov: Nesterov
        momentum, default false for SGD and true for Muon.""",
        path="optimizer.params.*",
    )
    weight_decay: float = key(
        0.1,
        "Weight decay. Norms, biases and positional parameters have none.",
        aliases=("optimizer.params.weight_decay",),
        ge=0,
    )
    positional_lr_factor: float = key(
        1.0,
        "Learning rate of the positional method's parameters, relative to that of the other parameters. 0: frozen.",
        ge=0,
    )
    gradient_clipping: float = key(1.0, "Maximum global L2 norm of the gradients. 0: no clipping.", ge=0)
    zero_stage: Int = key(
        0,
        """ZeRO stage. 0: off; 1: shards the optimizer state over the data-parallel ranks; 2: also the gradients; 3:
        also the parameters. 2 and 3 require pipe_parallel_size 0.""",
        path="zero_optimization.stage",
        ge=0,
        le=3,
    )
    zero: dict[ZeroKey, Any] = key(
        {},
        """Further ZeRO keys, passed to DeepSpeed unchanged (https://www.deepspeed.ai/docs/config-json/). Offloading the
        optimizer is not supported, so cpu_offload must be false.""",
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
        return "adam8bit" if self.use_bnb_optimizer else self.type

    @property
    def spec(self) -> OptimizerSpec:
        return OPTIMIZERS[self.name]

    @model_validator(mode="after")
    def _check_params(self) -> "OptimizerConfig":
        if self.use_bnb_optimizer and OPTIMIZERS[self.type] is not OPTIMIZERS["adam"]:
            raise UserError(
                f'"use_bnb_optimizer": bitsandbytes is used only for Adam, but optimizer.type is {self.type}; remove '
                "use_bnb_optimizer, or set optimizer.type to Adam"
            )
        known = self.spec.defaults
        for name in self.all_params:
            if name not in known:
                accepted = ", ".join(sorted({*known, "weight_decay"}))
                raise UserError(
                    f'"optimizer.params.{name}": {optimizer_setting(self.name)} does not have this parameter; remove '
                    f"it ({self.name} has {accepted})"
                )
        if self.all_params.get("nesterov") and not self.all_params["momentum"]:
            raise UserError(
                '"optimizer.params.nesterov": Nesterov momentum needs optimizer.params.momentum above 0; set it'
            )
        return self

    @model_validator(mode="after")
    def _check_zero(self) -> "OptimizerConfig":
        for name, value in self.zero.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name in ("offload_optimizer", "offload_param"):
                expected = f"a mapping with the key device, one of {', '.join(_OFFLOAD_DEVICES)}"
                fits = isinstance(value, dict) and value.get("device") in _OFFLOAD_DEVICES
            elif name in _ZERO_SIZES:
                lowest = _ZERO_SIZES[name]
                expected = f"an integer from {lowest} to {MAX_INT}"
                fits = is_number and float(value).is_integer() and lowest <= value <= MAX_INT
            else:
                expected, fits = "true or false", isinstance(value, bool)
            if not fits:
                raise UserError(f'"zero_optimization.{name}": must be {expected}, not {shortened(repr(value))}')
        return self


class ScheduleConfig(Group):
    """Learning-rate schedule"""

    train_iters: Int | None = key(None, "Total number of optimizer steps. 0: evaluate only.", ge=0)
    lr_decay_iters: Int | None = key(
        None,
        """Step at which the decay ends. Default: train_iters. Afterwards, cosine stays at min_lr (in GPT-NeoX, it would
        rise again).""",
        ge=1,
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential"] = key("linear", "Shape of the decay.")
    lr_schedule: Literal["neox", "neox-2022"] | None = key(
        None,
        """Formulas of the schedule. neox: those of current GPT-NeoX; the decay ends at lr_decay_iters, and cosine ends
        at min_lr. neox-2022: those of the KERPLE release; the decay is spread over lr_decay_iters steps after the
        warmup, so it does not complete, and min_lr is only a lower bound. Default: that of the checkpoint from which
        the run resumes (neox-2022 for checkpoints of the KERPLE release), otherwise neox.""",
    )
    min_lr: float = key(0.0, "Learning rate at the end of the cosine decay; lower bound for every decay.", ge=0)
    decay_lr_to: float | None = key(
        None, "min_lr as a fraction of the learning rate, as in the configurations of Llemma.", ge=0, le=1
    )
    warmup: float = key(0.01, "Fraction of lr_decay_iters for the linear warmup.", ge=0, le=1)
    warmup_iters: Int | None = key(None, "Steps of the linear warmup, instead of `warmup`.", ge=0)

    @model_validator(mode="after")
    def _check_alternatives(self) -> "ScheduleConfig":
        for key_, alternative in (("min_lr", "decay_lr_to"), ("warmup", "warmup_iters")):
            if key_ in self.model_fields_set and getattr(self, alternative) is not None:
                raise UserError(f'"{key_}" and "{alternative}" are both set; keep one of them')
        if self.lr_decay_iters is not None and self.warmup_steps(self.lr_decay_iters) >= self.lr_decay_iters:
            key_ = "warmup" if self.warmup_iters is None else "warmup_iters"
            raise UserError(
                f"{key_} {getattr(self, key_):g}: the warmup must end before the decay, at lr_decay_iters "
                f"{self.lr_decay_iters:,}; lower {key_}, or raise lr_decay_iters"
            )
        return self

    def lowest_lr(self, lr: float) -> float:
        """The learning rate at the end of the cosine decay from `lr`."""
        return self.min_lr if self.decay_lr_to is None else self.decay_lr_to * lr

    def warmup_steps(self, decay_iters: int) -> float:
        """Steps of the linear warmup, for a decay that ends at step `decay_iters`."""
        return self.warmup * decay_iters if self.warmup_iters is None else self.warmup_iters


class PrecisionConfig(Group):
    """Precision"""

    precision: Literal["fp32", "fp16", "bfloat16"] | None = key(
        None, "Data type of weights and activations. Default: set by fp16 and bf16, else fp32."
    )
    fp16_enabled: bool = key(False, "Mixed precision in the data type fp16.type.", path="fp16.enabled")
    fp16_type: Literal["fp16", "float16", "bf16", "bfloat16"] = key(
        "fp16", "Data type that fp16.enabled selects; bfloat16 is equivalent to bf16.enabled.", path="fp16.type"
    )
    bf16_enabled: bool = key(False, "Mixed precision in bfloat16, with float32 master weights.", path="bf16.enabled")
    loss_scale: float = key(
        0.0, "fp16: constant loss scale. 0: dynamic loss scaling.", path="fp16.loss_scale", ge=0, le=1e19
    )
    loss_scale_window: Int = key(
        1000, "fp16: steps without overflow before the loss scale is doubled.", path="fp16.loss_scale_window", ge=1
    )
    initial_scale_power: Int = key(
        16, "fp16: the dynamic loss scale starts at 2 to this power.", path="fp16.initial_scale_power", ge=0, le=64
    )
    hysteresis: Int = key(2, "fp16: overflows before the loss scale is halved.", path="fp16.hysteresis", ge=1)
    min_loss_scale: float = key(
        1.0, "fp16: minimum of the dynamic loss scale.", path="fp16.min_loss_scale", gt=0, le=1e19
    )

    @model_validator(mode="after")
    def _check_consistent(self) -> "PrecisionConfig":
        dtypes = self._requested_dtypes()
        if len(set(dtypes.values())) > 1:
            requests = " but ".join(f"{key} requests {dtype}" for key, dtype in dtypes.items())
            raise UserError(f"contradictory precision: {requests}; keep one of them")
        return self

    def _requested_dtypes(self) -> dict[str, Literal["fp32", "bf16", "fp16"]]:
        dtypes: dict[str, Literal["fp32", "bf16", "fp16"]] = {}
        if self.precision is not None:
            dtypes["precision"] = "bf16" if self.precision == "bfloat16" else self.precision
        if self.fp16_enabled:
            dtypes["fp16"] = "bf16" if self.fp16_type in ("bf16", "bfloat16") else "fp16"
        if self.bf16_enabled:
            dtypes["bf16"] = "bf16"
        return dtypes

    @property
    def dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        """Data type of weights and activations."""
        return next(iter(self._requested_dtypes().values()), "fp32")


class TrainingConfig(Group):
    """Training"""

    seed: Int = key(1234, "Seed of initial weights, data order and dropout.", ge=0, lt=2**32)
    eval_interval: Int = key(1000, "Optimizer steps between validations.", ge=1)
    eval_iters: Int = key(100, "Batches per validation. 0: no validation.", ge=0)
    seq_length_val: Int | None = key(None, "Sequence length of validation, in tokens. Default: seq_length.", ge=1)
    extrapolation_lengths: Ints | None = key(
        None,
        """Additional sequence lengths, in tokens, at which every validation measures the loss; one curve per length.
        Default: none. Not with a pipeline, tensor parallelism or ZeRO 3.""",
        min_length=1,
    )
    extrapolation_tokens: Int | None = key(
        None,
        f"""Number of validation tokens to score for extrapolation_lengths, evenly spaced in the validation text and
        the same ones at every length. Default:
        {EXTRAPOLATION_TOKENS:,}, or one sequence of the longest length if that is more.""",
        ge=1,
    )
    log_interval: Int = key(100, "Optimizer steps between two log lines.", ge=1)
    checkpoint_activations: bool = key(
        False, "True: activation checkpointing, which recomputes each block in the backward pass to save memory."
    )
    checkpoint_num_layers: Int = key(1, "Blocks per checkpointed chunk.", ge=1)
    torch_compile: bool = key(
        False,
        """True: compile the blocks with torch.compile, including attention if its backend is fused or sdpa and the
        positional method does not rotate queries and keys. Needs a C++ compiler (on a GPU also Triton) and takes up
        to a minute at startup. Not with a pipeline, tensor parallelism or ZeRO 3.""",
    )
    enable_cuda_graph: bool = key(
        False,
        """True: run the forward and backward pass as CUDA graphs, which launch with little overhead. Needs bf16 and
        a GPU. Not with a pipeline, tensor parallelism, ZeRO 2 or 3, torch_compile, checkpoint_activations,
        attention_dropout or random positions. Not measured on a GPU yet.""",
    )
    exit_interval: Int | None = key(None, "Save a checkpoint and exit when the step is a multiple of this.", ge=1)
    steps_per_print: Int = key(10, "Optimizer steps between DeepSpeed's own log lines.", ge=1)
    wall_clock_breakdown: bool = key(False, "True: log the time of forward, backward and optimizer.")
    dump_state: bool = key(False, "True: print DeepSpeed's messages at startup, with its configuration and state.")
    deepspeed_extra_args: Annotated[dict[str, Any], NullIsEmpty] = key(
        {},
        """Further keys of DeepSpeed's configuration, passed unchanged. Keys derived from other keys here, such as
        train_batch_size, are an error.""",
    )

    @property
    def extrapolation_budget(self) -> int:
        """Maximum number of tokens to score at each of `extrapolation_lengths`."""
        return self.extrapolation_tokens or max((EXTRAPOLATION_TOKENS, *(self.extrapolation_lengths or ())))


class CheckpointConfig(Group):
    """Checkpoint"""

    save: PathText | None = key(None, "Folder to save checkpoints to. Default: do not save.", placeholders=True)
    load: PathText | None = key(
        None,
        """Folder of the checkpoint to start from. If it contains none, training prints this and starts from scratch. If
        save contains checkpoints of this run, it resumes from them.""",
        placeholders=True,
    )
    save_interval: float | None = key(
        None,
        """Optimizer steps between checkpoints; the last step is always saved. With checkpoint_scale log, the factor
        between the steps of consecutive checkpoints.""",
        aliases=("checkpoint_factor",),
        ge=1,
    )
    checkpoint_scale: Literal["linear", "log"] = key(
        "linear",
        "linear: checkpoints at multiples of save_interval; log: at its powers (1, ...), rounded down.",
    )
    extra_save_iters: Steps = key((), "Additional steps at which to save a checkpoint. 0: before the first step.")
    keep_last_n_checkpoints: Int | None = key(
        None,
        """Delete all but this many of the run, and those that extra_save_iters and checkpoint_scale log ask for.
        Default: keep all.""",
        ge=1,
    )
    finetune: bool = key(
        False,
        """Load only the weights: a new optimizer, and training starts at step 0. The checkpoint must exist. If it has
        another positional method, the parameters of the new one are initialized.""",
    )
    no_load_optim: bool = key(False, "Do not load the optimizer state.")
    no_load_rng: bool = key(False, "Do not load the states of the random number generators.")
    no_save_optim: bool = key(False, "Do not save the optimizer state; training cannot be resumed exactly.")
    no_save_rng: bool = key(False, "Do not save the states of the random number generators.")
    checkpoint_validation_with_forward_pass: bool = key(
        False, "Save a batch and its logits with the checkpoint, and compare them after loading."
    )
    async_save: bool = key(
        False,
        """Write checkpoints in the background. Training waits only for the copy to host memory, which needs space
        for the weights and the optimizer state.""",
    )
    fallback: bool = key(
        False, "If the checkpoint to load is damaged, load the newest intact one before it. Same as --fallback."
    )
    iteration: Int | None = key(None, "Step of the checkpoint to load. Default: the one named in `latest`.", ge=0)

    @model_validator(mode="after")
    def _check_save_interval(self) -> "CheckpointConfig":
        factor = self.save_interval
        if factor is not None and self.checkpoint_scale == "linear" and not factor.is_integer():
            raise UserError(f"save_interval {factor} must be an integer, unless checkpoint_scale is log")
        if factor is not None and factor < _MIN_FACTOR and self.checkpoint_scale == "log":
            raise UserError(
                f"save_interval {factor} with checkpoint_scale log is the factor between the steps of consecutive "
                f"checkpoints; it must be at least {_MIN_FACTOR}"
            )
        return self

    def keeps(self, iteration: int) -> bool:
        """Whether keep_last_n_checkpoints never deletes the checkpoint of this iteration."""
        return iteration in self.extra_save_iters or (self.checkpoint_scale == "log" and self.saves(iteration))

    def saves(self, iteration: int) -> bool:
        """Whether a checkpoint is due after this number of optimizer steps (besides the one after the last step)."""
        if iteration in self.extra_save_iters:
            return True
        if self.save_interval is None or iteration == 0:
            return False
        if self.checkpoint_scale == "linear":
            return iteration % self.save_interval == 0
        step = 1.0
        while int(step) < iteration:
            step *= self.save_interval
        return int(step) == iteration


class LoggingConfig(Group):
    """Logging"""

    log_dir: PathText | None = key(
        None, "Folder for a copy of the console output and for metrics.jsonl. Default: none.", placeholders=True
    )
    peak_theoretical_tflops: float | None = key(
        None,
        "Peak of the device in TFLOP/s, for the MFU in the log. Default: the dense bf16 peak, if the GPU is known.",
        gt=0,
    )
    tensorboard_dir: PathText | None = key(None, "Folder for TensorBoard. Default: none.", placeholders=True)
    use_wandb: bool | None = key(
        None, "True: log to Weights & Biases. The API key is read from WANDB_API_KEY, never from a configuration."
    )
    wandb_project: str = key("neox", "Weights & Biases: project.")
    wandb_group: str | None = key(None, "Weights & Biases: group of runs.", placeholders=True)
    wandb_team: str | None = key(None, "Weights & Biases: team (entity).")
    wandb_run_name: str | None = key(
        None, "Weights & Biases: name of the run. Default: chosen by Weights & Biases.", placeholders=True
    )
    wandb_host: str = key("https://api.wandb.ai", "Weights & Biases: address of the server.")
    profile: bool = key(
        False,
        """True: profile some steps with torch.profiler. Every rank writes a trace to tensorboard_dir (or log_dir); the
        log lists the operators that take the longest. On a GPU, also for nsys with --capture-range=cudaProfilerApi.""",
    )
    profile_step_start: Int = key(10, "Number of steps before the first profiled one.", ge=0)
    profile_step_stop: Int = key(12, "Number of steps up to and including the last profiled one.", ge=1)
