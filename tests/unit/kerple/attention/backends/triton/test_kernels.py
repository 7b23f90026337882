"""The Triton kernels against the reference in float64, for all kinds of tiles: on a GPU, or in
Triton's interpreter.

The interpreter computes matrix products of bfloat16 as integers, so half precision is tested with
float16 there.
"""

import pytest
import torch

pytest.importorskip("triton")

from kerple.attention import Documents, attend
from kerple.attention.backends.triton import kernels, launch
from kerple.attention.backends.triton.launch import document_tiles
from kerple.attention.backends.triton.tiles import Tile, Tiles
from tests.support.attention import (
    attend_with,
    float64_arguments,
    random_attend_arguments,
    run_attend,
    run_repeated,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF_DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]


def assert_same_as_reference(
    *sizes: int, tolerance: float = 2e-6, scale: float | None = None, **options
) -> None:
    arguments = random_attend_arguments(*sizes, **options, device=DEVICE)
    expected = run_repeated(float64_arguments(arguments), scale=scale)
    for actual, expected_tensor in zip(
        run_attend("fused", arguments, scale=scale), expected, strict=True
    ):
        assert actual.shape == expected_tensor.shape
        assert (
            actual.double() - expected_tensor
        ).norm() <= tolerance * expected_tensor.norm() + 1e-5


@pytest.mark.parametrize(
    ("bias", "weight", "window"),
    [(False, False, None), (True, False, 5), (False, True, None), (True, True, 5)],
)
def test_values_and_gradients(bias, weight, window):
    assert_same_as_reference(2, 2, 37, 37, 16, bias=bias, weight=weight, window=window)


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        (1, {"bias": False, "weight": False}),
        (2, {"kv_heads": 1, "window": 30}),
        (1, {"bias": False, "weight": False, "decay": True}),
    ],
)
@pytest.mark.quick(1)
def test_documents(heads, options, monkeypatch):
    """In one launch of each kernel: of more than a tile, of one token, and with padding at the end
    of a row.
    """
    monkeypatch.setattr(launch, "TABLE_PROGRAMS", 1)
    ids = torch.tensor([[0] * 129 + [2], [5] * 20 + [-1] * 110], device=DEVICE)
    arguments = random_attend_arguments(2, heads, 130, 130, 16, **options, device=DEVICE)
    documents = Documents(ids)
    actual = run_attend("fused", arguments, document_ids=ids)
    assert torch.equal(
        document_tiles(documents).tiles[0].cpu(),
        torch.tensor([0, 0, 129, 0, 128], dtype=torch.int32),
    )
    expected = run_repeated(float64_arguments(arguments), document_ids=ids)
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        assert (tensor.double() - expected_tensor).norm() <= 2e-6 * expected_tensor.norm() + 1e-5


@pytest.mark.parametrize("scale", [1e-6, 3.0])
def test_any_scale(scale):
    assert_same_as_reference(1, 1, 30, 37, 16, bias=False, weight=False, window=20, scale=scale)


@pytest.mark.parametrize(
    ("s", "t", "window"),
    [
        (1, 1, None),
        (9, 70, None),  # queries are the last positions
        (40, 97, 33),  # a window that ends inside tiles
        (33, 65, 1),  # each query attends to itself
        (64, 64, 64),  # a window as large as the number of keys
    ],
)
def test_any_length_and_window(s, t, window):
    assert_same_as_reference(1, 1, s, t, 16, window=window)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "window"), [(513, 200), (2048, None)])
def test_long_sequences(length, window, monkeypatch):
    queries = length
    if DEVICE == "cpu":  # fewer and larger tiles for the interpreter, and only the last queries
        monkeypatch.setattr(
            launch, "tiles_for", lambda *_, **__: Tiles(*[Tile(128, 128, 4, 1)] * 4, kib=0)
        )
        queries = 257
    assert_same_as_reference(1, 1, queries, length, 16, window=window, tolerance=1e-5)


