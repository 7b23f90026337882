"""Functions of positions that several methods use: sinusoidal angles, and values over distance for
pairs.

Legend: s positions, n rotated dimensions or distances, c queries, l keys.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def positions_on(
    positions: Tensor, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Positions `[s]`, int64 or floating-point, on another device.

    A copy from the CPU's pageable memory would wait for the GPU: consecutive positions are created
    there, others are copied from page-locked memory.
    """
    if positions.device.type == "cpu" != device.type and len(positions):
        first = int(positions[0])
        last = first + len(positions)
        if torch.equal(positions, torch.arange(first, last, dtype=positions.dtype, device="cpu")):
            return torch.arange(first, last, dtype=dtype, device=device)
        if device.type == "cuda":
            return positions.to(dtype).pin_memory().to(device, non_blocking=True)
    return positions.to(device, dtype)


def cast_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """The tensors in another dtype: small ones are cast by two kernels, not by one each."""
    if all(tensor.dtype == dtype for tensor in tensors):
        return tensors
    # One tensor of all of them is cast, and split.
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    sizes = [tensor.numel() for tensor in tensors]
    flat = flat.to(dtype)
    parts = flat.split(sizes)
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def default_frequencies(size: int, base: float) -> tuple[float, ...]:
    """base^(-2i/size) for i = 0 ... size/2 - 1."""
    count = (size + 1) // 2
    return tuple(float(base) ** (-2.0 * i / size) for i in range(count))


def ntk_base(base: float, factor: float, size: int) -> float:
    """The base of NTK-aware scaling: base * factor^(size / (size - 2)), for `size` > 2 rotated
    dimensions. The highest frequency stays, and the lowest is divided by `factor`.
    """
    return float(base * factor ** (size / (size - 2)))


def may_cache() -> bool:
    """Whether new tensors may be used in later calls, and cached ones in this call. Not if tensors
    are fake, or in a function that torch.func transforms: its tensors are valid only there.
    """
    if torch.compiler.is_dynamo_compiling():  # it cannot trace this test, and stores real tensors
        return True
    new = torch.empty(0, device="cpu")
    return type(new) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(new)


class DeviceConstant:
    """Python numbers as a tensor on any device, cached per device.

    Unlike a buffer, its dtype does not change if the model is cast, and it has its values even if
    the model is built on the meta device. Without the cache, every use would copy from the CPU and
    synchronize with the GPU.
    """

    def __init__(self, values: Sequence[float], dtype: torch.dtype = torch.float32):
        self.values = tuple(values)
        self.dtype = dtype
        self._cache: dict[torch.device, Tensor] = {}

    def __call__(self, device: torch.device) -> Tensor:
        """The values `[len(values)]` on `device`."""
        if not may_cache():
            return torch.tensor(self.values, dtype=self.dtype, device=device)
        if device not in self._cache:
            # Autograd cannot save inference tensors, and training may use tensors that an
            # evaluation cached.
            with torch.inference_mode(False):
                self._cache[device] = torch.tensor(self.values, dtype=self.dtype, device=device)
        return self._cache[device]


