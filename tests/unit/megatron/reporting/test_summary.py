"""The report of evaluate.py: JSON, Markdown, plot and terminal."""

import json
import math

import matplotlib.image
import pytest

from megatron.reporting.summary import PERPLEXITY, summary_table, write_summary
from megatron.reporting.tables import Section, markdown
from tests.support.errors import assert_rejected

LENGTHS = (128, 256, 512)


def row(pos_emb, length, perplexity, *, mode="full", seed=1234, train_length=128, note=None):
    return {
        "kind": "extrapolation",
        "pos_emb": pos_emb,
        "mode": mode,
        "protocol": "non-overlapping",
        "seed": seed,
        "train_length": train_length,
        "length": length,
        "tokens": 5120 if perplexity else 0,
        "loss": math.log(perplexity) if perplexity else None,
        "perplexity": perplexity,
        "note": note,
    }


def rows_of(values, **keywords):
    return [
        row(name, length, value, **keywords)
        for name, perplexities in values.items()
        for length, value in zip(LENGTHS, perplexities, strict=True)
    ]


ROWS = rows_of({"kerple_log": (101.3, 100.5, 100.3), "rotary": (115.3, 131.0, 157.7)})


def sections(records, compare_with=None):
    """Section title (perplexity, if there is only one section) -> rows of texts."""
    texts = {}
    title = PERPLEXITY
    for line in summary_table(records, "T", compare_with).lines:
        if isinstance(line, Section):
            title = line.title
        else:
            texts.setdefault(title, []).append([*line.labels, *(cell.text + "†" * cell.worse for cell in line.cells)])
    return texts


def test_files(tmp_path):
    folder = tmp_path / "runs" / "report"
    paths = write_summary(ROWS, folder, title="A title")
    assert [path.name for path in paths] == ["extrapolation.json", "extrapolation.md", "extrapolation.png"]
    assert sorted(folder.iterdir()) == sorted(paths), "no temporary files are left"
    assert json.loads(paths[0].read_text()) == {"rows": ROWS}
    assert paths[1].read_text().startswith("# A title\n")
    image = matplotlib.image.imread(paths[2])
    assert image.shape[0] > 500
    assert image.shape[1] > 900


