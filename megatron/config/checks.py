"""Checks that involve more than one key. They run before any process starts.

Every error shows the values and says what to change.
"""

import difflib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.schema import split_shares
from megatron.utils.errors import UserError, first_line, shortened

if TYPE_CHECKING:
    from megatron.config.loader import Config

# Key, option of the positional method, default.
_ROTARY_KEYS = (("rotary_pct", "fraction", 1.0), ("rotary_emb_base", "base", 10_000))
_ZERO_3_KEYS = (
    "offload_param",
    "zero_hpz_partition_size",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_weights",
)


def check_vocabulary(config: "Config", tokenizer_vocab_size: int) -> None:
    """Raises UserError if the tokenizer has more tokens than the embedding has rows."""
    padded = config.model.padded_vocab_size
    if padded is not None and padded < tokenizer_vocab_size:
        raise UserError(
            f"padded_vocab_size is {padded}, but the tokenizer has {tokenizer_vocab_size} tokens; "
            "remove the key (it is computed) or use the tokenizer the model was trained with"
        )


def validate(config: "Config") -> Iterator[str]:
    """One message for each contradiction between keys."""
    model, parallel = config.model, config.parallel
    if config.to_flat().get("head_size") is None and model.hidden_size % model.num_attention_heads:
        yield (
            f"hidden_size {model.hidden_size} is not divisible by num_attention_heads {model.num_attention_heads}; "
            "change one of them, or set head_size"
        )
    else:
        yield from _check_positional_method(config)
    if model.num_attention_heads % parallel.model_parallel_size:
        yield (
            f"num_attention_heads {model.num_attention_heads} is not divisible by model_parallel_size "
            f"{parallel.model_parallel_size}; tensor parallelism does not split heads"
        )
    if model.num_attention_heads % model.num_kv_heads:
        yield (
            f"num_attention_heads {model.num_attention_heads} is not divisible by num_kv_heads {model.num_kv_heads}; "
            "the same number of query heads shares each head of keys and values"
        )
    elif model.num_kv_heads % parallel.model_parallel_size:
        yield (
            f"num_kv_heads {model.num_kv_heads} is not divisible by model_parallel_size "
            f"{parallel.model_parallel_size}; tensor parallelism does not split or copy heads of keys and values"
        )
    actual_type = "multihead" if model.num_kv_heads == model.num_attention_heads else "groupedquery"
    if model.attention_type not in (None, actual_type):
        yield (
            f"attention_type {model.attention_type}, but num_kv_heads {model.num_kv_heads} with num_attention_heads "
            f"{model.num_attention_heads} is {actual_type}; change one of them"
        )
    if len(model.sliding_window_width or ()) > model.num_layers:
        yield (
            f"sliding_window_width has {len(model.sliding_window_width or ())} entries, but num_layers is "
            f"{model.num_layers}; layer i has entry i, and a shorter list repeats"
        )
    if model.mlp_features < 1:
        yield (
            f"intermediate_size {model.intermediate_size} with activation {model.activation}: a gated MLP has a third "
            "of it, here 0 features; set at least 2"
        )
    if model.mlp_features % parallel.model_parallel_size:
        yield (
            f"the MLP has {model.mlp_features} features, which model_parallel_size {parallel.model_parallel_size} does "
            f"not divide; set mlp_multiple_of to a multiple of {parallel.model_parallel_size}"
        )
    if parallel.pipe_parallel_size > model.num_layers:
        yield (
            f"pipe_parallel_size {parallel.pipe_parallel_size} is more than num_layers {model.num_layers}; "
            "every stage needs at least one block"
        )
    if model.padded_vocab_size is not None and model.padded_vocab_size % parallel.model_parallel_size:
        yield (
            f"padded_vocab_size {model.padded_vocab_size} is not divisible by model_parallel_size "
            f"{parallel.model_parallel_size}; remove the key (it is computed)"
        )
    stage = config.optimizer.zero_stage
    offload = config.optimizer.zero.get("offload_optimizer", {})
    if config.optimizer.zero.get("cpu_offload") or offload.get("device", "none") != "none":
        yield (
            "zero_optimization.offload_optimizer and cpu_offload are not supported: DeepSpeed would replace this "
            "project's optimizer, which bounds positional parameters; remove the key, and use ZeRO on more GPUs"
        )
    for zero_key, value in config.optimizer.zero.items() if stage < 3 else ():
        value = value.get("device") if isinstance(value, dict) else value
        if zero_key in _ZERO_3_KEYS and (value is True or value not in (False, 1, "none")):
            yield (
                f"zero_optimization.{zero_key} has no effect with stage {stage}: DeepSpeed uses it only with stage 3; "
                "remove the key, or use stage 3"
            )
    if model.attention_dropout > 0 and parallel.model_parallel_size > 1:
        yield (
            f"attention_dropout {model.attention_dropout} with model_parallel_size "
            f"{parallel.model_parallel_size} is not supported: all ranks would draw the same dropout mask for their "
            "different heads; set attention_dropout to 0 (hidden_dropout is supported)"
        )
    if stage > 1 and parallel.pipe_parallel_size > 0:
        yield (
            f"zero_optimization.stage {stage} with pipe_parallel_size {parallel.pipe_parallel_size}: DeepSpeed's "
            "pipeline does not shard gradients and supports only ZeRO 0 and 1; use stage 1, or pipe_parallel_size 0"
        )
    if stage == 3 and parallel.model_parallel_size > 1:
        yield (
            f"zero_optimization.stage 3 with model_parallel_size {parallel.model_parallel_size} is not supported: "
            "tensor parallelism has already split the parameters; use stage 2 or model_parallel_size 1"
        )
    for key in _keys_that_split_the_model(config) if config.training.torch_compile else ():
        yield (
            f"torch_compile with {key} is not supported: its communication between ranks cannot be compiled; "
            "remove one of the two keys"
        )
    for key in _keys_against_cuda_graphs(config) if config.training.enable_cuda_graph else ():
        yield f"enable_cuda_graph with {key} is not supported; remove one of the two keys"
    yield from _check_curriculum(config)
    yield from _check_extrapolation(config)
    yield from _check_data(config)
    yield from _check_profile(config)
    if config.schedule.min_lr > config.optimizer.lr:
        yield f"min_lr {config.schedule.min_lr} exceeds optimizer.params.lr {config.optimizer.lr}; lower min_lr"
    checkpoint, launcher = config.checkpoint, config.launcher
    for name in ("finetune", "iteration"):
        if getattr(checkpoint, name) not in (None, False) and checkpoint.load is None:
            yield f"{name} is set, but load is not; set load to the folder of the checkpoint"
    if launcher.include is not None and launcher.exclude is not None:
        yield "include and exclude are both set; remove one of them"
    for name in ("include", "exclude"):
        if getattr(launcher, name) is not None and (launcher.num_gpus is not None or launcher.num_nodes > 0):
            yield f"{name} selects the GPUs; remove num_gpus and num_nodes"