@pytest.mark.parametrize("tile", [Tile(64, 16, 4, 1), Tile(16, 32, 4, 1)])
@pytest.mark.quick(1)
def test_results_do_not_depend_on_tiles(tile, monkeypatch):
    square = Tile(16, 16, 4, 1)
    monkeypatch.setattr(
        launch, "tiles_for", lambda *_, **__: Tiles(tile, tile, tile, square, kib=0)
    )
    # One head at a time, and the tiles of a block distance in several parts.
    monkeypatch.setattr(launch, "TILES_BYTES", 1)
    monkeypatch.setattr(launch, "TABLE_PROGRAMS", 40)
    assert_same_as_reference(2, 2, 24, 34, 16, window=20, kv_heads=1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "s", "t", "window", "tables"),
    [(4, 2, 37, 37, None, True), (3, 1, 20, 37, 9, True), (2, 1, 1, 37, None, False)],
)
@pytest.mark.quick(2)
def test_grouped_queries(heads, kv_heads, s, t, window, tables):
    """Several query heads share a key/value head, whose gradients are sums over them."""
    assert_same_as_reference(
        1, heads, s, t, 16, bias=tables, weight=tables, window=window, kv_heads=kv_heads
    )


@pytest.mark.parametrize("size", [24, 80])
def test_head_sizes_that_are_not_a_power_of_two(size):
    assert_same_as_reference(1, 1, 33, 40, size)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 1, 37, 37, 16), {}),
        ((1, 4, 40, 140, 16), {"window": 33, "kv_heads": 2}),
    ],
)
def test_decay(sizes, options):
    """In float64, the reference loses nothing by the prefix sums of about -4,000; in float32, it
    would lose 1e-4.
    """
    assert_same_as_reference(*sizes, **{"bias": False, "weight": False, "decay": True, **options})


def test_decay_in_float32():
    """The sums of more than one block of tokens."""
    arguments = random_attend_arguments(
        1, 2, 270, 270, 16, bias=False, weight=False, decay=True, device=DEVICE
    )
    sums = (arguments["decay_sums"].detach() + 4000).float()
    expected = attend_with(**{**arguments, "decay_sums": sums.double()}, backend="reference")
    torch.testing.assert_close(
        attend_with(**{**arguments, "decay_sums": sums}, backend="fused"), expected
    )


@pytest.mark.parametrize(
    ("length", "block"), [(140, None), pytest.param(390, 130, marks=pytest.mark.slow)]
)
def test_decay_sums_of_any_memory_order(length, block):
    """Those `[b, t, h]` in memory, and overlapping ones of blocks; with more than
    DECAY_BLOCK keys.
    """
    arguments = random_attend_arguments(
        1, 2, length, length, 16, bias=False, weight=False, decay=True, device=DEVICE
    )
    arguments["decay_sums"] = arguments["decay_sums"].detach().mT.contiguous().mT.requires_grad_()
    expected = run_attend("reference", float64_arguments(arguments), block=block)
    for actual, expected_tensor in zip(
        run_attend("fused", arguments, block=block), expected, strict=True
    ):
        torch.testing.assert_close(actual.double(), expected_tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_half_precision(dtype, decay):
    """Products of half-precision inputs are summed in float32; the gradients of tables and decays
    are never rounded.
    """
    tolerance = 1e-3 if dtype == torch.float16 else 1e-2
    weight = not decay
    assert_same_as_reference(
        1, 2, 70, 100, 32, weight=weight, decay=decay, window=80, dtype=dtype, tolerance=tolerance
    )
    arguments = random_attend_arguments(1, 1, 20, 20, 32, dtype=dtype, device=DEVICE)
    assert run_attend("fused", arguments)[-1].dtype == torch.float32


def test_the_interpreter_is_required_on_a_cpu(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(NotImplementedError, match="runs on a GPU, not on cpu"):
        attend(*[torch.randn(1, 1, 4, 8)] * 3, backend="fused")


def test_queries_whose_biases_are_all_infinite():
    arguments = random_attend_arguments(1, 2, 20, 20, 16, weight=False, device=DEVICE)
    del arguments["weight_table"]
    with torch.no_grad():
        arguments["bias_table"][0] = float("-inf")
    context, *grads = run_attend("fused", arguments)
    assert not context[0, 0].any()
    assert context[0, 1].abs().min() > 0
    assert all(grad.isfinite().all() for grad in grads)
