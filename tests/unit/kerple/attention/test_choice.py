"""Which backend runs, and what is refused."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from kerple.attention import Attention, attend, backend_names, tables
from kerple.attention import dispatch as select
from kerple.attention.backends.triton import launch as fused
from kerple.positional import ModelShape, build

SHAPE = ModelShape(num_heads=2, head_size=4, hidden_size=8, num_layers=1, max_positions=16)


@pytest.fixture
def ran(monkeypatch):
    """The names of the backends that ran, in order."""
    names = []
    for name, backend in select.BACKENDS.items():

        def run(call, backend=backend):
            names.append(backend.name)
            return backend.run(call)

        monkeypatch.setitem(select.BACKENDS, name, replace(backend, run=run))
    return names


def states(s: int = 6, t: int = 6, heads: int = 2, size: int = 4) -> list[torch.Tensor]:
    return [torch.randn(1, heads, length, size) for length in (s, t, t)]


def test_auto_takes_the_fastest_for_each_call_and_says_so(ran, monkeypatch):
    available = replace(select.BACKENDS["fused"], unavailable_reason=lambda device: None)  # as on a GPU
    monkeypatch.setitem(select.BACKENDS, "fused", available)
    plain = Attention("auto", build("rotary", SHAPE))
    plain(*states())
    plain(*states(3, 6))
    plain(*states(), window=2)
    assert ran == ["sdpa", "chunked", "chunked"]
    assert (
        plain.choice("cpu")
        == "sdpa, and chunked for windows and for fewer queries than keys (auto: the fastest of each)"
    )
    assert plain.choice("cuda").startswith("sdpa, and fused for windows")

    ran.clear()
    method = build("kerple_log", SHAPE)
    biased = Attention("auto", method)
    biased(*states(), bias_table=tables(method, 6, "cpu")[0])
    assert ran == ["chunked"]
    assert biased.choice("cuda").startswith("fused (auto")
    assert biased.choice("cpu") == "chunked (auto: fastest on cpu for this method)"


@pytest.mark.parametrize("backend", ["reference", "sdpa", "chunked"])
def test_a_backend_asked_for_is_the_one_that_runs(ran, backend):
    method = build("alibi", SHAPE)
    attention = Attention(backend, method)
    attention(*states(), bias_table=tables(method, 6, "cpu")[0])
    assert ran == [backend]
    assert attention.choice("cpu") == f"{backend} (as configured)"


def test_a_backend_that_cannot_serve_is_refused_by_name():
    for method in ("kerple_power__ap", "kerple_power_ap_ap"):
        with pytest.raises(NotImplementedError, match="attention-backend 'sdpa' cannot multiply scores by a weight"):
            Attention("sdpa", build(method, SHAPE))
    with pytest.raises(NotImplementedError, match="use auto, or one of reference, chunked"):
        attend(*states(), weight_table=torch.ones(2, 6), backend="sdpa")


def test_an_unknown_backend_is_refused():
    assert backend_names() == ("auto", "reference", "sdpa", "chunked", "flex", "fused")
    with pytest.raises(
        ValueError, match="attention-backend 'flash' is not known; choose one of auto, reference, sdpa, chunked"
    ):
        Attention("flash")


def test_a_table_is_neither_forgotten_nor_made_up():
    with pytest.raises(ValueError, match="has bias: True, weight: False; but the tables passed are bias: False"):
        Attention("auto", build("kerple_log", SHAPE))(*states())
    with pytest.raises(ValueError, match="has bias: False, weight: False; but the tables passed are bias: True"):
        Attention("auto")(*states(), bias_table=torch.zeros(2, 6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"key": torch.randn(1, 2, 6, 5)},
            r"query \[1, 2, 6, 4\], key \[1, 2, 6, 5\] and value .* do not fit together",
        ),
        ({"key": torch.randn(1, 3, 6, 4), "value": torch.randn(1, 3, 6, 4)}, "do not fit together"),
        ({"value": torch.randn(1, 2, 5, 4)}, "do not fit together"),
        ({"query": torch.randn(1, 2, 7, 4)}, "7 queries for 6 keys"),
        ({"query": torch.randn(1, 2, 6, 4).bfloat16()}, "differ in dtype: torch.bfloat16, torch.float32"),
        ({"window": 0}, "window must be at least 1"),
        ({"dropout_p": 1.0}, r"dropout_p must be at least 0 and below 1; got 1.0"),
        ({"bias_table": torch.zeros(2, 5)}, r"bias_table \[2, 5\] must be \[2, at least 6\]"),
        ({"weight_table": torch.zeros(3, 6)}, r"weight_table \[3, 6\] must be \[2, at least 6\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    query, key, value = states()
    with pytest.raises(ValueError, match=message):
        attend(**{"query": query, "key": key, "value": value, **change})


def test_tables_cover_the_distances():
    bias, weight = tables(build("kerple_bias_wht", SHAPE), 5, "cpu")
    assert bias.shape == weight.shape == (2, 5)
    assert bias.dtype == weight.dtype == torch.float32
    assert (bias[:, 0] == 0).all()
    assert (weight[:, 0] == 1).all()
    assert tables(build("rotary", SHAPE), 5, "cpu") == (None, None)


def test_on_a_gpu_auto_takes_the_fused_kernels_where_they_serve():
    pass


def test_what_auto_gives_to_the_fused_kernels(monkeypatch):
    """Not a query alone, nor more samples than a GPU's grid holds: these stay with other backends."""
    monkeypatch.setattr(fused, "_load_kernels", lambda: ModuleType("kernels"))
    attention = Attention("auto", build("kerple_log", SHAPE))
    shapes = {(4, 8, 2, 64): True, (4, 8, 1, 64): False, (4, 8, 2, 136): False, (8192, 8, 2, 64): False}
    for shape, serves in shapes.items():
        assert attention.uses_jacobians(torch.device("cuda"), torch.bfloat16, shape) == serves
