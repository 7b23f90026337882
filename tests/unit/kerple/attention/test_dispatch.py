"""Which backend runs, which calls are rejected, and calls that consist of several calls."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from kerple.attention import (
    Attention,
    AttentionCall,
    AttentionMode,
    Documents,
    PositionTables,
    Requirements,
    Span,
    attend,
    attend_in_mode,
    backend_names,
    check_backend,
    dispatch,
    position_tables,
    runs_fused,
    self_check,
)
from kerple.attention.backends import chunk_plan, sdpa
from kerple.attention.backends.triton import launch
from kerple.attention.backends.triton.tiles import Tile, Tiles
from kerple.positional import ModelShape, PositionalMethod, XPos, build
from kerple.positional.wrappers import _sample
from tests.support.attention import (
    DecayingXPos,
    attend_arguments,
    attend_with,
    attended,
    run_attend,
    upstream_gradient,
)
from tests.support.methods import non_finite_gradients

SHAPE = ModelShape(num_heads=2, head_size=4, hidden_size=8, num_layers=1, max_positions=16)


@pytest.fixture
def calls(monkeypatch):
    """(backend, shape of query, shape of key) of each call that a backend ran."""
    calls = []
    for name, backend in dispatch.BACKENDS.items():

        def run(call, backend=backend):
            calls.append((backend.name, tuple(call.query.shape), tuple(call.key.shape)))
            return backend.run(call)

        monkeypatch.setitem(dispatch.BACKENDS, name, replace(backend, run=run))
    return calls


@pytest.fixture
def fused_available(monkeypatch):
    """Act as if Triton could run everywhere."""
    monkeypatch.setattr(launch, "_load_kernels", lambda: ModuleType("kernels"))
    available = replace(dispatch.BACKENDS["fused"], unavailable_reason=lambda requirements: None)
    monkeypatch.setitem(dispatch.BACKENDS, "fused", available)


def random_states(s: int = 6, t: int = 6) -> list[torch.Tensor]:
    return [torch.randn(1, 2, length, 4) for length in (s, t, t)]


def test_auto_chooses_the_fastest_backend_for_each_call_on_a_cpu(calls, fused_available):
    plain = Attention(build("rotary", SHAPE))
    plain(*random_states())
    plain(*random_states(3, 6))
    plain(*random_states(), window=2)
    method = build("kerple_log", SHAPE)
    Attention(method)(*random_states())
    assert [backend for backend, *_ in calls] == ["sdpa", "chunked", "chunked", "chunked"]


@pytest.mark.parametrize(
    "options", [{"causal": False}, {"key_mask": torch.ones(1, 6, dtype=torch.bool)}]
)
def test_calls_that_fused_does_not_support(calls, fused_available, options, monkeypatch):
    monkeypatch.setattr(
        dispatch, "fused_is_fastest", lambda requirements, q_len: fused_supports(requirements)
    )

    def fused_supports(requirements):
        return dispatch.unsupported_reason("fused", requirements) is None

    states = random_states()
    with pytest.raises(
        NotImplementedError, match=r"'fused' .*auto.*reference, sdpa, chunked, flex"
    ):
        attend(*states, backend="fused", **options)
    attend(*states, bias_table=torch.zeros(2, 6), **options)
    attend(*states, **options)
    attend(*states, window=2, **options)
    assert [backend for backend, *_ in calls] == ["chunked", "sdpa", "chunked"]


def test_auto_uses_the_fused_kernels_where_they_are_faster(fused_available):
    """Not for a single query, nor for calls that exceed the limits of the kernels."""
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    method, plain = build("kerple_log", SHAPE), build("rotary", SHAPE)
    shapes = {
        (4, 8, 2, 64): True,
        (4, 8, 1, 64): False,
        (4, 8, 2, 136): False,
        (8192, 8, 2, 64): False,
    }
    for shape, expected in shapes.items():
        assert runs_fused(method, "auto", on_gpu, shape) == expected
        assert not runs_fused(method, "auto", torch.zeros(0).bfloat16(), shape)
    assert runs_fused(plain, "auto", on_gpu, (4, 8, 2, 64))
    assert not runs_fused(plain, "auto", on_gpu, (4, 8, 2, 64), plain=True)
    # Plain calls too, if the method changes the scores.
    for name in ("kerple_log", "kerple_power__ap", "forgetting"):
        assert runs_fused(build(name, SHAPE), "auto", on_gpu, (4, 8, 2, 64), plain=True)


@pytest.mark.parametrize(
    ("ids", "s", "span", "expected"),
    [
        ([0, 0, 0, 1, 1, 1], 6, Span(), "fused"),
        ([0, 0, 0, 1, 1, 1], 6, Span(window=2), "fused"),
        ([0, 0, 0, 1, 1, 1], 6, Span(block=2), "sdpa"),
        ([0, 0, 0, 1, 1, 1], 3, Span(), "sdpa"),
        ([0, 1, 1, 1, 0, 0], 6, Span(), "sdpa"),
    ],
)
def test_auto_packs_documents_that_are_ranges(fused_available, ids, s, span, expected):
    """For the fused kernels, with a query for each key."""
    query, key, value = torch.randn(3, 1, 2, 6, 64)
    documents = Documents(torch.tensor([ids]))
    call = AttentionCall(
        query=query[:, :, 6 - s :], key=key, value=value, scale=1.0, span=span, documents=documents
    )
    requirements = replace(Requirements.of_call(call), device=torch.device("cuda"))
    assert dispatch.choose(call, requirements, "auto") == expected


def test_a_choice_is_made_once_for_each_kind_of_call(calls, monkeypatch):
    """Until a kernel is rejected."""
    choices = []
    choose = dispatch.choose
    monkeypatch.setattr(
        dispatch, "choose", lambda call, *rest: choices.append(call.q_len) or choose(call, *rest)
    )
    attention = Attention(build("kerple_log", SHAPE))
    for s in (6, 6, 3, 6):
        attention(*random_states(s, 6))
    with torch.no_grad():
        attention(*random_states())
    assert choices == [6, 3, 6]  # without gradients, another kernel may run
    monkeypatch.setattr(self_check, "_failures", {(torch.float32, 4): "wrong"})
    attention(*random_states())
    assert choices == [6, 3, 6, 6]
    assert [backend for backend, *_ in calls] == ["chunked"] * 6


def test_later_calls_are_validated():
    """Although the backend of their kind has been chosen."""
    method = build("kerple_log", SHAPE)
    attention, states = Attention(method), random_states(6, 6)
    batch = len(states[0])
    tables = position_tables(method, 6, "cpu", with_jacobians=True)
    mask = torch.ones(batch, 6, dtype=torch.bool)
    attention(*states, tables=tables)
    attention(*states, key_mask=mask)
    attention(*states, documents=Documents(mask.long()))
    short = replace(tables.bias_jacobian, directions=tables.bias_jacobian.directions[..., :5])
    for arguments, name in (
        ({"tables": replace(tables, bias_jacobian=short)}, "bias_jacobian"),
        ({"tables": replace(tables, bias=tables.bias[:, :5])}, "bias_table"),
        ({"key_mask": mask[:, :5]}, "key_mask"),
        ({"key_mask": mask.long()}, "key_mask"),
        ({"documents": Documents(torch.zeros(batch, 7, dtype=torch.long))}, "document_ids"),
    ):
        with pytest.raises(ValueError, match=name):
            attention(*states, **arguments)


@pytest.mark.parametrize(
    ("backend", "method", "documents"),
    [("auto", "kerple_log", False), ("chunked", "kerple_power_ap_ap", True)],
)
@pytest.mark.quick(1)
def test_attend_can_be_compiled_into_one_graph(backend, method, documents):
    """With all gradients."""
    torch._dynamo.reset()
    arguments = attend_arguments(method, batch=2, heads=2, s=40, t=40, size=4)
    ids = torch.arange(40).expand(2, -1) // 15 if documents else None
    expected = run_attend("reference", arguments, document_ids=ids)

    def run(*tensors):
        return attend(
            **dict(zip(arguments, tensors, strict=True)), backend=backend, document_ids=ids
        )

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    result = compiled(*arguments.values())
    leaves = [leaf for leaf in arguments.values() if isinstance(leaf, torch.Tensor)]
    actual = [result, *torch.autograd.grad(result, leaves, upstream_gradient(result))]
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", ["rotary", "kerple_log_rotary", "xpos"])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_rotations_can_be_compiled(method, kv_heads):
    """Into one graph, also with grouped queries."""
    torch._dynamo.reset()
    attention = Attention(build(method, SHAPE))
    states = []
    for heads in (2, kv_heads, kv_heads):
        states.append(torch.randn(1, heads, 20, SHAPE.head_size, requires_grad=True))
    results = []
    for called in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        context = called(*states)
        results.append([context, *torch.autograd.grad(context.square().sum(), states)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "method", "options", "masked"),
    [
        ("reference", "kerple_log", {}, False),
        ("sdpa", "kerple_log", {"window": 9}, True),
        ("sdpa", "kerple_log_rotary", {"causal": False}, False),
        ("chunked", "kerple_log", {}, False),
        ("chunked", "kerple_log", {"causal": False}, True),
        ("fused", "kerple_log", {"window": 9}, False),
        # A method that computes the scores.
        ("auto", "transformer_xl", {"causal": False}, True),
        pytest.param("reference", "kerple_log_rotary", {"window": 9}, True, marks=pytest.mark.ci),
        pytest.param("chunked", "kerple_log_rotary", {"window": 9}, False, marks=pytest.mark.ci),
        pytest.param("fused", "kerple_log_rotary", {}, False, marks=pytest.mark.ci),
        pytest.param("auto", "dape_rotary", {"causal": False}, False, marks=pytest.mark.ci),
        pytest.param("auto", "dape_v2_kerple", {"window": 9}, False, marks=pytest.mark.ci),
        pytest.param("auto", "fire", {}, True, marks=pytest.mark.ci),
        pytest.param("auto", "stick_breaking", {}, False, marks=pytest.mark.ci),
        pytest.param("auto", "transformer_xl", {"window": 9}, False, marks=pytest.mark.ci),
    ],
)
def test_one_graph_serves_all_lengths(backend, method, options, masked):
    """PyTorch's own attention needs two for 20 lengths: one for the first, and one for
    all others.
    """
    torch._dynamo.reset()
    graphs = CompileCounter()
    attention = Attention(build(method, SHAPE), backend)

    def run(query, key, value, key_mask):
        return attention(query, key, value, key_mask=key_mask, **options)

    compiled = torch.compile(run, fullgraph=True, backend=graphs)
    for length in range(10, 50, 2):
        states = [torch.randn(1, 2, length, SHAPE.head_size, requires_grad=True) for _ in range(3)]
        key_mask = None
        if masked:
            key_mask = torch.rand(1, length) < 0.8
        context = compiled(*states, key_mask)
    assert graphs.frame_count <= 3
    expected = attention(*states, key_mask=key_mask, **options)
    torch.testing.assert_close(context, expected)
    torch.testing.assert_close(
        torch.autograd.grad(context.square().sum(), states),
        torch.autograd.grad(expected.square().sum(), states),
        rtol=1e-5,
        atol=1e-6,
    )


def test_compiled_chunks(monkeypatch):
    """Few graphs for many numbers of chunks, which cover every query once."""
    torch._dynamo.reset()
    monkeypatch.setattr(chunk_plan, "MODIFY_MAX_ROWS", 16)
    graphs = CompileCounter()
    attention = Attention(build("kerple_log", SHAPE), "chunked")
    compiled = torch.compile(
        lambda *states: attention(*states, causal=False), fullgraph=True, backend=graphs
    )
    for length in (15, 33, 47, 65, 66, 97, 127, 113):
        states = [torch.randn(1, 2, length, SHAPE.head_size) for _ in range(3)]
        expected = attention(*states, causal=False)
        torch.testing.assert_close(compiled(*states), expected)
    assert graphs.frame_count <= 5


def test_unknown_backends_are_rejected():
    assert backend_names() == ("auto", "reference", "sdpa", "chunked", "flex", "fused")
    with pytest.raises(ValueError, match="attention-backend 'flash'"):
        Attention(backend="flash")
    for ids in (None, torch.tensor([[0, 0, 0, 1, 1, 1]])):
        with pytest.raises(ValueError, match="attention-backend 'flash'"):
            attend(*random_states(), document_ids=ids, backend="flash")


def test_backends_that_do_not_support_a_method_are_rejected():
    for name in ("kerple_power__ap", "dape_kerple"):
        with pytest.raises(NotImplementedError, match=r"'sdpa' .*auto.*reference, chunked"):
            Attention(build(name, SHAPE), "sdpa")
    with pytest.raises(NotImplementedError, match="'sdpa'"):
        attend(*random_states(), weight_table=torch.ones(2, 6), backend="sdpa")
    check_backend("auto", Requirements(weight=True, modify_scores=True, dropout=True))


def test_a_configuration_is_checked_without_triton(monkeypatch):
    """A checkpoint that was trained with fused can be loaded on a machine without Triton."""
    monkeypatch.setattr(launch, "_load_kernels", lambda: None)
    Attention(build("alibi", SHAPE), "fused")
    with pytest.raises(NotImplementedError, match="'fused'"):
        attend(*random_states(), backend="fused")


class Both(PositionalMethod):
    def modify_scores(self, chunk):
        return chunk.scores

    def bias(self, distance):
        return distance


class Scaled(XPos):
    def modify_scores(self, chunk):
        return chunk.scores


class Weighted(DecayingXPos):
    def weight(self, distance):
        return distance


SUMS = torch.zeros(1, 2, 6)


def attended_by(method, **arguments):
    return lambda: Attention(method)(*random_states(6, 6), **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Attention(Both()), "Both .*modify_scores"),
        (lambda: Attention(Scaled(4)), "Scaled .*modify_scores"),
        (lambda: Attention(Weighted(4)), "Weighted .*decay.*weight"),
        (
            attended_by(build("kerple_log", SHAPE), tables=PositionTables()),
            "bias.*KerpleLog needs one",
        ),
        (
            attended_by(build("rotary", SHAPE), tables=PositionTables(bias=torch.zeros(2, 6))),
            "bias.*Rotary has none",
        ),
        (
            attended_by(build("dape_kerple", SHAPE), tables=PositionTables(), window=4),
            r"position_tables\(method, 4, device\)",
        ),
        (
            attended_by(
                build("dape_kerple", SHAPE), tables=PositionTables(scores=torch.zeros(2, 5))
            ),
            r"\[2, 5\] .* 6",
        ),
        (attended_by(DecayingXPos(4)), "decay_sums"),
        (attended_by(build("rotary", SHAPE), decay_sums=SUMS), "Rotary has no decay"),
        (
            lambda: attend_with(*random_states(3, 6), decay_sums=SUMS[..., :3]),
            r"decay_sums \[1, 2, 3\] must be \[1, 2, 6\]",
        ),
        (
            lambda: attend_with(
                *random_states(3, 6), decay_sums=SUMS, weight_table=torch.ones(2, 6)
            ),
            "decay_sums.*weight_table.*modify_scores",
        ),
    ],
)
def test_methods_and_tables_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("s", [1, 100])
def test_autocast_does_not_change_scores(backend, s):
    arguments = attend_arguments("kerple_power_ap_ap", 2, 2, s, 100, 16, dtype=torch.float32)
    expected = run_attend(backend, arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = attend(backend=backend, **arguments)
    assert torch.equal(result, expected[0])
    # The chunked backend recomputes scores in its backward pass, which may run inside autocast as
    # well.
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backend == "chunked" and s > 1):
        grads = run_attend(backend, arguments)[1:]
    for grad, expected_grad in zip(grads, expected[1:], strict=True):
        assert torch.equal(grad, expected_grad)


def test_complete_blocks_are_one_call(calls):
    """61 complete blocks of two samples go through the backend at once, with 2 B keys each."""
    states = torch.randn(2, 3, 1000, 4)
    attend(states[:, :, 5:], states, states, block=16, backend="chunked")
    assert calls == [
        ("chunked", (2, 3, 11, 4), (2, 3, 16, 4)),
        ("chunked", (122, 3, 16, 4), (122, 3, 32, 4)),
        ("chunked", (2, 3, 8, 4), (2, 3, 24, 4)),
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [("dape_v2_kerple", {}), ("stick_breaking", {}), ("xpos", {}), ("fire", {"random_range": 20})],
)
def test_positions_are_on_the_cpu_whatever_the_default_device(name, options):
    method = build(name, SHAPE, **options).eval()
    states, mode = random_states(), AttentionMode(Span(window=3, sinks=1))

    def compute():
        dropped = Attention(method, "chunked")(*states, dropout_p=0.5)
        assert dropped.device.type == "cpu"
        return Attention(method)(*states), attend_in_mode(*states, method, mode)

    expected = compute()
    _sample.cache_clear()
    with torch.device("meta"):
        actual = compute()
    for context, expected_context in zip(actual, expected, strict=True):
        assert torch.equal(context, expected_context)


def test_scaled_queries_and_keys_are_computed_in_segments(calls):
    method = XPos(4, scale_base=1.0)
    Attention(method, "sdpa")(*random_states(6, 10))
    assert method.segment == 4
    assert calls == [("sdpa", (1, 2, 4, 4), (1, 2, 8, 4)), ("sdpa", (1, 2, 2, 4), (1, 2, 10, 4))]


@pytest.mark.parametrize("method", ["none", "kerple_power_ap_ap"])
def test_scale_replaces_the_root_of_the_head_size(method):
    arguments = attend_arguments(method, 1, 2, 20, 20, 4)
    scaled = {**arguments, "query": (arguments["query"] * 0.3 * 2).detach()}
    expected = attend(backend="reference", **scaled)
    for backend in (
        ("reference", "chunked", "sdpa") if method == "none" else ("reference", "chunked")
    ):
        actual = attend(backend=backend, scale=0.3, **arguments)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("backend", "method"),
    [
        *(("sdpa", "alibi"), ("chunked", "alibi"), ("chunked", "fire")),
        pytest.param("fused", "alibi", marks=pytest.mark.ci),
    ],
)
@pytest.mark.filterwarnings("ignore:All-NaN")
def test_a_window_s_cost_does_not_grow_with_the_length(backend, method, monkeypatch):
    """Neither pass reads what is outside of a window (8) and the chunk or tile (32) that it is in:
    nan at both ends of the sequence does not reach the middle.
    """
    monkeypatch.setattr(
        launch, "tiles_for", lambda *_, **__: Tiles(*[Tile(32, 32, 4, 1)] * 4, kib=0)
    )
    monkeypatch.setattr(sdpa, "MASK_ROWS", 32)
    monkeypatch.setattr("kerple.attention.backends.chunk_plan.MODIFY_MAX_ROWS", 32)
    monkeypatch.setattr(chunk_plan, "MIN_ROWS", 32)
    monkeypatch.setattr(chunk_plan, "MAX_ROWS", 32)
    monkeypatch.setattr(sdpa, "KERNEL_ROWS", 32)
    positional = build(method, ModelShape(2, 16, 32, 1, 160))
    states = [torch.randn(1, heads, 160, 16) for heads in (2, 1, 1)]
    upstream, middle = torch.randn(1, 2, 160, 16), slice(72, 88)
    results = []
    for poison in (0.0, float("nan")):
        leaves = [state.clone().requires_grad_() for state in states]
        with torch.no_grad():
            for tensor in (*leaves, upstream):
                tensor[:, :, :32] += poison
                tensor[:, :, 128:] += poison
        context = attended(backend, positional, *leaves, 160, Span(window=8))
        grads = torch.autograd.grad(context, leaves, upstream)
        results.append([tensor[:, :, middle] for tensor in (context, *grads)])
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kerple_log", {"random_range": 64}),
        ("fire", {"random_range": 64}),
        ("forgetting", {}),
        ("learned", {}),
    ],
)
def test_random_positions_and_heads_smaller_than_the_hidden_size(name, options):
    shape = ModelShape(num_heads=2, head_size=4, hidden_size=12, num_layers=1, max_positions=10)
    method = build(name, shape, **options)
    method.reset_parameters()
    assert non_finite_gradients(method, shape) == []


def test_a_limited_number_of_choices_is_remembered(monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_KINDS", 2)
    attention = dispatch.Dispatcher()
    for length in (3, 4, 5, 3):
        query, key, value = torch.randn(3, 1, 2, length, 4)
        attention(AttentionCall(query=query, key=key, value=value, scale=1.0))
        assert len(attention._chosen) <= 2
