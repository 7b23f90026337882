"""KERPLE's kernels and their sums against the paper's formulas in float64, and that they are CPD."""

import numpy as np
import pytest
import torch

from kerple.positional import (
    KerpleBiasWeight,
    KerpleGaussian,
    KerpleGaussian3,
    KerpleLog,
    KerpleLog3,
    KerplePower,
    KerpleSquareWeight,
    KerpleSum,
    KerpleWeight,
    is_cpd,
    lemma_constant,
)
from kerple.positional.kernels import KERNELS, parse_sum

DISTANCES = np.array([0, 1, 2, 3, 17, 128, 511, 512, 2047, 65_535, 65_536], dtype=np.float64)

# The formulas, of numbers that may be complex.
LOG3 = lambda d, r1, r2, r3: -r1 * np.log(1 + r2 * raised(d, r3))  # noqa: E731
FORMULAS = {
    "log": lambda d, p, a: -p * np.log(1 + a * d),
    "log3": LOG3,
    "power": lambda d, a, p: -a * raised(d, p),
    "square": lambda d, r1: -r1 * d * d,
    "gaussian": lambda d, r1, r2: r1 * np.exp(-r2 * d * d),
    "gaussian3": lambda d, r1, r2, r3: r1 * np.exp(-r2 * raised(d, r3)),
}
EXPONENTS = {"log3": ("r3",), "power": ("p",), "gaussian3": ("r3",)}

# Scalars of five heads: ordinary ones, at and beyond their bounds.
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
        [("bias_1_log_", "log", 0.5), ("bias_2_log3_", "log3", 3), ("bias_3_gaussian_", "gaussian", 1)],
        [("wei_1_square_", "square", 0.25)],
    ),
    (KerpleSum, {"bias": None, "weight": "log"}, [], [("wei_1_log_", "log", 1)]),
]


def raised(distance, exponent):
    """d^p, 0 at d = 0 for every p > 0."""
    return np.where(distance == 0, 0.0, np.where(distance == 0, 1.0, distance) ** exponent)


def scalars_of(terms) -> dict[str, tuple[str, str]]:
    return {
        prefix + scalar: (kernel, scalar)
        for prefix, kernel, _ in terms
        for scalar in FORMULAS[kernel].__code__.co_varnames[1 : FORMULAS[kernel].__code__.co_argcount]
    }


def used(kernel: str, scalar: str) -> np.ndarray:
    if scalar in EXPONENTS.get(kernel, ()):
        return np.clip(POWERS, 0.01, 2)
    return np.maximum(SCALES, 0.01)


def expected(terms, moved: str | None = None, step: complex = 0.0) -> np.ndarray:
    """The sum over the terms `[h, distances]`, with `step` added to the scalar called `moved`."""
    total = 0.0
    for prefix, kernel, factor in terms:
        names = scalars_of([(prefix, kernel, factor)])
        values = [used(*where)[:, None] + (step if name == moved else 0.0) for name, where in names.items()]
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
    assert {name: tuple(tensor.shape) for name, tensor in method.state_dict().items()} == dict.fromkeys(
        names, (5, 1, 1)
    )
    assert (method.has_bias, method.has_weight) == (bool(bias), bool(weight))
    distance = torch.tensor(DISTANCES, dtype=torch.float32)
    for terms, hook, outer in ((bias, method.bias, lambda sums: sums), (weight, method.weight, np.exp)):
        if not terms:
            assert torch.equal(hook(distance), torch.full((5, len(DISTANCES)), float(np.real(outer(0.0)))))
            continue
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            table = hook(distance)
        assert table.dtype == torch.float32
        np.testing.assert_allclose(table.detach().double(), outer(expected(terms)), rtol=1e-5, atol=1e-7)
        # By a complex step, which is exact. At a bound the gradient is that of the bounded value: the clamp lets it
        # through. One distance at a time, since a sum would hide a wrong one behind the largest.
        for name in scalars_of(terms):
            derivative = np.imag(outer(expected(terms, name, 1e-30j))) / 1e-30
            for column in range(len(DISTANCES)):
                (found,) = torch.autograd.grad(table[:, column].sum(), getattr(method, name), retain_graph=True)
                np.testing.assert_allclose(found.double().flatten(), derivative[:, column], rtol=1e-4, atol=1e-8)


def test_a_cast_model_keeps_float32_tables():
    method = KerpleSum(4).bfloat16()
    exact = KerpleSum(4)
    exact.load_state_dict({name: value.float() for name, value in method.state_dict().items()})
    distance = torch.tensor(DISTANCES, dtype=torch.float32)
    assert torch.equal(method.bias(distance), exact.bias(distance))


@pytest.mark.parametrize(("cls", "options", "bias", "weight"), METHODS)
def test_every_kernel_is_conditionally_positive_definite(cls, options, bias, weight):
    torch.manual_seed(1)
    method = cls(num_heads=6, **options)
    points = torch.randint(0, 3000, (40,)).unique()
    if bias:
        assert is_cpd(method.bias, points).all()
        lemma_constant(lambda distance: method.bias(distance)[:1], range(12))
    if weight:  # the exponential of a CPD kernel is positive definite: no constant is needed
        assert is_cpd(lambda distance: method.weight(distance).log(), torch.linspace(0, 2, 12)).all()
        assert (lemma_constant(method.weight, points) == 0).all()


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_in_float64(name):
    kernel = KERNELS[name]
    torch.manual_seed(0)
    scalars = [
        (torch.rand(8, 1, 1).double() + 0.05) * (1.8 if scalar.exponent else 1.0) for scalar in kernel.scalars.values()
    ]
    assert is_cpd(lambda distance: kernel.value(distance, *scalars), torch.linspace(0, 20, 50)).all()


