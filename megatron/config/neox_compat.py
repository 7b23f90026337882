"""Keys of GPT-NeoX that have no effect in this project: unsupported or ignored, each with the reason.

An unsupported key would change the result, so it is an error unless its value means "off". An ignored key tunes
something that works differently here, or belongs to an unsupported feature; it is accepted with a notice. Nested keys
are written with dots. Source: GPT-NeoX's configs/neox_arguments.md, of 2022 and of its public HEAD.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unsupported:
    """Why a key is not supported or what to use instead, and the values (besides null) that mean "off"."""

    reason: str
    off: tuple[Any, ...] = ()

    def is_off(self, value: Any) -> bool:
        """True for the values that mean "off", an empty mapping, and a mapping with `enabled: false`."""
        if isinstance(value, dict):
            return not value or value.get("enabled") is False
        return any(type(value) is type(off) and value == off for off in (None, *self.off))


def _unsupported(reason: str, *keys: str, off: tuple[Any, ...] = ()) -> dict[str, Unsupported]:
    return dict.fromkeys(keys, Unsupported(reason, off))


def _ignored(reason: str, *keys: str) -> dict[str, str]:
    return dict.fromkeys(keys, reason)


UNSUPPORTED: dict[str, Unsupported] = {
    # Sizes and structure of the model.
    **_unsupported(
        "learned positions always start at 0 (the offset is for OPT's weights)", "opt_pos_emb_offset", off=(0,)
    ),
    **_unsupported("only dense attention is supported", "sparsity_config", "sparse_attention"),
    **_unsupported("blocks do not share weights, except positional parameters", "num_unique_layers"),
    **_unsupported("the parallel residual always has two separate norms", "gpt_j_tied", off=(False,)),
    **_unsupported("remove the key; activation: swiglu or geglu selects a gated MLP", "mlp_type", off=("regular",)),
    **_unsupported("set intermediate_size", "expansion_factor", off=(4, 4.0)),
    **_unsupported("soft prompts are not supported", "soft_prompt_tuning"),
    **_unsupported("RWKV and Mamba are not supported", "dim_att", "ffn_dim"),
    **_unsupported("mixture of experts is not supported", "moe_num_experts", off=(1,)),
    **_unsupported(
        "NVIDIA Transformer Engine is not supported",
        "te_columnparallel",
        "te_rowparallel",
        "te_layernorm_mlp",
        "te_mha",
        off=(False,),
    ),
    **_unsupported("muP is not supported", "use_mup", "coord_check", "save_base_shapes", off=(False,)),
    # Optimizer, schedule, precision.
    **_unsupported("derived by GPT-NeoX; set optimizer: {type: ...}", "optimizer_type"),
    **_unsupported("derived by GPT-NeoX; set optimizer: {params: {lr: ...}}", "lr"),
    **_unsupported("derived by GPT-NeoX; set zero_optimization: {stage: ...}", "zero_stage"),
    **_unsupported(
        "derived by GPT-NeoX; set inside zero_optimization",
        "zero_reduce_scatter",
        "zero_contiguous_gradients",
        "zero_reduce_bucket_size",
        "zero_allgather_bucket_size",
    ),
    **_unsupported("derived by GPT-NeoX; set gradient_clipping", "clip_grad"),
    **_unsupported(
        "derived by GPT-NeoX; set inside fp16",
        "loss_scale",
        "loss_scale_window",
        "hysteresis",
        "dynamic_loss_scale",
    ),
    **_unsupported("derived by GPT-NeoX; set fp16: {min_loss_scale: ...}", "min_scale"),
    **_unsupported(
        "for 1-bit Adam, which is not supported",
        "optimizer.params.freeze_step",
        "optimizer.params.cuda_aware",
        "optimizer.params.comm_backend_name",
    ),
    **_unsupported("set lr_decay_iters", "lr_decay_fraction"),
    **_unsupported(
        "the learning-rate schedule is never loaded from a checkpoint",
        "use_checkpoint_lr_scheduler",
        off=(False,),
    ),
    **_unsupported("set lr_decay_style, lr_decay_iters, warmup and min_lr", "scheduler"),
    **_unsupported("apex amp is not supported; use fp16 or bf16", "amp"),
    **_unsupported("set fp32_allreduce", "communication_data_type"),
    **_unsupported("gradients are accumulated in float32 only with bfloat16 and ZeRO 0 or 1", "data_types"),
    **_unsupported(
        "gradients are averaged without an extra factor", "prescale_gradients", "sparse_gradients", off=(False,)
    ),
    **_unsupported("gradients are averaged without an extra factor", "gradient_predivide_factor", off=(1, 1.0)),
    **_unsupported(
        "master weights are always float32",
        "fp16.fp16_master_weights_and_grads",
        "bf16.bf16_master_weights_and_grads",
        off=(False,),
    ),
    **_unsupported("the loss is plain cross entropy", "z_loss", off=(0, 0.0)),
    # Batches and training time.
    **_unsupported("derived by GPT-NeoX; set train_micro_batch_size_per_gpu", "batch_size"),
    **_unsupported("derived by GPT-NeoX; set gradient_accumulation_steps", "gas"),
    **_unsupported("set train_iters", "train_epochs"),
    **_unsupported("set curriculum_learning for a schedule of the sequence length", "data_efficiency"),
    **_unsupported("sequence parallelism is not supported", "sequence_parallel", off=(False,)),
    **_unsupported("checkpointed activations are not moved to the CPU", "checkpoint_in_cpu", off=(False,)),
    **_unsupported("set checkpoint_activations and checkpoint_num_layers", "activation_checkpointing"),
    # Data.
    **_unsupported("the data cache must be on a file system shared by all nodes", "use_shared_fs", off=(True,)),
    **_unsupported(
        "the labels are the next tokens; separate data for labels, rewards or preferences is not supported",
        "label_data_paths",
        *(f"{split}_{kind}_data_paths" for split in ("train", "valid", "test") for kind in ("label", "reward")),
        *(f"{sign}_{split}_data_paths" for sign in ("pos", "neg") for split in ("train", "valid", "test")),
        *(f"{sign}_{split}_label_data_paths" for sign in ("pos", "neg") for split in ("train", "valid", "test")),
    ),
    **_unsupported(
        "documents are always packed: concatenated and cut into sequences of equal length", "pack_impl", off=("packed",)
    ),
    **_unsupported("only language modeling is supported", "dataset_impl", off=("gpt2",)),
    **_unsupported("only language modeling is supported", "train_impl", off=("normal",)),
    # Checkpoints.
    **_unsupported("checkpoints are saved only to folders", "s3_path"),
    **_unsupported("universal checkpoints are not supported", "load_universal", off=(False,)),
    # Logging and profiling.
    **_unsupported("set tensorboard_dir", "tensorboard"),
    **_unsupported("set use_wandb and the wandb_ keys", "wandb"),
    **_unsupported("set log_dir; tools/watch.py writes the metrics in it as CSV", "csv_monitor"),
    **_unsupported("perplexity is always per token", "char_level_ppl", off=(False,)),
    **_unsupported("logits are not written to files; use megatron.inference", "return_logits", off=(False,)),
    **_unsupported("precomputed log-probabilities are not supported", "precompute_model_name"),
    **_unsupported("weights are not served to other processes", "serve_model_weights", off=(False,)),
    # DeepSpeed and the launcher.
    **_unsupported(
        "set inside deepspeed_extra_args",
        "flops_profiler",
        "elasticity",
        "comms_logger",
        "compression_training",
        "checkpoint",
    ),
    **_unsupported("autotuning is not supported", "autotuning", "autotuning_run"),
    **_unsupported("external process groups are not supported", "lazy_mpu_init", "adlr_autoresume", off=(False,)),
    **_unsupported(
        "set by GPT-NeoX at run time; remove the key",
        "local_rank",
        "rank",
        "world_size",
        "is_pipe_parallel",
        "user_script",
        "do_train",
        "do_valid",
        "do_test",
        "save_iters",
        "config_files",
    ),
}

IGNORED: dict[str, str] = {
    **_ignored(
        "there are no such fused kernels; attention_backend selects how attention is computed",
        "scaled_upper_triang_masked_softmax_fusion",
        "scaled_masked_softmax_fusion",
        "bias_dropout_fusion",
        "rope_fusion",
        "layernorm_fusion",
        "rmsnorm_fusion",
        "use_flashattn_swiglu",
        "fused_kernels_build_path",
    ),
    **_ignored("the loss is always computed in float32", "fp16_lm_cross_entropy"),
    **_ignored(
        "the softmax is always computed in float32", "attention_softmax_in_fp32", "apply_query_key_layer_scaling"
    ),
    **_ignored("the model casts explicitly", "fp16.auto_cast"),
    **_ignored("set bf16.enabled instead", "bf16.bf16"),
    **_ignored(
        "bfloat16 needs no loss scale",
        "bf16.loss_scale",
        "bf16.loss_scale_window",
        "bf16.initial_scale_power",
        "bf16.hysteresis",
        "bf16.min_loss_scale",
    ),
    **_ignored("initial weights do not depend on the device", "use_cpu_initialization"),
    **_ignored("buffers are computed and not saved", "rotary_save_freqs_buffer"),
    **_ignored("the learning-rate schedule always follows the configuration", "override_lr_scheduler"),
    **_ignored("set gradient_clipping instead", "optimizer.params.max_grad_norm"),
    **_ignored("set fp16.enabled instead", "fp16.fp16"),
    **_ignored("always enabled", "zero_allow_untested_optimizer"),
    **_ignored("the gradient norm is always logged", "log_grad_norm"),
    **_ignored(
        "not logged",
        "log_grad_pct_zeros",
        "log_param_norm",
        "log_optimizer_states",
        "log_gradient_noise_scale",
        "gradient_noise_scale_n_batches",
        "gradient_noise_scale_cpu_offload",
    ),
    **_ignored("profile always includes the backward pass", "profile_backward"),
    **_ignored(
        "snapshots of the GPU's memory are not written; profile records the memory of each operator",
        "memory_profiling",
        "memory_profiling_path",
    ),
    **_ignored(
        "Comet is not supported; use TensorBoard or Weights & Biases",
        "use_comet",
        "comet_workspace",
        "comet_project",
        "comet_experiment_name",
        "comet_tags",
        "comet_others",
        "comet_experiment",
    ),
    **_ignored("only one rank logs", "wandb_init_all_ranks"),
    **_ignored("logs do not contain it", "git_hash"),
    **_ignored("files are memory-mapped and read on demand", "mmap_warmup"),
    **_ignored(
        "there is only one implementation of activation checkpointing",
        "deepspeed_activation_checkpointing",
        "contiguous_checkpointing",
    ),
    **_ignored("checkpointed activations are not partitioned", "partition_activations"),
    **_ignored("PyTorch's activation checkpointing needs no synchronization", "synchronize_each_layer"),
    **_ignored("DeepSpeed is always used", "deepspeed", "deepscale", "deepscale_config"),
    **_ignored("num_gpus and the hostfile determine the number of processes", "global_num_gpus"),
    **_ignored("NCCL detects NVLink", "detect_nvlink_pairs"),
    **_ignored(
        "used only by model types that are not supported",
        "gmlp_attn_dim",
        "short_seq_prob",
        "onnx_safe",
        "scalenorm_epsilon",
    ),
    **_ignored("part of num_unique_layers, which is not supported", "param_sharing_style"),
    **_ignored("part of pack_impl, which is not supported", "allow_chopped"),
    **_ignored("part of s3_path, which is not supported", "s3_chunk_size"),
    **_ignored("computed from curriculum_learning", "curriculum_seqlen"),
    **_ignored("part of adlr_autoresume, which is not supported", "adlr_autoresume_interval"),
    **_ignored("part of serve_model_weights, which is not supported", "weight_server_port"),
    **_ignored("part of dataset_impl, which is not supported", "online_dataserver_ips", "online_dataserver_ports"),
    **_ignored(
        "part of train_impl, which is not supported",
        "dpo_fp32",
        "dpo_reference_free",
        "dpo_beta",
        "kto_fp32",
        "kto_desirable_weight",
        "kto_undesirable_weight",
        "kto_beta",
        "kl_impl",
        "kl_div_beta",
        "fp32_reinforce",
        "reinforce_leave_one_out",
    ),
    **_ignored(
        "part of use_mup, which is not supported",
        "base_shapes_file",
        "mup_init_scale",
        "mup_attn_temp",
        "mup_output_temp",
        "mup_embedding_mult",
        "mup_rp_embedding_mult",
        "mup_width_scale",
    ),
    **_ignored(
        "part of Transformer Engine, which is not supported",
        "te_fp8_format",
        "te_fp8_wgrad",
        "te_fp8_amax_history_len",
        "te_fp8_amax_compute_algo",
        "te_fp8_margin",
        "te_fp8_mha",
    ),
    **_ignored(
        "part of Mamba, which is not supported",
        "mamba_selective_scan_fusion",
        "mamba_causal_conv_fusion",
        "mamba_inner_func_fusion",
        "mamba_selective_fp32_params",
        "mamba_use_bias_in_conv",
        "mamba_use_bias_in_linears",
    ),
    **_ignored(
        "part of moe_num_experts, which is not supported",
        "expert_interval",
        "moe_expert_interval",
        "moe_router_type",
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

ATTENTION_CONFIG = "attention_config"
_DENSE_ATTENTION = ("global", "flash")


def _is_bf16(keys: Mapping[str, Any]) -> bool:
    fp16, bf16 = (keys.get(name) or {} for name in ("fp16", "bf16"))
    return (
        keys.get("precision") == "bfloat16"
        or bf16.get("enabled") is True
        or (fp16.get("enabled") is True and fp16.get("type") in ("bf16", "bfloat16"))
    )


# Keys with a neutral value that depends on the other keys.
_IS_NEUTRAL: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "data_types": lambda value, keys: (
        value == {"grad_accum_dtype": "fp32"}
        and _is_bf16(keys)
        and (keys.get("zero_optimization") or {}).get("stage", 0) <= 1
    ),
}


def known_keys() -> list[str]:
    """All keys of this file, nested ones with dots."""
    return [*UNSUPPORTED, *IGNORED, ATTENTION_CONFIG]


def is_known(key: str) -> bool:
    """True if the key is in this file."""
    return key in UNSUPPORTED or key in IGNORED or key == ATTENTION_CONFIG


def unsupported_reason(key: str, value: Any, keys: Mapping[str, Any]) -> str | None:
    """Why this value of a known key is not supported, or None if it is accepted.

    keys: the values of all top-level keys, on which the neutral value of some keys depends.
    """
    if key == ATTENTION_CONFIG and value is not None:
        return _attention_reason(value, keys.get("num_layers"))
    if key not in UNSUPPORTED or UNSUPPORTED[key].is_off(value):
        return None
    try:
        if key in _IS_NEUTRAL and _IS_NEUTRAL[key](value, keys):
            return None
    except (AttributeError, TypeError):
        pass  # another key is missing or wrong, which is reported separately
    return UNSUPPORTED[key].reason


def _attention_reason(value: Any, num_layers: Any) -> str | None:
    """The value is one type per layer, or [[[type, type ...], repetitions] ...]; "all" repeats a pattern for all
    layers. `flash` is an implementation of dense attention.
    """
    expected = f'expected [[["global"], {num_layers or "NUM_LAYERS"}]]'
    types: set[Any] = set()
    count = 0  # without a list of all layers, which a large number would make too long
    try:
        for item in value:
            if isinstance(item, str):
                types.add(item)
                count += 1
            elif item[1] == "all":
                types, count = set(item[0]), len(item[0]) * (num_layers // len(item[0]))
                break
            else:
                types.update(item[0])
                count += len(item[0]) * max(0, operator.index(item[1]))
    except (TypeError, IndexError, ZeroDivisionError):
        return expected
    sparse = sorted({str(type_) for type_ in types if type_ not in _DENSE_ATTENTION})
    if sparse:
        hint = "; for a sliding window in these layers, set sliding_window_width to a list" if "local" in sparse else ""
        return f"only dense attention (global, flash) is supported, not {', '.join(sparse)}{hint}"
    return None if count == num_layers else f"it describes {count} layers, but num_layers is {num_layers}; {expected}"
