"""Reports another package named `megatron` that hides this project's, and in one line Ctrl-C during
imports and missing packages.

Every entry point imports this module first.

This project's `megatron` is a namespace package (without `__init__.py`), because megatron-core
installs `megatron.core` into the same namespace. Python prefers a package with an `__init__.py`,
such as that of GPT-NeoX or NVIDIA Megatron-LM, wherever it is on sys.path.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

OWN_PACKAGES = ("kerple", "megatron", "tools", "tests", "check_megatron", "kerple_command")


def find_foreign_megatron() -> Path | None:
    """The `__init__.py` of the package that `import megatron` would import, if it is not a
    namespace package.
    """
    spec = find_spec("megatron")
    return None if spec is None or spec.origin is None else Path(spec.origin)


def report_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """A `sys.excepthook`. After `run_main` has started, it handles all exceptions; importing torch
    takes seconds.
    """
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    elif (
        isinstance(error, ModuleNotFoundError)
        and (error.name or "").partition(".")[0] not in OWN_PACKAGES
    ):
        print(
            f"error: {Path(sys.argv[0]).name} needs the module {error.name}, which is not "
            f"installed for {sys.executable}: run `make setup` and `source .venv/bin/activate`, or "
            "pip install '.[all]'",
            file=sys.stderr,
        )
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = report_exception
foreign = find_foreign_megatron()
if foreign is not None:
    message = f"error: another package named megatron hides this project's: {foreign.parent}; "
    print(
        message + f"remove {foreign.parents[1]} from PYTHONPATH, or uninstall the package",
        file=sys.stderr,
    )
    sys.exit(2)
