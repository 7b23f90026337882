"""Training samples of one corpus."""

from megatron.data.datasets import Datasets, datasets_from_blends
from megatron.data.splits import Blend


def datasets_from_split(prefix: str, split: str, *arguments) -> Datasets:
    """`datasets_from_blends` of one corpus that is split."""
    return datasets_from_blends([Blend((prefix,), split=split)] * 3, *arguments)
