"""The store of results: what is appended is there, torn lines and other models' results are dealt with."""

import json

import pytest

from megatron.evaluation.records import Row
from megatron.evaluation.results import RESULTS, Results, read_results
from megatron.evaluation.work import Origin
from megatron.utils.errors import UserError


def record(length=16, *, fingerprint="aa", decided_by="tokens", loss=2.0):
    origin = Origin({"path": "runs/a", "iteration": 4, "fingerprint": fingerprint}, "alibi", 7, 16)
    about = {"corpus": "text", "mode": "full", "protocol": "non-overlapping", "length": length}
    values = {"tokens": 64, "segments": 4, "documents": None, "stderr": None, "bits_per_byte": None, "perplexity": None}
    return Row(**origin.record("extrapolation", **about, decided_by=decided_by), loss=loss, **values)


def test_what_is_added_is_read_in_order(tmp_path):
    records = [record(16), record(32)]
    with Results(tmp_path / "new" / "folder", ["aa"]) as store:
        for number, one in enumerate(records):
            store.add(one)
            assert read_results(store.folder) == records[: number + 1]  # on the disk at once
    assert read_results(tmp_path / "new" / "folder") == records


def test_the_last_measurement_of_one_thing_counts(tmp_path):
    with Results(tmp_path, ["aa"]) as store:
        store.add(record(16, loss=3.0))
        later = record(16, decided_by="other tokens", loss=2.5)
        assert store.find(later) is None
        store.add(later)
        assert store.find(later) == later
        assert store.find(record(16)) is None
    assert read_results(tmp_path) == [later]


@pytest.mark.parametrize("cut", [1, 7, 100])
def test_a_torn_last_line_is_dropped_and_written_over(tmp_path, cut):
    with Results(tmp_path, ["aa"]) as store:
        store.add(record(16))
        store.add(record(32))
    content = (tmp_path / RESULTS).read_bytes()
    (tmp_path / RESULTS).write_bytes(content[:-cut])
    assert read_results(tmp_path) == [record(16)]
    with Results(tmp_path, ["aa"]) as store:
        assert store.records == [record(16)]
        store.add(record(32))
    assert (tmp_path / RESULTS).read_bytes() == content


def test_results_of_another_model_are_refused_by_name(tmp_path):
    with Results(tmp_path, ["aa"]) as store:
        store.add(record())
    before = (tmp_path / RESULTS).read_bytes()
    with pytest.raises(UserError, match=r"alibi with seed 7 \(runs/a at iteration 4, weights aa\); give another --out"):
        Results(tmp_path, ["bb"]).__enter__()
    assert (tmp_path / RESULTS).read_bytes() == before
    with Results(tmp_path, ["aa", "bb"]) as store:
        assert len(store.records) == 1
        store.add(record(fingerprint="bb"))
    with Results(tmp_path, ["bb"], replace=True) as store:
        assert store.records == [record(fingerprint="bb")]
        with pytest.raises(UserError, match="another evaluation is writing"):
            Results(tmp_path, ["bb"]).__enter__()
        store.add(record(32, fingerprint="bb"))
    assert read_results(tmp_path) == [record(fingerprint="bb"), record(32, fingerprint="bb")]


def test_dropping_results_loses_none_when_the_disk_is_full(tmp_path, monkeypatch):
    with Results(tmp_path, ["aa", "bb"]) as store:
        store.add(record())
        store.add(record(fingerprint="bb"))
    before = (tmp_path / RESULTS).read_bytes()

    def disk_full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(UserError, match="No space left"):
        Results(tmp_path, ["bb"], replace=True).__enter__()
    assert (tmp_path / RESULTS).read_bytes() == before


def test_two_writers_are_refused(tmp_path):
    with Results(tmp_path, ["aa"]), pytest.raises(UserError, match="another evaluation is writing"):
        Results(tmp_path, ["aa"]).__enter__()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is no result"),
        (json.dumps({"kind": "strange"}), "line 2: is no result"),
        (json.dumps({"kind": "extrapolation", "length": 3}), "line 2: a result without .*loss"),
    ],
)
def test_a_line_that_is_no_record(tmp_path, line, message):
    with Results(tmp_path, ["aa"]) as store:
        store.add(record())
    with (tmp_path / RESULTS).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=message):
        read_results(tmp_path)


def test_a_folder_without_results(tmp_path):
    with pytest.raises(UserError, match=r"holds no results\.jsonl"):
        read_results(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the report to"):
        Results(tmp_path / "file" / "x", ["aa"]).__enter__()
