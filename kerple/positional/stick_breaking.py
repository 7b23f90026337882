"""Stick-breaking attention (arXiv 2410.17980): each query takes a share of what nearer keys have
left.

With the scaled scores z, query i gives key j < i the weight

    A_ij = sigmoid(z_ij) * product of (1 - sigmoid(z_ik)) for k = j+1 ... i-1

From the nearest key on, each key takes the share sigmoid(z) of the rest. The query's own value gets
what all earlier keys leave, as in the authors' models, so the weights add up to 1. The final scores
are log A, which the softmax leaves as they are. There are no parameters and no other positions.

Legend: b batch, h heads, c queries, l keys, d head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.positional.base import Chunk, ScoreModifier
from kerple.positional.functional import positions_on
from kerple.positional.registry import register


@register("stick_breaking")
class StickBreaking(ScoreModifier):
    """The nearest keys take their shares first; the query's own value gets the rest."""

    shared = True

    def modify_scores(self, chunk: Chunk) -> Tensor:
        scores = chunk.scores
        query = positions_on(chunk.query_positions, scores.device)
        key = positions_on(chunk.key_positions, scores.device)
        own = key == query[:, None]
        # log(1 - sigmoid(z)) = log sigmoid(-z) of the keys that take a share; the sums from a key
        # to the query.
        left = F.logsigmoid(-scores).masked_fill(chunk.mask | own, 0.0)
        sums = left.flip(-1).cumsum(-1).flip(-1)
        # log sigmoid(z_ij) = z_ij + log sigmoid(-z_ij), whose second term is in the sum from key j.
        return torch.where(own, sums[..., :1], scores + sums)
