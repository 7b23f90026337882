"""Standard errors, compared with scipy."""

import numpy as np
import pytest
import scipy.stats

from megatron.evaluation.statistics import standard_error


def test_equal_documents_have_the_standard_error_of_their_mean():
    means = np.random.default_rng(3).normal(3, 0.4, 12)
    expected = scipy.stats.sem(means)
    assert standard_error(means * 50, np.full(12, 50)) == pytest.approx(expected)
    assert standard_error(means[:1] * 50, np.full(1, 50)) is None
