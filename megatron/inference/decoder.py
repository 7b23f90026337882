"""A common interface to causal language models, for evaluation and generation.

A decoder computes hidden states from tokens, and logits from hidden states. Logits are the largest
tensor of a language model; this way they can be computed for a few positions at a time. A decoder
declares what else it supports: `cached` (a KV cache, so that a long text is fed in chunks), and
which attention modes it supports.

Legend: b batch, s new tokens, e hidden size, v padded vocabulary.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kerple.attention import DEFAULT_MODE, AttentionMode, Span
from kerple.positional import PositionalMethod, PositionsExceeded
from megatron.checkpoint.configuration import describe_method
from megatron.config.schema.model import ModelConfig
from megatron.utils.errors import UserError

# The backends for modes that `attend_in_mode` computes.
MODE_BACKENDS = ("auto", "chunked", "reference")
# The RoPE types of transformers whose angles depend on the length of the text ("su": Phi-3's first
# name of longrope).
LENGTH_DEPENDENT_ROPE = re.compile(r"dynamic|longrope|^su$")

PROBE_TOKENS = 8  # of the short text from which it is learned how a transformers model can be read


class Decoder(Protocol):
    """The interface of a model for evaluation and generation.

    Attributes:
        vocab_size: token ids must be below it; None if unknown.
        pos_emb: its positional method with options; None if unknown.
        methods: its positional methods, if it is a model of this project.
    """

    vocab_size: int | None
    pos_emb: str | None
    methods: Sequence[PositionalMethod]

    @property
    def cached(self) -> bool:
        """Whether it has a KV cache."""

    @property
    def complete_segments(self) -> str | None:
        """Why a transformers model reads complete segments, not chunks through a KV cache; None if
        it does not.
        """

    def new_cache(self, max_length: int | None, mode: AttentionMode = DEFAULT_MODE) -> Any:
        """An empty cache for rows of up to `max_length` tokens (None: any) in a mode; None if not
        `cached`.
        """

    def unsupported_reason(self, mode: AttentionMode) -> str | None:
        """Why `hidden` does not support this mode, as a complete sentence part after the mode's
        name; None if it does.
        """

    def hidden(
        self, tokens: Tensor, cache: Any = None, mode: AttentionMode = DEFAULT_MODE
    ) -> Tensor:
        """Hidden states `[b, s, e]` of int64 tokens `[b, s]`, which follow those in the cache."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., v]` of hidden states `[..., e]`."""


def as_decoder(model: Callable[[Tensor], Any]) -> Decoder:
    """The decoder for a model of this project, a transformers model, or any callable from int64
    tokens `[b, s]` to logits `[b, s, v]` (or to an object with `.logits`).
    """
    if all(hasattr(model, name) for name in ("new_cache", "hidden", "logits")):
        return NativeDecoder(model)

    # The library is already imported if the model is from it.
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        inner: Any = model
        while inner is not None and not isinstance(inner, transformers.PreTrainedModel):
            inner = _wrapped(inner)
        if inner is not None:
            return TransformersDecoder(model, inner)
    return CallableDecoder(model)


def _wrapped(model: Any) -> nn.Module | None:
    """The module in a wrapper: of peft, DataParallel, torch.compile; None if there is none."""
    if hasattr(model, "get_base_model"):
        base: nn.Module = model.get_base_model()
        return base
    inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else None


class NativeDecoder:
    """A model of this project. It is not cached if the positional method is `length_dependent`."""

    complete_segments: str | None = None

    def __init__(self, model: Any):
        self.methods: Sequence[PositionalMethod] = list(model.positional_methods().values())
        self.cached = not any(method.length_dependent for method in self.methods)
        self.new_cache = model.new_cache
        self.hidden = model.hidden
        self.logits = model.logits
        self.vocab_size: int | None = model.settings.padded_vocab_size
        self._config: ModelConfig = model.settings.config
        self.pos_emb: str | None = describe_method(
            self._config.pos_emb, self._config.positional_options
        )

    def unsupported_reason(self, mode: AttentionMode) -> str | None:
        return unsupported_reason(mode, self.methods, self._config)


