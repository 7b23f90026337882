"""Checks that look at more than one key. They run before anything is started."""

import difflib
import math
from typing import TYPE_CHECKING

from megatron.config.data_split import split_shares
from megatron.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.config.loader import Config
    from megatron.config.schema import ModelConfig


def check_groups(config: "Config") -> None:
    """Raises UserError, with the arithmetic and what to change, for keys that contradict each other."""
    _check_sizes(config)
    _check_positions(config)
    _check_parallel(config)
    _check_optimization(config)
    _check_compilation(config)
    _check_extrapolation(config)
    _check_data(config)
    _check_runs(config)


def _check_sizes(config: "Config") -> None:
    model, parallel = config.model, config.parallel
    if model.hidden_size % model.num_attention_heads:
        raise UserError(
            f"hidden_size {model.hidden_size} is not divisible by num_attention_heads {model.num_attention_heads}; "
            "every head has hidden_size / num_attention_heads dimensions"
        )
    if model.num_attention_heads % parallel.model_parallel_size:
        raise UserError(
            f"num_attention_heads {model.num_attention_heads} is not divisible by model_parallel_size "
            f"{parallel.model_parallel_size}; every process holds whole heads"
        )
    if parallel.pipe_parallel_size > model.num_layers:
        raise UserError(
            f"pipe_parallel_size {parallel.pipe_parallel_size} is more than num_layers {model.num_layers}; "
            "every stage holds at least one block"
        )
    if model.padded_vocab_size is not None and model.padded_vocab_size % parallel.model_parallel_size:
        raise UserError(
            f"padded_vocab_size {model.padded_vocab_size} is not divisible by model_parallel_size "
            f"{parallel.model_parallel_size}; remove the key (it is computed)"
        )


def _check_positions(config: "Config") -> None:
    from kerple import positional

    model = config.model
    if model.pos_emb_module is not None:
        try:
            positional.load_plugin(model.pos_emb_module)
        except (ImportError, OSError, ValueError, SyntaxError) as error:
            raise UserError(f"pos_emb_module {model.pos_emb_module}: {error}") from error
    names = sorted(positional.registered_names())
    if model.pos_emb not in names:
        near = difflib.get_close_matches(model.pos_emb, names, n=3, cutoff=0.4)
        hint = f"nearest: {', '.join(near)}; known: " if near else "known: "
        raise UserError(f'pos_emb "{model.pos_emb}" is not a known method; {hint}{", ".join(names)}')
    _check_method(model, config.parallel.model_parallel_size)
    rows = model.max_position_embeddings
    for name, length in (("seq_length", model.seq_length), ("seq_length_val", config.training.seq_length_val)):
        if model.pos_emb == "learned" and length is not None and length > rows:
            raise UserError(
                f"{name} {length} is more than max_position_embeddings {rows}: pos_emb learned has a row for every "
                "position and none beyond; raise max_position_embeddings or choose another pos_emb"
            )


def _check_method(model: "ModelConfig", tensor_parallel_size: int) -> None:
    """The method takes its options, and backend and layout serve it: tried on tensors without memory."""
    import torch

    from kerple.attention import Requirements, check_backend
    from kerple.positional import ModelShape, build

    shape = ModelShape(
        num_heads=model.num_attention_heads,
        head_size=model.head_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        max_positions=model.max_position_embeddings,
    )
    try:
        with torch.device("meta"):
            method = build(model.pos_emb, shape, **model.positional_options)
        requirements = Requirements(weight=method.has_weight, modify_scores=method.modifies_scores)
        check_backend(model.attention_backend, requirements)
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"pos_emb {model.pos_emb}: {error}") from error
    if model.attention_dropout > 0 and model.attention_backend in ("flex", "fused"):
        raise UserError(
            f"attention_backend {model.attention_backend} has no attention_dropout ({model.attention_dropout} is set); "
            "use auto or chunked"
        )
    if method.modifies_scores and tensor_parallel_size > 1:
        raise UserError(
            f"pos_emb {model.pos_emb} makes the scores of all heads at once, and with model_parallel_size "
            f"{tensor_parallel_size} no process has them all; use model_parallel_size 1 (pipeline and ZeRO are served)"
        )


