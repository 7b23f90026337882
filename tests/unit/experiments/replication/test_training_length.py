"""Tables of losses at the training length."""

import math

import pytest

from experiments.replication.training_length import at_training_length, held_out_table, pilot_table, seed_table
from tests.support.records import record


def run(setting, pos_emb, loss, train_length=128, length=None):
    """A record of a run in the folder `setting`, on two documents."""
    keys = {"train_length": train_length, "corpus": "debian_c", "loss": loss, "stderr": 0.02, "targets": "ab"}
    keys |= {"groups": {"tokens": [60, 40], "losses": [loss - 0.02, loss + 0.03]}, "documents": 2}
    entry = record(f"{pos_emb} ({setting})", length or train_length, math.exp(loss), **keys)
    entry["checkpoint"] |= {"path": f"runs/{setting}/checkpoints"}
    return entry


def test_settings_are_compared_with_the_plain_setting_of_log():
    records = [
        run("log", "kerple_log", 2.0),
        run("log-factor10", "kerple_log", 1.9),
        run("alibi", "alibi", 2.1),
        run("long", "kerple_log", 1.7, train_length=512),
        run("long", "kerple_log", 1.95, train_length=512, length=128),
        {**run("diverged", "alibi", 2.0), "loss": None, "groups": None},
    ]
    table = pilot_table(records)
    assert [row.labels for row in table.rows] == [
        ("log-factor10", "KERPLE (log)", "128"),
        ("log", "KERPLE (log)", "128"),
        ("alibi", "ALiBi", "128"),
        ("long", "KERPLE (log)", "512"),
    ]
    assert table.columns[-1] == "loss at 128"
    cells = [[cell.text for cell in row.cells] for row in table.rows]
    assert cells[0][0] == "1.9000 ± 0.0200"
    assert cells[0][2].startswith("-0.1")
    assert cells[1][2] == ""
    assert cells[2][2].startswith("+0.1")
    assert cells[3][3] == "1.9500 ± 0.0200"
    assert [row.cells[0].best for row in table.rows] == [True, False, True, True]


@pytest.mark.parametrize("records", [[], [run("long", "kerple_log", 1.9, train_length=512, length=128)]])
def test_without_losses_at_the_training_length_there_is_no_table(records):
    assert pilot_table(records) is None


def test_losses_on_more_tokens():
    keys = {"train_length": 128, "tokens": 500}
    records = [record("alibi", 128, math.exp(2 + 0.1 * seed), seed, **keys, stderr=0.01 * seed) for seed in (1, 2, 3)]
    records += [record("kerple_log", 128, math.exp(1.9), 1, **keys, stderr=0.02, corpus="debian_c")]
    for entry in records:
        entry["loss"] = math.log(entry["perplexity"])
    others = [{**records[0], "kind": "positions"}, {**records[0], "length": 256}, {**records[0], "mode": "window@128"}]
    assert at_training_length([*records, *others]) == records
    table = held_out_table(records)
    assert [row.labels for row in table.rows] == [("KERPLE (log)",), ("ALiBi",)]
    texts = {column: [row.cells[i].text for row in table.rows] for i, column in enumerate(table.columns)}
    assert texts["C, loss"] == ["1.900", "–"]
    assert texts["C, standard error"] == ["0.020", "–"]
    other = next(name for name in table.columns if name.endswith("loss") and not name.startswith("C, "))
    assert texts[other] == ["–", "2.20 ± 0.10"]
    assert held_out_table([]) is None


def test_differences_of_seeds_by_position():
    records = []
    for pos_emb, seeds in (("alibi", 3), ("rpe", 1)):
        for seed in range(seeds):
            keys = {"train_length": 32, "edges": [0, 2, 9, 16, 32], "counts": [4, 6, 2, 9]}
            keys["losses"] = [3.0, 2.0 + 0.1 * seed, 2.0 - 0.3 * seed, 1.0 + seed]
            entry = {**record(pos_emb, 32, 9.0, seed), "kind": "positions", **keys}
            records += [entry, {**entry, "mode": "window@32", "losses": [9.0] * 4}, {**entry, "length": 64}]
    table = seed_table(records)
    assert table.columns == ("seeds", "first 1/16", "up to 1/2", "second half")
    (row,) = (row for row in table.rows if row.labels == ("ALiBi",))
    assert [cell.text for cell in row.cells] == ["3", "0.000", "0.000", "1.000"]  # (6 x 0.1 - 2 x 0.3) / 8 = 0
    assert len(table.rows) == 1
    assert seed_table(records[3:]) is not None
    assert seed_table(records[-3:]) is None
    longer = {"train_length": 64, "edges": [0, 4, 18, 32, 64]}
    other = [{**entry, **longer} for entry in records if entry["length"] == 64]
    assert len(seed_table([*records, *other, {**records[0], "losses": []}]).rows) == 2
    wide = [{**entry, "edges": [0, 32], "losses": [1.0], "counts": [21]} for entry in records]
    assert seed_table(wide) is None
