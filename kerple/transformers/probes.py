"""Runs of a model of transformers on a few tokens: to find its attention layers, and to check that
its own positions are gone.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kerple.transformers.attention import PLAIN, PROBES
from kerple.transformers.mask import IMPLEMENTATION

# Names of modules that embed positions.
POSITION_EMBEDDINGS = ("wpe", "embed_positions", "position_embeddings", "position_embedding")


@dataclass(frozen=True)
class Layer:
    """A call of self-attention that was observed."""

    module: nn.Module
    num_heads: int
    head_size: int
    is_causal: bool


def find_attention(model: PreTrainedModel, *, complete: bool = True) -> list[Layer]:
    """The self-attention layers, in the order of their calls. Leaves the implementation set.

    Raises ValueError if no attention, or if `complete` not all attention, uses the
    AttentionInterface.
    """
    calls: list[Layer] = []
    modules: set[nn.Module] = set()
    attended: set[nn.Module] = set()  # cross-attention, too

    def observe(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        is_causal: bool,
    ) -> Tensor:
        attended.add(module)
        # The inputs make queries and keys of cross-attention differ in number.
        if query.shape[2] != key.shape[2]:
            module.__dict__["_kerple_cross"] = True
        elif module not in modules:
            modules.add(module)
            calls.append(Layer(module, query.shape[1], query.shape[3], is_causal))
        return _no_attention(module, query, key, value)

    model.set_attn_implementation(IMPLEMENTATION)
    body: Any = model.base_model
    named = [each for each in body.modules() if type(each).__name__.endswith("Attention")]
    try:
        with _watching(named) as called:
            _run_probe(body, observe, _random_tokens(model))
    except (RuntimeError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{type(model).__name__} does not run on a few tokens with the attention of this "
            f"package: {type(error).__name__}: {error}"
        ) from error
    if not calls:
        raise ValueError(
            f"{type(model).__name__} does not use transformers' AttentionInterface, so a method "
            "cannot be added to its attention"
        )

    # Attention without a call is of another kind, such as the local attention of LongT5. A module
    # around a call, or within one, is part of it.
    parts = {part for module in attended for part in module.modules()}
    others = [module for module in named if module in called and module not in parts]
    for module in others:
        if complete and attended.isdisjoint(module.modules()):
            raise ValueError(
                f"{type(model).__name__}: {type(module).__name__} does not use transformers' "
                "AttentionInterface, so the method would be missing there; name the layers that "
                "get it (layers=[...])"
            )
    return calls


@contextmanager
def _watching(modules: Iterable[nn.Module]) -> Iterator[set[nn.Module]]:
    """The modules that are called meanwhile."""
    called: set[nn.Module] = set()
    handles = []
    for each in modules:
        handles.append(each.register_forward_hook(lambda module, *_: called.add(module)))
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def _no_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return value.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[3])


def embedding_of(model: PreTrainedModel) -> Tensor:
    """The table of the token embeddings, `[vocabulary, e]`."""
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    return embedding


def _random_tokens(model: PreTrainedModel) -> dict[str, Tensor]:
    """Inputs of 7 tokens, and for the decoder of an encoder-decoder 5, so that its cross-attention
    has another number of keys than queries.
    """
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"{type(model).__name__} reads {model.main_input_name}; only models of text are "
            "supported"
        )
    embedding = embedding_of(model)
    vocabulary = len(embedding)
    generator = torch.Generator().manual_seed(0)
    lengths = {"input_ids": 7}
    parameters = inspect.signature(model.forward).parameters
    if "decoder_input_ids" in parameters:
        lengths["decoder_input_ids"] = 5
    # Special tokens, such as padding, come first.
    low = min(10, vocabulary // 2)
    inputs: dict[str, Tensor] = {}
    # A decoder without its encoder needs the states that it attends to.
    has_cross = model.config.is_encoder_decoder or getattr(
        model.config, "add_cross_attention", False
    )
    # BartForCausalLM and its kind can do without, and say so in their configuration.
    names = [name.rpartition(".")[2] for name, _ in model.named_modules()]
    has_cross = has_cross or "encoder_attn" in names
    is_part = has_cross and "decoder_input_ids" not in parameters
    if is_part and "encoder_hidden_states" in parameters:
        states = torch.randn(1, 3, embedding.shape[1], generator=generator)
        inputs["encoder_hidden_states"] = states.to(embedding)
    for name, length in lengths.items():
        tokens = torch.randint(low, vocabulary, (1, length), generator=generator)
        inputs[name] = tokens.to(embedding.device)
    return inputs


@torch.no_grad()
def _run_probe(
    model: PreTrainedModel, probe: Callable[..., Tensor], inputs: dict[str, Tensor]
) -> Tensor:
    """The first output of the model in evaluation mode, with `probe` as its attention."""
    training = {module for module in model.modules() if module.training}
    model.eval()
    PROBES.function = probe
    try:
        output: Tensor = model(**inputs, use_cache=False, return_dict=True)[0]
        return output
    finally:
        PROBES.function = None
        for module in training:
            module.training = True


def zero_angles(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A hook: the cosines and sines of angles 0, or their complex numbers. Their size, YaRN's
    temperature, does not depend on the position and stays.
    """
    if isinstance(output, Tensor) and output.is_complex():
        return output.abs().to(output.dtype)
    cosine, sine = output
    return torch.hypot(cosine, sine), torch.zeros_like(sine)


