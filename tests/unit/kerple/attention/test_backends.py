"""Every backend against the materialised reference, and the reference against the definition, in float64."""

import math

import pytest
import torch

from kerple.attention import attend, tables
from kerple.positional import ModelShape, build

TABLE_METHODS = [
    "alibi",
    "rpe",
    "kerple_log",
    "kerple_power_ap_",
    "kerple_power__ap",
    "kerple_power_ap_ap",
    "kerple_power_original",
]
METHODS = ["none", *TABLE_METHODS]


def case(
    method: str,
    batch: int,
    heads: int,
    s: int,
    t: int,
    size: int,
    window: int | None = None,
    dtype=torch.float64,
    seed=0,
) -> dict:
    """Arguments of `attend`; leaves that need gradients."""
    torch.manual_seed(seed)
    positional = build(method, ModelShape(heads, size, heads * size, 1, t))
    bias, weight = (
        None if table is None else table.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        for table in tables(positional, t if window is None else min(t, window), "cpu")
    )
    # As a model hands them over: heads and positions interleaved in memory.
    query, key, value = (
        torch.randn(batch, length, heads, size, dtype=torch.float64).to(dtype).transpose(1, 2).requires_grad_()
        for length in (s, t, t)
    )
    return {"query": query, "key": key, "value": value, "bias_table": bias, "weight_table": weight, "window": window}


def run(backend: str, arguments: dict, upstream_dtype=torch.float64, **options) -> list[torch.Tensor]:
    """The result, and the gradients of all leaves for an upstream gradient that is always the same."""
    result = attend(backend=backend, **arguments, **options)
    upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    leaves = [leaf for leaf in arguments.values() if isinstance(leaf, torch.Tensor)]
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream.to(upstream_dtype).to(result.dtype))]


def serving(method: str) -> list[str]:
    return ["chunked"] if method in ("kerple_power__ap", "kerple_power_ap_ap") else ["chunked", "sdpa"]


