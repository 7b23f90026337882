"""What a checkpoint holds: sizes, kernels, and the loss of a sample as a sign that it is what it says.

Legend: s tokens, v padded vocabulary.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megatron.checkpoint.directory import layer_files
from megatron.checkpoint.storage import CheckpointError, load_layer_file
from megatron.config import Config
from megatron.model.gpt import GPT

LIMIT = 20_480

SAMPLE = """The river rises in the hills to the north of the town, and for most of the year it is no more than a stream
that children cross on stones. In spring, when the snow melts, it fills the whole of its valley within a day.
People who have lived there for a long time know the signs: the water turns brown, the birds leave the lower
meadows, and the old bridge begins to hum. Then the shops along the bank are closed, the cars are taken up to
the church, and everybody waits.

def largest(numbers):
    \"\"\"Return the largest of the numbers, or None if there are none.\"\"\"
    best = None
    for number in numbers:
        if best is None or number > best:
            best = number
    return best
"""


def check_finite(step: Path) -> dict[str, Any]:
    """Read every layer file of a checkpoint; returns its tensor-parallel size, dtypes, files and bytes.

    Raises CheckpointError that names the first tensor with a value that is not finite.
    """
    files = layer_files(step)
    dtypes: set[str] = set()
    for paths in files.values():
        for path in paths:
            for name, tensor in load_layer_file(path).items():
                dtypes.add(str(tensor.dtype).removeprefix("torch."))
                bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
                if bad:
                    raise CheckpointError(f"{path}: {name} holds {bad} values that are not finite")
    everything = [path for path in step.rglob("*") if path.is_file()]
    return {
        "tensor_parallel": max(map(len, files.values())),
        "dtypes": sorted(dtypes),
        "files": len(everything),
        "bytes": sum(path.stat().st_size for path in everything),
    }


def describe(model: GPT, config: Config) -> dict[str, Any]:
    """Sizes of the model and its kernels per head; lists are over heads, of every method that a layer has of its own.

    effective_length: the smallest distance whose bias is below -2 (KERPLE, figure 6), LIMIT where there is none.
    """
    methods = model.positional_methods()
    settings = model.settings
    inside = sum(parameter.numel() for method in methods.values() for parameter in method.parameters())
    kernels = {}
    for index, method in methods.items():
        values = {name: values.tolist() for name, values in method.statistics().items()}
        if method.has_bias:
            values["effective_length"] = method.effective_length(LIMIT).tolist()
        if values:
            kernels["all layers" if method.shared else f"layer {index - 2}"] = values
    return {
        "pos_emb": config.model.pos_emb,
        "num_layers": settings.num_layers,
        "hidden_size": settings.hidden_size,
        "num_attention_heads": settings.num_heads,
        "seq_length": config.model.seq_length,
        "padded_vocab_size": settings.padded_vocab_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "positional_parameters": inside,
        "kernels": kernels,
    }


@torch.no_grad()
def sample_loss(model: GPT, tokens: Sequence[int], length: int) -> dict[str, float | int]:
    """Mean cross entropy in nats of a text's tokens, in segments of `length`; and ln v, the loss of a model that knows
    nothing. Raises CheckpointError if it is not finite.
    """
    ids = torch.tensor(tokens, dtype=torch.long)
    total, scored = 0.0, 0
    for start in range(0, len(ids) - 1, length):
        segment = ids[start : start + length + 1]
        logits = model(segment[None, :-1])[0].float()
        total += float(F.cross_entropy(logits, segment[1:], reduction="sum"))
        scored += len(segment) - 1
    if not scored:
        raise CheckpointError("the sample is too short: it must have two tokens at least")
    loss = total / scored
    if not math.isfinite(loss):
        raise CheckpointError("the model's loss on the sample is not finite; its weights are damaged")
    return {
        "tokens": scored,
        "length": length,
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "uniform_loss": math.log(model.settings.padded_vocab_size),
    }
