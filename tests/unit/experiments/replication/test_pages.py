"""Copying records, and the blocks of pages. tests/integration/test_results.py compares the
committed pages.
"""

import itertools
import json

from pandas import DataFrame

from experiments.replication import pages
from megatron.evaluation.records import read_results
from tests.support.errors import assert_rejected
from tests.support.records import positions, stored_record


def test_records_are_copied_compactly(tmp_path):
    losses = stored_record(loss=2.123456789)
    losses["groups"] = {"tokens": [64], "losses": [2.123456789]}
    losses["checkpoint"]["path"] = "/home/user/checkpoints"
    by_position = positions(losses=[2.123456789, 1.0])
    for name, records in {"1": [losses], "2": [by_position]}.items():
        folder = tmp_path / "sweep" / "runs" / name
        folder.mkdir(parents=True)
        (folder / "results.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    pages.add_results(tmp_path / "sweep", tmp_path / "records")
    assert [path.parts[-3:-1] for path in (tmp_path / "records").rglob("*.jsonl")] == [
        ("sweep", "7")
    ]
    first, second = read_results(tmp_path / "records" / "sweep")
    assert (first["loss"], first["groups"]["losses"]) == (2.123456789, [2.1235])
    assert not first["checkpoint"]["path"].startswith("/")
    assert second["losses"] == [2.1235, 1.0]


def test_document_masks_are_compared_by_length():
    records = []
    for method, length, name in itertools.product(
        ("kerple_log", "alibi"), (128, 8192), ("documents", "rows")
    ):
        loss = 2.0 + length / 8192 + 0.5 * (name == "rows")
        groups = {"tokens": [64], "losses": [loss]}
        values = {"length": length, "pos_emb": f"{method} ({name})", "groups": groups}
        records.append({**stored_record(loss=loss), **values})
        records.append({**positions(), **values, "groups": None})
    text = pages.effect_of_masks(records)
    for method in ("KERPLE (log)", "ALiBi"):
        assert f"{method} 2.016 (-0.5000) at 128" in text
        assert f"{method} 3.000 (-0.5000) at 8,192" in text


def test_the_best_mode_of_each_method_that_gains():
    losses = {
        ("rotary", "full"): 5.0,
        ("rotary", "window@128"): 3.5,
        ("rotary", "blockwise"): 3.75,
        ("rotary", "full+clip@128"): None,
        ("alibi", "full"): 3.0,
        ("alibi", "window@128"): 2.99,
    }
    records = []
    for (method, mode), loss in losses.items():
        values = {"pos_emb": method, "mode": mode, "length": 8192, "loss": loss}
        records += [{**stored_record(), **values}, {**stored_record(), **values, "length": 1024}]
    assert pages.best_modes(records).endswith(": Rotary -1.50 (`window@128`).")


def test_text_that_is_used_and_text_that_costs():
    rows = [("debian_c", "rpe", 1024, -0.03), ("debian_c", "rpe", 8192, 0.4)]
    rows += [("debian_c", "rpe", 8192, 0.3), ("debian_prose", "alibi", 8192, -0.02)]
    rows += [("debian_c", "sinusoidal", 1024, -0.5)]
    found = DataFrame(rows, columns=["corpus", "pos_emb", "length", "cost"])
    assert "1 of 4 " in pages.use_of_far_text(found)
    assert pages.use_of_far_text(found).endswith(": T5 at 1,024 on C.")
    assert pages.cost_of_far_text(found).endswith(": ALiBi -0.02 to -0.02, T5 +0.30 to +0.40.")


def test_log_minus_alibi_in_each_experiment(tmp_path):
    """With its interval from two seeds on; an experiment without records has no row."""

    def loss(pos_emb, seed, multiple, value):
        groups = {"tokens": [64], "losses": [value]}
        keys = {"pos_emb": pos_emb, "seed": seed, "documents": 1, "groups": groups}
        return {**stored_record(16 * multiple, loss=value), **keys}

    for name, seeds in {"main": (11, 12), "longer": (11,)}.items():
        records = []
        for seed, multiple in itertools.product(seeds, (1, 4, 8, 16, 32)):
            shift = 0.01 * (seed - 11) + 0.1 * (multiple > 1)
            records.append(loss("alibi", seed, multiple, 2.0))
            records.append(loss("kerple_log", seed, multiple, 2.0 + shift))
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / name / "results.jsonl").write_text(text)
    experiments = {
        name: pages.Experiment(tmp_path / name, 16, 512) for name in ("main", "longer", "wider")
    }
    rows = []
    for row in pages.order_table(experiments).rows:
        rows.append([*row.labels, *(cell.text for cell in row.cells)])
    assert rows == [
        ["main", "2", "+0.005 [-0.059, +0.069]", "+0.105 [+0.041, +0.169]"],
        ["longer", "1", "+0.000", "+0.100"],
    ]


def test_ranges_of_heads_are_sorted():
    records = []
    for pos_emb, seed, lengths in (
        ("kerple_log", 12, [700, 2, 20480]),
        ("alibi", 11, [5, 129, 9]),
        ("alibi", 12, [5, 129, 9]),
        ("kerple_power_ap_", 11, [1, 2, 3]),
    ):
        record = {"kind": "effective_length", "pos_emb": pos_emb, "seed": seed}
        records.append({**record, "effective_lengths": [lengths]})
    rows = [
        [*row.labels, *(cell.text for cell in row.cells)] for row in pages.range_table(records).rows
    ]
    assert rows == [
        ["ALiBi", "all", "5", "9", "129"],
        ["KERPLE (log)", "12", "2", "700", "20,480"],
    ]


def test_blocks_are_replaced_and_unknown_ones_named(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "blocks", lambda: {"answer": "42"})
    (tmp_path / "docs" / "results").mkdir(parents=True)
    block = "<!-- block answer: experiments/replication/generate.py -->\n{}<!-- end -->"
    (tmp_path / "README.md").write_text(f"before\n{block.format('old')}\nafter\n")
    (tmp_path / "docs" / "results" / "other.md").write_text("no block")
    expected = f"before\n{block.format(chr(10) + '42' + chr(10) * 2)}\nafter\n"
    assert pages.texts(tmp_path) == {tmp_path / "README.md": expected}
    (tmp_path / "README.md").write_text(block.replace("answer", "question"))
    assert_rejected(r"README\.md", pages.texts, tmp_path)
