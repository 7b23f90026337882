"""Methods whose tokens decay the attention to all earlier tokens: forgetting attention and CABLE.

    forgetting   the forget gate of token k is sigmoid(w.x_k + b), per head and layer (FoX, arXiv
                 2503.02130); the decay f_k is its logarithm
    cable        the decay f_k is -softplus(w.x_k + b) (arXiv 2503.08067)

x is the input of the layer's attention, after its norm. Since -softplus(z) = log sigmoid(-z), both
are the same family of functions, with opposite signs of w and b; at initialization the biases of
both have the same distribution. Neither uses other positions. The weights w start from N(0, 0.02)
and the biases b at zero, as in both codes. CABLE's published code does not divide the products of
queries and keys by sqrt(d); here they are divided, as for all methods.

With the decay f_k of token k (a negative number per head, computed from its hidden state), the bias
is

    bias_ij = sum of f_k for k = j+1 ... i = c_i - c_j,    with the prefix sums c

Attention receives the prefix sums. The fused kernels subtract them from the scores. For other
backends, `append_decay` makes them a part of the dot product: queries and keys get dimensions that
contain c, and dimensions with a constant that meet them.

Legend: b batch, s query length, t key length, h heads, g heads of keys and values (`group` = h/g
query heads share one), d head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.positional.base import PositionalMethod, draw
from kerple.positional.functional import check_num_heads
from kerple.positional.registry import register

INIT_STD = 0.02  # of the weights w
# A power of two. In float16 the prefix sums may reach 65,504 * FACTOR / sqrt(d).
FACTOR = 256.0
# A prefix sum is stored as the sum of this many numbers, so that it has at least 32 significant
# bits (float64: 53).
PARTS = {torch.float64: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}


@register("forgetting", "fox")
class Forgetting(PositionalMethod):
    """Bias: the sum of log sigmoid(w.x + b) over the tokens after the key, up to the query.

    Parameters `gate.weight` `[h, e]` and `gate.bias` `[h]`, in each layer.
    """

    shared = False
    causal_only = True
    sign = 1.0

    def __init__(self, num_heads: int, hidden_size: int):
        super().__init__()
        check_num_heads(num_heads)
        self.gate = nn.Linear(hidden_size, num_heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        draw(self.gate.weight, "normal", 0.0, INIT_STD, generator)
        self.gate.bias.zero_()

    def decay(self, hidden: Tensor) -> Tensor:
        logits = self.gate(hidden)  # [b, s, h]
        # In at least float32.
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logits = logits.to(dtype)
        decay = F.logsigmoid(self.sign * logits)
        return decay.transpose(1, 2)  # [b, h, s]

    def statistics(self) -> dict[str, Tensor]:
        """The gates of hidden states of zeros."""
        bias = self.gate.bias.detach().float()
        logits = self.sign * bias
        return {"gate": logits.sigmoid()}


@register("cable")
class Cable(Forgetting):
    """Bias: the sum of -softplus(w.x + b) over the tokens after the key, up to the query.

    Parameters `gate.weight` `[h, e]` and `gate.bias` `[h]`, in each layer.
    """

    sign = -1.0


def decay_sums(decay: Tensor, previous: Tensor | None = None) -> Tensor:
    """The prefix sums of decays `[b, h, t]`, in float64 (MPS: float32).

    Long sums of large decays would lose the differences of near tokens in float32.

    Args:
        decay: `[b, h, t]`, of consecutive tokens.
        previous: `[b, h, 1]`, the prefix sum of the token before these; None if they are the first.
    """
    dtype = sums_dtype(decay.device)
    sums = decay.to(dtype).cumsum(dim=-1)
    if previous is None:
        return sums
    return previous + sums


def sums_dtype(device: torch.device) -> torch.dtype:
    """The dtype of prefix sums."""
    if device.type == "mps":
        return torch.float32
    return torch.float64


def append_decay(
    query: Tensor, key: Tensor, value: Tensor, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with additional dimensions for the bias; those of the value are zero.

    Attention must multiply the products by `scale`, that of the head size before. Its result has
    the additional dimensions too; remove them with `context[..., :d]`.

    Args:
        query: `[b, h, s, d]`, of the last s of the t tokens. key, value: `[b, g, t, d]`.
        sums: `[b, h, t]`, see `decay_sums`.
        scale: factor of q.k.
    """
    # The columns of the sums: those of each head's keys, and those of its queries.
    group = query.shape[1] // key.shape[1]
    parts = PARTS[key.dtype]
    sums = sums / (scale * FACTOR)
    by_kv_head = sums.unflatten(1, (-1, group))  # [b, g, group, t]
    by_kv_head = by_kv_head.transpose(2, 3)  # [b, g, t, group]
    key_columns = _split(-by_kv_head, key.dtype, parts)
    key_columns = key_columns.flatten(-2)  # [b, g, t, group parts]
    # The softmax cancels the number of the query, so its gradient is zero.
    query_sums = sums[..., -query.shape[2] :].detach()
    query_columns = _split(query_sums, query.dtype, parts)  # [b, h, s, parts]

    # The constants that meet them. Of the heads that share a key, each meets its own columns.
    own = torch.eye(group, dtype=query.dtype, device=query.device)
    own = own.repeat_interleave(parts, dim=1) * FACTOR  # [group, group parts]
    own = own.repeat(key.shape[1], 1)[None, :, None]  # [1, h, 1, group parts]
    own = own.expand(*query.shape[:3], -1)
    constant = key.new_full((1,), FACTOR)
    constant = constant.expand(*key.shape[:3], parts)  # [b, g, t, parts]

    query = torch.cat((query, own, query_columns), dim=-1)
    key = torch.cat((key, key_columns, constant), dim=-1)
    value = F.pad(value, (0, parts * (group + 1)))
    return query, key, value


def appended_sums(key: Tensor, group: int, scale: float) -> Tensor:
    """The prefix sums `[b, h, t]` that keys `[b, g, t, d + extra]` from `append_decay` contain."""
    parts = PARTS[key.dtype]
    first = -parts * (group + 1)
    columns = key[..., first:-parts].to(sums_dtype(key.device))  # [b, g, t, group parts]
    columns = columns.unflatten(-1, (group, parts))
    by_kv_head = columns.sum(dim=-1)  # [b, g, t, group]
    sums: Tensor = by_kv_head.transpose(2, 3).flatten(1, 2)  # [b, h, t]
    return sums * (-scale * FACTOR)


def _split(numbers: Tensor, dtype: torch.dtype, parts: int) -> Tensor:
    """`[..., parts]` whose sums are the numbers; the gradient goes through the first part."""
    # Each part is the rounded rest of the parts before it.
    split = []
    for _ in range(parts):
        part = numbers.to(dtype)
        split.append(part)
        numbers = numbers.detach() - part.detach()
    return torch.stack(split, dim=-1)
