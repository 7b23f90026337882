"""Speed of saving and loading a checkpoint, compared with torch.save and torch.load of the same
tensors, in MB/s.

    python benchmarks/checkpoint.py [--threads 2] [--rounds 7] [--folder DIR] [--json FILE]

The tensors are weights and Adam's moments. torch.save is followed by an fsync, because this
project's save returns when everything is on disk; without fsync the benchmark would measure the
page cache. This project also writes and verifies a manifest, and loads into a model and an
optimizer; torch.load only creates the tensors. The exit status is 1 if this project is slower than
0.7 times torch.save or torch.load.
"""

import itertools
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.support.models import random_batch
from benchmarks.support.timing import Alternatives, CpuBench, option_parser
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
    tokens, labels = random_batch(1, 128, VOCABULARY)
    batch = {"tokens": tokens, "labels": labels}
    engine.train_step(iter([batch]), 1e-4, 0)
    return engine


def checkpoint_tensors(engine: Engine) -> dict[str, object]:
    layers = weight_layers(engine.layers(), engine.config.model)
    weights = {index: layer_state(layer) for index, layer in layers.items()}
    return {"weights": weights, "optimizer": optimizer_state(engine)}


def save_plain(engine: Engine, path: Path) -> None:
    """The baseline: the same tensors in one file, on disk when it returns."""
    with open(path, "wb") as handle:
        torch.save(checkpoint_tensors(engine), handle)
        handle.flush()
        os.fsync(handle.fileno())


def load(engine: Engine, folder: Path) -> None:
    """Weights and optimizer, as at the start of training."""
    step = find_valid_step(folder)
    load_weights(engine, step)
    load_optimizer(engine, read_optimizer(step), step)


def main() -> int:
    parser = option_parser(__doc__)
    parser.set_defaults(rounds=7)
    parser.add_argument(
        "--folder", type=Path, help="folder to write to; default: the system's temporary folder"
    )
    bench = CpuBench(parser.parse_args())
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_", dir=bench.options.folder))
    try:
        measure(folder, bench)
    finally:
        distributed.shutdown()
        shutil.rmtree(folder)
    return bench.finish()


def measure(folder: Path, bench: CpuBench) -> None:
    # A trained engine, so that the optimizer has state.
    config = configuration(folder)
    engine = trained_engine(config)
    checkpointer = Checkpointer(engine, config, lambda text: None)
    iterations = itertools.count(1)

    def save() -> None:
        checkpointer.save(TrainingState(iteration=next(iterations)))

    # Saving comes first: loading reads its files.
    plain = folder / "plain.pt"
    save_plain(engine, plain)
    megabytes = plain.stat().st_size / 1e6
    limits = {"ours": 1 / MIN_RELATIVE_RATE}
    alternatives: dict[str, Alternatives] = {
        "save": {"torch.save": partial(save_plain, engine, plain), "ours": save},
        "load": {
            "torch.load": partial(torch.load, plain, weights_only=True),
            "ours": partial(load, engine, folder / "ours"),
        },
    }
    for kind, functions in alternatives.items():
        title = f"{kind} {megabytes:,.0f} MB"
        timings = bench.measure(title, functions, warmup=1, limits=limits)
        rates = [f"{timing.name} {megabytes / timing.median:,.0f} MB/s" for timing in timings]
        print("; ".join(rates))


if __name__ == "__main__":
    sys.exit(run_main(main))