def warnings_for(config: "Config") -> Iterator[str]:
    """One message for each key whose meaning in GPT-NeoX is easily mistaken, or differs here."""
    model, keys = config.model, config.to_flat()
    # Gated MLPs of published models have at least 8/3 * hidden_size features.
    is_small = model.gated and model.mlp_features < 2 * model.hidden_size
    if is_small and keys.get("intermediate_size") is None:
        yield (
            f"activation {model.activation}: the gated MLP has {model.mlp_features:,} features, a third of "
            "4 * hidden_size as in GPT-NeoX; for another number, set intermediate_size to three times that number"
        )
    elif is_small:
        yield (
            f"intermediate_size {model.intermediate_size}: the gated MLP has {model.mlp_features:,} features, a third "
            f"of it as in GPT-NeoX; for {model.intermediate_size:,} features, set {3 * model.intermediate_size}"
        )
    if config.optimizer.use_bnb_optimizer and model.pos_emb == "learned":
        yield (
            "use_bnb_optimizer with pos_emb learned: the position embeddings have no layer norm, unlike those of "
            "GPT-NeoX with this key (bitsandbytes' StableEmbedding)"
        )
    for name, option, default in _ROTARY_KEYS if model.pos_emb != "per_layer" else ():
        if getattr(model, name) != default and option not in model.positional_options:
            yield f"{name} {getattr(model, name)} has no effect with pos_emb {model.pos_emb}"
    schedule = config.schedule
    if schedule.lr_decay_iters is not None and 0 < (schedule.train_iters or 0) < schedule.lr_decay_iters:
        yield (
            f"lr_decay_iters {schedule.lr_decay_iters:,} is above train_iters {schedule.train_iters:,}: training ends "
            "before the learning rate has decayed; without lr_decay_iters, both end together"
        )
    if model.use_qk_layernorm:
        yield (
            "use_qk_layernorm: each head is normalized, with separate weights for queries and keys; GPT-NeoX "
            "normalizes all heads of a tensor-parallel rank at once"
        )


