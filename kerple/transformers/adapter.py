"""Adding a positional method to a model of transformers, saving and loading it."""

import copy
import hashlib
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from kerple.attention import Attention
from kerple.positional import ModelShape, PositionalMethod, build_layers
from kerple.positional.wrappers import Randomized
from kerple.transformers.mask import (
    attention_of,
    check_inputs,
    forget_inputs,
    note_inputs,
    share_tables,
)
from kerple.transformers.probes import Layer, check_removed, find_attention, remove_positions

# The name of the module with the methods, and the files of an adapter.
MODULE = "kerple_positional"
# What is noted in modules, without registering it.
MARKS = ("_kerple_attention", "_kerple_cross", "_kerple_removed", "_kerple_state")
WEIGHTS, DESCRIPTION = "positional.safetensors", "positional.json"
# The keys that describe a method, and further ones in DESCRIPTION and in config.json.
DESCRIBED = {"method", "class", "options", "own_positions", "layers"}
DESCRIBED |= {"num_layers", "num_heads", "head_size"}
IN_DESCRIPTION, IN_CONFIG = {"sha256", "base_model", "embedding"}, {"load"}
# Values of two embeddings of one model may differ by this part of the largest one: dtypes do.
SAME_EMBEDDING = 0.02
# What a method may need that the interface does not pass.
UNAVAILABLE = {
    "decay": "the hidden states of the layer, which transformers does not pass to attention",
    "embed": "the embeddings of the tokens, which it adds to; use a method that acts in attention",
}


@dataclass(eq=False)
class _State:
    """What `use_positional` did to a model.

    previous: the attention implementations before, of all configurations. methods: those that are
        registered in the model.
    attention: the attention of the layers with a method. description: the content of DESCRIPTION.
    handles: hooks that check inputs, and that remove the model's own positions.
    """

    previous: list[tuple[Any, str]]
    methods: list[Attention] = field(default_factory=list)
    attention: dict[nn.Module, Attention] = field(default_factory=dict)
    description: dict[str, Any] = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)


