"""The model settings of one rank, derived from the configuration."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kerple.positional import ModelShape

if TYPE_CHECKING:  # the model does not depend on the configuration package
    from megatron.config import Config


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place in the tensor-parallel group. The process group itself is in megatron-core's parallel_state."""

    size: int = 1
    rank: int = 0

    def heads(self, num_heads: int) -> slice:
        """The slice of all `num_heads` attention heads that this rank computes."""
        local = num_heads // self.size
        return slice(self.rank * local, (self.rank + 1) * local)


ONE_RANK = TensorParallel()


@dataclass(frozen=True)
class ModelSettings:
    """Settings of a model. Sizes are those of the full model, not of a tensor-parallel slice.

    Attributes:
        num_kv_heads: heads of keys and values. Default: `num_heads`.
        head_size: default: `hidden_size` / `num_heads`.
        intermediate_size: features of the MLP; the gate of a gated one (activation swiglu or geglu) has as many.
            Default: 4 * `hidden_size`.
        attention_output_bias: default: `attention_bias`.
        qk_norm: normalize each head of queries and keys, before rotation.
        window: every query attends to the last `window` keys, including its own position; None: to all. A tuple has
            those of the first layers and repeats; see `windows`.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    padded_vocab_size: int
    max_positions: int
    num_kv_heads: int = 0
    head_size: int = 0
    intermediate_size: int = 0
    norm: str = "layernorm"
    norm_epsilon: float = 1e-5
    norm_bias: bool = True
    attention_bias: bool = True
    attention_output_bias: bool | None = None
    mlp_bias: bool = True
    qk_norm: bool = False
    window: int | tuple[int | None, ...] | None = None
    activation: str = "gelu"
    parallel_residual: bool = False
    tied_embeddings: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    attention_backend: str = "auto"
    pos_emb: str = "none"
    pos_emb_options: tuple[tuple[str, object], ...] = ()
    release_bf16_distances: bool = False
    tp: TensorParallel = ONE_RANK

    def __post_init__(self) -> None:
        for name, default in (
            ("num_kv_heads", self.num_heads),
            ("head_size", self.hidden_size // self.num_heads),
            ("intermediate_size", 4 * self.hidden_size),
        ):
            object.__setattr__(self, name, getattr(self, name) or default)
        if self.attention_output_bias is None:
            object.__setattr__(self, "attention_output_bias", self.attention_bias)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each block."""
        pattern = self.window if isinstance(self.window, tuple) else (self.window,)
        return tuple(pattern[layer % len(pattern)] for layer in range(self.num_layers))

    def shape(self, layer: int = 0) -> ModelShape:
        """The sizes for the positional method of a block."""
        return ModelShape(
            num_heads=self.num_heads,
            head_size=self.head_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            max_positions=self.max_positions,
            layer=layer,
        )

    @classmethod
    def from_config(cls, config: "Config", padded_vocab_size: int, tp: TensorParallel = ONE_RANK) -> "ModelSettings":
        model = config.model
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_heads=model.num_attention_heads,
            padded_vocab_size=padded_vocab_size,
            max_positions=model.max_position_embeddings,
            num_kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            intermediate_size=model.mlp_features,
            norm=model.norm,
            norm_epsilon=model.norm_epsilon,
            norm_bias=model.use_bias_in_norms,
            attention_bias=model.use_bias_in_attn_linear,
            attention_output_bias=model.use_bias_in_attn_output,
            mlp_bias=model.use_bias_in_mlp,
            qk_norm=model.use_qk_layernorm,
            window=model.window,
            # GPT-NeoX's fused bias+GELU kernel computes the tanh approximation, so evaluation must use it too.
            activation="gelu_tanh" if model.activation == "gelu" and model.bias_gelu_fusion else model.activation,
            parallel_residual=model.gpt_j_residual,
            tied_embeddings=not model.no_weight_tying,
            hidden_dropout=model.hidden_dropout,
            attention_dropout=model.attention_dropout,
            attention_backend=model.attention_backend,
            pos_emb=model.pos_emb,
            pos_emb_options=tuple(model.positional_options.items()),
            release_bf16_distances=model.release_bf16_distances,
            tp=tp,
        )
