"""Attention with a method in models of transformers, compared with a float64 reference."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import Cache, DynamicCache
from transformers.cache_utils import QuantizedLayer

from kerple.positional import Bias, ModelShape, build, primary_names
from kerple.transformers import use_positional
from kerple.transformers.attention import attention_forward
from kerple.transformers.mask import attention_mask
from tests.support.model_families import (
    DECODERS,
    IN_FLOAT64,
    OLDEST,
    TOLERANCE,
    caches_of,
    each_of,
    family_inputs,
    family_model,
    method_of,
    outputs,
    with_reference,
)


@pytest.mark.parametrize("method", ["kerple_log", "alibi", "rpe"])
@each_of(IN_FLOAT64)
def test_biases_and_gradients(name, method):
    """In float64, for each kind of padding that keeps the distances of places."""
    model = family_model(name).double()
    plain = copy.deepcopy(model)
    use_positional(model, method)
    model.kerple_positional.double()
    own = copy.deepcopy(method_of(model))
    reference = with_reference(plain, own)
    for padding in ("none", "left", "right"):
        model.zero_grad()
        reference.zero_grad()
        own.zero_grad()
        inputs = family_inputs(model, padding)
        found, expected = (outputs(each, inputs) for each in (model, reference))
        assert (found - expected).abs().max() / expected.std() < TOLERANCE
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).double()
        for each in (found, expected):
            (each * weights).sum().backward()
        pairs = list(zip(method_of(model).parameters(), own.parameters(), strict=True))
        pairs += zip(model.parameters(), reference.parameters(), strict=False)
        for mine, theirs in pairs:
            if theirs.grad is not None:
                scale = theirs.grad.abs().max().clamp(min=1e-6)
                assert (mine.grad - theirs.grad).abs().max() / scale < TOLERANCE


@torch.no_grad()
def test_some_layers_with_methods_of_their_own():
    """The layer between them has none."""
    model = family_model("llama", num_hidden_layers=3).double()
    reference = with_reference(model, None)
    use_positional(model, "per_layer", methods=["kerple_log"], layers=[0, 2])
    model.kerple_positional.double()
    methods = [attention.positional.method for attention in model.kerple_positional.methods]
    for layer, method in zip((0, 2), methods, strict=True):
        reference.model.layers[layer].self_attn.__dict__["reference_method"] = method
    assert not torch.equal(methods[0].bias_p, methods[1].bias_p)
    found, expected = (outputs(each, family_inputs(model)) for each in (model, reference))
    assert (found - expected).abs().max() / expected.std() < TOLERANCE


@each_of(DECODERS)
@pytest.mark.parametrize("padding", ["none", "left"])
def test_generation_with_caches(name, padding):
    """Each cache gives the tokens and scores of recomputation, also beyond the window."""
    model = family_model(name)
    use_positional(model, "kerple_log")
    inputs = family_inputs(model, padding)
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "output_scores": True,
        "return_dict_in_generate": True,
        "eos_token_id": None,
    }
    expected = model.generate(**inputs, **options, use_cache=False)
    for cache in caches_of(name):
        found = model.generate(**inputs, **options, cache_implementation=cache)
        assert torch.equal(found.sequences, expected.sequences), cache
        for mine, theirs in zip(found.scores, expected.scores, strict=True):
            assert (mine - theirs).abs().max() < 1e-4
    beams = {**options, "num_beams": 3}
    expected = model.generate(**inputs, **beams, use_cache=False)
    assert torch.equal(model.generate(**inputs, **beams).sequences, expected.sequences)


class LosslessLayer(QuantizedLayer):
    """What a quantized cache does, without its error."""

    def _quantize(self, tensor, axis):
        return tensor.clone()

    def _dequantize(self, q_tensor):
        return q_tensor


# transformers 5.0 does not know the new name, cache.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("method", ["kerple_log", "rpe", "dape_kerple"])
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_quantized_cache(name, method):
    """The keys move to the quantized part while the text grows, also between the beams."""
    model = family_model(name)
    use_positional(model, method)
    inputs = family_inputs(model, "left")
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    # transformers 5.0 reorders the beams of a quantized part that is still empty, and fails.
    for beams in (1,) if OLDEST else (1, 3):
        expected = model.generate(**inputs, **options, num_beams=beams, use_cache=False)
        layers = [LosslessLayer(residual_length=4) for _ in range(model.config.num_hidden_layers)]
        cache = Cache(layers=layers)
        found = model.generate(**inputs, **options, num_beams=beams, past_key_values=cache)
        assert torch.equal(found, expected)
        assert cache.get_seq_length() == found.shape[1] - 1


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_assisted_generation(name):
    """The assistant's tokens are rejected in part, so that the cache is cut."""
    model, assistant = family_model(name), family_model(name, initializer_range=0.3)
    use_positional(model, "kerple_log")
    use_positional(assistant, "alibi")
    tokens = family_inputs(model)["input_ids"][:1]
    # No token has this number, so generation never ends early. (transformers 5.0 refuses None.)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1}
    expected = model.generate(tokens, **options)
    for helper in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(model.generate(tokens, **options, **helper), expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_generation_after_an_encoder(name, cache):
    model = family_model(name)
    use_positional(model, "kerple_log")
    inputs = {"input_ids": family_inputs(model)["input_ids"]}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, 9:] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs, **options, use_cache=False)
    options["cache_implementation"] = cache
    assert torch.equal(model.generate(**inputs, **options), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
@torch.no_grad()
def test_attention_probabilities(name):
    """Of all layers, also if the model does not pass the request on to them."""
    model = family_model(name)
    use_positional(model, "kerple_log")
    inputs = family_inputs(model, "left")
    is_text = inputs["attention_mask"].bool()
    expected = model(**inputs)[0]
    for _ in range(2):
        found = model(**inputs, output_attentions=True)
        assert (found.logits - expected)[is_text].abs().max() < 1e-4
        assert len(found.attentions) == 2
        for layer in found.attentions:
            sums = layer.sum(dim=-1).transpose(1, 2)[is_text]
            assert torch.allclose(sums, torch.ones_like(sums))
        assert torch.equal(model(**inputs)[0], expected)


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        ("llama", "kerple_power_ap_ap", {}),
        ("bert", "rpe", {"bidirectional": True}),
    ],
)
@torch.no_grad()
def test_weights_and_directions_in_the_matrix_of_scores(name, method, options):
    """They are those of the backends."""
    model = family_model(name)
    use_positional(model, method, **options)
    for parameter in model.kerple_positional.parameters():
        parameter.mul_(3)
    inputs = family_inputs(model)
    expected = model(**inputs)[0]
    found = model(**inputs, output_attentions=True)[0]
    assert (found - expected).abs().max() / expected.std() < 1e-4


