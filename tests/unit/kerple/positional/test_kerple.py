"""KERPLE's kernels against the paper's formulas and their derivatives, written here in float64."""

import numpy as np
import pytest
import torch

from kerple.positional import KerpleBiasWeight, KerpleLog, KerplePower, KerpleWeight

DISTANCES = np.array([0, 1, 2, 3, 17, 128, 511, 512, 2047, 65_535, 65_536], dtype=np.float64)
# Ordinary values; a scale and an exponent at and beyond their bounds, 0.01 below and 2 above.
SCALES = np.array([0.3, 0.9, 0.01, -1.5, 1.7])
EXPONENTS = np.array([0.4, 1.0, 2.0, 2.75, -0.2])


def used(values: np.ndarray, high: float = np.inf) -> np.ndarray:
    return np.minimum(np.maximum(values, 0.01), high)[:, None]


def log_kernel(a, p):
    """-p log(1 + a d), and its derivatives in a and p."""
    value = -p * np.log(1 + a * DISTANCES)
    return value, -p * DISTANCES / (1 + a * DISTANCES), value / p


def power(a, p):
    """a d^p, and its derivatives in a and p; all zero at d = 0."""
    raised = np.where(DISTANCES == 0, 0.0, DISTANCES**p)
    logs = np.log(np.where(DISTANCES == 0, 1.0, DISTANCES))
    return a * raised, raised, a * raised * logs


def power_bias(a, p):
    return tuple(-part for part in power(a, p))


def power_weight(a, p):
    """exp(-a d^p), and its derivatives."""
    value, by_a, by_p = power(a, p)
    return np.exp(-value), -by_a * np.exp(-value), -by_p * np.exp(-value)


CASES = [
    # class, hook, scale, exponent or second scale, bound of the latter, formula
    (KerpleLog, "bias", "bias_a", "bias_p", np.inf, log_kernel),
    (KerplePower, "bias", "bias_a", "bias_p", 2.0, power_bias),
    (KerpleWeight, "weight", "wei_a", "wei_p", 2.0, power_weight),
    (KerpleBiasWeight, "bias", "bias_a", "bias_p", 2.0, power_bias),
    (KerpleBiasWeight, "weight", "wei_a", "wei_p", 2.0, power_weight),
]


def filled(method, **values):
    with torch.no_grad():
        for name, numbers in values.items():
            getattr(method, name).copy_(torch.tensor(numbers).reshape(-1, 1, 1))
    return method


