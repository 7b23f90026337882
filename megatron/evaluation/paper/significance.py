"""The dagger of KERPLE's Table 3: is the reference method significantly better?"""

import statistics
from collections.abc import Mapping

from megatron.evaluation.statistics import ALPHA, p_value


def significantly_better(first: Mapping[object, float], second: Mapping[object, float]) -> bool:
    """Whether `first` is lower than `second` over the seeds that both have, and the test rejects that it is chance."""
    p = p_value(first, second)
    if p is None or p >= ALPHA:
        return False
    return statistics.fmean(first[seed] - second[seed] for seed in first if seed in second) < 0
