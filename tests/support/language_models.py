"""Small language models for tests: one of this project, and a slow one that shares no code with it.

Legend: b batch, s tokens, t keys, h heads, d head size, e hidden size, v vocabulary.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.config.schema.model import ModelConfig
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings

VOCABULARY = 61
LLAMA = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "num_kv_heads": 2,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "use_qk_layernorm": True,
}


def model_settings(
    *, padded_vocab_size: int = VOCABULARY, max_positions: int = 4096, **keys: object
) -> ModelSettings:
    """Settings of a model with two layers; unless `keys` say otherwise, without positions and tied
    embeddings.
    """
    sizes = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": max_positions,
    }
    config = ModelConfig(**{**sizes, "pos_emb": "none", "no_weight_tying": True, **keys})
    return ModelSettings(config, padded_vocab_size)


def small_gpt(pos_emb: str, *, seed: int = 0, **keys: object) -> GPT:
    """A randomly initialized model in evaluation mode. Its predictions depend strongly on the
    context.
    """
    model = GPT(model_settings(pos_emb=pos_emb, **keys))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:  # this scale makes attention and predictions far from uniform
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model.eval()


@torch.no_grad()
def with_repeated_heads(model: GPT) -> GPT:
    """The same model without grouped-query attention: a head of keys and values for each head of
    queries.
    """
    config = model.settings.config
    groups, size = config.num_kv_heads, config.head_size
    repeated_config = config.model_copy(update={"num_kv_heads": config.num_attention_heads})
    repeated = GPT(replace(model.settings, config=repeated_config)).eval()
    state = model.state_dict()
    for name, values in state.items():
        if "query_key_value" in name:
            rows = values.view(groups, -1, size, *values.shape[1:])
            shared = rows.shape[1] - 2
            heads = [
                torch.stack((rows[g, i], rows[g, -2], rows[g, -1]))
                for g in range(groups)
                for i in range(shared)
            ]
            state[name] = torch.stack(heads).flatten(0, 2)
    repeated.load_state_dict(state)
    return repeated


class AlibiByHand(nn.Module):
    """One layer of attention with the bias -slope * distance, in float64, with a loop over heads
    and queries.

    It uses no code of the project, as an independent source of losses. With `window`, a query
    attends to the last `window` keys; with `block`, to the keys of its own block of positions and
    the previous one.
    """

    slopes = (0.5, 0.125)

    def __init__(self, vocabulary: int = VOCABULARY, size: int = 12):
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(
                torch.randn(*shape, dtype=torch.float64, generator=generator) * 0.7,
                requires_grad=False,
            )

        self.table, self.out = weight(vocabulary, size), weight(size, vocabulary)
        self.query, self.key, self.value = (
            weight(size, size),
            weight(size, size),
            weight(size, size),
        )

    def forward(
        self, tokens: Tensor, window: int | None = None, block: int | None = None
    ) -> Tensor:
        """int64 `[b, s]` -> logits `[b, s, v]`."""
        hidden = self.table[tokens]
        query, key, value = hidden @ self.query, hidden @ self.key, hidden @ self.value
        length, heads = tokens.shape[1], len(self.slopes)
        size = query.shape[-1] // heads
        contexts = []
        for head, slope in enumerate(self.slopes):
            channels = slice(head * size, (head + 1) * size)
            rows = []
            for i in range(length):
                first = 0 if window is None else max(0, i - window + 1)
                if block is not None:
                    first = max(0, i - i % block - block)
                keys = slice(first, i + 1)
                distance = torch.arange(i - first, -1, -1, dtype=torch.float64)
                scores = (key[:, keys, channels] @ query[:, i, channels].unsqueeze(-1)).squeeze(
                    -1
                ) / math.sqrt(size)
                probabilities = (scores - slope * distance).softmax(-1)
                rows.append((probabilities.unsqueeze(1) @ value[:, keys, channels]).squeeze(1))
            contexts.append(torch.stack(rows, dim=1))
        return (hidden + torch.cat(contexts, dim=-1)) @ self.out


def direct_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p of each target `[b, s]`, from logits `[b, s, v]` in float64."""
    logits = logits.double()
    return logits.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def random_tokens(count: int, *, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    """int64 `[count]`."""
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed))
