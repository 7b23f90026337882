"""The encoder compared with a computation pair by pair in float64."""

import itertools

import pytest
import torch

from kerple.positional import Chunk, ModelShape, build
from megatron.chomsky.encoder import BothSides, Encoder
from tests.support.methods import methods_and_variants


def encoder(pos_emb):
    torch.manual_seed(0)
    return Encoder(5, 3, pos_emb, num_layers=1, hidden_size=16, num_heads=2).double()


@pytest.mark.parametrize("pos_emb", ["none", "kerple_log", "kerple_bias_wht", "alibi"])
def test_encoder_attends_to_both_sides(pos_emb):
    model = encoder(pos_emb)
    symbols = torch.randint(0, 5, (2, 7))
    layer, method = model.layers[0], model.positional[0]
    hidden = model.embedding(symbols)
    qkv = layer.query_key_value(layer.attention_norm(hidden))
    query, key, value = qkv.view(2, 7, 3, 2, 8).unbind(2)  # [b, s, h, d]

    # Attention of each head and position.
    context = torch.zeros(2, 7, 2, 8, dtype=torch.float64)
    for head, m in itertools.product(range(2), range(7)):
        scores = []
        for n in range(7):
            score = (query[:, m, head] * key[:, n, head]).sum(-1) / 8**0.5
            distance = torch.tensor([float(abs(m - n))])
            if "weight" in method.hooks:
                score = score * method.weight(distance)[head]
            if "bias" in method.hooks:
                score = score + method.bias(distance)[head]
            scores.append(score)
        probabilities = torch.stack(scores, dim=1).softmax(dim=1)
        context[:, m, head] = torch.einsum("bn,bnd->bd", probabilities, value[:, :, head])

    # The rest of the layer.
    hidden = hidden + layer.projection(context.flatten(2))
    hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
    expected = model.output(model.norm(hidden))
    torch.testing.assert_close(model(symbols), expected, rtol=1e-6, atol=1e-6)


def test_cope_sums_the_gates_between_query_and_key():
    torch.manual_seed(1)
    method = build("cope", ModelShape(2, 8, 16, 1, 64), npos_max=4).double()
    torch.nn.init.normal_(method.pos_emb)
    query = torch.randn(3, 2, 6, 8, dtype=torch.float64)
    positions = torch.arange(6)
    scores = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    mask = torch.zeros(6, 6, dtype=torch.bool)
    chunk = Chunk(scores, query, positions, positions, mask, causal=False)
    actual = BothSides(method, query).modify_scores(chunk)
    gates = scores.sigmoid()
    vectors = method.pos_emb.T
    for m, n in itertools.product(range(6), range(6)):
        # The sum of the gates is a position between two of the vectors.
        first, last = sorted((m, n))
        position = gates[:, :, m, first : last + 1].sum(-1).clamp(max=3.0)
        low = vectors[position.floor().long()]
        high = vectors[position.ceil().long()]
        vector = torch.lerp(low, high, position.frac()[..., None])
        expected = scores[:, :, m, n] + (query[:, :, m] * vector).sum(-1)
        torch.testing.assert_close(actual[:, :, m, n], expected, rtol=0, atol=1e-9)


def test_the_original_architecture():
    """The layers of the benchmark's code, written out."""
    torch.manual_seed(0)
    options = {"num_heads": 2, "architecture": "original"}
    model = Encoder(5, 3, "none", num_layers=2, hidden_size=16, **options)
    model.double().eval()
    symbols = torch.randint(0, 5, (2, 7))
    hidden = model.embedding(symbols)
    for layer in model.layers:
        assert layer.query_key_value.bias is None
        assert layer.projection.bias is None
        qkv = layer.query_key_value(hidden).view(2, 7, 3, 2, 8)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # [b, h, s, d]
        scores = query @ key.transpose(-1, -2) / 8**0.5
        context = (scores.softmax(-1) @ value).transpose(1, 2)
        attended = layer.projection(context.flatten(2))
        hidden = layer.attention_norm(hidden + attended)
        first, _, second = layer.mlp
        hidden = layer.mlp_norm(hidden + second(first(hidden).relu()))
    torch.testing.assert_close(model(symbols), model.output(hidden), rtol=0, atol=1e-9)
    model.train()
    assert not torch.equal(model(symbols), model(symbols)), "dropout"

    # The initial weights. A normal distribution truncated at two standard deviations has 0.8796 of
    # its standard deviation.
    large = Encoder(5, 3, "sinusoidal", num_layers=1, hidden_size=256, **options)
    assert large.dropout.p == 0.1
    first = large.layers[0].mlp[0]
    assert not first.bias.any()
    assert first.weight.std().item() == pytest.approx(256**-0.5 * 0.8796, rel=0.02)
    assert large.embedding.weight.std().item() == pytest.approx(0.02 * 16 * 0.8796, rel=0.1)


@pytest.mark.parametrize("pos_emb", methods_and_variants())
def test_every_method_trains(pos_emb):
    model = Encoder(5, 3, pos_emb, num_layers=2, hidden_size=16, num_heads=2)
    outputs = model(torch.randint(0, 5, (2, 9)))
    outputs.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
