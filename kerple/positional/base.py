"""The base class of positional methods: a torch module with optional hooks.

Legend: b batch, s query length, t key length, h heads, g key/value heads, d head size, e hidden
size, c and l queries and keys of a chunk, n distances, p parameters per head.
"""

import inspect
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.positional.functional import check_num_heads


@dataclass(frozen=True)
class ModelShape:
    """The model's sizes. A method's constructor receives those it has an argument for. Raises
    ValueError without a head.

    Attributes:
        layer: the index of the block that the method is for; 0 for a method that all layers share.
    """

    num_heads: int
    head_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    layer: int = 0

    def __post_init__(self) -> None:
        check_num_heads(self.num_heads)


@dataclass(frozen=True)
class TableJacobian:
    """The derivatives of a table over distance with respect to p parameters per head.

    A fused kernel can accumulate the gradients of these few parameters instead of the gradient of
    every table entry.

    Attributes:
        coefficients: float32 `[h, p]`, the parameters after clamping; autograd propagates their
            gradient.
        directions: float32 `[h, p, *distance.shape]`, d table / d coefficients at the current
            values, without gradient.
        dense: the smallest distance at which `directions` is valid. Below it, use the table's own
            gradient.
    """

    coefficients: Tensor
    directions: Tensor
    dense: int = 0


class PositionsExceeded(ValueError):
    """A position that the method cannot represent, such as one beyond a learned table."""


# The hooks that attention and the embedding call.
HOOKS = ("embed", "rotate", "bias", "weight", "modify_scores", "scale_qk", "decay")
# Properties of earlier versions, which nothing asks for.
REPLACED: tuple[str, ...] = ("embeds", "rotates", "modifies_scores", "scales_qk")
REPLACED += ("has_bias", "has_weight", "has_decay", "has_positions")


@dataclass(frozen=True, eq=False)
class Chunk:
    """Pairs of c queries and l keys, whose scores `modify_scores` computes.

    Attributes:
        scores: `[b, h, c, l]`, q.k / sqrt(d), float32 or float64.
        query: `[b, h, c, d]`, after `rotate` and the scaling of an inference mode (`logn`,
            `yarn-temperature`).
        query_positions, key_positions: `[c]` and `[l]`, each consecutive, except that keys which no
            query of the chunk sees may be missing after attention sinks, unless the method is
            `per_pair`.
        mask: bool `[c, l]`, or `[b, 1, c, l]` with a key mask, True where the query must not see
            the key. Such scores may be arbitrary and must not influence visible ones.
        table: the result of the method's `table` for distances from 0 on (see `by_pair` in
            `functional.py`). If the method is `signed` and attention not causal, `[2, ...]`: for
            keys up to the query, and for keys after it.
        causal: if False, keys after the query are not masked.
    """

    scores: Tensor
    query: Tensor
    query_positions: Tensor
    key_positions: Tensor
    mask: Tensor
    table: Tensor | None = None
    causal: bool = True


