"""KERPLE's methods against the paper's formulas in float64: tables, gradients, parameters, and that
they are CPD.
"""

import numpy as np
import pytest
import torch

from kerple.positional import (
    KerpleBiasWeight,
    KerpleGaussian,
    KerpleGaussian3,
    KerpleLog,
    KerpleLog3,
    KerpleLogRotary,
    KerplePower,
    KerpleSquareWeight,
    KerpleSum,
    KerpleWeight,
    is_cpd,
    project,
)

DISTANCES = np.array([0, 1, 2, 3, 17, 128, 511, 512, 2047, 65_535, 65_536], dtype=np.float64)

# The formulas; the scalars may be complex.
LOG3 = lambda d, r1, r2, r3: -r1 * np.log(1 + r2 * power(d, r3))  # noqa: E731
FORMULAS = {
    "log": lambda d, p, a: -p * np.log(1 + a * d),
    "log3": LOG3,
    "power": lambda d, a, p: -a * power(d, p),
    "square": lambda d, r1: -r1 * d * d,
    "gaussian": lambda d, r1, r2: r1 * np.exp(-r2 * d * d),
    "gaussian3": lambda d, r1, r2, r3: r1 * np.exp(-r2 * power(d, r3)),
}
EXPONENTS = {"log3": ("r3",), "power": ("p",), "gaussian3": ("r3",)}

# Scalars of five heads: ordinary values, and some at and beyond the bounds.
SCALES = np.array([0.3, 0.9, 0.01, -1.5, 1.7])
POWERS = np.array([0.4, 1.0, 2.0, 2.75, -0.2])

METHODS = [
    # class, options, bias as (prefix, kernel, factor), weight likewise
    (KerpleLog, {}, [("bias_", "log", 1)], []),
    (KerpleLog3, {}, [("bias_", "log3", 1)], []),
    (KerplePower, {}, [("bias_", "power", 1)], []),
    (KerpleGaussian, {}, [("bias_", "gaussian", 1)], []),
    (KerpleGaussian3, {}, [("bias_", "gaussian3", 1)], []),
    (KerpleSquareWeight, {}, [], [("wei_", "square", 1)]),
    (KerpleWeight, {}, [], [("wei_", "power", 1)]),
    (KerpleBiasWeight, {}, [("bias_", "power", 1)], [("wei_", "power", 1)]),
    (KerpleSum, {}, [("bias_1_log_", "log", 1), ("bias_2_power_", "power", 1)], []),
    (
        KerpleSum,
        {"bias": "0.5 log + 3*log3 + gaussian", "weight": ".25 square"},
        [
            ("bias_1_log_", "log", 0.5),
            ("bias_2_log3_", "log3", 3),
            ("bias_3_gaussian_", "gaussian", 1),
        ],
        [("wei_1_square_", "square", 0.25)],
    ),
    (KerpleSum, {"bias": None, "weight": "log"}, [], [("wei_1_log_", "log", 1)]),
]


def power(distance, exponent):
    """d^p; 0 at d = 0."""
    return np.where(distance == 0, 0.0, np.where(distance == 0, 1.0, distance) ** exponent)


def scalars_of(terms) -> dict[str, tuple[str, str]]:
    return {
        prefix + scalar: (kernel, scalar)
        for prefix, kernel, _ in terms
        for scalar in FORMULAS[kernel].__code__.co_varnames[
            1 : FORMULAS[kernel].__code__.co_argcount
        ]
    }


def used(kernel: str, scalar: str) -> np.ndarray:
    if scalar in EXPONENTS.get(kernel, ()):
        return np.clip(POWERS, 0.01, 2)
    return np.maximum(SCALES, 0.01)


def expected_sum(terms, varied: str | None = None, step: complex = 0.0) -> np.ndarray:
    """The sum of the terms, `[h, distances]`, with `step` added to the scalar called `varied`."""
    total = 0.0
    for prefix, kernel, factor in terms:
        names = scalars_of([(prefix, kernel, factor)])
        values = [
            used(*scalar)[:, None] + (step if name == varied else 0.0)
            for name, scalar in names.items()
        ]
        total = total + factor * FORMULAS[kernel](DISTANCES, *values)
    return total


def filled(method, *groups):
    with torch.no_grad():
        for terms in groups:
            for name, (kernel, scalar) in scalars_of(terms).items():
                numbers = POWERS if scalar in EXPONENTS.get(kernel, ()) else SCALES
                getattr(method, name).copy_(torch.tensor(numbers).reshape(-1, 1, 1))
    return method


