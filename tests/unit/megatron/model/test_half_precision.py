"""bfloat16 and float16 on CPUs without fast products of them, against exact sums of integers."""

import pytest
import torch
import torch.nn.functional as F

from megatron.model import half_precision
from megatron.model.half_precision import PRODUCTS, has_fast_products, multiply_in_float32
from megatron.utils.environment import has_bf16_instructions

CPU = torch.device("cpu")


@pytest.fixture
def slow_cpu(monkeypatch):
    """A CPU without fast products. tests/conftest.py restores torch's operators."""
    monkeypatch.setattr(half_precision, "has_fast_products", lambda dtype: False)


def integers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Integers from -4 to 4: float32 sums of their products are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def calls(profile: torch.autograd.profiler.profile, name: str) -> int:
    return [event.name for event in profile.function_events].count(f"aten::{name}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_exact_product_is_rounded_once(name, dtype, slow_cpu):
    reports: list[str] = []
    for _ in range(2):
        multiply_in_float32(CPU, torch.bfloat16, reports.append)
    assert len(reports) == 1
    name, _, variant = name.partition(".")
    batch = (3,) if "bmm" in name else ()
    left, right = integers(*batch, 5, 400, dtype=dtype, seed=0), integers(*batch, 400, 7, dtype=dtype, seed=1)
    added = integers(*batch, 5, 7, dtype=dtype, seed=2)
    expected = left.double() @ right.double()
    arguments, factors = (left, right), {}
    if "add" in name:
        arguments, factors = (added, left, right), {"beta": 2, "alpha": 0.5}
        expected = 2 * added.double() + 0.5 * expected
    assert not torch.equal(expected.to(dtype).double(), expected) or dtype != torch.bfloat16  # it has more than 8 bits
    if variant:
        factors["out"] = torch.empty(0, dtype=dtype)
    with torch.autograd.profiler.profile() as profile:
        result = getattr(torch, name)(*arguments, **factors)
    assert calls(profile, name) == (1 if dtype == torch.float32 else 2)  # again in float32
    assert result.dtype == dtype
    assert torch.equal(result, expected.to(dtype))
    if variant:
        assert result is factors["out"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_single_row_is_multiplied_by_torch(dtype, slow_cpu):
    """Generation multiplies the states of one token with transposed weights."""
    multiply_in_float32(CPU, dtype, lambda line: None)
    row, weight = integers(1, 400, dtype=dtype, seed=0), integers(7, 400, dtype=dtype, seed=1)
    for right, count in ((weight.T, 1), (weight.T.contiguous(), 2)):
        with torch.autograd.profiler.profile() as profile:
            result = torch.mm(row, right)
        assert calls(profile, "mm") == count
        assert torch.equal(result, (row.double() @ weight.double().T).to(dtype))


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
    assert (calls(profile, "addmm"), calls(profile, "mm")) == (2, 4)  # each of them again in float32
    assert torch.equal(output, (states.double() @ weight.double().T + bias).bfloat16())
    assert torch.equal(states.grad, (gradient.double() @ weight.double()).bfloat16())
    assert torch.equal(weight.grad, (gradient.double().T @ states.double()).bfloat16())


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_is_computed_in_float32(dtype, is_causal, slow_cpu):
    """Its results and gradients are the rounded ones of float32, up to the rounding of the output that the gradient
    reads.
    """
    multiply_in_float32(CPU, dtype, lambda line: None)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 3, 40, 16, generator=generator).to(dtype) for _ in range(4)]
    mask = None if is_causal else torch.randn(40, 40, generator=generator).to(dtype)

    def attend(dtype):
        *inputs, gradient = (tensor.to(dtype) for tensor in tensors)
        query, key, value = (tensor.requires_grad_() for tensor in inputs)
        attn_mask = None if mask is None else mask.to(dtype)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal)
        output.backward(gradient)
        return output.detach(), query.grad, key.grad, value.grad

    expected = attend(torch.float32)
    with torch.autograd.profiler.profile() as profile:
        results = attend(dtype)
    for name in half_precision.ATTENTION:
        assert calls(profile, name) == 2  # again in float32
    assert all(result.dtype == dtype for result in results)
    assert torch.equal(results[0], expected[0].to(dtype))
    assert torch.equal(results[3], expected[3].to(dtype))
    for result, exact in zip(results[1:3], expected[1:3], strict=True):
        assert torch.linalg.norm(result - exact) < torch.finfo(dtype).eps * torch.linalg.norm(exact)


def test_errors_are_those_of_torch(slow_cpu):
    multiply_in_float32(CPU, torch.bfloat16, lambda line: None)
    matrix = integers(4, 4, dtype=torch.bfloat16, seed=0)
    for other in (matrix[:3], matrix.half(), matrix.float(), matrix[0]):
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|same dtype|must be a matrix"):
            torch.mm(matrix, other)
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
