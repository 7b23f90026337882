"""The layers of a KERPLE-NeoX model: norms, attention and MLPs.

Legend: b batch, s new tokens, t all tokens (cached and new), h heads, g heads of keys and values, d
head size, e hidden size.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_call import AttentionCall
from .attention_kerple import attend, attend_in_inference_mode, tables_of
from .attention_span import Span
from .attention_tables import PositionTables
from .positional_base import ModelShape
from .positional_method import NAME, Method

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda hidden: F.gelu(hidden, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
# The activation of the gate in a gated MLP.
GATES = {"swiglu": F.silu, "geglu": F.gelu}


def make_norm(config, size=None):
    """The norm named in the configuration, over the hidden size or another one."""
    if size is None:
        size = config.hidden_size
    if config.norm == "rmsnorm":
        return nn.RMSNorm(size, eps=config.layer_norm_eps)
    return nn.LayerNorm(size, eps=config.layer_norm_eps, bias=config.norm_bias)


def make_positional(config, layer=0):
    """The positional method of the configuration, for a layer. Raises ValueError if this code is
    another method's.
    """
    if config.positional_method != NAME:
        raise ValueError(
            f"the configuration has positional_method {config.positional_method}, but the code "
            f"that was loaded with it computes {NAME}; load the model with the code in its own "
            "folder"
        )
    shape = ModelShape(
        num_heads=config.num_attention_heads,
        head_size=config.head_dim,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        max_positions=config.max_position_embeddings,
        layer=layer,
    )
    return Method.from_shape(shape, **config.positional_options)


def is_shared(method):
    """Whether one instance of the method serves all layers."""
    return method.shared or "embed" in method.hooks


def check_loaded(method, device):
    """Raises ValueError if accelerate has offloaded parameters: it loads those of modules that are
    called, and the positional method is not.
    """
    if torch.compiler.is_compiling() or device.type == "meta":
        return
    if any(parameter.is_meta for parameter in method.parameters()):
        raise ValueError(
            "the parameters of the positional method are offloaded to the CPU or disk, which is "
            "not supported; give gpt_neox.positional (if it exists, otherwise gpt_neox.layers) a "
            "device in device_map, or raise max_memory"
        )


class KerpleAttention(nn.Module):
    """Causal self-attention, `[b, s, e] -> [b, s, e]`. Consecutive query heads can share a head of
    keys and values.
    """

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        hidden, size = config.hidden_size, config.head_dim
        self.queries_per_key = config.num_attention_heads // config.num_key_value_heads
        queries = config.num_attention_heads * size
        outputs = queries + 2 * config.num_key_value_heads * size
        self.query_key_value = nn.Linear(hidden, outputs, bias=config.attention_bias)
        if config.qk_norm:
            self.query_norm, self.key_norm = make_norm(config, size), make_norm(config, size)
        self.dense = nn.Linear(queries, hidden, bias=config.attention_output_bias)
        self.positional = make_positional(config, layer_idx)
        if is_shared(self.positional):
            self.positional = None

    def forward(self, hidden, tables, shared, layout, cache, output_attentions):
        """tables, shared: the tables and the method of all layers, if they share one."""
        method = shared
        if self.positional is not None:
            method = self.positional
        check_loaded(method, hidden.device)
        if self.positional is not None and layout.mode is None:
            tables = tables_of(method, layout.total, hidden.device)
        batch, new, _ = hidden.shape

        # The rows of the weight are grouped by key head: the queries that share a key, the key, and
        # its value.
        shape = batch, new, -1, self.queries_per_key + 2, self.config.head_dim
        rows = self.query_key_value(hidden)
        states = rows.view(shape).transpose(1, 2)  # [b, g, s, h / g + 2, d]
        query, key, value = states.split((self.queries_per_key, 1, 1), dim=3)
        query, key, value = query.transpose(2, 3).flatten(1, 2), key.squeeze(3), value.squeeze(3)
        if self.config.qk_norm:
            # Autocast computes norms in float32.
            query, key = self.query_norm(query).to(value.dtype), self.key_norm(key).to(value.dtype)

        # Positions, and the keys and values in the cache.
        query, key = layout.rotate(method, query, key)
        query, key, value = layout.append_decay(
            method, hidden, query, key, value, cache, self.layer_idx
        )
        if cache is not None:
            # transformers 4 needs the places in a static cache.
            places = {"cache_position": torch.arange(new, device=hidden.device) + layout.cached}
            key, value = cache.update(key, value, self.layer_idx, places)

        # Attention, without the dimensions of a decay. Unused places of a static cache have
        # probability 0.
        call = self.call(query, key, value, method, tables, layout)
        implementation, probabilities = self.config._attn_implementation, None
        if layout.mode is None:
            context, probabilities = attend(call, implementation, output_attentions)
        else:
            context = attend_in_inference_mode(call, method, layout, implementation)
        unused = key.shape[2] - call.kv_len
        if unused and output_attentions:
            probabilities = F.pad(probabilities, (0, unused))
        context = context[..., : self.config.head_dim].transpose(1, 2)  # [b, s, h, d]
        return self.dense(context.reshape(batch, new, -1)), probabilities

    def call(self, query, key, value, method, tables, layout):
        """The call of attention for query `[b, h, s, d]`, and for key and value `[b, g, t, d]` with
        unused places of a static cache after them.
        """
        # A decay is a part of query and key. In an inference mode, a method applies to each text.
        applied = None
        if layout.mode is None and "decay" not in method.hooks:
            applied = method
        dropout = 0.0
        if self.training:
            dropout = self.config.attention_dropout
        key, value = key[:, :, : layout.total], value[:, :, : layout.total]
        dropped = 0
        if layout.documents is None:
            dropped = layout.total - key.shape[2]
        return AttentionCall(
            query=query,
            key=key,
            value=value,
            scale=self.config.head_dim**-0.5,
            method=applied,
            tables=tables,
            span=Span(self.config.attention_window),
            documents=layout.documents,
            dropout_p=dropout,
            dropped=dropped,
        )


class KerpleMLP(nn.Module):
    """`[b, s, e] -> [b, s, intermediate_size] -> [b, s, e]`."""

    def __init__(self, config):
        super().__init__()
        hidden, features, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.dense_h_to_4h = nn.Linear(hidden, features, bias=bias)
        self.dense_4h_to_h = nn.Linear(features, hidden, bias=bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, hidden):
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(hidden)))


class KerpleGatedMLP(nn.Module):
    """w2(activation(w1(x)) * w3(x)), `[b, s, e] -> [b, s, intermediate_size] -> [b, s, e]`."""

    def __init__(self, config):
        super().__init__()
        hidden, features, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.w1 = nn.Linear(hidden, features, bias=bias)
        self.w3 = nn.Linear(hidden, features, bias=bias)
        self.w2 = nn.Linear(features, hidden, bias=bias)
        self.activation = GATES[config.hidden_act]

    def forward(self, hidden):
        return self.w2(self.activation(self.w1(hidden)) * self.w3(hidden))


class KerpleLayer(GradientCheckpointingLayer):
    """`[b, s, e] -> [b, s, e]`, pre-norm, with sequential or parallel residuals."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.attention = KerpleAttention(config, layer_idx)
        self.post_attention_layernorm = make_norm(config)
        mlp = KerpleMLP
        if config.hidden_act in GATES:
            mlp = KerpleGatedMLP
        self.mlp = mlp(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.parallel_residual = config.use_parallel_residual

    # Reentrant checkpointing needs the tensors that require gradients as separate positional
    # arguments. With gradient checkpointing, all supported versions of transformers remove a cache
    # that is called `layer_past`.
    def forward(
        self, hidden, bias, weight, scores, shared, layout, layer_past=None, output_attentions=False
    ):
        tables = PositionTables(bias=bias, weight=weight, scores=scores)
        normed = self.input_layernorm(hidden)
        attended, probabilities = self.attention(
            normed, tables, shared, layout, layer_past, output_attentions
        )
        attended = self.dropout(attended)
        if self.parallel_residual:
            attended = hidden + attended
            normed = self.post_attention_layernorm(hidden)
            return attended + self.dropout(self.mlp(normed)), probabilities
        hidden = hidden + attended
        normed = self.post_attention_layernorm(hidden)
        return hidden + self.dropout(self.mlp(normed)), probabilities
