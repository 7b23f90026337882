"""Print the size of this repository: tokens, syntax nodes, functions, imports and words.

    python tools/measure.py [--json FILE]

Code lines and tokens are those without blank lines, comments and docstrings. Words are those of the
Markdown files in `docs/` and the root, without the generated key reference.
"""

import ast
import io
import json
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
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
# Tokens that are no code.
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
MAX_COLUMNS = 100
# Title -> the files it measures, as patterns of git.
PARTS = {
    "kerple": ("kerple/*.py",),
    "megatron, tools and scripts": ("megatron/*.py", "tools/*.py", ":(glob)*.py"),
    "benchmarks and experiments": ("benchmarks/*.py", "experiments/*.py"),
    "tests": ("tests/*.py",),
}


def tracked(pattern: str) -> list[Path]:
    """The files in git that match a pattern."""
    output = subprocess.run(
        ["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in output.splitlines()]


def tokens_of(text: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(text).readline)


def code_tokens(text: str, docstrings: set[int]) -> tuple[int, set[int]]:
    """The number of tokens of a file, and the lines that contain one: without comments and
    docstrings.
    """
    count = 0
    lines: set[int] = set()
    for token in tokens_of(text):
        if token.type not in LAYOUT and token.start[0] not in docstrings:
            count += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return count, lines


def measure_code(paths: list[Path]) -> dict[str, float]:
    """Sizes of Python files."""
    lengths, functions, branches = [], [], []
    nodes = tokens = code = comprehensions = ternaries = comments = wide = raises = 0
    for path in paths:
        text = path.read_text()
        lines = text.splitlines()
        lengths.append(len(lines))
        comments += sum(token.type == tokenize.COMMENT for token in tokens_of(text))
        wide += sum(len(line) > MAX_COLUMNS for line in lines)

        # Syntax nodes.
        docstrings: set[int] = set()
        for node in ast.walk(ast.parse(text)):
            nodes += 1
            comprehensions += isinstance(node, COMPREHENSIONS)
            ternaries += isinstance(node, ast.IfExp)
            raises += isinstance(node, ast.Raise)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
                branches.append(1 + sum(isinstance(child, BRANCHES) for child in ast.walk(node)))
            match node:
                case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=last):
                    docstrings.update(range(first, (last or first) + 1))

        tokens_of_file, lines_of_file = code_tokens(text, docstrings)
        tokens += tokens_of_file
        code += len(lines_of_file)
    return {
        "files": len(paths),
        "lines": sum(lengths),
        "code lines": code,
        "tokens": tokens,
        "syntax nodes": nodes,
        "file length, median": statistics.median(lengths),
        "functions": len(functions),
        "function length, median": statistics.median(functions),
        "function length, 90 %": statistics.quantiles(functions, n=10)[-1],
        "function length, largest": max(functions),
        "branches per function, largest": max(branches),
        "ternaries per 1,000 code lines": 1000 * ternaries / code,
        "comprehensions per 1,000 code lines": 1000 * comprehensions / code,
        "raise per 1,000 code lines": 1000 * raises / code,
        "tokens per code line": tokens / code,
        "comments, % of lines": 100 * comments / sum(lengths),
        f"lines above {MAX_COLUMNS} columns": wide,
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
    sizes: dict[str, dict[str, float]] = {}
    for title, patterns in PARTS.items():
        paths = [path for pattern in patterns for path in tracked(pattern)]
        sizes[title] = measure_code(paths)
    pages = [*tracked(":(glob)*.md"), *tracked("docs/*.md")]
    sizes["documentation"] = {"words": sum(len(path.read_text().split()) for path in pages)}
    sizes["files imported by"] = {module: len(imported_files(module)) for module in IMPORTS}
    return sizes


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
