"""Methods that make the scores: memory, dropout, precision, causality, and what is refused."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kerple.attention import FULL, Attention, Span, attend, score_mod, score_table
from kerple.attention.backends.chunked import chunked_attention
from kerple.attention.call import AttentionCall
from kerple.positional import ModelShape, PositionalMethod, build
from tests.support.attention import LargestStorage, attended, states, visible

SHAPE = ModelShape(num_heads=3, head_size=4, hidden_size=12, num_layers=1, max_positions=64)
METHODS = [
    "dape",
    "dape_kerple",
    "dape_alibi",
    "dape_fire",
    "dape_v2",
    "dape_v2_kerple",
    "dape_v2_fire",
    "fire",
    "cope",
    "transformer_xl",
]


def make(name: str) -> PositionalMethod:
    torch.manual_seed(0)
    method = build(name, SHAPE)
    with torch.no_grad():
        for parameter in method.parameters():
            if not parameter.any():
                parameter.normal_()
    return method


def test_positions_that_are_not_seen():
    for span in (FULL, Span(window=3), Span(block=4)):
        mask = span.mask(range(5, 11), range(2, 11), "cpu")
        assert torch.equal(~mask, visible(11, span)[5:, 2:])


class Transfers(TorchDispatchMode):
    """Records the operations that bring values from the CPU to the other device, or back: the host waits for them."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, results))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
        if len(devices) > 1:
            self.found.append(str(function))
        return results


@pytest.mark.parametrize("name", METHODS)
def test_chunks_take_nothing_from_another_device(name, monkeypatch):
    """On PyTorch's device without memory, from which no value can be read; in both passes, chunk by chunk."""
    monkeypatch.setattr("kerple.attention.backends.chunked.MODIFY_MIN_ROWS", 8)
    monkeypatch.setattr("kerple.attention.backends.chunked.MODIFY_MAX_ROWS", 8)
    method = make(name)
    table = score_table(method, 30, "cpu")
    table = None if table is None else table.detach().to("meta")
    method.to("meta")
    leaves = [torch.randn(1, 3, 30, 4, device="meta", requires_grad=True) for _ in range(3)]
    with Transfers() as transfers:
        for span in (FULL, Span(window=10), Span(block=8)):
            query, key, value = leaves
            call = AttentionCall(
                query=query,
                key=key,
                value=value,
                scale=0.5,
                modify_scores=method.modify_scores,
                score_table=table,
                span=span,
            )
            torch.autograd.grad(chunked_attention(call).sum(), leaves)
        assert transfers.found == []
        torch.ones(2).to("meta")
    assert transfers.found == ["aten._to_copy.default"]