def _check_positional_method(config: "Config") -> Iterator[str]:
    """The method exists, accepts its options and maximum length, and works with the attention backend and layout."""
    import torch  # not at the top: tools that read no configuration start faster without torch

    from kerple import positional
    from kerple.attention import Requirements, check_backend
    from kerple.positional.randomized import Randomized

    model = config.model
    if model.pos_emb_module is not None:
        try:
            positional.load_plugin(model.pos_emb_module)
        except positional.PluginError as error:
            yield f"pos_emb_module {shortened(str(error))}"
            return
        except Exception as error:  # the module is the user's own code
            yield f"pos_emb_module {shortened(model.pos_emb_module)}: {type(error).__name__}: {first_line(error)}"
            return
    names = sorted(positional.registered_names())
    if model.pos_emb not in names:
        nearest = difflib.get_close_matches(model.pos_emb, names, n=3, cutoff=0.0)
        yield (
            f'pos_emb "{model.pos_emb}" is not a known method; nearest: {", ".join(nearest)}. The file of your own '
            "method must be named each time: --set pos-emb-module=FILE (for kerple convert and inspect, "
            "--pos-emb-module FILE)"
        )
        return
    try:
        with torch.device("meta"):  # checks the options without allocating memory
            methods = positional.build_layers(model.pos_emb, model.shape, **model.positional_options)
        requirements = Requirements(
            weight=any(method.has_weight for method in methods),
            modify_scores=any(method.modifies_scores for method in methods),
            dropout=model.attention_dropout > 0,
            head_size=model.head_size,
        )
        check_backend(model.attention_backend, requirements)
    except (ValueError, NotImplementedError) as error:
        yield f"pos_emb {model.pos_emb}: {error}"
        return
    if requirements.modify_scores and config.parallel.model_parallel_size > 1:
        yield (
            f"pos_emb {model.pos_emb} computes the scores of all heads together, which model_parallel_size "
            f"{config.parallel.model_parallel_size} splits over ranks; use model_parallel_size 1 (pipeline parallelism "
            "and ZeRO are supported)"
        )
    plain = [method.method if isinstance(method, positional.PerLayer) else method for method in methods]
    if isinstance(methods[0], positional.PerLayer):
        options = {**positional.PerLayer.default_options(), **model.positional_options}
        entries = positional.PerLayer.names(options["methods"])
        if len(entries) > model.num_layers:
            yield (
                f"pos_emb per_layer: methods has {len(entries)} entries, but num_layers is {model.num_layers}; remove "
                "those that no layer uses"
            )
        for name, option, default in _ROTARY_KEYS:
            if getattr(model, name) != default:
                yield (
                    f"{name} has no effect with pos_emb per_layer; set the option in its list: "
                    f'{{"rotary": {{"{option}": {getattr(model, name)}}}}}'
                )
    for name, length in (("seq_length", model.seq_length), ("seq_length_val", config.training.seq_length_val)):
        if model.pos_emb == "learned" and length is not None and length > model.max_position_embeddings:
            yield (
                f"{name} {length} is more than max_position_embeddings {model.max_position_embeddings}, and pos_emb "
                "learned has no embeddings beyond; raise max_position_embeddings or choose another pos_emb"
            )
        for longest in {method.random.length for method in plain if isinstance(method, Randomized)}:
            if length is not None and length > longest:
                yield (
                    f"{name} {length} is more than random_length {longest}, the number of random positions; set "
                    "pos_emb_options.random_length to the longest length"
                )


