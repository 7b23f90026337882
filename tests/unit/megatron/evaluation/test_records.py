"""Reading results.jsonl."""

import json
import math

import pytest

from megatron.evaluation.records import RESULTS, extrapolation_records, perplexity, read_results
from megatron.evaluation.results_file import ResultsFile
from megatron.utils.errors import UserError
from tests.support.errors import assert_rejected
from tests.support.records import positions, stored_record


def test_folders_are_searched_and_given_as_a_frame(tmp_path):
    with ResultsFile(tmp_path / "a" / "evaluation", ["aa"]) as results:
        results.add(stored_record(16))
        results.add(stored_record(32))
    with ResultsFile(tmp_path / "b", ["bb"]) as results:
        results.add(stored_record(16, fingerprint="bb", loss=2.5))
    records = read_results(tmp_path)
    assert [stored["length"] for stored in records] == [16, 32, 16]
    assert read_results([tmp_path / "a", tmp_path / "b"]) == records
    with ResultsFile(tmp_path, ["cc"]) as results:
        results.add(stored_record(16, fingerprint="cc"))
    assert len(read_results(tmp_path)) == 4
    (tmp_path / RESULTS).unlink()
    frame = read_results(tmp_path, as_frame=True)
    assert frame.loss.tolist() == [2.0, 2.0, 2.5]
    assert frame.checkpoint_fingerprint.tolist() == ["aa", "aa", "bb"]
    assert frame[frame.checkpoint_hidden_size == 32].pivot_table("loss", "pos_emb", "length").loc["alibi", 16] == 2.25
    assert "checkpoint" not in frame


BAD_LINES = {
    "{": "not valid JSON",
    "NaN": "not valid JSON",
    '{"kind": "strange"}': "kind 'strange'",
    '{"kind": "extrapolation"}': "corpus",
    json.dumps({**stored_record(), "loss": "2.0"}): "loss.*'2.0'",
    json.dumps({**stored_record(), "checkpoint": {"path": None}}): r"checkpoint\.iteration",
    json.dumps({**stored_record(), "groups": {"tokens": [3, 4], "losses": [2.0]}}): "groups",
    json.dumps(positions(edges=[0, 16])): "edges",
    json.dumps(positions(edges=[0, 8, 8])): "edges",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=BAD_LINES.values())
def test_a_bad_line_is_named(tmp_path, line):
    with ResultsFile(tmp_path, ["aa"]) as results:
        results.add(stored_record())
    with (tmp_path / RESULTS).open("a") as file:
        file.write(line + "\n" + json.dumps(positions()) + "\n")
    assert_rejected(f"results.jsonl, line 2: .*{BAD_LINES[line]}", read_results, tmp_path)
    with pytest.raises(UserError, match="line 2: "):
        ResultsFile(tmp_path, ["aa"]).__enter__()


def test_folders_without_results(tmp_path):
    assert_rejected(r"results\.jsonl", read_results, tmp_path)
    (tmp_path / "file").write_text("")
    assert_rejected("file is a file; give the folder", read_results, tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot write .*file/x"):
        ResultsFile(tmp_path / "file" / "x", ["aa"]).__enter__()


def test_perplexity_and_kinds():
    assert perplexity(2.0) == math.exp(2.0)
    assert perplexity(1e9) is None
    assert extrapolation_records([stored_record(), {**stored_record(), "kind": "positions"}]) == [stored_record()]
