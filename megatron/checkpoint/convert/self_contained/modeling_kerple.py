"""A KERPLE-NeoX language model for the transformers library, with the positional method it was trained with.

The positional method is in the files `positional_*.py` beside this one, as the training code has it.

Legend: b batch, s new tokens, t all tokens (cached and new), h heads, d head size, e hidden size, v vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_kerple import KerpleConfig
from .positional_base import ModelShape
from .positional_method import Method

# Queries whose scores are in memory at a time.
CHUNK = 128

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda hidden: F.gelu(hidden, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def make_norm(config):
    """The configuration's norm, over the hidden size."""
    norms = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}
    return norms[config.norm](config.hidden_size, eps=config.layer_norm_eps)


def make_positional(config):
    """The positional methods as a list: one for all layers, or one for each layer where the method has it so."""
    shape = ModelShape(
        num_heads=config.num_attention_heads,
        head_size=config.hidden_size // config.num_attention_heads,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        max_positions=config.max_position_embeddings,
    )
    first = Method.from_shape(shape, **config.positional_options)
    count = 1 if first.shared or first.embeds else config.num_hidden_layers
    methods = nn.ModuleList([first, *(Method.from_shape(shape, **config.positional_options) for _ in range(1, count))])
    for module in methods.modules():
        # transformers builds a model without values and takes those of the file: all buffers must be in the file.
        module._non_persistent_buffers_set.clear()
    return methods


class Padding:
    """Which keys are padding, and each row's positions; made from the attention mask of a call.

    Padding stands before a row's text or after it. Distances between a row's tokens are then the same as without
    padding, and only methods that add to the embeddings or make the scores need the row's own positions.
    """

    def __init__(self, mask: Tensor, new: int):
        """`mask` is `[b, t]`: 1 for text, 0 for padding. Raises ValueError for padding inside a text."""
        text = mask.bool()
        beginnings = text[:, 0].long() + (text[:, 1:] & ~text[:, :-1]).sum(dim=1)
        if (beginnings > 1).any():
            raise ValueError("attention_mask has padding inside a text; put all padding before the text")
        self.padded = ~text
        self.beginnings = text.int().argmax(dim=1).tolist()
        self.positions = (text.long().cumsum(dim=1) - 1).clamp(min=0)[:, -new:]

    @classmethod
    def of(cls, mask: Tensor | None, length: int, new: int) -> "Padding | None":
        """None where nothing is padded. Raises ValueError for a mask that is not `[b, length]`."""
        if mask is None:
            return None
        if mask.dim() != 2 or mask.shape[1] != length:
            raise ValueError(
                f"attention_mask must be [batch, {length}] (cached and new tokens), not {[*mask.shape]}; "
                "caches of a fixed size (cache_implementation='static') are not supported"
            )
        return None if mask.bool().all() else cls(mask, new)


