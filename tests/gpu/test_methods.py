"""Every positional method on a simulated CUDA device.

An operation on tensors of different devices fails as on a GPU. Once everything is cached, neither
training nor evaluation may wait for the device or copy from pageable memory.
"""

from typing import Any

import pytest
import torch

from kerple.attention import Attention, AttentionMode, Span, parse_mode
from kerple.positional import build
from megatron.config import UserError, load_config
from megatron.model.gpt import GPT
from megatron.model.kernel_check import check_kernels
from megatron.model.settings import ModelSettings
from tests.support.simulated_cuda import ROOT, SimulatedCuda, move_to_cuda

# Scaled rotations, a bias and a weight with gradients, modified scores: for other dtypes and
# activation checkpointing.
DISTINCT = ("xpos", "kerple_power_ap_ap", "dape_kerple")
TWO_LAYERS = ("rotary", "kerple_log", "dape_kerple")
# One method of each way of using positions; `tests/unit/kerple/positional/test_base.py` runs the
# hooks of every method on the meta device.
KINDS = (
    *(
        "none",
        "sinusoidal",
        "rotary",
        "rpe",
        "kerple_log",
        "per_layer",
        "forgetting",
        "stick_breaking",
    ),
    *("fire", "cope", "dape_v2_kerple", "transformer_xl", *DISTINCT),
)
# Backends that `auto` does not choose for these methods on a GPU.
OTHER_BACKENDS = (
    *(("none", "fused"), ("none", "chunked"), ("alibi", "sdpa"), ("kerple_log", "chunked")),
    *(("kerple_power_ap_ap", "reference"), ("forgetting", "chunked")),
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
QUICK = ("rotary", "kerple_log", "transformer_xl")


def mark_slower(*cases: tuple[str, ...]) -> list[Any]:
    """The cases; only CI runs those whose method is not in QUICK."""
    return [pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.ci) for case in cases]


def settings_for(method: str, backend: str = "auto", *overrides: str) -> ModelSettings:
    """The 162M recipe with two layers, or four where they have different methods."""
    files, layers = ["small_bf16.yml", f"pos_emb/{method}.yml"], 4 if method == "per_layer" else 2
    config = load_config(
        files,
        ROOT / "configs",
        [f"num-layers={layers}", f"attention-backend={backend}", *overrides],
    )
    return ModelSettings(config.model, 50304)


def one_layer(method: str, backend: str = "auto") -> ModelSettings:
    """As `settings_for`, with a single layer where layers have the same method."""
    return settings_for(method, backend, *([] if method == "per_layer" else ["num-layers=1"]))


def cuda_model(
    settings: ModelSettings, dtype: torch.dtype = torch.bfloat16, checkpoint_every: int = 0
) -> GPT:
    with torch.device("meta"):
        model = GPT(settings, checkpoint_every=checkpoint_every)
    return move_to_cuda(model, dtype)


def check_training(model: GPT, device: SimulatedCuda) -> None:
    """Two steps; the second one neither waits nor copies."""
    tokens = torch.zeros(4, 512, dtype=torch.long, device="cuda")
    model.train()
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        device.reset()
        model.loss(tokens, tokens).backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == set()
    assert device.synchronizations == []
    assert device.blocking_copies == []


@pytest.mark.parametrize(
    ("method", "backend"), mark_slower(*((kind, "auto") for kind in KINDS), *OTHER_BACKENDS)
)
def test_training_step(method, backend):
    with SimulatedCuda() as device:
        settings = (
            settings_for(method)
            if backend == "auto" and method in TWO_LAYERS
            else one_layer(method, backend)
        )
        check_training(cuda_model(settings), device)


@pytest.mark.ci
@pytest.mark.parametrize("method", DISTINCT)
def test_training_step_in_float32_with_activation_checkpointing(method):
    with SimulatedCuda() as device:
        check_training(cuda_model(settings_for(method), torch.float32, checkpoint_every=1), device)


