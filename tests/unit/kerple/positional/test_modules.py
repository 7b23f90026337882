"""The positional methods in a model, also if FSDP2 shards it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from kerple.attention import Attention
from kerple.positional import DapeKerple, KerpleLog, outermost, project

pytestmark = pytest.mark.filterwarnings("ignore")


def test_outermost_methods_have_their_names():
    dape = DapeKerple(num_heads=2)
    model = nn.ModuleDict({"a": nn.Sequential(Attention(dape)), "b": KerpleLog(num_heads=2)})
    assert list(outermost(model)) == [("a.0.positional", dape), ("b", model["b"])]
    assert list(outermost(dape)) == [("", dape)]


def test_parameters_are_projected_to_their_bounds():
    model = nn.Sequential(Attention(DapeKerple(num_heads=2)), KerpleLog(num_heads=2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1.0)
    project(model)
    for name, parameter in model.named_parameters():
        is_scalar = "bias_p" in name or "bias_a" in name
        assert torch.equal(parameter, torch.full_like(parameter, 0.01 if is_scalar else -1.0))


class Layer(nn.Module):
    def __init__(self, method):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.attention = Attention(method)

    def forward(self, hidden):
        query, key, value = self.qkv(hidden).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return hidden + self.attention(query, key, value).transpose(1, 2).flatten(2)


@pytest.fixture
def mesh(request):
    """A mesh of this process; its parameter is the name of the dimension."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,), mesh_dim_names=request.param)
    dist.destroy_process_group()


@pytest.mark.parametrize("mesh", [None, ("dp",)], indirect=True)
def test_layers_that_share_a_method_cannot_be_sharded_one_by_one(mesh):
    method = KerpleLog(num_heads=2)
    layers = [Layer(method), Layer(method)]
    fully_shard(layers[0], mesh=mesh)
    with pytest.raises(ValueError, match=r"KerpleLog.*root module.*of its own"):
        fully_shard(layers[1], mesh=mesh)


@pytest.mark.parametrize("mesh", [None], indirect=True)
@pytest.mark.parametrize("shared", [True, False])
def test_gradients_of_sharded_methods(mesh, shared):
    """If the layers share the method, only the root is wrapped. It has parameters of its own."""
    methods = [KerpleLog(num_heads=2)] * 2 if shared else [KerpleLog(num_heads=2) for _ in range(2)]
    model = nn.Sequential(*map(Layer, methods), nn.Linear(8, 8))
    hidden = torch.randn(1, 5, 8)
    model(hidden).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for layer in () if shared else model[:2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(hidden).square().sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), grad)
    with torch.no_grad():
        methods[0].bias_p.fill_(-1.0)
    project(model)
    assert torch.equal(methods[0].bias_p.full_tensor(), torch.full((2, 1, 1), 0.01))


@pytest.mark.parametrize("mesh", [None], indirect=True)
def test_gradients_of_a_shared_method_in_ddp(mesh):
    method = KerpleLog(num_heads=2)
    model = nn.Sequential(Layer(method), Layer(method))
    hidden = torch.randn(1, 5, 8)
    expected = torch.autograd.grad(model(hidden).square().sum(), list(model.parameters()))
    nn.parallel.DistributedDataParallel(model)(hidden).square().sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
