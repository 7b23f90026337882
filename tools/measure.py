"""Print the size of this repository: lines, functions, branches, imports and words.

    python tools/measure.py [--json FILE]

Product lines are all Python lines outside `tests/`, `benchmarks/` and `experiments/`, including
blank lines, comments and docstrings. Words are those of the Markdown files in `docs/` and the root,
without the generated key reference.
"""

import ast
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import check_megatron  # noqa: E402, F401
from megatron.utils.command_line import OptionParser, run_main  # noqa: E402

# Modules whose imports are counted.
IMPORTS = ("megatron.training.loop", "megatron.inference.loading", "megatron.cli.report")
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.BoolOp, ast.comprehension)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def tracked(pattern: str) -> list[Path]:
    """The files in git that match a pattern."""
    output = subprocess.run(
        ["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in output.splitlines()]


def measure_code(paths: list[Path]) -> dict[str, float]:
    """Sizes of Python files."""
    lengths, functions, branches = [], [], []
    comprehensions = ternaries = comments = raises = 0
    for path in paths:
        text = path.read_text()
        lines = text.splitlines()
        lengths.append(len(lines))
        comments += sum(line.lstrip().startswith("#") for line in lines)
        for node in ast.walk(ast.parse(text)):
            comprehensions += isinstance(node, COMPREHENSIONS)
            ternaries += isinstance(node, ast.IfExp)
            raises += isinstance(node, ast.Raise)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
                branches.append(1 + sum(isinstance(child, BRANCHES) for child in ast.walk(node)))
    total = sum(lengths)
    return {
        "files": len(paths),
        "lines": total,
        "file length, median": statistics.median(lengths),
        "functions": len(functions),
        "function length, median": statistics.median(functions),
        "function length, 90 %": statistics.quantiles(functions, n=10)[-1],
        "function length, largest": max(functions),
        "branches per function, largest": max(branches),
        "comprehensions per 1,000 lines": 1000 * comprehensions / total,
        "ternaries per 1,000 lines": 1000 * ternaries / total,
        "raise per 1,000 lines": 1000 * raises / total,
        "comment lines, %": 100 * comments / total,
    }


def imports_when_loaded(path: Path) -> set[str]:
    """The dotted names that importing a file imports, `from package import name` as package.name:
    all but those in functions and for type checkers.
    """
    names: set[str] = set()
    nodes: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return names


def imported_files(module: str) -> set[str]:
    """The modules of this repository that importing a module imports, with itself. Files that only
    packages import, in their `__init__.py`, do not count.
    """
    files = {}
    for package in ("kerple", "megatron", "experiments"):
        for path in (ROOT / package).rglob("*.py"):
            files[
                ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            ] = path
    reached: set[str] = set()
    left = [module]
    while left:
        name = left.pop()
        name = name if name in files else name.rpartition(".")[0]  # a name in a module
        if name in files and name not in reached:
            reached.add(name)
            left += imports_when_loaded(files[name])
    return reached


def measure() -> dict[str, dict[str, float]]:
    """Title -> name -> number."""
    python = tracked("*.py")
    tests = [path for path in python if path.is_relative_to(ROOT / "tests")]
    others = [
        path
        for name in ("tests", "benchmarks", "experiments")
        for path in (ROOT / name).rglob("*.py")
    ]
    pages = [
        path
        for path in tracked("*.md")
        if path.parent == ROOT or path.is_relative_to(ROOT / "docs")
    ]
    return {
        "product": measure_code([path for path in python if path not in others]),
        "tests": measure_code(tests),
        "documentation": {"words": sum(len(path.read_text().split()) for path in pages)},
        "files imported by": {module: len(imported_files(module)) for module in IMPORTS},
    }


def main() -> None:
    parser = OptionParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the numbers to a file"
    )
    options = parser.parse_args()
    sizes = measure()
    for title, numbers in sizes.items():
        table = Table(title=title, title_justify="left", show_header=False)
        for name, number in numbers.items():
            table.add_row(name, f"{number:,.1f}".removesuffix(".0"))
        Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(sizes, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run_main(main))
