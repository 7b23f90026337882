"""Keys of the sequence-length schedule, `curriculum_learning` of DeepSpeed and GPT-NeoX."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

from megatron.config.schema.base import ConfigSection, Int, Ints, field

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
        """True: train on the first tokens of each sequence, as many as the schedule gives for the step. The remaining
        tokens of the sequence are skipped, so the position in the data does not depend on the schedule.""",
        path="curriculum_learning.enabled",
    )
    curriculum_type: Literal["seqlen"] = field(
        "seqlen", "The difficulty is the sequence length, in tokens.", path="curriculum_learning.curriculum_type"
    )
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
        "fixed_discrete: listed lengths; fixed_linear, fixed_root: the length grows with the step or with its root.",
        path="curriculum_learning.schedule_type",
    )
    difficulty: Ints | None = field(
        None, "fixed_discrete: lengths, in increasing order.", path=f"{_CONFIG}.difficulty", min_length=1
    )
    max_step: Ints | None = field(
        None,
        "fixed_discrete: the last step of each length except the last one; the first step is 1.",
        path=f"{_CONFIG}.max_step",
        min_length=1,
    )
    total_curriculum_step: Int | None = field(
        None, "fixed_linear, fixed_root: steps until max_difficulty.", path=f"{_CONFIG}.total_curriculum_step", ge=1
    )
    difficulty_step: Int | None = field(
        None, "fixed_linear, fixed_root: lengths are multiples of this.", path=f"{_CONFIG}.difficulty_step", ge=1
    )
    root_degree: Int | None = field(None, "fixed_root: degree of the root.", path=f"{_CONFIG}.root_degree", ge=1)

    def contradictions(self) -> Iterator[str]:
        if not self.enabled:
            return
        needed = {name: f"{_CONFIG}.{name}" for name in _NEEDED[self.schedule_type]}
        needed |= {name: f"curriculum_learning.{name}" for name in ("min_difficulty", "max_difficulty")}
        missing = [path for name, path in needed.items() if getattr(self, name) is None]
        for path in missing:
            yield f"{path} is not set, but schedule_type {self.schedule_type} needs it; set it"
        others = {name for names in _NEEDED.values() for name in names}.difference(needed)
        for name in sorted(others):
            if getattr(self, name) is not None:
                yield f"{_CONFIG}.{name} is not a key of schedule_type {self.schedule_type}; remove it"
        if missing:
            return
        if self.schedule_type == "fixed_discrete":
            yield from self._discrete_contradictions()
        elif self.min_difficulty > self.max_difficulty:  # type: ignore[operator]  # neither is None
            yield (
                f"curriculum_learning.min_difficulty {self.min_difficulty} is more than max_difficulty "
                f"{self.max_difficulty}; lower it"
            )

    def _discrete_contradictions(self) -> Iterator[str]:
        lengths, steps = self.difficulty or (), self.max_step or ()
        if len(steps) != len(lengths) - 1:
            yield (
                f"{_CONFIG}.max_step has {len(steps)} steps for {len(lengths)} lengths; give the last step of every "
                "length except the last one"
            )
        for name, values in (("difficulty", lengths), ("max_step", steps)):
            if any(first >= second for first, second in pairwise(values)):
                yield f"{_CONFIG}.{name} {list(values)} must be in increasing order"
        if (lengths[0], lengths[-1]) != (self.min_difficulty, self.max_difficulty):
            yield (
                f"{_CONFIG}.difficulty {list(lengths)} must start with min_difficulty {self.min_difficulty} and end "
                f"with max_difficulty {self.max_difficulty}"
            )
