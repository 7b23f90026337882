"""Checks before anything is built: folders are writable, no other run saves to `save`, and the machine has a
suitable attention backend and enough memory.

The memory is a lower bound. Weights, gradients and optimizer states: Rajbhandari et al. 2020, "ZeRO"
(https://arxiv.org/abs/1910.02054), section 3.1 and figure 1, with the dtypes that DeepSpeed uses here. Activations:
Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), equation 2, without dropout masks, and without the scores
unless the attention backend stores them. Only matrices count. Buffers for communication and results that are freed
within a layer do not.

Legend: e hidden size, f features of the MLP, t tensor-parallel ranks.
"""

import contextlib
import math
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kerple import positional
from kerple.attention import Requirements, check_backend
from megatron.checkpoint.directory import clean_up
from megatron.checkpoint.layers import DTYPES
from megatron.config import Config, UserError
from megatron.model.loss import chunk_rows
from megatron.model.settings import Layout
from megatron.training.deepspeed_setup import deepspeed_dict
from megatron.utils.environment import free_memory
from megatron.utils.errors import first_line
from megatron.utils.files import check_writable
from megatron.utils.processes import Lock
from megatron.utils.ranks import run_on_all_ranks, run_on_rank_0


def check_log_folders(config: Config) -> None:
    """Check that the folders that rank 0 writes to, besides `save`, are writable. Every rank must call this.

    Sample indices are not included: they are written before the model is built, and a read-only folder that already
    contains them is enough.

    Raises UserError, on all ranks.
    """
    logging = config.logging
    folders = {
        "log-dir": logging.log_dir,
        "tensorboard-dir": logging.tensorboard_dir,
        "eval-results-prefix": config.evaluation.eval_results_prefix,
        "use_wandb (environment variable WANDB_DIR)": os.environ.get("WANDB_DIR", ".") if logging.use_wandb else None,
    }

    def check() -> None:
        for key, folder in folders.items():
            if folder:
                check_writable(folder, key)

    run_on_rank_0(check)


def lock_log_folders(config: Config, resources: contextlib.ExitStack) -> None:
    """Lock `log-dir` and `tensorboard-dir` until `resources` are released. Every rank must call this.

    Raises UserError, on all ranks, if another run logs to one of them: their metrics would be mixed.
    """
    logging = config.logging
    folders = {"log-dir": logging.log_dir, "tensorboard-dir": logging.tensorboard_dir}
    locked = set[Path]()
    for key, folder in folders.items():
        if folder and Path(folder).resolve() not in locked:
            locked.add(Path(folder).resolve())
            message = f"{key}: another run logs to {folder}; wait until it ends, or choose another folder"
            lock = Lock(Path(folder) / "log.lock", message)
            resources.callback(lock.release)
            run_on_rank_0(lock.acquire)


def lock_save_folder(save: str, resources: contextlib.ExitStack) -> Lock:
    """Check that all ranks can write to the folder, and lock it until `resources` are released. Every rank must call
    this.

    Raises UserError, on all ranks, if one of them cannot write to it, a host has another folder of this name, or
    another run holds the lock.
    """
    busy_message = f"save: another run saves to {save}; wait until it ends, or choose another folder"
    lock = Lock(Path(save) / "run.lock", busy_message)
    resources.callback(lock.release)
    # With its own test, because the lock is not flushed to disk.
    run_on_rank_0(lambda: check_writable(save, "save"))
    run_on_rank_0(lock.acquire)
    run_on_rank_0(lambda: _clean_up(Path(save)))
    run_on_all_ranks(lambda: check_writable(save, "save"))
    _check_that_all_hosts_share(Path(save))
    return lock


def _clean_up(folder: Path) -> None:
    """Remove what a killed run left in its folder. Raises UserError if that is not possible."""
    try:
        clean_up(folder)
    except OSError as error:
        raise UserError(
            f"save: cannot write {error.filename or folder}: {error.strerror or first_line(error)}"
        ) from error


def _check_that_all_hosts_share(folder: Path) -> None:
    """Raises UserError on every rank if a host does not see the files that rank 0 writes to the folder."""

    def create() -> Path:
        # Network file systems may cache for a minute that a file does not exist, so use a new name.
        probe = folder / f".shared-{os.uname().nodename}-{os.getpid()}"
        probe.touch()
        return probe

    def check() -> None:
        if not probe.exists():
            raise UserError(
                f"save: {folder.absolute()} on {os.uname().nodename} is not the folder that rank 0 writes to; "
                "checkpoints need a folder that all hosts share"
            )

    probe = run_on_rank_0(create)
    try:
        run_on_all_ranks(check)
    finally:
        run_on_rank_0(lambda: probe.unlink(missing_ok=True))