class Tables(NamedTuple):
    """Tables of a method for distances 0 ... t-1: float32 `bias` and `weight` `[h, t]`; what `modify_scores` needs."""

    bias: Tensor | None
    weight: Tensor | None
    modify_scores: Tensor | None

    @classmethod
    def of(cls, method: nn.Module, length: int, device: torch.device) -> "Tables":
        distance = torch.arange(length, dtype=torch.float32, device=device)
        return cls(
            method.bias(distance) if method.has_bias else None,
            method.weight(distance) if method.has_weight else None,
            method.table(distance) if method.modifies_scores else None,
        )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    method: nn.Module,
    tables: Tables,
    padding: Padding | None,
    dropout: float,
) -> Tensor:
    """softmax(weight * q.k / sqrt(d) + bias) v, or with the method's own scores, causal, the queries being the last of
    the keys' positions: query `[b, h, s, d]`, key and value `[b, h, t, d]`.

    The scores are float32 (float64 for float64 states), of a few queries at a time: memory grows linearly with t.
    """
    s, t = query.shape[2], key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    keys, values = key.to(dtype), value.to(dtype)
    rows = min(CHUNK, method.segment) if method.scales_qk else CHUNK
    contexts = []
    for first in range(0, s, rows):
        last = min(first + rows, s)
        end = t - s + last
        query_positions, key_positions = torch.arange(t - s + first, end), torch.arange(end)
        distance = (query_positions[:, None] - key_positions).to(query.device)
        unseen = (distance < 0)[None, None]
        if padding is not None:
            # A padded query sees itself, so that it has something to see.
            unseen = unseen | (padding.padded[:, None, None, :end] & (distance != 0))
        distance = distance.clamp(min=0)
        queries, seen_keys = query[:, :, first:last], keys[:, :, :end]
        if method.scales_qk:
            queries, seen_keys = method.scale_qk(queries, seen_keys, query_positions, key_positions)
        scores = queries.to(dtype) @ seen_keys.transpose(-1, -2) * query.shape[3] ** -0.5
        if tables.weight is not None:
            scores = scores * tables.weight[:, distance]
        if tables.bias is not None:
            scores = scores + tables.bias[:, distance]
        if method.modifies_scores:
            scores = adapted(
                method, tables.modify_scores, scores, queries, query_positions, key_positions, unseen, padding
            )
        probabilities = F.dropout(scores.masked_fill(unseen, float("-inf")).softmax(dim=-1), dropout)
        contexts.append((probabilities @ values[:, :, :end]).to(query.dtype))
    return torch.cat(contexts, dim=2)


def adapted(
    method: nn.Module,
    table: Tensor | None,
    scores: Tensor,
    query: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    unseen: Tensor,
    padding: Padding | None,
) -> Tensor:
    """The scores that the method makes of scores `[b, h, c, l]`; row by row where rows have positions of their own."""
    if padding is None:
        return method.modify_scores(scores, query, query_positions, key_positions, unseen[0, 0], table)
    rows = zip(scores.split(1), query.split(1), unseen[:, 0], padding.beginnings, strict=True)
    return torch.cat(
        [
            method.modify_scores(row, queries, query_positions - begin, key_positions - begin, hidden, table)
            for row, queries, hidden, begin in rows
        ]
    )


class KerpleAttention(nn.Module):
    """Causal self-attention, `[b, s, e] -> [b, s, e]`."""

    def __init__(self, config, index):
        super().__init__()
        self.index = index
        self.head_size = config.hidden_size // config.num_attention_heads
        self.dropout = config.attention_dropout
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden, method, tables, cache, padding):
        batch, new, _ = hidden.shape
        # Rows are grouped by head: each head's query, key and value stand together.
        states = self.query_key_value(hidden).view(batch, new, -1, 3, self.head_size).transpose(1, 2)
        query, key, value = states.unbind(dim=3)
        if method.rotates:
            held = cache.get_seq_length(self.index) if cache is not None else 0
            positions = torch.arange(held, held + new)
            query, key = method.rotate(query, key, positions, positions)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        context = attend(query, key, value, method, tables, padding, self.dropout if self.training else 0.0)
        return self.dense(context.transpose(1, 2).reshape(batch, new, -1))


class KerpleMLP(nn.Module):
    """`[b, s, e] -> [b, s, 4e] -> [b, s, e]`."""

    def __init__(self, config):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.dense_4h_to_h = nn.Linear(4 * config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, hidden):
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(hidden)))


class KerpleLayer(nn.Module):
    """`[b, s, e] -> [b, s, e]`, pre-norm, with sequential or parallel residuals."""

    def __init__(self, config, index):
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.attention = KerpleAttention(config, index)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = KerpleMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.parallel_residual = config.use_parallel_residual

    def forward(self, hidden, *context):
        attended = self.dropout(self.attention(self.input_layernorm(hidden), *context))
        if self.parallel_residual:
            return hidden + attended + self.dropout(self.mlp(self.post_attention_layernorm(hidden)))
        hidden = hidden + attended
        return hidden + self.dropout(self.mlp(self.post_attention_layernorm(hidden)))


