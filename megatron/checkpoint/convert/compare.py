"""The proof that a conversion is right: the same logits for the same tokens, in float32.

Legend: b batch, s tokens, v padded vocabulary.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kerple.positional.functional import Angles
from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config
from megatron.model.gpt import GPT

TOLERANCE = 1e-4
# Lengths compared are at most so long, and so far beyond the training length.
LONGEST, BEYOND = 512, 512

Model = Callable[[Tensor], Tensor]


def lengths_to_compare(config: Config) -> tuple[int, ...]:
    """The training length, and a length beyond it (up to four times) where the method goes beyond."""
    trained, table = config.model.seq_length, config.model.max_position_embeddings
    if config.model.pos_emb == "learned":
        return (min(table, LONGEST),)
    return min(trained, LONGEST), min(4 * trained, trained + BEYOND)


def with_float32_angles(model: GPT) -> GPT:
    """A copy of a rotary model whose angles are float32, as transformers computes them."""
    copied = copy.deepcopy(model)
    for method in copied.positional_methods().values():
        angles = method.angles
        method.angles = Angles(angles.size, angles.base, torch.float32, angles.own, angles.scale)
    return copied


@torch.no_grad()
def largest_difference(first: Model, second: Model, vocabulary: int, lengths: Sequence[int]) -> float:
    """The largest difference of two models' logits on random tokens, in units of max(1, their standard deviation): a
    model with large logits computes them with proportionally large rounding.
    """
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for length in lengths:
        tokens = torch.randint(0, vocabulary, (1, length), generator=generator)
        logits, others = first(tokens).float(), second(tokens).float()
        if not torch.isfinite(logits).all() or logits.shape != others.shape:
            return float("inf")
        difference = (logits - others).abs().max() / max(1.0, float(logits.std()))
        largest = max(largest, float(difference.nan_to_num(float("inf"))))
    return largest


def check_same_logits(
    source: Model,
    written: Model,
    vocabulary: int,
    config: Config,
    what: str,
    report: Callable[[str], None],
) -> None:
    """Raises CheckpointError if the logits of two models differ by more than 1e-4."""
    lengths = lengths_to_compare(config)
    difference = largest_difference(source, written, vocabulary, lengths)
    listed = " and ".join(map(str, lengths))
    if not difference <= TOLERANCE:
        raise CheckpointError(
            f"{what}: nothing was written, because the converted model is not the same: its logits differ by "
            f"{difference:.2e} at length {listed}; more than {TOLERANCE:g} is not rounding"
        )
    report(f"{what}: logits compared at length {listed}, largest difference {difference:.1e}")


def check_same_rotary_logits(
    ours: GPT, theirs: Model, vocabulary: int, config: Config, what: str, report: Callable[[str], None]
) -> None:
    """`check_same_logits` of a rotary model and transformers', whose angles are float32: for the proof ours are too.
    `report` is then told what that rounding makes of the logits.
    """
    check_same_logits(with_float32_angles(ours), theirs, vocabulary, config, what, report)
    longest = lengths_to_compare(config)[-1]
    rounding = largest_difference(ours, theirs, vocabulary, (longest,))
    report(f"{what}: transformers' angles are float32, not float64, which makes {rounding:.1e} at length {longest}")
