"""A KERPLE-NeoX language model for the transformers library, with the positional method it was trained with.

The positional method is in the `positional_*.py` files of this folder, unchanged from the training code.

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

# Number of queries whose scores are in memory at a time.
CHUNK = 128

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda hidden: F.gelu(hidden, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def make_norm(config):
    """The norm named in the configuration, over the hidden size."""
    norms = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}
    return norms[config.norm](config.hidden_size, eps=config.layer_norm_eps)


def make_positional(config):
    """A list of positional methods: one for all layers, or one per layer if the method is not shared."""
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
        # transformers builds the model on the meta device and loads all values, so the file needs all buffers.
        module._non_persistent_buffers_set.clear()
    return methods


class Padding:
    """Which keys are padding, and the positions of each row, from an attention mask.

    Padding is before or after a row's text, so distances between a row's tokens are the same as without padding. Only
    methods that change the embeddings or the scores need the positions.
    """

    def __init__(self, mask: Tensor, new: int):
        """`mask`: `[b, t]`, 1 for text and 0 for padding. Raises ValueError for padding inside a text."""
        text = mask.bool()
        segments = text[:, 0].long() + (text[:, 1:] & ~text[:, :-1]).sum(dim=1)
        if (segments > 1).any():
            raise ValueError("attention_mask has padding inside a text; put all padding before the text")
        self.padded = ~text
        self.starts = text.int().argmax(dim=1).tolist()
        self.positions = (text.long().cumsum(dim=1) - 1).clamp(min=0)[:, -new:]

    @classmethod
    def of(cls, mask: Tensor | None, length: int, new: int) -> "Padding | None":
        """None if nothing is padded. Raises ValueError for a mask that is not `[b, length]`."""
        if mask is None:
            return None
        if mask.dim() != 2 or mask.shape[1] != length:
            raise ValueError(
                f"attention_mask must be [batch, {length}] (cached and new tokens), not {[*mask.shape]}; "
                "caches of a fixed size (cache_implementation='static') are not supported"
            )
        return None if mask.bool().all() else cls(mask, new)


class Tables(NamedTuple):
    """Tables of a method for distances 0 ... t-1: float32 `bias` and `weight` `[h, t]`; `scores` for modify_scores."""

    bias: Tensor | None
    weight: Tensor | None
    scores: Tensor | None

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
    """Causal attention: softmax(weight * q.k / sqrt(d) + bias) v, or with scores from the method's `modify_scores`.

    query `[b, h, s, d]` has the last s of the positions of key and value `[b, h, t, d]`. Scores are float32 (float64
    for float64 inputs), and computed for a few queries at a time, so memory grows linearly with t.
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
        mask = (distance < 0)[None, None]
        if padding is not None:
            # A padded query attends to itself, so that its softmax is not empty.
            mask = mask | (padding.padded[:, None, None, :end] & (distance != 0))
        distance = distance.clamp(min=0)
        query_rows, key_rows = query[:, :, first:last], keys[:, :, :end]
        if method.scales_qk:
            query_rows, key_rows = method.scale_qk(query_rows, key_rows, query_positions, key_positions)
        scores = query_rows.to(dtype) @ key_rows.transpose(-1, -2) * query.shape[3] ** -0.5
        if tables.weight is not None:
            scores = scores * tables.weight[:, distance]
        if tables.bias is not None:
            scores = scores + tables.bias[:, distance]
        if method.modifies_scores:
            scores = modified_scores(
                method, tables.scores, scores, query_rows, query_positions, key_positions, mask, padding
            )
        probabilities = F.dropout(scores.masked_fill(mask, float("-inf")).softmax(dim=-1), dropout)
        contexts.append((probabilities @ values[:, :, :end]).to(query.dtype))
    return torch.cat(contexts, dim=2)


def modified_scores(
    method: nn.Module,
    table: Tensor | None,
    scores: Tensor,
    query: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    mask: Tensor,
    padding: Padding | None,
) -> Tensor:
    """The method's final scores `[b, h, c, l]`; with padding row by row, because the rows' positions differ."""
    if padding is None:
        return method.final_scores(scores, query, query_positions, key_positions, mask[0, 0], table)
    rows = zip(scores.split(1), query.split(1), mask[:, 0], padding.starts, strict=True)
    return torch.cat(
        [
            method.final_scores(row_scores, row_query, query_positions - start, key_positions - start, row_mask, table)
            for row_scores, row_query, row_mask, start in rows
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
        # The rows of the weight are grouped by head, [heads, 3, d].
        states = self.query_key_value(hidden).view(batch, new, -1, 3, self.head_size).transpose(1, 2)
        query, key, value = states.unbind(dim=3)
        if method.rotates:
            cached = cache.get_seq_length(self.index) if cache is not None else 0
            positions = torch.arange(cached, cached + new)
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
    """Tokens to hidden states after the final norm. Parameters have the names of GPTNeoXModel's."""

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
        """Tokens `[b, s]` (or embeddings `[b, s, e]`) that follow those in the cache -> the hidden states before each
        layer, and after the final norm, `[b, s, e]` each.
        """
        hidden = self.embed_in(input_ids) if inputs_embeds is None else inputs_embeds
        new = hidden.shape[1]
        cached = past_key_values.get_seq_length() if past_key_values is not None else 0
        padding = Padding.of(attention_mask, cached + new, new)
        hidden = self.emb_dropout(self._embed(hidden, cached, padding))
        tables = [Tables.of(method, cached + new, hidden.device) for method in self.positional]
        states = [hidden]
        for index, layer in enumerate(self.layers):
            method = index if len(self.positional) > 1 else 0
            states.append(layer(states[-1], self.positional[method], tables[method], past_key_values, padding))
        states[-1] = self.final_layer_norm(states[-1])
        return states

    def _embed(self, hidden, cached, padding):
        method = self.positional[0]
        if not method.embeds:
            return hidden
        if padding is None:
            return method.embed(hidden, torch.arange(cached, cached + hidden.shape[1]))
        rows = zip(hidden.split(1), padding.positions, strict=True)
        return torch.cat([method.embed(row, positions) for row, positions in rows])


class KerpleForCausalLM(KerplePreTrainedModel, GenerationMixin):
    """Tokens `[b, s]` to logits `[b, s, v]`. With tied embeddings, the embedding is also the output layer."""

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

    def prepare_inputs_for_generation(self, input_ids, *args, **kwargs):  # generate inspects these names
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        # transformers 4 passes it; the cache knows its length.
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
        """attention_mask: `[b, t]`, 0 for padding. labels: `[b, s]`, compared with the prediction at the previous
        token; -100 is ignored. logits_to_keep: compute logits for the last N positions (0: all), or for these ones.
        """
        if output_attentions:
            raise NotImplementedError("output_attentions: the attention probabilities are computed in chunks only")
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        states = self.gpt_neox(input_ids, attention_mask, past_key_values, inputs_embeds)
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output_weight = self.gpt_neox.embed_in.weight if self.config.tie_word_embeddings else self.embed_out.weight
        logits = F.linear(states[-1][:, positions], output_weight)
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