@torch.no_grad()
def test_a_query_that_sees_no_key_in_a_mask_of_infinities():
    model = family_model("llama")
    use_positional(model, "kerple_log")
    mask = torch.zeros(3, 1, 12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
    mask[0, :, 0] = -torch.inf
    assert model(family_inputs(model)["input_ids"], attention_mask=mask)[0].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"output_attentions": True}])
@torch.no_grad()
def test_dropout_of_probabilities(options):
    """In training only, also where the matrix of scores is computed."""
    model = family_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.0, embd_pdrop=0.0)
    use_positional(model, "kerple_log")
    inputs = {**family_inputs(model), **options}
    for training in (False, True):
        model.train(training)
        first, second = (model(**inputs)[0] for _ in range(2))
        assert torch.equal(first, second) != training


class Matrix(Bias):
    """A bias whose formula needs distances in the dtype of its parameters."""

    def __init__(self, num_heads):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.rand(num_heads, 1))

    def bias(self, distance):
        return -(distance[..., None] @ self.slopes.T).movedim(-1, 0)


@torch.no_grad()
def test_distances_of_a_dense_mask_are_floats():
    model = family_model("llama")
    use_positional(model, Matrix(model.config.num_attention_heads))
    inputs = family_inputs(model)
    expected = model(**inputs)[0]
    found = model(**inputs, output_attentions=True)[0]
    assert (found - expected).abs().max() < 1e-4


