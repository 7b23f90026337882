"""The Triton kernels against the materialised reference in float64: on a GPU, or in Triton's interpreter without one.

The interpreter takes bfloat16 for whole numbers in matrix products, so half precision is float16 there.
"""

import pytest
import torch

from kerple.attention import attend, jacobians, tables
from kerple.attention.backends.triton import launch as fused
from kerple.attention.backends.triton.launch import Tile, Tiles, tiles_for
from kerple.positional import ModelShape, build, primary_names
from kerple.positional.base import TableJacobian

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
SHAPE = ModelShape(num_heads=2, head_size=16, hidden_size=32, num_layers=1, max_positions=40)
BUILT = {name: build(name, SHAPE) for name in primary_names()}
TABLE_METHODS = [name for name, method in BUILT.items() if method.has_bias or method.has_weight]


def case(batch, heads, s, t, size, *, bias=True, weight=True, window=None, dtype=torch.float32) -> dict:
    """Arguments of `attend`; leaves that need gradients, laid out in memory as a model makes them."""
    generator = torch.Generator().manual_seed(0)
    max_kv_len = t if window is None else min(t, window)

    def states(length: int) -> torch.Tensor:
        drawn = torch.randn(batch, length, heads, size, generator=generator)
        return drawn.to(DEVICE, dtype).transpose(1, 2).requires_grad_()

    def table(wanted: bool) -> torch.Tensor | None:
        drawn = torch.rand(heads, max_kv_len, generator=generator)
        return (drawn * 2 - 1).to(DEVICE).requires_grad_() if wanted else None

    query, key, value = (states(length) for length in (s, t, t))
    return {
        "query": query,
        "key": key,
        "value": value,
        "bias_table": table(bias),
        "weight_table": table(weight),
        "window": window,
    }


def run(backend: str, arguments: dict) -> list[torch.Tensor]:
    """The result, and the gradients of all leaves for an upstream gradient that is always the same."""
    result = attend(backend=backend, **arguments)
    upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(9)).to(result)
    leaves = [leaf for leaf in arguments.values() if isinstance(leaf, torch.Tensor)]
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream)]


def exactly(arguments: dict) -> list[torch.Tensor]:
    """The same in float64, materialised."""
    exact = {
        name: leaf.detach().double().requires_grad_() if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in arguments.items()
    }
    return run("reference", exact)


def assert_exact(arguments: dict, tolerance: float = 2e-6) -> None:
    for found, wanted in zip(run("fused", arguments), exactly(arguments), strict=True):
        assert found.shape == wanted.shape
        assert (found.double() - wanted).norm() <= tolerance * wanted.norm() + 1e-5


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("bias", "weight"), [(False, False), (True, False), (False, True), (True, True)])
def test_values_and_gradients(bias, weight, window):
    assert_exact(case(2, 2, 37, 37, 16, bias=bias, weight=weight, window=window))


@pytest.mark.parametrize("scale", [0.0, -0.5, 2.0])
def test_any_scale(scale):
    assert_exact(case(1, 1, 30, 37, 16, bias=False, weight=False, window=20) | {"scale": scale})


@pytest.mark.parametrize("method", TABLE_METHODS)
def test_every_method_of_the_distance(method):
    """Through to the method's own parameters: by the tables' gradients, and by jacobians where there are some."""
    # T5's last bucket begins at distance 113.
    length, window = (150, 140) if method == "rpe" else (40, 30)
    arguments = case(1, 2, length, length, 16, bias=False, weight=False, window=window)
    torch.manual_seed(0)
    positional = build(method, SHAPE).to(DEVICE)
    with_jacobians = dict(zip(("bias_jacobian", "weight_jacobian"), jacobians(positional, window, DEVICE), strict=True))
    ways = [("reference", {}), ("fused", {})]
    if any(with_jacobians.values()):
        ways.append(("fused", with_jacobians))
    gradients = []
    for backend, extra in ways:
        arguments["bias_table"], arguments["weight_table"] = tables(positional, window, DEVICE)
        positional.zero_grad()
        attend(backend=backend, **arguments, **extra).square().sum().backward()
        gradients.append([parameter.grad for parameter in positional.parameters()])
    for found in gradients[1:]:
        for mine, wanted in zip(found, gradients[0], strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("of_bias", "of_weight", "window"), [(1, 0, None), (0, 2, 30), (2, 2, None), (3, 1, 50)])
