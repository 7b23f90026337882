"""The standard error of a mean loss."""

import numpy as np


def standard_error(
    sums: np.ndarray[tuple[int], np.dtype[np.float64]],
    counts: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> float | None:
    """Standard error of the ratio m = sum(sums) / sum(counts), with one entry per document.

    It is that of a ratio estimate: sqrt(D / (D - 1) * sum_d (S_d - m n_d)^2) / N over the D
    documents with n_d > 0 tokens, where S_d is the sum of losses of document d and N is the sum of
    all n_d. For equal n_d this is the standard error of the mean of the documents' losses. None if
    D < 2.
    """
    # Only documents with scored tokens count.
    sums, counts = sums[counts > 0], counts[counts > 0]
    if len(sums) < 2:
        return None
    residual = sums - sums.sum() / counts.sum() * counts
    return float(np.sqrt(len(sums) / (len(sums) - 1) * np.sum(residual**2)) / counts.sum())