def use_positional(
    model: PreTrainedModel,
    method: str | PositionalMethod | None,
    *,
    own_positions: str = "keep",
    layers: Iterable[int] | None = None,
    **options: Any,
) -> None:
    """Add a positional method to the self-attention of a model of transformers.

    The model runs twice or three times on a few random tokens, to find its attention layers.

    Args:
        model: any model that uses transformers' AttentionInterface.
        method: a name, such as "kerple_log", or a method from `kerple.positional` that all layers
            share; None restores the model as it was before.
        own_positions: "keep" adds the method to the model's own positions. "remove" takes those
            away: rotary angles become zero, position embeddings are left out, and biases are not
            added.
        layers: the self-attention layers that get the method, counted from 0 in the order in which
            the model calls them; default: all. "remove" is always for all.
        options: of the method that `method` names.

    Raises TypeError for a model of another kind; ValueError if the model does not use the
    interface, has what cannot be computed (capped scores, attention sinks, other attention masks),
    if its positions cannot be removed, or if the method or an option does not exist;
    NotImplementedError for a method that needs what the interface does not pass. The model then has
    no method.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a PreTrainedModel of transformers, not {type(model).__name__}; for one "
            "that peft has wrapped, pass get_base_model()"
        )
    if own_positions not in ("keep", "remove"):
        raise ValueError(f'own_positions must be "keep" or "remove", not {own_positions!r}')
    _restore(model)
    # The description of a method that the folder of this model had, but that was not loaded.
    if hasattr(model.config, MODULE):
        delattr(model.config, MODULE)
    if method is None:
        return
    # A configuration tells attention which model calls it, so two models cannot share one.
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and attention_of(module.config):
            raise ValueError(
                f"the configuration of {type(module).__name__} belongs to another model too, which "
                "has a method; build the models with configurations of their own (copy.deepcopy)"
            )
    # What there was before, to be restored after an error or by None.
    parts = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    state = _State([(part.config, part.config._attn_implementation) for part in parts])
    try:
        # The self-attention layers, in the order of their calls.
        calls = find_attention(model, complete=layers is None)
        chosen = list(range(len(calls)))
        if layers is not None:
            chosen = sorted({int(index) for index in layers})
        unknown = [index for index in chosen if not 0 <= index < len(calls)]
        if unknown or not chosen:
            raise ValueError(
                f"layers {unknown or 'is empty'}: the model has {len(calls)} self-attention layers"
            )

        # The methods: one for all layers, or one for each.
        num_layers = len(calls)
        calls = [calls[index] for index in chosen]
        methods = _build(method, calls, model, options)
        for call, own in zip(calls, methods * (len(calls) // len(methods)), strict=True):
            state.attention[call.module] = own
        state.methods = methods
        state.description = {
            "method": method if isinstance(method, str) else None,
            "class": type(methods[0].positional).__name__,
            "options": options,
            "own_positions": own_positions,
            "layers": None if layers is None else chosen,
            "num_layers": num_layers,
            "num_heads": calls[0].num_heads,
            "head_size": calls[0].head_size,
        }
        _attach(model, state)
        if own_positions == "remove":
            state.handles += remove_positions(model)
            check_removed(model)
    except BaseException:
        _undo(model, state)
        raise


def save_positional(model: PreTrainedModel, folder: str | Path) -> None:
    """Write the method of a model, with its parameters, to a folder: `positional.safetensors` and
    `positional.json`. Raises ValueError if the model has none, or one that was given as an object.

    A few values of the token embedding are stored too, by which `load_positional` recognizes the
    model. If all weights were trained, save the model at the same time.
    """
    description = dict(_state_of(model).description)
    if description["method"] is None:
        raise ValueError("the method was given as an object; name it, so that it can be loaded")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    owner: Any = _owner(model)
    description["base_model"] = owner.config._name_or_path
    description["embedding"] = _sample(_embedding_of(owner))
    module = getattr(owner, MODULE)
    weights = {name: tensor.detach().contiguous() for name, tensor in module.state_dict().items()}
    data = save(weights, metadata={"format": "pt"})
    text = json.dumps({**description, "sha256": _digest(description, data)}, indent=1) + "\n"
    # If the second file is not written, the digest in the old one does not fit the first.
    for name, content in ((WEIGHTS, data), (DESCRIPTION, text.encode())):
        unfinished = folder / f"{name}.unfinished"
        unfinished.write_bytes(content)
        unfinished.replace(folder / name)


def load_positional(model: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """Add the method in a folder to a model; returns the model.

    folder: written by `save_positional`, or by `save_pretrained` (also by Trainer) of a model with
        a method, whose weights contain the method's.

    Warns if the token embedding is not that of the model that was saved: its parameters were then
    trained with other weights. Raises ValueError if the folder has no method, or one that does not
    fit; see `use_positional`.
    """
    # The method as it was saved, with new parameters.
    folder = Path(folder)
    description, weights = _read(folder, model)
    use_positional(
        model,
        description["method"],
        own_positions=description["own_positions"],
        layers=description["layers"],
        **description["options"],
    )

    # The parameters fit only a model with the same heads, and as many layers.
    found = _state_of(model).description
    for name in ("num_layers", "num_heads", "head_size"):
        if found[name] != description[name]:
            use_positional(model, None)
            raise ValueError(
                f"{folder}: was saved for {name} {description[name]}, but the model has "
                f"{found[name]}"
            )
    try:
        getattr(model, MODULE).load_state_dict(weights)
    except RuntimeError as error:
        use_positional(model, None)
        raise ValueError(f"{folder}: {error}") from error

    # Nothing else tells whether they were trained with these weights.
    if _differ(description.get("embedding"), _sample(_embedding_of(model))):
        saved = description.get("base_model") or "another model"
        warnings.warn(
            f"{folder}: the method was saved with the weights of {saved}, which are not those of "
            "the model that it is added to, so its parameters do not fit; load the model that was "
            "trained with the method",
            stacklevel=2,
        )
    return model


def _embedding_of(model: PreTrainedModel) -> Tensor:
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    return embedding


def _sample(embedding: Tensor) -> list[float] | None:
    """Two values in each of the rows 1, 2, 4, 8 ... of a token embedding `[tokens, hidden]`. None
    if they are elsewhere: offloaded, or split over ranks.
    """
    embedding = embedding.detach()
    if type(embedding) is not Tensor or embedding.is_meta or embedding.dim() != 2:
        return None
    values: list[float] = []
    row = 1
    while row < len(embedding):
        values += embedding[row, :2].float().tolist()
        row *= 2
    return values


def _differ(saved: list[float] | None, found: list[float] | None) -> bool:
    """Whether two samples are of other models. New tokens at the end make no difference."""
    if not saved or not found:
        return False
    pairs = list(zip(saved, found, strict=False))
    largest = max(abs(value) for value, _ in pairs)
    return any(abs(one - other) > SAME_EMBEDDING * largest for one, other in pairs)


def _read(folder: Path, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the weights of the method in a folder, for this model."""
    config = folder / "config.json"
    description = None
    if config.is_file():
        description = json.loads(config.read_text()).get(MODULE)
    if (folder / DESCRIPTION).is_file():
        if description is not None:
            raise ValueError(
                f"{folder}: has both {DESCRIPTION} and a model that was saved with a method; "
                "remove one of them"
            )
        return _read_adapter(folder)

    # A complete model, in one file or several.
    if description is None:
        raise ValueError(
            f"{folder}: has neither {DESCRIPTION} nor a model that was saved with a method"
        )
    _check_keys(description, f"{config}: {MODULE}", IN_CONFIG)
    # The embedding may have several names.
    embedding = _embedding_of(model)
    names = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter is embedding:
            names.append(name)

    # The files that from_pretrained reads; earlier ones may lie next to them.
    files = [folder / "model.safetensors"]
    index_file = folder / "model.safetensors.index.json"
    if not files[0].exists():
        if not index_file.exists():
            raise ValueError(
                f"{folder}: has neither {files[0].name} nor {index_file.name}; save the model "
                "again, without `variant`"
            )
        index = json.loads(index_file.read_text())
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    weights = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.startswith(f"{MODULE}."):
                    weights[name.removeprefix(f"{MODULE}.")] = file.get_tensor(name)
                if name in names:
                    description["embedding"] = _sample(file.get_tensor(name))
    return description, weights


