"""Add methods to the attention of trained rotary models, train further, and record the losses.

    kerple sweep experiments/retrofit/demo.yml
    python experiments/retrofit/run.py demo [--seeds 11 ...] [--variants control kerple_log ...]

`bytes` instead of `demo` takes the rotary models of experiments/bytes/main.yml, and `demo_slower`
trains with three tenths of the learning rates.
Losses go to experiments/retrofit/records/MODEL/seedN/VARIANT.jsonl, a line for each number of steps
and length. What is recorded is not run again.
"""

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kerple.transformers import use_positional
from megatron.config import Config
from megatron.convert import to_hugging_face
from megatron.data.streams import TokenStream, evaluation_stream
from megatron.evaluation import evaluate_extrapolation
from megatron.inference import load_model
from megatron.utils.command_line import run_main
from megatron.utils.files import write_atomically

HERE = Path(__file__).parent
# The checkpoints of each model's seeds, and a factor of the learning rates.
DEMO = "runs/retrofit/demo/runs/seed{}/checkpoints"
MODELS = {
    "demo": (DEMO, 1.0),
    "bytes": ("runs/bytes/main/runs/{}/rotary/checkpoints", 1.0),
    "demo_slower": (DEMO, 0.3),
}
SEEDS = (11, 12, 13, 14, 15)
STEPS = (0, 30, 100, 300, 1000)
WARMUP, BATCH = 10, 16  # steps, and sequences
FACTORS = (1, 2, 4, 8, 16, 32, 64)  # of the training length
SCORED_TOKENS = 65_536

PRIMARY = ("control", "kerple_log", "kerple_log_frozen")
# Variant -> (method, own positions, whether only the method is trained, learning rate).
TRAINED: dict[str, tuple[str | None, str, bool, float]] = {
    "control": (None, "keep", False, 1e-3),
    "kerple_log": ("kerple_log", "keep", False, 1e-3),
    "kerple_log_frozen": ("kerple_log", "keep", True, 1e-2),
    "alibi": ("alibi", "keep", False, 1e-3),
    "rpe": ("rpe", "keep", False, 1e-3),
    "dape_kerple": ("dape_kerple", "keep", False, 1e-3),
    "kerple_log_only": ("kerple_log", "remove", False, 1e-3),
}
UNTRAINED = ("yarn", "dynamic_ntk", "sinks", "window")
OTHERS = tuple(name for name in TRAINED if name not in PRIMARY)


def main() -> None:
    """Run the variants that are not recorded, variant by variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--variants", nargs="+", default=[*PRIMARY, *UNTRAINED, *OTHERS])
    options = parser.parse_args()
    checkpoints, rate_factor = MODELS[options.model]
    for variant, seed in itertools.product(options.variants, options.seeds):
        output = HERE / "records" / options.model / f"seed{seed}" / f"{variant}.jsonl"
        checkpoint = Path(checkpoints.format(seed))
        if output.exists() or not (checkpoint / "latest").exists():
            continue

        # Record all losses of the run at once.
        started = time.monotonic()
        lines = run(checkpoint, variant, seed, rate_factor)
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, "".join(f"{line}\n" for line in lines).encode())
        seconds = time.monotonic() - started
        print(f"{output}: {len(lines)} losses, {seconds:.0f} s", flush=True)


def run(checkpoint: Path, variant: str, seed: int, rate_factor: float) -> list[str]:
    """The lines of a variant of the model in a checkpoint."""
    model, config = load_model(checkpoint)
    if variant in UNTRAINED:
        return extend(checkpoint, variant, config.model.seq_length)

    # Trained variants are models of transformers.
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "model"
        to_hugging_face(model, config, exported)
        theirs: Any = AutoModelForCausalLM.from_pretrained(exported)
    return train(theirs, config, variant, seed, rate_factor)


def extend(checkpoint: Path, variant: str, length: int) -> list[str]:
    """The losses of a variant that is not trained, for a model trained at this length."""
    modes = {
        "yarn": "full",
        "dynamic_ntk": "full+dynamic-ntk",
        "sinks": f"sinks@4+{length - 4}",
        "window": f"window@{length}",
    }
    lines = []
    for factor in FACTORS:
        # YaRN's frequencies depend on the factor.
        overrides: dict[str, Any] = {}
        if variant == "yarn" and factor > 1:
            overrides["pos_emb_options"] = {"scaling": "yarn", "factor": factor}
        model, config = load_model(checkpoint, overrides=overrides)
        lines += losses(model, config, [factor * length], 0, variant, modes[variant])
    return lines


def train(model: Any, config: Config, variant: str, seed: int, rate_factor: float) -> list[str]:
    """Train a model of transformers with a method; the losses after each number of steps."""
    method, own_positions, only_method, rate = TRAINED[variant]
    torch.manual_seed(seed)
    if method is not None:
        use_positional(model, method, own_positions=own_positions)
    if only_method:
        model.requires_grad_(False)
        model.kerple_positional.requires_grad_(True)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=rate * rate_factor)

    def warmup(step: int) -> float:
        return min(1.0, (step + 1) / WARMUP)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)

    # Random parts of the training data, the same ones for all variants of a seed.
    length = config.model.seq_length
    stream, _ = evaluation_stream(config, "train")
    generator = torch.Generator().manual_seed(seed)
    lengths = [factor * length for factor in FACTORS]
    lines = []
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            lines += losses(model.eval(), config, lengths, step, variant)
            model.train()
        rows = batch(stream, length, generator)
        loss = model(rows, labels=rows, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"{variant} seed {seed}: step {step:,}, loss {loss.item():.4f}", flush=True)
    return lines


def batch(stream: TokenStream, length: int, generator: torch.Generator) -> torch.Tensor:
    """Tokens `[BATCH, length + 1]`, of which the model predicts `length`."""
    starts = torch.randint(0, len(stream) - length - 1, (BATCH, 1), generator=generator)
    return stream[starts + torch.arange(length + 1)]


def losses(
    model: Any, config: Config, lengths: list[int], steps: int, variant: str, mode: str = "full"
) -> list[str]:
    """A JSON line for each length."""
    stream, _ = evaluation_stream(config, "valid")
    # The same tokens at every length: complete segments of the longest one.
    tokens = stream[torch.arange(SCORED_TOKENS + 1)]
    records = evaluate_extrapolation(
        model,
        tokens,
        lengths,
        modes=[mode],
        train_length=config.model.seq_length,
        progress=False,
    )
    lines = []
    for record in records:
        line = {
            "variant": variant,
            "steps": steps,
            "length": record["length"],
            "loss": record["loss"],
            "tokens": record["tokens"],
            "note": record["note"],
        }
        lines.append(json.dumps(line))
    return lines


if __name__ == "__main__":
    run_main(main)
