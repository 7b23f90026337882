"""`release-bf16-distances`: the numbers of the release, which computed distances and biases in bfloat16."""

import pytest
import torch

from kerple.attention import tables
from kerple.positional import ModelShape, build
from megatron.config import Config, UserError
from megatron.inference import load_model
from tests.support.checkpoints import settings_of
from tests.support.release import checkpoints, reference

SHAPE = ModelShape(num_heads=4, head_size=8, hidden_size=32, num_layers=2, max_positions=64)


def in_bfloat16(method, length):
    """-p log(1 + a δ) with every operation in torch's bfloat16, as the release had it."""
    distance = torch.arange(length, dtype=torch.bfloat16)
    p, a = (getattr(method, name).detach().bfloat16().reshape(-1, 1) for name in ("bias_p", "bias_a"))
    return -p * torch.log(1 + a * distance)


def test_long_distances_collapse_as_in_the_release():
    method = build("kerple_log", SHAPE)
    with torch.no_grad():
        rounded, exact = (tables(method, 16_384, "cpu", rounded=how)[0] for how in (True, False))
    # bfloat16 has 8 significant bits: 256 whole numbers, then 128 values for each doubling up to 2^14, and 2^14.
    distances = torch.arange(16_384).bfloat16().unique()
    assert len(distances) == 256 + 6 * 128 + 1
    assert all(row.unique().numel() <= len(distances) for row in rounded)
    assert all(row.unique().numel() > 10 * len(distances) for row in exact)
    assert torch.equal(rounded[:, 4001], rounded[:, 4000])
    assert not torch.equal(exact[:, 4001], exact[:, 4000])


def test_table_is_that_of_bfloat16_arithmetic():
    method = build("kerple_log", SHAPE)
    for parameter in method.parameters():
        parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        rounded = tables(method, 16_384, "cpu", rounded=True)[0]
    reference_table = in_bfloat16(method, 16_384).float()
    # A few of bfloat16's steps of 2^-8: the release also rounded between the operations.
    torch.testing.assert_close(rounded, reference_table, rtol=4 * 2.0**-8, atol=2.0**-7)


def test_gradient_passes_the_rounding():
    method = build("kerple_log", SHAPE)
    gradients = []
    for rounded in (True, False):
        method.zero_grad()
        tables(method, 100, "cpu", rounded=rounded)[0].sum().backward()
        gradients.append(method.bias_p.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=0)


@pytest.mark.parametrize("length", [32, 128])
def test_released_numbers_in_bfloat16(length):
    """All in bfloat16, as the release ran; what is left is the order of its operations, a few of bfloat16's steps."""
    expected = reference("kerple_log_bf16")[length]
    model, _ = load_model(
        checkpoints("kerple_log_bf16"), dtype=torch.bfloat16, overrides={"release_bf16_distances": True}
    )
    with torch.no_grad():
        logits = model(expected["tokens"].long()).float()
    difference = (logits - expected["logits"].float()).abs()
    assert difference.max() < 6 * 2.0**-6  # logits max_kv_len 4, where bfloat16's step is 2^-6
    assert difference.square().mean().sqrt() < 0.005


def test_other_methods_are_refused(tmp_path):
    for method in ("rotary", "rpe", "none"):
        with pytest.raises(UserError, match=f"release_bf16_distances.*{method}"):
            Config.from_flat(settings_of(method, "x", release_bf16_distances=True))