def _read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `save_positional` wrote. Raises ValueError if a file is damaged."""
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
    except ValueError as error:
        raise ValueError(f"{folder / DESCRIPTION}: is damaged ({error})") from error
    _check_keys(description, str(folder / DESCRIPTION), IN_DESCRIPTION)
    # Weights and description are two files, which must be of the same call.
    data = (folder / WEIGHTS).read_bytes()
    if description.pop("sha256") != _digest(description, data):
        raise ValueError(
            f"{folder / WEIGHTS}: is damaged, or was not saved together with this {DESCRIPTION}; "
            "save the method again"
        )
    return description, load(data)


def _digest(description: dict[str, Any], weights: bytes) -> str:
    """SHA-256 (hexadecimal) of both files of an adapter."""
    text = json.dumps(description, sort_keys=True)
    return hashlib.sha256(text.encode() + weights).hexdigest()


def _check_keys(description: Any, place: str, further: set[str]) -> None:
    """Raises ValueError unless `description` has exactly the keys of a method and `further`."""
    keys = DESCRIBED | further
    if not isinstance(description, dict) or description.keys() != keys:
        raise ValueError(f"{place}: must have exactly the keys {', '.join(sorted(keys))}")


def _build(
    method: str | PositionalMethod,
    calls: list[Layer],
    model: PreTrainedModel,
    options: dict[str, Any],
) -> list[Attention]:
    """The methods of the layers, as modules of attention: one if they share it."""
    # The method is built for one number and size of heads.
    sizes = {(call.num_heads, call.head_size) for call in calls}
    if len(sizes) > 1:
        raise ValueError(
            f"the layers have different heads (number, size): {sorted(sizes)}; name layers with "
            "the same"
        )
    ((num_heads, head_size),) = sizes
    if isinstance(method, str):
        shape = ModelShape(
            num_heads=num_heads,
            head_size=head_size,
            hidden_size=num_heads * head_size,
            num_layers=len(calls),
            max_positions=getattr(model.config, "max_position_embeddings", None) or 2048,
        )
        methods = build_layers(method, shape, **options)
    elif options:
        raise ValueError(f"{', '.join(options)}: options are for a method that is named")
    else:
        methods = [method]

    # What the interface does not pass, or the attention of the model does not mean.
    for name, reason in UNAVAILABLE.items():
        if name in methods[0].hooks:
            raise NotImplementedError(f"{type(methods[0]).__name__} needs {reason}")
    if any(isinstance(part, Randomized) for each in methods for part in each.modules()):
        raise NotImplementedError(
            "random_range: random positions are drawn for each training step and each length of a "
            "text, which transformers does not announce; remove the option"
        )
    if methods[0].causal_only and not all(call.is_causal for call in calls):
        raise NotImplementedError(
            f"{type(methods[0]).__name__} has no meaning for keys after the query, which this "
            "model's attention sees; use another method, or name causal layers"
        )
    device = _embedding_of(model).device
    return [Attention(each.to(device)) for each in methods]


def _attach(model: PreTrainedModel, state: _State) -> None:
    """Register the methods in the model, so that they are trained, saved and moved with it."""
    setattr(model, MODULE, nn.ModuleList(state.methods).train(model.training))
    # Not as submodules of the layers, where shared parameters would have several names.
    for module, attention in state.attention.items():
        module.__dict__["_kerple_attention"] = attention
    model.__dict__["_kerple_state"] = state
    # Users call parts, such as encoders. Some models call their body's parts instead of the body,
    # and wrappers call the body.
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    check = partial(check_inputs, [part.config for part in parts])
    note = partial(note_inputs, model)
    for part in parts:
        for hook in (check, note):
            state.handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))
        state.handles.append(part.register_forward_hook(forget_inputs, always_call=True))
    call = "kerple.transformers.load_positional(model, FOLDER)"
    setattr(model.config, MODULE, {**copy.deepcopy(state.description), "load": call})
    for part in parts:
        share_tables(part.config, state.methods)


def _owner(model: nn.Module) -> nn.Module:
    """The model, or the part of it, that `use_positional` was called on. Raises ValueError if there
    is none, or several.
    """
    owners = [module for module in model.modules() if "_kerple_state" in module.__dict__]
    if not owners:
        raise ValueError(f"{type(model).__name__} has no method of use_positional")
    if len(owners) > 1:
        names = ", ".join(type(owner).__name__ for owner in owners)
        raise ValueError(
            f"several parts of {type(model).__name__} have a method ({names}); pass one of them, "
            "such as model.get_encoder()"
        )
    return owners[0]


def _state_of(model: nn.Module) -> _State:
    state: _State = _owner(model).__dict__["_kerple_state"]
    return state


def _restore(model: PreTrainedModel) -> None:
    """Undo `use_positional` on a model and its parts."""
    for module in list(model.modules()):
        state = module.__dict__.get("_kerple_state")
        if state is not None:
            _undo(module, state)


def _undo(model: Any, state: _State) -> None:
    for handle in state.handles:
        handle.remove()
    for module in model.modules():
        for name in MARKS:
            module.__dict__.pop(name, None)
        if isinstance(module, PreTrainedModel):
            share_tables(module.config, None)
    if hasattr(model, MODULE):
        delattr(model, MODULE)
    if hasattr(model.config, MODULE):
        delattr(model.config, MODULE)
    model.set_attn_implementation(state.previous[0][1])
    for config, implementation in state.previous:
        config._attn_implementation = implementation
