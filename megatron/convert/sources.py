"""Python files of a self-contained model: its modeling files, and the sources of its positional
method and of attention.

The sources are those of the modules loaded in this process. Only imports within `kerple` change:
they become relative imports of files in the same folder, `positional_NAME_DIGEST.py` and
`attention_NAME_DIGEST.py`. So every formula has one implementation.
"""

import ast
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from kerple.attention import attend_in_mode, parse_mode
from kerple.attention.backends import chunked, flex, reference, sdpa
from kerple.attention.parts import run
from kerple.positional import PositionalMethod, append_decay, method_class
from kerple.positional.wrappers import Randomized
from megatron.checkpoint.storage import CheckpointError

TEMPLATES = Path(__file__).parent / "self_contained"
POSITIONAL, ATTENTION = "kerple.positional", "kerple.attention"
CONFIGURATION, MODELING = "configuration_kerple", "modeling_kerple"


def self_contained_files(pos_emb: str, **options: Any) -> dict[str, str]:
    """File name -> text of all Python files that a model with this positional method and its
    options needs.

    Raises CheckpointError if the method imports a part of this project other than
    `kerple.positional`.
    """
    # The templates, and the sources of attention and of the method.
    files = {path.name: path.read_text(encoding="utf-8") for path in sorted(TEMPLATES.glob("*.py"))}
    for module in (chunked, flex, reference, sdpa):
        _add_source(module, files)
    method = method_class(pos_emb)
    parts = (PositionalMethod, Randomized, append_decay, run, attend_in_mode, parse_mode)
    for part in (*parts, method, *method.parts(**options)):
        _add_source(sys.modules[part.__module__], files)
    files["positional_method.py"] = (
        '"""The positional method of this model."""\n\n'
        f"from .{_file_stem(method.__module__)} import {method.__name__} as Method\n\n"
        f'NAME = "{pos_emb}"\n'
        '__all__ = ["NAME", "Method"]\n'
    )

    # transformers 4 copies only files that the modeling file imports by name, so it imports from
    # all of them.
    last_import = "from .positional_method import Method\n"
    stems = [Path(name).stem for name in sorted(files)]
    imports = last_import
    for stem in stems:
        if stem != MODELING:
            imports += f"from .{stem} import __name__ as _{stem}\n"
    files[f"{MODELING}.py"] = files[f"{MODELING}.py"].replace(last_import, imports)

    # transformers may load folders of the same name as the same modules, so names of files depend
    # on all contents.
    contents = "".join(files[name] for name in sorted(files))
    digest = hashlib.sha256(contents.encode()).hexdigest()[:16]
    renamed = {}
    for name, text in files.items():
        for stem in stems:
            text = text.replace(f"from .{stem} import ", f"from .{stem}_{digest} import ")
        renamed[f"{Path(name).stem}_{digest}.py"] = text
    return renamed


def write_self_contained_files(
    folder: Path, pos_emb: str, options: Mapping[str, Any]
) -> dict[str, str]:
    """Write `self_contained_files` to a folder, and return `auto_map` of its config.json: class of
    transformers -> ours.
    """
    stems = {}
    for name, text in self_contained_files(pos_emb, **options).items():
        (folder / name).write_text(text, encoding="utf-8")
        stem = Path(name).stem
        stems[stem.rpartition("_")[0]] = stem
    return {
        "AutoConfig": f"{stems[CONFIGURATION]}.KerpleConfig",
        "AutoModel": f"{stems[MODELING]}.KerpleModel",
        "AutoModelForCausalLM": f"{stems[MODELING]}.KerpleForCausalLM",
        "AutoModelForSequenceClassification": f"{stems[MODELING]}.KerpleForSequenceClassification",
    }


@contextmanager
def modeling_file(folder: Path) -> Iterator[ModuleType]:
    """The modeling file of a folder that this process has written, imported as a module of a
    package that is removed from the imported modules afterwards. Python saves no bytecode in the
    folder.
    """
    package = f"_modeling_files_{os.getpid()}"
    module = ModuleType(package)
    module.__path__ = [str(folder)]
    sys.modules[package] = module
    try:
        with patch.object(sys, "dont_write_bytecode", True):
            path = next(folder.glob(f"{MODELING}_*.py"))
            modeling = importlib.import_module(f"{package}.{path.stem}")
        yield modeling
    finally:
        for name in list(sys.modules):
            if name == package or name.startswith(f"{package}."):
                del sys.modules[name]


def _file_stem(module: str) -> str:
    name = module.rpartition(".")[2]
    if module.startswith(f"{ATTENTION}."):
        return f"attention_{name}"
    if module.startswith(f"{POSITIONAL}."):
        return f"positional_{name}"
    return f"positional_external_{module.replace('.', '_')}"  # a name that no module of ours has


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
    """A module's source with relative imports of files instead of imports from `kerple`, and the
    modules it needs.
    """
    lines = source.splitlines(keepends=True)
    imported: list[str] = []
    nodes = ast.walk(ast.parse(source))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    # From the last to the first, so that line numbers stay valid.
    for node in sorted(imports, key=lambda node: -node.lineno):
        if isinstance(node, ast.ImportFrom):
            modules, is_relative = [node.module or ""], node.level > 0
        else:
            modules, is_relative = [item.name for item in node.names], False
        roots = {module.partition(".")[0] for module in modules}
        if not is_relative and roots.isdisjoint(("kerple", "megatron")):
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
    allowed: tuple[str, ...] = (f"{POSITIONAL}.",)
    if importer.startswith(f"{ATTENTION}."):
        allowed += (f"{ATTENTION}.",)
    module = ""
    if isinstance(node, ast.ImportFrom) and not node.level:
        module = str(node.module)
    if not f"{module}.".startswith(allowed):
        raise CheckpointError(
            f"{importer}: {ast.unparse(node)!r} cannot be part of a self-contained model; a "
            f"positional method may import only torch and {POSITIONAL}"
        )
    names: dict[str, list[str]] = {}
    for item in node.names:
        origin = module
        if origin in (POSITIONAL, ATTENTION):  # they re-export what their modules define
            value = getattr(sys.modules[origin], item.name)
            origin = value.__name__
            if not isinstance(value, ModuleType):
                origin = value.__module__
        name = item.name
        if item.asname:
            name += f" as {item.asname}"
        names.setdefault(origin, []).append(name)
    return names
