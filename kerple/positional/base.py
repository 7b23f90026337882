"""What a positional method is: one module with hooks, each a no-op unless a method needs it.

Legend: b batch, s query length, t key length, h heads, d head size, e hidden size.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the model that a method serves."""

    num_heads: int
    head_size: int
    hidden_size: int
    num_layers: int
    max_positions: int


@dataclass(frozen=True)
class TableJacobian:
    """How a table over distance changes with a few numbers per head, for attention that adds up their gradients itself.

    For distances from `dense` on the table changes by sum_p directions[:, p] * change of coefficients[:, p]; for the
    nearer ones as the table's own gradient has it.

    Attributes:
        coefficients: float32 `[h, p]`; autograd carries their gradient to the parameters.
        directions: float32 `[h, p, *distance.shape]`, the table's derivatives where it stands, without gradient; those
            below `dense` are not read.
        dense: the distance from which on they hold.
    """

    coefficients: Tensor
    directions: Tensor
    dense: int = 0


class PositionsExceeded(ValueError):
    """A position beyond those that the method can represent (a learned table's end)."""


class PositionalMethod(nn.Module):
    """Base of all methods. A method defines the hooks it uses, and these say what it is:

        embed(hidden, positions)                             adds to the token embeddings
        rotate(query, key, query_positions, key_positions)   turns queries and keys
        bias(distance)                                       is added to the scaled scores
        weight(distance)                                     multiplies the scaled scores
        modify_scores(scores, query, positions, mask, table)       makes the final scores, of all heads at once
        table(distance)                                      what `modify_scores` needs of distances, once for all queries
        scale_qk(query, key, query_positions, key_positions)    scales turned queries and keys, segment by segment

    `bias` and `weight` take float32 distances >= 0 of any shape and give float32 `[h, *distance.shape]`, whatever the
    parameters' dtype. Attention computes softmax(weight * q.k / sqrt(d) + bias) over the keys that a query may see; for
    a method that has `modify_scores`, which then has neither of these, softmax(modify_scores(q.k / sqrt(d), ...)).

    A constructor names the `ModelShape` fields it needs among its arguments; the others are the method's options. A
    method imports torch alone and nothing else of this project, so that it serves in any model.

    Attributes:
        shared: one instance serves all layers; False where each layer has its own.
        segment: for a method with `scale_qk`, the most queries that it scales at once.
        per_pair: for a method with `modify_scores`, what it makes of a pair depends on that pair's scores and positions alone.
        computed: names of tensors that older checkpoints hold for this method and that it computes itself.
        evaluation_options: options that change no weight, so that a trained model may be evaluated with others.
    """

    shared: bool = True
    per_pair: bool = False
    computed: tuple[str, ...] = ()
    evaluation_options: tuple[str, ...] = ()

    @classmethod
    def _arguments(cls) -> dict[str, inspect.Parameter]:
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = inspect.signature(cls.__init__).parameters
        return {name: one for name, one in parameters.items() if one.kind in named and name != "self"}

    @classmethod
    def default_options(cls) -> dict[str, Any]:
        """Option -> its default, of those that have one."""
        sizes = {field.name for field in fields(ModelShape)}
        return {
            name: one.default
            for name, one in cls._arguments().items()
            if name not in sizes and one.default is not inspect.Parameter.empty
        }

    @classmethod
    def from_shape(cls, shape: ModelShape, **options: Any) -> "PositionalMethod":
        """Build the method for a model of this shape. Raises ValueError for an option the method does not have."""
        arguments = set(cls._arguments())
        sizes = {field.name for field in fields(ModelShape)}
        valid = arguments - sizes
        for name in options:
            if name not in valid:
                known = f"it has {', '.join(sorted(valid))}" if valid else "it has none"
                raise ValueError(f"{cls.__name__} has no option {name!r}; {known}")
        return cls(**{name: getattr(shape, name) for name in sizes & arguments}, **options)

    # What the method uses, read off its class so that it cannot disagree with the hooks. A method whose hooks depend
    # on its options overrides these.

    @property
    def embeds(self) -> bool:
        return type(self).embed is not PositionalMethod.embed

    @property
    def rotates(self) -> bool:
        return type(self).rotate is not PositionalMethod.rotate

    @property
    def has_bias(self) -> bool:
        return callable(getattr(type(self), "bias", None))

    @property
    def has_weight(self) -> bool:
        return callable(getattr(type(self), "weight", None))

    @property
    def modifies_scores(self) -> bool:
        return callable(getattr(type(self), "modify_scores", None))

    @property
    def scales_qk(self) -> bool:
        return callable(getattr(type(self), "scale_qk", None))

    # Hooks.

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Add positions to the token embeddings: hidden `[b, s, e]`, integer positions `[s]`."""
        return hidden

    def rotate(
        self, query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Turn query `[b, h, s, d]` and key `[b, h, t, d]` by integer positions `[s]` and `[t]`, keeping their dtypes.

        Positions may stay on the CPU when query and key are elsewhere: nothing then waits for the device.
        """
        return query, key

    # `bias` and `weight` are not defined here: checkpoints call T5's table `weight`, and a module cannot hold a
    # parameter under the name of a method.

    def bias_jacobian(self, distance: Tensor) -> TableJacobian | None:
        """The bias by its numbers per head, at the float32 distances `[n]`, for those methods whose bias depends on few
        of these: the fused kernels then train it faster. None, which is always right, leaves it to the bias's gradient.
        """
        return None

    def weight_jacobian(self, distance: Tensor) -> TableJacobian | None:
        """As `bias_jacobian`, of the weight."""
        return None

    def table(self, distance: Tensor) -> Tensor | None:
        """For `modify_scores`: values at each of the float32 distances `[n]`, any shape that ends in n; None: it needs none."""
        return None

    # Nor are `modify_scores` and `scale_qk`, by which a method is known:
    #
    # modify_scores(scores, query, query_positions, key_positions, mask, table) -> the final scores, [b, h, c, l] float32
    #     (float64 in float64), of c queries and l keys of all heads: scores [b, h, c, l] q.k / sqrt(d); query [b, h, c,
    #     d] as `rotate` left it; int64 positions [c] and [l], each consecutive, on the CPU; mask bool [c, l], True
    #     where the query does not see the key: such scores do not count, and what is there must not max_kv_len others; table
    #     what `table` gave for distances from 0 on, or None. Called for any part of the queries, and again in the
    #     backward pass: it must give each query what it would give it among all.
    #
    # scale_qk(query, key, query_positions, key_positions) -> both scaled, [b, h, s, d] and [b, h, t, d], such that their
    #     products depend on the positions through their differences alone; keys are cached unscaled. s <= `segment`.

    # Training.

    def begin_step(self, step: int, seed: int = 0) -> None:
        """Called before each step of a training run, with the run's seed. What a method draws anew follows from these
        two alone: then all processes draw the same, and so does a resumed run.
        """

    # Parameters.

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the initial parameters: the same from the same generator, whatever their own dtype and device."""

    def statistics(self) -> dict[str, Tensor]:
        """Parameter name -> float32 `[h]`, as used (within its bounds), detached: for logs."""
        return {}

    @torch.no_grad()
    def effective_length(self, limit: int = 20_480, threshold: float = -2.0) -> Tensor:
        """The smallest distance whose bias is below the threshold, int64 `[h]`; `limit` where there is none below it.

        Figure 6 of the KERPLE paper (arXiv 2205.09921). Raises ValueError for a method without a bias.
        """
        if not self.has_bias:
            raise ValueError(f"{type(self).__name__} has no bias, so it has no effective length")
        device = next((parameter.device for parameter in self.parameters()), None)
        below = self.bias(torch.arange(limit, dtype=torch.float32, device=device)) < threshold
        first = below.to(torch.uint8).argmax(dim=1)
        return torch.where(below.any(dim=1), first, limit)


def bounded(parameter: Tensor, low: float, high: float | None = None) -> Tensor:
    """The parameter within its bounds, float32. The gradient reaches the parameter as if there were no bound.

    A clamp would stop the gradient at the bound and a parameter that touched it once would never leave.
    """
    raw = parameter.float()
    # raw - raw.detach() is exactly zero, so the value is exactly the clamped one.
    return raw.detach().clamp(low, high) + (raw - raw.detach())


def outermost(module: nn.Module, name: str = "") -> Iterator[tuple[str, "PositionalMethod"]]:
    """(name, method) of the positional methods in a module that are not part of another one."""
    if isinstance(module, PositionalMethod):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from outermost(child, f"{name}.{child_name}" if name else child_name)


def draw_layer(layer: nn.Module, generator: torch.Generator | None) -> None:
    """Weight and bias of a linear layer or a convolution by PyTorch's default: U(-1, 1) / sqrt(inputs of an output)."""
    bound = layer.weight[0].numel() ** -0.5
    for parameter in (layer.weight, layer.bias):
        draw(parameter, "uniform", -bound, bound, generator)


@torch.no_grad()
def draw(parameter: Tensor, kind: str, first: float, second: float, generator: torch.Generator | None) -> None:
    """Fill a parameter with `uniform` (low, high) or `normal` (mean, std) float32 draws, on the generator's device.

    Nothing is drawn for a parameter on the meta device, which has a shape and no memory.
    """
    if parameter.is_meta:
        return
    drawn = torch.empty(
        parameter.shape, dtype=torch.float32, device=generator.device if generator is not None else "cpu"
    )
    getattr(drawn, f"{kind}_")(first, second, generator=generator)
    parameter.copy_(drawn)
