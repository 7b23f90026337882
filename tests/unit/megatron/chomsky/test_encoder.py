"""The encoder compared with a computation pair by pair in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kerple.positional import ModelShape, build, primary_names
from megatron.chomsky.encoder import Encoder, bidirectional_products, bidirectional_scores, check_method
from megatron.cli.chomsky import METHODS
from megatron.utils.errors import UserError


def encoder(pos_emb):
    torch.manual_seed(0)
    return Encoder(5, 3, pos_emb, num_layers=1, hidden_size=16, num_heads=2).double()


@pytest.mark.parametrize("pos_emb", ["none", "kerple_log", "kerple_bias_wht", "alibi"])
def test_encoder_attends_to_both_sides(pos_emb):
    model = encoder(pos_emb)
    symbols = torch.randint(0, 5, (2, 7))
    layer, method = model.layers[0], model.positional[0]
    hidden = model.embedding(symbols)
    qkv = layer.query_key_value(layer.attention_norm(hidden)).view(2, 7, 3, 2, 8)
    context = torch.zeros(2, 7, 2, 8, dtype=torch.float64)
    for head in range(2):
        for m in range(7):
            scores = []
            for n in range(7):
                score = (qkv[:, m, 0, head] * qkv[:, n, 1, head]).sum(-1) / 8**0.5
                delta = torch.tensor([float(abs(m - n))])
                score = score * method.weight(delta)[head] if "weight" in method.hooks else score
                scores.append(score + method.bias(delta)[head] if "bias" in method.hooks else score)
            probabilities = torch.stack(scores, dim=1).softmax(dim=1)
            context[:, m, head] = torch.einsum("bn,bnd->bd", probabilities, qkv[:, :, 2, head])
    hidden = hidden + layer.projection(context.reshape(2, 7, 16))
    hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
    torch.testing.assert_close(model(symbols), model.output(model.norm(hidden)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pos_emb", ["dape_kerple", "dape_alibi", "fire", "dape"])
def test_adaptive_methods_treat_both_directions_alike(pos_emb):
    torch.manual_seed(1)
    method = build(pos_emb, ModelShape(2, 8, 16, 1, 64)).double()
    scores, positions = torch.randn(3, 2, 6, 6, dtype=torch.float64), torch.arange(6)
    modified = bidirectional_scores(scores, scores, method, positions)

    def static(distance, query_position):
        if pos_emb == "dape":
            return None
        if pos_emb == "fire":
            length = max(abs(method.m.item() * 512.0), query_position)
            x = np.log(0.1 * distance + 1) / (np.log(0.1 * length + 1) + 1e-6)
            hidden = F.linear(torch.tensor([x], dtype=torch.float64), *method.first.parameters()).relu()
            return F.linear(hidden, *method.second.parameters())
        return method.static.bias(torch.tensor(float(distance))).double()

    for m in range(6):
        for n in range(6):
            score, bias = scores[:, :, m, n], static(abs(m - n), max(m, n))
            if pos_emb == "fire":
                expected = score + bias
            else:
                inputs = score if bias is None else torch.cat((score, bias.expand(3, 2)), dim=1)
                hidden = F.leaky_relu(F.linear(inputs, *method.first.parameters()), 0.01)
                expected = score + F.linear(hidden, *method.second.parameters())
                expected = expected if bias is None else expected + bias
            torch.testing.assert_close(modified[:, :, m, n], expected, rtol=1e-6, atol=1e-6)


def test_dape_v2_convolves_the_scores_of_all_keys():
    """Without a mask: the scores and the bias of the absolute distance, along the keys of each query."""
    torch.manual_seed(1)
    method = build("dape_v2_kerple", ModelShape(2, 8, 16, 1, 64)).double()
    scores, positions = torch.randn(3, 2, 6, 6, dtype=torch.float64), torch.arange(6)
    distance = (positions[:, None] - positions).abs().double()
    bias = method.static.bias(distance).double().expand_as(scores)
    hidden = F.conv2d(torch.cat((scores, bias), dim=1), method.first.weight, method.first.bias, padding=(0, 1))
    adapted = F.conv2d(F.leaky_relu(hidden, 0.01), method.second.weight, method.second.bias, padding=(0, 1))
    expected = scores + bias + adapted
    torch.testing.assert_close(bidirectional_scores(scores, scores, method, positions), expected, rtol=0, atol=1e-6)


def test_transformer_xl_encodes_the_direction():
    torch.manual_seed(1)
    method = build("transformer_xl", ModelShape(2, 8, 16, 1, 64)).double()
    query, positions = torch.randn(3, 2, 6, 8, dtype=torch.float64), torch.arange(6)
    key = torch.randn_like(query)
    rotated, _ = method.rotate(query, key, positions, positions)
    scores = rotated @ key.transpose(-1, -2) / 8**0.5
    actual = bidirectional_scores(scores, rotated, method, positions)
    frequencies = 10_000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    for m in range(6):
        for n in range(6):
            angles = (m - n) * frequencies
            r = (method.relative.weight @ torch.cat((angles.sin(), angles.cos()))).view(2, 8)
            content = ((query[:, :, m] + method.content_bias[:, 0]) * key[:, :, n]).sum(-1)
            position = ((query[:, :, m] + method.position_bias[:, 0]) * r).sum(-1)
            torch.testing.assert_close(actual[:, :, m, n], (content + position) / 8**0.5, rtol=0, atol=1e-6)


def test_cope_sums_the_gates_between_query_and_key():
    torch.manual_seed(1)
    method = build("cope", ModelShape(2, 8, 16, 1, 64), npos_max=4).double()
    torch.nn.init.normal_(method.pos_emb)
    query, positions = torch.randn(3, 2, 6, 8, dtype=torch.float64), torch.arange(6)
    scores = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    actual = bidirectional_scores(scores, query, method, positions)
    gates = scores.sigmoid()
    for m in range(6):
        for n in range(6):
            position = gates[:, :, m, min(m, n) : max(m, n) + 1].sum(-1).clamp(max=3.0)
            low = method.pos_emb.T[position.floor().long()]
            high = method.pos_emb.T[position.ceil().long()]
            vector = torch.lerp(low, high, (position - position.floor())[..., None])
            expected = scores[:, :, m, n] + (query[:, :, m] * vector).sum(-1)
            torch.testing.assert_close(actual[:, :, m, n], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("segment", [2048, 4])
def test_xpos_decays_in_both_directions(segment, monkeypatch):
    torch.manual_seed(1)
    method = build("xpos", ModelShape(2, 8, 16, 1, 64), scale_base=4.0).double()
    monkeypatch.setattr(type(method), "segment", segment)
    rotary = build("xpos", ModelShape(2, 8, 16, 1, 64)).double()
    query, positions = torch.randn(3, 2, 9, 8, dtype=torch.float64), torch.arange(9)
    key = torch.randn_like(query)
    query, key = rotary.rotate(query, key, positions, positions)
    actual = bidirectional_products(query, key, method, positions)
    zeta = ((torch.arange(4, dtype=torch.float64) / 4 + 0.4) / 1.4).repeat_interleave(2)
    for m in range(9):
        for n in range(9):
            expected = (query[:, :, m] * key[:, :, n] * zeta ** (abs(m - n) / 4)).sum(-1) / 8**0.5
            torch.testing.assert_close(actual[:, :, m, n], expected, rtol=0, atol=1e-5)


def test_the_original_architecture():
    """The layers of the benchmark's code, written out."""
    torch.manual_seed(0)
    model = Encoder(5, 3, "none", num_layers=2, hidden_size=16, num_heads=2, architecture="original").double().eval()
    symbols = torch.randint(0, 5, (2, 7))
    hidden = model.embedding(symbols)
    for layer in model.layers:
        assert layer.query_key_value.bias is None
        assert layer.projection.bias is None
        query, key, value = layer.query_key_value(hidden).view(2, 7, 3, 2, 8).permute(2, 0, 3, 1, 4)
        context = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1) @ value
        hidden = layer.attention_norm(hidden + layer.projection(context.transpose(1, 2).reshape(2, 7, 16)))
        hidden = layer.mlp_norm(hidden + layer.mlp[2](layer.mlp[0](hidden).relu()))
    torch.testing.assert_close(model(symbols), model.output(hidden), rtol=0, atol=1e-9)
    assert not torch.equal(model.train()(symbols), model(symbols)), "dropout"
    large = Encoder(5, 3, "sinusoidal", num_layers=1, hidden_size=256, num_heads=2, architecture="original")
    assert large.dropout.p == 0.1
    # A normal distribution truncated at two standard deviations has 0.8796 of its standard deviation.
    assert large.embedding.weight.std().item() == pytest.approx(0.02 * 16 * 0.8796, rel=0.1)
    assert large.layers[0].mlp[0].weight.std().item() == pytest.approx(256**-0.5 * 0.8796, rel=0.02)
    assert not large.layers[0].mlp[0].bias.any()


@pytest.mark.parametrize("pos_emb", primary_names())
def test_every_method_trains(pos_emb):
    model = Encoder(5, 3, pos_emb, num_layers=2, hidden_size=16, num_heads=2)
    model(torch.randint(0, 5, (2, 9))).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values()), gradients


def test_unknown_methods():
    for name in METHODS:
        check_method(name)
    with pytest.raises(UserError, match="kerple_log"):
        check_method("kerple_lgo")
