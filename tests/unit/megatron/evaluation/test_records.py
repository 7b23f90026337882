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
    frame = read_results(tmp_path, as_frame=True)
    assert frame.loss.tolist() == [2.0, 2.0, 2.5]
    assert frame.checkpoint_fingerprint.tolist() == ["aa", "aa", "bb"]
    assert frame[frame.checkpoint_hidden_size == 32].pivot_table("loss", "pos_emb", "length").loc["alibi", 16] == 2.25
    assert "checkpoint" not in frame


BAD_LINES = {
    "{": "not valid JSON",
    "[]": "must be an object, not a value of type list",
    "[" * 5000: "not valid JSON .recursion limit",
    "NaN": "not valid JSON",
    "9" * 5000: "not valid JSON .number out of range",
    '{"kind": "strange"}': "kind 'strange' is unknown; evaluate.py writes extrapolation, ",
    '{"kind": "extrapolation"}': "corpus is missing",
    '{"kind": ["extrapolation"]}': "kind must be a string",
    '{"kind": "\\ud800"}': "not valid JSON",
    json.dumps({**stored_record(), "loss": True}): "loss must be a number, not True",
    json.dumps({**stored_record(), "loss": "2.0"}): "loss must be a number, not '2.0'",
    json.dumps({**stored_record(), "loss": "x" * 10**6}): r"loss must be a number, not 'x{59}\.\.\.",
    json.dumps({**stored_record(), "loss": 2.5}).replace("2.5", "1e999"): "loss must be a finite number, not inf",
    json.dumps({**stored_record(), "loss": math.nan}): "not valid JSON",
    json.dumps({**stored_record(), "length": 16.0}): r"length must be an integer, not 16\.0",
    json.dumps({**stored_record(), "length": 10**30}): r"length must be below 9223372036854775808, not 1000",
    json.dumps({**stored_record(), "pos_emb": "a\x1b[31mb"}): r"pos_emb contains a control character \(U\+001B\)",
    json.dumps({**stored_record(), "pos_emb": "a\u202eb"}): r"pos_emb contains RIGHT-TO-LEFT OVERRIDE",
    json.dumps({**stored_record(), "pos_emb": "a" * 5000}): "pos_emb must have at most 300 characters, not 'aaa",
    json.dumps({**stored_record(), "checkpoint": {"path": None}}): "checkpoint.iteration is missing",
    json.dumps(
        {**stored_record(), "groups": {"tokens": [3, "4"], "losses": [2.0, 2.0]}}
    ): r"groups\.tokens\[1\] must be",
    json.dumps(
        {**stored_record(), "groups": {"tokens": [3, 4], "losses": [2.0]}}
    ): "groups must have one loss for each",
    json.dumps(positions(edges=[0, 16])): "edges must increase, with one more edge than losses",
    json.dumps(positions(edges=[0, 8, 8])): "edges must increase",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=BAD_LINES.values())
def test_a_bad_line_is_named(tmp_path, line):
    with ResultsFile(tmp_path, ["aa"]) as results:
        results.add(stored_record())
    with (tmp_path / RESULTS).open("a") as file:
        file.write(line + "\n" + json.dumps(positions()) + "\n")
    with pytest.raises(UserError, match=f"results.jsonl, line 2: {BAD_LINES[line]}.*; correct or remove the line$"):
        read_results(tmp_path)
    with pytest.raises(UserError, match="line 2: "):
        ResultsFile(tmp_path, ["aa"]).__enter__()


def test_records_of_other_tools(tmp_path):
    (tmp_path / RESULTS).write_text('{"kind": "strange"}\n{"kind": "extrapolation", "length": 3, "own": 1}\n')
    strange, losses = read_results(tmp_path, strict=False)
    assert strange["kind"] == "strange"
    assert (losses["length"], losses["loss"], losses["mode"], losses["checkpoint"]) == (3, None, "full", None)
    (tmp_path / RESULTS).write_text('{"kind": "extrapolation"}\n')
    with pytest.raises(UserError, match="line 1: length is missing"):
        read_results(tmp_path, strict=False)


def test_only_regular_files_of_limited_size_are_read(tmp_path, monkeypatch):
    path = tmp_path / RESULTS
    path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="is not a regular file"):
        ResultsFile(tmp_path, ["aa"]).__enter__()
    path.unlink()
    monkeypatch.setattr("megatron.evaluation.records.MAX_BYTES", 1000)
    path.write_text(json.dumps(stored_record()) + "\n" + 1000 * " ")
    assert_rejected("1,000", read_results, tmp_path)
    monkeypatch.undo()
    path.write_bytes(b"\n" * 50_001)
    assert_rejected("50,001.*50,000", read_results, tmp_path)
    path.write_bytes(b"[" * 200_001)
    assert_rejected("200,001.*200,000", read_results, tmp_path)


def test_folders_without_results(tmp_path):
    assert_rejected(r"results\.jsonl", read_results, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file; give the folder"):
        read_results(tmp_path / "file")
    with pytest.raises(UserError, match="cannot write results to"):
        ResultsFile(tmp_path / "file" / "x", ["aa"]).__enter__()


def test_perplexity_and_kinds():
    assert perplexity(2.0) == math.exp(2.0)
    assert perplexity(None) is None
    assert perplexity(1e9) is None
    assert extrapolation_records([stored_record(), {**stored_record(), "kind": "positions"}]) == [stored_record()]