@pytest.mark.parametrize(("cls", "options", "bias", "weight"), METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_follow_the_paper(cls, options, bias, weight, dtype):
    method = filled(cls(num_heads=5, **options), bias, weight)
    names = {*scalars_of(bias), *scalars_of(weight)}
    assert {
        name: tuple(tensor.shape) for name, tensor in method.state_dict().items()
    } == dict.fromkeys(names, (5, 1, 1))
    assert method.hooks == {name for name, terms in (("bias", bias), ("weight", weight)) if terms}
    distance = torch.tensor(DISTANCES, dtype=torch.float32)
    for terms, hook, outer in (
        (bias, method.bias, lambda sums: sums),
        (weight, method.weight, np.exp),
    ):
        if not terms:
            assert torch.equal(
                hook(distance), torch.full((5, len(DISTANCES)), float(np.real(outer(0.0))))
            )
            continue
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            table = hook(distance)
        assert table.dtype == torch.float32
        np.testing.assert_allclose(
            table.detach().double(), outer(expected_sum(terms)), rtol=1e-5, atol=1e-7
        )
        # A complex step gives exact derivatives. A parameter beyond its bound gets the derivative
        # at the bound. Each distance is tested alone, because the largest gradient would hide the
        # others in a sum.
        for name in scalars_of(terms):
            derivative = np.imag(outer(expected_sum(terms, name, 1e-30j))) / 1e-30
            for column in range(len(DISTANCES)):
                (gradient,) = torch.autograd.grad(
                    table[:, column].sum(), getattr(method, name), retain_graph=True
                )
                np.testing.assert_allclose(
                    gradient.double().flatten(), derivative[:, column], rtol=1e-4, atol=1e-8
                )


def test_a_bfloat16_model_has_float32_tables():
    method = KerpleSum(4).bfloat16()
    exact = KerpleSum(4)
    exact.load_state_dict({name: value.float() for name, value in method.state_dict().items()})
    distance = torch.tensor(DISTANCES, dtype=torch.float32)
    table = method.bias(distance)
    assert torch.equal(table, exact.bias(distance))
    table.sum().backward()
    assert {parameter.grad.dtype for parameter in method.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("cls", "options", "bias", "weight"), METHODS)
def test_every_method_is_conditionally_positive_definite(cls, options, bias, weight):
    torch.manual_seed(1)
    method = cls(num_heads=6, **options)
    points = torch.randint(0, 3000, (40,)).unique()
    if bias:
        assert is_cpd(method.bias, points).all()
    if weight:  # the exponential of a CPD kernel is positive definite
        assert is_cpd(
            lambda distance: method.weight(distance).log(), torch.linspace(0, 2, 12)
        ).all()
        gram = method.weight((points[:, None] - points).abs().float()).double()
        assert torch.linalg.eigvalsh(gram).min() >= -len(points) * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("cls", "ranges"),
    [
        (KerpleLog, {"bias_p": 2.0, "bias_a": 1.0}),
        (KerplePower, {"bias_p": 2.0, "bias_a": 1.0}),
        (KerpleWeight, {"wei_p": 2.0, "wei_a": 1.0}),
        (KerpleBiasWeight, {"bias_p": 2.0, "bias_a": 1.0, "wei_p": 2.0, "wei_a": 1.0}),
        (KerpleLog3, {"bias_r1": 2.0, "bias_r2": 1.0, "bias_r3": 2.0}),
        (KerpleGaussian3, {"bias_r1": 2.0, "bias_r2": 1.0, "bias_r3": 2.0}),
        (KerpleGaussian, {"bias_r1": 2.0, "bias_r2": 1.0}),
        (KerpleSquareWeight, {"wei_r1": 1.0}),
    ],
)
def test_parameters_have_the_names_shapes_and_distributions_of_the_release(cls, ranges):
    method = cls(num_heads=4000)
    assert {
        name: tuple(tensor.shape) for name, tensor in method.state_dict().items()
    } == dict.fromkeys(ranges, (4000, 1, 1))
    for name, high in ranges.items():
        values = getattr(method, name).detach()
        assert values.min() == np.float32(0.01)
        assert 0.99 * high < values.max() < high
        assert values.mean() == pytest.approx(high / 2, rel=0.05)


def test_the_same_generator_draws_the_same_parameters_in_any_dtype():
    float32, bfloat16 = KerpleBiasWeight(8), KerpleBiasWeight(8).bfloat16()
    float32.reset_parameters(torch.Generator().manual_seed(5))
    bfloat16.reset_parameters(torch.Generator().manual_seed(5))
    for name, value in float32.state_dict().items():
        assert torch.equal(value.bfloat16(), bfloat16.state_dict()[name])
    bfloat16.reset_parameters(torch.Generator().manual_seed(6))
    assert not torch.equal(float32.bias_a.bfloat16(), bfloat16.bias_a)


