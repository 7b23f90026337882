"""Peak throughput and floating-point operations. Counts of whole models are tested
with the model.
"""

import pytest
import torch

from megatron.training.flops import count_parameters, flops_per_token, peak_flops
from tests.support.language_models import small_gpt


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GeForce RTX 2080", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_the_peak_follows_from_the_name_of_the_device(name, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == expected
    assert peak_flops(torch.device("cpu")) is None


def test_flops_per_token_follow_the_formula():
    model = small_gpt("kerple_log")
    config = model.settings.config
    outside = count_parameters(model.layers(), model.settings)["outside_embedding"]
    attention = 6 * config.num_layers * config.hidden_size * 100
    assert flops_per_token(outside, config, 100) == 6 * outside + attention
    for width in (99, 300):
        windowed = config.model_copy(update={"sliding_window_width": (width,)})
        assert flops_per_token(outside, windowed, 100) == 6 * outside + attention
    # On average, 20 keys of 100 tokens except for the first 20: 20 * (1 - 20 / 200).
    windowed = (
        flops_per_token(outside, config.model_copy(update={"sliding_window_width": (19,)}), 100)
        - 6 * outside
    )
    assert windowed == 12 * config.num_layers * config.hidden_size * 18
    # In the first of two layers 18 keys, in the other 50.
    mixed = (
        flops_per_token(
            outside, config.model_copy(update={"sliding_window_width": (19, None)}), 100
        )
        - 6 * outside
    )
    assert mixed == 12 * config.hidden_size * (18 + 50)