class KerplePreTrainedModel(PreTrainedModel):
    config_class = KerpleConfig
    base_model_prefix = "gpt_neox"
    _no_split_modules = ["KerpleLayer"]  # noqa: RUF012


class KerpleModel(KerplePreTrainedModel):
    """Tokens to hidden states after the final norm. Names of parameters are those of GPTNeoXModel."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.emb_dropout = nn.Dropout(config.hidden_dropout)
        self.positional = make_positional(config)
        self.layers = nn.ModuleList([KerpleLayer(config, index) for index in range(config.num_hidden_layers)])
        self.final_layer_norm = make_norm(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_in

    def set_input_embeddings(self, embeddings):
        self.embed_in = embeddings

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, inputs_embeds=None):
        """`[b, s]` tokens (or `[b, s, e]` embeddings) that follow those in the cache -> the hidden states before every
        layer and the last ones, each `[b, s, e]`.
        """
        hidden = self.embed_in(input_ids) if inputs_embeds is None else inputs_embeds
        new = hidden.shape[1]
        held = past_key_values.get_seq_length() if past_key_values is not None else 0
        padding = Padding.of(attention_mask, held + new, new)
        hidden = self.emb_dropout(self._embed(hidden, held, padding))
        tables = [Tables.of(method, held + new, hidden.device) for method in self.positional]
        states = [hidden]
        for index, layer in enumerate(self.layers):
            which = index if len(self.positional) > 1 else 0
            states.append(layer(states[-1], self.positional[which], tables[which], past_key_values, padding))
        states[-1] = self.final_layer_norm(states[-1])
        return states

    def _embed(self, hidden, held, padding):
        method = self.positional[0]
        if not method.embeds:
            return hidden
        if padding is None:
            return method.embed(hidden, torch.arange(held, held + hidden.shape[1]))
        rows = zip(hidden.split(1), padding.positions, strict=True)
        return torch.cat([method.embed(row, positions) for row, positions in rows])


class KerpleForCausalLM(KerplePreTrainedModel, GenerationMixin):
    """Tokens `[b, s]` to logits `[b, s, v]`; with tied embeddings the embedding is the output layer."""

    def __init__(self, config):
        super().__init__(config)
        self.gpt_neox = KerpleModel(config)
        if not config.tie_word_embeddings:
            self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.gpt_neox.embed_in

    def set_input_embeddings(self, embeddings):
        self.gpt_neox.embed_in = embeddings

    def get_output_embeddings(self):
        return None if self.config.tie_word_embeddings else self.embed_out

    def set_output_embeddings(self, embeddings):
        self.embed_out = embeddings

    def prepare_inputs_for_generation(self, input_ids, *args, **kwargs):  # generate looks for these names
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        # Given by transformers 4; the cache itself says where it ends.
        inputs.pop("cache_position", None)
        return inputs

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        logits_to_keep=0,
    ):
        """attention_mask: `[b, t]`, 0 for padding. labels: `[b, s]`, compared with the prediction one token earlier;
        -100 is left out. logits_to_keep: of the last so many positions only (0: all), or of these positions.
        """
        if output_attentions:
            raise NotImplementedError("output_attentions: the attention probabilities are never held as a whole")
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        states = self.gpt_neox(input_ids, attention_mask, past_key_values, inputs_embeds)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output_weight = self.gpt_neox.embed_in.weight if self.config.tie_word_embeddings else self.embed_out.weight
        logits = F.linear(states[-1][:, kept], output_weight)
        loss = None
        if labels is not None:
            predicted = logits[:, :-1].float().flatten(0, 1)
            loss = F.cross_entropy(predicted, labels[:, 1:].flatten().to(logits.device), ignore_index=-100)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=tuple(states) if output_hidden_states else None,
        )
        return output.to_tuple() if return_dict is False else output
