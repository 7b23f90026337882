"""Adding a positional method to a model of transformers, saving and loading it."""

import copy
import json
import operator
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from kerple.attention import Attention, position_tables
from kerple.positional import ModelShape, PositionalMethod, build_layers
from kerple.positional.registry import canonical_name, source_digests
from kerple.positional.wrappers import Randomized
from kerple.transformers.folders import (
    DESCRIPTION,
    WEIGHTS,
    decoded,
    digest,
    encoded,
    read_folder,
)
from kerple.transformers.mask import (
    MODULE,
    attention_of,
    check_inputs,
    forget_inputs,
    note_inputs,
    share_tables,
)
from kerple.transformers.probes import (
    Layer,
    check_removed,
    embedding_of,
    find_attention,
    remove_positions,
)
from kerple.transformers.recognition import differ, recognized, samples, stored_samples

# What is noted in modules, without registering it.
MARKS = ("_kerple_attention", "_kerple_cross", "_kerple_removed", "_kerple_state")
# What a method may need that the interface does not pass.
UNAVAILABLE = {
    "decay": "the hidden states of the layer, which transformers does not pass to attention",
    "embed": "the embeddings of the tokens, which it adds to; use a method that acts in attention",
}


class Methods(nn.Module):
    """The methods of a model, or of a part of it: the module MODULE.

    Attributes:
        methods: one for all layers, or one for each.
        load_positional: uint8, the description of the methods in JSON. Saved weights always have
            this name, so that `from_pretrained` names it too if the method has no parameters.
    """

    load_positional: Tensor

    def __init__(self, methods: Iterable[Attention], description: dict[str, Any]):
        super().__init__()
        self.methods = nn.ModuleList(methods)
        self.register_buffer("load_positional", encoded(description))

    @property
    def itself(self) -> "Methods":
        """This module, also if peft has wrapped it (`modules_to_save`)."""
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Raises ValueError if the weights are those of other methods, and warns if they are those
        of other code, also when a Trainer loads its checkpoint.
        """
        name = f"{prefix}load_positional"
        if name in state_dict:
            saved, own = decoded(state_dict[name]), decoded(self.load_positional)
            if saved.pop("code") != own.pop("code"):
                warnings.warn(
                    f"the file of the method {own['class']} has changed since it was saved, so its "
                    "weights may not fit it; if that was not on purpose, restore the file",
                    stacklevel=2,
                )
            if saved != own:
                raise ValueError(
                    f"the weights are of the method {saved}, not of that which use_positional has "
                    f"added, {own}; use the same"
                )
            # Of another size if the code has changed.
            state_dict[name] = self.load_positional
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


@dataclass(eq=False)
class _State:
    """What `use_positional` did to a model.

    previous: the attention implementations before, of all configurations.
    methods: those that are registered in the model. description: the content of DESCRIPTION.
    layers: the attention layers with a method -> its number, in the order of their calls.
    handles: hooks that check inputs, and that remove the model's own positions.
    """

    previous: list[tuple[Any, str]]
    methods: list[Attention] = field(default_factory=list)
    layers: dict[nn.Module, int] = field(default_factory=dict)
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

    The model runs on a few random tokens: once to find its attention layers, and with "remove"
    three times more, to find its positions and to check that they are gone.

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
            f"model must be a PreTrainedModel of transformers, not {type(model).__name__}; call "
            "use_positional before get_peft_model, and name the method in modules_to_save"
        )
    if method is not None and not isinstance(method, (str, PositionalMethod)):
        raise TypeError(
            "method must be a name, an object such as KerpleLog(num_heads=8), or None, not "
            f"{method!r}"
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
                "has a method; build the models with configurations of their own (copy.deepcopy). "
                "If both are parts of one model, such as its encoder and decoder, call "
                "use_positional on that model"
            )
    # What there was before, to be restored after an error or by None.
    parts = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    state = _State([(part.config, part.config._attn_implementation) for part in parts])
    try:
        # The self-attention layers, in the order of their calls.
        calls = find_attention(model, complete=layers is None)
        chosen = list(range(len(calls)))
        if layers is not None:
            try:
                chosen = sorted({operator.index(index) for index in layers})
            except TypeError as error:
                raise TypeError(f"layers must be a list of integers: {error}") from error
        unknown = [index for index in chosen if not 0 <= index < len(calls)]
        if unknown or not chosen:
            raise ValueError(
                f"layers {unknown or 'is empty'}: the model has {len(calls)} self-attention layers"
            )

        # The methods: one for all layers, or one for each.
        num_layers = len(calls)
        calls = [calls[index] for index in chosen]
        methods = _build(method, calls, model, options)
        for number, call in enumerate(calls):
            state.layers[call.module] = number % len(methods)
        state.methods = methods
        state.description = {
            "method": canonical_name(method) if isinstance(method, str) else None,
            "class": type(methods[0].positional).__name__,
            "options": options,
            "own_positions": own_positions,
            "layers": None if layers is None else chosen,
            "num_layers": num_layers,
            "num_heads": calls[0].num_heads,
            "head_size": calls[0].head_size,
            "code": source_digests(each.positional for each in methods if each.positional),
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

    A few values of each weight are stored too, by which `load_positional` recognizes the model. If
    all weights were trained, save the model at the same time.
    """
    description = dict(_state_of(model).description)
    if description["method"] is None:
        raise ValueError("the method was given as an object; name it, so that it can be loaded")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    owner: Any = _owner(model)
    description["base_model"] = owner.config._name_or_path
    description["samples"] = samples(recognized(owner, MODULE))
    module = getattr(owner, MODULE).itself
    weights = {name: tensor.detach().contiguous() for name, tensor in module.state_dict().items()}
    if any(".base_layer." in name for name in weights):
        raise ValueError(
            "peft has put layers of its own into the method; merge them (merge_and_unload), or "
            f"name {MODULE} in modules_to_save"
        )
    data = save(weights, metadata={"format": "pt"})
    text = json.dumps({**description, "sha256": digest(description, data)}, indent=1) + "\n"
    # If the second file is not written, the digest in the old one does not fit the first.
    for name, content in ((WEIGHTS, data), (DESCRIPTION, text.encode())):
        unfinished = folder / f"{name}.unfinished"
        unfinished.write_bytes(content)
        unfinished.replace(folder / name)


