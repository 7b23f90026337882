"""NoPE: attention without any positional information."""

import torch

from kerple.positional import ModelShape, build
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings

SHAPE = ModelShape(num_heads=2, head_size=8, hidden_size=16, num_layers=1, max_positions=8)


def test_none_has_no_hooks_and_no_parameters():
    method = build("none", SHAPE)
    assert not method.hooks
    assert list(method.parameters()) == []


def test_the_order_of_earlier_tokens_does_not_matter():
    """Without positions, the last token of a one-layer model sees the earlier tokens as a set."""
    settings = ModelSettings(
        num_layers=1, hidden_size=16, num_heads=2, padded_vocab_size=32, max_positions=8, pos_emb="none"
    )
    torch.manual_seed(0)
    model = GPT(settings).eval()
    first = torch.tensor([[3, 1, 4, 15, 9]])
    second = torch.tensor([[15, 4, 3, 1, 9]])
    with torch.no_grad():
        torch.testing.assert_close(model(first)[:, -1], model(second)[:, -1])
        assert not torch.allclose(model(first)[:, -2], model(second)[:, -2])
