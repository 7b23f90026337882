"""Kernel launches, memory traffic and floating point operations of an operator or Triton kernel on
a GPU.

The traffic is a lower bound: each kernel reads its inputs from memory once and writes its outputs
once, everything else is in registers and caches. Elements that a view repeats (`expand`,
overlapping strides) are read once. Operators that look up elements by index read only these.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

# Operators that do not read the tensor they overwrite.
OVERWRITES = {
    *("copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_"),
    *("normal_", "uniform_", "bernoulli_", "exponential_"),
}
# Operators that read only as many elements of their first tensor as they return.
LOOKUPS = {"gather", "index", "index_select", "embedding", "take_along_dim"}
# Operators that update only as many elements of their first tensor as the largest of the others
# has.
UPDATES = {
    "scatter_",
    "scatter_add_",
    "scatter_reduce_",
    "index_add_",
    "index_copy_",
    "index_put_",
    "_index_put_impl_",
}
# Operators with several kernels, and how often these read their inputs in total. Layer norm
# backward has a kernel for the gradient of the input, and one for those of weight and bias
# (aten/src/ATen/native/cuda/layer_norm_kernel.cu).
SEVERAL_KERNELS = {"native_layer_norm_backward": 2, "_fused_rms_norm_backward": 2}
# Elements of a block of a foreach kernel, blocks of a launch, and tensors of a launch by number of
# tensor lists (aten/src/ATen/native/cuda/MultiTensorApply.cuh; fewer launches with CUDA 12.1 and
# driver 530 or newer).
FOREACH_CHUNK, FOREACH_BLOCKS, FOREACH_TENSORS = 65_536, 320, (110, 64, 48, 36, 30)

# Matrix products that a Triton kernel computes for each tile of queries and keys.
ATTENTION_PRODUCTS = {
    "forward_kernel": 2,
    "key_value_kernel": 4,
    "query_kernel": 3,
    "sum_tiles_kernel": 2,
}
# How often a Triton kernel reads or writes an argument, if not exactly once. In training the loss
# overwrites logits.
TRITON_PASSES: dict[str, dict[str, int]] = {
    "cross_entropy_kernel": {"logits": 2},
    "activation_backward_kernel": {"grad": 2},
}


class Cost(NamedTuple):
    """What an operator costs: kernel launches, bytes read and written, and FLOPs of matrix products
    and attention.
    """

    launches: int
    bytes: int
    flops: int


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value: itself, or in nested lists, tuples and dictionaries. Faster than
    torch's `pytree`.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]


def touched_bytes(tensor: Tensor) -> int:
    """Bytes of the elements in memory that a tensor refers to."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return min(elements * tensor.element_size(), tensor.untyped_storage().nbytes())


