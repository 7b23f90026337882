"""Positional methods as parameters of tests that take long for all of them."""

from typing import Any

import pytest

from kerple.positional import primary_names

# They combine parts of other methods, and have no code for training, caches and exports of their own.
VARIANTS = (
    *("dape", "dape_v2", "dape_alibi", "dape_fire", "dape_rotary", "dape_v2_alibi", "dape_v2_fire", "dape_v2_rotary"),
    *("kerple_gaussian", "kerple_gaussian3", "kerple_log3", "kerple_power__ap", "kerple_power_original"),
)


def methods_and_variants() -> list[Any]:
    """Every method; CI tests the variants."""
    return [pytest.param(name, marks=pytest.mark.ci if name in VARIANTS else ()) for name in primary_names()]
