"""Keys of the model: sizes, positional method, initialization, attention."""

import difflib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import torch
from pydantic import ModelWrapValidatorHandler, model_validator

from kerple.attention import Requirements, check_backend
from kerple.positional.base import ModelShape, PositionalMethod
from kerple.positional.registry import (
    PluginError,
    build_layers,
    canonical_name,
    load_plugin,
    registered_names,
)
from kerple.positional.wrappers import PerLayer
from megatron.config.schema.base import (
    CaseInsensitive,
    ConfigSection,
    InitMethod,
    Int,
    PathText,
    SwishIsSilu,
    Widths,
    field,
)
from megatron.utils.errors import first_line, shortened

# Keys that are options of some positional methods: key, option, patterns of the methods' names.
_ROTARY = ("rotary", "dape_rotary", "dape_v2_rotary", "kerple_log_rotary")
_METHOD_KEYS = (
    ("rotary_pct", "fraction", _ROTARY),
    ("rotary_emb_base", "base", (*_ROTARY, "p_rope", "xpos")),
    ("mlp_width", "mlp_width", ("fire", "dape*")),
    ("dapev2_kernel", "kernel_size", ("dape_v2*",)),
    ("noise_seq_length", "threshold", ("fire", "dape_fire", "dape_v2_fire")),
    ("rpe_num_buckets", "num_buckets", ("rpe",)),
    ("rpe_max_distance", "max_distance", ("rpe",)),
)


