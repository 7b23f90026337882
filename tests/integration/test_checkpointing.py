"""Options of checkpoints in training runs: fallback, another precision."""

import resource
import shutil

import pytest
import torch

from megatron.checkpoint.directory import saved_iterations
from megatron.checkpoint.storage import CheckpointError
from megatron.cli.evaluate import main as evaluate
from megatron.cli.train import main as train_command
from megatron.config import Config
from megatron.training.loop import train
from tests.support.checkpoints import write_yaml
from tests.support.runs import copy_checkpoint, metrics, training_settings, unwrapped, weights


def trained(folder, data_path, **keys):
    """Train; returns the state at the end."""
    return train(Config.from_flat(training_settings(folder, data_path, **keys)))


def damage(folder, iteration, name="layer_03-model_00-model_states.pt"):
    file = folder / "checkpoints" / f"global_step{iteration}" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_fallback_uses_the_newest_complete_checkpoint(finished_run, tmp_path, data_path, capsys):
    expected, losses = weights(tmp_path, 6), metrics(tmp_path)
    damage(tmp_path, 6)
    with pytest.raises(CheckpointError, match=r"layer_03.*3.*--fallback"):
        trained(tmp_path, data_path)
    trained(tmp_path, data_path, fallback=True)
    assert "fallback: the checkpoint is damaged" in unwrapped(capsys.readouterr().out)
    assert metrics(tmp_path) == losses
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path, 6).items())


def test_checkpoints_of_another_branch_are_not_used(finished_run, tmp_path, data_path):
    """Neither by fallback, nor by keep_last_n_checkpoints, which counts them neither."""
    keys = {"eval_iters": 0, "save_interval": 1}
    trained(tmp_path, data_path, **keys, iteration=3, train_iters=5)
    damage(tmp_path, 5)
    (tmp_path / "checkpoints/global_step2").mkdir()  # of nobody
    assert trained(tmp_path, data_path, **keys, fallback=True, train_iters=5).lineage == [3, 4, 5]
    trained(
        tmp_path, data_path, eval_iters=0, save_interval=7, train_iters=8, keep_last_n_checkpoints=2
    )
    assert saved_iterations(tmp_path / "checkpoints") == [2, 6, 7, 8]


def test_finetuning_keeps_the_checkpoint_it_started_from(finished_run, tmp_path, data_path):
    keys = {"eval_iters": 0, "save_interval": 1, "finetune": True}
    trained(tmp_path, data_path, **keys, train_iters=2)
    damage(tmp_path, 2)
    keys |= {"train_iters": 8, "save_interval": 4, "keep_last_n_checkpoints": 1, "fallback": True}
    assert trained(tmp_path, data_path, **keys).lineage == [1, 4, 8]
    assert saved_iterations(tmp_path / "checkpoints") == [2, 3, 6, 8]


def test_fallback_option_of_evaluate_and_train(tmp_path, data_path, capsys):
    settings = training_settings(tmp_path, data_path, train_iters=3, save_interval=1)
    trained(tmp_path, data_path, train_iters=3, save_interval=1)
    damage(tmp_path, 3)
    config = write_yaml(tmp_path / "config.yml", settings)
    with pytest.raises(CheckpointError, match=r"layer_03.*--fallback"):
        evaluate([str(config), "--lengths", "32"])
    capsys.readouterr()
    evaluate([str(config), "--lengths", "32", "--fallback"])
    assert "global_step2: kerple_log" in capsys.readouterr().err
    train_command([str(config), "--fallback"])
    output = unwrapped(capsys.readouterr().out)
    assert "fallback" in output
    assert "loaded " + str(tmp_path / "checkpoints" / "global_step2") in output


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, data_path):
    """The operating system rejects files of more than 60 kB, as a full disk would."""
    trained(tmp_path, data_path, train_iters=3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"global_step6.*OSError"):
            trained(tmp_path, data_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "global_step3",
        "latest",
    ]


@pytest.mark.parametrize(
    ("before", "after", "stage"), [("bfloat16", "fp32", 1), ("fp16", "bfloat16", 0)]
)
def test_resuming_in_another_precision(before, after, stage, tmp_path, data_path):
    """The fp32 weights or master weights are used, whatever the precision of the layers."""
    keys = {"zero_optimization": {"stage": stage}, "eval_iters": 0}
    trained(tmp_path / "uninterrupted", data_path, **keys, precision=before)
    copy_checkpoint(tmp_path / "uninterrupted", tmp_path / "resumed", 3)
    trained(tmp_path / "resumed", data_path, **keys, precision=after)
    expected = {
        step: loss for step, loss in metrics(tmp_path / "uninterrupted").items() if step > 3
    }
    assert metrics(tmp_path / "resumed") == pytest.approx(expected, abs=3e-2)
    masters = []
    for folder, kind in (("uninterrupted", before), ("resumed", after)):
        step = tmp_path / folder / "checkpoints/global_step6"
        state = torch.load(step / "optimizer_rank_00000.pt", weights_only=True)["parameters"][
            "positional.bias_p"
        ]
        layer = torch.load(step / "layer_02-model_00-model_states.pt", weights_only=True)[
            "attention.rpe.bias_p"
        ]
        masters.append(layer.flatten() if kind == "fp32" else state["master"])
    torch.testing.assert_close(*masters, atol=2e-3, rtol=0)
    assert not torch.equal(masters[0], masters[0].bfloat16().float())


def test_files_of_an_interrupted_save_are_removed(tmp_path, data_path):
    folder = tmp_path / "checkpoints"
    trained(tmp_path, data_path, train_iters=1)
    for steps, kept in ((1, ()), (3, ("global_step3",))):  # a finished run, and one that goes on
        shutil.rmtree(folder / "global_step2", ignore_errors=True)
        for name in ("global_step3.unfinished", ".global_step1.deleted", ".global_step2.replaced"):
            (folder / name).mkdir(parents=True)
            (folder / name / "file.pt").write_text("half")
        trained(tmp_path, data_path, train_iters=steps)
        # The checkpoint that was being replaced is restored.
        assert sorted(path.name for path in folder.iterdir()) == [
            "global_step1",
            "global_step2",
            *kept,
            "latest",
        ]


def test_a_checkpoint_without_optimizer_state(tmp_path, data_path, capsys):
    trained(tmp_path, data_path, no_save_optim=True)
    trained(tmp_path, data_path, train_iters=7, no_save_optim=False)
    assert "optimizer state not loaded: it was not saved" in unwrapped(capsys.readouterr().out)
    assert not list((tmp_path / "checkpoints/global_step6").glob("optimizer_*"))
    assert list((tmp_path / "checkpoints/global_step7").glob("optimizer_*"))
