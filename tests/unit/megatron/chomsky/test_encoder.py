"""The encoder compared with a computation pair by pair in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kerple.positional import ModelShape, build
from megatron.chomsky.encoder import Encoder, bidirectional_scores, check_method
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
                score = score * method.weight(delta)[head] if method.has_weight else score
                scores.append(score + method.bias(delta)[head] if method.has_bias else score)
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
            return method.second(method.first(torch.tensor([x], dtype=torch.float64)).relu())
        return method.static.bias(torch.tensor(float(distance))).double()

    for m in range(6):
        for n in range(6):
            score, bias = scores[:, :, m, n], static(abs(m - n), max(m, n))
            if pos_emb == "fire":
                expected = score + bias
            else:
                inputs = score if bias is None else torch.cat((score, bias.expand(3, 2)), dim=1)
                expected = score + method.second(F.leaky_relu(method.first(inputs), 0.01))
                expected = expected if bias is None else expected + bias
            torch.testing.assert_close(modified[:, :, m, n], expected, rtol=1e-6, atol=1e-6)


def test_supported_methods():
    for name in METHODS:
        check_method(name)
    for name, message in (
        ("dape_v2", "dape_v2 is only defined for keys before the query"),
        ("xpos", "xpos is only defined for keys before the query"),
        ("kerple_lgo", "did you mean kerple_log"),
    ):
        with pytest.raises(UserError, match=message):
            check_method(name)
