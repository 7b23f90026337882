"""Python files of a self-contained model: its modeling files, and the sources of its positional method and of
attention.

The sources are those of the modules loaded in this process. Only imports within `kerple` change: they become relative
imports of files in the same folder, `positional_NAME.py` and `attention_NAME.py`. So every formula has one
implementation.
"""

import ast
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from kerple.attention import attend_in_mode, parse_mode
from kerple.attention.backends import chunked, flex, reference, sdpa
from kerple.attention.parts import run
from kerple.positional import PositionalMethod, append_decay
from kerple.positional.wrappers import Randomized
from megatron.checkpoint.storage import CheckpointError

TEMPLATES = Path(__file__).parent / "self_contained"
POSITIONAL, ATTENTION = "kerple.positional", "kerple.attention"
CONFIGURATION_FILE, MODELING_FILE = "configuration_kerple.py", "modeling_kerple.py"
METHOD_FILE = "positional_method.py"


def self_contained_files(method: type[PositionalMethod], **options: Any) -> dict[str, str]:
    """File name -> text of all Python files that a model with this positional method and its options needs.

    Raises CheckpointError if the method imports a part of this project other than `kerple.positional`.
    """
    files = {path.name: path.read_text(encoding="utf-8") for path in sorted(TEMPLATES.glob("*.py"))}
    for module in (chunked, flex, reference, sdpa):
        _add_source(module, files)
    parts = (PositionalMethod, Randomized, append_decay, run, attend_in_mode, parse_mode)
    for part in (*parts, method, *method.parts(**options)):
        _add_source(sys.modules[part.__module__], files)
    stems = sorted(Path(name).stem for name in files if name.startswith(("positional_", "attention_")))
    files[METHOD_FILE] = (
        f'"""The positional method of this model."""\n\n'
        f"from .{_file_stem(method.__module__)} import {method.__name__} as Method\n\n"
        '__all__ = ["Method"]\n'
    )
    # transformers 4 copies only files that the modeling file imports by name, so it imports from all of them.
    first_import = "from .positional_method import Method\n"
    before, _, after = files[MODELING_FILE].partition(first_import)
    other_imports = "".join(f"from .{stem} import __name__ as _{stem}\n" for stem in stems)
    files[MODELING_FILE] = f"{before}{first_import}{other_imports}{after}"
    # transformers finds the model's class by that of its configuration. Folders of the same name share the latter if
    # this file is the same, so it depends on all others.
    digest = hashlib.sha256("".join(files[name] for name in sorted(files)).encode()).hexdigest()
    files[CONFIGURATION_FILE] += f"\n# SHA-256 of the model's code: {digest}\n"
    return files


@contextmanager
def modeling_file(folder: Path) -> Iterator[ModuleType]:
    """The modeling file of a folder that this process has written, imported as a module of a package that is removed
    from the imported modules afterwards. Python saves no bytecode in the folder.
    """
    package = f"_modeling_files_{os.getpid()}"
    module = ModuleType(package)
    module.__path__ = [str(folder)]
    sys.modules[package] = module
    try:
        with patch.object(sys, "dont_write_bytecode", True):
            modeling = importlib.import_module(f"{package}.modeling_kerple")
        yield modeling
    finally:
        for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            del sys.modules[name]


def _file_stem(module: str) -> str:
    if not module.startswith((f"{POSITIONAL}.", f"{ATTENTION}.")):
        return f"positional_external_{module.replace('.', '_')}"  # a name that no module of ours has
    package = "attention" if module.startswith(f"{ATTENTION}.") else "positional"
    return f"{package}_{module.rpartition('.')[2]}"


def _add_source(module: ModuleType, files: dict[str, str]) -> None:
    """Add the source of a module, and of all modules it imports from this project, to `files`."""
    name = f"{_file_stem(module.__name__)}.py"
    if name in files:
        return
    source = Path(inspect.getsourcefile(module) or "").read_text(encoding="utf-8")
    files[name], imported = _with_relative_imports(source, module.__name__)
    for origin in imported:
        _add_source(sys.modules[origin], files)


@cache
def _with_relative_imports(source: str, importer: str) -> tuple[str, list[str]]:
    """A module's source with relative imports of files instead of imports from `kerple`, and the modules it needs."""
    lines = source.splitlines(keepends=True)
    imported: list[str] = []
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    # From the last to the first, so that line numbers stay valid.
    for node in sorted(imports, key=lambda node: -node.lineno):
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [item.name for item in node.names]
        if not relative and not any(module.partition(".")[0] in ("kerple", "megatron") for module in modules):
            continue
        names_by_module = _imported_names(node, importer)
        indent = " " * node.col_offset
        statements = []
        for origin, names in names_by_module.items():
            statements.append(f"{indent}from .{_file_stem(origin)} import {', '.join(names)}\n")
        lines[node.lineno - 1 : node.end_lineno] = statements
        imported += names_by_module
    return "".join(lines), imported


def _imported_names(node: ast.Import | ast.ImportFrom, importer: str) -> dict[str, list[str]]:
    """Defining module -> names that an import statement imports from it."""
    allowed = (f"{POSITIONAL}.", f"{ATTENTION}.") if importer.startswith(f"{ATTENTION}.") else (f"{POSITIONAL}.",)
    if not (isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith(allowed)):
        raise CheckpointError(
            f"{importer}: {ast.unparse(node)!r} cannot be part of a self-contained model; a positional method may "
            f"import only torch and {POSITIONAL}"
        )
    names: dict[str, list[str]] = {}
    for item in node.names:
        origin = node.module or ""
        if origin in (POSITIONAL, ATTENTION):  # they re-export what their modules define
            value = getattr(sys.modules[origin], item.name)
            origin = value.__name__ if isinstance(value, ModuleType) else value.__module__
        names.setdefault(origin, []).append(f"{item.name} as {item.asname}" if item.asname else item.name)
    return names
