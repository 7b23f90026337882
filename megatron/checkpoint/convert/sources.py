"""The Python files of a self-contained model: its modelling files, and the positional method's own sources.

The sources are those that this process runs. Imports within `kerple.positional` become relative ones, to files
`positional_NAME.py` of the same folder; nothing else is changed, so a formula exists once.
"""

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from kerple import positional
from kerple.positional import PositionalMethod
from megatron.checkpoint.storage import CheckpointError

TEMPLATES = Path(__file__).parent / "self_contained"
PACKAGE = positional.__name__
METHOD_FILE, MODELING_FILE = "positional_method.py", "modeling_kerple.py"


def self_contained_files(method: type[PositionalMethod]) -> dict[str, str]:
    """File name -> text of every Python file that a model with this method needs.

    Raises CheckpointError for a method that imports another part of this project than its positional package.
    """
    files = {path.name: path.read_text(encoding="utf-8") for path in sorted(TEMPLATES.glob("*.py"))}
    for module in (PositionalMethod.__module__, method.__module__):
        _collect(sys.modules[module], files)
    files[METHOD_FILE] = (
        f'"""The positional method of this model."""\n\n'
        f"from .{_file_stem(method.__module__)} import {method.__name__} as Method\n\n"
        '__all__ = ["Method"]\n'
    )
    files[MODELING_FILE] = _naming_all(files)
    return files


def _naming_all(files: dict[str, str]) -> str:
    """The modelling file, importing from every positional file: transformers 4 copies those that it names alone."""
    first = "from .positional_method import Method\n"
    before, _, after = files[MODELING_FILE].partition(first)
    others = sorted(name for name in files if name.startswith("positional_") and name != METHOD_FILE)
    named = (f"from .{Path(name).stem} import __name__ as _{Path(name).stem}\n" for name in others)
    return f"{before}{first}{''.join(named)}{after}"


def load_package(folder: Path, name: str) -> ModuleType:
    """The modelling file of a folder that this process has written, imported with its relative imports.

    It goes under `name`, which is taken out of the imported modules again by `unload_package`.
    """
    spec = importlib.util.spec_from_loader(name, loader=None, is_package=True)
    package = importlib.util.module_from_spec(spec)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    return importlib.import_module(f"{name}.modeling_kerple")


def unload_package(name: str) -> None:
    for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
        del sys.modules[module]


def _file_stem(module: str) -> str:
    return f"positional_{module.rpartition('.')[2]}"


def _collect(module: ModuleType, files: dict[str, str]) -> None:
    """Add a module's source, and those of the modules it imports, to `files`."""
    name = f"{_file_stem(module.__name__)}.py"
    if name in files:
        return
    source = Path(inspect.getsourcefile(module)).read_text(encoding="utf-8")
    files[name] = ""  # known, should an import lead back here
    lines = source.splitlines(keepends=True)
    for node in sorted(_imports(source), key=lambda node: -node.lineno):
        needed = _resolve(node, module.__name__)
        indent = " " * node.col_offset
        statements = [
            f"{indent}from .{_file_stem(origin)} import {', '.join(names)}\n" for origin, names in needed.items()
        ]
        lines[node.lineno - 1 : node.end_lineno] = statements
        for origin in needed:
            _collect(sys.modules[origin], files)
    files[name] = "".join(lines)


def _imports(source: str) -> list[ast.ImportFrom | ast.Import]:
    """The statements that import something of this project, or relatively."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            if node.level or (node.module or "").partition(".")[0] in ("kerple", "megatron"):
                found.append(node)
        elif isinstance(node, ast.Import) and any(
            item.name.partition(".")[0] in ("kerple", "megatron") for item in node.names
        ):
            found.append(node)
    return found


def _resolve(node: ast.ImportFrom | ast.Import, importer: str) -> dict[str, list[str]]:
    """Module -> names to import from it, for one import statement."""
    inside = isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith(f"{PACKAGE}.")
    if not inside:
        raise CheckpointError(
            f"{importer}: {ast.unparse(node)!r} cannot go into a model that stands alone; a positional method may "
            f"import torch and {PACKAGE} only"
        )
    needed: dict[str, list[str]] = {}
    for item in node.names:
        text = item.name if item.asname is None else f"{item.name} as {item.asname}"
        # What the package itself offers is defined in one of its modules.
        origin = _origin(item.name) if node.module == PACKAGE else node.module
        needed.setdefault(origin, []).append(text)
    return needed


def _origin(name: str) -> str:
    found = getattr(positional, name)
    return found.__name__ if isinstance(found, ModuleType) else found.__module__