def test_exponents_above_two_are_not():
    points = torch.linspace(0, 2, 9)
    for exponent in (2.1, 2.5, 4.0):
        for name, scalars in (("power", (1.0, exponent)), ("gaussian3", (1.0, 1.0, exponent))):
            kernel = KERNELS[name].value
            assert not is_cpd(lambda distance: kernel(distance, *scalars), points)  # noqa: B023
            with pytest.raises(ValueError, match="is not conditionally positive definite on these points"):
                lemma_constant(lambda distance: kernel(distance, *scalars), points)  # noqa: B023
        assert is_cpd(lambda distance: KERNELS["power"].value(distance, 1.0, 2.0), points)
    assert not is_cpd(lambda distance: -KERNELS["gaussian"].value(distance, 1.0, 1.0), points)
    assert not is_cpd(lambda distance: distance, points)


def test_the_constant_is_the_first_that_will_do():
    """By hand: -d on 0 and 1 has eigenvalues -1 and 1, and c adds 2c to the first."""
    assert lemma_constant(lambda distance: -distance, [0, 1]) == 1.0
    assert lemma_constant(lambda distance: -5.0 * distance, [0, 1]) == 4.0
    kernel = KERNELS["power"].value
    points = torch.arange(30.0)
    scales = torch.tensor([0.5, 1.0, 3.0]).reshape(-1, 1, 1).double()
    constants = lemma_constant(lambda distance: kernel(distance, scales, 1.3), points)
    gram = kernel((points[:, None] - points).abs().double(), scales, 1.3)
    for head, c in enumerate(constants.tolist()):
        assert np.linalg.eigvalsh(c + gram[head].numpy())[0] > -1e-9
        assert np.linalg.eigvalsh(c / 2 + gram[head].numpy())[0] < -1e-9


def test_there_is_none_for_the_square_of_the_distance():
    with pytest.raises(ValueError, match="a limit case"):
        lemma_constant(lambda distance: -distance.square(), range(3))


@pytest.mark.parametrize(
    ("points", "message"), [([1], "at least two points"), ([1, 2, 1], "all different"), ([0, 1], "not finite")]
)
def test_points_that_say_nothing_are_refused(points, message):
    with pytest.raises(ValueError, match=message):
        is_cpd(lambda distance: distance.log(), points)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("log + pwoer", "kernel 'pwoer' is unknown; did you mean power"),
        ("cosine", "kernel 'cosine' is unknown; did you mean log, log3, power, square, gaussian, gaussian3"),
        ("-1 gaussian", "-1 gaussian is not conditionally positive definite; factors must be positive"),
        ("log + 0 power", "0 power is not conditionally positive definite"),
        ("log - power", "a difference of kernels is not conditionally positive definite"),
        ("log * power", "a product of kernels .* the option weight"),
        ("power^3", "'power\\^3': exponents and other scalars are learned"),
        ("log + + power", "a term is missing next to a '\\+'"),
        ("log power", "'log power' is not a kernel"),
        ("", "must be a sum of kernels"),
        (3, "must be a sum of kernels"),
    ],
)
def test_expressions_that_are_refused(expression, message):
    with pytest.raises(ValueError, match=message):
        KerpleSum(2, bias=expression)


def test_expressions():
    assert parse_sum(" log+.5power + 2 * log3") == (("log", 1.0), ("power", 0.5), ("log3", 2.0))
    with pytest.raises(ValueError, match="set the option bias, or weight, or both"):
        KerpleSum(2, bias=None)


def test_the_bound_of_exponents():
    method = KerplePower(3, highest_exponent=1.0)
    assert method.bias_p.max() < 1.0
    with torch.no_grad():
        method.bias_p.fill_(1.5)
    assert method.statistics()["bias_p"].tolist() == [1.0] * 3
    for bound in (2.5, 0.0):
        with pytest.raises(ValueError, match=f"highest_exponent {bound} is not in 0.01 ... 2"):
            KerpleSum(3, highest_exponent=bound)
    with pytest.raises(ValueError, match="highest_exponent 1: no kernel of this method has an exponent"):
        KerpleLog(3, highest_exponent=1)


@pytest.mark.parametrize("cls", [KerpleLog, KerpleSum, KerpleSquareWeight])
def test_shared_or_per_layer(cls):
    assert cls(2).shared
    assert not cls(2, parameters="per-layer").shared
    with pytest.raises(ValueError, match="parameters 'own' must be one of shared, per-layer"):
        cls(2, parameters="own")


def test_initial_values():
    for cls, ranges in (
        (KerpleLog3, {"bias_r1": 2.0, "bias_r2": 1.0, "bias_r3": 2.0}),
        (KerpleGaussian3, {"bias_r1": 2.0, "bias_r2": 1.0, "bias_r3": 2.0}),
        (KerpleGaussian, {"bias_r1": 2.0, "bias_r2": 1.0}),
        (KerpleSquareWeight, {"wei_r1": 1.0}),
    ):
        method = cls(num_heads=4000)
        assert set(method.state_dict()) == set(ranges)
        for name, high in ranges.items():
            assert 0.99 * high < getattr(method, name).max() < high
            assert getattr(method, name).mean().item() == pytest.approx(high / 2, rel=0.05)
