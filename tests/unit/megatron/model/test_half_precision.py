"""Products of bfloat16 and float16 matrices on CPUs without instructions for them, against exact sums of integers."""

import pytest
import torch

from megatron.model import half_precision
from megatron.model.half_precision import OPERATORS, has_fast_products, multiply_in_float32
from megatron.utils.environment import has_bf16_instructions

CPU = torch.device("cpu")


@pytest.fixture
def slow_cpu(monkeypatch):
    """A CPU without fast products, on which no operator has been replaced."""
    monkeypatch.setattr(half_precision, "has_fast_products", lambda dtype: False)
    monkeypatch.setattr(half_precision, "_library", None)
    yield
    if half_precision._library is not None:
        half_precision._library._destroy()


def integers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Integers from -4 to 4: float32 sums of their products are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", OPERATORS)
def test_the_exact_product_is_rounded_once(name, dtype, slow_cpu):
    reports: list[str] = []
    for _ in range(2):
        multiply_in_float32(CPU, torch.bfloat16, reports.append)
    assert reports == [reports[0]] * 2
    batch = (3,) if "bmm" in name else ()
    left, right = integers(*batch, 5, 400, dtype=dtype, seed=0), integers(*batch, 400, 7, dtype=dtype, seed=1)
    added = integers(*batch, 5, 7, dtype=dtype, seed=2)
    expected = left.double() @ right.double()
    arguments, factors = (left, right), {}
    if "add" in name:
        arguments, factors = (added, left, right), {"beta": 2, "alpha": 0.5}
        expected = 2 * added.double() + 0.5 * expected
    assert not torch.equal(expected.to(dtype).double(), expected) or dtype != torch.bfloat16  # it has more than 8 bits
    if name.endswith(".out"):
        factors["out"] = torch.empty(0, dtype=dtype)
    result = getattr(torch, name.removesuffix(".out"))(*arguments, **factors)
    assert result.dtype == dtype
    assert torch.equal(result, expected.to(dtype))
    if name.endswith(".out"):
        assert result is factors["out"]


def test_gradients_of_a_linear_layer(slow_cpu):
    """With `addmm`, because DeepSpeed replaces `F.linear` in the whole process."""
    multiply_in_float32(CPU, torch.bfloat16, lambda line: None)
    states = integers(12, 300, dtype=torch.bfloat16, seed=0).requires_grad_()
    weight = integers(9, 300, dtype=torch.bfloat16, seed=1).requires_grad_()
    bias = integers(9, dtype=torch.bfloat16, seed=2)
    gradient = integers(12, 9, dtype=torch.bfloat16, seed=3)
    with torch.autograd.profiler.profile() as profile:
        output = torch.addmm(bias, states, weight.T)
        output.backward(gradient)
    names = [event.name for event in profile.function_events]
    assert (names.count("aten::addmm"), names.count("aten::mm")) == (2, 4)  # each of them again in float32
    assert torch.equal(output, (states.double() @ weight.double().T + bias).bfloat16())
    assert torch.equal(states.grad, (gradient.double() @ weight.double()).bfloat16())
    assert torch.equal(weight.grad, (gradient.double().T @ states.double()).bfloat16())


def test_errors_are_those_of_torch(slow_cpu):
    multiply_in_float32(CPU, torch.bfloat16, lambda line: None)
    matrix = integers(4, 4, dtype=torch.bfloat16, seed=0)
    for other in (matrix[:3], matrix.half(), matrix.float()):
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|same dtype"):
            matrix @ other
    with pytest.raises(RuntimeError, match=r"dtype"):
        torch.mm(matrix, matrix, out=torch.empty(4, 4))


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.bfloat16), ("cpu", torch.float32)])
def test_nothing_is_replaced_without_need(device, dtype, slow_cpu):
    multiply_in_float32(torch.device(device), dtype, pytest.fail)
    assert half_precision._library is None


@pytest.mark.skipif(not has_bf16_instructions(), reason="the processor has no bfloat16 instructions")
def test_a_processor_with_instructions_is_fast():
    assert has_fast_products(torch.bfloat16)


def test_nothing_is_replaced_on_other_processors(slow_cpu, monkeypatch):
    monkeypatch.setattr(half_precision, "has_fast_products", lambda dtype: True)
    multiply_in_float32(CPU, torch.bfloat16, pytest.fail)
    assert half_precision._library is None
