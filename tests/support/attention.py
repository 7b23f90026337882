"""Attention with a positional method against a formula for the scores of whole texts, in float64.

Legend: b batch, h heads, s query length, t key length, d head size.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kerple.attention import FULL, Attention, Span, score_table

# Queries, keys, span: training, a chunk of an evaluation, decoding, windows and blocks.
CASES = [
    (23, 23, FULL),
    (9, 23, FULL),
    (1, 23, FULL),
    (23, 23, Span(window=6)),
    (1, 23, Span(window=6)),
    (23, 23, Span(block=4)),
    (8, 23, Span(block=4)),
]


def visible(length: int, span: Span) -> Tensor:
    """Pair by pair from the definition, bool `[t, t]`."""
    pairs = [
        [
            j <= i
            and (span.window is None or i - j < span.window)
            and (span.block is None or i // span.block - j // span.block <= 1)
            for j in range(length)
        ]
        for i in range(length)
    ]
    return torch.tensor(pairs)


def states(heads: int, size: int, t: int, batch: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, heads, t, size, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)
    ]


def attended(backend: str, method, query: Tensor, key: Tensor, value: Tensor, s: int, span: Span, **options) -> Tensor:
    """The last s queries of `[b, h, t, d]`, as a model's layer computes them; keys turned at their own positions."""
    t = key.shape[2]
    queries, _ = method.rotate(query[:, :, t - s :], key[:, :, :0], torch.arange(t - s, t), torch.arange(0))
    _, keys = method.rotate(query[:, :, :0], key, torch.arange(0), torch.arange(t))
    table = score_table(method, span.max_kv_len(t), "cpu") if method.modifies_scores else None
    attention = Attention(backend, method)
    return attention(queries, keys, value, table=table, window=span.window, block=span.block, **options)


def assert_is_formula(
    method,
    formula: Callable[[Tensor, Tensor, Tensor], Tensor],
    heads: int,
    size: int,
    backends: tuple[str, ...] = ("reference", "chunked"),
    atol: float = 1e-10,
) -> None:
    """formula: (query, key, visible) -> scores `[b, h, t, t]`; parameters of the method, too, get its gradients."""
    parameters = list(method.parameters())
    for s, t, span in CASES:
        leaves = states(heads, size, t)
        seen = visible(t, span)
        scores = formula(*leaves[:2], seen).masked_fill(~seen, float("-inf"))
        expected = (scores.softmax(-1) @ leaves[2])[:, :, t - s :]
        upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        gradients = torch.autograd.grad(expected, [*leaves, *parameters], upstream)
        for backend in backends:
            found = attended(backend, method, *leaves, s, span)
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)
            found = torch.autograd.grad(found, [*leaves, *parameters], upstream)
            for index, (ours, theirs) in enumerate(zip(found, gradients, strict=True)):
                note = f"gradient {index} with {backend}, {s} of {t}, {span}: "
                torch.testing.assert_close(
                    ours, theirs, rtol=1e-8, atol=10 * atol, msg=lambda text, note=note: note + text
                )


class LargestStorage(TorchDispatchMode):
    """Records the largest storage, in elements of float32, of what any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // 4)
        return results
