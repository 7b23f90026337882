"""Recognizing the weights that a method was trained with, by a few of their values."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

SAMPLED_ROWS = (0, 1, 64)  # the first ones of an embedding may be padding
# Values of two models that are the same may differ by this part of the largest one: dtypes do.
SAME_WEIGHTS = 0.02


def recognized(model: PreTrainedModel, left_out: str) -> dict[str, Tensor]:
    """The weights by which a model is recognized, by a name that its other forms have too: those of
    the body, without a head.

    left_out: part of the names of others.
    """
    found: dict[str, Tensor] = {}
    body: nn.Module = model.base_model
    for name, parameter in body.named_parameters():
        # The name without the layer that peft has put around it.
        if left_out not in name:
            found[name.replace(".base_layer", "")] = parameter
    return found


def samples(weights: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Some values of weights by name."""
    found = {}
    for name, parameter in weights.items():
        weight = parameter.detach()
        # Elsewhere, if offloaded or split over ranks; or quantized.
        if type(weight) is Tensor and not weight.is_meta and weight.is_floating_point():
            found[name] = _sample(weight, weight.shape)
    return found


def _sample(weight: Any, shape: Sequence[int]) -> list[float]:
    """Two values in each of a few rows of a weight of this shape: a tensor, or one in a file, of
    which only these rows are read.
    """
    values: list[float] = []
    for row in SAMPLED_ROWS:
        if shape and row < shape[0]:
            values += weight[row : row + 1].flatten()[:2].float().tolist()
    return [float(f"{value:.4g}") for value in values]


def stored_samples(
    files: Iterable[Path], model: PreTrainedModel, weights: Mapping[str, Tensor]
) -> dict[str, list[float]]:
    """The samples of weights of a model, by name, in the files of a saved model, also if that was
    the body of the model, or has it as its body.
    """
    stored = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            stored.update(dict.fromkeys(file.keys(), path))

    # A weight may have several names, of which one is stored.
    names: dict[int, list[str]] = {}
    body = f"{model.base_model_prefix}."
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).extend((name, body + name, name.removeprefix(body)))
    found = {}
    for own, weight in weights.items():
        for name in names.get(id(weight), []):
            if name in stored:
                with safe_open(stored[name], framework="pt") as file:
                    tensor = file.get_slice(name)
                    found[own] = _sample(tensor, tensor.get_shape())
    return found


def differ(saved: dict[str, list[float]], found: dict[str, list[float]]) -> bool:
    """Whether two models have other samples. New tokens at the end make no difference, nor weights
    that only one of them has.
    """
    for name in saved.keys() & found.keys():
        pairs = list(zip(saved[name], found[name], strict=False))
        largest = max((abs(value) for value, _ in pairs), default=0.0)
        if any(abs(first - second) > SAME_WEIGHTS * largest for first, second in pairs):
            return True
    return False
