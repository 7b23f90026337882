"""One step of a model in the dtype of a run."""

import pytest
import torch

from kerple.positional import Bias, KerpleLog, Rotary, ScoreModifier, registry
from megatron.config import Config
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings
from megatron.model.trial import VOCABULARY, _small, check_parts, trial_step
from tests.support.checkpoints import settings_of
from tests.support.errors import assert_rejected
from tests.support.methods import methods_and_variants


def model_config(pos_emb, **keys):
    return Config.from_flat(settings_of(pos_emb, "nowhere", **keys)).model


@pytest.mark.parametrize("name", methods_and_variants())
def test_methods_run_in_half_precision(name):
    for dtype in (torch.bfloat16, torch.float16):
        assert trial_step(model_config(name), dtype) == []


def test_gradients_that_are_not_finite_are_named(monkeypatch):
    class Root(KerpleLog):
        shared = False

        def bias(self, distance):
            return super().bias(distance) - (self.bias_a.abs().view(-1, 1) * distance).sqrt()

    class Logarithm(KerpleLog):
        def bias(self, distance):
            return super().bias(distance) - distance.log()

    monkeypatch.setitem(registry._METHODS, "root", Root)
    assert trial_step(model_config("root"), torch.float32) == ["the gradient of bias_a"]
    # A loss that is not finite has other causes, unless the method's values are not.
    monkeypatch.setitem(registry._METHODS, "logarithm", Logarithm)
    assert trial_step(model_config("logarithm"), torch.float32) == ["a bias"]
    assert (
        trial_step(model_config("root", init_method="normal", init_method_std=1e30), torch.float32)
        == []
    )


def test_the_model_of_a_trial_fits_into_the_memory_of_any_machine():
    sizes = {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96}
    small = _small(model_config("rotary", **sizes, rotary_pct=0.25))
    with torch.device("meta"):
        model = GPT(ModelSettings(small, VOCABULARY))
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e8


@pytest.mark.parametrize("name", methods_and_variants())
def test_parts_of_the_methods(name):
    for length in (1, 7, 3000):
        check_parts(model_config(name, seq_length=length, max_position_embeddings=length))
    scaled = {"pos_emb_options": {"scaling": "dynamic", "factor": 2}, "seq_length": 8}
    check_parts(model_config("rotary", **scaled))


class Mean(Bias):
    def __init__(self, num_heads):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.zeros(num_heads, 1))

    def bias(self, distance):
        return self.slope * (distance - distance.mean())


class Ranks(KerpleLog):
    def bias(self, distance):
        return super().bias(torch.arange(float(len(distance))))


class Largest(Mean):
    def bias(self, distance):
        return -self.slope * distance

    def weight(self, distance):
        return 1 + self.slope * distance / distance.max().clamp(min=1)


class LastKey(ScoreModifier):
    def modify_scores(self, chunk):
        return chunk.scores * (chunk.key_positions / (chunk.key_positions.max() + 1))


class FirstQuery(ScoreModifier):
    """Right for the first chunk of a text."""

    def modify_scores(self, chunk):
        rows = torch.arange(chunk.scores.shape[2])[:, None]
        return chunk.scores - (rows - chunk.key_positions).abs()


class Relative(Rotary):
    def rotate(self, query, key, query_positions, key_positions):
        first = key_positions[0]
        return super().rotate(query, key, query_positions - first, key_positions - first)


@pytest.mark.parametrize(
    ("method", "hook"),
    [
        (Mean, "bias"),
        (Ranks, "bias"),
        (Largest, "weight"),
        (LastKey, "modify_scores"),
        (FirstQuery, "modify_scores"),
        (Relative, "rotate"),
    ],
)
def test_values_that_depend_on_the_part(method, hook, monkeypatch):
    monkeypatch.setitem(registry._METHODS, "test_own", method)
    generator_state = torch.get_rng_state()
    config = model_config("test_own", seq_length=12)
    assert_rejected(rf"pos_emb test_own: \w+\.{hook} ", check_parts, config)
    assert torch.equal(torch.get_rng_state(), generator_state)
