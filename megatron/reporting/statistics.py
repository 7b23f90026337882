"""Whether two methods differ by more than chance."""

import math
import statistics
import warnings
from collections.abc import Mapping

from scipy.stats import ttest_rel

ALPHA = 0.05


def p_value(first: Mapping[object, float], second: Mapping[object, float]) -> float | None:
    """Of the paired two-sided t-test over the seeds that both have, as in KERPLE's Table 3; None with fewer than two of
    them, or where all pairs are equal.
    """
    seeds = [seed for seed in first if seed in second]
    if len(seeds) < 2:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # differences that are equal to the last digits
        p = float(ttest_rel([first[seed] for seed in seeds], [second[seed] for seed in seeds]).pvalue)
    return None if math.isnan(p) else p


def significantly_better(first: Mapping[object, float], second: Mapping[object, float]) -> bool:
    """Whether `first` is lower than `second` over the seeds that both have, and the test rejects that it is chance: the
    dagger of KERPLE's Table 3 stands at what the reference method is significantly better than.
    """
    p = p_value(first, second)
    if p is None or p >= ALPHA:
        return False
    return statistics.fmean(first[seed] - second[seed] for seed in first if seed in second) < 0
