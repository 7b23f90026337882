"""Fused blocks against the blocks that PyTorch computes in float64: on a GPU, or in Triton's
interpreter.
"""

import pytest
import torch

pytest.importorskip("triton")

from kerple.attention import Documents
from megatron.model import fused_block
from megatron.model.gpt import GPT
from megatron.model.initialization import initialize
from tests.support.language_models import model_settings

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PARALLEL = {"norm": "rmsnorm", "activation": "geglu", "gpt_j_residual": True}


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> None:
    """Use the kernels on a CPU, in Triton's interpreter."""
    monkeypatch.setattr(fused_block, "KERNEL_DEVICES", ["cpu", "cuda"])


def small_model(
    dtype: torch.dtype, *, checkpoint_every: int = 0, num_layers: int = 2, **keys: object
) -> GPT:
    """Random norms and biases too."""
    sizes = {
        "num_layers": num_layers,
        "hidden_size": 24,
        "num_attention_heads": 2,
        "padded_vocab_size": 32,
    }
    settings = model_settings(**sizes, **{"pos_emb": "kerple_log", **keys})
    model = GPT(settings, checkpoint_every=checkpoint_every)
    initialize(
        model.layers(), settings, seed=1, init_method="normal", output_init_method="normal", std=0.3
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(".bias"):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.to(DEVICE, dtype).train()


def values_and_gradients(model: GPT) -> dict[str, torch.Tensor]:
    """With activation recomputation, also with documents."""
    text = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    torch.manual_seed(3)  # dropout
    documents = (
        Documents(torch.tensor([[0] * 3 + [1] * 5, [2] * 8], device=DEVICE))
        if model.checkpoint_every
        else None
    )
    loss = model.loss(text[:, :-1], text[:, 1:], documents=documents)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return {
        "loss": loss.detach(),
        **dict(zip(dict(model.named_parameters()), gradients, strict=True)),
    }


def assert_same_as_pytorch(
    monkeypatch, dtype: torch.dtype = torch.float32, rtol: float = 2e-5, **keys
) -> None:
    actual = values_and_gradients(small_model(dtype, **keys))
    monkeypatch.setattr(fused_block, "KERNEL_DEVICES", [])
    expected = values_and_gradients(small_model(torch.float64, **keys))
    assert list(actual) == list(expected)
    for name, values in expected.items():
        assert actual[name].dtype == dtype or name == "loss"
        assert (actual[name].double() - values).norm() <= rtol * values.norm() + 1e-7, name


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {
            "norm": "rmsnorm",
            "activation": "swiglu",
            "use_bias_in_attn_linear": False,
            "num_kv_heads": 1,
        },
        {"norm": "rmsnorm", "bias_gelu_fusion": True},
        {"gpt_j_residual": True, "activation": "silu"},
        {"use_bias_in_norms": False, "use_bias_in_attn_linear": False, "use_bias_in_mlp": False},
        {**PARALLEL, "use_qk_layernorm": True, "sliding_window_width": 2},
        {"activation": "swiglu", "use_bias_in_mlp": False, "intermediate_size": 60},
        {"activation": "relu", "pos_emb": "rotary", "checkpoint_every": 1},
        {"checkpoint_every": 2, "num_layers": 3, "pos_emb": "dape_kerple"},
    ],
)
@pytest.mark.quick(2)
def test_values_and_gradients(keys, monkeypatch):
    assert_same_as_pytorch(monkeypatch, **keys)


@pytest.mark.ci
def test_half_precision(monkeypatch):
    assert_same_as_pytorch(monkeypatch, torch.float16, rtol=1e-2)


@pytest.mark.parametrize(
    "keys",
    [
        {"gpt_j_residual": True},
        {"activation": "swiglu", "use_bias_in_attn_linear": False, "use_bias_in_mlp": False},
    ],
)
@pytest.mark.quick(1)
def test_dropout_is_that_of_pytorch(keys, monkeypatch):
    """The same masks: in float32, since random numbers depend on the dtype."""
    keys = {"hidden_dropout": 0.3, "checkpoint_every": 1, **keys}
    actual = values_and_gradients(small_model(torch.float32, **keys))
    monkeypatch.setattr(fused_block, "KERNEL_DEVICES", [])
    for name, values in values_and_gradients(small_model(torch.float32, **keys)).items():
        assert (actual[name] - values).norm() <= 2e-5 * values.norm() + 1e-6, name


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, torch.float16),
        ({"norm": "rmsnorm", "activation": "swiglu", "use_bias_in_mlp": False}, torch.float32),
    ],
)
def test_the_self_check_passes(keys, dtype):
    block = small_model(torch.float32, **keys).blocks[0]
    assert fused_block.kernel_failure(block.input_layernorm, block.mlp, DEVICE, dtype) is None


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda sums, dtype: sums[0].to(dtype), "a result has a relative error of"),
        (lambda *_: 1 / 0, "ZeroDivision"),
    ],
)
def test_the_self_check_fails(broken, message, monkeypatch):
    monkeypatch.setattr(fused_block, "_sum_rows", broken)
    block = small_model(torch.float32).blocks[0]
    failure = fused_block.kernel_failure(block.input_layernorm, block.mlp, DEVICE, torch.float32)
    assert failure.startswith(message)
    fused_block.KERNEL_DEVICES.remove(DEVICE.type)
    assert not block.uses_kernels(torch.zeros(1, 1, 24, device=DEVICE))
