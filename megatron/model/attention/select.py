"""The choice of a backend.

Legend: b batch, s query length, t key length, h heads, d head size.
"""

from torch import Tensor

from megatron.model.attention.reference import reference_attention


class Attention:
    """Causal attention with tables over distance, by the backend chosen at construction."""

    def __init__(self, backend: str = "auto", positional=None):
        self.backend = backend
        self.positional = positional

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
        return attend(query, key, value, backend=self.backend, **options)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias_table: Tensor | None = None,
    weight_table: Tensor | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax(weight * q.k * scale + bias) v, causal: query `[b, h, s, d]`, key and value `[b, h, t, d]`.

    The queries are the last s of the t positions: query i stands at t - s + i. With a window each query sees its last
    `window` keys, itself included. Tables are over distance, float32 `[h, >= min(t, window)]`.
    """
    return reference_attention(
        query,
        key,
        value,
        bias_table=bias_table,
        weight_table=weight_table,
        window=window,
        dropout_p=dropout_p,
        scale=scale,
    )
