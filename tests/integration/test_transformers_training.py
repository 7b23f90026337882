"""Llama-style models train like transformers' own implementations: the same weights, data and optimizer in float32."""

import pytest
import torch

from megatron.config import Config
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings

transformers = pytest.importorskip("transformers")

LENGTH, STEPS = 24, 20
KEYS: dict[str, object] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": LENGTH,
    "pos_emb": "rotary",
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-5,
    "use_bias_in_norms": False,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "activation": "swiglu",
    "intermediate_size": 3 * 40,
    "no_weight_tying": True,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.005}},
}
SIZES: dict[str, object] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 64,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# Family -> (class of the model, its configuration, our keys).
FAMILIES: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "Llama": ("Llama", {}, {}),
    "Llama 2 with grouped-query attention": (
        "Llama",
        {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
        {"num_kv_heads": 2, "rotary_emb_base": 1_000_000},
    ),
    "CodeLlama and Llemma": (  # in GPT-NeoX's files, the MLP has biases
        "Llama",
        {
            "intermediate_size": 48,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        {"use_bias_in_mlp": True, "mlp_multiple_of": 16, "rotary_emb_base": 1_000_000},
    ),
    "Mistral": (
        "Mistral",
        {"num_key_value_heads": 1, "head_dim": 12, "sliding_window": 6},
        {"num_kv_heads": 1, "head_size": 12, "sliding_window_width": 5},
    ),
    "Qwen 3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}, {"num_kv_heads": 2, "use_qk_layernorm": True}),
}


@torch.no_grad()
def copy_weights(model: GPT, theirs: torch.nn.Module) -> None:
    """From transformers' model, with the rows of query_key_value grouped by key head."""
    state = theirs.state_dict()

    def fill(layer: int, name: str, value: torch.Tensor) -> None:
        parameter = model.get_parameter(f"{layer}.{name}")
        assert parameter.shape == value.shape
        parameter.copy_(value)

    config = model.settings.config
    fill(0, "word_embeddings.weight", state["model.embed_tokens.weight"])
    fill(config.num_layers + 3, "norm.weight", state["model.norm.weight"])
    fill(config.num_layers + 4, "final_linear.weight", state["lm_head.weight"])
    for layer in range(config.num_layers):
        block = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in state.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        groups = config.num_kv_heads
        rows = [block[f"self_attn.{name}_proj.weight"].unflatten(0, (groups, -1)) for name in "qkv"]
        fill(layer + 2, "attention.query_key_value.weight", torch.cat(rows, dim=1).flatten(0, 1))
        fill(layer + 2, "attention.dense.weight", block["self_attn.o_proj.weight"])
        for ours, name in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            for kind in ("weight", "bias") if config.use_bias_in_mlp else ("weight",):
                fill(layer + 2, f"mlp.{ours}.{kind}", block[f"mlp.{name}_proj.{kind}"])
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            fill(layer + 2, name, block[name])
        if config.use_qk_layernorm:
            fill(layer + 2, "attention.query_norm.weight", block["self_attn.q_norm.weight"])
            fill(layer + 2, "attention.key_norm.weight", block["self_attn.k_norm.weight"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick(3)
def test_losses_are_those_of_transformers(family):
    name, their_keys, our_keys = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **their_keys})
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).train()
    for parameter_name, parameter in theirs.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    settings = ModelSettings(Config.from_flat({**KEYS, **our_keys}).model, padded_vocab_size=64)
    ours = GPT(settings).train()
    copy_weights(ours, theirs)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.005) for model in (ours, theirs)]
    losses: list[tuple[float, float]] = []
    for _ in range(STEPS):
        # A random walk can be predicted from the context.
        tokens = (torch.randint(-2, 3, (4, LENGTH + 1)).cumsum(1) + 32) % 64
        pair = (ours.loss(tokens[:, :-1], tokens[:, 1:]), theirs(tokens, labels=tokens).loss)
        for loss, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append((pair[0].item(), pair[1].item()))
    assert losses[-1][0] < losses[0][0] - 0.3
    for ours_, theirs_ in losses:
        assert ours_ == pytest.approx(theirs_, abs=1e-4)
