"""Speed of saving and loading a checkpoint, compared with torch.save and torch.load of the same
tensors, in MB/s.

    python benchmarks/checkpoint.py [--threads 2] [--rounds 7] [--folder DIR] [--json FILE]

The tensors are weights and Adam's moments. torch.save is followed by an fsync, because this
project's save returns when everything is on disk; without fsync the benchmark would measure the
page cache. This project also writes and verifies a manifest, and loads into a model and an
optimizer; torch.load only creates the tensors. The exit status is 1 if this project is slower than
0.7 times torch.save or torch.load.
"""

import argparse
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.support.timing import add_options, apply_options, compare, show, write_json
from megatron.checkpoint.layers import layer_state, weight_layers
from megatron.checkpoint.loading import load_weights
from megatron.checkpoint.manifest import find_valid_step
from megatron.checkpoint.optimizer import load_optimizer, optimizer_state, read_optimizer
from megatron.checkpoint.saving import Checkpointer
from megatron.checkpoint.state_dict import TrainingState
from megatron.config import Config
from megatron.training import distributed
from megatron.training.engine import Engine, build_engine
from megatron.utils.command_line import run_main

MIN_RELATIVE_RATE = 0.7
VOCABULARY = 16_384


def configuration(folder: Path) -> Config:
    """30 million parameters; 350 MB with Adam's moments."""
    return Config.from_flat(
        {
            "num_layers": 4,
            "hidden_size": 512,
            "num_attention_heads": 8,
            "seq_length": 128,
            "pos_emb": "kerple_log",
            "no_weight_tying": True,
            "padded_vocab_size": VOCABULARY,
            "tokenizer_type": "CharLevelTokenizer",
            "train_micro_batch_size_per_gpu": 1,
            "train_iters": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
            "save": str(folder / "ours"),
            "keep_last_n_checkpoints": 1,
        }
    )


def trained_engine(config: Config) -> Engine:
    """An engine after one step, so that the optimizer has state."""
    layout = distributed.initialize(config)
    engine = build_engine(config, VOCABULARY, layout, lambda text: None)
    tokens = torch.randint(0, VOCABULARY, (1, 129))
    engine.train_step(iter([{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}]), 1e-4, 0)
    return engine


def checkpoint_tensors(engine: Engine) -> dict[str, object]:
    layers = weight_layers(engine.layers(), engine.config.model)
    weights = {index: layer_state(layer) for index, layer in layers.items()}
    return {"weights": weights, "optimizer": optimizer_state(engine)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add_options(parser)
    parser.set_defaults(rounds=7)
    parser.add_argument(
        "--folder", type=Path, help="folder to write to; default: the system's temporary folder"
    )
    options = parser.parse_args()
    clock = apply_options(options)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_", dir=options.folder))
    try:
        return measure(folder, options, clock)
    finally:
        distributed.shutdown()
        shutil.rmtree(folder)


def measure(folder: Path, options: argparse.Namespace, clock: Callable[[], float]) -> int:
    # A trained engine, so that the optimizer has state.
    config = configuration(folder)
    engine = trained_engine(config)
    checkpointer = Checkpointer(engine, config, lambda text: None)
    plain = folder / "plain.pt"
    states = (TrainingState(iteration=iteration) for iteration in itertools.count(1))

    # The baseline: the same tensors in one file.
    def save_plain() -> None:
        with open(plain, "wb") as handle:
            torch.save(checkpoint_tensors(engine), handle)
            handle.flush()
            os.fsync(handle.fileno())

    # Weights and optimizer, as at the start of training.
    def load() -> None:
        step = find_valid_step(folder / "ours")
        load_weights(engine, step)
        load_optimizer(engine, read_optimizer(step), step)

    # Compare rates. `--json` and the exit status are for scripts.
    common = {
        "rounds": options.rounds,
        "warmup": 1,
        "clock": clock,
        "limits": {"ours": 1 / MIN_RELATIVE_RATE},
    }
    saving = compare(
        {"torch.save": save_plain, "ours": lambda: checkpointer.save(next(states))}, **common
    )
    loading = compare(
        {"torch.load": lambda: torch.load(plain, weights_only=True), "ours": load}, **common
    )
    megabytes = plain.stat().st_size / 1e6
    tables = {f"save {megabytes:,.0f} MB": saving, f"load {megabytes:,.0f} MB": loading}
    for title, timings in tables.items():
        show(title, timings)
        print(
            "; ".join(f"{timing.name} {megabytes / timing.median:,.0f} MB/s" for timing in timings)
        )
    if options.json:
        write_json(options.json, tables)
    return int(not all(timing.passed for timings in tables.values() for timing in timings))


if __name__ == "__main__":
    sys.exit(run_main(main))
