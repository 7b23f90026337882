"""Training from the checkpoints of the KERPLE release: a tokenizer for their vocabulary of 128, and
their corpus.
"""

from pathlib import Path

import numpy as np
import tokenizers

from megatron.preparation.indexed_writer import IndexedWriter
from tests.support.release import checkpoints, reference
from tests.support.runs import training_settings

VOCABULARY = 128


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer.json of 128 words."""
    words = {f"w{number}": number for number in range(VOCABULARY - 1)} | {
        "<|endoftext|>": VOCABULARY - 1
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def write_release_corpus(folder: Path) -> str:
    """The training text of the checkpoints, with one document per sequence; returns
    the data-path.
    """
    prefix = str(folder / "stream_document")
    with IndexedWriter(prefix, VOCABULARY) as writer:
        for sequence in reference("kerple_log")["train_tokens"].reshape(-1, 33).tolist():
            writer.add(np.array(sequence, dtype=writer.dtype), np.array([len(sequence)]))
        writer.finish()
    return prefix


def released_settings(
    folder: Path, corpus: Path, method: str = "kerple_log", **keys: object
) -> dict[str, object]:
    """Settings that resume a checkpoint of iteration 300 with its optimizer settings and a constant
    learning rate.
    """
    defaults = {
        "pos_emb": method,
        "tokenizer_type": "HFTokenizer",
        "vocab_file": str(corpus / "tokenizer.json"),
        "padded_vocab_size": VOCABULARY,
        "load": str(checkpoints(method)),
        "save": None,
        "train_iters": 305,
        "lr_decay_iters": 305,
        "lr_decay_style": "constant",
        "warmup": 0.0,
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.005}},
        "eval_iters": 0,
        "split": "1,0,0",
    }
    return training_settings(folder, str(corpus / "stream_document"), **{**defaults, **keys})