def test_gradients_along_directions(of_bias, of_weight, window):
    """Of numbers on which tables depend as given: of one, of several, of bias and weight together."""
    heads, length = 2, 70
    arguments = case(2, heads, length, length, 16, bias=of_bias > 0, weight=of_weight > 0, window=window)
    max_kv_len = length if window is None else window
    generator = torch.Generator().manual_seed(1)
    gradients = []
    # Longer than they need to be, and not alike.
    directions = {
        "bias": torch.randn(heads, of_bias, max_kv_len + 5, generator=generator).to(DEVICE),
        "weight": torch.randn(heads, of_weight, max_kv_len + 3, generator=generator).to(DEVICE),
    }
    for backend in ("fused", "fused", "reference"):
        numbers = {
            name: torch.ones(each.shape[:2], device=DEVICE).requires_grad_() for name, each in directions.items()
        }
        changed = dict(arguments)
        for name, each in directions.items():
            if each.shape[1]:
                changes = (numbers[name] - 1)[:, :, None] * each[..., :max_kv_len]
                changed[f"{name}_table"] = arguments[f"{name}_table"].detach() + changes.sum(1)
                changed[f"{name}_jacobian"] = TableJacobian(numbers[name], each)
        result = attend(backend=backend, **changed)
        leaves = [arguments["query"], *(one for name, one in numbers.items() if directions[name].shape[1])]
        upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(9)).to(result)
        gradients.append(torch.autograd.grad(result, leaves, upstream))
    for mine, again, wanted in zip(*gradients, strict=True):
        assert torch.equal(mine, again)
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_more_directions_than_it_adds_up_are_left_to_the_table():
    arguments = case(1, 2, 40, 40, 16, weight=False)
    numbers, directions = torch.ones(2, 5, device=DEVICE).requires_grad_(), torch.zeros(2, 5, 40, device=DEVICE)
    result = attend(backend="fused", **arguments, bias_jacobian=TableJacobian(numbers, directions))
    (found,) = torch.autograd.grad(result.square().sum(), arguments["bias_table"], retain_graph=True)
    assert found.abs().max() > 1e-3
    assert torch.autograd.grad(result.sum(), numbers, allow_unused=True) == (None,)


@pytest.mark.parametrize(
    ("s", "t", "window"),
    [
        (1, 1, None),
        (1, 70, None),
        (7, 7, None),
        (9, 70, None),  # queries that are the last of the positions
        (40, 97, 33),  # a window that ends within tiles
        (33, 65, 1),  # each query sees itself
        (64, 64, 64),  # a window as wide as the keys
        (128, 128, None),
    ],
)
def test_any_length_and_window(s, t, window):
    assert_exact(case(1, 1, s, t, 16, window=window))


@pytest.mark.parametrize(("length", "window"), [(513, None), (513, 200), (2048, None)])
def test_long_sequences(length, window, monkeypatch):
    queries = length
    if DEVICE == "cpu":  # fewer and larger steps for the interpreter, and of the longest the last queries alone
        monkeypatch.setattr(fused, "tiles_for", lambda *_, **__: Tiles(*[Tile(128, 128, 4, 1)] * 4))
        queries = min(length, 513)
    assert_exact(case(1, 1, queries, length, 16, window=window), tolerance=1e-5)


