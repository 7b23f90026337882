"""Writing the result of a conversion: a folder that appears only when it is complete and its logits
are verified.

Legend: b batch, s tokens, v padded vocabulary.
"""

import copy
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron.checkpoint.cleanup import update_latest
from megatron.checkpoint.configuration import code_digests
from megatron.checkpoint.directory import CONFIG_FILE, STATE_FILE, layer_file, tag_for
from megatron.checkpoint.layers import tensors_of
from megatron.checkpoint.manifest import write_manifest_of_folder
from megatron.checkpoint.storage import CheckpointError, write_json
from megatron.config import Config
from megatron.convert.weights import cast, check_finite, layers_with_weights
from megatron.model.gpt import GPT
from megatron.utils.files import check_writable, sync_folder
from megatron.utils.processes import Lock
from megatron.utils.ranks import Report

# Largest allowed difference of two logits, in units of max(1, standard deviation of the logits).
TOLERANCE = 1e-4
MAX_COMPARED_LENGTH = 512
MAX_LONGER_LENGTH = 2560

# int64 tokens `[b, s]` -> logits `[b, s, v]`
Logits = Callable[[Tensor], Tensor]


def check_new_folder(output: str | Path) -> None:
    """Raises UserError if `output` exists and is not an empty folder, or if its parent is not
    writable. Tools call it before they load a model.
    """
    output = Path(output).absolute()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise CheckpointError(f"{output}: already exists; name a new folder, or remove this one")
    check_writable(output.parent, str(output))


@contextmanager
def new_folder(output: str | Path) -> Iterator[Path]:
    """Yield an empty folder next to `output`. It is renamed to `output` if the block succeeds, and
    removed otherwise.

    Removes what a killed process left there. Raises UserError if `output` exists and is not an
    empty folder, cannot be written, or is being written by another process.
    """
    output = Path(output).absolute()
    check_new_folder(output)
    prefix = f".{output.name}.unfinished-"
    unfinished = output.with_name(prefix + secrets.token_hex(4))
    with Lock(
        output.with_name(f".{output.name}.lock"),
        f"{output}: another process writes it; wait until it ends",
    ):
        try:
            for path in output.parent.iterdir():
                if path.name.startswith(prefix):  # of a killed process
                    shutil.rmtree(path)
            unfinished.mkdir()
            yield unfinished
            for root, _, names in os.walk(unfinished):
                for name in names:
                    with open(Path(root) / name, "rb") as handle:
                        os.fsync(handle.fileno())
                sync_folder(root)
            if output.exists():
                output.rmdir()
            unfinished.rename(output)
            sync_folder(output.parent)
        except (OSError, SafetensorError) as error:
            filename, reason = getattr(error, "filename", None), getattr(error, "strerror", None)
            raise CheckpointError(
                f"{filename or output}: cannot be written or read ({reason or error})"
            ) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def write_checkpoint(
    folder: Path,
    model: GPT,
    dtype: torch.dtype,
    config_values: Mapping[str, Any],
    training: Mapping[str, Any],
) -> Path:
    """Write global_step0 with weights in `dtype`, configuration and manifest, but no optimizer, and
    `latest`; return its path. training: the values of `TrainingState` that are known; `code` is by
    default that of the files in use.
    """
    iteration = 0
    step = folder / tag_for(iteration)
    (step / CONFIG_FILE).parent.mkdir(parents=True)
    for index, layer in layers_with_weights(model).items():
        state = {name: cast(tensor, dtype) for name, tensor in tensors_of(layer).items()}
        check_finite(state, f"layer {index}")
        torch.save(state, layer_file(step, index, 0))
    code = code_digests(model.settings.config)
    torch.save({"code": code, **training, "iteration": iteration}, step / STATE_FILE)
    write_json(step / CONFIG_FILE, dict(config_values))
    write_manifest_of_folder(step, iteration)
    update_latest(folder, step.name)
    return step


def rounded(model: GPT, dtype: torch.dtype) -> GPT:
    """A float32 copy of the model with weights rounded to `dtype`, and with exact distances."""
    copied = copy.deepcopy(model).to(dtype).float().eval()
    for block in copied.blocks:
        block.attention.bf16_distances = False
    return copied


def check_same_logits(
    source: Logits, written: Logits, vocabulary: int, config: Config, name: str, report: Report
) -> None:
    """Raises CheckpointError if the logits of two models differ by more than 1e-4. `name` describes
    the output.
    """
    lengths = compared_lengths(config)
    difference = largest_difference(source, written, vocabulary, lengths)
    listed = " and ".join(map(str, lengths))
    if difference > TOLERANCE:
        raise CheckpointError(
            f"{name}: nothing was written, because the converted model's logits differ by "
            f"{difference:.2e} at length {listed}; more than {TOLERANCE:g} is not rounding"
        )
    report(f"{name}: logits compared at length {listed}, largest difference {difference:.1e}")


def compared_lengths(config: Config) -> tuple[int, ...]:
    """The training length or a part of it, and a greater one if the positional method allows it:
    beyond the training length if that is at most 2,048, and beyond a sliding window of at most
    4,096.
    """
    length, table = config.model.seq_length, config.model.max_position_embeddings
    if config.model.pos_emb == "learned":
        return (min(table, MAX_COMPARED_LENGTH),)
    longer = min(4 * length, length + MAX_COMPARED_LENGTH, MAX_LONGER_LENGTH)
    window = config.model.window
    if isinstance(window, int) and window <= 4096:
        longer = max(longer, window + MAX_COMPARED_LENGTH // 4)
    return min(length, MAX_COMPARED_LENGTH), longer


def with_float32_angles(model: GPT, frequencies: Tensor | None = None) -> GPT:
    """A copy of a rotary model that computes its angles in float32, as transformers does.

    frequencies: those of transformers, which replace the scaled frequencies if they are the same
    except for rounding: the last bit of a frequency changes the angle at position 2,560 by up to
    1e-4.
    """
    copied = copy.deepcopy(model)
    for method in copied.positional_methods().values():
        angles: Any = method.angles
        values = angles.frequencies
        if values is not None and frequencies is not None and len(values) == len(frequencies):
            own = torch.tensor(values, dtype=torch.float64)
            if torch.allclose(own, frequencies.double(), rtol=1e-5, atol=0):
                values = frequencies.tolist()
        method.angles = type(angles)(angles.size, angles.base, torch.float32, values, angles.scale)
    return copied


@torch.no_grad()
def largest_difference(
    first: Logits, second: Logits, vocabulary: int, lengths: Sequence[int]
) -> float:
    """The largest difference of two models' logits on random tokens, in units of max(1, their
    standard deviation): rounding is proportional to the size of the logits.
    """
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for length in lengths:
        tokens = torch.randint(0, vocabulary, (1, length), generator=generator)
        first_logits, second_logits = first(tokens).float(), second(tokens).float()
        if not torch.isfinite(first_logits).all() or first_logits.shape != second_logits.shape:
            return float("inf")
        difference = (first_logits - second_logits).abs().max() / max(
            1.0, float(first_logits.std())
        )
        largest = max(largest, float(difference.nan_to_num(float("inf"))))
    return largest
