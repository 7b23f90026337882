"""Keys about checkpoints: fallback, async-save, checkpoint-validation-with-forward-pass, another precision."""

import json
import resource
import shutil
import threading

import pytest
import torch

from megatron.checkpoint import saving
from megatron.checkpoint.directory import find_damage, saved_iterations, write_manifest_of_folder
from megatron.checkpoint.storage import CheckpointError
from megatron.cli.evaluate import main as evaluate
from megatron.config import Config
from megatron.training.loop import train
from tests.support.runs import go_back, metrics, run, training_settings, weights


def trained(folder, data_path, **keys):
    return train(Config.from_flat(training_settings(folder, data_path, **keys)))


def damage(folder, iteration, name="layer_03-model_00-model_states.pt"):
    file = folder / "checkpoints" / f"global_step{iteration}" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_fallback_takes_the_newest_whole_checkpoint(tmp_path, data_path, capsys):
    trained(tmp_path, data_path)
    expected, losses = weights(tmp_path, 6), metrics(tmp_path)
    damage(tmp_path, 6)
    with pytest.raises(CheckpointError, match=r"layer_03.*iteration 3; use it with --fallback"):
        trained(tmp_path, data_path)
    trained(tmp_path, data_path, fallback=True)
    assert "fallback: the checkpoint is damaged" in capsys.readouterr().out
    assert metrics(tmp_path) == losses
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path, 6).items())


def test_fallback_option_of_evaluate_and_train(tmp_path, data_path, capsys):
    settings = training_settings(tmp_path, data_path, train_iters=3, save_interval=1)
    trained(tmp_path, data_path, train_iters=3, save_interval=1)
    damage(tmp_path, 3)
    config = tmp_path / "evaluate.yml"
    config.write_text(json.dumps({key: value for key, value in settings.items() if key != "save"}))
    with pytest.raises(CheckpointError, match=r"layer_03.*use it with --fallback"):
        evaluate([str(config), "--lengths", "32"])
    capsys.readouterr()
    evaluate([str(config), "--lengths", "32", "--fallback"])
    assert "global_step2: kerple_log" in capsys.readouterr().err
    output = run(tmp_path, settings, "--fallback")
    assert "fallback" in output
    assert "loaded " + str(tmp_path / "checkpoints" / "global_step2") in output


@pytest.mark.parametrize("precision", ["fp32", "bfloat16"])
def test_saved_in_the_background_is_what_is_saved_at_once(precision, tmp_path, data_path, capsys):
    keys = {"precision": precision, "save_interval": 1, "eval_iters": 0}
    trained(tmp_path / "at once", data_path, **keys)
    trained(tmp_path / "behind", data_path, **keys, async_save=True)
    assert capsys.readouterr().out.count("saved ") == 12
    for iteration in range(1, 7):
        step = tmp_path / "behind/checkpoints" / f"global_step{iteration}"
        assert find_damage(step) is None
        for file in sorted(step.glob("*.pt")):
            ours, theirs = (
                torch.load(path, weights_only=True)
                for path in (file, tmp_path / "at once/checkpoints" / step.name / file.name)
            )
            assert_equal(ours, theirs)


def assert_equal(ours, theirs):
    if torch.is_tensor(theirs):
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_equal(ours[name], theirs[name])
    elif isinstance(theirs, list | tuple):
        for pair in zip(ours, theirs, strict=True):
            assert_equal(*pair)
    else:
        assert ours == theirs


def test_training_goes_on_while_the_disk_is_slow(tmp_path, data_path, monkeypatch):
    """The writer waits until the next step was trained, which never comes if training waits for the writer."""
    trained_on = threading.Event()
    write = saving.write_files

    def slow(folder, files):
        assert trained_on.wait(timeout=30)
        return write(folder, files)

    monkeypatch.setattr(saving, "write_files", slow)
    from megatron.training.engine import Engine

    step = Engine.train_step

    def watched(self, *arguments):
        loss = step(self, *arguments)
        if self.engine.global_steps == 4:  # the save after step 3 is on its way
            trained_on.set()
        return loss

    monkeypatch.setattr(Engine, "train_step", watched)
    trained(tmp_path, data_path, async_save=True, eval_iters=0)
    assert saved_iterations(tmp_path / "checkpoints") == [3, 6]


