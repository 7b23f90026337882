"""Keys of the training loop (seed, intervals, validation, memory, the sequence-length schedule), of
evaluation and of text generation.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

from megatron.config.schema.base import ConfigSection, Int, Ints, Paths, PathText, Texts, field
from megatron.utils.command_line import MAX_INT

EXTRAPOLATION_TOKENS = 65_536


class TrainingConfig(ConfigSection):
    """Training"""

    seed: Int = field(1234, "Seed of initial weights, data order and dropout.", ge=0, lt=2**32)

    # Validation during the run.
    eval_interval: Int = field(1000, "Optimizer steps between validations.", ge=1)
    eval_iters: Int = field(100, "Batches per validation. 0: no validation.", ge=0)
    seq_length_val: Int | None = field(
        None, "Sequence length of validation, in tokens. Default: seq_length.", ge=1
    )

    # Losses at other lengths during the run.
    extrapolation_lengths: Ints | None = field(
        None,
        """Additional sequence lengths, in tokens, at which every validation measures the loss; one
        curve per length. Default: none. Not with a pipeline, tensor parallelism or ZeRO 3.""",
        min_length=1,
    )
    extrapolation_tokens: Int | None = field(
        None,
        f"""Number of validation tokens to score for extrapolation_lengths, evenly spaced in the
            validation text and
        the same ones at every length. Default:
        {EXTRAPOLATION_TOKENS:,}, or one sequence of the longest length if that is more.""",
        ge=1,
    )

    # Log, memory and end of the run.
    log_interval: Int = field(100, "Optimizer steps between two log lines.", ge=1)
    checkpoint_activations: bool = field(
        False,
        "True: activation checkpointing, which recomputes each block in the backward pass to save "
        "memory.",
    )
    checkpoint_num_layers: Int = field(1, "Blocks per checkpointed chunk.", ge=1)
    exit_interval: Int | None = field(
        None, "Save a checkpoint and exit when the step is a multiple of this.", ge=1
    )

    @property
    def extrapolation_budget(self) -> int:
        """Maximum number of tokens to score at each of `extrapolation_lengths`."""
        return self.extrapolation_tokens or max(
            (EXTRAPOLATION_TOKENS, *(self.extrapolation_lengths or ()))
        )

    def contradictions(self) -> Iterator[str]:
        if self.extrapolation_lengths is None:
            if self.extrapolation_tokens is not None:
                yield (
                    "extrapolation_tokens is set, but extrapolation_lengths is not; set both or "
                    "neither"
                )
            return
        multiple, budget = math.lcm(*self.extrapolation_lengths), self.extrapolation_budget
        if multiple > budget:
            yield (
                f"extrapolation_lengths {', '.join(map(str, self.extrapolation_lengths))} must "
                f"score the same tokens, so their least common multiple, {multiple:,}, must not be "
                f"more than extrapolation_tokens, {budget:,}; choose lengths that divide the "
                "longest, or raise extrapolation_tokens"
            )


_CONFIG = "curriculum_learning.schedule_config"
# The keys of schedule_config that each schedule_type needs.
_NEEDED = {
    "fixed_discrete": ("difficulty", "max_step"),
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
}


class CurriculumConfig(ConfigSection):
    """Sequence-length schedule"""

    enabled: bool = field(
        False,
        """True: train on the first tokens of each sequence, as many as the schedule gives for the
        step. The remaining tokens of the sequence are skipped, so the position in the data does not
        depend on the schedule.""",
        path="curriculum_learning.enabled",
    )
    curriculum_type: Literal["seqlen"] = field(
        "seqlen",
        "The difficulty is the sequence length, in tokens.",
        path="curriculum_learning.curriculum_type",
    )

    # The lengths, and how they grow.
    min_difficulty: Int | None = field(
        None, "Length of the first step.", path="curriculum_learning.min_difficulty", ge=1
    )
    max_difficulty: Int | None = field(
        None,
        "Length at the end of the schedule, which must be seq_length.",
        path="curriculum_learning.max_difficulty",
        ge=1,
    )
    schedule_type: Literal["fixed_discrete", "fixed_linear", "fixed_root"] = field(
        "fixed_linear",
        "fixed_discrete: listed lengths; fixed_linear, fixed_root: the length grows with the step "
        "or with its root.",
        path="curriculum_learning.schedule_type",
    )
    difficulty: Ints | None = field(
        None,
        "fixed_discrete: lengths, in increasing order.",
        path=f"{_CONFIG}.difficulty",
        min_length=1,
    )
    max_step: Ints | None = field(
        None,
        "fixed_discrete: the last step of each length except the last one; the first step is 1.",
        path=f"{_CONFIG}.max_step",
        min_length=1,
    )
    total_curriculum_step: Int | None = field(
        None,
        "fixed_linear, fixed_root: steps until max_difficulty.",
        path=f"{_CONFIG}.total_curriculum_step",
        ge=1,
    )
    difficulty_step: Int | None = field(
        None,
        "fixed_linear, fixed_root: lengths are multiples of this.",
        path=f"{_CONFIG}.difficulty_step",
        ge=1,
    )
    root_degree: Int | None = field(
        None, "fixed_root: degree of the root.", path=f"{_CONFIG}.root_degree", ge=1
    )

    def contradictions(self) -> Iterator[str]:
        if not self.enabled:
            return
        needed = {name: f"{_CONFIG}.{name}" for name in _NEEDED[self.schedule_type]}
        for name in ("min_difficulty", "max_difficulty"):
            needed[name] = f"curriculum_learning.{name}"
        missing = [path for name, path in needed.items() if getattr(self, name) is None]
        for path in missing:
            yield f"{path} is not set, but schedule_type {self.schedule_type} needs it; set it"

        # Keys of another schedule would have no effect.
        others = set[str]().union(*_NEEDED.values()).difference(needed)
        for name in sorted(others):
            if getattr(self, name) is not None:
                yield (
                    f"{_CONFIG}.{name} is not a key of schedule_type {self.schedule_type}; remove "
                    "it"
                )
        if missing:
            return
        if self.schedule_type == "fixed_discrete":
            yield from self._discrete_contradictions()
        elif self.min_difficulty > self.max_difficulty:  # type: ignore[operator]  # neither is None
            yield (
                f"curriculum_learning.min_difficulty {self.min_difficulty} is more than "
                f"max_difficulty {self.max_difficulty}; lower it"
            )

    def warnings(self) -> Iterator[str]:
        step, shortest, longest = self.difficulty_step, self.min_difficulty, self.max_difficulty
        if not self.enabled or step is None or shortest is None or longest is None:
            return
        if shortest < longest <= math.ceil(shortest / step) * step:
            yield (
                f"{_CONFIG}.difficulty_step {step}: every length is max_difficulty {longest}, "
                f"because no multiple of {step} from min_difficulty {shortest} on is shorter; "
                "lower it"
            )

    def _discrete_contradictions(self) -> Iterator[str]:
        lengths, steps = self.difficulty or (), self.max_step or ()
        if len(steps) != len(lengths) - 1:
            yield (
                f"{_CONFIG}.max_step has {len(steps)} steps for {len(lengths)} lengths; give the "
                "last step of every length except the last one"
            )
        for name, values in (("difficulty", lengths), ("max_step", steps)):
            if any(first >= second for first, second in pairwise(values)):
                yield f"{_CONFIG}.{name} {list(values)} must be in increasing order"
        if (lengths[0], lengths[-1]) != (self.min_difficulty, self.max_difficulty):
            yield (
                f"{_CONFIG}.difficulty {list(lengths)} must start with min_difficulty "
                f"{self.min_difficulty} and end with max_difficulty {self.max_difficulty}"
            )


class EvaluationConfig(ConfigSection):
    """Evaluation"""

    # Tasks of lm-evaluation-harness.
    eval_tasks: Texts | None = field(
        None,
        "Tasks of lm-evaluation-harness that evaluate.py runs instead of measuring extrapolation.",
    )
    eval_num_fewshot: Int | None = field(
        None, "Few-shot examples per question. Default: the task's own number.", ge=0
    )
    eval_limit: float | None = field(
        None,
        "Maximum number of documents per task; below 1, a fraction of them. Default: all.",
        gt=0,
        le=MAX_INT,
    )
    eval_include_path: Paths | None = field(None, "Folders with further task files (YAML).")
    eval_max_length: Int | None = field(
        None,
        """Maximum number of tokens per model call in tasks: longer prompts are cut at the start,
        longer documents are split into windows. Default: 16 times the training length, or the size
        of a learned table.""",
        ge=1,
    )

    # Extrapolation.
    lengths: Ints | None = field(
        None,
        "Lengths, in tokens, at which perplexity is measured. Default: the training length times "
        "1, 2, 4, 8 and 16.",
        path="evaluation_lengths",
    )
    tokens: Int | None = field(
        None,
        "Number of tokens to score, the same ones at every length. Default: the full validation "
        "split.",
        path="eval_tokens",
        ge=1,
    )
    eval_results_prefix: PathText | None = field(
        None, "Folder of the report; same as evaluate.py --output.", placeholders=True
    )


class GenerationConfig(ConfigSection):
    """Generation"""

    text_gen_type: Literal["unconditional", "input-file", "interactive"] | None = field(
        None,
        "unconditional: no prompt; input-file: prompts from sample_input_file; interactive: "
        "prompts from the console. Default: input-file if sample_input_file is set, otherwise "
        "unconditional.",
    )

    # How tokens are sampled.
    temperature: float = field(
        0.0,
        "Sampling temperature. 0: greedy decoding, or with top_k or top_p, 1.",
        ge=0,
    )
    top_p: float = field(
        0.0,
        "Nucleus sampling: sample from the most likely tokens with this total probability. 0: off.",
        ge=0,
        le=1,
    )
    top_k: Int = field(0, "Sample from this many most likely tokens. 0: from all.", ge=0)
    maximum_tokens: Int = field(
        64, "Maximum number of tokens to generate per sample.", ge=1, le=10**9
    )
    num_samples: Int = field(1, "Number of samples, in total or per prompt.", ge=1, le=10**9)
    prompt_end: str = field(
        "\n", "Separator of prompts, in the interactive mode and in the prompt file."
    )

    # Where prompts come from, and where texts go.
    sample_input_file: PathText | None = field(
        None, "File of prompts, separated by prompt_end; same as generate.py -i."
    )
    sample_output_file: PathText | None = field(
        None,
        "Output file, in JSON lines; same as generate.py -o. Default: texts are printed.",
        placeholders=True,
    )
    recompute: bool = field(
        False, "True: generate without a KV cache, recomputing the full prefix for every token."
    )
