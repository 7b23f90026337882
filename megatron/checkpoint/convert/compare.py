"""The proof that a conversion is right: the same logits for the same tokens, in float32.

Legend: b batch, s tokens, v padded vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config

TOLERANCE = 1e-4
# Lengths compared are at most so long, and so far beyond the training length.
LONGEST, BEYOND = 512, 512
# Up to this position an angle rounded to float32 is off by less than 8e-6.
EXACT_ANGLES = 128

Model = Callable[[Tensor], Tensor]


def lengths_to_compare(config: Config) -> tuple[int, ...]:
    """The training length, and a length beyond it (up to four times) where the method goes beyond."""
    trained, table = config.model.seq_length, config.model.max_position_embeddings
    if config.model.pos_emb == "learned":
        return (min(table, LONGEST),)
    return min(trained, LONGEST), min(4 * trained, trained + BEYOND)


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
    *,
    single_precision_angles: bool = False,
) -> None:
    """Raises CheckpointError if the logits of two models differ by more than 1e-4.

    single_precision_angles: one of them is transformers' rotary model, whose angles are float32. Their rounding grows
    with the position, so the proof is by positions where it is small, and `report` is told what it makes beyond them.
    """
    asked = lengths_to_compare(config)
    lengths = tuple(dict.fromkeys(min(length, EXACT_ANGLES) for length in asked)) if single_precision_angles else asked
    difference = largest_difference(source, written, vocabulary, lengths)
    listed = " and ".join(map(str, lengths))
    if not difference <= TOLERANCE:
        raise CheckpointError(
            f"{what}: nothing was written, because the converted model is not the same: its logits differ by "
            f"{difference:.2e} at length {listed}; more than {TOLERANCE:g} is not rounding"
        )
    report(f"{what}: logits compared at length {listed}, largest difference {difference:.1e}")
    if lengths != asked:
        rounding = largest_difference(source, written, vocabulary, asked[-1:])
        report(f"{what}: transformers rounds angles to float32, which makes {rounding:.1e} at length {asked[-1]}")
