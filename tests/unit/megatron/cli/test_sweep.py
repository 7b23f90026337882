"""The options of `kerple sweep`."""

import pytest

from megatron.cli import sweep as command
from megatron.config import UserError
from tests.support.errors import assert_rejected


def test_dry_run_changes_nothing(sweep):
    output = sweep("--dry-run")
    assert "2 runs in" in output
    assert not (sweep.folder / "out").exists()
    (sweep.folder / "text_document.idx").unlink()
    assert sweep("--dry-run", write=False).count("text_document.idx (create it with prepare_data.py)") == 1


def test_errors_before_anything_is_started(sweep, monkeypatch):
    with pytest.raises(SystemExit):
        sweep("--jobs", "0")
    assert_rejected(r"nowhere\.idx", sweep, set={"data-path": "nowhere"})
    monkeypatch.setattr(command, "visible_gpus", lambda: [0, 1])
    with pytest.raises(UserError, match=r"kerple_log/7.*4 GPUs.*2"):
        sweep(set={"num-gpus": 4, "train-batch-size": 8, "train_micro_batch_size_per_gpu": 2})
    assert_rejected("--jobs", sweep, "--jobs", "2")
    assert not sweep.runs.exists()


def test_the_folder_of_a_sweep_must_be_writable(sweep):
    (sweep.folder / "file").write_text("")
    assert_rejected(r"sweep\.yml.*file/out", sweep, output=str(sweep.folder / "file" / "out"))
