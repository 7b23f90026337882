"""Tiny random models of many families of transformers, and their attention in float64."""

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.masking_utils import eager_mask
from transformers.models.t5.modeling_t5 import T5Attention

from kerple.positional import T5, Alibi, KerpleLog, PositionalMethod

TOLERANCE = 1e-5  # float32 angles, norms and tables

VOCABULARY = 99
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
WINDOWED = {
    **GROUPED,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
GPT2 = {**SIZES, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPTJ = {**GPT2, "rotary_dim": 4}
BART = {
    **SIZES,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
}
DECODERS = {
    "biogpt": SIZES,
    "codegen": GPTJ,
    "cohere": GROUPED,
    "ernie4_5": GROUPED,
    "exaone4": WINDOWED,
    "gemma": GROUPED,
    "gemma3_text": {**WINDOWED, "query_pre_attn_scalar": 8},
    "glm": GROUPED,
    "gpt2": GPT2,
    "gpt_neox": SIZES,
    "gptj": GPTJ,
    "granite": GROUPED,
    "helium": GROUPED,
    "llama": GROUPED,
    "llama4_text": {
        **GROUPED,
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
        "attention_chunk_size": 5,
        "attn_temperature_tuning": False,
        "interleave_moe_layer_step": 1,
    },
    "mistral": {**GROUPED, "sliding_window": 5},
    "mixtral": {**GROUPED, "num_local_experts": 2},
    "nemotron": GROUPED,
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "opt": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "persimmon": SIZES,
    "phi": SIZES,
    "phi3": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "smollm3": GROUPED,
    "stablelm": GROUPED,
    "starcoder2": GROUPED,
}
ENCODERS = {
    "albert": {**SIZES, "embedding_size": 16},
    "bert": SIZES,
    "distilbert": {**SIZES, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "electra": {**SIZES, "embedding_size": 32},
    "esm": {**SIZES, "position_embedding_type": "rotary"},
    "modernbert": {**SIZES, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2},
    "roberta": SIZES,
}
ENCODER_DECODERS = {
    "bart": BART,
    "marian": {**BART, "decoder_vocab_size": VOCABULARY},
    "mbart": BART,
    "pegasus": BART,
    "t5": {
        **SIZES,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
}
FAMILIES = {**DECODERS, **ENCODERS, **ENCODER_DECODERS}
# The experts of Mixtral have no float64.
IN_FLOAT64 = [name for name in FAMILIES if name != "mixtral"]
_QUICK = ("llama", "gemma3_text", "bert", "t5")

# In the oldest supported version of transformers, some families do not use its AttentionInterface
# yet, or make masks of four dimensions, for static caches or (Persimmon, StableLM) for texts that
# have no attention_mask. Tests leave these out.
OLDEST = transformers.__version__.startswith("5.0.")
_NOT_IN_OLDEST = ("codegen", "gptj", "modernbert", "nemotron", "persimmon", "stablelm", "t5")
_DYNAMIC_CACHES_ONLY = ("biogpt", "opt")


def caches_of(name: str) -> tuple[str, ...]:
    """The caches that a family's generation works with."""
    if OLDEST and name in _DYNAMIC_CACHES_ONLY:
        return ("dynamic",)
    return ("dynamic", "static")


def each_of(names):
    """Parametrizes a test with the names of families; CI runs those that are not quick."""
    cases = [pytest.param(name, marks=() if name in _QUICK else pytest.mark.ci) for name in names]
    return pytest.mark.parametrize("name", cases)


def family_model(name: str, **keys: object) -> PreTrainedModel:
    """A model with large weights, so that attention is far from uniform, in evaluation mode.

    Skips the test if this family does not work with the installed version of transformers.
    """
    if OLDEST and name in _NOT_IN_OLDEST:
        pytest.skip(f"{name} does not work with transformers 5.0")
    torch.manual_seed(0)
    model_class = AutoModelForCausalLM
    if name in ENCODERS:
        model_class = AutoModel
    elif name in ENCODER_DECODERS:
        model_class = AutoModelForSeq2SeqLM
    config = AutoConfig.for_model(name, **{**FAMILIES[name], **keys})
    model = model_class.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    return model


def family_inputs(model: PreTrainedModel, padding: str = "none") -> dict[str, torch.Tensor]:
    """Three texts of up to 12 tokens, and for a decoder after an encoder 9.

    padding: none, left, right, or inner: between tokens.
    """
    generator = torch.Generator().manual_seed(3)
    inputs = {"input_ids": torch.randint(3, VOCABULARY, (3, 12), generator=generator)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (3, 9), generator=generator)
    mask = torch.ones(3, 12, dtype=torch.int64)
    if padding == "left":
        mask[0, :4] = mask[1, :1] = 0
    elif padding == "right":
        mask[0, 8:] = mask[2, 11:] = 0
    elif padding == "inner":
        mask[0, 3:5] = mask[1, 9] = 0
    if padding != "none":
        inputs["attention_mask"] = mask
    return inputs


def outputs(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The first output at the places that are no padding."""
    output: torch.Tensor = model(**inputs, use_cache=False)[0]
    mask = inputs.get("attention_mask")
    if mask is None or model.config.is_encoder_decoder:
        return output
    return output[mask.bool()]


REFERENCE = "float64_reference"


def biases(method: nn.Module, distance: torch.Tensor) -> torch.Tensor:
    """The formula of a paper, `[h, s, t]` in float64. distance: to keys before the query."""
    if isinstance(method, KerpleLog):
        return -method.bias_p * torch.log(1 + method.bias_a * distance.abs())
    if isinstance(method, Alibi):
        slopes = 2.0 ** -torch.tensor([2, 4, 6, 8], dtype=torch.float64)
        return -slopes[:, None, None] * distance.abs()
    assert isinstance(method, T5)
    buckets = T5Attention._relative_position_bucket(-distance.abs(), bidirectional=False)
    return method.scale * method.weight[buckets].permute(2, 0, 1)


def reference_attention(
    module, query, key, value, mask, scaling=None, is_causal=None, position_bias=None, **_
):
    """transformers' eager attention, with the biases of a method in self-attention."""
    group = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(group, dim=1) for states in (key, value))
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(2, 3) * scale
    if position_bias is not None:
        scores = scores + position_bias
    method = module.__dict__.get("reference_method")
    s, t = scores.shape[2:]
    if method is not None and s == t:  # the tests give cross-attention other numbers of keys
        distance = torch.arange(t)[:, None] - torch.arange(t)
        scores = scores + biases(method, distance)
    if mask is not None:  # otherwise it is not causal, and there is no padding
        scores = scores + mask[..., :t]
    return (scores.softmax(dim=-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(REFERENCE, reference_attention)
AttentionMaskInterface.register(REFERENCE, eager_mask)


def with_reference(model: PreTrainedModel, method: nn.Module | None) -> PreTrainedModel:
    """A copy whose attention is the reference, with the biases of a method in all layers."""
    model = copy.deepcopy(model)
    model.set_attn_implementation(REFERENCE)
    for module in model.modules():
        module.__dict__["reference_method"] = method
    return model


def method_of(model: PreTrainedModel) -> PositionalMethod:
    (attention,) = model.kerple_positional.methods
    return attention.positional