@pytest.mark.parametrize("tile", [Tile(16, 32, 4, 1), Tile(64, 16, 4, 1)])
def test_the_cut_changes_nothing(tile, monkeypatch):
    square = Tile(16, 16, 4, 1)
    monkeypatch.setattr(fused, "tiles_for", lambda *_, **__: Tiles(tile, tile, tile, square))
    # One head at a time, and tiles of a block distance in parts.
    monkeypatch.setattr(fused, "TILES_BYTES", 1)
    monkeypatch.setattr(fused, "TABLE_PROGRAMS", 40)
    assert_exact(case(2, 2, 24, 34, 16, window=20))


@pytest.mark.parametrize("size", [24, 48, 80])
def test_head_sizes_that_are_no_power_of_two(size):
    assert_exact(case(1, 1, 33, 40, size))


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision(dtype):
    """Products of half-precision states, summed in float32; the table's gradient is not rounded on its way."""
    arguments = case(1, 2, 70, 100, 32, window=80, dtype=dtype)
    assert_exact(arguments, tolerance=1e-3 if dtype == torch.float16 else 1e-2)
    assert run("fused", arguments)[-1].dtype == torch.float32


def test_a_second_run_gives_the_same_bits():
    arguments = case(2, 1, 40, 66, 16)
    for found, wanted in zip(run("fused", arguments), run("fused", arguments), strict=True):
        assert torch.equal(found, wanted)


def test_tiles_follow_from_dtype_and_head_size_alone():
    """All shapes of a model take their sums in the same tiles, which fit rows and margins."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    sides = [tiles_for(dtype, size, weight=weight) for dtype in dtypes for size in (8, 64, 128) for weight in (0, 1)]
    for tiles in sides:
        assert tiles.tables.queries == tiles.tables.keys
        for tile in vars(tiles).values():
            assert fused.ROWS % tile.queries == 0
            assert tile.queries + tile.keys <= fused._load_kernels().MARGIN


def test_states_of_one_projection_and_an_expanded_gradient():
    """As SelfAttention cuts them, without a copy; and a gradient whose strides are zero."""
    qkv = torch.randn(2, 40, 2, 48, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()
    found, expected = (
        torch.autograd.grad(
            attend(*(part.transpose(1, 2) for part in states.split(16, dim=3)), backend=backend).sum(), qkv
        )[0]
        for backend, states in (("fused", qkv), ("reference", qkv.double()))
    )
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-4, atol=1e-5)


def test_any_of_the_inputs_may_need_a_gradient_alone():
    arguments = case(1, 1, 20, 20, 16)
    expected = dict(zip(["result", *arguments], exactly(arguments), strict=False))
    for needed in ("query", "key", "bias_table", "weight_table"):
        leaves = {
            name: leaf.detach().requires_grad_(name == needed) if isinstance(leaf, torch.Tensor) else leaf
            for name, leaf in arguments.items()
        }
        result = attend(backend="fused", **leaves)
        result.backward(torch.randn(result.shape, generator=torch.Generator().manual_seed(9)).to(result))
        torch.testing.assert_close(leaves[needed].grad.double(), expected[needed], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"dropout_p": 0.1},
            "'fused' does not support attention dropout; use auto, or one of reference",
        ),
        ({"dtype": torch.float64}, "'fused' supports torch.float32, torch.bfloat16, torch.float16, not torch.float64"),
        ({"size": 136}, "'fused' supports head sizes up to 128, not 136"),
        ({"batch": 65_536}, "'fused' supports up to 65535 for batch size times heads, not 65536"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name(change, message):
    shape = (change.get("batch", 1), 1, 4, change.get("size", 8))
    states = [torch.randn(shape, dtype=change.get("dtype", torch.float32))] * 3
    with pytest.raises(NotImplementedError, match=message):
        attend(*states, backend="fused", dropout_p=change.get("dropout_p", 0.0))


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr(fused._load_kernels(), "INTERPRETED", False)
    with pytest.raises(NotImplementedError, match="runs on a GPU, not on cpu"):
        attend(*[torch.randn(1, 1, 4, 8)] * 3, backend="fused")
