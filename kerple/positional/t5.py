"""T5's bias: a learned value per head and bucket of distances (arXiv 1910.10683)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.positional.base import Bias, TableJacobian, draw
from kerple.positional.functional import DeviceConstant, check_num_heads
from kerple.positional.registry import register


def bucket_starts(num_buckets: int, max_distance: int) -> list[int]:
    """The smallest distance in each bucket.

    The first E = num_buckets // 2 buckets have one distance each. Of the other L buckets, bucket E
    + k begins at the smallest δ with log(δ/E) / log(max_distance/E) * L >= k. This is solved in
    integers, (δ/E)^L >= (max_distance/E)^k, so no rounding of logarithms moves a boundary.
    """
    exact = num_buckets // 2
    logarithmic = num_buckets - exact
    starts = list(range(exact))
    for k in range(logarithmic):
        bound = max_distance**k * exact ** (logarithmic - k)
        # A floating-point estimate, one below, to begin the search.
        start = max(int(exact * (max_distance / exact) ** (k / logarithmic)) - 1, exact)
        while start**logarithmic < bound:
            start += 1
        starts.append(start)
    return starts


@register("rpe")
class T5(Bias):
    """Bias sqrt(d) * weight[bucket(δ), h], with a table `weight` `[buckets, h]`.

    GPT-NeoX and the KERPLE authors' code multiply by sqrt(d); checkpoints store the table without
    it.

    The option `bidirectional` is for attention that is not causal: as in T5's encoder, keys up to
    the query share the first half of the buckets, and keys after it the second half.
    """

    # The checkpoints' name for the table; this method has no weight hook.
    weight: nn.Parameter  # type: ignore[assignment]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
    ):
        super().__init__()
        # The buckets of keys up to the query; with `bidirectional`, as many again for later keys.
        self.signed = bidirectional
        self.buckets_before = num_buckets
        if bidirectional:
            self.buckets_before = num_buckets // 2
        valid = 2 <= self.buckets_before <= 1024 and self.buckets_before // 2 < max_distance < 2**31
        if not valid or (bidirectional and num_buckets % 2):
            raise ValueError(
                "rpe needs num_buckets from 2 to 1,024, and max_distance above num_buckets / 2 "
                "and below 2^31; bidirectional needs twice as many buckets; got num_buckets "
                f"{num_buckets}, max_distance {max_distance}"
            )
        self.scale = math.sqrt(head_size)
        check_num_heads(num_heads)
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))

        # Where the buckets begin, for the search of a distance's bucket.
        starts = bucket_starts(self.buckets_before, max_distance)
        self.last_start = starts[-1]
        self._later_starts_on = DeviceConstant(starts[1:], torch.int64)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Xavier normal."""
        deviation = math.sqrt(2.0 / sum(self.weight.shape))
        draw(self.weight, "normal", 0.0, deviation, generator)

    def buckets(self, distance: Tensor) -> Tensor:
        """The bucket of each distance, int64 of the same shape."""
        starts = self._later_starts_on(distance.device)
        buckets = torch.bucketize(distance.long().abs(), starts, right=True)
        if not self.signed:
            return buckets
        return torch.where(distance < 0, buckets + self.buckets_before, buckets)

    def bias(self, distance: Tensor) -> Tensor:
        values = F.embedding(self.buckets(distance), self.weight.float())  # [..., h]
        return self.scale * values.movedim(-1, 0)

    def bias_jacobian(self, distance: Tensor) -> TableJacobian:
        """From the start of the last bucket on, the bias is a single value per head."""
        coefficients = self.scale * self.weight[self.buckets_before - 1].float()
        ones = torch.ones_like(distance).expand(len(coefficients), 1, -1)
        return TableJacobian(coefficients[:, None], ones, dense=self.last_start)

    def statistics(self) -> dict[str, Tensor]:
        biases = self.scale * self.weight.detach().float()
        return {"bias_nearest": biases[0], "bias_farthest": biases[self.buckets_before - 1]}
