"""Bad input and bad luck: one clear error each, and nothing lost."""

import json
import subprocess
import sys

import pytest
import torch

from megatron.checkpoint.directory import saved_iterations, write_manifest_of_folder
from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config, UserError
from megatron.training.logging import StepLog
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
        write_manifest_of_folder(file.parent, 3)
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


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"pos_emb": "rotary"}, "pos_emb none in the checkpoint, rotary here"),
        ({"num_attention_heads": 2}, "num_attention_heads 4 in the checkpoint, 2 here"),
        ({"gpt_j_residual": True}, "gpt_j_residual False in the checkpoint, True here"),
        ({"activation": "relu"}, "activation .* gelu in the checkpoint, relu here"),
    ],
)
def test_another_model_whose_weights_fit_is_refused(keys, named, tmp_path, data_path, capsys):
    """The sizes of all tensors agree; only the configuration that the checkpoint carries tells the models apart."""
    trained(tmp_path, data_path, pos_emb="none")
    with pytest.raises(CheckpointError, match=named):
        trained(tmp_path, data_path, **{"pos_emb": "none", "train_iters": 8, **keys})
    assert saved_iterations(tmp_path / "checkpoints") == [3, 6]


def test_finetuning_into_another_model_says_so(tmp_path, data_path, capsys):
    trained(tmp_path, data_path, pos_emb="none")
    trained(tmp_path, data_path, pos_emb="alibi", finetune=True, save=None)
    assert "differs from the one it starts from: pos_emb none in the checkpoint, alibi here" in capsys.readouterr().out


def test_ruined_weights_do_not_replace_a_good_checkpoint(tmp_path, data_path):
    """The loss before the update was finite, the weights after it are useless; the good checkpoint stays."""
    trained(tmp_path, data_path, train_iters=3)
    ruin = {"optimizer": {"type": "Adam", "params": {"lr": 1e20}}, "warmup": 0.0, "gradient_clipping": 0.0}
    with pytest.raises(UserError, match=r"not finite.*last good checkpoint"):
        trained(tmp_path, data_path, save_interval=1, keep_last_n_checkpoints=1, **ruin)
    assert saved_iterations(tmp_path / "checkpoints") == [3]
    trained(tmp_path, data_path)


@pytest.mark.parametrize("load", ["nowhere", None])
def test_train_iters_0_needs_a_checkpoint(load, tmp_path, data_path):
    with pytest.raises(UserError, match="train-iters is 0, which evaluates a trained model"):
        trained(tmp_path, data_path, train_iters=0, load=load and str(tmp_path / load))


def test_split_without_training_documents(tmp_path, data_path):
    with pytest.raises(UserError, match="training documents"):
        trained(tmp_path, data_path, split="0,1,0")


def test_exit_interval_leaves_without_an_evaluation(tmp_path, data_path, capsys):
    trained(tmp_path, data_path, exit_interval=2, eval_interval=100)
    output = capsys.readouterr().out
    assert "exiting after iteration 2: exit-interval 2; checkpoint saved" in output
    assert "validation at" not in output


def test_the_clock_counts_training_and_not_validation(monkeypatch):
    """Training before a validation counts, the validation does not."""
    now = [0.0]
    monkeypatch.setattr("megatron.training.logging.time.perf_counter", lambda: now[0])
    log = StepLog(None, None, None, 0.0)
    now[0] = 3.0
    with log.paused():
        now[0] = 100.0
    now[0] = 102.0
    with log.paused():
        assert log.seconds == pytest.approx(5.0)


def test_the_norm_is_logged_without_clipping(tmp_path, data_path):
    trained(tmp_path, data_path, gradient_clipping=0.0, save=None)
    assert all(0 < norm < 100 for norm in metrics(tmp_path, "train/grad_norm").values())
    assert len(metrics(tmp_path, "train/grad_norm")) == 6