def test_a_failed_report_leaves_the_previous_one(tmp_path, monkeypatch):
    for name in ("extrapolation.json", "extrapolation.md", "extrapolation.png"):
        (tmp_path / name).write_text("previous")

    def disk_full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", disk_full)
        assert_rejected(r"extrapolation\.json", write_summary, ROWS[:1], tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["previous"] * 3
    (tmp_path / "file").write_text("")
    assert_rejected("file/report", write_summary, ROWS[:1], tmp_path / "file" / "report")


def test_table_of_one_mode():
    table = summary_table(ROWS)
    assert table.headers == ("method", "128*", "256", "512", "512 / 128")
    assert table.label_columns == ("method",)
    assert sections(ROWS)[PERPLEXITY] == [
        ["kerple_log", "101.3", "100.5", "100.3", "0.99x"],
        ["rotary", "115.3", "131.0", "157.7", "1.37x"],
    ]
    large = rows_of({"rotary": (20.0, 200.0, 20000.0)})
    assert sections(large)[PERPLEXITY][0][-1] == "1,000x"


def test_table_of_several_modes_seeds_and_training_lengths():
    rows = (
        rows_of({"alibi": (20.0, 21.0, 22.0)}, seed=1)
        + rows_of({"alibi": (21.0, 21.5, 24.0)}, seed=2)
        + rows_of({"alibi": (30.0, 31.0, None)}, mode="window@64", train_length=256, note="a reason")
    )
    table = summary_table(rows)
    assert table.headers == ("method", "mode", "trained at", "128", "256", "512")
    assert sections(rows)[PERPLEXITY] == [
        ["alibi", "full", "128", "20.50 ± 0.71", "21.25 ± 0.35", "23.00 ± 1.41"],
        ["alibi", "window@64", "256", "30.00", "31.00", "n/a"],
    ]
    assert "Mean ± standard deviation over 1 to 2 seeds." in table.notes


def test_notes():
    rows = ROWS + rows_of({"learned": (99.0, None, None)}, note="positions end at 127")
    text = markdown(summary_table(rows, "T"), "#")
    assert "| method | 128\\* | 256 | 512 | 512 / 128 |" in text
    assert "| learned | 99.00 | n/a | n/a | n/a |" in text
    assert "- n/a: learned (full) at 256, 512: positions end at 127." in text
    assert "- The star marks the training length." in text
    assert "the same 5,120 tokens are scored at every length" in text
    others = [{**record, "targets": str(record["length"])} for record in rows]
    assert "Protocol non-overlapping: 5,120 tokens are scored at every length." in summary_table(others).notes
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


@pytest.mark.parametrize("change", [{"pos_emb": "alibi"}, {"seed": 1235}])
def test_a_note_if_methods_or_seeds_were_scored_on_different_tokens(change):
    records = [{**losses, "targets": "a"} for losses in ROWS]
    others = [{**losses, **change} for losses in records if losses["pos_emb"] == "rotary"]
    note = "methods or seeds were scored on different tokens"
    assert note not in markdown(summary_table([*records, *others], "T"), "#")
    others = [{**losses, "targets": "b"} for losses in others]
    assert note in markdown(summary_table([*records, *others], "T"), "#")


def full_records(seed=1234, shift=0.0) -> list[dict]:
    """All kinds of records of two methods; rotary has no bias, and at 512 there are only losses."""
    records = [
        {**losses, "seed": seed, "loss": losses["loss"] + shift, "stderr": 0.0123, "bits_per_byte": losses["loss"] / 2}
        for losses in ROWS
    ]
    about = {"seed": seed, "mode": "full", "train_length": 128, "note": None}
    for name in ("kerple_log", "rotary"):
        method = {**about, "pos_emb": name}
        for length in LENGTHS[:2]:
            losses = {"kind": "positions", "protocol": "non-overlapping", "edges": [0, 9, 18, 27], "counts": [9] * 3}
            records.append({**method, **losses, "length": length, "losses": [5.5, 5.0, 4.25]})
            resolution = {"kind": "resolution", "protocol": "first@8", "texts": 8, "layers": [0.02], "resolution": 0.02}
            records.append({**method, **resolution, "length": length})
            for depth, correct in ((0, 3), (1, 0)):
                passkeys = {"kind": "passkey", "protocol": "passkey", "trials": 4, "depth": depth, "correct": correct}
                records.append({**method, **passkeys, "length": length, "accuracy": correct / 4})
    heads = {"kind": "effective_length", "protocol": "effective-length", "length": 20480}
    layers = {"layers": ["all layers"], "effective_lengths": [[5, 20480, 100]]}
    records.append({**about, **heads, **layers, "pos_emb": "kerple_log"})
    none = {"layers": [], "effective_lengths": [], "note": "rotary has no bias"}
    records.append({**about, **heads, **none, "pos_emb": "rotary"})
    return records


def test_a_section_per_measure():
    records = full_records()
    table = summary_table(records, "T")
    texts = sections(records)
    assert table.headers == ("method", "128*", "256", "512", "512 / 128")
    assert all([row[0] for row in rows] == ["kerple_log", "rotary"] for rows in texts.values())
    assert {name: rows[0][1:] for name, rows in texts.items()} == {
        "perplexity": ["101.3", "100.5", "100.3", "0.99x"],
        "loss": ["4.618", "4.610", "4.608", ""],
        "standard error": ["0.012", "0.012", "0.012", ""],
        "bits per byte": ["2.309", "2.305", "2.304", ""],
        "loss, first bin": ["5.500", "5.500", "", ""],
        "loss, last bin": ["4.250", "4.250", "", ""],
        "resolution": ["0.02000", "0.02000", "", ""],
        "passkey accuracy": ["38%", "38%", "", ""],
    }
    assert "| **bits per byte** |  |  |  |  |\n| kerple_log | 2.309 |" in markdown(table, "#")
    for note in (
        "The loss by position was measured in 3 bins; the table shows the first and the last.",
        "Passkey accuracy: mean over depths 0, 1; higher is better.",
        "Effective length of kerple_log over 3 heads: 5 to 20,480, median 100; 1 of them reach 20,480 or more.",
        "n/a: rotary: rotary has no bias.",
    ):
        assert note in table.notes


def test_measures_without_values_have_no_section():
    records = [
        {**record, "bits_per_byte": None, "stderr": None} for record in full_records() if record["kind"] != "passkey"
    ]
    assert list(sections(records)) == ["perplexity", "loss", "loss, first bin", "loss, last bin", "resolution"]
    failed = {"resolution": None, "layers": [], "note": "positions end at 127"}
    records = [{**record, **failed} if record["kind"] == "resolution" else record for record in full_records()]
    assert "resolution" not in sections(records)
    assert "n/a: rotary (full) at 128, 256: positions end at 127." in summary_table(records).notes


def test_daggers():
    values = {"kerple_log": (23.1, 24.2, 23.9), "rotary": (23.0, 24.3, 23.8), "rpe": (22.6, 23.6, 23.4)}
    rows = [row(name, 128, value, seed=seed) for name in values for seed, value in enumerate(values[name])]
    rows += [row("alibi", 128, value, seed=seed) for seed, value in reversed(list(enumerate((23.6, 24.8, 24.4))))]
    texts = sections(rows, "kerple_log")[PERPLEXITY]
    assert [texts[0] for texts in texts if texts[1].endswith("†")] == ["alibi"], "rpe is better"
    note = "†: kerple_log is significantly better (paired two-sided t-test over the seeds, p < 0.05)."
    assert note in summary_table(rows, "T", "kerple_log").notes
    one_seed = "With one seed, the variation of kerple_log and the other methods between seeds is unknown."
    assert one_seed in summary_table(ROWS, "T", "kerple_log").notes
    assert_rejected("--compare-with t5", summary_table, rows, "T", "t5")


def test_two_checkpoints_with_the_same_seed_are_not_averaged():
    checkpoints = [{"path": "runs/a", "iteration": step, "fingerprint": f"{step}"} for step in (10, 20)]
    rows = [{**row("alibi", 128, 20.0 + index), "checkpoint": checkpoints[index]} for index in range(2)]
    assert sections(rows)[PERPLEXITY] == [["alibi (runs/a at 10)", "20.00"], ["alibi (runs/a at 20)", "21.00"]]
    rows[1]["seed"] = 2
    assert sections(rows)[PERPLEXITY] == [["alibi", "20.50 ± 0.71"]]