def load_positional(model: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """Add the method in a folder to a model; returns the model.

    folder: written by `save_positional`, or by `save_pretrained` (also by Trainer) of a model with
        a method, whose weights contain the method's.

    Warns if the method's parameters were trained with other weights than the model's: if one of a
    few values of a weight differs by more than 2 % of the largest one; those of heads are not
    compared. Warns also if the file of a method of one's own has changed. Raises ValueError if the
    folder has no method, or one that does not fit; see `use_positional`.
    """
    folder = Path(folder)
    parts, files = read_folder(folder)
    loaded: list[PreTrainedModel] = []
    try:
        for name, (description, weights) in parts.items():
            part = _part(model, name, folder)
            loaded.append(part)
            _load(part, description, weights, folder)
            # Nothing else tells whether they were trained with these weights.
            found = recognized(part, MODULE)
            own = samples(found)
            saved = description.get("samples")
            if saved is None:
                saved = stored_samples(files, model, found)
            if not saved.keys() & own.keys():
                warnings.warn(
                    f"{folder}: its weights have other names than those of the model, so they were "
                    "not compared; make sure that the method was saved with the same weights",
                    stacklevel=2,
                )
            if differ(saved, own):
                saved_model = description.get("base_model") or "another model"
                warnings.warn(
                    f"{folder}: the method was saved with the weights of {saved_model}, which are "
                    "not those of the model that it is added to, so its parameters do not fit; "
                    "load the model that was trained with the method",
                    stacklevel=2,
                )
    except Exception:
        for part in loaded:
            use_positional(part, None)
        raise
    return model


def _part(model: PreTrainedModel, name: str, folder: Path) -> PreTrainedModel:
    """The part of a model with this name, which had the method; the model itself if it is empty."""
    if name == model.base_model_prefix and not hasattr(model, name):
        return model
    try:
        part = model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(
            f"{folder}: its method is that of the part {name!r}, which {type(model).__name__} does "
            "not have; load the complete model that was saved"
        ) from error
    assert isinstance(part, PreTrainedModel)
    return part


def _load(
    model: PreTrainedModel, description: dict[str, Any], weights: dict[str, Tensor], folder: Path
) -> None:
    """Add a method as it was saved, with its parameters. Raises ValueError if it does not fit."""
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
            raise ValueError(
                f"{folder}: was saved for {name} {description[name]}, but the model has "
                f"{found[name]}"
            )
    try:
        getattr(model, MODULE).load_state_dict(weights)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{folder}: {error}") from error


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
    device = embedding_of(model).device
    attentions = [Attention(each.to(device)) for each in methods]

    # An object may be for another number of heads.
    tables = position_tables(methods[0], 1, device)
    for table in (tables.bias, tables.weight):
        if table is not None and table.shape[-2] != num_heads:
            raise ValueError(
                f"the method has {table.shape[-2]} heads, but the attention of the model has "
                f"{num_heads}"
            )
    return attentions


def _attach(model: PreTrainedModel, state: _State) -> None:
    """Register the methods in the model, so that they are trained, saved and moved with it."""
    methods = Methods(state.methods, state.description).train(model.training)
    setattr(model, MODULE, methods.to(embedding_of(model).device))
    # Not as submodules of the layers, where shared parameters would have several names; peft
    # replaces the module that has them. A layer without a method has None.
    for module in model.modules():
        module.__dict__["_kerple_attention"] = None
    for module, number in state.layers.items():
        module.__dict__["_kerple_attention"] = (model, number)
    model.__dict__["_kerple_state"] = state
    # Users call parts, such as encoders. Some models call their body's parts instead of the body,
    # and wrappers call the body.
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    check = partial(check_inputs, [part.config for part in parts])
    note = partial(note_inputs, model)
    for part in parts:
        # A part that is saved alone has the method too.
        if part is not model:
            hook_of_part = part.register_state_dict_post_hook(partial(_add_state, model))
            state.handles.append(hook_of_part)
        for hook in (check, note):
            state.handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))
        state.handles.append(part.register_forward_hook(forget_inputs, always_call=True))
    call = "kerple.transformers.load_positional(model, FOLDER)"
    setattr(model.config, MODULE, {**copy.deepcopy(state.description), "load": call})
    for part in parts:
        share_tables(part.config, model)


def _add_state(owner: Any, part: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook: add the methods to the state dict of a part, if that is not within another one.

    owner: the model with the methods, which peft may have replaced by a trained copy.
    """
    if not prefix:
        for name, tensor in getattr(owner, MODULE).itself.state_dict().items():
            state[f"{MODULE}.{name}"] = tensor


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
