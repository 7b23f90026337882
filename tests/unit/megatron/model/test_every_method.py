"""Models with every positional method: they learn the text of this Python's library, and do not see the future."""

import math

import pytest
import torch

from kerple.positional import primary_names
from megatron.model.gpt import GPT
from megatron.model.initialization import initialize
from megatron.model.settings import ModelSettings
from tests.support.language_models import VOCABULARY, random_tokens, small_gpt
from tests.support.texts import PYTHON

LENGTH, BATCH = 48, 2
# Sinusoids are far larger than the first embeddings, so that symbols are learned late.
STEPS = {"sinusoidal": 200}
FEWER_STEPS = 120
TEXT = torch.tensor(list(PYTHON.encode("ascii", "replace")))


def model_of(pos_emb: str) -> GPT:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "padded_vocab_size": 128, "max_positions": LENGTH}
    settings = ModelSettings(**sizes, pos_emb=pos_emb)
    model = GPT(settings)
    initialize(model.layers(), settings, seed=1, init_method="normal", output_init_method="scaled_normal", std=0.02)
    return model.train()


@pytest.mark.parametrize("pos_emb", primary_names())
def test_training_lowers_the_loss(pos_emb):
    """From all 128 symbols alike to better than how often each occurs, in nats; and its own parameters have moved."""
    model = model_of(pos_emb)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".rpe." in name}
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS.get(pos_emb, FEWER_STEPS)):
        starts = torch.randint(len(TEXT) - LENGTH - 1, (BATCH,), generator=generator)
        pieces = torch.stack([TEXT[start : start + LENGTH + 1] for start in starts])
        loss = model.loss(pieces[:, :-1], pieces[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    share = TEXT.bincount().double() / len(TEXT)
    entropy = -(share * share.log().nan_to_num(neginf=0.0)).sum().item()
    assert losses[0] > math.log(128) - 0.2
    assert sum(losses[-20:]) / 20 < entropy - 0.15
    for name, tensor in own.items():
        assert not torch.equal(tensor, model.state_dict()[name]), name


@torch.no_grad()
@pytest.mark.parametrize("pos_emb", primary_names())
def test_a_changed_future_changes_no_earlier_logit(pos_emb):
    model, tokens = small_gpt(pos_emb), random_tokens(40)[None]
    changed = tokens.clone()
    changed[:, 25:] = (changed[:, 25:] + 7) % VOCABULARY
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :25], before[:, :25], rtol=0, atol=1e-5)
    assert (after - before)[:, 25:].abs().amax(dim=-1).min() > 1e-2
