"""The rules of CONTRIBUTING.md and docs/ARCHITECTURE.md that can be checked from source text."""

import ast
import sys
from pathlib import Path

import pytest

from tools.measure import imported_files, imports_when_loaded, measure_code

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for package in ("kerple", "megatron", "experiments")
    for path in (ROOT / package).rglob("*.py")
)
UNIT_TESTS = sorted((ROOT / "tests/unit").rglob("test_*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
# Source text of exported models, and modules without logic of their own.
UNTESTED = ("self_contained/", "__init__.py")
PROCESS_MODULES = {
    "subprocess",
    "multiprocessing",
    "tests.support.ranks",
    "tests.support.forks",
    "tests.soak",
    "tests.support.processes",
}


def imported_modules(path: Path) -> set[str]:
    """The dotted names that a file imports, `from package import name` as package.name."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


# Module -> how many files of this project it may import, itself included.
IMPORT_LIMITS = {
    "megatron.cli.report": 27,
    "megatron.inference.loading": 79,
    "megatron.training.loop": 111,
}


@pytest.mark.parametrize("module", IMPORT_LIMITS)
def test_commands_import_few_files(module):
    reached = imported_files(module)
    assert len(reached) <= IMPORT_LIMITS[module], sorted(reached)


def test_kerple_needs_only_torch():
    allowed = {"torch", "triton", "kerple"}
    for_transformers = {"transformers", "safetensors"}
    standard = set(sys.stdlib_module_names)
    for path in (ROOT / "kerple").rglob("*.py"):
        packages = {name.partition(".")[0] for name in imported_modules(path)}
        if path.is_relative_to(ROOT / "kerple/transformers"):
            packages -= for_transformers
        assert packages <= allowed | standard, path


def test_every_package_declares_its_types():
    """`megatron` is a namespace package, so its subpackages have the markers (PEP 561)."""
    for package in (
        ROOT / "kerple",
        *(path.parent for path in (ROOT / "megatron").glob("*/__init__.py")),
    ):
        assert (package / "py.typed").exists(), package


def test_unit_tests_mirror_the_packages():
    expected = {
        ROOT / "tests/unit" / path.parent.relative_to(ROOT) / f"test_{path.name}"
        for path in SOURCES
    }
    orphans = [str(path.relative_to(ROOT)) for path in UNIT_TESTS if path not in expected]
    assert not orphans, "no module of this name: " + ", ".join(orphans)


def test_every_module_has_a_unit_test():
    missing = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if not any(part in str(path) for part in UNTESTED)
        and not (ROOT / "tests/unit" / path.parent.relative_to(ROOT) / f"test_{path.name}").exists()
    ]
    assert not missing, "no unit test for: " + ", ".join(missing)


def test_unit_tests_start_no_processes():
    starters = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in UNIT_TESTS
        for name in imported_modules(path)
        if any(name == module or name.startswith(f"{module}.") for module in PROCESS_MODULES)
    ]
    assert not starters, "\n".join(starters)


def test_files_are_short():
    """Without comments, so that no file has fewer of them for its length."""
    limits = {**dict.fromkeys(SOURCES, 500), **dict.fromkeys(TESTS, 600)}
    for path, limit in limits.items():
        lines = path.read_text().splitlines()
        assert len([line for line in lines if not line.strip().startswith("#")]) <= limit, path


COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def test_comprehensions_are_simple():
    """At most two lines, and no conditional expression."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, COMPREHENSIONS):
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 2, place
                assert not any(isinstance(part, ast.IfExp) for part in ast.walk(node)), place


def test_long_functions_have_comments():
    for path in SOURCES:
        lines = path.read_text("utf-8").splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                has_docstring = ast.get_docstring(node) is not None
                first, last = (
                    node.body[0].end_lineno if has_docstring else node.lineno,
                    node.end_lineno,
                )
                assert first is not None
                assert last is not None
                if last - first > 30:
                    has_comment = any(line.lstrip().startswith("#") for line in lines[first:last])
                    assert has_comment, f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"


def test_sizes_of_code(tmp_path):
    """Docstrings, comments and blank lines are no code; a string of two lines is two."""
    (tmp_path / "a.py").write_text(
        '"""A module."""\n\n# A comment.\ndef double(x):\n    """Twice."""\n    return [x, x]\n\n\n'
        'TEXT = """one\ntwo"""\nSIGN = -1 if TEXT else 1\n'
    )
    (tmp_path / "b.py").write_text("def none():\n    import json\n    return json\n")
    sizes = measure_code([tmp_path / "a.py", tmp_path / "b.py"])
    assert (sizes["files"], sizes["lines"], sizes["code lines"]) == (2, 14, 8)
    assert (sizes["functions"], sizes["function length, largest"]) == (2, 3)
    assert sizes["ternaries per 1,000 code lines"] == 125
    assert imports_when_loaded(tmp_path / "b.py") == set()