def _readable(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.2f} MB"


_BYTES_PER_SAMPLE = 12  # of the sample index: a position in the shuffled order, and a document and an offset


def check_machine(
    config: Config, layout: Layout, vocab_size: int, report: Callable[[str], None], *, force: bool
) -> None:
    """Raises UserError, on all ranks, if the attention backend cannot train on this device, or if training needs more
    memory than is free; with `force`, reports this instead. `vocab_size` is the padded one. Every rank must call this.
    """
    model = config.model
    with torch.device("meta"):
        methods = positional.build_layers(model.pos_emb, model.shape, **model.positional_options)
    requirements = Requirements(
        weight=any("weight" in method.hooks for method in methods),
        modify_scores=any("modify_scores" in method.hooks for method in methods),
        decay=any("decay" in method.hooks for method in methods),
        dropout=model.attention_dropout > 0,
        training=True,
        dtype=DTYPES[config.precision.dtype],
        head_size=model.head_size,
        device=layout.device,
    )
    try:
        check_backend(model.attention_backend, requirements)
    except NotImplementedError as error:
        raise UserError(f'"attention_backend": {error}') from error

    positions = sum(parameter.numel() for method in methods for parameter in method.parameters())
    check_memory(config, layout, vocab_size, positions, report, force=force)


def check_number_of_samples(num_samples: int) -> None:
    """Raises UserError if the index of all samples needs more memory than is free."""
    needed, free = num_samples * _BYTES_PER_SAMPLE, free_memory()
    if needed > free:
        raise UserError(
            f"the run needs {num_samples:,} samples, whose index takes {needed / 1e9:,.1f} GB of memory, but "
            f"{free / 1e9:,.1f} GB are free; reduce train_iters, eval_iters or train_batch_size"
        )


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank; with pipeline parallelism, the mean of the stages.

    Attributes:
        optimizer: states, and the fp32 master weights.
        together: gradients and activations are in memory at the same time.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    together: bool

    @property
    def total(self) -> float:
        varying = (self.gradients, self.activations)
        return self.weights + self.optimizer + (sum(varying) if self.together else max(varying))


def count_matrices(config: Config, vocab_size: int) -> tuple[int, int]:
    """Elements of the weight matrices of the whole model: of the embeddings, and of the blocks."""
    model = config.model
    attention = 2 * model.hidden_size * model.head_size * (model.num_attention_heads + model.num_kv_heads)
    mlp = (3 if model.gated else 2) * model.hidden_size * model.mlp_features
    embeddings = vocab_size * model.hidden_size * (2 if model.no_weight_tying else 1)
    return embeddings, model.num_layers * (attention + mlp)


def estimate(config: Config, layout: Layout, vocab_size: int, positional: int = 0) -> Memory:
    """What a rank needs at least. `vocab_size` is the padded one; `positional`: parameters of the positional method."""
    embeddings, blocks = count_matrices(config, vocab_size)
    ranks, replicas = layout.pipeline_size * layout.tensor_size, layout.data_size
    parameters = (embeddings + blocks + positional) / ranks
    itemsize = DTYPES[config.precision.dtype].itemsize
    activations = _activations(config, layout, vocab_size)
    stage = deepspeed_dict(config, replicas)["zero_optimization"]["stage"]
    weights = parameters * itemsize / (replicas if stage == 3 else 1)
    offload = config.optimizer.zero.get("offload_param", {}).get("device", "none")
    if offload == "nvme" or (offload == "cpu" and layout.device.type != "cpu"):
        weights = 0.0
    if config.schedule.train_iters == 0:  # only evaluates
        return Memory(weights, 0.0, 0.0, 0.0, together=False)

    # In bf16, stage 1 accumulates gradients in fp32 buffers that it keeps; otherwise they are freed after the step.
    keeps_gradients = config.precision.dtype == "bf16" and stage == 1
    gradients = parameters * (4 if keeps_gradients else itemsize) / (replicas if stage >= 2 else 1)
    states = parameters * config.optimizer.spec.state_per_element
    if config.optimizer.name == "muon":  # one for the matrices of the blocks, two for the rest
        states = (2 * (embeddings + positional) + blocks) / ranks
    elif config.optimizer.name == "sgd" and not config.optimizer.all_params["momentum"]:
        states = 0.0
    masters = parameters if stage else 0.0  # ZeRO has them in fp32, too
    optimizer = 4 * (states + masters) / (replicas if stage else 1)
    together = keeps_gradients or config.batch.resolve(replicas).accumulation > 1
    return Memory(weights, gradients, optimizer, activations, together)


