"""The models of the training benchmarks: this project's GPT with initial weights, and a plain
PyTorch baseline.

Legend: b batch, s tokens, h heads, d head size, e hidden size, v vocabulary.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.positional import ModelShape
from megatron.model.gpt import GPT
from megatron.model.initialization import initialize
from megatron.model.settings import ModelSettings


class PlainConfig(SimpleNamespace):
    """The attributes of `ModelConfig` that the model reads, for machines without pydantic.

    An option that is not listed is off (None), which is the default of most. A test compares it
    with `ModelConfig`.
    """

    norm = "layernorm"
    norm_epsilon = 1e-5
    activation_function = "gelu"
    attention_backend = "auto"
    use_bias_in_norms = True
    use_bias_in_attn_linear = True
    use_bias_in_attn_output = True
    use_bias_in_mlp = True
    no_weight_tying = True
    hidden_dropout = 0.0
    attention_dropout = 0.0

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        num_attention_heads: int,
        seq_length: int,
        **options: Any,
    ):
        head_size = hidden_size // num_attention_heads
        shape = ModelShape(num_attention_heads, head_size, hidden_size, num_layers, seq_length)
        super().__init__(
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_attention_heads=num_attention_heads,
            num_kv_heads=num_attention_heads,
            head_size=head_size,
            mlp_features=4 * hidden_size,
            windows=(None,) * num_layers,
            shape=shape,
            positional_options={},
            **options,
        )

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):  # of protocols such as copying
            raise AttributeError(name)


def initialized_gpt(settings: ModelSettings, *, checkpoint_every: int = 0) -> GPT:
    """A GPT with the initial weights of the paper's configuration."""
    model = GPT(settings, checkpoint_every=checkpoint_every)
    initialize(
        model.layers(),
        settings,
        seed=1234,
        init_method="normal",
        output_init_method="scaled_normal",
        std=0.02,
    )
    return model


def random_batch(
    size: int,
    length: int,
    vocabulary: int,
    device: torch.device | str = "cpu",
    seed: int = 1234,
) -> tuple[Tensor, Tensor]:
    """Tokens and labels, `[b, s]`: the same ones in every call."""
    torch.manual_seed(seed)
    text = torch.randint(vocabulary, (size, length + 1)).to(device)
    tokens, labels = text[:, :-1], text[:, 1:]
    return tokens.contiguous(), labels.contiguous()


class PlainAttention(nn.Module):
    """Causal self-attention, `[b, s, e] -> [b, s, e]`."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        # [b, s, e] -> [b, s, 3, h, d] -> three times [b, h, s, d]
        qkv = self.query_key_value(hidden)
        qkv = qkv.unflatten(2, (3, self.num_heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dense(context.transpose(1, 2).flatten(2))  # [b, s, e]


class PlainBlock(nn.Module):
    """One pre-norm transformer block, `[b, s, e] -> [b, s, e]`."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = PlainAttention(hidden_size, num_heads)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        features = 4 * hidden_size
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, features),
            nn.GELU(),
            nn.Linear(features, hidden_size),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class PlainDecoder(nn.Module):
    """The baseline: a decoder-only language model in plain PyTorch without positions, int64
    `[b, s] -> [b, s, v]`.

    Pre-norm LayerNorm, MLP of 4x with GELU, biases on all linear layers except the untied output
    layer, and `F.scaled_dot_product_attention(is_causal=True)`.
    """

    def __init__(self, vocab_size: int, num_layers: int, hidden_size: int, num_heads: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        blocks = [PlainBlock(hidden_size, num_heads) for _ in range(num_layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(hidden_size)
        self.output = nn.Linear(hidden_size, vocab_size, bias=False)
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks(self.embedding(tokens))
        return self.output(self.norm(hidden))

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of the labels `[b, s]`."""
        logits = self(tokens).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten())