@pytest.mark.parametrize("name", METHODS)
def test_a_changed_future_changes_no_earlier_result(name):
    method = make(name)
    query, key, value = (state.detach() for state in states(3, 4, 30))
    before = attended("chunked", method, query, key, value, 30, FULL)
    for changed in (query, key, value):
        changed[:, :, 20:] += 5.0
    after = attended("chunked", method, query, key, value, 30, FULL)
    torch.testing.assert_close(before[:, :, :20], after[:, :, :20], rtol=0, atol=1e-12)
    assert (before[:, :, 20:] - after[:, :, 20:]).abs().amax(dim=(0, 1, 3)).min() > 1e-3


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_half_precision_is_close_to_float64(name, dtype, tolerance):
    """States and parameters are rounded; the scores and what the method makes of them are float32."""
    method = make(name).to(dtype)
    leaves = [state.detach().to(dtype).requires_grad_() for state in states(3, 4, 40)]
    found = attended("chunked", method, *leaves, 40, FULL)
    assert found.dtype == dtype
    upstream = torch.randn(found.shape).to(dtype)
    found = [found, *torch.autograd.grad(found, leaves, upstream)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = attended("reference", method.double(), *exact, 40, FULL)
    for ours, theirs in zip(found, [expected, *torch.autograd.grad(expected, exact, upstream.double())], strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("name", ["dape_kerple", "dape_v2_kerple", "cope"])
def test_dropout_is_the_same_in_both_passes(name, monkeypatch):
    """With the seed held, dropout is a fixed function, whose gradient can be checked numerically."""
    monkeypatch.setattr("kerple.attention.backends.chunked.MODIFY_MIN_ROWS", 2)
    monkeypatch.setattr("kerple.attention.backends.chunked.MODIFY_MAX_ROWS", 2)
    method = make(name).double()

    def with_fixed_seed(*leaves):
        torch.manual_seed(3)
        return attended("chunked", method, *leaves, 5, FULL, dropout_p=0.4)

    assert torch.autograd.gradcheck(with_fixed_seed, states(3, 4, 6, batch=1), fast_mode=True)


def test_dropout_keeps_the_mean():
    method = make("dape_alibi")
    query, key, value = (state.detach().float() for state in states(3, 4, 20, batch=1))
    with torch.no_grad():
        expected = attended("chunked", method, query, key, value, 3, FULL)
        many = (state.expand(2000, -1, -1, -1) for state in (query, key, value))
        draws = attended("chunked", method, *many, 3, FULL, dropout_p=0.3)
    assert draws.std(dim=0).min() > 0.01
    assert ((draws.mean(dim=0) - expected[0]).abs() < 5 * draws.std(dim=0) / 2000**0.5).all()


@pytest.mark.parametrize("name", ["dape_kerple", "dape_v2_kerple", "fire", "cope", "transformer_xl"])
def test_memory_at_evaluation_is_linear_in_the_length(name, monkeypatch):
    """48 queries of 16,384 keys: what is made at a time is for 16 of them, in 32 hidden units or 36 products."""
    monkeypatch.setattr("kerple.attention.backends.chunked.MODIFY_CPU_BYTES", 1)
    method = make(name)
    query, key, value = (torch.randn(1, 3, length, 4) for length in (48, 16_384, 16_384))
    with torch.no_grad():
        table = score_table(method, 16_384, "cpu")
        with LargestStorage() as largest:
            Attention("auto", method)(query, key, value, table=table)
    assert largest.elements <= 36 * 16 * 16_384


def peak(length: int, backend: str) -> int:
    """The most bytes that forward and backward pass held at once beyond what was there."""
    method = build("dape_kerple", SHAPE)
    leaves = [torch.randn(1, 3, length, 4, requires_grad=True) for _ in range(3)]
    table = score_table(method, length, "cpu")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        Attention(backend, method)(*leaves, table=table).sum().backward()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_memory_in_training_is_bounded(monkeypatch):
    """Twice the length: the yardstick holds four times as much, the chunks twice as much."""
    monkeypatch.setattr("kerple.attention.backends.chunked.MODIFY_CPU_BYTES", 1)
    materialised = [peak(length, "reference") for length in (128, 256)]
    chunked = [peak(length, "chunked") for length in (256, 512)]
    assert materialised[1] > 3.5 * materialised[0]
    assert chunked[1] < 2.5 * chunked[0]
    assert 5 * chunked[0] < materialised[1]


def test_what_is_refused():
    with pytest.raises(
        NotImplementedError, match=r"'sdpa' does not support .* modify_scores; use auto, or one of reference, chunked"
    ):
        Attention("sdpa", build("dape_kerple", SHAPE))
    query = torch.randn(1, 3, 5, 4)
    with pytest.raises(NotImplementedError, match="'sdpa' does not support"):
        attend(query, query, query, modify_scores=build("fire", SHAPE).modify_scores, backend="sdpa")
    with pytest.raises(ValueError, match=r"Dape has no bias or weight .*; its modify_scores uses"):
        score_mod(build("dape", SHAPE), 8, "cpu")

    class Both(PositionalMethod):
        def modify_scores(self, scores, *context):
            return scores

        def bias(self, distance):
            return distance

    with pytest.raises(ValueError, match="Both defines modify_scores, so it must not define bias or weight"):
        Attention("auto", Both())


def test_the_choice_is_said():
    assert Attention("auto", build("dape", SHAPE)).choice("cpu").startswith("chunked (auto: ")
