"""Tensor-parallel layers on one rank, and megatron-core's in a process group of this process alone.

Several ranks are tested in training: `tests/integration/test_parallel_training.py`.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.model.parallel import (
    column_linear,
    full_shape,
    gather_vocabulary,
    row_linear,
    slice_for_rank,
    sum_head_gradients,
    tensor_parallel_group,
    vocab_embedding,
)
from megatron.model.settings import ONE_RANK, TensorParallel

SLICED = TensorParallel(size=2, rank=0)  # selects megatron-core's layers


@pytest.fixture
def process_group():
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def test_on_one_rank_the_layers_are_torch_s():
    assert type(column_linear(4, 6, bias=True, tp=ONE_RANK)) is nn.Linear
    assert type(row_linear(4, 6, bias=True, tp=ONE_RANK)) is nn.Linear
    assert type(vocab_embedding(8, 4, tp=ONE_RANK)) is nn.Embedding
    tensor = torch.ones(2)
    assert sum_head_gradients(tensor, ONE_RANK) is tensor
    assert gather_vocabulary(tensor, ONE_RANK) is tensor
    assert tensor_parallel_group(ONE_RANK) is None


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("build", "partition_dim"), [(column_linear, 0), (row_linear, 1)])
def test_megatron_core_s_linear_layers_behave_like_torch_s(build, partition_dim):
    layer, states = build(4, 6, bias=True, tp=SLICED), torch.randn(3, 2, 4)
    assert set(dict(layer.named_parameters())) == {"weight", "bias"}
    assert (layer.weight.tensor_model_parallel, layer.weight.partition_dim) == (True, partition_dim)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    torch.testing.assert_close(layer(states), F.linear(states, layer.weight, layer.bias))


@pytest.mark.usefixtures("process_group")
def test_megatron_core_s_embedding_behaves_like_torch_s():
    layer, tokens = vocab_embedding(8, 4, tp=SLICED), torch.tensor([[0, 7, 3]])
    nn.init.normal_(layer.weight)
    assert (layer.weight.tensor_model_parallel, layer.weight.partition_dim) == (True, 0)
    assert torch.equal(layer(tokens), F.embedding(tokens, layer.weight))


def test_slices_of_a_tensor_parallel_parameter():
    parameter = nn.Parameter(torch.empty(2, 3))
    full = torch.arange(12.0).view(4, 3)
    assert full_shape(parameter, 2) == (2, 3)
    assert slice_for_rank(parameter, full, 1) is full
    parameter.tensor_model_parallel, parameter.partition_dim = True, 0
    assert full_shape(parameter, 2) == (4, 3)
    assert torch.equal(slice_for_rank(parameter, full, 1), full[2:])