@pytest.mark.parametrize(
    ("method", "dtype"),
    mark_slower(*((kind, "bf16") for kind in KINDS), *((method, "fp32") for method in DISTINCT)),
)
def test_evaluation(method, dtype):
    """512 tokens after 15,000 in the cache, single-token decoding, windows and blocks."""
    with SimulatedCuda() as device, torch.inference_mode():
        model = cuda_model(one_layer(method), DTYPES[dtype]).eval()

        def hidden(*arguments, **options):
            model.hidden(*arguments, **options)
            device.reset()
            states = model.hidden(*arguments, **options)
            assert (states.device.type, states.dtype) == ("cuda", DTYPES[dtype])
            assert device.synchronizations == []
            assert device.blocking_copies == []

        def tokens(batch: int, length: int) -> torch.Tensor:
            return torch.zeros(batch, length, dtype=torch.long, device="cuda")

        cache = model.new_cache(16_384)
        model.hidden(tokens(1, 512), cache)
        for layer in cache.layers:
            layer.length = 15_000  # as if this many tokens had been processed
        hidden(tokens(1, 512), cache)
        hidden(tokens(1, 1), cache)
        hidden(tokens(1, 2048), mode=AttentionMode(Span(window=512)))
        hidden(tokens(1, 2048), mode=AttentionMode(Span(block=512)))


# One method of each kind in the modes that `attend_in_mode` computes.
MODES = [
    ("rotary", "sinks@4+252+reindexed+clip@64+logn"),
    ("xpos", "sinks@4+252+reindexed+leaky@64,4"),
    ("kerple_log", "sinks@4+252+reindexed+clip@64"),
    ("fire", "sinks@4+252+log@64"),
    ("dape_rotary", "window@256+leaky@64,4"),
    ("forgetting", "sinks@4+252"),
]


@pytest.mark.parametrize(("method", "name"), mark_slower(*MODES))
def test_modes(method, name):
    """256 tokens, 256 more, of which the cache drops some, and single-token decoding."""
    mode = parse_mode(name, 512).attention.at_length(1024)
    with SimulatedCuda() as device, torch.inference_mode():
        model = cuda_model(settings_for(method, "auto", "num-layers=1")).eval()
        cache = model.new_cache(mode=mode)
        for length in (256, 256, 1):
            states = model.hidden(
                torch.zeros(1, length, dtype=torch.long, device="cuda"), cache, mode
            )
            assert states.device.type == "cuda"
            if cache.length == 256:
                device.reset()
        assert device.kernels["softmax"] + device.kernels["_softmax"] > 0
        assert device.synchronizations == []
        assert device.blocking_copies == []


@pytest.mark.parametrize(
    ("method", "backend"),
    mark_slower(("rotary", "auto"), ("dape_kerple", "auto"), ("kerple_log", "fused")),
)
def test_grouped_queries(method, backend):
    """12 query heads share 3 key/value heads: gradients, single-token decoding,
    windows and blocks.
    """
    with SimulatedCuda() as device:
        positional = move_to_cuda(build(method, settings_for(method).config.shape), torch.bfloat16)
        for s, span in ((300, Span()), (1, Span()), (300, Span(window=100)), (300, Span(block=64))):
            query, key, value = (
                torch.empty(
                    2, heads, length, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True
                )
                for heads, length in ((12, s), (3, 300), (3, 300))
            )
            context = Attention(positional, backend)(
                query, key, value, window=span.window, block=span.block
            )
            context.sum().backward()
            assert query.grad.shape == query.shape
            assert key.grad.shape == value.grad.shape == key.shape
        assert device.synchronizations == []


def test_a_gpu_without_fused_kernels():
    """`auto` uses another backend; `fused` is an error before the first step."""
    with SimulatedCuda(capability=(7, 0)) as device:
        hidden = cuda_model(settings_for("kerple_log")).hidden(
            torch.zeros(4, 512, dtype=torch.long, device="cuda")
        )
        hidden.sum().backward()
        assert device.kernels["triton.forward_kernel"] == 0
        model = cuda_model(settings_for("kerple_log", "fused"))
        with pytest.raises(UserError, match=r"'fused'.*8\.0.*7\.0"):
            check_kernels(model, torch.device("cuda"), torch.bfloat16, training=True, report=print)


def test_a_tensor_on_the_wrong_device_fails():
    """The simulation itself."""
    with SimulatedCuda() as device:
        on_gpu = torch.zeros(3, device="cuda")
        with pytest.raises(RuntimeError, match=r"on cuda and on the CPU \[\(3,\)\]"):
            on_gpu + torch.zeros(3)
        (on_gpu + 1).sum().item()
        on_gpu.cpu()
        torch.zeros(3).to("cuda")
        assert len(device.synchronizations) == 2
        assert len(device.blocking_copies) == 1
        assert device.kernels["add"] == device.kernels["sum"] == 1
        model = build("alibi", settings_for("alibi").config.shape)
        assert model.bias(torch.zeros(3, device="cuda")).device.type == "cuda"
