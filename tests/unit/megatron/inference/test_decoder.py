"""The common interface to this project's models, transformers models and plain functions."""

import pytest
import torch
from torch import nn

from kerple.attention import FULL, AttentionMode, Span
from kerple.positional import PositionsExceeded
from kerple.positional.distance_maps import Clip
from megatron.evaluation.runner import evaluate_extrapolation
from megatron.inference.decoder import (
    CallableDecoder,
    NativeDecoder,
    TransformersDecoder,
    as_decoder,
    inference,
)
from tests.support.errors import assert_rejected
from tests.support.language_models import VOCABULARY, direct_losses, random_tokens, small_gpt


def test_a_model_of_this_project():
    model = small_gpt("alibi")
    decoder = as_decoder(model)
    assert isinstance(decoder, NativeDecoder)
    assert decoder.unsupported_reason(AttentionMode(Span(window=8))) is None
    tokens = random_tokens(6)[None]
    cache = decoder.new_cache(6)
    chunks = [decoder.hidden(chunk, cache) for chunk in tokens.split(4, dim=1)]
    torch.testing.assert_close(decoder.logits(torch.cat(chunks, dim=1)), model(tokens))


def test_modes_of_models_with_windows():
    """A window that changes no layer, and sinks and blocks, which windows exclude, are rejected."""
    for window, widths in (
        (7, {8: True, 9: False}),
        ([7, 3], {8: True, 9: False}),
        ([7, None], {9: True}),
    ):
        decoder = as_decoder(small_gpt("alibi", sliding_window_width=window))
        for width, supported in widths.items():
            assert (
                decoder.unsupported_reason(AttentionMode(Span(window=width))) is None
            ) == supported
        for span in (Span(window=4, sinks=2), Span(block=8)):
            assert "sliding_window_width" in decoder.unsupported_reason(AttentionMode(span))


@pytest.mark.parametrize(
    "mode",
    [
        AttentionMode(distance_map=Clip(4)),
        AttentionMode(Span(window=6), distance_map=Clip(4)),
        AttentionMode(Span(window=6, sinks=2), reindexed=True, distance_map=Clip(4)),
    ],
)
def test_layers_without_positions_support_all_distances(mode):
    """A layer without positions attends as in the same span; another layer must have distances."""
    torch.manual_seed(0)

    def per_layer(*methods):
        return small_gpt("per_layer", pos_emb_options={"methods": methods})

    model, tokens = per_layer("rotary", "none"), random_tokens(24)[None]
    decoder = as_decoder(model)
    assert decoder.unsupported_reason(mode) is None
    with torch.no_grad():
        cache = decoder.new_cache(None, mode)
        chunks = [decoder.hidden(chunk, cache, mode) for chunk in tokens.split(5, dim=1)]
        expected = decoder.hidden(tokens, mode=mode)
        torch.testing.assert_close(torch.cat(chunks, dim=1), expected)
        assert not torch.allclose(
            expected, decoder.hidden(tokens, mode=AttentionMode(mode.span)), atol=1e-3
        )
        states, layer = torch.randn(1, 24, 32), model.blocks[1].attention
        torch.testing.assert_close(
            layer(states, mode=mode), layer(states, mode=AttentionMode(mode.span))
        )
    layer_1 = " in layer 1 (counted from 0)"
    for methods, place in (
        (("none",), ""),
        (("rotary", "cope"), layer_1),
        (("none", "forgetting"), layer_1),
    ):
        reason = as_decoder(per_layer(*methods)).unsupported_reason(mode)
        assert str(reason).startswith(f"is not supported: pos_emb per_layer{place} ")
        assert ("in layer" in str(reason)) == bool(place)


def test_a_function_supports_the_spans_it_has_arguments_for():
    def windowed(tokens, window=None):
        return torch.full((*tokens.shape, 3), float(window or 0))

    decoder = as_decoder(windowed)
    assert isinstance(decoder, CallableDecoder)
    assert not decoder.cached
    assert decoder.new_cache(8) is None
    assert [
        decoder.unsupported_reason(AttentionMode(span)) is None
        for span in (FULL, Span(window=8), Span(block=8))
    ] == [True, True, False]
    tokens = torch.zeros(2, 5, dtype=torch.long)
    assert (
        decoder.logits(decoder.hidden(tokens, mode=AttentionMode(Span(window=8)))).unique().item()
        == 8
    )
    assert as_decoder(int).unsupported_reason(AttentionMode(Span(window=8)))


