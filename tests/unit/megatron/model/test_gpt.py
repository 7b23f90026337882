"""The GPT model: sizes, sharing, cache, and what its initial weights depend on."""

import pytest
import torch

from kerple.attention import FULL, Span
from kerple.positional import KerpleLog
from megatron.config import load_config
from megatron.model.gpt import GPT, layer_factories
from megatron.model.initialization import initialize, initializer
from megatron.model.settings import ModelSettings
from megatron.training.logging import count_parameters, flops_per_token
from tests.support.release import METHODS

SMALL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "padded_vocab_size": 128, "max_positions": 64}
INIT = {"init_method": "normal", "output_init_method": "scaled_normal", "std": 0.02}


def small_model(pos_emb: str = "kerple_log", seed: int = 5, **changes) -> GPT:
    settings = ModelSettings(**{**SMALL, "pos_emb": pos_emb, **changes})
    model = GPT(settings)
    initialize(model.layers(), settings, seed=seed, **INIT)
    return model.eval()


@pytest.fixture
def tokens():
    return torch.randint(0, 128, (3, 48), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("method", METHODS)
def test_paper_model_counts_162_322_944_parameters_without_positions(method):
    config = load_config([f"configs/{name}" for name in ("small_bf16.yml", f"pos_emb/{method}.yml")])
    settings = ModelSettings.from_config(config, padded_vocab_size=50_304)
    with torch.device("meta"):
        counts = count_parameters(GPT(settings).layers(), settings)
    assert counts["total"] - counts["positional"] == 162_322_944
    shared = {"kerple_log": 24, "kerple_power_ap_": 24, "kerple_power__ap": 24, "kerple_power_ap_ap": 48}
    expected = {**shared, "rpe": 32 * 12, "learned": 512 * 768}.get(method, 0)
    assert counts["positional"] == expected
    assert counts["outside_embedding"] == counts["total"] - 50_304 * 768


def test_flops_per_token():
    settings = ModelSettings(**SMALL)
    assert flops_per_token(1000, settings, length=16) == 6 * 1000 + 6 * 2 * 32 * 16


def test_kernel_parameters_are_one_parameter_for_all_layers():
    model = small_model()
    assert sorted(name for name, _ in model.named_parameters() if "rpe" in name) == [
        "2.attention.rpe.bias_a",
        "2.attention.rpe.bias_p",
    ]
    assert model.blocks[0].attention.rpe is model.blocks[1].attention.rpe


@pytest.mark.parametrize(("options", "times"), [((), 1), ((("parameters", "per-layer"),), 2)])
@pytest.mark.parametrize("recompute", [False, True])
def test_layers_that_share_a_method_share_its_table(options, times, recompute, tokens, monkeypatch):
    """Made once, and not again where activations are; the gradients are those of a table for each layer."""
    made = []
    bias = KerpleLog.bias
    monkeypatch.setattr(KerpleLog, "bias", lambda self, distance: made.append(self) or bias(self, distance))
    model = small_model(pos_emb_options=options).train()
    model.checkpoint_every = int(recompute)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    # Layers with methods of their own make them again when they are computed again.
    assert len(made) == (1 if times == 1 else times * (1 + recompute))
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr(GPT, "_shared_tables", lambda *_: None)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("span", [FULL, Span(window=7), Span(block=6)])
def test_decoding_with_a_cache_gives_the_logits_of_the_whole(method, span, tokens):
    model = small_model(method)
    with torch.no_grad():
        whole = model(tokens, span=span)
        cache = model.new_cache()
        parts = [model(tokens[:, start:stop], cache=cache, span=span) for start, stop in ((0, 20), (20, 21), (21, 48))]
    assert cache.length == 48
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=1e-4)


def test_cache_truncates_and_selects_rows(tokens):
    model = small_model("rotary")
    with torch.no_grad():
        cache = model.new_cache()
        model(tokens[:, :30], cache=cache)
        cache.truncate(10)
        cache.select(torch.tensor([2, 0]))
        again = model(tokens[[2, 0], 10:20], cache=cache)
        whole = model(tokens[[2, 0], :20])
    torch.testing.assert_close(again, whole[:, 10:], atol=2e-5, rtol=1e-4)


def test_no_position_sees_a_later_token(tokens):
    model = small_model("kerple_power_ap_ap")
    changed = tokens.clone()
    changed[:, 30] = (changed[:, 30] + 1) % 128
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :30], after[:, :30], atol=1e-6, rtol=0)
    assert (before[:, 30:] - after[:, 30:]).abs().max() > 1e-3


def test_parallel_residual_reads_one_input(tokens):
    sequential, parallel = small_model(), small_model(parallel_residual=True)
    block = parallel.blocks[0]
    hidden = parallel.embedding(tokens)
    expected = (
        hidden + block.attention(block.input_layernorm(hidden)) + block.mlp(block.post_attention_layernorm(hidden))
    )
    torch.testing.assert_close(block(hidden), expected)
    assert (sequential(tokens) - parallel(tokens)).abs().max() > 1e-4


