"""Keys of the training loop: seed, intervals, validation and memory."""

import math
from collections.abc import Iterator
from typing import Annotated, Any

from megatron.config.schema.base import ConfigSection, Int, Ints, NullIsEmpty, field

EXTRAPOLATION_TOKENS = 65_536


class TrainingConfig(ConfigSection):
    """Training"""

    seed: Int = field(1234, "Seed of initial weights, data order and dropout.", ge=0, lt=2**32)
    eval_interval: Int = field(1000, "Optimizer steps between validations.", ge=1)
    eval_iters: Int = field(100, "Batches per validation. 0: no validation.", ge=0)
    seq_length_val: Int | None = field(None, "Sequence length of validation, in tokens. Default: seq_length.", ge=1)
    extrapolation_lengths: Ints | None = field(
        None,
        """Additional sequence lengths, in tokens, at which every validation measures the loss; one curve per length.
        Default: none. Not with a pipeline, tensor parallelism or ZeRO 3.""",
        min_length=1,
    )
    extrapolation_tokens: Int | None = field(
        None,
        f"""Number of validation tokens to score for extrapolation_lengths, evenly spaced in the validation text and
        the same ones at every length. Default:
        {EXTRAPOLATION_TOKENS:,}, or one sequence of the longest length if that is more.""",
        ge=1,
    )
    log_interval: Int = field(100, "Optimizer steps between two log lines.", ge=1)
    checkpoint_activations: bool = field(
        False, "True: activation checkpointing, which recomputes each block in the backward pass to save memory."
    )
    checkpoint_num_layers: Int = field(1, "Blocks per checkpointed chunk.", ge=1)
    torch_compile: bool = field(
        False,
        """True: compile the blocks with torch.compile, including attention if its backend is fused or sdpa and the
        positional method does not rotate queries and keys. Needs a C++ compiler (on a GPU also Triton) and takes up
        to a minute at startup. Not with a pipeline, tensor parallelism or ZeRO 3.""",
    )
    enable_cuda_graph: bool = field(
        False,
        """True: run the forward and backward pass as CUDA graphs, which launch with little overhead. Needs bf16 and
        a GPU. Not with a pipeline, tensor parallelism, ZeRO 2 or 3, torch_compile, checkpoint_activations,
        attention_dropout or random positions. Not measured on a GPU yet.""",
    )
    exit_interval: Int | None = field(None, "Save a checkpoint and exit when the step is a multiple of this.", ge=1)
    steps_per_print: Int = field(10, "Optimizer steps between DeepSpeed's own log lines.", ge=1)
    wall_clock_breakdown: bool = field(
        False, "True: print the mean times of forward, backward and optimizer once in steps_per_print steps."
    )
    dump_state: bool = field(False, "True: print DeepSpeed's messages at startup, with its configuration and state.")
    deepspeed_extra_args: Annotated[dict[str, Any], NullIsEmpty] = field(
        {},
        """Further keys of DeepSpeed's configuration, passed unchanged. Keys derived from other keys here, such as
        train_batch_size, are an error.""",
    )

    @property
    def extrapolation_budget(self) -> int:
        """Maximum number of tokens to score at each of `extrapolation_lengths`."""
        return self.extrapolation_tokens or max((EXTRAPOLATION_TOKENS, *(self.extrapolation_lengths or ())))

    def contradictions(self) -> Iterator[str]:
        for name in ("checkpoint_activations", "torch_compile"):
            if self.enable_cuda_graph and getattr(self, name):
                yield f"enable_cuda_graph with {name} true is not supported; remove one of the two keys"
        if self.extrapolation_lengths is None:
            if self.extrapolation_tokens is not None:
                yield "extrapolation_tokens is set, but extrapolation_lengths is not; set both or neither"
            return
        multiple, budget = math.lcm(*self.extrapolation_lengths), self.extrapolation_budget
        if multiple > budget:
            yield (
                f"extrapolation_lengths {', '.join(map(str, self.extrapolation_lengths))} must score the same tokens, "
                f"so their least common multiple, {multiple:,}, must not be more than extrapolation_tokens, "
                f"{budget:,}; choose lengths that divide the longest, or raise extrapolation_tokens"
            )
