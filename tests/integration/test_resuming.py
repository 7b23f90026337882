"""Resuming, finetuning, and the checkpoints of a run, in this process."""

import json
import re
import shutil

import numpy as np
import pytest
import torch

from megatron.checkpoint.directory import saved_iterations
from megatron.checkpoint.manifest import write_manifest_of_folder
from megatron.checkpoint.storage import CheckpointError
from megatron.cli.evaluate import main as evaluate
from megatron.data.datasets import CorpusPart
from megatron.training.distributed import DistributedSignalHandler
from tests.support.checkpoints import write_corpus
from tests.support.errors import assert_rejected
from tests.support.runs import copy_checkpoint, metrics, trained, unwrapped, weights


def assert_same_end(resumed, uninterrupted):
    """Losses and weights after iteration 3 are equal bit for bit."""
    expected = {step: loss for step, loss in metrics(uninterrupted).items() if step > 3}
    assert metrics(resumed) == expected
    assert metrics(resumed, "validation/loss")[6] == metrics(uninterrupted, "validation/loss")[6]
    tensors, expected_tensors = weights(resumed, 6), weights(uninterrupted, 6)
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize(
    "keys",
    [
        {"precision": "fp32", "hidden_dropout": 0.1},
        {"precision": "fp16"},
        {
            "pos_emb": "dape_kerple",
            "precision": "bfloat16",
            "attention_dropout": 0.1,
            "checkpoint_activations": True,
            "checkpoint_num_layers": 1,
        },
    ],
    ids=["fp32", "fp16", "dape_kerple"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(keys, tmp_path, data_path):
    keys = {"gradient_accumulation_steps": 2, **keys}
    uninterrupted = trained(tmp_path / "uninterrupted", data_path, **keys)
    copy_checkpoint(uninterrupted, tmp_path / "resumed", 3)
    assert_same_end(trained(tmp_path / "resumed", data_path, **keys), uninterrupted)


def test_resuming_with_another_accumulation(default_run, tmp_path, data_path):
    """After 3 iterations of one micro-batch, every iteration has two."""
    copy_checkpoint(default_run, tmp_path / "resumed", 3)
    trained(tmp_path / "resumed", data_path, gradient_accumulation_steps=2)
    for name in ("train/loss", "train/grad_norm"):
        expected = {step: value for step, value in metrics(default_run, name).items() if step > 3}
        assert metrics(tmp_path / "resumed", name) == pytest.approx(expected, rel=1e-4)


def test_resuming_with_smaller_batches_reads_the_next_samples(tmp_path, data_path, monkeypatch):
    """Although it has read more samples than a run with these batches needs in total."""
    read, sample = [], CorpusPart.sample

    def recorded(dataset, index):
        if "(train)" in dataset.name:
            read.append(index)
        return sample(dataset, index)

    monkeypatch.setattr(CorpusPart, "sample", recorded)
    keys = {"eval_iters": 0, "save_interval": 4}
    trained(tmp_path, data_path, train_iters=4, train_batch_size=16, **keys)
    trained(tmp_path, data_path, train_iters=8, train_batch_size=8, **keys)
    assert read == list(range(4 * 16 + 4 * 8))


def test_a_dynamic_loss_scale_continues(tmp_path, data_path):
    """That of the first run, 2^8 at first, doubles every other iteration. A constant one is not
    continued.
    """
    first = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    trained(tmp_path / "first", data_path, fp16=first, eval_iters=0)
    for keys, scale in (({"loss_scale": 128}, 128), ({}, 2**11)):
        folder = tmp_path / str(scale)
        copy_checkpoint(tmp_path / "first", folder, 6)
        trained(folder, data_path, fp16=first | keys, eval_iters=0, train_iters=7)
        assert metrics(folder, "train/loss_scale")[7] == scale
    trained(
        tmp_path / "bf16",
        data_path,
        precision="bfloat16",
        zero_optimization={"stage": 2},
        eval_iters=0,
    )
    trained(
        tmp_path / "bf16",
        data_path,
        fp16=first,
        zero_optimization={"stage": 2},
        eval_iters=0,
        train_iters=7,
    )
    assert metrics(tmp_path / "bf16", "train/loss_scale")[7] == 2**8


def test_checkpoints_of_a_run_that_validates_at_a_shorter_length(tmp_path, data_path):
    options = {"random_range": 128}
    trained(
        tmp_path,
        data_path,
        pos_emb="rotary",
        pos_emb_options=options,
        seq_length_val=8,
        train_iters=2,
    )
    assert saved_iterations(tmp_path / "checkpoints") == [2]


def test_extra_checkpoints(tmp_path, data_path):
    keys = {
        "precision": "bfloat16",
        "save_interval": None,
        "extra_save_iters": [0, 1],
        "train_iters": 3,
        "eval_iters": 0,
    }
    trained(tmp_path, data_path, **keys)
    assert saved_iterations(tmp_path / "checkpoints") == [0, 1, 3]
    copy_checkpoint(tmp_path, tmp_path / "resumed", 0)
    trained(tmp_path / "resumed", data_path, **keys)
    assert all(
        torch.equal(tensor, weights(tmp_path, 3)[name])
        for name, tensor in weights(tmp_path / "resumed", 3).items()
    )


@pytest.mark.parametrize(
    ("keys", "kept"),
    [({"extra_save_iters": [0, 1]}, [0, 1, 6]), ({"checkpoint_scale": "log"}, [1, 2, 4, 6])],
)
def test_requested_checkpoints_are_not_deleted(keys, kept, tmp_path, data_path):
    trained(tmp_path, data_path, **keys, save_interval=2, keep_last_n_checkpoints=1, eval_iters=0)
    assert saved_iterations(tmp_path / "checkpoints") == kept


def test_checkpoints_that_an_earlier_part_of_the_run_requested_are_not_deleted(
    tmp_path, data_path, capsys
):
    """Their own configuration requests them, the present one does not."""
    common = {"save_interval": 1, "keep_last_n_checkpoints": 1, "eval_iters": 0}
    trained(tmp_path, data_path, **common, extra_save_iters=[2], train_iters=3)
    capsys.readouterr()
    trained(tmp_path, data_path, **common, train_iters=5)
    assert saved_iterations(tmp_path / "checkpoints") == [2, 5]
    lines = unwrapped(capsys.readouterr().out).splitlines()
    deleted = [line for line in lines if line.startswith("deleted")]
    assert [line.partition("global_step")[2].split()[0] for line in deleted] == ["3", "4"]


def test_a_checkpoint_whose_configuration_cannot_be_read_is_kept_alone(tmp_path, data_path, capsys):
    common = {"save_interval": 1, "keep_last_n_checkpoints": 2, "eval_iters": 0}
    trained(tmp_path, data_path, **common, train_iters=2)
    (path,) = (tmp_path / "checkpoints" / "global_step1" / "configs").iterdir()
    path.write_text('{"no-such-key": 1}')
    trained(tmp_path, data_path, **common, train_iters=5)
    assert saved_iterations(tmp_path / "checkpoints") == [1, 4, 5]
    assert "global_step1 is not deleted" in unwrapped(capsys.readouterr().out)


def rebuilt(data_path, prefix):
    """A dataset at `prefix` with the token ids of `data_path` in another order."""
    for suffix in (".bin", ".idx"):
        shutil.copyfile(f"{data_path}{suffix}", f"{prefix}{suffix}")
    ids = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
    (ids[0:50], ids[400:450]) = (ids[400:450].copy(), ids[0:50].copy())
    ids.tofile(f"{prefix}.bin")


def test_data_that_changed_since_the_checkpoint(tmp_path, data_path, capsys):
    """Another path is what the user asks for; the same path with other contents is not."""
    own, other = (str(tmp_path / name) for name in ("own", "other"))
    rebuilt(data_path, own)
    keys = {"eval_iters": 0, "save_interval": 1}
    trained(tmp_path, own, **keys, train_iters=1)
    rebuilt(own, other)
    trained(tmp_path, other, **keys, train_iters=2)
    assert f"notice: the run continues with {other}" in unwrapped(capsys.readouterr().out)
    rebuilt(data_path, other)
    spelled = f"{tmp_path}/./other"
    for path in (other, spelled):
        assert_rejected(
            f"global_step2.*{path}.*allow_other_data",
            trained,
            tmp_path,
            path,
            **keys,
            train_iters=3,
        )
    trained(tmp_path, own, **keys, train_iters=3)
    trained(tmp_path, other, **keys, train_iters=4, allow_other_data=True)
    # Its validation documents may have been training documents before.
    capsys.readouterr()
    for save in ("checkpoints", "tuned"):
        places = {"load": str(tmp_path / "checkpoints"), "save": str(tmp_path / save)}
        options = {**places, "finetune": save == "tuned", "train_iters": 5, "eval_iters": 1}
        trained(tmp_path, other, **{**keys, **options})
        assert f"other contents of {other}" in unwrapped(capsys.readouterr().out)
    # A new run from the weights begins its data anew.
    rebuilt(data_path, own)
    trained(tmp_path, own, **keys, train_iters=1, finetune=True, save=str(tmp_path / "new"))


def test_relative_paths_are_those_of_the_training(tmp_path, data_path, monkeypatch, capsys):
    """In another folder, the same relative path is another dataset."""
    keys = {"eval_iters": 0, "save_interval": 1}
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, source in ((first, data_path), (second, first / "text" / "own")):
        (folder / "text").mkdir(parents=True)
        rebuilt(source, folder / "text" / "own")

    monkeypatch.chdir(first)
    trained(tmp_path, "text/own", **keys, train_iters=1)
    monkeypatch.chdir(second)
    capsys.readouterr()
    words = ["--checkpoint", str(tmp_path / "checkpoints"), "--lengths", "32", "--tokens", "64"]
    evaluate([*words, "--output", str(tmp_path / "report")])
    assert re.search(f"notice: .*{second}/text/own", capsys.readouterr().out)
    trained(tmp_path, "text/own", **keys, train_iters=2)
    assert "notice: the run continues with text/own" in unwrapped(capsys.readouterr().out)

    # Each of the two is known by its own path.
    monkeypatch.chdir(first)
    trained(tmp_path, "text/own", **keys, train_iters=3)
    assert "notice: the run continues" not in unwrapped(capsys.readouterr().out)
    write_corpus(second / "text", documents=70)
    for file in (second / "text").glob("text_document.*"):
        file.replace(file.with_name(f"own{file.suffix}"))
    trained(tmp_path, str(first / "text" / "own"), **keys, train_iters=4)
    path = f"{first}/../second/text/own"
    assert_rejected(re.escape(path), trained, tmp_path, path, **keys, train_iters=5)


def test_a_split_that_validates_on_what_was_trained(tmp_path, data_path, capsys):
    keys = {"eval_iters": 1, "train_iters": 1, "split": "8,1,1"}
    trained(tmp_path, data_path, **keys)
    new = {**keys, "finetune": True, "load": str(tmp_path / "checkpoints")}
    trained(tmp_path, data_path, **new, save=str(tmp_path / "tuned"))
    assert "may have been trained" not in unwrapped(capsys.readouterr().out)
    new = {**new, "load": str(tmp_path / "tuned"), "split": "2,7,1"}
    for train_iters in (0, 1):
        save = str(tmp_path / f"last{train_iters}")
        trained(tmp_path, data_path, **{**new, "train_iters": train_iters, "save": save})
        output = unwrapped(capsys.readouterr().out)
        assert re.search("valid data: .*tuned.*may have been trained", output)
        assert "test data" not in output


def test_a_branch_of_a_run_replaces_its_later_checkpoints(
    finished_run, tmp_path, data_path, capsys
):
    keys = {"optimizer": {"type": "Adam", "params": {"lr": 0.001}}, "seed": 9}
    trained(tmp_path, data_path, eval_iters=0, iteration=3, **keys)
    notice = [
        line
        for line in unwrapped(capsys.readouterr().out).splitlines()
        if "notice" in line and "replaces" in line
    ]
    assert len(notice) == 1
    assert "(6)" in notice[0]
    assert saved_iterations(tmp_path / "checkpoints") == [3, 6]
    assert metrics(tmp_path, "train/learning_rate")[6] < 0.001


@pytest.mark.parametrize("keys", [{"iteration": 3}, {"no_load_optim": True}])
def test_the_same_command_resumes_a_branch(keys, finished_run, tmp_path, data_path):
    """Although it loads the folder that it saves to."""
    keys = {**keys, "eval_iters": 0, "save_interval": 1, "train_iters": 8}
    trained(tmp_path, data_path, **keys, exit_interval=7 if "no_load_optim" in keys else 4)
    trained(tmp_path, data_path, **keys, exit_interval=7)
    trained(tmp_path, data_path, **keys)
    first = 3 if "iteration" in keys else 6
    assert saved_iterations(tmp_path / "checkpoints") == sorted({3, *range(first, 9)})
    losses = [
        json.loads(line) for line in (tmp_path / "logs/metrics.jsonl").read_text().splitlines()
    ]
    steps = [line["iteration"] for line in losses if "train/loss" in line]
    assert steps == [*range(1, 7), *range(first + 1, 9)], "no step is repeated"


def test_a_finished_run_is_not_trained_again(finished_run, tmp_path, data_path, capsys):
    before = weights(tmp_path, 6)
    trained(tmp_path, data_path)
    output = unwrapped(capsys.readouterr().out)
    assert "iteration 6" in output
    assert (
        output.count("batch: 8 sequences = 1 data-parallel rank x 8 x 1 accumulation step\n") == 1
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path, 6).items())
    assert output.count("nothing to train") == 1
    lines = [
        json.loads(line) for line in (tmp_path / "logs/metrics.jsonl").read_text().splitlines()
    ]
    for name in ("validation/loss", "test/loss"):
        losses = [line[name] for line in lines if name in line and line["iteration"] == 6]
        assert losses[0] == losses[1]


def test_fewer_iterations_than_the_checkpoint_has_are_an_error(finished_run, tmp_path, data_path):
    assert_rejected(r"train-iters: 4.*6.*global_step6", trained, tmp_path, data_path, train_iters=4)


def test_finetuning_loads_only_the_weights(default_run, tmp_path, data_path):
    keys = {"load": str(default_run / "checkpoints"), "finetune": True}
    trained(tmp_path / "finetuned", data_path, **keys)
    first, finetuned = metrics(default_run), metrics(tmp_path / "finetuned")
    assert list(finetuned) == [1, 2, 3, 4, 5, 6]
    assert finetuned[1] < first[1] - 0.5
    assert_rejected(
        "finetune",
        trained,
        tmp_path / "none",
        data_path,
        load=str(tmp_path / "nothing"),
        finetune=True,
    )


@pytest.mark.parametrize("folder", ["first", "finetuned"])
def test_the_same_command_resumes_finetuning(folder, tmp_path, data_path, capsys):
    """Also if it saves to the folder of the checkpoint that it starts from."""
    trained(tmp_path / "first", data_path, eval_iters=0, save_interval=6)
    keys = {
        "load": str(tmp_path / "first/checkpoints"),
        "finetune": True,
        "iteration": 6,
        "eval_iters": 0,
    }
    trained(tmp_path / folder, data_path, **keys, train_iters=2)
    assert "finetune: weights from" in unwrapped(capsys.readouterr().out)
    trained(tmp_path / folder, data_path, **keys, train_iters=4)
    output = unwrapped(capsys.readouterr().out)
    assert output.count("already contains checkpoints of this run, which resumes from them") == 1
    assert "global_step2: iteration 2, 16 samples read" in output
    assert "finetune: weights from" not in output


def test_finetuning_never_replaces_its_source(tmp_path, data_path, monkeypatch):
    """Nor if `exit-interval` or a signal ends it at the iteration of the source."""
    trained(tmp_path, data_path, eval_iters=0, save_interval=6)
    source = weights(tmp_path, 6)
    keys = {"finetune": True, "eval_iters": 0, "train_iters": 20, "save_interval": 4}
    with pytest.raises(CheckpointError, match="global_step6"):
        trained(tmp_path, data_path, **keys, exit_interval=6)
    assert saved_iterations(tmp_path / "checkpoints") == [6]
    steps = iter(range(1, 20))
    monkeypatch.setattr(
        DistributedSignalHandler, "received_by_any_rank", lambda self, stop: next(steps) == 6
    )
    with pytest.raises(CheckpointError, match="global_step6"):
        trained(tmp_path, data_path, **keys)
    assert saved_iterations(tmp_path / "checkpoints") == [4, 6]
    assert all(torch.equal(tensor, source[name]) for name, tensor in weights(tmp_path, 6).items())


def test_finetuning_does_not_resume_another_run(tmp_path, data_path, monkeypatch, capsys):
    keys = {"eval_iters": 0, "train_iters": 1}
    for name in ("first", "other"):
        trained(tmp_path / name, data_path, **keys)
    load, save = (str(tmp_path / name / "checkpoints") for name in ("first", "other"))
    with pytest.raises(
        CheckpointError, match=r"save: .*other.* of another run, .* not started from load: .*first"
    ):
        trained(tmp_path / "other", data_path, **keys, load=load, save=save, finetune=True)
    # `save` is `load`, spelled differently, and contains the run to start from.
    monkeypatch.chdir(tmp_path)
    keys |= {"load": "first/checkpoints", "finetune": True, "save_interval": 2}
    before = weights(tmp_path / "first", 1)
    with pytest.raises(CheckpointError, match="global_step1"):
        trained(tmp_path / "first", data_path, **keys)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path / "first", 1).items()
    )
    (tmp_path / "first/checkpoints/global_step1").rename(
        tmp_path / "first/checkpoints/global_step5"
    )
    write_manifest_of_folder(tmp_path / "first/checkpoints/global_step5", 5)
    (tmp_path / "first/checkpoints/latest").write_text("global_step5")
    trained(tmp_path / "first", data_path, **keys)
    assert "finetune: weights from" in unwrapped(capsys.readouterr().out)
    assert saved_iterations(tmp_path / "first/checkpoints") == [1, 5]