def test_tied_embeddings_are_one_parameter(tokens):
    model = small_model(tied_embeddings=True)
    untied = small_model()
    assert model.output.final_linear.weight is model.embedding.word_embeddings.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in model.parameters()) == 128 * 32
    torch.testing.assert_close(model.embedding.word_embeddings.weight, untied.embedding.word_embeddings.weight)


@pytest.mark.parametrize("every", [1, 2])
def test_recomputed_activations_change_no_gradient(every, tokens):
    def gradients(checkpoint_every: int) -> list[torch.Tensor]:
        settings = ModelSettings(**{**SMALL, "pos_emb": "kerple_log"})
        model = GPT(settings, checkpoint_every=checkpoint_every).train()
        initialize(model.layers(), settings, seed=5, **INIT)
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        return [parameter.grad for parameter in model.parameters()]

    for kept, recomputed in zip(gradients(0), gradients(every), strict=True):
        torch.testing.assert_close(kept, recomputed)


def test_loss_leaves_masked_tokens_out(tokens):
    model = small_model()
    labels = tokens.roll(-1, 1)
    mask = torch.zeros(labels.shape)
    mask[:, :10] = 1.0
    expected = torch.nn.functional.cross_entropy(model(tokens)[:, :10].flatten(0, 1), labels[:, :10].flatten())
    torch.testing.assert_close(model.loss(tokens, labels, mask), expected)


def test_initial_weights_do_not_depend_on_which_layers_are_here():
    """A pipeline stage builds some layers; they start as in the whole model."""
    settings = ModelSettings(**{**SMALL, "pos_emb": "kerple_log"})
    whole = small_model(seed=9).layers()
    factories = layer_factories(settings)
    stage = {index: factories[index]() for index in (3, 5, 6)}
    initialize(stage, settings, seed=9, **INIT)
    for index, layer in stage.items():
        for (name, ours), (_, theirs) in zip(layer.named_parameters(), whole[index].named_parameters(), strict=True):
            assert torch.equal(ours, theirs), f"layer {index} {name}"


def test_initial_weights_are_those_of_gpt_neox():
    model = small_model(hidden_size=256, num_heads=4, padded_vocab_size=512)
    block = model.blocks[0]
    assert block.attention.query_key_value.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.attention.dense.weight.std().item() == pytest.approx(0.02 / (2 * 2) ** 0.5, rel=0.02)
    assert block.mlp.dense_4h_to_h.weight.std().item() == pytest.approx(0.02 / (2 * 2) ** 0.5, rel=0.02)
    assert block.mlp.dense_h_to_4h.bias.abs().max() == 0
    assert torch.equal(block.input_layernorm.weight, torch.ones(256))
    other = small_model(seed=6, hidden_size=256, num_heads=4, padded_vocab_size=512)
    assert not torch.equal(other.blocks[0].mlp.dense_h_to_4h.weight, block.mlp.dense_h_to_4h.weight)
    assert not torch.equal(model.blocks[0].mlp.dense_h_to_4h.weight, model.blocks[1].mlp.dense_h_to_4h.weight)


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("normal", 0.02),
        ("scaled_normal", 0.02 / 24**0.5),
        ("small_init", (2 / (5 * 768)) ** 0.5),
        ("wang_init", 2 / (12 * 768**0.5)),
        ("xavier_normal", (2 / (768 + 512)) ** 0.5),
    ],
)
def test_initializers(name, std):
    weight = torch.empty(512, 768)
    initializer(name, std=0.02, num_layers=12, hidden_size=768)(weight, torch.Generator().manual_seed(0))
    assert weight.std().item() == pytest.approx(std, rel=0.01)


def test_unknown_initializer_is_named():
    with pytest.raises(ValueError, match=r"kaiming.*small_init"):
        initializer("kaiming", std=0.02, num_layers=12, hidden_size=768)


def test_kernels_per_layer_are_one_set_for_each_block():
    options = (("bias", "log + power"), ("parameters", "per-layer"))
    model = small_model("kerple", pos_emb_options=options)
    methods = model.positional_methods()
    assert len(methods) == model.settings.num_layers
    drawn = [method.bias_1_log_p.flatten().tolist() for method in methods.values()]
    assert drawn[0] != drawn[1]
    # Each layer has its own gradient, and the same layer its own values whatever other layers there are.
    model(torch.randint(0, 16, (1, 6))).square().sum().backward()
    gradients = [method.bias_2_power_a.grad for method in methods.values()]
    assert not torch.equal(gradients[0], gradients[1])
    again = small_model("kerple", pos_emb_options=options).positional_methods()
    for index, method in methods.items():
        assert torch.equal(again[index].bias_1_log_p, method.bias_1_log_p)