def assert_backends_agree(method: str, *sizes: int, window: int | None = None) -> None:
    arguments = case(method, *sizes, window=window)
    expected = run("reference", arguments)
    for backend in serving(method):
        for found, wanted in zip(run(backend, arguments), expected, strict=True):
            assert found.shape == wanted.shape
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("method", ["none", "kerple_log", "kerple_power_ap_ap"])
def test_the_reference_is_the_definition(method, window):
    """softmax(weight * q.k / sqrt(d) + bias) v, pair by pair, for queries that are the last of the positions."""
    arguments = case(method, batch=2, heads=2, s=4, t=9, size=3, window=window)
    query, key, value, bias, weight, _ = arguments.values()
    found = attend(backend="reference", **arguments)
    for b in range(2):
        for h in range(2):
            for i in range(4):
                position = 9 - 4 + i
                seen = [j for j in range(9) if j <= position and (window is None or position - j < window)]
                scores = []
                for j in seen:
                    score = (query[b, h, i] @ key[b, h, j]).item() / math.sqrt(3)
                    score *= 1.0 if weight is None else weight[h, position - j].item()
                    scores.append(score + (0.0 if bias is None else bias[h, position - j].item()))
                factors = [math.exp(score) / sum(math.exp(other) for other in scores) for score in scores]
                expected = sum(factor * value[b, h, j] for factor, j in zip(factors, seen, strict=True))
                torch.testing.assert_close(found[b, h, i], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("length", [1, 7, 128, 513])
@pytest.mark.parametrize("method", METHODS)
def test_values_and_gradients_for_every_method(method, length, window):
    assert_backends_agree(method, 1 if length == 513 else 2, 3, length, length, 8, window=window)


@pytest.mark.parametrize(
    ("batch", "heads", "s", "t"),
    [
        (2, 3, 1, 40),  # decoding
        (3, 2, 7, 20),
        (2, 2, 100, 513),  # a chunk of an evaluation
        (1, 4, 130, 131),
        (1, 12, 300, 700),
        (5, 2, 64, 64),  # samples merged into one stack
    ],
)
@pytest.mark.parametrize("window", [None, 64, 600])
@pytest.mark.parametrize("method", ["none", "kerple_log", "kerple_power_ap_ap"])
def test_fewer_queries_than_keys(method, batch, heads, s, t, window):
    assert_backends_agree(method, batch, heads, s, t, 4, window=window)


@pytest.mark.parametrize("method", ["none", "kerple_log", "kerple_power_ap_ap"])
def test_a_long_sequence(method):
    assert_backends_agree(method, 1, 1, 2048, 2048, 8)


@pytest.mark.parametrize("threads_bytes", [1, 20_000, 2**22])
def test_the_cut_changes_nothing(threads_bytes, monkeypatch):
    """From one head and one chunk at a time to all samples at once."""
    monkeypatch.setattr("kerple.attention.backends.chunk_plan.CPU_BYTES_PER_THREAD", threads_bytes)
    monkeypatch.setattr("kerple.attention.backends.chunk_plan.MIN_ROWS", 16)
    for window in (None, 30):
        assert_backends_agree("kerple_power_ap_ap", 3, 4, 70, 90, 4, window=window)


def test_tables_may_be_longer_than_needed_and_get_zeros_there():
    arguments = case("kerple_power_ap_ap", 1, 2, 10, 40, 4)
    arguments["window"] = 6
    for gradient in run("chunked", arguments)[-2:]:
        assert gradient.shape == (2, 40)
        assert (gradient[:, :6] != 0).any()
        assert (gradient[:, 6:] == 0).all()


@pytest.mark.parametrize("needed", [("bias_table",), ("weight_table",), ("query",), ("value",)])
def test_any_of_the_inputs_may_need_a_gradient_alone(needed):
    arguments = case("kerple_power_ap_ap", 2, 2, 9, 9, 4)
    expected = dict(zip(["result", *arguments], run("reference", arguments), strict=False))
    leaves = {
        name: leaf.detach().requires_grad_(name in needed) if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in arguments.items()
    }
    result = attend(backend="chunked", **leaves)
    upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    result.backward(upstream)
    for name, leaf in leaves.items():
        if name in needed:
            torch.testing.assert_close(leaf.grad, expected[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", ["chunked", "sdpa", "reference"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("s", "t", "window"), [(1, 50, None), (150, 150, None), (40, 150, 20)])
def test_low_precision(backend, dtype, tolerance, s, t, window):
    """Half-precision inputs and results, float32 in between; tables and their gradients are float32."""
    arguments = case("kerple_log", 2, 3, s, t, 16, window=window, dtype=dtype)
    exact = {
        name: leaf.detach().double().requires_grad_() if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in arguments.items()
    }
    found, expected = run(backend, arguments), run("reference", exact, upstream_dtype=dtype)
    assert found[0].dtype == found[1].dtype == dtype
    assert found[-1].dtype == torch.float32
    for part, wanted in zip(found, expected, strict=True):
        assert (part.double() - wanted).norm() <= tolerance * wanted.norm()
    # Nothing on the way to the table's gradient is rounded to half precision.
    assert (found[-1].double() - expected[-1]).norm() <= 3e-6 * expected[-1].norm()


@pytest.mark.parametrize("s", [1, 100])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_autocast_leaves_scores_in_float32(backend, s):
    arguments = case("kerple_power_ap_ap", 2, 2, s, 100, 16, dtype=torch.float32)
    expected = run(backend, arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = attend(backend=backend, **arguments)
    assert torch.equal(result, expected[0])
    # The chunked backend computes scores again in its backward pass, which may be within autocast too.
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backend == "chunked" and s > 1):
        gradients = run(backend, arguments)[1:]
    for found, wanted in zip(gradients, expected[1:], strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("method", ["none", "kerple_log", "kerple_power_ap_ap"])
def test_a_second_run_gives_the_same_bits(method, window):
    arguments = case(method, 2, 4, 300, 300, 16, window=window, dtype=torch.float32)
    for found, wanted in zip(run("chunked", arguments), run("chunked", arguments), strict=True):
        assert torch.equal(found, wanted)


def test_gradients_reach_the_kernel_s_parameters():
    torch.manual_seed(0)
    positional = build("kerple_power_ap_ap", ModelShape(2, 8, 16, 1, 150))
    gradients = {}
    for backend in ("reference", "chunked"):
        arguments = case("none", 2, 2, 150, 150, 8, dtype=torch.float32)
        arguments["bias_table"], arguments["weight_table"] = tables(positional, 150, "cpu")
        positional.zero_grad()
        attend(backend=backend, **arguments).square().sum().backward()
        gradients[backend] = [parameter.grad.clone() for parameter in positional.parameters()]
    for found, wanted in zip(gradients["chunked"], gradients["reference"], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


def test_recomputed_activations_have_the_same_gradients():
    arguments = case("kerple_log", 2, 2, 70, 70, 8)
    expected = run("chunked", arguments)[1]
    result = torch.utils.checkpoint.checkpoint(
        lambda query: attend(backend="chunked", **{**arguments, "query": query}),
        arguments["query"],
        use_reentrant=False,
    )
    upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (found,) = torch.autograd.grad(result, arguments["query"], upstream)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("method", ["none", "kerple_power_ap_ap"])
def test_dropout_is_the_same_in_both_passes(method):
    """With the seed held, dropout is a fixed function, whose gradient can be checked numerically."""
    arguments = case(method, 1, 2, 5, 7, 3)
    names = [name for name, leaf in arguments.items() if isinstance(leaf, torch.Tensor)]

    def with_fixed_seed(*leaves):
        torch.manual_seed(3)
        inputs = {**arguments, **dict(zip(names, leaves, strict=True))}
        return attend(backend="chunked", dropout_p=0.4, **inputs)

    assert torch.autograd.gradcheck(with_fixed_seed, [arguments[name] for name in names])


@pytest.mark.parametrize("backend", ["chunked", "sdpa", "reference"])
def test_dropout_keeps_the_mean(backend):
    arguments = case("kerple_log", 1, 1, 3, 30, 4, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = attend(backend=backend, **arguments)
        draws = torch.stack([attend(backend=backend, dropout_p=0.3, **arguments) for _ in range(3000)])
    assert draws.std(dim=0).min() > 0.01
    assert ((draws.mean(dim=0) - expected).abs() < 5 * draws.std(dim=0) / 3000**0.5).all()


@pytest.mark.parametrize("method", ["none", "kerple_log", "kerple_power_ap_ap"])
def test_scale_replaces_the_root_of_the_head_size(method):
    arguments = case(method, 1, 2, 20, 20, 4)
    scaled = {**arguments, "query": (arguments["query"] * 0.3 * 2).detach()}
    for backend in serving(method):
        found = attend(backend=backend, scale=0.3, **arguments)
        torch.testing.assert_close(found, attend(backend="reference", **scaled), rtol=1e-9, atol=1e-11)
