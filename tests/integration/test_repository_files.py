"""Files for GitHub, pre-commit and citations: they name commands, versions and papers that exist."""

import importlib.util
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def load(path: str) -> dict:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_workflow_runs_make_on_the_oldest_and_newest_python():
    job = load(".github/workflows/ci.yml")["jobs"]["test"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    makefile = (ROOT / "Makefile").read_text()
    assert {"make lint", "make test"} <= set(commands)
    assert all(f"\n{command.removeprefix('make ')}:" in makefile for command in commands)
    project = (ROOT / "pyproject.toml").read_text()
    (oldest,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    newest = max(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project), key=lambda v: int(v[2:]))
    assert job["strategy"]["matrix"]["python"] == [oldest, newest]


def test_the_issue_templates():
    """GitHub's form schema: every field has a type, and all but texts have an id and a label."""
    forms = {path.name: load(str(path.relative_to(ROOT))) for path in (ROOT / ".github/ISSUE_TEMPLATE").iterdir()}
    for form in forms.values():
        assert {"name", "description", "body"} <= form.keys()
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields)
        assert all(field["type"] == "textarea" and field["attributes"]["label"] for field in fields)
    (doctor,) = [field for field in forms["bug.yml"]["body"] if field.get("id") == "doctor"]
    (module,) = re.findall(r"`python -m ([\w.]+)`", doctor["attributes"]["description"])
    assert importlib.util.find_spec(module) is not None
    assert doctor["validations"]["required"]


def test_pre_commit_runs_checks_of_make_lint():
    (repository,) = load(".pre-commit-config.yaml")["repos"]
    makefile = (ROOT / "Makefile").read_text()
    for hook in repository["hooks"]:
        assert hook["entry"].startswith(".venv/bin/")
        assert f"$(BIN)/{hook['name']} " in makefile
        assert hook["name"] in hook["entry"]


def test_the_citation():
    citation = load("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text()
    assert [paper["title"].split(":")[0] for paper in citation["references"][:2]] == ["KERPLE", "DAPE"]
    kerple, _, lex = citation["references"]
    assert lex["title"] == "A Length-Extrapolatable Transformer"
    assert kerple["url"] in (ROOT / "README.md").read_text()
    assert [author["family-names"] for author in kerple["authors"]] == ["Chi", "Fan", "Ramadge", "Rudnicky"]