@pytest.mark.parametrize(
    "keys",
    [{"load": "first", "iteration": 3, "no_load_optim": True}, {"load": None}],
    ids=["another folder", "none"],
)
def test_the_same_command_resumes_from_save(keys, default_run, tmp_path, data_path, capsys):
    """Also if `load` names another folder, or none. A run that started in another way
    is an error.
    """
    first = str(default_run / "checkpoints")
    keys = {**keys, "load": keys["load"] and first, "eval_iters": 0, "save_interval": 1}
    trained(tmp_path / "whole", data_path, **keys)
    trained(tmp_path / "resumed", data_path, **keys, exit_interval=5)
    capsys.readouterr()
    trained(tmp_path / "resumed", data_path, **keys)
    output = unwrapped(capsys.readouterr().out)
    assert output.count("already contains checkpoints of this run, which resumes from them") == 1
    assert "global_step5: iteration 5, 40 samples read" in output
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "whole")
    before = weights(tmp_path / "resumed", 6)
    other = {
        **keys,
        "load": str(tmp_path / "whole/checkpoints"),
        "iteration": 5,
        "no_load_optim": False,
    }
    for changed in (other, {**other, "load": first, "iteration": None}):
        with pytest.raises(CheckpointError, match=r"save: .*load: "):
            trained(tmp_path / "resumed", data_path, **changed)
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in weights(tmp_path / "resumed", 6).items()
    )


