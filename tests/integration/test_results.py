"""docs/results and the results in README.md are those that the records in experiments/replication
give.
"""

import pytest

from experiments.replication.pages import RECORDS, figures, texts
from tests.support.runs import ROOT

RESULTS = ROOT / "docs" / "results"
MAX_BYTES = 1_500_000  # of a file in the repository
COMMAND = "python experiments/replication/generate.py"


def test_the_committed_pages_are_current():
    for path, text in texts(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.relative_to(ROOT)} is not current: run {COMMAND}"
        )


@pytest.mark.slow
def test_the_committed_figures_are_current():
    """They may differ with another version of matplotlib."""
    expected = figures(ROOT)
    assert set(RESULTS.rglob("*.png")) == expected.keys()
    for path, content in expected.items():
        assert path.read_bytes() == content, (
            f"{path.relative_to(ROOT)} is not current: run {COMMAND}"
        )


def test_every_figure_is_shown():
    pages = "".join(path.read_text(encoding="utf-8") for path in RESULTS.glob("*.md"))
    assert [path.name for path in RESULTS.rglob("*.png") if path.name not in pages] == []


def test_files_are_small():
    files = [path for folder in (RESULTS, RECORDS) for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if path.stat().st_size > MAX_BYTES]