@pytest.mark.parametrize("output", [None, torch.zeros(2, 5).long(), torch.zeros(2, 4, 9)])
def test_other_shapes_than_logits_are_rejected(output):
    with pytest.raises(
        TypeError, match=r"must return logits \[batch, seq, vocabulary\] for tokens \(2, 5\)"
    ):
        as_decoder(lambda tokens: output).hidden(torch.zeros(2, 5, dtype=torch.long))


TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
}
HEADS = {
    **TINY,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "pad_token_id": 0,
}
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "rotary_dim": 8,
}
GEMMA = {
    **HEADS,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "num_kv_shared_layers": 0,
    "max_position_embeddings": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
# Read in chunks through the KV cache. The tables of inputs of Gemma are no tables of positions.
CACHED = {
    **dict.fromkeys(["codegen", "gpt2", "gptj"], GPT),
    "ctrl": {**GPT, "dff": 32},
    "gemma3n_text": {
        **GEMMA,
        "altup_num_inputs": 2,
        "laurel_rank": 4,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": {**GEMMA, "global_head_dim": 8},
}
# Read in complete segments: no KV cache, further state, or a cache that changes the logits beyond a
# window (Moshi).
COMPLETE = {
    "bamba": {
        **HEADS,
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "falcon_mamba": {**TINY, "state_size": 8},
    "jamba": {
        **HEADS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "num_experts": 1,
    },
    "mamba": {**TINY, "state_size": 8},
    "mamba2": {
        **TINY,
        "state_size": 8,
        "num_heads": 4,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "minimax": {
        **HEADS,
        "num_local_experts": 2,
        "block_size": 8,
        "experts_implementation": "eager",
    },
    "moshi": {**HEADS, "sliding_window": 16, "ffn_dim": 64},
    "openai-gpt": GPT,
    "recurrent_gemma": {**HEADS, "block_types": ["recurrent", "attention"]},
    "rwkv": {**TINY, "attention_hidden_size": 32, "context_length": 64},
    "xlstm": {**TINY, "num_heads": 2, "chunk_size": 8, "autocast_kernel_dtype": "float32"},
}
NOT_CAUSAL = {
    "bert": HEADS,
    "cpmant": {**HEADS, "dim_head": 8, "dim_ff": 32, "prompt_length": 4},
    "xlm": {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 1, "n_heads": 2},
}
ARCHITECTURES = {
    **CACHED,
    **COMPLETE,
    **NOT_CAUSAL,
    "llama": HEADS,
    "phi3": HEADS,
    "gemma3_text": HEADS,
}


def tiny_model(model_type, **keys):
    """A random model; large weights, so that a wrong context changes the loss."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**ARCHITECTURES[model_type], **keys})
    config.initializer_range = 0.5
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def evaluate(model):
    """The record of one length, 24 tokens, for two segments in chunks of 7."""
    (row,) = evaluate_extrapolation(model, random_tokens(49), [24], query_chunk=7, progress=False)
    return row


def direct_loss(model):
    """The loss that `evaluate` measures, from one pass."""
    text = random_tokens(49)
    with torch.no_grad():
        logits = model(text[:48].view(2, 24), use_cache=False).logits
    return direct_losses(logits, text[1:].view(2, 24)).mean().item()


@pytest.mark.parametrize("model_type", [*CACHED, *COMPLETE])
def test_the_loss_of_an_architecture_is_that_of_one_pass(model_type):
    model = tiny_model(model_type).double()
    record = evaluate(model)
    assert record["loss"] == pytest.approx(direct_loss(model), abs=1e-6)
    assert ("complete_segments" in record) == (model_type in COMPLETE)


@pytest.mark.parametrize("model_type", [*NOT_CAUSAL, "function"])
def test_models_that_see_later_tokens_are_rejected(model_type):
    def reversed_counts(tokens):
        return nn.functional.one_hot(tokens, VOCABULARY).float().cumsum(1).flip(1)

    assert_rejected(
        "is not causal",
        evaluate,
        reversed_counts if model_type == "function" else tiny_model(model_type),
    )
    if model_type == "bert":
        assert evaluate(tiny_model("bert", is_decoder=True))["loss"] > 0


def test_models_with_an_encoder_and_a_decoder_are_rejected():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    assert_rejected("T5ForConditionalGeneration", evaluate, T5ForConditionalGeneration(config))


@pytest.mark.parametrize("model_type", ["gpt2", "gptj", "codegen", "ctrl"])
def test_a_text_beyond_a_table_of_positions_has_a_note(model_type):
    """Tables in weights (GPT-2) and in buffers. The shorter texts before and after it
    are measured.
    """
    model = tiny_model(model_type, n_positions=16)
    assert isinstance(as_decoder(model), TransformersDecoder)
    rows = evaluate_extrapolation(
        model, random_tokens(49), [16, 24, 8], query_chunk=7, progress=False
    )
    assert [row["loss"] is None for row in rows] == [False, True, False]
    assert "table of 16 positions" in rows[1]["note"]
    with pytest.raises(PositionsExceeded, match="IndexError"), torch.inference_mode():
        as_decoder(model).hidden(random_tokens(24)[None])


def test_a_failure_within_the_lengths_that_were_read_is_an_error():
    decoder, tokens = as_decoder(tiny_model("llama")), random_tokens(16)[None]
    decoder.hidden(tokens)
    decoder._forward = lambda *_: tokens[:, 99]
    with pytest.raises(IndexError):
        decoder.hidden(tokens)


def rope_model(model_type, rope_parameters, **keys):
    return tiny_model(
        model_type, max_position_embeddings=16, rope_parameters=rope_parameters, **keys
    )


LONGROPE = {
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LAYER_TYPES = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("model_type", "rope", "keys"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}, {}),
        ("phi3", {"rope_type": "longrope", "rope_theta": 100.0, **LONGROPE}, {}),
        (
            "gemma3_text",
            {
                "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            {"layer_types": LAYER_TYPES, "sliding_window": 8},
        ),
    ],
    ids=["dynamic", "longrope", "by layer type"],
)
def test_angles_that_depend_on_the_length_are_not_cached(model_type, rope, keys):
    """The loss must not depend on the chunks, nor on a longer text before."""
    model = rope_model(model_type, rope, **keys)
    text = random_tokens(81)
    expected = model(torch.stack((text[:40], text[40:80])), use_cache=False).logits
    decoder = as_decoder(model)
    assert not decoder.cached
    assert decoder.new_cache(40) is None
    losses = {
        chunk: evaluate_extrapolation(model, text, [80, 40], query_chunk=chunk, progress=False)[1][
            "loss"
        ]
        for chunk in (7, 512)
    }
    by_hand = direct_losses(expected, torch.stack((text[1:41], text[41:]))).mean().item()
    assert losses == {chunk: pytest.approx(by_hand, abs=1e-5) for chunk in losses}


@pytest.mark.parametrize("wrapper", ["peft", "DataParallel", "compile"])
@pytest.mark.quick(2)
def test_wrapped_models_are_read_like_the_model(wrapper):
    """The configuration is that of the model: dynamic angles are not cached. The
    wrapper is called.
    """
    model = rope_model("llama", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0})
    expected = direct_loss(model)
    if wrapper == "peft":
        peft = pytest.importorskip("peft")
        wrapped = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
        )
    else:
        wrapped = (
            nn.DataParallel(model)
            if wrapper == "DataParallel"
            else torch.compile(model, backend="eager")
        )
    assert not as_decoder(wrapped).cached
    calls = []
    wrapped.register_forward_pre_hook(lambda *_: calls.append(None))
    with torch.compiler.set_stance("force_eager"):  # compiling takes long
        assert evaluate(wrapped)["loss"] == pytest.approx(expected, abs=1e-6)
    assert calls


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_precede_the_segment(kind):
    """Not each of its chunks."""
    peft = pytest.importorskip("peft")
    model, text = tiny_model("llama"), random_tokens(49)
    wrapped = peft.get_peft_model(
        model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5)
    ).eval()
    with torch.no_grad():
        logits = wrapped(text[:48].view(2, 24), use_cache=False).logits[:, -24:]
    expected = direct_losses(logits, text[1:].view(2, 24)).mean().item()
    row = evaluate(wrapped)
    assert row["loss"] == pytest.approx(expected, abs=1e-5)
    assert abs(row["loss"] - direct_loss(model)) > 1e-3
    assert "virtual tokens" in row["complete_segments"]


def test_constant_angles_are_cached():
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}
    model = rope_model("llama", rope)
    assert as_decoder(model).cached
    assert "complete_segments" not in evaluate(model)


def test_inference_restores_the_mode_of_every_module():
    model = nn.Sequential(nn.Dropout(), nn.Linear(2, 2)).train()
    model[1].eval()
    with inference(model):
        assert not any(module.training for module in model.modules())
        assert not model[1](torch.ones(2)).requires_grad
    assert [module.training for module in model.modules()] == [True, True, False]
