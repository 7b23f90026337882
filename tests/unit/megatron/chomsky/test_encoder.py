"""The encoder compared with a computation pair by pair in float64."""

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
    torch.testing.assert_close(
        model(symbols), model.output(model.norm(hidden)), rtol=1e-6, atol=1e-6
    )


def test_cope_sums_the_gates_between_query_and_key():
    torch.manual_seed(1)
    method = build("cope", ModelShape(2, 8, 16, 1, 64), npos_max=4).double()
    torch.nn.init.normal_(method.pos_emb)
    query, positions = torch.randn(3, 2, 6, 8, dtype=torch.float64), torch.arange(6)
    scores = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    mask = torch.zeros(6, 6, dtype=torch.bool)
    chunk = Chunk(scores, query, positions, positions, mask, causal=False)
    actual = BothSides(method, query).modify_scores(chunk)
    gates = scores.sigmoid()
    for m in range(6):
        for n in range(6):
            position = gates[:, :, m, min(m, n) : max(m, n) + 1].sum(-1).clamp(max=3.0)
            low = method.pos_emb.T[position.floor().long()]
            high = method.pos_emb.T[position.ceil().long()]
            vector = torch.lerp(low, high, (position - position.floor())[..., None])
            expected = scores[:, :, m, n] + (query[:, :, m] * vector).sum(-1)
            torch.testing.assert_close(actual[:, :, m, n], expected, rtol=0, atol=1e-9)


def test_the_original_architecture():
    """The layers of the benchmark's code, written out."""
    torch.manual_seed(0)
    model = (
        Encoder(5, 3, "none", num_layers=2, hidden_size=16, num_heads=2, architecture="original")
        .double()
        .eval()
    )
    symbols = torch.randint(0, 5, (2, 7))
    hidden = model.embedding(symbols)
    for layer in model.layers:
        assert layer.query_key_value.bias is None
        assert layer.projection.bias is None
        query, key, value = layer.query_key_value(hidden).view(2, 7, 3, 2, 8).permute(2, 0, 3, 1, 4)
        context = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1) @ value
        hidden = layer.attention_norm(
            hidden + layer.projection(context.transpose(1, 2).reshape(2, 7, 16))
        )
        hidden = layer.mlp_norm(hidden + layer.mlp[2](layer.mlp[0](hidden).relu()))
    torch.testing.assert_close(model(symbols), model.output(hidden), rtol=0, atol=1e-9)
    assert not torch.equal(model.train()(symbols), model(symbols)), "dropout"
    large = Encoder(
        5, 3, "sinusoidal", num_layers=1, hidden_size=256, num_heads=2, architecture="original"
    )
    assert large.dropout.p == 0.1
    # A normal distribution truncated at two standard deviations has 0.8796 of its standard
    # deviation.
    assert large.embedding.weight.std().item() == pytest.approx(0.02 * 16 * 0.8796, rel=0.1)
    assert large.layers[0].mlp[0].weight.std().item() == pytest.approx(256**-0.5 * 0.8796, rel=0.02)
    assert not large.layers[0].mlp[0].bias.any()


@pytest.mark.parametrize("pos_emb", methods_and_variants())
def test_every_method_trains(pos_emb):
    model = Encoder(5, 3, pos_emb, num_layers=2, hidden_size=16, num_heads=2)
    model(torch.randint(0, 5, (2, 9))).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(
        gradient is not None and gradient.isfinite().all() for gradient in gradients.values()
    ), gradients
