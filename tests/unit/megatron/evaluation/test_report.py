"""Results to JSON, Markdown, a plot and the screen."""

import io
import json
import math
import statistics

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from megatron.reporting import plots
from megatron.reporting.aggregate import cell, group, number
from megatron.reporting.plots import draw
from megatron.reporting.run_tables import PERPLEXITY, markdown, table
from megatron.reporting.summary import print_summary, write_summary
from megatron.utils.errors import UserError

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
        for name, series in values.items()
        for length, value in zip(LENGTHS, series, strict=True)
    ]


ROWS = rows_of({"kerple_log": (101.3, 100.5, 100.3), "rotary": (115.3, 131.0, 157.7)})


def test_files(tmp_path):
    folder = tmp_path / "runs" / "report"
    paths = write_summary(ROWS, folder, title="A title")
    assert [path.name for path in paths] == ["extrapolation.json", "extrapolation.md", "extrapolation.png"]
    assert sorted(folder.iterdir()) == sorted(paths)  # nothing temporary is left
    assert json.loads(paths[0].read_text()) == {"rows": ROWS}
    assert paths[1].read_text().startswith("# A title\n")
    image = matplotlib.image.imread(paths[2])
    assert image.shape[0] > 500
    assert image.shape[1] > 900


def test_a_second_report_replaces_the_first_and_a_failed_one_does_not(tmp_path, monkeypatch):
    write_summary(ROWS, tmp_path)
    write_summary(ROWS[:3], tmp_path)
    assert json.loads((tmp_path / "extrapolation.json").read_text()) == {"rows": ROWS[:3]}

    def disk_full(descriptor):
        raise OSError(28, "No space left on device")

    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(UserError, match=r"extrapolation\.json: No space left on device"):
        write_summary(ROWS, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the report to .*file/report"):
        write_summary(ROWS, tmp_path / "file" / "report")


def test_nothing_to_report(tmp_path):
    with pytest.raises(UserError, match="no results"):
        write_summary([], tmp_path)


def test_table_of_one_mode():
    made = table(ROWS)
    assert made.titles == ["method", "128*", "256", "512", "512 / 128"]
    assert made.names == 1
    assert made.blocks[PERPLEXITY] == [
        ["kerple_log", "101.3", "100.5", "100.3", "0.99x"],
        ["rotary", "115.3", "131.0", "157.7", "1.37x"],
    ]


def test_table_of_several_modes_seeds_and_training_lengths():
    rows = (
        rows_of({"alibi": (20.0, 21.0, 22.0)}, seed=1)
        + rows_of({"alibi": (21.0, 21.5, 24.0)}, seed=2)
        + rows_of({"alibi": (30.0, 31.0, None)}, mode="window@64", train_length=256, note="a reason")
    )
    made = table(rows)
    assert made.titles == ["method", "mode", "trained at", "128", "256", "512"]
    assert made.names == 3
    lines = made.blocks[PERPLEXITY]
    assert lines[0] == ["alibi", "full", "128", "20.50 ± 0.71", "21.25 ± 0.35", "23.0 ± 1.4"]
    assert lines[1] == ["alibi", "window@64", "256", "30.00", "31.00", "n/a"]


def test_mean_and_deviation_over_seeds():
    values = [23.1, 24.2, 23.9, 24.0, 23.3]
    series = group([row("alibi", 128, value, seed=seed) for seed, value in enumerate(values)])[0]
    assert series.mean(128) == pytest.approx(np.mean(values))
    assert series.deviation(128) == pytest.approx(np.std(values, ddof=1)) == pytest.approx(statistics.stdev(values))
    assert cell(series, 128) == "23.70 ± 0.47"


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.7099, "2.710"), (21.44, "21.44"), (101.3, "101.3"), (22621.4, "22,621"), (1.0, "1.000"), (3.2e9, "3.200e+09")],
)
def test_numbers(value, text):
    assert number(value) == text


def test_markdown_says_what_is_scored_and_why_something_is_missing():
    rows = ROWS + rows_of({"learned": (99.0, None, None)}, note="positions end at 127")
    text = markdown(rows, "T")
    assert "| learned | 99.00 | n/a | n/a | n/a |" in text
    assert "- n/a: learned (full) at 256, 512: positions end at 127." in text
    assert "the same 5,120 tokens are scored at every length" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_screen():
    screen = io.StringIO()
    print_summary(ROWS, "On the screen", Console(file=screen, width=100))
    text = screen.getvalue()
    assert "On the screen" in text
    assert "kerple_log" in text
    assert "0.99x" in text
    assert "star marks the training length" in text


