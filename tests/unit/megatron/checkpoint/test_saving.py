"""Writing a checkpoint's files: what is in them, and errors that are returned."""

import json

import pytest
import torch

from megatron.checkpoint import saving
from megatron.checkpoint.directory import CONFIG_FILE, saved_iterations, tag_for
from megatron.checkpoint.manifest import find_damage, read_manifest, write_manifest_of_folder
from megatron.checkpoint.saving import Checkpointer, write_files
from megatron.checkpoint.state_dict import TrainingState
from megatron.config import Config
from megatron.training.loop import train
from tests.support.checkpoint_folders import save
from tests.support.configs import make_config
from tests.support.runs import training_settings, unwrapped


def test_the_manifest_lists_all_files(trained_run):
    step = trained_run / "checkpoints" / "global_step2"
    assert find_damage(step) is None
    layers = {f"layer_{index:02d}-model_00-model_states.pt" for index in (0, 2, 3, 5, 6)}
    ranks = {"optimizer_rank_00000.pt", "random_rank_00000.pt", "mp_rank_00_model_states.pt"}
    assert set(read_manifest(step)) == {*layers, *ranks, "configs/config.yml"}


def test_no_file_contains_a_secret(trained_run):
    step = trained_run / "checkpoints" / "global_step2"
    for path in step.rglob("*"):
        if path.is_file():
            assert b"secret-value" not in path.read_bytes(), path
    saved = json.loads((step / "configs" / "config.yml").read_text())
    assert saved["csv_monitor"] == {"enabled": False}
    assert saved["tokenizer_type"] == "CharLevelTokenizer"


@pytest.mark.parametrize("failure", ["save", "flush"])
def test_an_error_is_returned_after_all_files_were_requested(failure, tmp_path, monkeypatch):
    """The other ranks take part in gathering the later files."""
    requested = []

    def files():
        for name in ("a.pt", "b.pt", "c.pt"):
            requested.append(name)
            yield name, {"w": torch.ones(5)}

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "save_file" if failure == "save" else "_sync_and_close", fail)
    _, error = write_files(tmp_path, files())
    assert error == "OSError: [Errno 28] No space left on device"
    assert requested == ["a.pt", "b.pt", "c.pt"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(
    tmp_path, data_path, monkeypatch, capsys
):
    def fail(*_):
        raise PermissionError(13, "Permission denied", "global_step1")

    monkeypatch.setattr(saving, "remove_older", fail)
    keys = {"train_iters": 1, "eval_iters": 0, "keep_last_n_checkpoints": 1}
    assert train(Config.from_flat(training_settings(tmp_path, data_path, **keys))).iteration == 1
    assert "warning: an older checkpoint could not be deleted" in unwrapped(capsys.readouterr().out)


def test_kept_checkpoints_do_not_count(tmp_path):
    """Those that this run's configuration keeps, or the one with which they were saved."""
    for iteration, keys in ((1, {}), (2, {}), (3, {"extra_save_iters": [3]}), (4, {}), (5, {})):
        save(tmp_path, iteration)
        step = tmp_path / tag_for(iteration)
        (step / CONFIG_FILE).write_text(json.dumps(make_config(**keys).to_flat()))
        write_manifest_of_folder(step, iteration)
    reports = []
    config = make_config(save=str(tmp_path), keep_last_n_checkpoints=1, extra_save_iters=[2])
    Checkpointer(None, config, reports.append)._remove_older([1, 2, 3, 4, 5])
    assert saved_iterations(tmp_path) == [2, 3, 5]
    assert [report.split(" (")[0] for report in reports] == [
        f"deleted {tmp_path}/global_step1",
        f"deleted {tmp_path}/global_step4",
    ]


def test_the_lineage_of_a_run_that_was_rolled_back(tmp_path, monkeypatch):
    """Checkpoints from the saved iteration on belong to an abandoned branch."""
    monkeypatch.setattr(Checkpointer, "_write", lambda *_: None)
    config = make_config(save=str(tmp_path))
    state = TrainingState(iteration=4, lineage=[2, 4, 6])
    Checkpointer(None, config, lambda text: None).save(state)
    assert state.lineage == [2, 4]
