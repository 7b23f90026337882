"""Keys that GPT-NeoX knows and this project does not act on, each with the reason.

A refused key would change the result, so it is an error; values that mean "off" are let through. A key without effect
tunes what is done another way here (or belongs to a feature that is refused), so it is accepted, and that is said once.
Nested keys are written with dots. Source: GPT-NeoX's configs/neox_arguments.md, of 2022 and of its public HEAD.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refused:
    """Why a key is refused, what to do instead, and the values (besides null) that are let through."""

    reason: str
    neutral: tuple[Any, ...] = ()

    def allows(self, value: Any) -> bool:
        """True for the neutral values, and for a mapping that is empty or says `enabled: false`."""
        if isinstance(value, dict):
            return not value or value.get("enabled") is False
        return any(type(value) is type(neutral) and value == neutral for neutral in (None, *self.neutral))


def _refused(reason: str, *keys: str, neutral: tuple[Any, ...] = ()) -> dict[str, Refused]:
    return dict.fromkeys(keys, Refused(reason, neutral))


def _without_effect(reason: str, *keys: str) -> dict[str, str]:
    return dict.fromkeys(keys, reason)


_DEEPSPEED = "DeepSpeed is given it only from deepspeed_extra_args"

REFUSED: dict[str, Refused] = {
    # Sizes and structure of the model.
    **_refused(
        "learned positions start at 0 here (the offset serves OPT's weights)", "opt_pos_emb_offset", neutral=(0,)
    ),
    **_refused("sparse attention is not supported; attention is dense", "sparsity_config", "sparse_attention"),
    **_refused("every block has weights of its own; only positional parameters are shared", "num_unique_layers"),
    **_refused("the two norms of a parallel residual are separate here", "gpt_j_tied", neutral=(False,)),
    **_refused(
        "norms and linear layers have biases here",
        "use_bias_in_norms",
        "use_bias_in_attn_linear",
        "use_bias_in_mlp",
        neutral=(True,),
    ),
    **_refused("the MLP is the ungated one, four times as wide as the model", "mlp_type", neutral=("regular",)),
    **_refused("the MLP is four times as wide as the model", "intermediate_size"),
    **_refused("the MLP is four times as wide as the model", "expansion_factor", neutral=(4, 4.0)),
    **_refused("the MLP is four times as wide as the model", "mlp_multiple_of", neutral=(1,)),
    **_refused("every head has keys and values of its own (no grouped-query attention)", "num_kv_heads"),
    **_refused("windowed attention is a mode of evaluation here, not of training", "sliding_window_width"),
    **_refused("queries and keys are not normalized here", "use_qk_layernorm", neutral=(False,)),
    **_refused("soft prompts are not supported", "soft_prompt_tuning"),
    **_refused(
        "RWKV and Mamba are not supported; the head size is hidden_size / num_attention_heads",
        "dim_att",
        "head_size",
        "ffn_dim",
    ),
    **_refused("mixture of experts is not supported", "moe_num_experts", neutral=(1,)),
    **_refused(
        "NVIDIA Transformer Engine is not used",
        "te_columnparallel",
        "te_rowparallel",
        "te_layernorm_mlp",
        "te_mha",
        neutral=(False,),
    ),
    **_refused("muP is not supported", "use_mup", "coord_check", "save_base_shapes", neutral=(False,)),
    # Optimizer, schedule, precision.
    **_refused("GPT-NeoX derives it; give optimizer: {type: ...}", "optimizer_type"),
    **_refused("GPT-NeoX derives it; give optimizer: {params: {lr: ...}}", "lr"),
    **_refused("GPT-NeoX derives it; give zero_optimization: {stage: ...}", "zero_stage"),
    **_refused(
        "GPT-NeoX derives it; give it inside zero_optimization",
        "zero_reduce_scatter",
        "zero_contiguous_gradients",
        "zero_reduce_bucket_size",
        "zero_allgather_bucket_size",
    ),
    **_refused("GPT-NeoX derives it; give gradient_clipping", "clip_grad"),
    **_refused(
        "GPT-NeoX derives it; give it inside fp16",
        "loss_scale",
        "loss_scale_window",
        "hysteresis",
        "dynamic_loss_scale",
    ),
    **_refused("GPT-NeoX derives it; give fp16: {min_loss_scale: ...}", "min_scale"),
    **_refused("bitsandbytes optimizers are not supported; Adam and AdamW are", "use_bnb_optimizer", neutral=(False,)),
    **_refused(
        "it belongs to other optimizers; Adam and AdamW are supported",
        "optimizer.params.freeze_step",
        "optimizer.params.cuda_aware",
        "optimizer.params.comm_backend_name",
        "optimizer.params.momentum",
    ),
    **_refused("give lr_decay_iters", "lr_decay_fraction"),
    **_refused(
        "the schedule always follows the configuration, never the checkpoint",
        "use_checkpoint_lr_scheduler",
        neutral=(False,),
    ),
    **_refused("the schedule is lr_decay_style, lr_decay_iters, warmup and min_lr", "scheduler"),
    **_refused("apex amp is not supported; use fp16 or bf16", "amp"),
    **_refused("use fp32_allreduce", "communication_data_type", "data_types"),
    **_refused(
        "gradients are averaged without a further factor", "prescale_gradients", "sparse_gradients", neutral=(False,)
    ),
    **_refused("gradients are averaged without a further factor", "gradient_predivide_factor", neutral=(1, 1.0)),
    **_refused("casts are part of the model", "fp16.auto_cast", neutral=(False,)),
    **_refused(
        "master weights are float32",
        "fp16.fp16_master_weights_and_grads",
        "bf16.bf16_master_weights_and_grads",
        neutral=(False,),
    ),
    **_refused("the loss is the cross entropy alone", "z_loss", neutral=(0, 0.0)),
    # Batches and training time.
    **_refused("GPT-NeoX derives it; give train_micro_batch_size_per_gpu", "batch_size"),
    **_refused("GPT-NeoX derives it; give gradient_accumulation_steps", "gas"),
    **_refused("give train_iters", "train_epochs"),
    **_refused("the length does not change while training", "curriculum_learning", "data_efficiency"),
    **_refused("sequence parallelism is not supported", "sequence_parallel", neutral=(False,)),
    **_refused("activations stay on the device", "checkpoint_in_cpu", neutral=(False,)),
    **_refused("use checkpoint_activations and its companions", "activation_checkpointing"),
    # Data.
    **_refused("the data cache must be on a file system that all nodes share", "use_shared_fs", neutral=(True,)),
    **_refused(
        "the labels are the next tokens; there is no separate data for labels, rewards or preferences",
        "label_data_paths",
        *(f"{split}_{kind}_data_paths" for split in ("train", "valid", "test") for kind in ("label", "reward")),
        *(f"{sign}_{split}_data_paths" for sign in ("pos", "neg") for split in ("train", "valid", "test")),
        *(f"{sign}_{split}_label_data_paths" for sign in ("pos", "neg") for split in ("train", "valid", "test")),
    ),
    **_refused("documents are joined and cut into equal sequences", "pack_impl", neutral=("packed",)),
    **_refused("only language modelling is supported", "dataset_impl", neutral=("gpt2",)),
    **_refused("only language modelling is supported", "train_impl", neutral=("normal",)),
    # Checkpoints.
    **_refused("checkpoints are evenly spaced", "checkpoint_scale", neutral=("linear",)),
    **_refused("checkpoints are evenly spaced; see save_interval", "extra_save_iters", neutral=([],)),
    **_refused("checkpoints are saved to a folder", "s3_path"),
    **_refused("universal checkpoints are not read", "load_universal", neutral=(False,)),
    # Logging and profiling.
    **_refused("Comet is not supported; TensorBoard and Weights & Biases are", "use_comet", neutral=(False,)),
    **_refused("use tensorboard_dir", "tensorboard"),
    **_refused("use use_wandb and the wandb_ keys", "wandb"),
    **_refused("use tensorboard_dir or use_wandb", "csv_monitor"),
    **_refused(
        "it is not logged",
        "log_grad_pct_zeros",
        "log_param_norm",
        "log_optimizer_states",
        "log_gradient_noise_scale",
        neutral=(False,),
    ),
    **_refused("run a profiler from outside", "memory_profiling", "profile", "profile_backward", neutral=(False,)),
    **_refused("perplexity is per token", "char_level_ppl", neutral=(False,)),
    **_refused("logits are not written; use megatron.inference", "return_logits", neutral=(False,)),
    **_refused("log-probabilities are not precomputed", "precompute_model_name"),
    # DeepSpeed's and the launcher's own.
    **_refused(_DEEPSPEED, "flops_profiler", "elasticity", "comms_logger", "compression_training", "checkpoint"),
    **_refused("autotuning is not supported", "autotuning", "autotuning_run"),
    **_refused("external process groups are not supported", "lazy_mpu_init", "adlr_autoresume", neutral=(False,)),
    **_refused(
        "the program sets it while it runs; remove the key",
        "local_rank",
        "rank",
        "world_size",
        "is_pipe_parallel",
        "user_script",
        "do_train",
        "do_valid",
        "do_test",
        "save_iters",
        "global_num_gpus",
        "config_files",
    ),
}

WITHOUT_EFFECT: dict[str, str] = {
    **_without_effect(
        "nothing is compiled: attention_backend chooses among PyTorch's kernels",
        "scaled_upper_triang_masked_softmax_fusion",
        "scaled_masked_softmax_fusion",
        "bias_dropout_fusion",
        "rope_fusion",
        "layernorm_fusion",
        "rmsnorm_fusion",
        "use_flashattn_swiglu",
    ),
    **_without_effect("the loss is computed in float32", "fp16_lm_cross_entropy"),
    **_without_effect(
        "the softmax is computed in float32", "attention_softmax_in_fp32", "apply_query_key_layer_scaling"
    ),
    **_without_effect("initial weights are the same wherever they are drawn", "use_cpu_initialization"),
    **_without_effect("buffers are computed, not saved", "rotary_save_freqs_buffer"),
    **_without_effect("the schedule always follows the configuration", "override_lr_scheduler"),
    **_without_effect("gradients are clipped to gradient_clipping", "optimizer.params.max_grad_norm"),
    **_without_effect("fp16.enabled decides", "fp16.fp16"),
    **_without_effect("Adam is used with ZeRO as it is", "zero_allow_untested_optimizer"),
    **_without_effect("the gradient norm is always logged", "log_grad_norm"),
    **_without_effect("one rank logs for all", "wandb_init_all_ranks"),
    **_without_effect("it only labels logs", "git_hash"),
    **_without_effect("files are mapped, and read when needed", "mmap_warmup"),
    **_without_effect(
        "activation checkpointing has one implementation",
        "deepspeed_activation_checkpointing",
        "contiguous_checkpointing",
    ),
    **_without_effect("checkpointed activations stay in the process that computed them", "partition_activations"),
    **_without_effect("PyTorch orders the recomputation itself", "synchronize_each_layer"),
    **_without_effect("DeepSpeed is always used", "deepspeed", "deepscale", "deepscale_config"),
    **_without_effect("DeepSpeed's settings follow from this configuration", "dump_state"),
    **_without_effect("NCCL finds NVLink by itself", "detect_nvlink_pairs"),
    **_without_effect(
        "it serves other kinds of models", "gmlp_attn_dim", "short_seq_prob", "onnx_safe", "scalenorm_epsilon"
    ),
    **_without_effect("it belongs to num_unique_layers, which is refused", "param_sharing_style"),
    **_without_effect("it belongs to pack_impl, which is refused", "allow_chopped"),
    **_without_effect("it belongs to s3_path, which is refused", "s3_chunk_size"),
    **_without_effect("it belongs to curriculum_learning, which is refused", "curriculum_seqlen"),
    **_without_effect("it belongs to adlr_autoresume, which is refused", "adlr_autoresume_interval"),
    **_without_effect(
        "it belongs to log_gradient_noise_scale, which is refused",
        "gradient_noise_scale_n_batches",
        "gradient_noise_scale_cpu_offload",
    ),
    **_without_effect("it belongs to memory_profiling, which is refused", "memory_profiling_path"),
    **_without_effect("it belongs to profile, which is refused", "profile_step_start", "profile_step_stop"),
    **_without_effect(
        "it belongs to use_comet, which is refused",
        "comet_workspace",
        "comet_project",
        "comet_experiment_name",
        "comet_tags",
        "comet_others",
        "comet_experiment",
    ),
    **_without_effect(
        "it belongs to train_impl, which is refused",
        "dpo_fp32",
        "dpo_reference_free",
        "dpo_beta",
        "kto_fp32",
        "kto_desirable_weight",
        "kto_undesirable_weight",
        "kto_beta",
    ),
    **_without_effect(
        "it belongs to use_mup, which is refused",
        "base_shapes_file",
        "mup_init_scale",
        "mup_attn_temp",
        "mup_output_temp",
        "mup_embedding_mult",
        "mup_rp_embedding_mult",
        "mup_width_scale",
    ),
    **_without_effect(
        "it belongs to Transformer Engine, which is not used",
        "te_fp8_format",
        "te_fp8_wgrad",
        "te_fp8_amax_history_len",
        "te_fp8_amax_compute_algo",
        "te_fp8_margin",
        "te_fp8_mha",
    ),
    **_without_effect(
        "it belongs to Mamba, which is not supported",
        "mamba_selective_scan_fusion",
        "mamba_causal_conv_fusion",
        "mamba_inner_func_fusion",
        "mamba_selective_fp32_params",
        "mamba_use_bias_in_conv",
        "mamba_use_bias_in_linears",
    ),
    **_without_effect(
        "it belongs to moe_num_experts, which is refused",
        "expert_interval",
        "moe_top_k",
        "use_tutel",
        "moe_loss_coeff",
        "moe_train_capacity_factor",
        "moe_eval_capacity_factor",
        "moe_min_capacity",
        "moe_token_dropping",
        "create_moe_param_group",
        "moe_use_residual",
        "moe_expert_parallel_size",
        "moe_type",
        "moe_glu",
        "moe_lbl_in_fp32",
        "moe_jitter_eps",
        "enable_expert_tensor_parallelism",
    ),
}

_DENSE_ATTENTION = ("global", "flash")
ATTENTION_CONFIG = "attention_config"


def known() -> list[str]:
    """All keys of this file, nested ones with dots."""
    return [*REFUSED, *WITHOUT_EFFECT, ATTENTION_CONFIG]


def is_known(key: str) -> bool:
    """True if the key is one of this file."""
    return key in REFUSED or key in WITHOUT_EFFECT or key == ATTENTION_CONFIG


def refusal(key: str, value: Any) -> str | None:
    """Why this value of a known key is refused, or None if it is let through."""
    if key == ATTENTION_CONFIG:
        return _attention_refusal(value)
    if key in REFUSED and not REFUSED[key].allows(value):
        return REFUSED[key].reason
    return None


def _attention_refusal(value: Any) -> str | None:
    """Dense causal attention is all there is. GPT-NeoX's form: [[[type, type ...], repetitions] ...]; `flash` names an
    implementation of the dense one."""
    if value is None:
        return None
    try:
        kinds = {kind for kinds, _ in value for kind in kinds}
    except (TypeError, ValueError):
        return 'it has the form [[["global"], NUM_LAYERS]]'
    other = sorted(str(kind) for kind in kinds if kind not in _DENSE_ATTENTION)
    return f"only dense attention (global, flash) is supported, not {', '.join(other)}" if other else None
