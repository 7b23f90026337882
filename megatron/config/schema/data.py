"""Where the tokens come from."""

from typing import Literal

from megatron.config.schema.base import Group, Int, Texts, Weights, key


class DataConfig(Group):
    """Data"""

    data_path: str | None = key(None, "Prefix (path without .bin and .idx) of the one dataset that `split` divides.")
    train_data_paths: Texts | None = key(None, "Prefixes of training datasets, instead of data_path.")
    valid_data_paths: Texts | None = key(None, "Prefixes of validation datasets.")
    test_data_paths: Texts | None = key(None, "Prefixes of test datasets.")
    train_data_weights: Weights | None = key(None, "Shares of the training datasets in the blend. Default: equal.")
    valid_data_weights: Weights | None = key(None, "Shares of the validation datasets. Default: equal.")
    test_data_weights: Weights | None = key(None, "Shares of the test datasets. Default: equal.")
    weight_by_num_documents: bool = key(
        False,
        """True: a dataset's share of a blend is proportional to (its number of documents)^weighted_sampler_alpha, in
        place of weights. (GPT-NeoX describes this rule; its code multiplies once more by 1 - share.)""",
    )
    weighted_sampler_alpha: float = key(
        1.0, "With weight_by_num_documents: less than 1 draws more often from small datasets, 0 from all alike.", ge=0
    )
    split: str = key("969, 30, 1", "Proportions of training, validation and test documents in data_path.")
    data_impl: Literal["infer", "mmap"] = key(
        "infer", "Format of the dataset: mmap (.bin with .idx), the only one there is."
    )
    num_workers: Int = key(2, "Processes per rank that read batches ahead. 0: the training process reads.", ge=0)
    data_cache_path: str | None = key(None, "Folder for the shuffled sample indices. Default: beside the dataset.")
    eod_mask_loss: bool = key(False, "True: what follows an end-of-document token is not a target of the loss.")


class TokenizerConfig(Group):
    """Tokenizer"""

    tokenizer_type: Literal["GPT2BPETokenizer", "HFTokenizer", "CharLevelTokenizer"] = key(
        "GPT2BPETokenizer",
        """GPT2BPETokenizer: GPT-2's vocab_file (JSON) and merge_file; HFTokenizer: vocab_file is a tokenizer.json of
        Hugging Face's tokenizers; CharLevelTokenizer: one token per UTF-8 byte, without files.""",
    )
    vocab_file: str | None = key(None, "Vocabulary file of the tokenizer.")
    merge_file: str | None = key(None, "Merges file of GPT-2's BPE.")
