"""A lower bound of the memory that training needs, compared with what is free before the model is built.

Weights, gradients and optimizer states: Rajbhandari et al. 2020, "ZeRO" (https://arxiv.org/abs/1910.02054), section 3.1
and figure 1, with the dtypes that DeepSpeed uses here. Activations: Korthikanti et al. 2022
(https://arxiv.org/abs/2205.05198), equation 2, without dropout masks, and without the scores unless the attention
backend stores them. Only matrices count. Buffers for communication and results that are freed within a layer do not.

Legend: e hidden size, f features of the MLP, t tensor-parallel ranks.
"""

import math
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.layers import DTYPES
from megatron.config import Config, UserError
from megatron.model.loss import chunk_rows
from megatron.training.deepspeed_config import deepspeed_dict
from megatron.training.distributed import Layout
from megatron.utils.memory import free_memory
from megatron.utils.ranks import run_on_all_ranks, run_on_rank_0


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
    micro_batch, _, global_batch = config.batch.resolve(layout.data_size)
    place = f"{layout.device.type} of {socket.gethostname()}"
    ranks = f" ({_gigabytes(needed.total * sharing)} for the {sharing} ranks of this host)" if sharing > 1 else ""
    text = (
        f"training needs at least {_gigabytes(needed.total)} per rank{ranks}, but {_gigabytes(free)} of memory are "
        f"free on the {place}: weights {_gigabytes(needed.weights)}, gradients {_gigabytes(needed.gradients)}, "
        f"optimizer states {_gigabytes(needed.optimizer)}, activations {_gigabytes(needed.activations)} "
        f"({embeddings + blocks + positional:,} parameters: {embeddings:,} in embeddings, {blocks:,} in blocks, "
        f"{positional:,} in the positional method; {config.precision.dtype}, {config.optimizer.name}, ZeRO stage "
        f"{config.optimizer.zero_stage}, micro-batches of {micro_batch:,} x {config.model.seq_length:,} tokens)"
    )
    changes: dict[str, dict[str, Any]] = {
        "train_micro_batch_size_per_gpu: 1": {
            "train_batch_size": global_batch,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": global_batch // layout.data_size,
        },
        "checkpoint_activations: true": {"checkpoint_activations": True},
        "zero_optimization.stage: 3": {"zero_optimization.stage": 3},
    }
    if config.precision.dtype == "fp32":
        changes["precision: bfloat16"] = {"precision": "bfloat16"}
    helpful = []
    for name, keys in changes.items():
        try:
            total = estimate(config.updated(**keys), layout, vocab_size, positional).total
        except UserError:  # contradicts another key
            continue
        if total < 0.99 * needed.total:
            helpful.append(f"{name} ({_gigabytes(total)})")
    more = "hosts" if layout.device.type == "cpu" else "GPUs"
    text += f"; change {', '.join(helpful)}; or" if helpful else ";"
    return (
        f"{text} use a smaller model (hidden_size, num_layers, vocabulary), a smaller seq_length, or more {more} with "
        "model_parallel_size, pipe_parallel_size or ZeRO 3"
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