def full_records(seed=1234, shift=0.0) -> list[dict]:
    """Every kind of record of two methods; rotary has no bias, and nothing but losses at 512."""
    records = [
        {**one, "seed": seed, "loss": one["loss"] + shift, "stderr": 0.0123, "bits_per_byte": one["loss"] / 2}
        for one in ROWS
    ]
    about = {"seed": seed, "mode": "full", "train_length": 128, "note": None}
    for name in ("kerple_log", "rotary"):
        method = {**about, "pos_emb": name}
        for length in LENGTHS[:2]:
            losses = {"kind": "positions", "protocol": "non-overlapping", "edges": [0, 9, 18, 27], "counts": [9] * 3}
            records.append({**method, **losses, "length": length, "losses": [5.5, 5.0, 4.25]})
            found = {"kind": "resolution", "protocol": "first@8", "texts": 8, "layers": [0.02], "resolution": 0.02}
            records.append({**method, **found, "length": length})
            for depth, correct in ((0, 3), (1, 0)):
                asked = {"kind": "passkey", "protocol": "passkey", "trials": 4, "depth": depth, "correct": correct}
                records.append({**method, **asked, "length": length, "accuracy": correct / 4})
    heads = {"kind": "effective_length", "protocol": "effective-length", "length": 20480}
    layers = {"layers": ["all layers"], "effective_lengths": [[5, 20480, 100]]}
    records.append({**about, **heads, **layers, "pos_emb": "kerple_log"})
    none = {"layers": [], "effective_lengths": [], "note": "rotary has no bias"}
    records.append({**about, **heads, **none, "pos_emb": "rotary"})
    return records


def test_a_block_for_each_measure():
    made = table(full_records())
    assert made.titles == ["method", "128*", "256", "512", "512 / 128"]
    kerple = {name: block[0][1:] for name, block in made.blocks.items()}
    assert all([line[0] for line in block] == ["kerple_log", "rotary"] for block in made.blocks.values())
    assert kerple == {
        "perplexity": ["101.3", "100.5", "100.3", "0.99x"],
        "loss": ["4.618", "4.610", "4.608", ""],
        "standard error": ["0.012", "0.012", "0.012", ""],
        "bits per byte": ["2.309", "2.305", "2.304", ""],
        "loss, first bin": ["5.500", "5.500", "", ""],
        "loss, last bin": ["4.250", "4.250", "", ""],
        "resolution": ["0.020", "0.020", "", ""],
        "pass keys found": ["38%", "38%", "", ""],
    }
    text = markdown(full_records(), "T")
    assert "| **bits per byte** |  |  |  |  |\n| kerple_log | 2.309 |" in text
    for sentence in (
        "The loss by position is there in 3 bins",
        "Pass keys were hidden at depths 0, 1.",
        "Effective length of kerple_log over 3 heads: 5 to 20,480, median 100; 1 see all that far.",
        "n/a: rotary: rotary has no bias.",
    ):
        assert f"- {sentence}" in text


def test_blocks_over_seeds():
    blocks = table([*full_records(1), *full_records(2, shift=0.1)]).blocks
    assert blocks["loss"][0][1] == "4.668 ± 0.071"
    assert blocks["standard error"][0][1] == "0.012"
    assert blocks["pass keys found"][0][1] == "38% ± 0%"