class LatestResults:
    """The latest results of a function of positions, which are cached because all layers use the
    same positions.

    Positions are compared by value, which is done only for those on the CPU: on a GPU it would
    synchronize.
    """

    SIZE = 2

    def __init__(self) -> None:
        self.entries: list[tuple[tuple[Tensor, ...], torch.device, tuple[Tensor, Tensor]]] = []

    def get(
        self,
        compute: Callable[..., tuple[Tensor, Tensor]],
        device: torch.device,
        *positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """compute(device, *positions), or its cached result."""
        on_device = any(part.device.type != "cpu" for part in positions)
        if on_device or torch.compiler.is_compiling() or not may_cache():
            return compute(device, *positions)
        # The latest entry comes first, and replaces the oldest.
        for cached, cached_device, result in self.entries:
            if cached_device == device and all(map(torch.equal, cached, positions)):
                return result
        # Autograd cannot save inference tensors, and training may use tensors that an evaluation
        # cached.
        with torch.inference_mode(False):
            result = compute(device, *positions)
            copies = tuple(part.clone() for part in positions)
        entry = copies, device, result
        self.entries = [entry, *self.entries[: self.SIZE - 1]]
        return result


class Angles:
    """Cosines and sines of position * frequency, `[s, n/2]` float32 each, times `scale`.

    The frequencies are base^(-2i/n) by default. Angles are computed in float64: in float32 an angle
    near 65,536 is off by up to 0.004, and casting the model would make it worse. `dtype` float32 is
    for comparisons with models that compute angles in float32. Raises ValueError unless the base is
    above 1.
    """

    def __init__(
        self,
        size: int,
        base: float,
        dtype: torch.dtype = torch.float64,
        frequencies: Sequence[float] = (),
        scale: float = 1.0,
    ):
        self.size = size
        self.base = float(base)
        if not 1 < self.base < math.inf:
            raise ValueError(f"base {base}: the base of the wavelengths must be a number above 1")
        self.dtype = dtype
        self.frequencies = tuple(frequencies)
        # Given frequencies replace those of the base.
        self._frequencies_on = DeviceConstant(frequencies, dtype)
        self.scale = scale
        self._cache = LatestResults()
        self._stretched: tuple[float, Angles] | None = None

    def stretched(self, factor: float) -> "Angles":
        """The angles with the base of NTK-aware scaling. Given frequencies are divided like those
        of the base: that of index i by factor^(2i / (n - 2)).
        """
        # The latest result is kept, because all layers use the same angles.
        if self._stretched is not None:
            latest, stretched = self._stretched
            if latest == factor:
                return stretched
        frequencies = []
        for i, frequency in enumerate(self.frequencies):
            exponent = -2 * i / (self.size - 2)
            frequencies.append(frequency * factor**exponent)
        stretched = Angles(
            self.size,
            base=ntk_base(self.base, factor, self.size),
            dtype=self.dtype,
            frequencies=frequencies,
            scale=self.scale,
        )
        self._stretched = factor, stretched
        return stretched

    def __call__(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cosines, sines) on `device` for int64 or floating-point positions `[s]`."""
        return self._cache.get(self._compute, device, positions)

    @torch.no_grad()
    def _compute(self, device: torch.device, positions: Tensor) -> tuple[Tensor, Tensor]:
        if device.type != "mps":  # MPS has no float64
            positions = positions_on(positions, device, positions.dtype)
        if self.frequencies:
            values = self._frequencies_on(positions.device)
        else:
            even = torch.arange(0, self.size, 2, dtype=self.dtype, device=positions.device)
            values = 1.0 / self.base ** (even / self.size)
        # Every position times every frequency.
        angles = positions.to(self.dtype)[:, None] * values  # [s, n/2]
        cosines = angles.cos() * self.scale
        sines = angles.sin() * self.scale
        return cosines.float().to(device), sines.float().to(device)


def by_distance(
    table: Tensor, query_positions: Tensor, key_positions: Tensor, after: Tensor | None = None
) -> Tensor:
    """The values of a table over distance `[..., n]` for the distances in a chunk,
    `[..., c + l - 1]`, from the farthest (last query, first key) to the nearest. Raises ValueError
    if positions are not consecutive.

    Zero for distances beyond the table, which must be masked. after: the table for keys after the
    query; without it, they are zero too.
    """
    if not (consecutive(query_positions) and consecutive(key_positions)):
        raise ValueError(
            "the positions are not consecutive, so their distances form no diagonals: use by_pair"
        )
    # The distances in the table, from the farthest on, and zeros for those outside of it.
    farthest = int(query_positions[-1] - key_positions[0])  # may be beyond the table
    nearest = farthest - (len(query_positions) + len(key_positions) - 2)
    last = table.shape[-1] - 1
    first = max(0, nearest)
    end = min(farthest, last) + 1
    values = table[..., first:end].flip(-1)
    following = max(0, -nearest)
    # Then the keys after the query, at the distances 1, 2 and so on.
    if after is not None:
        values = torch.cat((values, after[..., 1 : following + 1]), dim=-1)
        following = max(0, following - last)
    # Zeros on both sides complete the c + l - 1 diagonals.
    beyond = max(0, farthest - max(last, nearest - 1))
    return F.pad(values, (beyond, following))


def by_pair(
    table: Tensor, query_positions: Tensor, key_positions: Tensor, after: Tensor | None = None
) -> Tensor:
    """The values of a table over distance `[..., n]` for all pairs in a chunk, `[..., c, l]`.
    Without `after`, the values for keys after the query are arbitrary.

    For consecutive positions, the rows are overlapping views of `by_distance`. Unlike indexing,
    this gives gradients that are summed in a fixed order.
    """
    if not (consecutive(query_positions) and consecutive(key_positions)):
        # A lookup for each pair; masked pairs may be beyond the table.
        last = table.shape[-1] - 1
        distance = (query_positions[:, None] - key_positions).clamp(-last, last)  # [c, l]
        distance = distance.to(table.device)
        values = table[..., distance.clamp(min=0)]
        if after is None:
            return values
        return torch.where(distance < 0, after[..., (-distance).clamp(min=0)], values)

    # Row 0 of the views begins at the farthest pair, which belongs to the last query.
    diagonals = by_distance(table, query_positions, key_positions, after)
    rows = diagonals.unfold(-1, len(key_positions), 1)  # [..., c, l], the last query first
    return rows.flip(-2)


def consecutive(positions: Tensor) -> bool:
    """Whether increasing positions have no gaps. False in compiled code, which does not know their
    values.
    """
    if torch.compiler.is_compiling():
        return False
    return int(positions[-1] - positions[0]) == len(positions) - 1


def check_num_heads(num_heads: int) -> None:
    """Raises ValueError unless a method is built for at least one head."""
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1; got {num_heads}")


def check_heads(states: Tensor, num_heads: int, method: str) -> None:
    """Raises ValueError unless queries or scores `[b, h, ...]` have the method's heads."""
    if states.shape[1] != num_heads:
        raise ValueError(
            f"{method} was built for {num_heads} heads, but {list(states.shape)} has "
            f"{states.shape[1]}; queries are [b, h, s, d]: if these are [b, s, h, d], pass "
            "query.transpose(1, 2), and the same for key and value"
        )
