"""The registry of positional methods: `pos-emb` name -> class.

Methods register themselves with a decorator, so a new method is a new file in this folder, or a
user's own file or module (`load_plugin`).
"""

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from kerple.positional.base import ModelShape, PositionalMethod

_METHODS: dict[str, type[PositionalMethod]] = {}


class PluginError(ValueError):
    """A file or module does not exist, raises an exception, or registers no positional method."""


Method = TypeVar("Method", bound=type[PositionalMethod])


def register(*names: str) -> Callable[[Method], Method]:
    """Class decorator: register a method under these `pos-emb` names, the first of which is its
    primary name.

    Raises ValueError if another class has one of the names. Registering the same class again
    replaces it.
    """

    def add(method: Method) -> Method:
        own = f"{method.__module__}.{method.__qualname__}"
        for name in names:
            owner = _METHODS.get(name, method)
            other = f"{owner.__module__}.{owner.__qualname__}"
            if other != own:
                raise ValueError(
                    f"pos-emb {name!r} is already registered by {other}; choose another name"
                )
        _METHODS.update(dict.fromkeys(names, method))
        return method

    return add


def registered_names() -> tuple[str, ...]:
    """All `pos-emb` names, sorted."""
    return tuple(sorted(_METHODS))


def canonical_name(name: str) -> str:
    """The primary name of the method with this name; an unknown name is returned unchanged."""
    for first, method in _METHODS.items():
        if method is _METHODS.get(name):
            return first
    return name


def primary_names() -> tuple[str, ...]:
    """The `pos-emb` names without aliases, sorted."""
    return tuple(sorted({canonical_name(name) for name in _METHODS}))


def method_class(name: str) -> type[PositionalMethod]:
    """The class with this `pos-emb` name. Raises ValueError, with similar names, if none has it."""
    if name in _METHODS:
        return _METHODS[name]
    # Without a similar name, all of them.
    similar = difflib.get_close_matches(name, _METHODS, n=3) or registered_names()
    raise ValueError(f"pos-emb {name!r} is unknown; did you mean {' or '.join(similar)}?")


def build(name: str, shape: ModelShape, **options: Any) -> PositionalMethod:
    """Build the method with this name for a model of this shape. Raises ValueError for an unknown
    name or option.
    """
    return method_class(name).from_shape(shape, **options)


def build_layers(name: str, shape: ModelShape, **options: Any) -> list[PositionalMethod]:
    """The methods of all layers of a model, one for each; a single one if the layers share it.
    Raises as `build`.
    """
    methods = [build(name, shape, **options)]
    if methods[0].shared:
        return methods
    for layer in range(1, shape.num_layers):
        methods.append(build(name, replace(shape, layer=layer), **options))
    return methods


def place_in_plugin(error: BaseException) -> str | None:
    """The innermost file, line and function of a method outside of this package that an exception
    passed through; None if there is none.
    """
    # The files of methods that users registered.
    modules = {method.__module__ for method in _METHODS.values()}
    own = [name for name in modules if not name.startswith("kerple.positional.")]
    files = {getattr(sys.modules.get(name), "__file__", None) for name in own}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in files:
            return f"{frame.filename}, line {frame.lineno}, in {frame.name}"
    return None


def source_digests(methods: Iterable[nn.Module]) -> list[str]:
    """The SHA-256 (hexadecimal) of each file that defines the methods, their modules and base
    classes, without those of `kerple`, torch and Python: the code of an external method.
    """
    known, files = {"kerple", "torch", *sys.stdlib_module_names}, set()
    for method in methods:
        for module in method.modules():
            for base in type(module).__mro__:
                # Classes that a notebook defines have no file.
                file = getattr(sys.modules.get(base.__module__), "__file__", None)
                if file is not None and base.__module__.partition(".")[0] not in known:
                    files.add(file)
    return [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in sorted(files)]


def load_plugin(path_or_module: str | Path) -> None:
    """Import a file (`methods/mine.py`) or a module (`package.mine`) that registers methods.

    Does nothing if it is already loaded. Raises PluginError if it does not exist or registers no
    new method, or if a file raises an exception.
    """
    # The name of a file's module has the path, so that two files of the same name are two modules.
    text = str(path_or_module)
    before = set(_METHODS)
    if text.endswith(".py"):
        path = Path(text).resolve()
        if not path.is_file():
            raise PluginError(f"{text}: no such file")
        digest = hashlib.sha256(str(path).encode()).hexdigest()
        name = f"positional_plugin_{path.stem}_{digest[:12]}"
        if name in sys.modules:
            return
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise PluginError(f"{text}: cannot be imported")
        module = importlib.util.module_from_spec(spec)
        # As for a normal import, so that its classes can be pickled and inspected.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            for registered in _METHODS.keys() - before:
                del _METHODS[registered]
            if not isinstance(error, Exception):
                raise
            place = text
            for frame in traceback.extract_tb(error.__traceback__):
                if frame.filename == str(path):
                    place = f"{text}, line {frame.lineno}"
            raise PluginError(f"{place}: {type(error).__name__}: {error}") from error
    else:
        name = text
        if name in sys.modules:
            return
        if name.startswith(".") or not name:  # a path, or a relative import
            raise PluginError(
                f"{text}: cannot be imported; give the path of a .py file, or a module"
            )
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise PluginError(
                f"{text}: cannot be imported ({error}); give the path of a .py file, or a module"
            ) from error

    # Probably the wrong file or module.
    if set(_METHODS) == before:
        sys.modules.pop(name, None)  # so that the next call is an error, too
        raise PluginError(
            f"{text}: registers no new method; decorate its class with @register(name)"
        )
