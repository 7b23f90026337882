"""Tools that replace or adapt layers by type have an effect on exported models, or leave a layer alone."""

import warnings

import peft
import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig

from kerple.positional import outermost, primary_names
from tests.support.conversion import make_model, random_tokens
from tests.support.exported import export, load

# The errors of kerple_log, which has no layers of its own, are 0.022, 0.35 and 0.059. Noise is above 1.
BOUNDS = {"8-bit": 0.05, "4-bit": 0.6, "dynamic": 0.1}


def quantized(path, kind: str) -> nn.Module:
    if kind == "dynamic":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.ao.quantization.quantize_dynamic(load(path), {nn.Linear, nn.Conv2d}, dtype=torch.qint8)
    keys = {"8-bit": {"load_in_8bit": True}, "4-bit": {"load_in_4bit": True}}[kind]
    return load(path, quantization_config=BitsAndBytesConfig(**keys), device_map="cpu")


class OnlyCalled(nn.Module):
    """A layer without `weight`, as a tool may put it into the place of another."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.layer(states)


@torch.no_grad()
def test_methods_call_their_layers():
    replaced, tokens = set(), random_tokens(1, 16)
    for name in primary_names():
        model, _ = make_model(name)
        expected = model(tokens)
        for _, method in outermost(model):
            for module in list(method.modules()):
                for child_name, child in list(module.named_children()):
                    if type(child).__module__.startswith("torch.nn") or isinstance(child, nn.Linear):
                        setattr(module, child_name, OnlyCalled(child))
                        replaced.add(name)
        assert torch.equal(model(tokens), expected), name
    assert replaced == {"forgetting", "cable", "transformer_xl"}


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("pos_emb", ["fire", "dape_kerple", "dape_v2_fire", "forgetting", "transformer_xl"])
@torch.no_grad()
def test_quantized_models_predict_almost_the_same(pos_emb, kind):
    _, path = export(pos_emb)
    model, tokens = load(path), random_tokens(1, 48)
    smaller, expected = quantized(path, kind), model(tokens).logits
    error = (smaller(tokens).logits.float() - expected).norm() / expected.norm()
    assert 0.001 < error < BOUNDS[kind]
    exact = model.state_dict()
    kept = {name: value for name, value in smaller.state_dict().items() if ".first." in name or ".second." in name}
    assert len(kept) == {"fire": 8, "dape_kerple": 8, "dape_v2_fire": 16}.get(pos_emb, 0)
    assert all(torch.equal(value, exact[name]) for name, value in kept.items())


@pytest.mark.parametrize(("pos_emb", "adapted"), [("dape_v2_fire", 0), ("forgetting", 2), ("transformer_xl", 2)])
def test_lora_in_all_linear_layers(pos_emb, adapted):
    """Every adapter has a gradient: there is none in the MLPs of FIRE and DAPE."""
    _, path = export(pos_emb)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(load(path), config)
    model(random_tokens(1, 8)).logits.square().sum().backward()
    adapters = {name: parameter for name, parameter in model.named_parameters() if "lora_A" in name}
    assert len(adapters) == 8 + adapted
    assert all(parameter.grad.abs().max() > 0 for parameter in adapters.values())


def test_lora_in_the_mlp_of_a_method_is_rejected():
    _, path = export("fire")
    with pytest.raises(ValueError, match="MLPLayer"):
        peft.get_peft_model(load(path), peft.LoraConfig(target_modules=["first"]))
    model = peft.get_peft_model(load(path), peft.LoraConfig(target_parameters=["first.weight"]))
    with pytest.raises(AttributeError, match="weight_and_bias"):
        model(random_tokens(1, 8))


def test_the_mlp_of_a_method_can_be_trained_as_a_whole():
    _, path = export("fire")
    config = peft.LoraConfig(target_modules=["query_key_value"], modules_to_save=["first", "second"])
    model = peft.get_peft_model(load(path), config)
    model(random_tokens(1, 8)).logits.square().sum().backward()
    gradients = [p.grad for name, p in model.named_parameters() if "positional" in name and p.requires_grad]
    assert len(gradients) == 8
    assert all(gradient.abs().max() > 0 for gradient in gradients)