class ModelConfig(ConfigSection):
    """Model"""

    num_layers: Int = field(..., "Number of transformer blocks.", ge=1, le=10_000)
    hidden_size: Int = field(
        ...,
        "Width of the residual stream. Must be divisible by num_attention_heads, or set head_size.",
        ge=1,
        le=2**20,
    )
    num_attention_heads: Int = field(
        ..., "Attention heads per block. Must be divisible by model_parallel_size.", ge=1, le=2**16
    )
    num_kv_heads: Int = field(
        None,
        """Heads of keys and values. If there are fewer than num_attention_heads, consecutive query
        heads share one (grouped-query attention, arXiv 2305.13245). Must divide
        num_attention_heads, and be divisible by model_parallel_size. Default:
        num_attention_heads.""",
        ge=1,
        le=2**16,
    )
    attention_type: Literal["multihead", "groupedquery"] | None = field(
        None,
        "As in the configurations of Llemma; must fit num_kv_heads, which selects grouped-query "
        "attention.",
    )
    head_size: Int = field(
        None,
        "Dimensions of one attention head. Default: hidden_size / num_attention_heads.",
        ge=1,
        le=2**20,
    )
    intermediate_size: Int = field(
        None,
        """Width of the MLP. As in GPT-NeoX, a gated MLP (activation swiglu or geglu) has a third of
        it, which keeps the number of parameters: 33024 is Llama 7B's 11008. Default: 4 *
        hidden_size.""",
        ge=1,
        le=2**24,
    )
    mlp_multiple_of: Int = field(
        1,
        "The width of the MLP, after division by 3 if it is gated, is rounded up to a multiple of "
        "this.",
        ge=1,
        le=2**24,
    )
    seq_length: Int = field(..., "Sequence length of training, in tokens.", ge=1, le=2**31)
    max_position_embeddings: Int = field(
        None,
        "Number of positions of `pos_emb: learned`; other methods have no limit. Default: "
        "seq_length.",
        ge=1,
        le=2**31,
    )
    norm: Literal["layernorm", "rmsnorm"] = field(
        "layernorm", "Normalization before attention, before the MLP and after the last block."
    )
    layernorm_epsilon: float = field(1e-5, "Epsilon of layernorm, added to the variance.", gt=0)
    rms_norm_epsilon: float = field(1e-8, "Epsilon of rmsnorm, added to the mean square.", gt=0)
    use_bias_in_norms: bool = field(True, "False: layernorm without biases. rmsnorm never has any.")
    use_bias_in_attn_linear: bool = field(
        True, "False: attention's two projections have no biases."
    )
    use_bias_in_attn_output: bool = field(
        None,
        """False: attention's output projection has no bias, even if that of queries, keys and
        values has one, as in Qwen2. Default: use_bias_in_attn_linear.""",
    )
    use_bias_in_mlp: bool = field(True, "False: the linear layers of the MLP have no biases.")
    use_qk_layernorm: bool = field(
        False,
        """True: normalize each head of queries and keys, before rotation, with the norm of `norm`.
        Queries and keys have one weight vector each, of the size of a head, as in Qwen3. GPT-NeoX
        normalizes all heads of a tensor-parallel rank at once, with the same weights for queries
        and keys.""",
    )
    sliding_window_width: Widths | None = field(
        None,
        """A query attends to this number of keys before its own position, and to its own, in
        training and in evaluation: one key more than with Hugging Face's sliding_window of the same
        size. A number for all layers, or a list that repeats, with null for layers that attend to
        all keys: [511, 511, 511, null]. Default: to all.""",
    )
    no_weight_tying: bool = field(
        False,
        "True: the output layer has its own weights. False: it shares those of the token "
        "embedding.",
    )
    pos_emb: str = field("learned", "Positional method, built in or registered by pos_emb_module.")
    pos_emb_options: dict[str, Any] = field({}, "Options of the positional method, by name.")
    pos_emb_module: PathText | None = field(
        None,
        "Python file (path/to/file.py) or module that registers further positional methods when "
        "imported.",
    )
    release_bf16_distances: bool = field(
        False,
        """True: round the distances and biases of KERPLE and ALiBi to bfloat16, as the original
        KERPLE code did. Most distances above 256 are not exact in bfloat16. Use it only to
        reproduce its numbers.""",
    )
    rotary_pct: float = field(
        1.0,
        "rotary, alone and with KERPLE or DAPE: fraction of each head's dimensions that is "
        "rotated.",
        gt=0,
        le=1,
    )
    rotary_emb_base: Int = field(10000, "rotary, p_rope and xpos: base of the wavelengths.", gt=1)
    mlp_width: Int | None = field(
        None,
        "DAPE and FIRE: hidden units of their MLPs. Default: the method's default, 32.",
        ge=1,
        le=2**20,
    )
    dapev2_kernel: Int | None = field(
        None,
        "DAPE V2: width of the convolutions, an odd number. Default: the method's default, 3.",
        ge=1,
        le=2**16,
    )
    noise_seq_length: Int | None = field(
        None,
        """FIRE: twice the initial threshold, as in DAPE's configurations. Default: the method's
        default threshold, 512 (pos_emb_options: {threshold: ...}).""",
        ge=2,
    )
    rpe_num_buckets: Int = field(32, "rpe (T5): number of distance buckets.", ge=2, le=2**20)
    rpe_max_distance: Int = field(
        128, "rpe (T5): distance, in tokens, from which all keys share the last bucket.", ge=2
    )
    activation: Annotated[Literal["gelu", "relu", "silu", "swiglu", "geglu"], SwishIsSilu] = field(
        "gelu",
        """Activation of the MLP. swiglu and geglu: a gated MLP, whose gate has the activation silu
        or exact GELU (arXiv 2002.05202). swish, GPT-NeoX's name of silu, is accepted too.""",
    )
    bias_gelu_fusion: bool = field(
        False,
        "True: the tanh approximation of GELU, as in GPT-NeoX's fused kernel. False: exact GELU.",
    )
    init_method: InitMethod = field(
        "normal", "Initialization of all matrices except those of output_layer_init_method."
    )
    output_layer_init_method: InitMethod = field(
        "scaled_normal", "Initialization of the output projections of attention and MLP."
    )
    init_method_std: float = field(0.02, "Standard deviation of the normal initializations.", gt=0)
    hidden_dropout: float = field(
        0.0, "Dropout probability after embedding, attention and MLP.", ge=0, lt=1
    )
    attention_dropout: float = field(
        0.0, "Dropout probability of the attention weights.", ge=0, lt=1
    )
    make_vocab_size_divisible_by: Int = field(
        128,
        "The vocabulary is padded to a multiple of this times model_parallel_size.",
        ge=1,
        le=2**24,
    )
    padded_vocab_size: Int | None = field(
        None,
        "Vocabulary size after padding; at least that of the tokenizer. Default: the checkpoint's, "
        "or else computed.",
        ge=1,
    )
    attention_backend: Annotated[
        Literal["auto", "reference", "sdpa", "chunked", "flex", "fused"], CaseInsensitive
    ] = field(
        "auto",
        """How attention is computed. reference: plain PyTorch, materializes the score matrix; sdpa:
        PyTorch's scaled_dot_product_attention; chunked: blocks of queries, memory linear in the
        sequence length; flex: PyTorch's FlexAttention; fused: this project's Triton kernels (GPU);
        auto: the fastest one that supports the positional method.""",
    )
    gpt_j_residual: bool = field(
        False,
        "True: parallel residual, x + attention(norm1(x)) + mlp(norm2(x)). False: the MLP follows "
        "the attention.",
    )
    output_layer_parallelism: Literal["column"] = field(
        "column",
        "Dimension of the output layer that tensor parallelism splits: column is the vocabulary.",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _fill_in_sizes(
        cls, values: Any, handler: ModelWrapValidatorHandler["ModelConfig"]
    ) -> "ModelConfig":
        """Fill in defaults that depend on other keys. They are not in `model_fields_set`."""
        if not isinstance(values, dict):
            return handler(values)
        hidden: Any = values.get("hidden_size")
        heads: Any = values.get("num_attention_heads")
        defaults = {
            "max_position_embeddings": values.get("seq_length"),
            "num_kv_heads": heads,
            "use_bias_in_attn_output": values.get("use_bias_in_attn_linear", True),
        }
        are_numbers = isinstance(hidden, int | float) and isinstance(heads, int | float)
        if are_numbers and hidden >= 1 and heads >= 1:
            defaults["head_size"] = max(1, int(hidden // heads))
            defaults["intermediate_size"] = 4 * int(hidden)
        given, complete = dict(values), dict(values)
        for name, default in defaults.items():
            if values.get(name) is None:
                given.pop(name, None)
                complete.pop(name, None)
                if default is not None:
                    complete[name] = default
        section = handler(complete)
        section.model_fields_set.intersection_update(given)
        return section

    def contradictions(self) -> Iterator[str]:
        # Heads.
        heads, kv_heads = self.num_attention_heads, self.num_kv_heads
        if self.hidden_size % heads and "head_size" not in self.model_fields_set:
            yield (
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {heads}; "
                "change one of them, or set head_size"
            )
        else:
            yield from self._positional_contradictions()
        if heads % kv_heads:
            yield (
                f"num_attention_heads {heads} is not divisible by num_kv_heads {kv_heads}; the "
                "same number of query heads shares each head of keys and values"
            )
        actual_type = "groupedquery"
        if kv_heads == heads:
            actual_type = "multihead"
        if self.attention_type not in (None, actual_type):
            yield (
                f"attention_type {self.attention_type}, but num_kv_heads {kv_heads} with "
                f"num_attention_heads {heads} is {actual_type}; change one of them"
            )

        # Layers and the MLP.
        num_widths = len(self.sliding_window_width or ())
        if num_widths > self.num_layers:
            yield (
                f"sliding_window_width has {num_widths} entries, but num_layers is "
                f"{self.num_layers}; layer i has entry i, and a shorter list repeats"
            )
        if self.mlp_features < 1:
            yield (
                f"intermediate_size {self.intermediate_size} with activation {self.activation}: a "
                "gated MLP has a third of it, here 0 features; set at least 2"
            )

        # The rounding of the original KERPLE code.
        rounds, name = self.release_bf16_distances, canonical_name(self.pos_emb)
        if rounds and not name.startswith(("kerple_", "alibi")):
            yield (
                '"release_bf16_distances": the original KERPLE code computes distances in bfloat16 '
                f"only for KERPLE and ALiBi, not for pos_emb {self.pos_emb}; remove the key"
            )
        if rounds and self.pos_emb_options.get("random_range") is not None:
            yield (
                '"release_bf16_distances": distances of random positions (random_range) are not '
                "rounded; remove one of the two"
            )

    def _positional_contradictions(self) -> Iterator[str]:
        """Of the method with its options, and with the attention backend."""
        # The user's own module registers further methods.
        if self.pos_emb_module is not None:
            try:
                load_plugin(self.pos_emb_module)
            except PluginError as error:
                yield f"pos_emb_module {shortened(str(error))}"
                return
            except Exception as error:  # the module is the user's own code
                yield (
                    f"pos_emb_module {shortened(self.pos_emb_module)}: {type(error).__name__}: "
                    f"{first_line(error)}"
                )
                return

        # The name, then the options and the backend.
        names = sorted(registered_names())
        if self.pos_emb not in names:
            nearest = difflib.get_close_matches(self.pos_emb, names, n=3, cutoff=0.0)
            yield (
                f'pos_emb "{self.pos_emb}" is not a known method; nearest: {", ".join(nearest)}. '
                "The file of your own method must be named each time: --set pos-emb-module=FILE "
                "(for kerple convert, inspect and report, --pos-emb-module FILE). For methods of "
                "several files, name one that loads them all (docs/adding-a-method.md)"
            )
            return
        try:
            methods = self.build_on_meta()
            requirements = Requirements.of(
                *methods, dropout=self.attention_dropout > 0, head_size=self.head_size
            )
            check_backend(self.attention_backend, requirements)
        except (ValueError, NotImplementedError, TypeError) as error:  # options of another type
            yield f"pos_emb {self.pos_emb}: {error}"
            return

        # An option with one value in pos_emb_options and another in the key of GPT-NeoX for it.
        for name, option in self._keys_of_method():
            value = self.pos_emb_options.get(option, self.positional_options[option])
            if name in self.model_fields_set and value != self._option_of(name):
                yield (
                    f"{name} {getattr(self, name)} and pos_emb_options.{option} {value} are the "
                    "same option; remove one of them"
                )

        # Buffers, which casting the model would round.
        buffers = [name for method in methods for name, _ in method.named_buffers()]
        if buffers:
            yield (
                f"pos_emb {self.pos_emb}: the method has the buffer {buffers[0]}, which is rounded "
                "when the model is cast; store constants as Python numbers"
            )

        # The list of per_layer.
        if isinstance(methods[0], PerLayer):
            options = {**PerLayer.default_options(), **self.positional_options}
            entries = PerLayer.entries(options["methods"])
            if len(entries) > self.num_layers:
                yield (
                    f"pos_emb per_layer: methods has {len(entries)} entries, but num_layers is "
                    f"{self.num_layers}; remove those that no layer uses"
                )
            for name, option in self._keys_without_effect():
                if name.startswith("rotary"):
                    yield (
                        f"{name} has no effect with pos_emb per_layer; set the option in its list: "
                        f'{{"rotary": {{"{option}": {getattr(self, name)}}}}}'
                    )

    def _keys_without_effect(self) -> Iterator[tuple[str, str]]:
        """Those of _METHOD_KEYS, with their options, that are set but not read by the method."""
        for name, option, _ in _METHOD_KEYS:
            default = type(self).model_fields[name].default
            if getattr(self, name) != default and option not in self.positional_options:
                yield name, option

    def warnings(self) -> Iterator[str]:
        # Gated MLPs of published models have at least 8/3 * hidden_size features.
        size, features = self.intermediate_size, self.mlp_features
        is_small = self.gated and features < 2 * self.hidden_size
        if is_small and "intermediate_size" not in self.model_fields_set:
            yield (
                f"activation {self.activation}: the gated MLP has {features:,} features, a third "
                "of 4 * hidden_size as in GPT-NeoX; for another number, set intermediate_size to "
                "three times that number"
            )
        elif is_small:
            yield (
                f"intermediate_size {size}: the gated MLP has {features:,} features, a third of it "
                f"as in GPT-NeoX; for {size:,} features, set {3 * size}"
            )
        for name, _ in self._keys_without_effect():
            yield f"{name} {getattr(self, name)} has no effect with pos_emb {self.pos_emb}"
        if self.use_qk_layernorm:
            yield (
                "use_qk_layernorm: each head is normalized, with separate weights for queries and "
                "keys; GPT-NeoX normalizes all heads of a tensor-parallel rank at once"
            )

    def build_on_meta(self) -> list[PositionalMethod]:
        """The positional method of each layer, without memory for its parameters. Raises ValueError
        or NotImplementedError for invalid options.
        """
        with torch.device("meta"):
            return build_layers(self.pos_emb, self.shape, **self.positional_options)

    @property
    def positional_options(self) -> dict[str, Any]:
        """Options of the method: the keys of GPT-NeoX and DAPE for it, then pos_emb_options."""
        options = {option: self._option_of(name) for name, option in self._keys_of_method()}
        return {**options, **self.pos_emb_options}

    def _keys_of_method(self) -> Iterator[tuple[str, str]]:
        """Those of _METHOD_KEYS, with their options, that are set and that the method reads."""
        method = canonical_name(self.pos_emb)
        for name, option, patterns in _METHOD_KEYS:
            is_read = any(fnmatchcase(method, pattern) for pattern in patterns)
            if is_read and getattr(self, name) is not None:
                yield name, option

    def _option_of(self, name: str) -> Any:
        """The value of the option that the key `name` stands for."""
        value = getattr(self, name)
        if name == "noise_seq_length":
            value //= 2  # the initial threshold of FIRE
        return value

    @property
    def shape(self) -> ModelShape:
        """The sizes that positional methods are built for."""
        return ModelShape(
            num_heads=self.num_attention_heads,
            head_size=self.head_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            max_positions=self.max_position_embeddings,
        )

    @property
    def gated(self) -> bool:
        """Whether the MLP is gated."""
        return self.activation in ("swiglu", "geglu")

    @property
    def mlp_features(self) -> int:
        """Features of the MLP: rows of its first projection, and of the gate's."""
        size = self.intermediate_size
        if self.gated:
            size = -(-(2 * size // 3) // 2)
        return -(-size // self.mlp_multiple_of) * self.mlp_multiple_of

    @property
    def window(self) -> int | tuple[int | None, ...] | None:
        """The number of keys that a query attends to, including its own position; None: all. If
        layers differ, those of the first layers, which repeat.
        """
        windows = tuple(width and width + 1 for width in self.sliding_window_width or (None,))
        if len(set(windows)) == 1:
            return windows[0]
        return windows

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each block."""
        pattern = self.window
        if not isinstance(pattern, tuple):
            pattern = (pattern,)
        return tuple(pattern[layer % len(pattern)] for layer in range(self.num_layers))

    @property
    def activation_function(self) -> str:
        """The activation that the MLP computes: gelu_tanh is the approximation of GPT-NeoX's fused
        bias+GELU kernel, which evaluation must use too.
        """
        if self.activation == "gelu" and self.bias_gelu_fusion:
            return "gelu_tanh"
        return self.activation

    @property
    def norm_epsilon(self) -> float:
        """The epsilon of the chosen norm."""
        if self.norm == "rmsnorm":
            return self.rms_norm_epsilon
        return self.layernorm_epsilon