def operator_cost(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> Cost:
    """The cost of a PyTorch operator with these arguments and this result."""
    name = func._schema.name.partition("::")[2]
    formula = flop_registry.get(func.overloadpacket)
    shaped = [
        arg for arg in args if not isinstance(arg, torch.dtype)
    ]  # the formulas do not know out_dtype
    flops = 0 if formula is None else int(formula(*shaped, **kwargs, out_val=result))
    traffic = sum(_operator_traffic(func, name, args, kwargs, result))
    return Cost(operator_launches(func, args, result), traffic, flops)


def operator_launches(func: OpOverload, args: Sequence[Any], result: Any) -> int:
    """The number of kernels that a PyTorch operator launches."""
    name = func._schema.name.partition("::")[2]
    if name.startswith(("_foreach_", "_fused_adam")):
        return _foreach_launches(name, args, result)
    if name == "constant_pad_nd":  # fills the result, then copies; without padding, only copies
        return 2 if max(args[1]) > 0 else 1
    return SEVERAL_KERNELS.get(name, 1)


def _operator_traffic(
    func: OpOverload, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> Iterator[int]:
    schema = func._schema
    outputs = [
        leaf
        for value, declared in zip(
            result if len(schema.returns) > 1 else (result,), schema.returns, strict=False
        )
        if declared.alias_info is None
        for leaf in tensors_in(value)
    ]
    yield from map(touched_bytes, outputs)
    values = [*args, *(None for _ in schema.arguments[len(args) :])]
    inputs = [
        (index, leaf, argument)
        for index, (argument, value) in enumerate(zip(schema.arguments, values, strict=True))
        for leaf in tensors_in(kwargs.get(argument.name, value))
    ]
    passes = SEVERAL_KERNELS.get(name, 1)
    for index, tensor, argument in inputs:
        size = touched_bytes(tensor)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if name.startswith("_fused_adam") and argument.name == "grads":
            writes = kwargs.get("grad_scale") is not None
        if index == 0 and name in LOOKUPS:
            size = min(size, sum(output.numel() for output in outputs) * tensor.element_size())
        if index == 0 and name in UPDATES:
            updated = max((other.numel() for i, other, _ in inputs if i), default=tensor.numel())
            size = min(size, updated * tensor.element_size())
        if writes:
            yield size
        if not (writes and (argument.kwarg_only or name in OVERWRITES)):
            yield size * passes


def _foreach_launches(name: str, args: Sequence[Any], result: Any) -> int:
    """Launches of an operator on lists of tensors."""
    lists = [part for part in (*args, result) if isinstance(part, list | tuple) and part]
    lists = [part for part in lists if all(isinstance(tensor, Tensor) for tensor in part)]
    first = lists[0]
    dtypes = {
        tensor.dtype
        for part in lists[: 1 if name.startswith("_fused") else None]
        for tensor in part
    }
    if len(dtypes) > 1 and name not in ("_foreach_copy_", "_foreach_norm"):
        return len(first)  # PyTorch then calls the operator for each tensor
    launches = blocks = tensors = 0
    limit = FOREACH_TENSORS[min(len(lists), len(FOREACH_TENSORS)) - 1]
    for tensor in first:
        tensors += 1
        for _ in range(-(-tensor.numel() // FOREACH_CHUNK)):
            blocks += 1
            if blocks == FOREACH_BLOCKS:
                launches, blocks, tensors = launches + 1, 0, 1
        if tensors == limit:
            launches, blocks, tensors = launches + 1, 0, 0
    return launches + (blocks > 0) + (name == "_foreach_norm")


def triton_cost(kernel: Any, arguments: dict[str, Any], grid: Sequence[int]) -> Cost:
    """The cost of a Triton kernel with these arguments, by name."""
    name = kernel.fn.__name__
    passes = TRITON_PASSES.get(name, {})
    # A pointer that a kernel does not read is another argument's tensor.
    tensors = {
        id(value): (key, value)
        for key, value in reversed(arguments.items())
        if isinstance(value, Tensor)
    }
    traffic = sum(touched_bytes(tensor) * passes.get(key, 1) for key, tensor in tensors.values())
    products = ATTENTION_PRODUCTS.get(name, 0)
    flops = (
        2 * products * _attended_pairs(name, arguments, grid) * arguments["SIZE"] if products else 0
    )
    return Cost(1, traffic, flops)


def _attended_pairs(name: str, arguments: dict[str, Any], grid: Sequence[int]) -> int:
    """Pairs of query and key in the tiles that an attention kernel computes, for all samples and
    heads.
    """
    rows, columns = (arguments.get("BLOCK") or arguments[key] for key in ("BLOCK_M", "BLOCK_N"))
    s, t = arguments["s"], arguments["t"]
    window = arguments.get("window", t)
    # sum_tiles_kernel's grid: block distances, parts, heads. The others': tiles, samples and heads.
    distances = grid[0] if name == "sum_tiles_kernel" else t
    count = arguments["batch"] * grid[2] if name == "sum_tiles_kernel" else grid[1]
    if name == "key_value_kernel":  # its programs handle all query heads of a key/value head
        count *= arguments["group"]
    tiles = 0
    for first in range(t - s, t, rows):
        for key in range(0, min(first + rows, t), columns):
            tiles += key + columns > first - window + 1 and (first - key) // columns < distances
    return count * tiles * rows * columns
