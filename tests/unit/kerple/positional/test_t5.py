"""T5's buckets against their formula, in integers and in float64."""

from fractions import Fraction

import pytest
import torch
from transformers.models.t5 import modeling_t5

from kerple.positional import T5


def bucket(distance: int, buckets: int, furthest: int) -> int:
    """The first E buckets, half of them, have one distance each. Then E + floor(log(d/E) /
    log(furthest/E) * L), at most the last bucket, with L the number of the other buckets.

    floor(log x / log y * L) is the largest k with y^k <= x^L, which fractions compute exactly.
    """
    exact = buckets // 2
    if distance < exact:
        return distance
    rest = buckets - exact
    k = 0
    while (
        k + 1 < rest and Fraction(furthest, exact) ** (k + 1) <= Fraction(distance, exact) ** rest
    ):
        k += 1
    return exact + k


@pytest.mark.parametrize(
    ("buckets", "furthest"), [(32, 128), (32, 256), (64, 512), (8, 20), (7, 50), (2, 5)]
)
def test_buckets_are_exact(buckets, furthest):
    method = T5(num_heads=2, head_size=4, num_buckets=buckets, max_distance=furthest).bfloat16()
    distances = [*range(2 * furthest), 65_536]
    actual = method.buckets(torch.tensor(distances, dtype=torch.float32))
    assert actual.tolist() == [bucket(distance, buckets, furthest) for distance in distances]


def test_buckets_of_a_model_built_on_the_meta_device():
    with torch.device("meta"):
        method = T5(num_heads=2, head_size=4)
    method.to_empty(device="cpu").load_state_dict(T5(num_heads=2, head_size=4).state_dict())
    distance = torch.arange(300.0)
    assert method.buckets(distance).tolist() == [bucket(d, 32, 128) for d in range(300)]


def test_bias_is_the_table_times_the_root_of_the_head_size():
    torch.manual_seed(0)
    method = T5(num_heads=3, head_size=64)
    distance = torch.arange(300.0)
    bias = method.bias(distance)
    rows = torch.tensor([bucket(d, 32, 128) for d in range(300)])
    assert bias.dtype == torch.float32
    torch.testing.assert_close(bias, 8 * method.weight.detach()[rows].T, rtol=0, atol=0)

    upstream = torch.randn(3, 300)
    bias.backward(upstream)
    expected = torch.zeros(32, 3, dtype=torch.float64)
    for d in range(300):
        expected[rows[d]] += 8 * upstream[:, d].double()
    torch.testing.assert_close(method.weight.grad.double(), expected, rtol=1e-5, atol=1e-5)
    assert method.bias(distance.reshape(3, 100)).shape == (3, 3, 100)

    # From the first distance of the last bucket on, the gradient is that of one coefficient.
    jacobian = method.bias_jacobian(distance)
    assert jacobian.dense == rows.tolist().index(31)
    assert torch.equal(bias[:, jacobian.dense], jacobian.coefficients[:, 0])


def test_statistics_of_keys_up_to_the_query():
    method = T5(num_heads=3, head_size=4, bidirectional=True)
    found = method.statistics()
    expected = method.bias(torch.tensor([0.0, 1e4])).detach()
    assert torch.equal(found["bias_nearest"], expected[:, 0])
    assert torch.equal(found["bias_farthest"], expected[:, 1])


def test_the_largest_distance_is_beyond_the_exact_buckets():
    with pytest.raises(ValueError, match="max_distance"):
        T5(num_heads=2, head_size=4, num_buckets=32, max_distance=16)
    T5(num_heads=2, head_size=4, num_buckets=32, max_distance=17)


def test_the_table_has_its_name_in_checkpoints_and_is_xavier_normal():
    method = T5(num_heads=3000, head_size=64)
    assert {name: tuple(tensor.shape) for name, tensor in method.state_dict().items()} == {
        "weight": (32, 3000)
    }
    assert method.weight.std().item() == pytest.approx((2 / 3032) ** 0.5, rel=0.02)


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (64, 256), (16, 40)])
def test_buckets_of_both_directions_are_those_of_transformers(buckets, furthest):
    method = T5(
        num_heads=2, head_size=4, num_buckets=buckets, max_distance=furthest, bidirectional=True
    )
    distance = torch.arange(-400, 401)
    function = modeling_t5.T5Attention._relative_position_bucket
    expected = function(-distance, bidirectional=True, num_buckets=buckets, max_distance=furthest)
    torch.testing.assert_close(method.buckets(distance.float()), expected)
    assert torch.equal(
        method.bias_jacobian(torch.zeros(1)).coefficients[:, 0], 2 * method.weight[buckets // 2 - 1]
    )