class PositionalMethod(nn.Module):
    """Base class of all positional methods, and all that a model asks them for. To write a method,
    begin with one of the small base classes (`Bias`, `Rotation` or `ScoreModifier`).

    A method implements the hooks it needs:

        embed(hidden, positions)                              add to the token embeddings
        rotate(query, key, query_positions, key_positions)    transform queries and keys
        bias(distance)                                        added to the scaled scores
        weight(distance)                                      multiplies them, as `bias`
        modify_scores(chunk)                                  the final scores, for all heads
        scale_qk(query, key, query_positions, key_positions)  scale segments after rotation
        decay(hidden)                                         its sums are added to scores

    Attention computes softmax(weight * q.k / sqrt(d) + bias) over the visible keys, or
    softmax(modify_scores(q.k / sqrt(d), ...)). A method with `modify_scores` has no bias, weight,
    decay or scale_qk.

    `scale_qk` scales query `[b, h, s, d]` and key `[b, g, t, d]`, s <= `segment`, so that their
    products depend only on differences of positions. Keys are cached unscaled.

    `decay` returns `[b, h, s]` in at least float32, from the input of attention `[b, s, e]`, token
    by token. The bias of a query and a key is the sum over the tokens after the key, up to the
    query (see `decay.py`).

    Constructor arguments named like a field of `ModelShape` receive the model's sizes; the other
    arguments are the method's options. A method imports only torch and `kerple.positional`, so it
    works in any model.

    Positions are int64 tensors on the CPU, so reading a value does not synchronize with a GPU.
    Methods create derived tensors on the device of queries and keys.

    Attributes:
        hooks: the names of the method's hooks: those that its class defines, unless the constructor
            changes them.
        shared: one instance serves all layers. If False, every layer has its own.
        segment: for a method with `scale_qk`, the maximum number of queries per call.
        per_pair, shift_invariant, lookahead: for a method with `modify_scores`, see
            `ScoreModifier`.
        counts_from_start: whether a score depends on the place of the query in its text. Then
            attention needs all keys from the start of it.
        signed: whether bias, weight and table are defined for negative distances, of keys after the
            query. Otherwise, attention that is not causal reads them at the absolute distance.
        causal_only: whether the method has no meaning for keys after the query.
        turns: whether `rotate` turns pairs of dimensions by angles proportional to the positions,
            which may be float64 and fractional. A distance map (`distance_maps.py`) then applies to
            the positions.
        interpolated: whether the frequencies of `rotate` are changed for longer texts.
        score_scale: the factor of all scores that `rotate` contains.
        length_dependent: whether the result for a token depends on the length of its text. Then
            keys of a shorter text cannot be cached.
        computed: names of tensors that older checkpoints store and this method computes.
        evaluation_options: options that evaluation can change: they affect no parameters.
    """

    hooks: frozenset[str] = frozenset()
    shared: bool = True
    per_pair: bool = False
    shift_invariant: bool = False
    lookahead: int = 0
    counts_from_start: bool = False
    signed: bool = False
    causal_only: bool = False
    turns: bool = False
    interpolated: bool = False
    score_scale: float = 1.0
    length_dependent: bool = False
    computed: tuple[str, ...] = ()
    evaluation_options: tuple[str, ...] = ()

    # Hooks without a default are only declared: nn.Module rejects a parameter named like a class
    # attribute, and in checkpoints the tables of T5 and Learned are called `weight`.
    bias: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor], Tensor]
    decay: Callable[[Tensor], Tensor]
    modify_scores: Callable[[Chunk], Tensor]
    scale_qk: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    if TYPE_CHECKING:

        @property
        def segment(self) -> int: ...

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # Errors that would otherwise show up far from the class, or not at all.
        for name in REPLACED:
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__}: {name} is not used; change the set `hooks` in the "
                    "constructor instead"
                )
        function = vars(cls).get("modify_scores")
        if inspect.isfunction(function) and len(inspect.signature(function).parameters) != 2:
            raise TypeError(
                f"{cls.__name__}: modify_scores has one argument, a Chunk with scores, query, "
                "query_positions, key_positions, mask and table"
            )

        # The hooks that the class or one of its bases defines.
        hooks = set()
        for name in HOOKS:
            hook = getattr(cls, name, None)
            # `embed` and `rotate` have a default, which is no hook.
            if callable(hook) and hook is not getattr(PositionalMethod, name, None):
                hooks.add(name)
        cls.hooks = frozenset(hooks)

        # A class that overrides a table does not inherit the jacobian, which is that of another
        # function.
        for name, jacobian in (("bias", "bias_jacobian"), ("weight", "weight_jacobian")):
            for base in cls.__mro__:
                # Whichever comes first in the order of inheritance: a jacobian that fits, or a
                # table without.
                if jacobian in vars(base):
                    break
                if name in vars(base):
                    setattr(cls, jacobian, getattr(PositionalMethod, jacobian))
                    break

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As in nn.Module. Raises ValueError if FSDP2 would shard the parameters a second time."""
        # `fully_shard` asks the modules that it shards for their own parameters, and would fail
        # without a reason. It also looks at those that are sharded already, elsewhere.
        if not recurse:
            caller = sys._getframe(1)
            is_fsdp = caller.f_globals.get("__name__", "").startswith("torch.distributed.fsdp")
            sharded = "DTensor" in [type(each).__name__ for each in self._parameters.values()]
            if sharded and is_fsdp and caller.f_code.co_name == "_get_managed_states":
                raise ValueError(
                    f"{type(self).__name__}: fully_shard has already sharded this method's "
                    "parameters with another layer. If layers share a method, wrap only the root "
                    "module, or give each layer a method of its own"
                )
        return super().named_parameters(prefix, recurse, remove_duplicate)

    # -- the hooks with a default ------------------------------------------------------------------

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Add position embeddings to hidden `[b, s, e]`; positions `[s]`."""
        return hidden

    def rotate(
        self, query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Transform query `[b, h, s, d]` and key `[b, g, t, d]` by their positions `[s]` and `[t]`;
        the dtypes stay.
        """
        return query, key

    # -- what attention and inference modes ask for, beside the hooks ------------------------------

    def stretched(self, factor: float) -> "PositionalMethod | None":
        """A method whose `rotate` has the base of NTK-aware scaling (see `ntk_base`), and is
        otherwise this one's; its other hooks are not used. None if there is no such base.
        """
        return None

    def table(self, distance: Tensor) -> Tensor | None:
        """Values for `modify_scores` at float32 distances `[n]`, `[..., n]` or None."""
        return None

    def mapped_table(self, distance: Tensor) -> Tensor | None:
        """Like `table`, at mapped distances (see `distance_maps.py`). A method that computes
        distances from positions returns the distances; it gets values for all distances up to the
        query's position, even with a window.
        """
        return self.table(distance)

    def final_scores(self, chunk: Chunk) -> Tensor:
        """`modify_scores`, `[b, h, c, l]`; if causal, with `lookahead` additional masked keys after
        the last one, whose scores are not returned.

        The result for a query is then the same whether or not keys follow, as in decoding with a KV
        cache.
        """
        if not chunk.causal or not self.lookahead:
            return self.modify_scores(chunk)
        # Masked keys at the next positions, which are removed from the result.
        following = torch.arange(self.lookahead, device="cpu") + chunk.key_positions[-1] + 1
        longer = replace(
            chunk,
            scores=F.pad(chunk.scores, (0, self.lookahead)),
            key_positions=torch.cat((chunk.key_positions, following)),
            mask=F.pad(chunk.mask, (0, self.lookahead), value=True),
        )
        return self.modify_scores(longer)[..., : -self.lookahead]  # [b, h, c, l]

    def bias_jacobian(self, distance: Tensor) -> TableJacobian | None:
        """The bias's derivatives at the float32 distances `[n]`, which speed up training with fused
        kernels.

        None is always correct: gradients then go through the table.
        """
        return None

    def weight_jacobian(self, distance: Tensor) -> TableJacobian | None:
        """Like `bias_jacobian`, for the weight."""
        return None

    # -- training and evaluation -------------------------------------------------------------------

    def begin_step(self, step: int, seed: int = 0, length: int | None = None) -> None:
        """Called before each training step, with the run's seed and the length of its sequences in
        tokens. Random numbers that a method draws in training must depend only on these, so that
        all processes and a resumed run draw the same.
        """

    def begin_text(self, length: int | None) -> None:
        """Called before texts of `length` tokens are evaluated, and with None afterwards: their
        length is not known.
        """

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the initial parameters, which depend on the generator, not on dtype or device."""

    def bounds(self) -> dict[str, tuple[float, float | None]]:
        """Name -> (lowest, highest value) of the method's own parameters that have bounds; None: no
        upper bound.

        Training keeps them within their bounds by `project`. Read them through `bounded`.
        """
        return {}

    def statistics(self) -> dict[str, Tensor]:
        """Values to log in training: name -> float32 `[h]`, detached and within their bounds."""
        return {}

    @torch.no_grad()
    def effective_length(self, limit: int = 20_480, threshold: float = -2.0) -> Tensor:
        """Per head, the smallest distance with a bias below the threshold, int64 `[h]`; `limit` if
        there is none.

        Figure 6 of the KERPLE paper (arXiv 2205.09921). Raises ValueError for a method without a
        bias.
        """
        if "bias" not in self.hooks:
            raise ValueError(f"{type(self).__name__} has no bias, so it has no effective length")
        device = next((parameter.device for parameter in self.parameters()), None)
        # argmax is 0 both for a bias below the threshold at once and for one that never is.
        below = self.bias(torch.arange(limit, dtype=torch.float32, device=device)) < threshold
        first = below.to(torch.uint8).argmax(dim=1)
        return torch.where(below.any(dim=1), first, limit)

    # -- options, and how a method is built from them ----------------------------------------------

    @classmethod
    def _arguments(cls) -> dict[str, inspect.Parameter]:
        """The constructor's arguments, without *args and **kwargs."""
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = inspect.signature(cls.__init__).parameters.values()
        arguments = {argument.name: argument for argument in parameters if argument.kind in named}
        arguments.pop("self", None)
        return arguments

    @classmethod
    def default_options(cls) -> dict[str, Any]:
        """Option -> default value, for the options that have one."""
        # The sizes of the model are no options.
        sizes = [field.name for field in fields(ModelShape)]
        options = {}
        for name, argument in cls._arguments().items():
            if name not in sizes and argument.default is not inspect.Parameter.empty:
                options[name] = argument.default
        return options

    @classmethod
    def trained_options(cls, **options: Any) -> dict[str, Any]:
        """The options without those that evaluation can change: `evaluation_options` and the
        options of wrappers.
        """
        changeable = (*cls.evaluation_options, *WRAPPERS)
        return {name: value for name, value in options.items() if name not in changeable}

    @classmethod
    def parts(cls, **options: Any) -> list[type["PositionalMethod"]]:
        """The other methods that a method with these options builds by name: an export contains
        their files.
        """
        return []

    @classmethod
    def from_shape(cls, shape: ModelShape, **options: Any) -> "PositionalMethod":
        """Build the method for a model of this shape. The options in `WRAPPERS` are valid for any
        method.

        Raises ValueError for an unknown option or an invalid value.
        """
        # Options are the arguments that are no sizes.
        wrapping = {name: options.pop(name) for name in WRAPPERS if name in options}
        arguments = set(cls._arguments())
        sizes = {field.name for field in fields(ModelShape)}
        known = sorted(arguments - sizes)
        for name in options:
            if name in known:
                continue
            hint = "it has no options"
            if known:
                hint = f"its options are {', '.join(known)}"
            raise ValueError(f"{cls.__name__} has no option {name!r}; {hint}")

        # The sizes that the constructor has arguments for, and the first wrapper.
        options |= {name: getattr(shape, name) for name in sizes & arguments}
        for name, value in wrapping.items():
            if value is not None:
                # It builds the method, and gets the options of the other wrappers, too.
                return WRAPPERS[name](cls, options, shape, wrapping)
        return cls(**options)


# Option that is valid for any method -> function of (class, constructor arguments, shape, values of
# such options) that builds the method with it. Modules that change any method, such as
# `wrappers.py`, add their options.
WRAPPERS: dict[str, Callable[..., PositionalMethod]] = {}


# -- the small base classes ------------------------------------------------------------------------


class Bias(PositionalMethod):
    """Adds `bias(distance)` to the scaled scores. All layers share one instance.

    Members: `__init__`, `reset_parameters` and `bias`; `statistics` and `bias_jacobian` are
        optional.
    """

    @abstractmethod
    def bias(self, distance: Tensor) -> Tensor:
        """float32 `[h, *distance.shape]`, for float32 distances >= 0 of any shape, in any parameter
        dtype. A value must depend only on its own distance, not on the others of the call.
        """


class ScoreModifier(PositionalMethod):
    """Computes the final scores from the scaled scores. Each layer has its own instance.

    Members: `__init__`, `reset_parameters` and `modify_scores`; `table` for values over distance.
    Three attributes say what the final score of a query-key pair depends on. The defaults are
    always correct. A method that can read a `Chunk` with keys after the query sets `causal_only` to
    False.

    Attributes:
        per_pair: only on that pair's query, positions and scores (of all heads).
        shift_invariant: on positions only for the distances at which `table` is read, so that the
            table may begin at another distance, with positions shifted by it.
        lookahead: the number of masked keys after the last query whose presence (not their values)
            affects the result. `final_scores` adds them. No more masked keys than that next to a
            visible one may affect its score.
    """

    shared = False
    causal_only = True

    @abstractmethod
    def modify_scores(self, chunk: Chunk) -> Tensor:
        """The final scores of a chunk of queries, `[b, h, c, l]`, in the dtype of `chunk.scores`.

        Attention calls this through `final_scores`, for arbitrary chunks of the queries, and again
        in the backward pass. The result for a query must not depend on the chunk.
        """


# -- parameters of methods -------------------------------------------------------------------------


def bounded(parameter: Tensor, low: float, high: float | None = None) -> Tensor:
    """The parameter clamped to its bounds, float32, with a gradient as if there were no clamp.

    A clamp's gradient is zero beyond the bound, so a parameter that crossed it could never return.
    `project` keeps the parameter itself within the bounds during training, but loaded weights and
    rounding to bf16 can exceed them.
    """
    raw = parameter.float()
    # raw - raw.detach() is exactly zero, so the value is exactly the clamped one.
    return raw.detach().clamp(low, high) + (raw - raw.detach())


@torch.no_grad()
def draw(
    parameter: Tensor, kind: str, first: float, second: float, generator: torch.Generator | None
) -> None:
    """Fill a parameter with `uniform` (low, high) or `normal` (mean, std) draws, float32 on the
    generator's device.

    Does nothing for a parameter on the meta device.
    """
    if parameter.is_meta:
        return
    device = torch.device("cpu")
    if generator is not None:
        device = generator.device
    values = torch.empty(parameter.shape, dtype=torch.float32, device=device)
    getattr(values, f"{kind}_")(first, second, generator=generator)
    parameter.copy_(values)


class MLPLayer(nn.Module):
    """The parameters of a layer in a method's MLP: `weight` `[outputs, inputs, *kernel]` and `bias`
    `[outputs]`.

    The method itself multiplies by them. This is no nn.Linear, which quantization and LoRA replace
    by layers that work only if they are called.
    """

    def __init__(self, inputs: int, outputs: int, *kernel: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, *kernel))
        self.bias = nn.Parameter(torch.empty(outputs))

    def weight_and_bias(self) -> tuple[Tensor, Tensor]:
        """A wrapper that changes the weight during `forward` (peft's target_parameters) does not
        have this method, so it fails instead of being ignored.
        """
        return self.weight, self.bias

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw weight and bias by PyTorch's default for linear layers and convolutions: U(-1, 1) /
        sqrt(fan_in).
        """
        bound = self.weight[0].numel() ** -0.5
        for parameter in (self.weight, self.bias):
            draw(parameter, "uniform", -bound, bound, generator)
