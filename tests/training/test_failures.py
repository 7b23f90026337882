"""Bad input and bad luck: one clear error each, and nothing lost."""

import json
import subprocess
import sys

import pytest
import torch

from megatron.checkpoint.directory import saved_iterations
from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config, UserError
from megatron.training.loop import train
from tests.support.runs import ROOT, environment, metrics, run, training_settings, weights


def trained(folder, data_path, **keys):
    return train(Config.from_flat(training_settings(folder, data_path, **keys)))


def test_missing_data_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere/text_document.*prepare_data"):
        trained(tmp_path, "nowhere/text_document")


def test_missing_train_iters_is_named(tmp_path, data_path):
    with pytest.raises(UserError, match="train-iters"):
        trained(tmp_path, data_path, train_iters=None)


def test_checkpoint_of_another_model_size(tmp_path, data_path):
    trained(tmp_path, data_path)
    before = weights(tmp_path, 6)
    with pytest.raises(CheckpointError, match=r"\(512, 32\).*\(512, 64\)"):
        trained(tmp_path, data_path, hidden_size=64, finetune=True)
    with pytest.raises(CheckpointError, match="num-layers"):
        trained(tmp_path, data_path, num_layers=3, finetune=True)
    with pytest.raises(CheckpointError, match=r"attention\.rpe\.bias_p"):
        trained(tmp_path, data_path, pos_emb="alibi", finetune=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path, 6).items())


def test_damaged_checkpoint_is_named(tmp_path, data_path):
    trained(tmp_path, data_path)
    file = tmp_path / "checkpoints" / "global_step6" / "layer_03-model_00-model_states.pt"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="layer_03"):
        trained(tmp_path, data_path)


def test_full_disk_keeps_the_last_checkpoint(tmp_path, data_path):
    """The limit on a file's size stands for the full disk: writing fails half-way, with an OSError from the system."""
    trained(tmp_path, data_path)
    settings = training_settings(tmp_path, data_path, train_iters=12)
    limit = 20_000
    script = (
        "import resource, runpy, signal, sys;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    before = weights(tmp_path, 6)
    (tmp_path / "config.yml").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-c", script, "train.py", str(tmp_path / "config.yml")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "could not be saved" in done.stderr
    assert "global_step9" in done.stderr
    assert "Traceback" not in done.stderr
    assert saved_iterations(tmp_path / "checkpoints") == [3, 6]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "global_step3",
        "global_step6",
        "latest",
    ]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step6"
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path, 6).items())


@pytest.mark.parametrize("how", ["explode", "damaged weights"])
def test_loss_that_is_not_finite_stops_the_run(how, tmp_path, data_path):
    trained(tmp_path, data_path, train_iters=3)
    if how == "explode":
        keys = {"optimizer": {"type": "Adam", "params": {"lr": 1e20}}, "warmup": 0.0, "gradient_clipping": 0.0}
    else:
        keys = {}
        file = tmp_path / "checkpoints" / "global_step3" / "layer_06-model_00-model_states.pt"
        state = torch.load(file, weights_only=True)
        state["final_linear.weight"][7, 7] = float("nan")
        torch.save(state, file)
        (file.parent / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"not finite.*iteration \d+.*last good checkpoint"):
        trained(tmp_path, data_path, train_iters=9, log_interval=100, **keys)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step3"
    assert saved_iterations(tmp_path / "checkpoints") == [3]


def test_save_folder_that_cannot_be_made(tmp_path, data_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"save: .*file/checkpoints"):
        trained(tmp_path, data_path, save=str(tmp_path / "file" / "checkpoints"))


def test_vocabulary_smaller_than_the_tokenizers(tmp_path, data_path):
    with pytest.raises(UserError, match=r"padded_vocab_size is 128.*512 tokens"):
        trained(tmp_path, data_path, padded_vocab_size=128)


def test_apex_that_is_not_installed(tmp_path, data_path):
    with pytest.raises(UserError, match="apex"):
        trained(tmp_path, data_path, optimizer={"type": "Adam", "params": {"lr": 1e-3, "apex": True}})


def test_train_iters_0_validates_at_another_length(tmp_path, data_path, capsys):
    """How KERPLE evaluated: the trained model, `train-iters: 0`, and a `seq-length-val`."""
    trained(tmp_path, data_path)
    capsys.readouterr()
    keys = {"train_iters": 0, "seq_length_val": 128, "eval_iters": 2, "save": None, "num_workers": 0}
    trained(tmp_path, data_path, **keys, log_dir=str(tmp_path / "long" / "logs"))
    output = capsys.readouterr().out
    assert "length 128" in output
    ((iteration, loss),) = metrics(tmp_path / "long", "validation/loss").items()
    assert iteration == 6
    assert 1.0 < loss < metrics(tmp_path)[1]


def test_one_line_and_status_2_for_a_bad_key(tmp_path, data_path):
    settings = {**training_settings(tmp_path, data_path), "num_layer": 3}
    output = run(tmp_path, settings, status=2)
    assert "num_layer" in output
    assert "num_layers" in output or "num-layers" in output
    assert "Traceback" not in output
    assert not (tmp_path / "checkpoints").exists()
