"""Configuration of a KERPLE-NeoX language model."""

from transformers import PretrainedConfig


class KerpleConfig(PretrainedConfig):
    """Configuration of the model in `modeling_kerple_*.py`. Other arguments are those of
    PretrainedConfig.

    Args:
        positional_options: options of the positional method in this folder.
        hidden_act: gelu, gelu_pytorch_tanh, relu or silu; swiglu and geglu: a gated MLP.
        intermediate_size: features of the MLP; default: 4 * hidden_size.
        num_key_value_heads: heads of keys and values; default: num_attention_heads.
        head_dim: default: hidden_size / num_attention_heads.
        norm: layernorm or rmsnorm.
        qk_norm: normalize each head of queries and keys.
        attention_window: number of keys that a query attends to, including its own; None: all.
        max_position_embeddings: the training length, or the number of learned positions. Other
            methods have no limit.
        training_length: default: max_position_embeddings.
        inference_mode: how the model attends to longer texts, such as `window@512`, `full+clip@256`
            or `sinks@4+508+reindexed+logn`; None: as in training. attention_mode_*.py lists the
            modes.
    """

    model_type = "kerple"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        vocab_size=50304,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=512,
        positional_method="kerple_log",
        positional_options=None,
        num_key_value_heads=None,
        head_dim=None,
        intermediate_size=None,
        qk_norm=False,
        attention_window=None,
        training_length=None,
        inference_mode=None,
        norm_bias=True,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        hidden_act="gelu",
        norm="layernorm",
        layer_norm_eps=1e-5,
        use_parallel_residual=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        initializer_range=0.02,
        use_cache=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **kwargs,
    ):
        # Sizes and the positional method.
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.positional_method = positional_method
        self.positional_options = positional_options or {}

        # Attention. Defaults follow from the sizes.
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.intermediate_size = intermediate_size or 4 * hidden_size
        self.qk_norm = qk_norm
        self.attention_window = attention_window
        self.training_length = training_length or max_position_embeddings
        self.inference_mode = inference_mode

        # Layers and dropout.
        self.norm_bias = norm_bias
        self.attention_bias = attention_bias
        self.attention_output_bias = attention_output_bias
        self.mlp_bias = mlp_bias
        self.hidden_act = hidden_act
        self.norm = norm
        self.layer_norm_eps = layer_norm_eps
        self.use_parallel_residual = use_parallel_residual
        self.hidden_dropout = hidden_dropout
        self.attention_dropout = attention_dropout
        self.initializer_range = initializer_range
        self.use_cache = use_cache

        # Keys that transformers handles.
        super().__init__(
            tie_word_embeddings=tie_word_embeddings,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            **kwargs,
        )