@pytest.mark.parametrize("keys", [{"load": None}, {"finetune": True}])
def test_two_models_cannot_save_to_one_folder(keys, tmp_path, data_path):
    trained(tmp_path / "first", data_path, train_iters=1, eval_iters=0)
    trained(tmp_path / "second", data_path, train_iters=1, eval_iters=0, pos_emb="none")
    load, save = (str(tmp_path / name / "checkpoints") for name in ("first", "second"))
    with pytest.raises(
        CheckpointError, match=r"save: .*second.*already contains checkpoints of another run"
    ):
        trained(tmp_path / "second", data_path, **{"load": load, "save": save, **keys})
    with pytest.raises(CheckpointError, match="another run"):
        trained(tmp_path / "second", data_path, hidden_size=64, pos_emb="none", load=None)


def test_iteration_selects_the_checkpoint(finished_run, tmp_path, data_path):
    expected = metrics(tmp_path)
    trained(tmp_path, data_path, iteration=3, save=None, log_dir=str(tmp_path / "again" / "logs"))
    assert metrics(tmp_path / "again") == {step: expected[step] for step in (4, 5, 6)}
    assert_rejected(r"iteration 4.*3, 6", trained, tmp_path, data_path, iteration=4)


def test_a_changed_data_order_is_reported(finished_run, tmp_path, data_path, capsys):
    trained(tmp_path, data_path, train_iters=8)
    assert "order of the training samples" not in unwrapped(capsys.readouterr().out)
    trained(tmp_path, data_path, train_iters=9, split="7,2,1")
    assert "order of the training samples differs from the checkpoint" in unwrapped(
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"pos_emb": "learned"}, {"pos_emb": "kerple_log", "precision": "bfloat16"}),
        (
            {"pos_emb": "kerple", "pos_emb_options": {"bias": "log"}},
            {"pos_emb_options": {"bias": "log + power"}},
        ),
    ],
)
def test_finetuning_with_another_positional_method(before, after, tmp_path, data_path, capsys):
    """At a learning rate of 0: the method's parameters are those of a new model, all other weights
    are unchanged.
    """
    trained(tmp_path / "before", data_path, **before, eval_iters=0)
    frozen = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.0}},
        "train_iters": 1,
        "eval_iters": 0,
    }
    new = {**before, **after, **frozen, "seed": 3}
    trained(tmp_path / "new", data_path, **new)
    capsys.readouterr()
    load = str(tmp_path / "before/checkpoints")
    trained(tmp_path / "after", data_path, **new, load=load, finetune=True)
    log = unwrapped(capsys.readouterr().out)
    name = new["pos_emb"]
    assert (
        log.count(f"the checkpoint's positional parameters are not used; those of {name} are new")
        == 1
    )
    assert log.count("the new model differs from the one it starts from: ") == 1
    old, started, expected = (
        weights(tmp_path / "before", 6),
        weights(tmp_path / "after", 1),
        weights(tmp_path / "new", 1),
    )
    assert started.keys() == expected.keys()
    for key, tensor in started.items():
        source = expected if "/attention.rpe." in key or "/position_embeddings." in key else old
        assert torch.equal(tensor, source[key].to(tensor.dtype)), key
    # Resuming the new run is not finetuning: its own method is loaded.
    resumed = {**new, "train_iters": 2, "load": str(tmp_path / "after/checkpoints")}
    trained(tmp_path / "after", data_path, **resumed)
    assert "the checkpoint's positional" not in unwrapped(capsys.readouterr().out)
