"""`pos-emb` names and the methods behind them.

A method registers itself with a decorator, so that adding one is adding one file to this folder, or to anybody's own
(`load_plugin`).
"""

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kerple.positional.base import ModelShape, PositionalMethod

_METHODS: dict[str, type[PositionalMethod]] = {}

Method = TypeVar("Method", bound=type[PositionalMethod])


def register(*names: str) -> Callable[[Method], Method]:
    """Class decorator: make a method known under these `pos-emb` names. Raises ValueError when a name is taken."""

    def add(method: Method) -> Method:
        for name in names:
            holder = _METHODS.get(name)
            if holder is not None and (holder.__module__, holder.__qualname__) != (
                method.__module__,
                method.__qualname__,
            ):
                raise ValueError(
                    f"pos-emb {name!r} is taken by {holder.__module__}.{holder.__qualname__}; choose another name"
                )
        _METHODS.update(dict.fromkeys(names, method))
        return method

    return add


def registered_names() -> tuple[str, ...]:
    """All `pos-emb` names, sorted."""
    return tuple(sorted(_METHODS))


def canonical_name(name: str) -> str:
    """The first of the names of a method; the name itself where no method has it."""
    return next((first for first, method in _METHODS.items() if method is _METHODS.get(name)), name)


def primary_names() -> tuple[str, ...]:
    """The `pos-emb` names without aliases, sorted: of each method the one it was registered under first."""
    return tuple(sorted({canonical_name(name) for name in _METHODS}))


def method_class(name: str) -> type[PositionalMethod]:
    """The class behind a `pos-emb` name. Raises ValueError, with the nearest known names, when there is none."""
    if name in _METHODS:
        return _METHODS[name]
    near = difflib.get_close_matches(name, _METHODS, n=3) or registered_names()
    raise ValueError(f"pos-emb {name!r} is not known; did you mean {' or '.join(near)}?")


def build(name: str, shape: ModelShape, **options: Any) -> PositionalMethod:
    """The method called `name`, for a model of this shape. Raises ValueError for an unknown name or option."""
    return method_class(name).from_shape(shape, **options)


def load_plugin(path_or_module: str | Path) -> None:
    """Import a file (`methods/mine.py`) or a module (`package.mine`) whose methods register themselves.

    Loading the same one again does nothing. Raises ValueError when it cannot be found, or when it registers nothing new
    on its first loading.
    """
    text = str(path_or_module)
    before = set(_METHODS)
    if text.endswith(".py"):
        path = Path(text).resolve()
        if not path.is_file():
            raise ValueError(f"positional plugin {text!r}: there is no such file")
        name = f"positional_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
        if name in sys.modules:
            return
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        # Registered before it runs, as the import system does, so that its classes can be pickled and inspected.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            for registered in _METHODS.keys() - before:
                del _METHODS[registered]
            raise
    else:
        if text in sys.modules:
            return
        try:
            importlib.import_module(text)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"positional plugin {text!r}: cannot be imported ({error}); name a .py file or a module"
            ) from error
    if set(_METHODS) == before:
        raise ValueError(f"positional plugin {text!r} registers no new method; decorate its class with @register(name)")
