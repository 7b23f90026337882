"""tools/report.py: what it writes, the page, speeds from logs, and refusals."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from megatron.cli import report as command
from megatron.config import UserError
from megatron.reporting.speed import read_log, speed_tables, speeds
from tests.support.checkpoints import write_checkpoint, write_corpus
from tests.support.records import record, seeds
from tests.support.release import RELEASE
from tests.support.runs import ROOT, environment

VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """Checks that elements close in order; collects what refers to other resources, and ids."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.resources: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.images: list[dict] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.resources += [values[name] for name in ("src", "href", "srcset", "data", "action") if values.get(name)]
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if tag == "a" else []
        self.images += [values] if tag == "img" else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def write_results(folder, records):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report made as a user makes it, of two folders of results and a released checkpoint."""
    folder = tmp_path_factory.mktemp("report")
    methods = {"kerple_log": 3.0, "rotary": 5.0, "alibi": 3.1}
    for name, base in methods.items():
        records = [one for n in (512, 1024) for one in seeds(name, n, [base, base + 0.2, base + 0.3])]
        write_results(folder / "runs" / name / "evaluation", records)
    command_line = [sys.executable, str(ROOT / "tools" / "report.py"), str(folder / "runs"), "--output"]
    command_line += [str(folder / "out"), "--title", "A <title> & more", "--checkpoint"]
    command_line += [str(RELEASE / "kerple_log_checkpoints")]
    done = subprocess.run(command_line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(folder / "out" / "report.html")
    assert "No kernels are drawn" in done.stdout, "the records' checkpoints are not there"
    return folder / "out"


def test_the_page_is_whole_and_needs_nothing_else(report):
    text = (report / "report.html").read_text()
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert all(one.startswith(("data:", "#")) for one in page.resources)
    assert not re.search(r"https?://|//cdn|@import|url\(|<script", re.sub(r"base64,[^\"]*", "", text))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert all(image["alt"] and image["src"].startswith("data:image/png;base64,iVBOR") for image in page.images)
    assert len(page.images) == 3  # curve, kernels, effective lengths
    assert "A &lt;title&gt; &amp; more" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert text.count('scope="row"') >= 4


def test_files_of_tables_and_figures(report):
    stems = {"kerple-3-12x768-512-non-overlapping"}
    assert {path.name for path in (report / "tables").iterdir()} == {
        f"{stem}.{ending}" for stem in stems for ending in ("md", "csv", "tex")
    }
    figures = {
        "extrapolation-github-12x768-512-non-overlapping",
        "kernels-kerple_log_checkpoints-bias",
        "effective-lengths-named",
    }
    assert {path.name for path in (report / "figures").iterdir()} == {
        f"{name}.{ending}" for name in figures for ending in ("png", "pdf")
    }
    table = (report / "tables" / "kerple-3-12x768-512-non-overlapping.md").read_text()
    assert "| 512 | **3.167 ± 0.153** | 3.267 ± 0.153 † | 5.167 ± 0.153 † |" in table
    assert "| *512, paper* | *3.40 ± 0.20* | *3.42 ± 0.21* | *3.44 ± 0.20 †* |" in table


def test_refusals(tmp_path):
    output = ["--output", str(tmp_path / "out")]
    with pytest.raises(UserError, match="nothing to report"):
        command.main(output)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty: no results\.jsonl in this folder"):
        command.main([str(tmp_path / "empty"), *output])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "results.jsonl").write_text("no JSON\n")
    with pytest.raises(UserError, match=r"results\.jsonl"):
        command.main([str(tmp_path / "bad"), *output])
    with pytest.raises(UserError, match="rotary_checkpoints: its positional method is no function of the distance"):
        command.main(["--checkpoint", str(RELEASE / "rotary_checkpoints"), *output])
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(UserError, match=r"bench\.json: does not hold the numbers"):
        command.main(["--benchmark", str(tmp_path / "bench.json"), *output])
    write_results(tmp_path / "good", [record("alibi", 512, 3.0)])
    with pytest.raises(UserError, match="--reference t5: there are no results of it; choose one of alibi"):
        command.main([str(tmp_path / "good"), "--reference", "t5", *output])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the report to .*file"):
        command.main([str(tmp_path / "good"), "--output", str(tmp_path / "file")])
    assert not (tmp_path / "out").exists()


def test_benchmark_numbers(tmp_path, capsys):
    rows = [{"name": "plain PyTorch", "median": 0.5, "ratio": 1.0}, {"name": "alibi", "median": 0.6, "ratio": 1.2}]
    content = {"hardware": {"processor": "A processor"}, "tables": {"a step": rows}}
    (tmp_path / "train_step.json").write_text(json.dumps(content))
    command.main(["--benchmark", str(tmp_path / "train_step.json"), "--output", str(tmp_path / "out")])
    table = (tmp_path / "out" / "tables" / "train_step-1.csv").read_text().splitlines()
    assert table == ["section,,published,plain PyTorch,ALiBi", ",sec/step,no,0.5000,0.6000",
                     ",ratio to plain PyTorch,no,1.000,1.200"]  # fmt: skip


def line(iteration: int, rate: float) -> str:
    return json.dumps({"iteration": iteration, "train/tokens_per_second": rate, "train/tokens": float(iteration * 256)})


def test_seconds_per_step_from_logs(tmp_path):
    log = tmp_path / "logs" / "metrics.jsonl"
    log.parent.mkdir()
    lines = [line(5, 10.0), line(10, 256.0), line(15, 512.0), line(20, 1024.0), json.dumps({"iteration": 20}), '{"cut']
    log.write_text("\n".join(lines))
    assert read_log(log) == (0.5, 512.0), "the median without the first line"
    log.write_text(line(5, 128.0))
    assert read_log(log) == (2.0, 128.0)
    checkpoints = tmp_path / "checkpoints"
    write_checkpoint(checkpoints, "alibi", write_corpus(tmp_path))
    found = speeds([record("alibi", 32, 3.0, checkpoint={"path": str(checkpoints), "iteration": 4})])
    (table,) = speed_tables(found)
    assert table.columns == ("ALiBi",)
    assert [row.cells[0].text for row in table.rows] == ["2.000"], "no published row for another size of model"
    log.unlink()
    assert speeds([record("alibi", 32, 3.0, checkpoint={"path": str(checkpoints), "iteration": 4})]) == []