def test_error_in_the_background_is_told_and_keeps_the_last_checkpoint(tmp_path, data_path, monkeypatch):
    trained(tmp_path, data_path)
    write = saving.save_file

    def full(path, value, **options):
        if "layer_05" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, value, **options)

    monkeypatch.setattr(saving, "save_file", full)
    with pytest.raises(CheckpointError, match=r"global_step9.*No space left.*saved checkpoints are unchanged"):
        trained(tmp_path, data_path, train_iters=12, async_save=True)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["global_step3", "global_step6", "latest"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_disk_is_told_and_keeps_the_last_checkpoint(asynchronous, tmp_path, data_path):
    """A real one: the system refuses to make files longer than 60 kB."""
    trained(tmp_path, data_path, train_iters=3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"global_step6.*OSError: .*File too large.*saved checkpoints are unchanged"
        ):
            trained(tmp_path, data_path, async_save=asynchronous)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["global_step3", "latest"]


@pytest.mark.parametrize("layout", [{}, {"num_gpus": 2, "pipe_parallel_size": 2}], ids=["one", "pipeline"])
def test_forward_pass_is_compared_after_loading(layout, ranks, tmp_path, data_path):
    keys = {"checkpoint_validation_with_forward_pass": True, "padded_vocab_size": 512, "eval_iters": 0}
    trained(tmp_path, data_path, **keys)
    if layout:
        output = ranks.train(training_settings(tmp_path, data_path, **keys, **layout, train_iters=7))
        assert "logits match the saved ones" in output
        assert (tmp_path / "checkpoints/global_step7/forward_pass.pt").is_file()
    # The same sizes, and another model: weights whose file was exchanged.
    step = tmp_path / "checkpoints/global_step6"
    (tmp_path / "checkpoints/latest").write_text("global_step6")
    shutil.copy(step / "layer_02-model_00-model_states.pt", step / "layer_03-model_00-model_states.pt")
    write_manifest_of_folder(step, 6)
    with pytest.raises(CheckpointError, match=r"forward_pass\.pt: .*differ .* by \d"):
        trained(tmp_path, data_path, **{**keys, "train_iters": 8})


@pytest.mark.parametrize(("before", "after"), [("bfloat16", "fp32"), ("fp32", "bfloat16"), ("fp16", "bfloat16")])
@pytest.mark.parametrize("stage", [0, 1])
def test_resumed_in_another_precision(before, after, stage, tmp_path, data_path):
    """The float32 weights go on, whatever the format that the layers run in."""
    keys = {"zero_optimization": {"stage": stage}, "eval_iters": 0}
    trained(tmp_path / "whole", data_path, **keys, precision=before)
    go_back(tmp_path / "whole", tmp_path / "resumed", 3)
    trained(tmp_path / "resumed", data_path, **keys, precision=after)
    expected = {step: loss for step, loss in metrics(tmp_path / "whole").items() if step > 3}
    assert metrics(tmp_path / "resumed") == pytest.approx(expected, abs=3e-2)
    masters = []
    for folder, kind in (("whole", before), ("resumed", after)):
        step = tmp_path / folder / "checkpoints/global_step6"
        state = torch.load(step / "optimizer_rank_00000.pt", weights_only=True)["parameters"]["positional.bias_p"]
        layer = torch.load(step / "layer_02-model_00-model_states.pt", weights_only=True)["attention.rpe.bias_p"]
        masters.append(layer.flatten() if kind == "fp32" else state["master"])
    torch.testing.assert_close(*masters, atol=2e-3, rtol=0)
    assert not torch.equal(masters[0], masters[0].bfloat16().float())


def test_change_of_the_data_is_told(tmp_path, data_path, capsys):
    trained(tmp_path, data_path)
    trained(tmp_path, data_path, train_iters=8)
    assert "order of the training samples" not in capsys.readouterr().out
    trained(tmp_path, data_path, train_iters=9, split="7,2,1")
    assert "order of the training samples differs from the checkpoint" in capsys.readouterr().out


def test_change_of_the_global_batch_is_told(tmp_path, data_path, capsys):
    trained(tmp_path, data_path)
    state = trained(tmp_path, data_path, train_iters=7, train_batch_size=4)
    assert "saved with 8 samples per step, this run uses 4" in capsys.readouterr().out
    assert state.consumed_samples == 6 * 8 + 4


def test_leftovers_of_a_killed_save_are_removed(tmp_path, data_path):
    folder = tmp_path / "checkpoints"
    for name in ("global_step3.unfinished", ".global_step1.deleted", ".global_step2.replaced"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file.pt").write_text("half")
    trained(tmp_path, data_path, train_iters=3)
    # What was set aside is put back: its checkpoint was not yet replaced.
    assert sorted(path.name for path in folder.iterdir()) == ["global_step2", "global_step3", "latest"]


def test_configuration_of_the_checkpoint_loads_as_it_is(tmp_path, data_path):
    trained(tmp_path, data_path, train_iters=3)
    saved = json.loads((tmp_path / "checkpoints/global_step3/configs/config.yml").read_text())
    assert Config.from_flat(saved).model.pos_emb == "kerple_log"