def _activations(config: Config, layout: Layout, vocab_size: int) -> float:
    """Bytes that a rank keeps for the backward pass of its micro-batches; at least what validation needs."""
    model, training, tensor_size = config.model, config.training, layout.tensor_size
    micro_batch, accumulation, _ = config.batch.resolve(layout.data_size)
    dtype = DTYPES[config.precision.dtype]
    tokens, length = micro_batch * model.seq_length, model.seq_length
    hidden, features = model.hidden_size, model.mlp_features / tensor_size

    # Elements per token of a block: the residuals, query, key, value, the result of attention, the MLP's first product.
    heads = model.head_size * 2 * (model.num_attention_heads + model.num_kv_heads) / tensor_size
    gates = 2 if model.gated else 1
    block = hidden * (1 if model.gpt_j_residual else 2) + heads + gates * features
    if layout.device.type == "cpu" and not training.torch_compile:
        block += 2 * hidden + gates * features  # results of norms and activation, which other blocks may recompute
    if model.attention_backend == "reference":
        block += model.num_attention_heads / tensor_size * length  # the probabilities

    layers = model.num_layers / layout.pipeline_size
    kept = layers * block
    if training.checkpoint_activations:  # the inputs of all groups, and everything of the one that is recomputed
        group = min(training.checkpoint_num_layers, layers)
        kept = min(kept, layers / group * hidden + group * block)
    # A stage of a pipeline has as many micro-batches in memory as there are stages from it to the last.
    stages = range(1, layout.pipeline_size + 1)
    in_flight = sum(min(stage, accumulation) for stage in stages) / layout.pipeline_size
    vocabulary = math.ceil(vocab_size / tensor_size)
    logits = min(tokens, chunk_rows(layout.device, dtype, vocabulary)) * vocabulary / layout.pipeline_size
    validation = micro_batch * (training.seq_length_val or 0) * (hidden + features)
    return max(in_flight * tokens * kept + logits, validation) * dtype.itemsize


def check_memory(
    config: Config, layout: Layout, vocab_size: int, positional: int, report: Callable[[str], None], *, force: bool
) -> None:
    """Raises UserError, on all ranks, if training needs more memory than is free; with `force`, reports it instead.

    Every rank must call this, before any of them builds its model. Arguments: see `estimate`.
    """
    hosts = run_on_all_ranks(socket.gethostname)
    # The ranks of a host share its memory; each has its own GPU.
    sharing = hosts.count(socket.gethostname()) if layout.device.type == "cpu" else 1
    free = free_memory(layout.device)
    needed = estimate(config, layout, vocab_size, positional)

    def check() -> str:
        if needed.total * sharing <= free:
            return ""
        return _describe(config, layout, vocab_size, positional, needed, sharing, free)

    def fail() -> None:
        raise UserError(f"{problem}; --force trains anyway")

    if problem := next(filter(None, run_on_all_ranks(check)), ""):
        if not force:
            run_on_rank_0(fail)
        report(f"notice: {problem}; training goes on (--force)")


def _describe(
    config: Config, layout: Layout, vocab_size: int, positional: int, needed: Memory, sharing: int, free: int
) -> str:
    embeddings, blocks = count_matrices(config, vocab_size)
    micro_batch, _, _ = config.batch.resolve(layout.data_size)
    place = f"{layout.device.type} of {socket.gethostname()}"
    ranks = f" ({_readable(needed.total * sharing)} for the {sharing} ranks of this host)" if sharing > 1 else ""
    more = "hosts" if layout.device.type == "cpu" else "GPUs"
    return (
        f"training needs at least {_readable(needed.total)} per rank{ranks}, but {_readable(free)} of memory are "
        f"free on the {place}: weights {_readable(needed.weights)}, gradients {_readable(needed.gradients)}, "
        f"optimizer states {_readable(needed.optimizer)}, activations {_readable(needed.activations)} "
        f"({embeddings + blocks + positional:,} parameters: {embeddings:,} in embeddings, {blocks:,} in blocks, "
        f"{positional:,} in the positional method; {config.precision.dtype}, {config.optimizer.name}, ZeRO stage "
        f"{config.optimizer.zero_stage}, micro-batches of {micro_batch:,} x {config.model.seq_length:,} tokens); lower "
        "train_micro_batch_size_per_gpu or seq_length, set checkpoint_activations, zero_optimization.stage: 3 or "
        "precision: bfloat16, use a smaller model (hidden_size, num_layers, vocabulary), or more "
        f"{more} with model_parallel_size or pipe_parallel_size"
    )
