"""Values by setting, method, length and seed; the paired t-test against scipy and its formula."""

import math

import numpy as np
import pytest
from pandas import Series
from scipy import stats

from megatron.reporting.aggregate import (
    Method,
    Setting,
    comparable_means,
    measurements,
    setting_of,
    significantly_better,
)
from megatron.utils.errors import UserError
from tests.support.errors import assert_rejected
from tests.support.records import passkey_record, record, seeds


def test_methods_and_settings():
    assert Method("alibi", "window@64").kind == Method("alibi", "window")
    for mode in ("blockwise@256", "blockwise@256+logn", "window@512+clip@64"):
        assert Method("xpos", mode).kind == Method("xpos", mode), "no published values"
    setting = setting_of(record("alibi", 512, 3.0, corpus="GitHub"))
    assert setting == Setting("GitHub", 512, "non-overlapping", (12, 768))
    assert setting.name == "github-12x768-512-non-overlapping"
    assert setting_of({}) == Setting(None, None, "", None)
    assert setting_of({}).name == "text"


def test_values_by_seed():
    records = [*seeds("alibi", 512, [3.0, 3.2]), *seeds("rpe", 1024, [4.0])]
    records += [record("rpe", 512, None), {"kind": "resolution"}]
    values = measurements(records, "extrapolation", "perplexity")
    setting = setting_of(records[0])
    assert values.settings == [setting]
    assert values.methods == [Method("alibi"), Method("rpe")]
    assert values.lengths == [512, 1024]
    assert values.num_seeds == 2
    other = [
        record("alibi", length, 3.0, seed)
        for length, seed in ((64, 3), (64, 4), (32, None), (16, None))
    ]
    assert measurements([*records, *other], "extrapolation", "perplexity").num_seeds == 2, (
        "not of all methods together"
    )
    assert values.values(setting, Method("alibi"), 512).to_dict() == {1: 3.0, 2: 3.2}
    assert values.values(setting, Method("rpe"), 512).isna().all()
    assert values.values(setting, Method("alibi"), 1024) is None
    curve = values.by_seed(setting, Method("alibi"))
    assert curve.index.tolist() == [512]
    assert curve.loc[512].to_dict() == {1: 3.0, 2: 3.2}
    assert values.by_seed(setting, Method("rpe")).index.tolist() == [1024], "512 has no value"
    assert values.select([setting], [Method("rpe")]).methods == [Method("rpe")]


def test_mean_over_depths():
    records = [
        passkey_record("alibi", 512, depth, accuracy) for depth, accuracy in ((0, 0.2), (0.5, 0.4))
    ]
    records += [passkey_record("rpe", 512, 0, 0.2), passkey_record("rpe", 512, 0.5, None)]
    records += [passkey_record("fire", 512, 0, 0.2)]
    values = measurements(records, "passkey", "accuracy")
    setting = setting_of(records[0])
    means = values.over_depths()
    assert means.values(setting, Method("alibi"), 512).tolist() == [pytest.approx(0.3)]
    assert means.values(setting, Method("rpe"), 512).isna().all(), "one depth has no value"
    assert means.values(setting, Method("fire"), 512) is None, "one depth was not measured"


def test_two_checkpoints_with_the_same_seed_are_rejected():
    first = record("alibi", 512, 4.0)
    elsewhere = {**first["checkpoint"], "path": "elsewhere"}
    second = record(
        "alibi", 512, 4.1, checkpoint={**elsewhere, "iteration": 20, "fingerprint": "different"}
    )
    assert_rejected(
        r"nowhere/alibi/1.*10.*20", measurements, [first, second], "extrapolation", "perplexity"
    )
    retrained = record(
        "alibi", 512, 4.0, checkpoint={**first["checkpoint"], "fingerprint": "retrained"}
    )
    with pytest.raises(UserError, match="two checkpoints have results for alibi"):
        measurements([first, retrained], "extrapolation", "perplexity")
    for values in ({"length": 1024}, {"mode": "window@32"}):
        other = {**retrained, **values}
        assert_rejected("alibi.*512.*full", measurements, [first, other], "extrapolation", "loss")
    moved = record("alibi", 512, 4.0, checkpoint=elsewhere)
    assert measurements([first, moved], "extrapolation", "perplexity").num_seeds == 1
    more_tokens = record("alibi", 512, 4.1, measurement="more tokens")
    assert_rejected(
        r"nowhere/alibi/1.*10.*512",
        measurements,
        [first, more_tokens],
        "extrapolation",
        "perplexity",
    )


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("random_seed", range(3))
def test_paired_t_test(shift, random_seed):
    generator = np.random.default_rng(random_seed)
    first = 20 + generator.normal(size=5)
    second = first + shift + 0.1 * generator.normal(size=5)
    # t = mean(d) / (std(d) / sqrt(n)) with n - 1 degrees of freedom, two-sided
    difference = first - second
    t = difference.mean() / (difference.std(ddof=1) / math.sqrt(5))
    p = 2 * stats.t.sf(abs(t), 4)
    assert significantly_better(Series(first), Series(second)) is bool(p < 0.05 and t < 0)
    assert significantly_better(Series(second), Series(first)) is bool(p < 0.05 and t > 0)


def test_the_t_test_pairs_values_by_seed():
    log = Series({1: 13.1, 2: 24.2, 3: 33.9, 4: 44.0, 5: 53.3})
    alibi = Series({5: 53.9, 4: 44.4, 3: 34.5, 2: 24.9, 1: 13.4, 6: 0.0, 7: math.nan})
    assert significantly_better(log, alibi)
    assert not significantly_better(log, alibi[log.index] + [9.0, 0.0, 0.0, 0.0, 0.0])


def test_means_over_other_seeds_cannot_be_compared():
    cells = [
        Series({1: 2.0}),
        Series({1: 2.0, 2: 4.0, 3: math.nan}),
        Series({2: 3.0, 1: 3.0}),
        Series({1: 1.0, 3: 1.0}),
    ]
    assert comparable_means([*cells, None]) == pytest.approx(
        [math.nan, 3.0, 3.0, math.nan, math.nan], nan_ok=True
    )
    # One seed each, or none, as of imported models.
    assert comparable_means([Series({1: 2.0}), Series({None: 1.0})]) == [2.0, 1.0]


def test_the_t_test_needs_pairs():
    assert not significantly_better(Series({1: 2.0}), Series({1: 3.0}))
    assert not significantly_better(Series({1: 2.0, 2: 2.0}), Series({3: 3.0, 4: 3.0}))
    assert not significantly_better(Series({1: 2.0, 2: 3.0}), Series({1: 2.0, 2: 3.0}))
    equal_differences = Series({1: 2.0, 2: 3.0, 3: 4.0}), Series({1: 3.0, 2: 4.0, 3: 5.0})
    assert significantly_better(*equal_differences)