def test_statistics_are_the_values_used():
    method = filled(KerplePower(5), [("bias_", "power", 1)])
    expected = {
        "bias_a": torch.tensor([0.3, 0.9, 0.01, 0.01, 1.7]),
        "bias_p": torch.tensor([0.4, 1.0, 2.0, 2.0, 0.01]),
    }
    statistics = method.statistics()
    for name, values in expected.items():
        assert torch.equal(statistics[name], values)
        assert not statistics[name].requires_grad


def test_effective_length_is_where_the_bias_falls_below_minus_two():
    method = KerpleLog(3)
    with torch.no_grad():
        method.bias_p.copy_(torch.tensor([1.0, 2.0, 0.1])[:, None, None])
        method.bias_a.copy_(torch.tensor([1.0, 0.5, 0.1])[:, None, None])
    # -p log(1 + a d) = -2 at d = (exp(2/p) - 1) / a: 6.39, 3.44 and 4.9e9, which is beyond the
    # limit.
    assert method.effective_length(limit=1000).tolist() == [7, 4, 1000]
    with pytest.raises(ValueError, match="KerpleWeight"):
        KerpleWeight(3).effective_length()


# The kernels in torch, for the rule of the release: each forward pass first clamps the data of the
# parameters.
LOG1P, EXP = torch.log1p, torch.exp
TORCH_FORMULAS = {
    KerpleLog: lambda d, p: [-p["bias_p"] * LOG1P(p["bias_a"] * d)],
    KerpleLog3: lambda d, p: [-p["bias_r1"] * LOG1P(p["bias_r2"] * d ** p["bias_r3"])],
    KerpleBiasWeight: lambda d, p: [
        -p["bias_a"] * d ** p["bias_p"],
        EXP(-p["wei_a"] * d ** p["wei_p"]),
    ],
}
BOUNDED_BY_2 = {KerpleLog: (), KerpleLog3: ("bias_r3",), KerpleBiasWeight: ("bias_p", "wei_p")}


@pytest.mark.parametrize("cls", TORCH_FORMULAS)
def test_projected_training_follows_the_rule_of_the_release(cls):
    """300 Adam steps that push every parameter up and down, so that it reaches its bounds and must
    leave them again.
    """
    torch.manual_seed(0)
    method = cls(num_heads=4)
    released = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in method.named_parameters()
    }
    ours, theirs = (
        torch.optim.Adam(list(group), lr=0.05) for group in (method.parameters(), released.values())
    )
    distance = torch.tensor([1.5, 2.0])
    met: dict[str, set[float]] = {name: set() for name in released}
    for step in range(300):
        for name, parameter in released.items():
            parameter.data = parameter.data.clamp(
                min=0.01, max=2 if name in BOUNDED_BY_2[cls] else None
            )
            met[name].update(parameter.flatten().tolist())
            torch.testing.assert_close(method.get_parameter(name), parameter, rtol=1e-5, atol=1e-5)
        hooks = [getattr(method, name) for name in sorted(method.hooks)]
        direction = -1 if 60 <= step < 200 else 1
        for optimizer, tables in (
            (ours, [hook(distance) for hook in hooks]),
            (theirs, TORCH_FORMULAS[cls](distance, released)),
        ):
            optimizer.zero_grad()
            (-direction * sum(table.abs().log().sum() for table in tables)).backward()
            optimizer.step()
        project(method)
    for name, values in met.items():
        assert min(values) == np.float32(0.01), name
        assert (max(values) == 2) == (name in BOUNDED_BY_2[cls]), name


def test_the_upper_bound_of_exponents():
    method = KerplePower(100, highest_exponent=0.5)
    assert method.bias_p.max() < 0.5 < method.bias_a.max()
    with torch.no_grad():
        method.bias_p.fill_(1.5)
    assert method.statistics()["bias_p"].tolist() == [0.5] * 100
    fixed = KerplePower(3, highest_exponent=0.01)  # the lowest exponent
    assert (fixed.bias_p == 0.01).all()


def test_options_of_sums_and_of_rotary_kernels():
    method = KerpleSum(3, "log + power", parameters="per-layer", highest_exponent=1.0)
    assert not method.shared
    assert method.bounds()["bias_2_power_p"][1] == 1.0
    rotary = KerpleLogRotary(3, 8, parameters="per-layer", fraction=0.5, base=100.0)
    assert not rotary.shared
    assert (rotary.angles.size, rotary.angles.base) == (4, 100.0)


@pytest.mark.parametrize("cls", [KerpleLog, KerpleSum, KerpleSquareWeight])
def test_parameters_are_shared_or_per_layer(cls):
    assert cls(2).shared
    assert not cls(2, parameters="per-layer").shared
