"""A small character-level corpus and small checkpoints, as files that the entry points read."""

import json
from pathlib import Path

import numpy as np
import torch

from megatron.checkpoint.directory import layer_file
from megatron.checkpoint.layers import layer_state
from megatron.model.gpt import GPT
from megatron.preparation.indexed_writer import IndexedWriter
from tests.support.language_models import small_gpt
from tests.support.texts import PYTHON

VOCABULARY = 512  # CharLevelTokenizer's, already a multiple of 128
TRAIN_LENGTH = 32


def write_corpus(folder: Path, *, documents: int = 60) -> str:
    """Real text, one document per 200 characters, each with an end-of-document token; returns the
    data-path.
    """
    prefix = str(folder / "text_document")
    with IndexedWriter(prefix, VOCABULARY) as writer:
        for start in range(0, 200 * documents, 200):
            ids = [*PYTHON[start : start + 200].encode(), 0]
            writer.add(np.array(ids, dtype=writer.dtype), np.array([len(ids)]))
        writer.finish()
    return prefix


def settings_of(pos_emb: str, data_path: str, **keys: object) -> dict[str, object]:
    """The configuration of a small model, in GPT-NeoX's keys."""
    return {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": TRAIN_LENGTH,
        "max_position_embeddings": TRAIN_LENGTH,
        "pos_emb": pos_emb,
        "no_weight_tying": True,
        "tokenizer_type": "CharLevelTokenizer",
        "data_path": data_path,
        "split": "2,1,0",
        "train_micro_batch_size_per_gpu": 4,
        "train_iters": 4,
        "lr_decay_iters": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
        "seed": 77,
        **keys,
    }


def write_checkpoint(
    folder: Path,
    pos_emb: str,
    data_path: str,
    *,
    iteration: int = 4,
    vocabulary: int = VOCABULARY,
    **keys: object,
) -> GPT:
    """Save a randomly initialized model in `folder` and return it."""
    settings = settings_of(pos_emb, data_path, padded_vocab_size=vocabulary, **keys)
    model = small_gpt(
        pos_emb, seed=iteration, max_positions=TRAIN_LENGTH, padded_vocab_size=vocabulary
    )
    step = folder / f"global_step{iteration}"
    (step / "configs").mkdir(parents=True)
    for index, layer in model.layers().items():
        torch.save(layer_state(layer), layer_file(step, index, 0))
    torch.save({"iteration": iteration}, step / "mp_rank_00_model_states.pt")
    write_yaml(step / "configs" / "config.yml", settings)
    (folder / "latest").write_text(step.name)
    return model


def write_yaml(path: Path, keys: dict[str, object]) -> Path:
    """Write the keys as JSON, which is valid YAML except for surrogate pairs in escapes."""
    path.write_text(json.dumps(keys, ensure_ascii=False))
    return path


class Exploit:
    """Unpickling it writes a file."""

    def __init__(self, target: Path):
        self.target = str(target)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (f"open({self.target!r}, 'w').write('executed')",)
