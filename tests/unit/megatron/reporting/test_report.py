"""The report of `kerple report`: files, page and refusals."""

import re
import shutil

import pytest
import torch

from megatron.plots.checkpoints import DistanceTable, add_weight_figures, distance_figures
from megatron.reporting.formatting import slug
from megatron.reporting.report import Sources, write_report
from tests.support.errors import assert_rejected
from tests.support.records import record, seeds
from tests.support.release import RELEASE


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report of three methods, three seeds each, and of a checkpoint in a folder with HTML in its
    name.
    """
    records = [
        result
        for name, base in {"kerple_log": 3.0, "rotary": 5.0, "alibi": 3.1}.items()
        for length in (512, 1024)
        for result in seeds(name, length, [base, base + 0.2, base + 0.3])
    ]
    folder = tmp_path_factory.mktemp("report")
    checkpoint = shutil.copytree(RELEASE / "kerple_log_checkpoints", folder / 'A "<b>checkpoint')
    sources = Sources(records, [checkpoint])
    add_weight_figures(sources)
    path = write_report(sources, folder / "out", "A <title> & more")
    return path, sources


def test_page(report):
    path, sources = report
    text = path.read_text()
    assert "<h1>A &lt;title&gt; &amp; more</h1>" in text
    assert "<b>" not in text
    assert 'id="figure-kernels-A-b-checkpoint-bias"' in text
    assert text.count("<img ") == 3, "perplexity, kernels, effective lengths"
    assert (
        "kerple_log, GitHub, seed 1: nowhere/kerple_log/1, iteration 10, fingerprint kerple_log1."
        in text
    )
    assert len(sources.notes) == 3, "the checkpoints of the records do not exist"
    assert all(
        re.match(r"No kernels are plotted for .*: nowhere/.*: no such folder", note)
        for note in sources.notes
    )


def test_files(report):
    path, _ = report
    table = "kerple-3-12x768-512-non-overlapping"
    assert {file.name for file in (path.parent / "tables").iterdir()} == {
        f"{name}.{ext}"
        for name in (table, table.replace("kerple-3", "perplexity"))
        for ext in ("md", "tex")
    }
    figures = {
        "extrapolation-github-12x768-512-non-overlapping",
        "kernels-A-b-checkpoint-bias",
        "effective-lengths-named",
    }
    assert {file.name for file in (path.parent / "figures").iterdir()} == {
        f"{name}.{extension}" for name in figures for extension in ("png", "pdf")
    }
    text = (path.parent / "tables" / f"{table}.md").read_text()
    assert "| 512 | **3.17 ± 0.15** | 3.27 ± 0.15 † | 5.17 ± 0.15 † |" in text
    assert "| *512, paper* | *3.40 ± 0.20* | *3.42 ± 0.21* | *3.44 ± 0.20 †* |" in text


def test_values_are_once_on_the_page(tmp_path):
    """Layouts of papers without the paper's values are only files."""
    records = [record(name, 768, 21.125, train_length=333) for name in ("alibi", "fire")]
    path = write_report(Sources(records), tmp_path)
    text = path.read_text()
    page, _, _ = text.partition("<details>")
    assert page.count("21.12") == 2
    assert text.count("<table>") == 1
    assert (tmp_path / "tables" / "kerple-3-12x768-333-non-overlapping.tex").is_file()


def test_files_of_an_earlier_report_are_named(tmp_path):
    write_report(Sources([record("alibi", 768, 21.5, train_length=333)]), tmp_path)
    sources = Sources([record("alibi", 768, 21.5, train_length=444)])
    write_report(sources, tmp_path)
    (note,) = sources.notes
    assert note.startswith(f"6 file(s) in {tmp_path}, such as tables/")
    assert "333" in note
    assert note in (tmp_path / "report.html").read_text()

    # Again into the same folder, without the others.
    for path in tmp_path.glob("*/*333*"):
        path.unlink()
    sources.notes.clear()
    write_report(sources, tmp_path)
    assert not sources.notes


def test_figures_with_one_file_name_are_rejected(tmp_path):
    """Labels that differ in punctuation only."""
    tables = [DistanceTable("alibi", "all layers", torch.zeros(2, 9), None, None)]
    figures = []
    for label in ("lr 1", "lr: 1"):
        figures += distance_figures(tables, model=label, name=slug(label))
    sources = Sources([record("alibi", 768, 21.5)], weight_figures=figures)
    assert_rejected("lr-1.*--label", write_report, sources, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_aliases_are_the_same_method():
    sources = Sources(
        [record("kerple_bias_wht", 512, 3.0), record("dape_kerple (variant Concat)", 512, 3.0)]
    )
    assert [result["pos_emb"] for result in sources.records] == [
        "kerple_power_ap_ap",
        "dape_kerple (variant Concat)",
    ]


def test_invalid_sources_are_rejected(tmp_path):
    assert_rejected("there are no results to report", write_report, Sources([]), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    assert_rejected(
        "cannot write .*file", write_report, Sources([record("alibi", 512, 3.0)]), tmp_path / "file"
    )
