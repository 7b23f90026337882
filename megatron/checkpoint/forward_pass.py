"""`checkpoint_validation_with_forward_pass`: a batch and its logits, saved with the checkpoint and compared after
loading.
"""

from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.storage import CheckpointError, load_tensors

FILE = "forward_pass.pt"
LENGTH = 64
# Largest difference of two logits, as a share of the largest logit: other layouts sum in another order.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 8e-2}


def probe_tokens(engine) -> torch.Tensor:
    """The same tokens in every run: int64 [1, sequence]."""
    length = min(LENGTH, engine.seq_length)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, engine.settings.padded_vocab_size, (1, length), generator=generator)


def capture(engine) -> dict[str, Any] | None:
    """What is saved, on the one rank that writes it; None on the others. Every rank takes part."""
    tokens = probe_tokens(engine)
    logits = engine.logits(tokens)
    layout = engine.layout
    if logits is None or layout.data_rank or layout.tensor_rank:
        return None
    return {"tokens": tokens, "logits": logits.float().cpu(), "precision": engine.config.precision.dtype}


def compare(engine, step: Path) -> str | None:
    """What to report about the loaded model's logits, on the ranks that have them; every rank takes part.

    Raises CheckpointError that names the difference when they are not those of the model that was saved.
    """
    path = step / FILE
    if not path.is_file():
        return f"{step}: has no {FILE}, so the loaded model's logits are not compared"
    saved = load_tensors(path)
    logits = engine.logits(saved["tokens"])
    if logits is None:
        return None
    wanted = saved["logits"]
    if logits.shape != wanted.shape:
        raise CheckpointError(f"{path}: logits of shape {tuple(wanted.shape)}; this model's are {tuple(logits.shape)}")
    difference = (logits.float().cpu() - wanted).abs().max().item()
    allowed = max(TOLERANCE[saved["precision"]], TOLERANCE[engine.config.precision.dtype]) * wanted.abs().max().item()
    if not difference <= allowed:
        raise CheckpointError(
            f"{path}: the loaded model's logits differ from the saved model's by {difference:.3g}, of which "
            f"{allowed:.3g} would be rounding; the configuration is of another model, or the weights are damaged"
        )
    return f"the loaded model's logits are the saved model's (largest difference {difference:.2g})"
