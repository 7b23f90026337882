"""Writing results.jsonl."""

import pytest

from megatron.evaluation.records import RESULTS, read_results
from megatron.evaluation.results_file import ResultsFile
from megatron.utils.errors import UserError
from tests.support.records import stored_record


def test_added_records_are_on_disk_at_once_and_in_order(tmp_path):
    records = [stored_record(16), stored_record(32)]
    with ResultsFile(tmp_path / "new" / "folder", ["aa"]) as results:
        for count, added in enumerate(records, start=1):
            results.add(added)
            assert read_results(results.folder) == records[:count]
    assert read_results(tmp_path / "new" / "folder") == records


def test_a_later_measurement_replaces_an_earlier_one(tmp_path):
    with ResultsFile(tmp_path, ["aa"]) as results:
        results.add(stored_record(16, loss=3.0))
        later = stored_record(16, determined_by="other tokens", loss=2.5)
        assert results.find(later) is None
        results.add(later)
        assert results.find(later) == later
        assert results.find(stored_record(16)) is None
    assert read_results(tmp_path) == [later]


@pytest.mark.parametrize("cut", [1, 100])
def test_an_incomplete_last_line_is_skipped_and_overwritten(tmp_path, cut, capsys):
    with ResultsFile(tmp_path, ["aa"]) as results:
        results.add(stored_record(16))
        results.add(stored_record(32))
    content = (tmp_path / RESULTS).read_bytes()
    (tmp_path / RESULTS).write_bytes(content[:-cut])
    assert not capsys.readouterr().err
    assert read_results(tmp_path) == [stored_record(16)]
    assert f"{tmp_path / RESULTS}, line 2" in capsys.readouterr().err
    with ResultsFile(tmp_path, ["aa"]) as results:
        assert results.records == [stored_record(16)]
        results.add(stored_record(32))
    assert (tmp_path / RESULTS).read_bytes() == content


def test_results_of_another_model_are_rejected_or_replaced(tmp_path):
    with ResultsFile(tmp_path, ["aa"]) as results:
        results.add(stored_record())
    before = (tmp_path / RESULTS).read_bytes()
    with pytest.raises(UserError, match=r"7.*runs/a.*4.*--o"):
        ResultsFile(tmp_path, ["bb"]).__enter__()
    assert (tmp_path / RESULTS).read_bytes() == before
    with ResultsFile(tmp_path, ["aa", "bb"]) as results:
        assert len(results.records) == 1
        results.add(stored_record(fingerprint="bb"))
    with ResultsFile(tmp_path, ["bb"], replace=True) as results:
        assert results.records == [stored_record(fingerprint="bb")]
        with pytest.raises(UserError, match="another evaluation is writing"):
            ResultsFile(tmp_path, ["bb"]).__enter__()
        results.add(stored_record(32, fingerprint="bb"))
    assert read_results(tmp_path) == [
        stored_record(fingerprint="bb"),
        stored_record(32, fingerprint="bb"),
    ]


def test_replacing_results_loses_none_if_the_disk_is_full(tmp_path, monkeypatch):
    with ResultsFile(tmp_path, ["aa", "bb"]) as results:
        results.add(stored_record())
        results.add(stored_record(fingerprint="bb"))
    before = (tmp_path / RESULTS).read_bytes()

    def disk_full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(UserError, match="No space left"):
        ResultsFile(tmp_path, ["bb"], replace=True).__enter__()
    assert (tmp_path / RESULTS).read_bytes() == before
