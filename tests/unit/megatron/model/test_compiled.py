"""Compiled blocks: the losses and gradients of uncompiled ones, and no compilation in evaluation."""

import pytest
import torch

from kerple.attention import Documents
from megatron.model.compiled import _CompiledBlock, capture, compile_blocks, is_traceable
from megatron.model.gpt import GPT, TransformerBlock
from megatron.model.initialization import initialize
from megatron.training.engine import GPTWithLoss
from tests.support.language_models import model_settings, small_gpt


@pytest.fixture
def aot_eager(monkeypatch) -> None:
    """Blocks are traced, with their backward pass, but Inductor does not compile them."""
    run = torch.compile(TransformerBlock.forward, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(_CompiledBlock, "_compiled", run)
    monkeypatch.setattr(torch, "compile", lambda function: function)  # the check of the compiler itself


def small_model(pos_emb: str, checkpoint_every: int, **keys: object) -> GPT:
    sizes = {"num_layers": 10, "padded_vocab_size": 64, "max_positions": 32}
    settings = model_settings(**sizes, pos_emb=pos_emb, **keys)
    model = GPT(settings, checkpoint_every=checkpoint_every)
    initialize(model.layers(), settings, seed=1, init_method="normal", output_init_method="normal", std=0.1)
    return model


@pytest.mark.parametrize(
    ("pos_emb", "checkpoint_every", "compiler"),
    [
        ("kerple_bias_wht", 1, "aot_eager"),
        *(
            pytest.param(*case, "empty_inductor_cache", marks=pytest.mark.slow)
            for case in (("kerple_log", 0), ("kerple_bias_wht", 1), ("rotary", 3), ("dape_kerple", 1), ("xpos", 0))
        ),
        pytest.param("sinusoidal", 0, "empty_inductor_cache", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("with_documents", [False, True])
def test_loss_and_gradients_are_those_of_the_uncompiled_model(
    pos_emb, checkpoint_every, compiler, with_documents, request
):
    """The ten layers share the graphs of one layer."""
    request.getfixturevalue(compiler)
    eager, compiled = small_model(pos_emb, checkpoint_every), small_model(pos_emb, checkpoint_every)
    compile_blocks(compiled, torch.device("cpu"), documents=with_documents)
    documents = Documents((torch.arange(32) // 9).expand(4, 32)) if with_documents else None
    assert list(compiled.state_dict()) == list(eager.state_dict())
    text = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(0))
    results = []
    torch._dynamo.utils.counters.clear()
    for model in (eager, compiled):
        loss = model.loss(text[:, :-1], text[:, 1:], documents=documents)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] < 10
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("empty_inductor_cache")
def test_recomputed_blocks_use_the_same_dropout_masks():
    text = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(0))
    results = []
    for checkpoint_every in (0, 1):
        model = small_model("kerple_log", checkpoint_every, hidden_dropout=0.2, attention_dropout=0.1)
        compile_blocks(model, torch.device("cpu"))
        torch.manual_seed(5)
        loss = model.loss(text[:, :-1], text[:, 1:])
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("pos_emb", "backend"),
    [("kerple_log", "sdpa"), ("kerple_bias_wht", "fused")],
)
@pytest.mark.quick(1)
def test_a_block_is_one_graph(pos_emb, backend):
    """With attention, in the forward and backward pass: `fullgraph=True` fails at a graph break."""
    if backend == "fused":
        pytest.importorskip("triton")
    model = small_model(pos_emb, 0, attention_backend=backend)
    block = model.blocks[0].train()
    assert is_traceable(block.attention, torch.device("cpu"))
    hidden = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    results = []
    for function in (block, torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")):
        torch._dynamo.reset()  # graphs of other tests count towards the limit of recompilations
        output = function(hidden, tables=model.shared_tables(hidden, 32)[0])
        inputs = [hidden, *(parameter for parameter in block.parameters() if parameter.requires_grad)]
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_attention_that_cannot_be_traced():
    for keys in ({"pos_emb": "rotary"}, {"pos_emb": "fire"}, {"pos_emb": "kerple_log", "attention_backend": "chunked"}):
        layer = small_model(checkpoint_every=0, **keys).blocks[0].attention
        assert not is_traceable(layer, torch.device("cpu"))


def test_evaluation_compiles_nothing(aot_eager):
    model = small_model("kerple_log", 0)
    compile_blocks(model, torch.device("cpu"))
    torch._dynamo.utils.counters.clear()
    tokens = torch.randint(64, (1, 5))
    with torch.no_grad():
        in_training_mode = model(tokens)
    torch.testing.assert_close(in_training_mode, model.eval()(tokens))
    assert not torch._dynamo.utils.counters["stats"]


def test_the_graphed_loss_replaces_forward(monkeypatch):
    """It is captured with copies of the batch, without the model's hooks, and draws no random numbers."""
    model = small_gpt("kerple_log")
    model.__class__ = GPTWithLoss
    model.register_forward_pre_hook(lambda *_: pytest.fail("DeepSpeed's hook"))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    captured = []

    def graph(module, inputs):
        torch.rand(3)
        captured.append(module(*inputs))
        assert all(copy is not tokens for copy in inputs)
        module.forward = lambda *inputs: captured[0]
        return module

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graph)
    expected, state = model.loss(tokens, tokens), torch.get_rng_state()
    capture(model, [tokens, tokens])
    assert torch.equal(torch.get_rng_state(), state)
    assert model.forward(tokens, tokens) is captured[0]
    assert torch.equal(captured[0], expected)
    assert not any("forward" in name for name in model.state_dict())