def _check_parallel(config: "Config") -> None:
    if config.model.attention_dropout > 0 and config.parallel.model_parallel_size > 1:
        raise UserError(
            "attention_dropout with model_parallel_size > 1 is not supported: the ranks would drop the same places of "
            "different heads; set attention_dropout to 0 (hidden_dropout is served)"
        )
    stage, parallel = config.optimizer.zero_stage, config.parallel
    if stage > 1 and parallel.pipe_parallel_size > 0:
        raise UserError(
            f"zero_optimization.stage {stage} with pipe_parallel_size {parallel.pipe_parallel_size}: DeepSpeed's "
            "pipeline keeps gradients whole and supports ZeRO 0 and 1 only; use stage 1, or pipe_parallel_size 0"
        )
    if stage == 3 and parallel.model_parallel_size > 1:
        raise UserError(
            f"zero_optimization.stage 3 with model_parallel_size {parallel.model_parallel_size} is not supported: it "
            "would split parameters that tensor parallelism has split already; use stage 2 or model_parallel_size 1"
        )


def _check_optimization(config: "Config") -> None:
    optimizer, schedule = config.optimizer, config.schedule
    if schedule.min_lr > optimizer.lr:
        raise UserError(f"min_lr {schedule.min_lr} is more than optimizer.params.lr {optimizer.lr}")


def _check_compilation(config: "Config") -> None:
    for key in _keys_that_split_the_model(config) if config.training.torch_compile else ():
        raise UserError(
            f"torch_compile with {key} is not supported: what moves weights and activations between ranks there cannot "
            "be compiled; leave it out"
        )


def _keys_that_split_the_model(config: "Config") -> list[str]:
    """The keys, with their values, that leave a rank without the whole model."""
    parallel, stage = config.parallel, config.optimizer.zero_stage
    keys = {
        f"pipe_parallel_size {parallel.pipe_parallel_size}": parallel.pipe_parallel_size > 1,
        f"model_parallel_size {parallel.model_parallel_size}": parallel.model_parallel_size > 1,
        f"zero_optimization.stage {stage}": stage == 3,
    }
    return [key for key, splits in keys.items() if splits]


def _check_extrapolation(config: "Config") -> None:
    training = config.training
    lengths = training.extrapolation_lengths
    if lengths is None:
        if training.extrapolation_tokens is not None:
            raise UserError("extrapolation_tokens is set, but extrapolation_lengths is not")
        return
    for key in _keys_that_split_the_model(config):
        raise UserError(
            f"extrapolation_lengths with {key} is not supported: long texts need the whole model on each rank; "
            "leave it out, and evaluate the checkpoints with evaluate.py"
        )
    common, budget = math.lcm(*lengths), training.extrapolation_budget
    if common > budget:
        raise UserError(
            f"extrapolation_lengths {', '.join(map(str, lengths))} must score the same tokens, so their least common "
            f"multiple, {common:,}, must not be more than extrapolation_tokens, {budget:,}; choose lengths that divide "
            "the longest, or raise extrapolation_tokens"
        )


def _check_data(config: "Config") -> None:
    data = config.data
    if data.data_path is not None and data.train_data_paths is not None:
        raise UserError(
            "data_path and train_data_paths are both given; use data_path with split, or the three lists of paths"
        )
    split_shares(data.split)
    if data.weight_by_num_documents and data.train_data_paths is None:
        raise UserError("weight_by_num_documents is for blends, but train_data_paths is not given")
    for split in ("train", "valid", "test"):
        paths, weights = getattr(data, f"{split}_data_paths"), getattr(data, f"{split}_data_weights")
        if weights is None:
            continue
        if data.weight_by_num_documents:
            raise UserError(f"weight_by_num_documents and {split}_data_weights are both given; remove one")
        if paths is None or len(paths) != len(weights):
            counts = f"{len(weights)} weights for {len(paths or ())} {split}_data_paths"
            raise UserError(f"{split}_data_weights has {counts}; give one weight per path")


def _check_runs(config: "Config") -> None:
    checkpoint, launcher = config.checkpoint, config.launcher
    for name in ("finetune", "iteration"):
        if getattr(checkpoint, name) not in (None, False) and checkpoint.load is None:
            raise UserError(f"{name} is set, but load is not; give load, the folder of the checkpoint")
    if launcher.include is not None and launcher.exclude is not None:
        raise UserError("include and exclude are both given; use one of them")
    for name in ("include", "exclude"):
        if getattr(launcher, name) is not None and (launcher.num_gpus is not None or launcher.num_nodes > 0):
            raise UserError(f"{name} says which GPUs to use; num_gpus and num_nodes cannot be given with it")
