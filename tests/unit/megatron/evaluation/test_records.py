"""Reading and writing results.jsonl."""

import json
import math

import pytest

from megatron.evaluation.records import (
    RESULTS,
    ExtrapolationRecord,
    Provenance,
    ResultsFile,
    extrapolation_records,
    perplexity,
    read_results,
)
from megatron.utils.errors import UserError


def record(length=16, *, fingerprint="aa", determined_by="tokens", loss=2.0):
    checkpoint = {"path": "runs/a", "iteration": 4, "fingerprint": fingerprint, "layers": 2, "hidden_size": 32}
    planned = Provenance(checkpoint, "alibi", 7, 16).record(
        "extrapolation",
        corpus="text",
        mode="full",
        protocol="non-overlapping",
        length=length,
        determined_by=determined_by,
    )
    values = {"tokens": 64, "segments": 4, "documents": None, "stderr": None, "bits_per_byte": None, "perplexity": None}
    values |= {"targets": "ab", "groups": None}
    return ExtrapolationRecord(**planned, loss=loss, **values)


def test_added_records_are_on_disk_at_once_and_in_order(tmp_path):
    records = [record(16), record(32)]
    with ResultsFile(tmp_path / "new" / "folder", ["aa"]) as results:
        for count, added in enumerate(records, start=1):
            results.add(added)
            assert read_results(results.folder) == records[:count]
    assert read_results(tmp_path / "new" / "folder") == records


def test_a_later_measurement_replaces_an_earlier_one(tmp_path):
    with ResultsFile(tmp_path, ["aa"]) as results:
        results.add(record(16, loss=3.0))
        later = record(16, determined_by="other tokens", loss=2.5)
        assert results.find(later) is None
        results.add(later)
        assert results.find(later) == later
        assert results.find(record(16)) is None
    assert read_results(tmp_path) == [later]


def test_folders_are_searched_and_given_as_a_frame(tmp_path):
    with ResultsFile(tmp_path / "a" / "evaluation", ["aa"]) as results:
        results.add(record(16))
        results.add(record(32))
    with ResultsFile(tmp_path / "b", ["bb"]) as results:
        results.add(record(16, fingerprint="bb", loss=2.5))
    records = read_results(tmp_path)
    assert [stored["length"] for stored in records] == [16, 32, 16]
    assert read_results([tmp_path / "a", tmp_path / "b"]) == records
    frame = read_results(tmp_path, as_frame=True)
    assert frame.loss.tolist() == [2.0, 2.0, 2.5]
    assert frame.checkpoint_fingerprint.tolist() == ["aa", "aa", "bb"]
    assert frame[frame.checkpoint_hidden_size == 32].pivot_table("loss", "pos_emb", "length").loc["alibi", 16] == 2.25
    assert "checkpoint" not in frame


@pytest.mark.parametrize("cut", [1, 7, 100])
def test_an_incomplete_last_line_is_ignored_and_overwritten(tmp_path, cut):
    with ResultsFile(tmp_path, ["aa"]) as results:
        results.add(record(16))
        results.add(record(32))
    content = (tmp_path / RESULTS).read_bytes()
    (tmp_path / RESULTS).write_bytes(content[:-cut])
    assert read_results(tmp_path) == [record(16)]
    with ResultsFile(tmp_path, ["aa"]) as results:
        assert results.records == [record(16)]
        results.add(record(32))
    assert (tmp_path / RESULTS).read_bytes() == content


def test_results_of_another_model_are_rejected_or_replaced(tmp_path):
    with ResultsFile(tmp_path, ["aa"]) as results:
        results.add(record())
    before = (tmp_path / RESULTS).read_bytes()
    with pytest.raises(UserError, match=r"alibi with seed 7 \(runs/a at iteration 4, weights aa\); choose another --o"):
        ResultsFile(tmp_path, ["bb"]).__enter__()
    assert (tmp_path / RESULTS).read_bytes() == before
    with ResultsFile(tmp_path, ["aa", "bb"]) as results:
        assert len(results.records) == 1
        results.add(record(fingerprint="bb"))
    with ResultsFile(tmp_path, ["bb"], replace=True) as results:
        assert results.records == [record(fingerprint="bb")]
        with pytest.raises(UserError, match="another evaluation is writing"):
            ResultsFile(tmp_path, ["bb"]).__enter__()
        results.add(record(32, fingerprint="bb"))
    assert read_results(tmp_path) == [record(fingerprint="bb"), record(32, fingerprint="bb")]


def test_replacing_results_loses_none_if_the_disk_is_full(tmp_path, monkeypatch):
    with ResultsFile(tmp_path, ["aa", "bb"]) as results:
        results.add(record())
        results.add(record(fingerprint="bb"))
    before = (tmp_path / RESULTS).read_bytes()

    def disk_full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(UserError, match="No space left"):
        ResultsFile(tmp_path, ["bb"], replace=True).__enter__()
    assert (tmp_path / RESULTS).read_bytes() == before


def test_a_second_writer_is_rejected(tmp_path):
    with ResultsFile(tmp_path, ["aa"]), pytest.raises(UserError, match="another evaluation is writing"):
        ResultsFile(tmp_path, ["aa"]).__enter__()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not a record"),
        ("[]", "line 2: not a record"),
        (json.dumps({"kind": "strange"}), "line 2: not a record"),
        (json.dumps({"kind": "extrapolation", "length": 3}), "line 2: the record lacks .*loss"),
    ],
)
def test_invalid_lines(tmp_path, line, message):
    with ResultsFile(tmp_path, ["aa"]) as results:
        results.add(record())
    with (tmp_path / RESULTS).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=message):
        read_results(tmp_path)
    if line.startswith('{"'):
        assert read_results(tmp_path, strict=False) == [record(), json.loads(line)]
    else:
        with pytest.raises(UserError, match=message):
            read_results(tmp_path, strict=False)


def test_folders_without_results(tmp_path):
    with pytest.raises(UserError, match=r"no results\.jsonl in this folder"):
        read_results(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write results to"):
        ResultsFile(tmp_path / "file" / "x", ["aa"]).__enter__()


def test_perplexity_and_kinds():
    assert perplexity(2.0) == math.exp(2.0)
    assert perplexity(None) is None
    assert perplexity(1e9) is None
    assert extrapolation_records([record(), {**record(), "kind": "positions"}]) == [record()]