@torch.no_grad()
def test_a_request_for_probabilities_ends_with_the_call():
    """The encoder alone is called next."""
    model = family_model("bart")
    use_positional(model, "dape_kerple")
    tokens = family_inputs(model)["input_ids"]
    expected = model.get_encoder()(tokens)[0]
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model(tokens, output_attentions=True)
    assert torch.equal(model.get_encoder()(tokens)[0], expected)


@pytest.mark.parametrize("method", ["kerple_log", "dape_kerple"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradient_checkpointing(name, method, reentrant):
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = family_model(name, **dropout)
    use_positional(model, method)
    inputs = family_inputs(model, "left")
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.train()
        outputs(model, inputs).square().mean().backward()
        gradients.append(
            [parameter.grad.clone() for parameter in model.kerple_positional.parameters()]
        )
    for first, second in zip(*gradients, strict=True):
        assert torch.allclose(first, second, rtol=1e-4, atol=1e-7)


def test_steps_change_the_tables():
    """A step of an optimizer, gradient accumulation, and evaluation between steps."""
    model = family_model("llama")
    use_positional(model, "kerple_log")
    optimizer = torch.optim.SGD(model.kerple_positional.parameters(), lr=0.5)
    inputs = family_inputs(model)
    losses = []
    for _ in range(3):
        for _ in range(2):
            outputs(model, inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(float(outputs(model, inputs).square().mean()))
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 1e-4


REFUSED = {"decay", "embed"}


@pytest.mark.parametrize("own_positions", ["keep", "remove"])
@pytest.mark.parametrize("method", primary_names())
@torch.no_grad()
def test_every_method(method, own_positions):
    """Padding, packing and a cache change nothing."""
    model = family_model("llama")
    shape = ModelShape(num_heads=4, head_size=8, hidden_size=32, num_layers=2, max_positions=64)
    if build(method, shape).hooks & REFUSED:
        with pytest.raises(NotImplementedError):
            use_positional(model, method, own_positions=own_positions)
        return
    use_positional(model, method, own_positions=own_positions)
    text, other = torch.randint(3, 99, (2, 1, 11), generator=torch.Generator().manual_seed(5))
    expected = model(text)[0]

    padded = F.pad(text, (4, 0))
    mask = F.pad(torch.ones_like(text), (4, 0))
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    found = [model(padded, attention_mask=mask, position_ids=positions)[0][:, 4:]]
    packed, places = torch.cat([other, text], dim=1), torch.arange(11).repeat(2)[None]
    found.append(model(packed, position_ids=places, use_cache=False)[0][:, 11:])
    cache, parts = DynamicCache(), []
    for start, end in ((0, 6), (6, 7), (7, 11)):
        parts.append(model(text[:, start:end], past_key_values=cache)[0])
    found.append(torch.cat(parts, dim=1))
    for each in found:
        assert (each - expected).abs().max() / expected.std() < 1e-4


def test_a_mask_for_more_keys_than_there_are():
    query, key, value = torch.randn(3, 1, 2, 3, 4)
    layer = torch.nn.Module()
    layer.__dict__["_kerple_attention"] = None
    attend = partial(attention_forward, layer, query, key, value)
    with pytest.raises(ValueError, match=r"3 keys.* for 5"):
        attend(attention_mask(1, 3, 5, q_offset=2))
    context, _ = attend(attention_mask(1, 3, 3))
    assert context.shape == (1, 3, 2, 4)


def test_layers_that_are_switched_to_later_tokens():
    """By the attribute of the layers, which transformers reads only without a mask."""
    model = family_model("llama")
    use_positional(model, "none")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match=r"config\.is_causal"):
        model(**family_inputs(model))


def test_unknown_arguments_of_attention_are_rejected():
    """They may change the scores."""
    model = family_model("llama")
    use_positional(model, "kerple_log")
    inputs = family_inputs(model)
    with pytest.raises(ValueError, match="score_bonus"):
        model(**inputs, score_bonus=torch.ones(1))
    assert torch.equal(model(**inputs, score_bonus=None)[0], model(**inputs)[0])
