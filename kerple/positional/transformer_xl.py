"""Transformer-XL's relative positions (arXiv 1901.02860, section 3.3).

The score of query i and key j is ((q_i + u).k_j + (q_i + v).W r_δ) / sqrt(d) with δ = i - j. r_δ
are the sines of δ / 10000^(2k/e), followed by the cosines. u, v and W, which maps r_δ to a vector
per head, are learned.

Legend: b batch, h heads, c queries, l keys, d head size, e hidden size, n distances.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.positional.base import Chunk, ScoreModifier, draw
from kerple.positional.functional import (
    Angles,
    by_distance,
    check_heads,
    check_num_heads,
    consecutive,
)
from kerple.positional.registry import register


class Projection(nn.Linear):
    """A linear layer computed in the dtype of its input."""

    def forward(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weight.to(states.dtype))


@register("transformer_xl", "xl_bias")
class TransformerXL(ScoreModifier):
    """Parameters per layer: `content_bias` (u) and `position_bias` (v) `[h, 1, d]`, and
    `relative.weight` (W) `[h d, e]`, all drawn from N(0, init_std²). Another scale of the call
    applies to (q + u).k only.
    """

    per_pair = True
    shift_invariant = True
    signed = True
    causal_only = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        hidden_size: int,
        base: float = 10_000.0,
        init_std: float = 0.02,
    ):
        super().__init__()
        if hidden_size % 2:
            raise ValueError(
                f"transformer_xl's sines and cosines need an even hidden size; got {hidden_size}"
            )
        check_num_heads(num_heads)
        self.num_heads = num_heads
        self.init_std = init_std
        self.scale: float = head_size**-0.5
        self.angles = Angles(hidden_size, base)
        self.content_bias = nn.Parameter(torch.empty(num_heads, 1, head_size))
        self.position_bias = nn.Parameter(torch.empty(num_heads, 1, head_size))
        self.relative = Projection(hidden_size, num_heads * head_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        for parameter in (self.content_bias, self.position_bias, self.relative.weight):
            draw(parameter, "normal", 0.0, self.init_std, generator)

    def rotate(
        self, query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Adds u to the query, so that the scores contain (q + u).k."""
        check_heads(query, self.num_heads, "Transformer-XL")
        return query + self.content_bias.to(query.dtype), key

    def table(self, distance: Tensor) -> Tensor:
        """W r_δ per head, `[h, d, n]`."""
        cosine, sine = self.angles(distance, distance.device)  # [n, e/2]
        dtype = torch.promote_types(self.content_bias.dtype, torch.float32)
        embedding = torch.cat((sine, cosine), dim=-1)  # [n, e]
        vectors: Tensor = self.relative(embedding.to(dtype))  # [n, h d]
        return vectors.view(len(distance), self.num_heads, -1).permute(1, 2, 0)

    def modify_scores(self, chunk: Chunk) -> Tensor:
        assert chunk.table is not None  # `table` above never returns None
        scores = chunk.scores
        queries = chunk.query_positions
        keys = chunk.key_positions
        table = chunk.table
        after = None
        if not chunk.causal:
            table, after = table.unbind()
        # `rotate` has added u to the query, which becomes q + v.
        difference = self.position_bias - self.content_bias
        query = chunk.query.to(scores.dtype) + difference.to(scores.dtype)  # [b, h, c, d]
        if consecutive(queries) and consecutive(keys):
            vectors = by_distance(table, queries, keys, after)  # [h, d, c + l - 1]
            products = query @ vectors.to(scores.dtype)  # [b, h, c, c + l - 1]
            return scores + self.scale * _relative_shift(products, len(keys))

        # Random positions (`wrappers.py`) and compiled code: the products with all vectors, from
        # the farthest key after the query to the farthest before it.
        following = 0
        if after is not None:
            following = after.shape[-1] - 1
            table = torch.cat((after[..., 1:].flip(-1), table), dim=-1)  # [h, d, n]
        products = query @ table.to(scores.dtype)  # [b, h, c, n]
        distance = queries[:, None] - keys + following
        distance = distance.clamp(0, table.shape[-1] - 1)  # masked pairs may be beyond the table
        index = distance.to(scores.device).expand_as(scores)
        return scores + self.scale * products.gather(-1, index)


def _relative_shift(products: Tensor, keys: int) -> Tensor:
    """`[b, h, c, c + l - 1]` -> `[b, h, c, l]`: row i begins at column c - 1 - i, where its own
    distances are.

    The start of a row's values is one column before that of the previous row. Viewing the flattened
    tensor with rows that are one element shorter therefore aligns them.
    """
    rows, columns = products.shape[-2:]
    if rows == 1:
        return products
    first = rows - 1
    end = first + rows * (columns - 1)
    flat = products.flatten(-2)[..., first:end]
    shifted = flat.view(*flat.shape[:-1], rows, columns - 1)
    return shifted[..., :keys]
