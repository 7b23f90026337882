"""The chunked backend against the reference in float64: tables, modify_scores, precision, dropout
and memory.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kerple.attention import (
    FULL,
    Attention,
    ExpectedCalls,
    attend,
    describe_choice,
    position_tables,
)
from kerple.attention.backends import chunk_plan
from kerple.attention.backends.chunk_plan import modify_budget
from kerple.positional import ModelShape, PositionalMethod, build
from tests.support.attention import (
    LargestStorage,
    attend_arguments,
    attended,
    float64_arguments,
    peak_memory,
    random_states,
    run_attend,
    run_repeated,
    upstream_gradient,
)

METHODS = ["none", "kerple_log", "kerple_power__ap", "kerple_power_ap_ap"]


def assert_same_as_reference(method: str, *sizes: int, window: int | None = None) -> None:
    arguments = attend_arguments(method, *sizes, window=window)
    for actual, expected in zip(
        run_attend("chunked", arguments), run_attend("reference", arguments), strict=True
    ):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("batch", "heads", "s", "t", "window"),
    [
        *(
            (2, 3, 1, 1, None),
            (2, 3, 7, 7, 1),
            (2, 3, 128, 128, 50),
            (1, 3, 513, 513, None),
            (1, 3, 513, 513, 50),
        ),
        *((2, 3, 1, 40, None), (2, 3, 1, 140, 64)),  # decoding
        *(
            (2, 2, 100, 513, None),
            (2, 2, 100, 513, 64),
            (1, 4, 130, 131, None),
        ),  # a chunk of an evaluation
        (5, 2, 64, 64, None),  # groups that merge samples
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_values_and_gradients(method, batch, heads, s, t, window):
    assert_same_as_reference(method, batch, heads, s, t, 8, window=window)


@pytest.mark.parametrize(
    ("budget", "window"), [(1, None), (20_000, None), (20_000, 30), (2**22, 30)]
)
def test_results_do_not_depend_on_the_chunks(budget, window, monkeypatch):
    """From one head and one chunk at a time to all samples at once."""
    monkeypatch.setattr(chunk_plan, "CPU_BYTES_PER_THREAD", budget)
    monkeypatch.setattr(chunk_plan, "MIN_ROWS", 16)
    assert_same_as_reference("kerple_power_ap_ap", 3, 4, 70, 90, 4, window=window)


@pytest.mark.parametrize(
    ("budget", "heads", "kv_heads"), [(1, 6, 3), (20_000, 6, 2), (40_000, 6, 3), (2**22, 4, 1)]
)
@pytest.mark.parametrize(("s", "t", "window"), [(70, 90, None), (70, 70, 30), (1, 40, 9)])
@pytest.mark.parametrize("method", ["none", "kerple_log", "kerple_power_ap_ap"])
def test_grouped_queries(method, s, t, window, heads, kv_heads, budget, monkeypatch):
    """Also if the heads that share a key/value head are in different chunks."""
    monkeypatch.setattr(chunk_plan, "CPU_BYTES_PER_THREAD", budget)
    monkeypatch.setattr(chunk_plan, "MIN_ROWS", 16)
    arguments = attend_arguments(method, 2, heads, s, t, 4, window=window, kv_heads=kv_heads)
    for actual, expected in zip(
        run_attend("chunked", arguments), run_repeated(arguments), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_gradients_of_longer_tables_end_with_zeros():
    arguments = attend_arguments("kerple_power_ap_ap", 1, 2, 10, 40, 4)
    arguments["window"] = 6
    for grad in run_attend("chunked", arguments)[-2:]:
        assert grad.shape == (2, 40)
        assert (grad[:, :6] != 0).any()
        assert (grad[:, 6:] == 0).all()


@pytest.mark.parametrize("required", ["bias_table", "weight_table", "query", "value"])
def test_a_single_input_may_require_a_gradient(required):
    arguments = attend_arguments("kerple_power_ap_ap", 2, 2, 9, 9, 4)
    expected = dict(zip(["result", *arguments], run_attend("reference", arguments), strict=False))
    leaves = {
        name: leaf.detach().requires_grad_(name == required)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for name, leaf in arguments.items()
    }
    result = attend(backend="chunked", **leaves)
    result.backward(upstream_gradient(result))
    torch.testing.assert_close(leaves[required].grad, expected[required], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("window", [None, 100])
def test_repeated_runs_are_bitwise_identical(window):
    arguments = attend_arguments(
        "kerple_power_ap_ap", 2, 4, 300, 300, 16, window=window, dtype=torch.float32
    )
    for first, second in zip(
        run_attend("chunked", arguments), run_attend("chunked", arguments), strict=True
    ):
        assert torch.equal(first, second)


# Precision.


@pytest.mark.parametrize("backend", ["chunked", "sdpa", "reference"])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "s", "t", "window"),
    [
        *((torch.bfloat16, 8e-3, 150, 150, None), (torch.bfloat16, 8e-3, 1, 50, None)),
        *((torch.float16, 1e-3, 40, 150, 20), (torch.float32, 1e-6, 150, 150, None)),
    ],
)
def test_low_precision(backend, dtype, tolerance, s, t, window):
    """Half-precision inputs and results, float32 in between; tables and their gradients are
    float32.
    """
    arguments = attend_arguments("kerple_log", 2, 3, s, t, 16, window=window, dtype=dtype)
    actual = run_attend(backend, arguments)
    expected = run_attend("reference", float64_arguments(arguments), upstream_dtype=dtype)
    assert actual[0].dtype == actual[1].dtype == dtype
    assert actual[-1].dtype == torch.float32
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        assert (tensor.double() - expected_tensor).norm() <= tolerance * expected_tensor.norm()
    # The gradient of the table is never rounded to half precision.
    assert (actual[-1].double() - expected[-1]).norm() <= 3e-6 * expected[-1].norm()


# Dropout.


@pytest.mark.parametrize("method", ["none", "kerple_power_ap_ap"])
def test_dropout_is_the_same_in_both_passes(method):
    """With a fixed seed, dropout is a deterministic function, whose gradient can be checked
    numerically.
    """
    arguments = attend_arguments(method, 1, 2, 5, 7, 3)
    names = [name for name, leaf in arguments.items() if isinstance(leaf, torch.Tensor)]

    def with_fixed_seed(*leaves):
        torch.manual_seed(3)
        inputs = {**arguments, **dict(zip(names, leaves, strict=True))}
        return attend(backend="chunked", dropout_p=0.4, **inputs)

    assert torch.autograd.gradcheck(with_fixed_seed, [arguments[name] for name in names])


@pytest.mark.parametrize("backend", ["chunked", "sdpa", "reference"])
def test_dropout_preserves_the_mean(backend):
    arguments = attend_arguments("kerple_log", 1, 1, 3, 30, 4, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = attend(backend=backend, **arguments)
        repeated = {
            name: arguments[name].expand(3000, -1, -1, -1) for name in ("query", "key", "value")
        }
        draws = attend(backend=backend, dropout_p=0.3, **{**arguments, **repeated})
    assert draws.std(dim=0).min() > 0.01
    assert ((draws.mean(dim=0) - expected[0]).abs() < 5 * draws.std(dim=0) / 3000**0.5).all()


# Memory.


@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("with_bias", [True, False])
def test_memory_at_evaluation_is_bounded(window, with_bias):
    query, key = torch.randn(1, 2, 512, 8), torch.randn(1, 2, 16_384, 8)
    bias, weight = -torch.rand(2, 16_384) if with_bias else None, torch.rand(2, 16_384)
    with torch.no_grad(), LargestStorage() as largest:
        attend(
            query, key, key, bias_table=bias, weight_table=weight, window=window, backend="chunked"
        )
    assert largest.elements <= 2 * 128 * (16_384 if window is None else window + 127)


@pytest.mark.parametrize("s", [1, 64])
@pytest.mark.parametrize("method", ["kerple_power_ap_ap", "dape_kerple"])
def test_grouped_keys_are_not_repeated(method, s, monkeypatch):
    """8 query heads share a key/value head of the KV cache."""
    monkeypatch.setattr("kerple.attention.backends.chunk_plan.MODIFY_CPU_BYTES", 1)
    length, size = 4096, 256
    positional = build(method, ModelShape(8, size, 8 * size, 1, length))
    tables = position_tables(positional, length, "cpu")
    query, key, value = (
        torch.randn(1, heads, n, size) for heads, n in ((8, s), (1, length), (1, length))
    )
    with torch.no_grad(), LargestStorage() as largest:
        Attention(positional)(query, key, value, tables=tables)
    assert largest.elements < 8 * key.numel()


def test_memory_in_training_is_bounded():
    length = 2048
    states = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
    bias, weight = (-torch.rand(2, length)).requires_grad_(), torch.rand(2, length).requires_grad_()
    with LargestStorage() as largest:
        attend(*states, bias_table=bias, weight_table=weight, backend="chunked").sum().backward()
    assert bias.grad.shape == weight.grad.shape == (2, length)
    assert largest.elements <= 2 * 128 * length


# Methods with modify_scores. Their values and gradients are tested with each method.

SHAPE = ModelShape(num_heads=3, head_size=4, hidden_size=12, num_layers=1, max_positions=64)


def make_method(name: str) -> PositionalMethod:
    torch.manual_seed(0)
    method = build(name, SHAPE)
    with torch.no_grad():
        for parameter in method.parameters():
            if not parameter.any():
                parameter.normal_()
    return method


@pytest.mark.parametrize("name", ["dape_v2_kerple", "fire", "cope", "transformer_xl"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_modified_scores_in_half_precision(name, dtype, tolerance):
    """Inputs and parameters are rounded; scores are float32."""
    method = make_method(name).to(dtype)
    leaves = [state.detach().to(dtype).requires_grad_() for state in random_states(3, 4, 40)]
    result = attended("chunked", method, *leaves, 40, FULL)
    assert result.dtype == dtype
    upstream = torch.randn(result.shape).to(dtype)
    actual = [result, *torch.autograd.grad(result, leaves, upstream)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = attended("reference", method.double(), *exact, 40, FULL)
    expected = [expected, *torch.autograd.grad(expected, exact, upstream.double())]
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        assert (tensor.double() - expected_tensor).norm() <= tolerance * expected_tensor.norm()


@pytest.mark.parametrize("name", ["dape_v2_kerple", "cope"])
def test_dropout_of_modified_scores_is_the_same_in_both_passes(name, monkeypatch):
    monkeypatch.setattr("kerple.attention.backends.chunk_plan.MODIFY_MIN_ROWS", 2)
    monkeypatch.setattr("kerple.attention.backends.chunk_plan.MODIFY_MAX_ROWS", 2)
    method = make_method(name).double()

    def with_fixed_seed(*leaves):
        torch.manual_seed(3)
        return attended("chunked", method, *leaves, 5, FULL, dropout_p=0.4)

    assert torch.autograd.gradcheck(
        with_fixed_seed, random_states(3, 4, 6, batch=1), fast_mode=True
    )


def test_modified_scores_of_an_empty_batch():
    states = torch.randn(0, 3, 5, 4)
    assert Attention(make_method("fire"), "chunked")(states, states, states).shape == states.shape


@pytest.mark.parametrize("name", ["dape_v2_kerple", "cope"])
def test_memory_of_modified_scores_is_linear_in_the_length(name, monkeypatch):
    """48 queries and 16,384 keys: chunks have 16 queries, and at most 36 values (hidden units,
    products) per pair.
    """
    monkeypatch.setattr("kerple.attention.backends.chunk_plan.MODIFY_CPU_BYTES", 1)
    method = make_method(name)
    query, key, value = (torch.randn(1, 3, length, 4) for length in (48, 16_384, 16_384))
    with torch.no_grad():
        tables = position_tables(method, 16_384, "cpu")
        with LargestStorage() as largest:
            Attention(method)(query, key, value, tables=tables)
    assert largest.elements <= 36 * 16 * 16_384


@pytest.mark.parametrize(("memory_gib", "mib"), [(80, 512), (24, 512), (12, 256)])
def test_chunks_of_modified_scores_fit_the_gpu(memory_gib, mib, monkeypatch):
    properties = SimpleNamespace(total_memory=memory_gib * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert modify_budget(torch.device("cuda")) == mib * 2**20
    sizes = {"heads": 4, "kv_heads": 4, "head_size": 64, "dtype": torch.bfloat16}
    on_gpu = ExpectedCalls(method=make_method("fire"), device=torch.device("cuda"), **sizes)
    choice = describe_choice(on_gpu)
    assert choice.endswith(f"modify_scores), in chunks of at most {mib} MiB of scores on this GPU")
    assert "MiB" not in describe_choice(replace(on_gpu, device=torch.device("cpu")))


def training_memory(length: int, backend: str) -> int:
    """The peak number of bytes that forward and backward pass allocate."""
    method = build("dape_kerple", SHAPE)
    leaves = [torch.randn(1, 3, length, 4, requires_grad=True) for _ in range(3)]
    tables = position_tables(method, length, "cpu")
    return peak_memory(lambda: Attention(method, backend)(*leaves, tables=tables).sum().backward())


def test_memory_of_modified_scores_in_training(monkeypatch):
    """Twice the length: the reference needs four times the memory, the chunked backend twice."""
    monkeypatch.setattr("kerple.attention.backends.chunk_plan.MODIFY_CPU_BYTES", 1)
    reference = [training_memory(length, "reference") for length in (128, 256)]
    in_chunks = [training_memory(length, "chunked") for length in (256, 512)]
    assert reference[1] > 3.5 * reference[0]
    assert in_chunks[1] < 2.5 * in_chunks[0]
    assert 5 * in_chunks[0] < reference[1]