@pytest.mark.parametrize(("cls", "hook", "a_name", "p_name", "high", "formula"), CASES)
def test_values_and_gradients_follow_the_paper(cls, hook, a_name, p_name, high, formula):
    method = filled(cls(num_heads=5), **{a_name: SCALES, p_name: EXPONENTS})
    a, p = (getattr(method, name).detach().double().flatten().numpy() for name in (a_name, p_name))
    value, by_a, by_p = formula(used(a), used(p, high))

    table = getattr(method, hook)(torch.tensor(DISTANCES, dtype=torch.float32))
    assert table.dtype == torch.float32
    np.testing.assert_allclose(table.detach().double(), value, rtol=3e-6, atol=1e-7)

    # One distance at a time: a sum would hide a wrong derivative behind the largest one. A parameter beyond its bound
    # gets the derivative at the bound, as in the release, which overwrites the value and keeps the graph.
    for column in range(len(DISTANCES)):
        for name, expected in ((a_name, by_a), (p_name, by_p)):
            (gradient,) = torch.autograd.grad(table[:, column].sum(), getattr(method, name), retain_graph=True)
            assert torch.isfinite(gradient).all()
            np.testing.assert_allclose(gradient.double().flatten(), expected[:, column], rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize(("cls", "hook", "a_name", "p_name", "high", "formula"), CASES)
def test_a_bfloat16_model_has_float32_tables(cls, hook, a_name, p_name, high, formula):
    method = filled(cls(num_heads=5), **{a_name: SCALES, p_name: EXPONENTS}).bfloat16()
    a, p = (getattr(method, name).detach().double().flatten().numpy() for name in (a_name, p_name))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        table = getattr(method, hook)(torch.tensor(DISTANCES, dtype=torch.float32))
    assert table.dtype == torch.float32
    np.testing.assert_allclose(table.detach().double(), formula(used(a), used(p, high))[0], rtol=3e-6, atol=1e-7)
    table.sum().backward()
    assert getattr(method, a_name).grad.dtype == torch.bfloat16


@pytest.mark.parametrize("cls", [KerpleLog, KerplePower, KerpleWeight, KerpleBiasWeight])
def test_distances_of_any_shape(cls):
    method = cls(num_heads=3)
    distance = torch.arange(12.0).reshape(3, 4)
    for hook in ("bias", "weight"):
        if getattr(method, f"has_{hook}"):
            whole = getattr(method, hook)(distance)
            assert whole.shape == (3, 3, 4)
            assert torch.equal(whole.reshape(3, 12), getattr(method, hook)(distance.flatten()))


@pytest.mark.parametrize(
    ("cls", "ranges"),
    [
        (KerpleLog, {"bias_p": 2.0, "bias_a": 1.0}),
        (KerplePower, {"bias_p": 2.0, "bias_a": 1.0}),
        (KerpleWeight, {"wei_p": 2.0, "wei_a": 1.0}),
        (KerpleBiasWeight, {"bias_p": 2.0, "bias_a": 1.0, "wei_p": 2.0, "wei_a": 1.0}),
    ],
)
def test_parameters_have_the_release_s_names_shapes_and_distribution(cls, ranges):
    method = cls(num_heads=4000)
    assert {name: tuple(tensor.shape) for name, tensor in method.state_dict().items()} == dict.fromkeys(
        ranges, (4000, 1, 1)
    )
    for name, high in ranges.items():
        values = getattr(method, name).detach()
        assert 0 <= values.min() < 0.01 * high
        assert 0.99 * high < values.max() < high
        assert values.mean() == pytest.approx(high / 2, rel=0.05)


def test_the_same_generator_draws_the_same_parameters_in_any_dtype():
    first, second = KerpleBiasWeight(8), KerpleBiasWeight(8).bfloat16()
    first.reset_parameters(torch.Generator().manual_seed(5))
    second.reset_parameters(torch.Generator().manual_seed(5))
    for name, value in first.state_dict().items():
        assert torch.equal(value.bfloat16(), second.state_dict()[name])
    second.reset_parameters(torch.Generator().manual_seed(6))
    assert not torch.equal(first.bias_a.bfloat16(), second.bias_a)


def test_statistics_are_the_values_used():
    method = filled(KerplePower(5), bias_a=SCALES, bias_p=EXPONENTS)
    wanted = {
        "bias_a": torch.tensor([0.3, 0.9, 0.01, 0.01, 1.7]),
        "bias_p": torch.tensor([0.4, 1.0, 2.0, 2.0, 0.01]),
    }
    statistics = method.statistics()
    for name, values in wanted.items():
        assert torch.equal(statistics[name], values)
        assert not statistics[name].requires_grad


def test_effective_length_is_where_the_bias_falls_below_minus_two():
    method = filled(KerpleLog(3), bias_p=np.array([1.0, 2.0, 0.1]), bias_a=np.array([1.0, 0.5, 0.1]))
    # -p log(1 + a d) = -2 at d = (exp(2/p) - 1) / a: 6.39, 3.44 and 4.9e9, which is beyond the limit.
    assert method.effective_length(limit=1000).tolist() == [7, 4, 1000]
    with pytest.raises(ValueError, match="KerpleWeight has no bias"):
        KerpleWeight(3).effective_length()


@pytest.mark.parametrize("cls", [KerpleLog, KerplePower])
def test_the_kernels_are_conditionally_positive_definite(cls):
    """On any points, the kernel matrix is positive semidefinite for weights that sum to zero (Corollary 1)."""
    torch.manual_seed(0)
    method = cls(num_heads=6)
    points = torch.randint(0, 1000, (40,)).unique().double()
    kernel = method.bias((points[:, None] - points).abs().float()).detach().double()
    centering = torch.eye(len(points), dtype=torch.float64) - 1 / len(points)
    eigenvalues = torch.linalg.eigvalsh(centering @ kernel @ centering)
    assert (eigenvalues[:, 0] >= -1e-6 * eigenvalues[:, -1]).all()