def first_position(module: nn.Module, inputs: Any) -> Any:
    """A hook: the position 0 for all tokens, because a table ends at the last position."""
    return tuple(torch.zeros_like(each) for each in inputs)


def zero_embeddings(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A hook."""
    return torch.zeros_like(output)


def remove_positions(model: PreTrainedModel) -> list[Any]:
    """Hooks that make rotary angles zero and leave out position embeddings, in the modules that
    tokens pass through. The biases of the model, which it passes to attention, are left out there.
    """
    # The modules that compute positions, of which those of images are not called for tokens.
    candidates = []
    for name, module in model.named_modules():
        is_rotary = type(module).__name__.endswith("RotaryEmbedding")
        if is_rotary or name.rpartition(".")[2] in POSITION_EMBEDDINGS:
            candidates.append((module, is_rotary))
    body: Any = model.base_model
    with _watching(module for module, _ in candidates) as called:
        _run_probe(body, _no_attention, _random_tokens(model))

    handles: list[Any] = []
    for module, is_rotary in candidates:
        if module not in called:
            continue
        if is_rotary:
            handles.append(module.register_forward_hook(zero_angles))
            continue
        if type(module) is nn.Embedding:
            handles.append(module.register_forward_pre_hook(first_position))
        handles.append(module.register_forward_hook(zero_embeddings))
    return handles


def check_removed(model: PreTrainedModel) -> None:
    """Raises ValueError unless the model, with attention to all keys, is indifferent to the order
    of its tokens, so that no positions are left. Leaves out biases from now on.
    """
    # Queries that grow with their position do so too far for a few tokens.
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        scaling = getattr(config, "rope_parameters", None) or {}
        if getattr(config, "attn_temperature_tuning", False) or scaling.get("llama_4_scaling_beta"):
            raise ValueError(
                f"the positions of {type(model).__name__} cannot be removed: it scales its queries "
                "by their position; keep the positions, or switch this off in its configuration "
                "(attn_temperature_tuning, llama_4_scaling_beta)"
            )
    attended: set[nn.Module] = set()

    def unordered(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        is_causal: bool,
    ) -> Tensor:
        attended.add(module)
        context: Tensor = PLAIN(query, key, value, causal=False, scale=scaling)
        return context.transpose(1, 2)

    # The same tokens in another order. The last input is that of the output's tokens.
    body: Any = model.base_model  # its output has a vector for each token
    inputs = _random_tokens(model)
    generator = torch.Generator().manual_seed(1)
    shuffled = {}
    permutation = torch.arange(0)
    for name, tokens in inputs.items():
        if name == "encoder_hidden_states":
            shuffled[name] = tokens
            continue
        permutation = torch.randperm(tokens.shape[1], generator=generator)
        shuffled[name] = tokens[:, permutation]
    expected = _run_probe(body, unordered, inputs)
    found = _run_probe(body, unordered, shuffled)
    for module in attended:
        module.__dict__["_kerple_removed"] = True

    expected = expected[:, permutation]
    tolerance = 0.05
    if expected.dtype in (torch.float32, torch.float64):
        tolerance = 1e-4
    difference = (found - expected).abs().max() / expected.std().clamp(min=1e-30)
    if difference > tolerance:
        raise ValueError(
            f'own_positions="remove": {type(model).__name__} has positions that cannot be removed; '
            'use own_positions="keep"'
        )