def _keys_that_split_the_model(config: "Config") -> list[str]:
    """The keys, with their values, that split the model over ranks."""
    parallel, stage = config.parallel, config.optimizer.zero_stage
    keys = {
        f"pipe_parallel_size {parallel.pipe_parallel_size}": parallel.pipe_parallel_size > 1,
        f"model_parallel_size {parallel.model_parallel_size}": parallel.model_parallel_size > 1,
        f"zero_optimization.stage {stage}": stage == 3,
    }
    return [key for key, splits in keys.items() if splits]


def _keys_against_cuda_graphs(config: "Config") -> list[str]:
    """The keys, with their values, that make the host decide in every step what the device computes, or that are not
    tested with CUDA graphs.
    """
    training, model = config.training, config.model
    keys = {
        f"zero_optimization.stage {config.optimizer.zero_stage}": config.optimizer.zero_stage == 2,
        f"{config.precision.dtype} (only bf16 is)": config.precision.dtype != "bf16",
        "checkpoint_activations true": training.checkpoint_activations,
        "torch_compile true": training.torch_compile,
        f"attention_dropout {model.attention_dropout}": model.attention_dropout > 0,
        "random positions (random_range)": "random_range" in str(model.positional_options),
    }
    return _keys_that_split_the_model(config) + [key for key, conflicts in keys.items() if conflicts]


def _check_curriculum(config: "Config") -> Iterator[str]:
    curriculum, length = config.curriculum, config.model.seq_length
    if not curriculum.enabled:
        return
    if curriculum.max_difficulty != length:
        yield (
            f"curriculum_learning.max_difficulty {curriculum.max_difficulty} is not seq_length {length}, the length of "
            "the sequences in the data; set both to the last length of the schedule"
        )
    for name in ("torch_compile", "enable_cuda_graph"):
        if getattr(config.training, name):
            yield f"{name} with curriculum_learning is not supported: it needs a constant length; remove one of the two"


def _check_extrapolation(config: "Config") -> Iterator[str]:
    training = config.training
    lengths = training.extrapolation_lengths
    if lengths is None:
        if training.extrapolation_tokens is not None:
            yield "extrapolation_tokens is set, but extrapolation_lengths is not; set both or neither"
        return
    for key in _keys_that_split_the_model(config):
        yield (
            f"extrapolation_lengths with {key} is not supported: each rank must have the complete model; remove "
            "extrapolation_lengths, and evaluate the checkpoints with evaluate.py"
        )
    multiple, budget = math.lcm(*lengths), training.extrapolation_budget
    if multiple > budget:
        yield (
            f"extrapolation_lengths {', '.join(map(str, lengths))} must score the same tokens, so their least common "
            f"multiple, {multiple:,}, must not be more than extrapolation_tokens, {budget:,}; choose lengths that "
            "divide the longest, or raise extrapolation_tokens"
        )


def _check_data(config: "Config") -> Iterator[str]:
    data = config.data
    if data.data_path is not None and data.train_data_paths is not None:
        yield (
            "data_path and train_data_paths are both set; use either data_path with split, or the three lists of paths"
        )
    try:
        split_shares(data.split)
    except UserError as error:
        yield str(error)
    if data.weight_by_num_documents and data.train_data_paths is None:
        yield ("weight_by_num_documents requires train_data_paths, which is not set; set it, or remove the key")
    for split in ("train", "valid", "test"):
        paths, weights = getattr(data, f"{split}_data_paths"), getattr(data, f"{split}_data_weights")
        if weights is None:
            continue
        if data.weight_by_num_documents:
            yield f"weight_by_num_documents and {split}_data_weights are both set; remove one of them"
        elif paths is None or len(paths) != len(weights):
            yield (
                f"{split}_data_weights has {len(weights)} weights for {len(paths or ())} {split}_data_paths; "
                "give one weight per path"
            )


def _check_profile(config: "Config") -> Iterator[str]:
    logging, last = config.logging, config.schedule.train_iters
    start, stop = logging.profile_step_start, logging.profile_step_stop
    if not logging.profile:
        return
    if stop <= start:
        yield f"profile_step_stop {stop} must be more than profile_step_start {start}; change one of them"
    elif last is not None and start >= last:
        yield f"profile_step_start {start}, but train_iters is {last}: no step would be profiled; lower it"
    if logging.tensorboard_dir is None and logging.log_dir is None:
        yield "profile writes traces to tensorboard_dir or log_dir, but neither is set; set one of them"
