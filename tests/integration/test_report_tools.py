"""tools/report.py as a process, and its page in a browser."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hostile import NAMES, page_problem, valid_records
from tests.support.release import RELEASE
from tests.support.runs import ROOT, environment

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def write_report(folder: Path, *words: object) -> Path:
    command = [sys.executable, str(ROOT / "tools" / "report.py"), *map(str, words), "--output", str(folder)]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == str(folder / "report.html")
    return folder / "report.html"


def benchmark(path: Path, name: str) -> Path:
    rows = [{"name": name, "median": 0.5, "ratio": 1.0}]
    path.write_text(json.dumps({"hardware": {"processor": name}, "tables": {name: rows}}))
    return path


def rendered(page: Path) -> str:
    """The document as the browser sees it after it has run what it is allowed to run."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser: install chromium (Debian: apt-get install chromium)")
def test_a_browser_runs_nothing_in_hostile_names(tmp_path):
    """Each name is once in each field of the records, and in the names of a checkpoint and of a benchmark."""
    attack = "document.title='executed'"
    names = [*(name for name in NAMES if len(name) < 300), f'"><img src=x onerror="{attack}">']
    names += [f"<script>{attack}</script>", f"</pre></title><svg onload={attack}>"]
    fields = ("pos_emb", "corpus", "mode", "protocol", "note")
    records = []
    for shift, name in enumerate(names):
        for entry in valid_records(name)[: 5 if shift < 3 else 1]:
            changes = {field: names[(shift + index) % len(names)] for index, field in enumerate(fields)}
            checkpoint = {**entry["checkpoint"], "path": name, "fingerprint": name}
            records.append({**entry, **changes, "checkpoint": checkpoint, "perplexity": None if shift % 3 else 8.0})
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in records))
    file_name = names[-3].replace("/", "")
    checkpoint = shutil.copytree(RELEASE / "kerple_log_checkpoints", tmp_path / file_name / "checkpoints")
    words = [tmp_path, "--checkpoint", checkpoint, "--benchmark", benchmark(tmp_path / f"{file_name}.json", names[-2])]
    page = write_report(tmp_path / "out", *words, f"--title={names[-1]}")

    text = rendered(page)
    assert page_problem(text) is None
    assert "<title>&lt;/pre&gt;&lt;/title&gt;" in text, "a script would have changed it"
    assert text.count("<img ") == page.read_text().count("<img ") > 3
    assert text.count("<table>") == page.read_text().count("<table>") > 3
    # The browser would have run it without escaping, and without the policy.
    plain = tmp_path / "plain.html"
    plain.write_text(f"<title>a</title>{names[-3]}")
    assert "<title>executed</title>" in rendered(plain)
    policy = next(line for line in page.read_text().splitlines() if "Content-Security-Policy" in line)
    plain.write_text(f"{policy}<title>a</title>{''.join(names[-3:])}")
    assert "<title>a</title>" in rendered(plain)
