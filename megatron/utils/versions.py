"""Checks of the interfaces that this project overrides or calls although other packages may change them at any time.

Without a check, a renamed method or attribute would not fail: the override would not be called. docs/versions.md lists
the places.
"""

import importlib.metadata
import inspect
import platform
from fnmatch import fnmatch
from typing import Any

from megatron.utils.errors import UserError

# The versions whose source was read. The same as in requirements/.
VERSIONS = {"deepspeed": "0.19.8", "megatron-core": "0.16.1", "lm-eval": "0.4.13", "bitsandbytes": "0.50.*"}


def check_version(package: str) -> None:
    """Raises UserError if the installed version of the package is not that of `VERSIONS`."""
    expected = VERSIONS[package]
    found = _version(package)
    if not fnmatch(found.partition("+")[0], expected):
        raise UserError(
            f"{package} {found} is installed, but this project uses private interfaces of {package} {expected}; run: "
            f"pip install '{package}=={expected}'"
        )


def check_parameters(package: str, owner: Any, name: str, *parameters: str) -> None:
    """Raises UserError if `owner`, a class or module of `package`, has no function `name` with these parameters.

    package: the name of the distribution, or Python for the standard library.
    """
    function = getattr(owner, name, None)
    if function is None or not set(parameters) <= set(inspect.signature(function).parameters):
        path = f"{owner.__module__}.{owner.__qualname__}" if inspect.isclass(owner) else owner.__name__
        raise UserError(
            f"{package} {_version(package)} has no {path}.{name} with the parameters {', '.join(parameters)}, which "
            "this project relies on; install a version of docs/versions.md"
        )


def _version(package: str) -> str:
    try:
        return platform.python_version() if package == "Python" else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a copy on the path that was not installed
        return "of an unknown version"