class CallableDecoder:
    """A callable that needs the complete text. It has no cache, and supports windows or blocks only
    if the callable has an argument `window` or `block`, a number of tokens.
    """

    cached = False
    complete_segments: str | None = None
    vocab_size: int | None = None
    pos_emb: str | None = None
    methods: Sequence[PositionalMethod] = ()

    def __init__(self, model: Callable[..., Any]):
        self._model = model
        try:
            function = model.forward if isinstance(model, nn.Module) else model
            self._arguments = set(inspect.signature(function).parameters)
        except (TypeError, ValueError):  # some built-in callables have no signature
            self._arguments = set()
        self._is_causal = False  # until the first text is read

    def new_cache(self, max_length: int | None, mode: AttentionMode = DEFAULT_MODE) -> None:
        return None

    def unsupported_reason(self, mode: AttentionMode) -> str | None:
        if mode != AttentionMode(mode.span) or mode.span.sinks:
            return (
                f"needs a model of this project, and {model_name(self._model)} is none; use full, "
                "window@W or blockwise@L"
            )
        for name in _span_sizes(mode.span):
            if name not in self._arguments:
                return f"needs a model with a `{name}` argument; {model_name(self._model)} has none"
        return None

    def hidden(
        self, tokens: Tensor, cache: None = None, mode: AttentionMode = DEFAULT_MODE
    ) -> Tensor:
        logits = _logits(self._model, tokens, **_span_sizes(mode.span))
        if not self._is_causal and tokens.shape[1] > 1:
            check_causal(self._model, tokens[:1], model_name(self._model))
            self._is_causal = True
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class TransformersDecoder:
    """A causal model of the transformers library. It is cached if its `forward` has a cache
    argument, it has no other state, its angles do not depend on the length of the text (RoPE types
    `dynamic` and `longrope`), and two chunks of a short text have the same logits as one pass.

    The first text of each length shows whether the model has positions for it. If it fails,
    `hidden` raises PositionsExceeded.
    """

    methods: Sequence[PositionalMethod] = ()

    def __init__(self, model: Any, inner: Any):
        """inner: the model in the wrapper `model` (peft, DataParallel, torch.compile), or the model
        itself.
        """
        self._model, self._inner = model, inner
        self.vocab_size: int | None = inner.get_input_embeddings().num_embeddings
        config = inner.config
        if config.is_encoder_decoder:
            raise UserError(
                f"{type(inner).__name__} has an encoder and a decoder; evaluate a causal language "
                "model instead"
            )

        # Its rotary angles, and the name of its KV cache: `cache` since transformers 5.
        self._length_dependent = any(map(LENGTH_DEPENDENT_ROPE.search, _rope_types(config)))
        self._arguments = set(inspect.signature(inner.forward).parameters)
        self._cache_argument: str | None = None
        if not getattr(inner, "_is_stateful", False):
            for name in ("past_key_values", "cache"):
                if name in self._arguments:
                    self._cache_argument = name

        # An exported model of this project names its method.
        self.pos_emb: str | None = None
        method = getattr(config, "positional_method", None)
        if method is not None:
            self.pos_emb = describe_method(method, config.positional_options or {})
        # A method of kerple.transformers, added to the model's own positions or in their place.
        added = getattr(config, "kerple_positional", None)
        if added is not None:
            modules = [name.rpartition(".")[2] for name, _ in inner.named_modules()]
            if "kerple_positional" not in modules:
                raise UserError(
                    f"the model was saved with the method {added['class']}, which it does not have "
                    "now; add it with kerple.transformers.load_positional"
                )
            self.pos_emb = added["class"]
            if added["method"] is not None:
                self.pos_emb = describe_method(added["method"], added["options"])
            if added["own_positions"] == "keep":
                self.pos_emb = f"{config.model_type} + {self.pos_emb}"
        adapter = getattr(model, "active_peft_config", None)
        self._has_virtual_tokens = getattr(adapter, "is_prompt_learning", False)
        self._longest = PROBE_TOKENS  # of the texts that were read

    @cached_property
    def complete_segments(self) -> str | None:
        """See `Decoder`. Learned from a short text. Raises UserError if the model is not causal."""
        # Special tokens, such as padding, are at the ends of vocabularies.
        assert self.vocab_size is not None
        middle = self.vocab_size // 2
        tokens = torch.arange(middle, middle + PROBE_TOKENS, device=model_device(self._model))[None]
        tokens = tokens % self.vocab_size  # [1, s]
        with inference(self._model), self._short_window():
            check_causal(self._forward, tokens, type(self._inner).__name__)
            if self._length_dependent:
                return "its rotary angles depend on the length of the text"
            if self._cache_argument is None:
                return "it has no KV cache"
            if self._has_virtual_tokens:
                return "its virtual tokens would precede each chunk"

            # The logits of two chunks must be those of the text.
            expected = self._forward(tokens)
            halves = tokens.split(PROBE_TOKENS // 2, dim=1)
            try:
                cache = self._empty_cache()
                chunks = [self._forward(chunk, cache) for chunk in halves]
            except Exception as error:  # of any kind, from the model's own code
                return f"its KV cache fails: {type(error).__name__}"
            if _differ(expected, torch.cat(chunks, dim=1), 0.5):
                return "its KV cache changes its logits"
            return None

    @contextmanager
    def _short_window(self) -> Iterator[None]:
        """Shorten a sliding window in the block, so that the cache of a short text drops keys. Some
        models, such as Moshi, attend to all keys, but their cache keeps only a window.
        """
        config = self._inner.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        if window is None:
            yield
            return
        config.sliding_window = min(window, PROBE_TOKENS // 4)
        try:
            yield
        finally:
            config.sliding_window = window

    @property
    def cached(self) -> bool:
        return self.complete_segments is None

    def _empty_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._inner.config)

    def _forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        keywords: dict[str, Any] = {}
        if "use_cache" in self._arguments:
            keywords["use_cache"] = cache is not None
        if cache is not None:
            keywords[str(self._cache_argument)] = cache
        model = self._without_virtual_tokens if self._has_virtual_tokens else self._model
        return _logits(model, tokens, **keywords)

    def _without_virtual_tokens(self, tokens: Tensor, **keywords: Any) -> Tensor:
        """The logits of a model with prompt tuning, without those of the virtual tokens before the
        text.
        """
        logits: Tensor = self._model(tokens, **keywords).logits
        return logits[:, -tokens.shape[1] :]

    def new_cache(self, max_length: int | None, mode: AttentionMode = DEFAULT_MODE) -> Any:
        return self._empty_cache() if self.cached else None

    def unsupported_reason(self, mode: AttentionMode) -> str | None:
        own = getattr(self._inner.config, "inference_mode", None)  # of an export of this project
        if own not in (None, "full"):
            return (
                f"is not possible: the model was loaded with inference_mode {own}; load it with "
                "inference_mode=None"
            )
        if mode == DEFAULT_MODE:
            return None
        name = "a `block` argument" if mode.span.block is not None else "a `window` argument"
        if mode != AttentionMode(mode.span) or mode.span.sinks:
            name = "this project's attention (convert it: kerple convert from-hf)"
        return f"needs a model with {name}; {type(self._inner).__name__} has none"

    def hidden(
        self, tokens: Tensor, cache: Any = None, mode: AttentionMode = DEFAULT_MODE
    ) -> Tensor:
        end = tokens.shape[1]
        if cache is not None:
            end += cache.get_seq_length()
        if not self.cached and self._length_dependent:
            # Dynamic angles stay those of the longest text until a short one resets them.
            self._forward(tokens[:, :1])
        if end <= self._longest:
            return self._forward(tokens, cache)
        try:
            with _CheckedLookups():
                logits = self._forward(tokens, cache)
        except torch.OutOfMemoryError:
            raise
        except (IndexError, RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise PositionsExceeded(
                f"{type(self._inner).__name__} cannot read {end:,} tokens: {type(error).__name__}: "
                f"{reason}"
            ) from error
        self._longest = end
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class _CheckedLookups(TorchDispatchMode):
    """Raises IndexError for an index beyond the end of a tensor before it is looked up. On a GPU,
    the lookup would make the device unusable for the rest of the process.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, lookups = torch.ops.aten, []
        if func.overloadpacket is aten.embedding:
            lookups = [(args[1], len(args[0]))]
        elif func.overloadpacket in (aten.gather, aten.index_select):
            lookups = [(args[2], args[0].shape[args[1]])]
        elif func.overloadpacket is aten.index:
            # Masks select no positions, and change which dimension an index belongs to.
            indices = zip(args[1], args[0].shape, strict=False)
            lookups = [(index, size) for index, size in indices if index is not None]
            if any(index.dtype != torch.int64 for index, _ in lookups):
                lookups = []
        for index, size in lookups:
            if index.numel() and int(index.max()) >= size:
                raise IndexError(
                    f"index {int(index.max())} is beyond the end of a table of {size} positions"
                )
        return func(*args, **(kwargs or {}))


def check_causal(model: Callable[..., Any], tokens: Tensor, name: str) -> None:
    """Raises UserError if the last of the tokens `[1, s]` changes the logits of earlier ones."""
    changed = tokens.clone()
    changed[:, -1] = (tokens[0, -1] - 1).abs()  # another token, also if it is 0
    before, after = (_logits(model, text)[:, :-1] for text in (tokens, changed))
    if _differ(before, after, 0.75):
        raise UserError(
            f"{name} is not causal: the last token of a text changes its logits at earlier tokens; "
            "evaluate a causal language model (in transformers, some models need is_decoder=True)"
        )


def _differ(first: Tensor, second: Tensor, power: float) -> bool:
    """Whether logits differ by more than their rounding error, the dtype's `eps` to this power
    times the largest.
    """
    eps: float = torch.finfo(torch.result_type(first, 1.0)).eps
    return bool((first - second).abs().max() > eps**power * first.abs().max())


def _logits(model: Callable[..., Any], tokens: Tensor, **keywords: Any) -> Tensor:
    """The logits of a model. Raises TypeError if their shape is not that of the tokens."""
    output = model(tokens, **keywords)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != tokens.shape:
        actual: object = type(logits).__name__
        if isinstance(logits, Tensor):
            actual = tuple(logits.shape)
        raise TypeError(
            "the model must return logits [batch, seq, vocabulary] for tokens "
            f"{tuple(tokens.shape)}, not {actual}"
        )
    return logits


def model_name(model: Callable[..., Any]) -> str:
    return getattr(model, "__name__", type(model).__name__)


def _rope_types(config: Any) -> set[str]:
    """The RoPE types in the configuration, which can have one for each type of layers."""
    config = config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    entries = [parameters or {}]
    entries += [value for value in entries[0].values() if isinstance(value, dict)]
    return {str(entry.get("rope_type", entry.get("type"))) for entry in entries}


def unsupported_reason(
    mode: AttentionMode, methods: Sequence[PositionalMethod], config: ModelConfig
) -> str | None:
    """Why a model of this project does not support a mode, and what to do instead, as the rest of a
    sentence about the mode; None if it does.
    """
    backend = config.attention_backend
    reason = mode.unsupported_by(methods, config.windows, config.pos_emb)
    if reason is None and backend not in MODE_BACKENDS and any(map(mode.is_explicit, methods)):
        return (
            f"is not supported by attention-backend {backend}: it is computed in chunks of "
            f"queries; use attention-backend {' or '.join(MODE_BACKENDS)}"
        )
    return reason


def _span_sizes(span: Span) -> dict[str, int]:
    """The span's sizes that are set, by name."""
    sizes = {"block": span.block, "window": span.window}
    return {name: size for name, size in sizes.items() if size is not None}


def model_device(model: Any) -> torch.device:
    """The device of the model's first parameter; the CPU if it has none."""
    if isinstance(model, nn.Module):
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cpu")


@contextmanager
def inference(model: Any) -> Iterator[None]:
    """Disable gradients and dropout in the block; then restore each module's training mode."""
    training = []
    if isinstance(model, nn.Module):
        training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True