def test_what_was_not_measured_has_no_block():
    unknown = [{**one, "bits_per_byte": None, "stderr": None} for one in full_records() if one["kind"] != "passkey"]
    assert list(table(unknown).blocks) == ["perplexity", "loss", "loss, first bin", "loss, last bin", "resolution"]
    absent = {"resolution": None, "layers": [], "note": "positions end at 127"}
    failed = [{**one, **absent} if one["kind"] == "resolution" else one for one in full_records()]
    assert "resolution" not in table(failed).blocks
    assert "- n/a: rotary (full) at 128, 256: positions end at 127." in markdown(failed, "T")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_number_is_cut_off_where_the_screen_is_narrow(width):
    screen = io.StringIO()
    print_summary(full_records(), "On the screen", Console(file=screen, width=width))
    text = screen.getvalue()
    cells = [cell for block in table(full_records()).blocks.values() for line in block for cell in line if cell]
    assert all(cell in text for cell in cells)
    assert "…" not in text


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        rows_of({"learned": (None, None, None)}, note="nothing was measured"),
        rows_of({"a": (20, 19, 18), "b": (21, 20, 19), "rotary": (25, 900, 30_000)}),
        rows_of({"sinusoidal": (25, 900, 1e30)}),
        rows_of({f"method {index}": (20 + index, 19, 18) for index in range(20)}),
        rows_of({"a": (20, 20, 20)}, train_length=None) + rows_of({"a": (20, 20, 20)}, train_length=64),
        [row("a", 128, 20.0)],
    ],
    ids=["two", "none", "two panels", "enormous", "many", "training lengths", "a point"],
)
def test_every_shape_of_results_is_drawn(rows):
    image = matplotlib.image.imread(io.BytesIO(draw(rows, "title")))
    assert image[..., :3].std() > 0.02  # something is on it


def test_the_largest_growth_gets_a_second_panel_for_the_others():
    plain = matplotlib.image.imread(io.BytesIO(draw(ROWS, "")))
    wide = rows_of({"a": (20, 19, 18), "b": (21, 20, 19), "rotary": (25, 900, 30_000)})
    assert matplotlib.image.imread(io.BytesIO(draw(wide, ""))).shape[0] > 1.5 * plain.shape[0]


def test_lines_differ_in_marker_and_style_not_in_colour_alone():
    axes = Figure().subplots()
    plots._lines(axes, group(rows_of({f"method {index}": (20, 19, 18) for index in range(7)})))
    assert len({line.get_marker() for line in axes.lines}) == 7
    assert len({line.get_color() for line in axes.lines}) == 7
    assert [line.get_linestyle() for line in axes.lines] == ["-", "--", "--", "--", "-", "--", "--"]


def test_a_dagger_where_the_paired_t_test_rejects():
    log, other = (23.1, 24.2, 23.9), (23.6, 24.8, 24.4)
    rows = [row("kerple_log", 128, value, seed=seed) for seed, value in enumerate(log)]
    rows += [row("alibi", 128, value, seed=seed) for seed, value in reversed(list(enumerate(other)))]
    rows += [row("rotary", 128, value, seed=seed) for seed, value in enumerate((23.0, 24.3, 23.8))]
    rows += [row("rpe", 128, value, seed=seed) for seed, value in enumerate((22.6, 23.6, 23.4))]
    lines = table(rows, "kerple_log").blocks[PERPLEXITY]
    assert [line[1].endswith("†") for line in lines] == [False, True, False, False], "not what is better, as the paper"
    assert "†: kerple_log is significantly better (paired two-sided t-test" in markdown(rows, "T", "kerple_log")
    with pytest.raises(UserError, match="--compare-with t5: there are no results of it"):
        table(rows, "t5")


def test_two_checkpoints_of_one_seed_are_not_averaged():
    origins = [{"path": "runs/a", "iteration": step, "fingerprint": f"{step}"} for step in (10, 20)]
    rows = [{**row("alibi", 128, 20.0 + place), "checkpoint": origin} for place, origin in enumerate(origins)]
    lines = table(rows).blocks[PERPLEXITY]
    assert lines == [["alibi (runs/a at 10)", "20.00"], ["alibi (runs/a at 20)", "21.00"]]
    lines = table([rows[0], {**rows[1], "seed": 2}]).blocks[PERPLEXITY]
    assert lines == [["alibi", "20.50 ± 0.71"]]


def test_protocols_and_corpora_are_columns_where_they_differ():
    rows = [row("alibi", 128, 20.0), {**row("alibi", 128, 21.0), "protocol": "last-k@256", "corpus": "books"}]
    made = table(rows)
    assert made.titles[: made.names] == ["method", "corpus", "protocol"]
    assert [line[: made.names] for line in made.blocks[PERPLEXITY]] == [
        ["alibi", "unknown", "non-overlapping"],
        ["alibi", "books", "last-k@256"],
    ]
