"""Small models of transformers' GPT-NeoX, Llama, Mistral, Qwen2 and Qwen3, with random weights."""

from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import TRAIN_LENGTH, VOCABULARY

# Name -> (class, keys). Each has another shape.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with grouped queries": (
        "Llama",
        {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500.0},
    ),
    "llama with biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    ),
    "llama 3.1": (
        "Llama",
        {
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": TRAIN_LENGTH // 2,
            },
        },
    ),
    "llama with linear scaling": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    ),
    "llama with dynamic scaling": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 9, "head_dim": 12}),
    "mistral without window": ("Mistral", {"num_key_value_heads": 4, "sliding_window": None}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2 with window": (
        "Qwen2",
        {
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 0,
        },
    ),
    "qwen2 with yarn": (
        "Qwen2",
        {
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": TRAIN_LENGTH,
            },
        },
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "qwen3 with biases": (
        "Qwen3",
        {"num_key_value_heads": 4, "head_dim": 6, "attention_bias": True},
    ),
    "pythia": ("GPTNeoX", {"intermediate_size": 128}),
}


def family_model(folder: Path, name: str, **changes: Any) -> Any:
    """A model of FAMILIES, saved by transformers in `folder`."""
    import transformers

    family, keys = FAMILIES[name]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 44,
        "max_position_embeddings": TRAIN_LENGTH,
        "initializer_range": 0.2,
    }
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**{**sizes, **keys, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif parameter_name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.2)
    model.save_pretrained(folder)
    return model
