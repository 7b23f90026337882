"""Finding the attention of models, and removing their own positions."""

import copy

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    LongT5Config,
    LongT5ForConditionalGeneration,
)
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from kerple.positional import T5, Alibi
from kerple.transformers import use_positional
from tests.support.model_families import (
    FAMILIES,
    OLDEST,
    each_of,
    family_inputs,
    family_model,
    outputs,
)


@each_of(FAMILIES)
@torch.no_grad()
def test_positions_are_removed_and_come_back(name):
    """Without positions and with ALiBi, a text that is preceded by more padding is the same."""
    model = family_model(name)
    expected = outputs(model, family_inputs(model))
    use_positional(model, "none", own_positions="remove")
    removed = outputs(model, family_inputs(model))
    assert (removed - expected).abs().max() / expected.std() > 0.02
    use_positional(model, None)
    assert torch.equal(outputs(model, family_inputs(model)), expected)


def test_positions_that_cannot_be_removed(monkeypatch):
    model = family_model("gpt2")
    model.transformer.unknown = model.transformer.wpe
    del model.transformer.wpe
    type(model.transformer).wpe = property(lambda self: self.unknown)
    monkeypatch.setattr(type(model.transformer), "wpe", type(model.transformer).wpe, raising=False)
    with pytest.raises(ValueError, match="remove"):
        use_positional(model, "kerple_log", own_positions="remove")
    assert not hasattr(model, "kerple_positional")
    del type(model.transformer).wpe


def test_queries_that_grow_with_their_position():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}
    models = [
        family_model("llama4_text", attn_temperature_tuning=True),
        family_model("llama", rope_parameters=rope),
    ]
    for model in models:
        with pytest.raises(ValueError, match="attn_temperature_tuning"):
            use_positional(model, "alibi", own_positions="remove")
        use_positional(model, "alibi")


@torch.no_grad()
def test_the_temperature_of_yarn_stays():
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    model = family_model("llama", rope_parameters={**rope, "rope_theta": 10000.0})
    inputs, other = family_inputs(model), copy.deepcopy(model)
    scale = other.model.rotary_emb.attention_scaling
    assert scale > 1.1

    def without_angles(module, inputs, output):
        return torch.full_like(output[0], scale), torch.zeros_like(output[1])

    other.model.rotary_emb.register_forward_hook(without_angles)
    use_positional(model, "none", own_positions="remove")
    assert (outputs(model, inputs) - outputs(other, inputs)).abs().max() < 1e-5


@torch.no_grad()
def test_the_bias_of_t5_is_a_method():
    model = family_model("t5")
    inputs = family_inputs(model, "right")
    expected = outputs(model, inputs)
    for stack in (model.encoder, model.decoder):
        table = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        bidirectional = stack is model.encoder
        method = T5(num_heads=4, head_size=8, bidirectional=bidirectional)
        method.weight.copy_(table / method.scale)
        use_positional(stack, method, own_positions="remove")
    assert (outputs(model, inputs) - expected).abs().max() / expected.std() < 1e-5


@pytest.mark.parametrize("heads", [4, 6])
def test_the_slopes_of_bloom_and_mpt(heads):
    """Which do not use the interface; their biases are those of `Alibi`, relative to each row."""
    bias = Alibi(num_heads=heads).bias(torch.arange(9.0))
    ones = torch.ones(1, 9, dtype=torch.int64)
    bloom = build_alibi_tensor(ones, heads, torch.float32).view(heads, 9)
    mpt = build_mpt_alibi_tensor(heads, 9).view(heads, 9)
    for theirs in (bloom, mpt):
        last = theirs - theirs[:, -1:]
        torch.testing.assert_close(last.flip(1), bias.view(heads, 9), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("model_class", "name"),
    [
        (AutoModelForSequenceClassification, "llama"),
        (AutoModelForQuestionAnswering, "roberta"),
        (AutoModelForSequenceClassification, "bart"),
    ],
)
def test_models_with_other_outputs(model_class, name):
    config = AutoConfig.for_model(name, **FAMILIES[name])
    model = model_class.from_config(config)
    use_positional(model, "kerple_log", own_positions="remove")


@torch.no_grad()
def test_texts_beyond_the_table_of_positions():
    model = family_model("gpt2")
    use_positional(model, "alibi", own_positions="remove")
    assert model(torch.randint(3, 99, (1, 200)))[0].isfinite().all()


def test_methods_for_causal_attention_only():
    for name in ("bert", "t5"):
        with pytest.raises(NotImplementedError, match="after the query"):
            use_positional(family_model(name), "stick_breaking")
    use_positional(family_model("llama"), "stick_breaking")


@pytest.mark.skipif(OLDEST, reason="LongT5 of transformers 5.0 does not use the AttentionInterface")
def test_attention_of_another_kind():
    """The encoder's local attention does not use the interface; the decoder's does."""
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64}
    config = LongT5Config(**sizes, num_layers=2, num_heads=4, decoder_start_token_id=1)
    model = LongT5ForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match="LongT5LayerLocalSelfAttention"):
        use_positional(model, "kerple_log")
    use_positional(model, "kerple_log", layers=[0, 1])
    assert len(model.kerple_positional.methods) == 1


DECODER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("gemma2", {**DECODER, "intermediate_size": 64}, "Gemma2Attention.*softcap"),
        (
            "gpt_oss",
            {**DECODER, "intermediate_size": 64, "num_local_experts": 2},
            r"GptOssAttention.*s_aux",
        ),
        ("bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 4}, "Bloom"),
        ("mpt", {"d_model": 32, "n_layers": 1, "n_heads": 4}, "Mpt"),
    ],
)
def test_attention_that_cannot_have_a_method(name, sizes, message):
    """Capped scores, attention sinks, and attention that does not use the interface."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, vocab_size=99, **sizes))
    with pytest.raises(ValueError, match=message):
        use_positional(model, "kerple_log")


@pytest.mark.parametrize(("name", "part"), [("llama", "model"), ("t5", "encoder")])
@torch.no_grad()
def test_attention_that_was_changed_afterwards(name, part):
    model = family_model(name)
    inputs = family_inputs(model)
    expected = outputs(model, inputs)
    use_positional(model, "kerple_log")
    getattr(model, part).set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="sdpa"):
        model(**inputs)
    with pytest.raises(ValueError, match="sdpa"):
        getattr(model, part)(inputs["input_ids"])
    use_positional(model, None)
    assert torch.equal(outputs(model, inputs), expected)
