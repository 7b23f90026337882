"""Reading results.jsonl."""

import json
import math

import pytest

from megatron.evaluation.records import RESULTS, extrapolation_records, perplexity, read_results
from megatron.evaluation.results_file import ResultsFile
from megatron.utils.errors import UserError
from tests.support.errors import assert_rejected
from tests.support.records import of_kind, positions, stored_record


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
    assert (
        frame[frame.checkpoint_hidden_size == 32]
        .pivot_table("loss", "pos_emb", "length")
        .loc["alibi", 16]
        == 2.25
    )
    assert "checkpoint" not in frame


BAD_LINES = {
    "{": "not valid JSON",
    "NaN": "not valid JSON",
    '{"kind": "extrapolation"}': "corpus",
    json.dumps({**stored_record(), "loss": "2.0"}): "loss.*'2.0'",
    json.dumps({**stored_record(), "checkpoint": {"path": None}}): r"checkpoint\.iteration",
    json.dumps({**stored_record(), "groups": {"tokens": [3, 4], "losses": [2.0]}}): "groups",
    json.dumps(positions(edges=[0, 16])): "edges",
    json.dumps(positions(edges=[0, 8, 8])): "edges",
    json.dumps({**stored_record(), "loss": -0.5}): "loss.*-0.5",
    json.dumps({**stored_record(loss=3.0), "perplexity": 4.0}): "perplexity 4.0",
    json.dumps({**stored_record(loss=3.0), "perplexity": None}): "perplexity None",
    json.dumps({**stored_record(), "stderr": -0.01}): "stderr.*-0.01",
    json.dumps({**stored_record(), "bits_per_byte": -1.5}): "bits_per_byte.*-1.5",
    json.dumps({**stored_record(), "tokens": 0}): "tokens, segments",
    json.dumps({**stored_record(), "segments": 0}): "tokens, segments and",
    json.dumps({**stored_record(), "documents": 0}): "segments and documents",
    json.dumps({**stored_record(), "length": 0}): "length.*0",
    json.dumps({**stored_record(), "note": "out of memory"}): "note",
    json.dumps({**stored_record(), "loss": None}): r"loss\)",
    json.dumps({**stored_record(), "loss": None, "note": "n/a"}): "loss is null",
    json.dumps(
        {**stored_record(), "groups": {"tokens": [30, 30], "losses": [2.0, 2.0]}}
    ): "groups must.*64",
    json.dumps(
        {**stored_record(), "groups": {"tokens": [32, 32], "losses": [2.0, 3.0]}}
    ): "mean of groups",
    json.dumps(positions(losses=[2.0, -1.0])): r"losses\[1\]",
    json.dumps(positions(counts=[8])): "counts",
    json.dumps(positions(counts=[8, 0])): "counts must",
    json.dumps(of_kind("passkey", depth=0.5, trials=8, correct=9, accuracy=1.0)): "9 / 8",
    json.dumps(of_kind("passkey", depth=0.5, trials=8, correct=2, accuracy=0.5)): "2 / 8",
    json.dumps(of_kind("passkey", depth=0.5, trials=0, correct=0, accuracy=1.5)): "accuracy.*1.5",
    json.dumps(
        of_kind("resolution", texts=2, layers=[0.5, 0.25], resolution=0.5)
    ): "resolution 0.5",
    json.dumps(
        of_kind("effective_length", layers=["layer 2"], effective_lengths=[[3], [4]])
    ): "one list",
    json.dumps(
        of_kind("effective_length", layers=["layer 2"], effective_lengths=[[3, 17]])
    ): "length 16",
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


def test_records_of_unknown_kinds_are_skipped(tmp_path, capsys):
    """A version of this project may remove a kind, or add one."""
    lines = [
        '{"kind": "entropy", "value": 3}',
        json.dumps(stored_record(32)),
        '{"kind": "copying"}',
    ]
    (tmp_path / RESULTS).write_text("".join(line + "\n" for line in lines))
    assert [record["length"] for record in read_results(tmp_path)] == [32]
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert "entropy" in output
    with ResultsFile(tmp_path, ["aa"]) as results:
        assert len(results.records) == 1
        assert_rejected("copying", results.add, {**stored_record(), "kind": "copying"})


def test_folders_without_results(tmp_path):
    assert_rejected(r"results\.jsonl", read_results, tmp_path)
    (tmp_path / "file").write_text("")
    assert_rejected("file is a file; give the folder", read_results, tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot write .*file/x"):
        ResultsFile(tmp_path / "file" / "x", ["aa"]).__enter__()


def test_perplexity_and_kinds():
    assert perplexity(2.0) == math.exp(2.0)
    assert perplexity(1e9) is None
    assert extrapolation_records([stored_record(), {**stored_record(), "kind": "positions"}]) == [
        stored_record()
    ]
