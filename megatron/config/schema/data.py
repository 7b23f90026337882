"""Keys of the data and the tokenizer."""

import math
from collections.abc import Iterator
from typing import Literal

from megatron.config.schema.base import ConfigSection, Int, Paths, PathText, Weights, field
from megatron.utils.errors import UserError

_NUM_SPLITS = 3


class DataConfig(ConfigSection):
    """Data"""

    # Where the documents are.
    data_path: PathText | None = field(
        None, "Prefix of the dataset (path without .bin and .idx), which `split` divides."
    )
    train_data_paths: Paths | None = field(
        None, "Prefixes of training datasets, instead of data_path."
    )
    valid_data_paths: Paths | None = field(None, "Prefixes of validation datasets.")
    test_data_paths: Paths | None = field(None, "Prefixes of test datasets.")

    # How often each dataset is drawn.
    train_data_weights: Weights | None = field(
        None, "Weights of the training datasets in the blend. Default: equal."
    )
    valid_data_weights: Weights | None = field(
        None, "Weights of the validation datasets. Default: equal."
    )
    test_data_weights: Weights | None = field(None, "Weights of the test datasets. Default: equal.")
    weight_by_num_documents: bool = field(
        False,
        """True: weight each dataset of a blend by (number of its documents)^weighted_sampler_alpha,
        instead of by the given weights. (This is GPT-NeoX's documented rule; its code also
        multiplies by 1 - weight.)""",
    )
    weighted_sampler_alpha: float = field(
        1.0,
        "Exponent of weight_by_num_documents: below 1 favors small datasets, 0 weights all "
        "equally.",
        ge=0,
        le=10,
    )

    # Which documents are for what, and how they are read.
    split: str = field(
        "969, 30, 1", "Proportions of training, validation and test documents in data_path."
    )
    data_impl: Literal["infer", "mmap"] = field(
        "infer",
        "Format of the dataset: mmap (.bin and .idx) is the only one, so infer means the same.",
    )
    num_workers: Int = field(
        2,
        "Processes per rank that prefetch batches. 0: read in the training process.",
        ge=0,
        le=256,
    )
    data_cache_path: PathText | None = field(
        None, "Folder for the shuffled sample indices. Default: next to the dataset."
    )

    # Documents in a row.
    eod_mask_loss: bool = field(
        False,
        """True: exclude the token after each end-of-document token from the loss, which is the mean
        over all other tokens of the global batch. (GPT-NeoX takes the mean of the micro-batches'
        means.)""",
    )
    reset_attention_mask: bool = field(
        False,
        """True: in training and validation, a token attends only to its own document, in which
        positions start at 0. Documents end with the end-of-document token. (In Megatron, positions
        also need reset_position_ids.)""",
    )

    def contradictions(self) -> Iterator[str]:
        # Which documents.
        if self.data_path is not None and self.train_data_paths is not None:
            yield (
                "data_path and train_data_paths are both set; use either data_path with split, or "
                "the three lists of paths"
            )
        try:
            split_shares(self.split)
        except UserError as error:
            yield str(error)
        if self.weight_by_num_documents and self.train_data_paths is None:
            yield (
                "weight_by_num_documents requires train_data_paths, which is not set; set it, or "
                "remove the key"
            )

        # One weight for each path.
        for split in ("train", "valid", "test"):
            paths = getattr(self, f"{split}_data_paths")
            weights = getattr(self, f"{split}_data_weights")
            if weights is None:
                continue
            if self.weight_by_num_documents:
                yield (
                    f"weight_by_num_documents and {split}_data_weights are both set; remove one of "
                    "them"
                )
            elif paths is None or len(paths) != len(weights):
                yield (
                    f"{split}_data_weights has {len(weights)} weights for {len(paths or ())} "
                    f"{split}_data_paths; give one weight per path"
                )

    def warnings(self) -> Iterator[str]:
        names = ("train_data_paths", "valid_data_paths", "test_data_paths")
        lists = [name for name in names if getattr(self, name)]
        for key in ("data_path", "split"):
            if getattr(self, key) != type(self).model_fields[key].default and lists:
                yield f"{key} has no effect, because {lists[0]} is set"


def split_shares(split: str) -> list[float]:
    """Shares of training, validation and test documents from the key `split`. Not normalized;
    missing ones are 0.

    Raises UserError unless `split` is one to three non-negative numbers with a positive sum.
    """
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        shares = []
    are_shares = all(0 <= share < math.inf for share in shares) and sum(shares) > 0
    if not are_shares or not 1 <= len(shares) <= _NUM_SPLITS:
        raise UserError(
            f"split {split!r} is not of the form TRAIN,VALID,TEST, for example 949,50,1"
        )
    return shares + [0.0] * (_NUM_SPLITS - len(shares))


class TokenizerConfig(ConfigSection):
    """Tokenizer"""

    tokenizer_type: Literal[
        "GPT2BPETokenizer", "HFTokenizer", "SPMTokenizer", "CharLevelTokenizer"
    ] = field(
        "GPT2BPETokenizer",
        """GPT2BPETokenizer: vocab_file (JSON) and merge_file of GPT-2; HFTokenizer: vocab_file is a
        tokenizer.json of Hugging Face tokenizers; SPMTokenizer: vocab_file is a SentencePiece
        model; CharLevelTokenizer: one token per UTF-8 byte, no files.""",
    )
    vocab_file: PathText | None = field(None, "Vocabulary file of the tokenizer.")
    merge_file: PathText | None = field(None, "Merges file of GPT-2's BPE.")
