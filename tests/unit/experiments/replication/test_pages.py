"""Copying records, and the blocks of pages. tests/integration/test_results.py compares the
committed pages.
"""

import itertools
import json

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


def test_document_masks_are_compared_over_all_seeds():
    records = []
    for mode, method, (seed, loss) in itertools.product(
        ("full", "window@128"), ("kerple_log", "alibi"), ((1, 2.0), (2, 3.0))
    ):
        for name, shift in (("documents", 0.0), ("rows", 0.5)):
            groups = {"tokens": [64], "losses": [loss + shift]}
            values = {"mode": mode, "pos_emb": f"{method} ({name})", "seed": seed, "groups": groups}
            records.append({**stored_record(loss=loss + shift), **values})
    cells = [[cell.text for cell in row.cells] for row in pages.documents_table(records).rows]
    assert cells == [["2.500"], ["3.000"], ["-0.5000"]] * 4


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
