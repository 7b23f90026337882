"""Resuming from a checkpoint with malicious or malformed files, and from one of another model."""

import copy
import json
import re
import shutil

import pytest
import torch

from megatron.checkpoint import loading
from megatron.checkpoint.loading import checkpoint_vocab_size
from megatron.checkpoint.manifest import write_manifest_of_folder
from megatron.checkpoint.storage import CheckpointError, load_file
from megatron.config import Config, UserError
from megatron.tokenizer.tokenizer import padded_vocab_size
from tests.support.checkpoints import Exploit, settings_of, write_checkpoint
from tests.support.runs import unwrapped

FILES = [
    "layer_02-model_00-model_states.pt",
    "mp_rank_00_model_states.pt",
    "optimizer_rank_00000.pt",
    "random_rank_00000.pt",
]


@pytest.fixture
def step(trained_run, tmp_path):
    """The last checkpoint in a copy of the run, which `resume` continues."""
    return shutil.copytree(trained_run / "checkpoints", tmp_path / "checkpoints") / "global_step2"


@pytest.fixture
def replace_file(step):
    """Replace the contents of a file in the last checkpoint; the manifest is updated."""

    def replace(name, change):
        torch.save(change(copy.deepcopy(load_file(step / name))), step / name)
        write_manifest_of_folder(step, 2)

    return replace


@pytest.mark.parametrize("name", FILES)
def test_a_malicious_file_is_rejected_by_name(name, replace_file, resume, tmp_path):
    replace_file(name, lambda content: {**content, "extra": Exploit(tmp_path / "written")})
    with pytest.raises(CheckpointError, match=rf"{name}: rejected.*exec"):
        resume()
    assert not (tmp_path / "written").exists()


def without(name):
    return lambda content: {key: value for key, value in content.items() if key != name}


def with_a_new_entry(content):
    return {**content, "training": {**content["training"], "new_entry": 1}}


def without_a_parameter(content):
    return {**content, "parameters": without("positional.bias_p")(content["parameters"])}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "layer_00-model_00-model_states.pt",
            lambda _: {"word_embeddings.weight": 3},
            "layer_00-model_00-model_states.pt: .*weight of type int, not",
        ),
        (
            "mp_rank_00_model_states.pt",
            lambda _: [1],
            "mp_rank_00_model_states.pt: contains a list instead of a dictionary",
        ),
        (
            "mp_rank_00_model_states.pt",
            without("training"),
            "mp_rank_00_model_states.pt: the entry training is missing",
        ),
        ("mp_rank_00_model_states.pt", with_a_new_entry, "mp_rank_00_model_states.*new_entry"),
        ("optimizer_rank_00000.pt", without_a_parameter, r"positional\.bias_p"),
    ],
)
def test_malformed_data_is_named(name, change, message, replace_file, resume):
    replace_file(name, change)
    with pytest.raises(CheckpointError, match=message):
        resume()


def test_a_checkpoint_without_a_configuration_is_compared_by_size_only(step, resume, capsys):
    shutil.rmtree(step / "configs")
    write_manifest_of_folder(step, 2)
    assert resume().iteration == 3
    assert "only its sizes are compared with the configured model" in unwrapped(
        capsys.readouterr().out
    )


@pytest.mark.parametrize("finetune", [False, True])
def test_a_checkpoint_with_configurations_of_two_models(finetune, step, resume, tmp_path, capsys):
    more = step / "configs" / "zz.yml"
    more.write_text('{"weight-decay": 0.7, "pos_emb": "kerple_log"}')
    write_manifest_of_folder(step, 2)
    keys = {"finetune": finetune, "save": str(tmp_path / "other")}
    resume(**keys)
    notice = r'notice: .*"weight-decay" is 0\.0 in config\.yml:\d+, 0\.7 in zz\.yml:1;'
    assert re.search(notice, unwrapped(capsys.readouterr().out))
    more.write_text('{"pos-emb": "none"}')
    write_manifest_of_folder(step, 2)
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(UserError, match=r'"pos-emb" is .*kerple_log.*none.*Keep only the files'):
        resume(**keys)
    assert not list((tmp_path / "other").glob("global_step*"))


def test_another_model_of_the_same_sizes(step, resume):
    with pytest.raises(CheckpointError, match="gpt_j_residual"):
        resume(gpt_j_residual=True)
    finetune = {"finetune": True, "save": None}
    assert resume(gpt_j_residual=True, train_iters=1, **finetune).iteration == 1


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"pos_emb": "test_elsewhere"}, "pos_emb test_elsewhere in the checkpoint, kerple_log"),
        ({"pos_emb_options": {"earlier": 2}}, r"pos_emb kerple_log \(earlier 2\) in the"),
    ],
)
def test_a_method_that_is_not_registered_here(method, message, step, resume, capsys, tmp_path):
    """Its parameters may have the names and shapes of the configured one's, or others."""
    path = step / "configs" / "config.yml"
    path.write_text(json.dumps(json.loads(path.read_text()) | method))
    write_manifest_of_folder(step, 2)
    with pytest.raises(CheckpointError, match=message):
        resume()
    assert not (step.parent / "global_step3").exists()

    # The parameters are those of a new run.
    still = {"optimizer": {"type": "Adam", "params": {"lr": 0.0}}, "train_iters": 1}
    layer = "global_step1/layer_02-model_00-model_states.pt"
    resume(**still, finetune=True, save=str(tmp_path / "finetuned"))
    assert "positional parameters are not used" in unwrapped(capsys.readouterr().out)
    resume(**still, load=None, save=str(tmp_path / "new"))
    finetuned, new = load_file(tmp_path / "finetuned" / layer), load_file(tmp_path / "new" / layer)
    for name, tensor in finetuned.items():
        assert torch.equal(tensor, new[name]) == name.startswith("attention.rpe.") or "norm" in name

    # Parameters of other names.
    resume(**still, finetune=True, save=None, pos_emb="kerple_power")


def test_the_state_of_another_optimizer(step, resume, capsys):
    lion = {"optimizer": {"type": "Lion", "params": {"lr": 0.001}}}
    for keys, name in ((lion, "lion"), ({"use_bnb_optimizer": True}, "adam8bit")):
        with pytest.raises(CheckpointError, match=rf"optimizer\.type adam.*{name}"):
            resume(**keys)
    assert resume(**lion, no_load_optim=True).iteration == 3
    assert "optimizer state not loaded: no-load-optim" in unwrapped(capsys.readouterr().out)


def test_a_training_that_changes_is_reported(step, resume, tmp_path, capsys):
    """One line names every key. The same training, and a new one from the weights, print none."""
    text = "the run differs from the checkpoint's configuration"
    keys = {
        "eod_mask_loss": True,
        "attention_dropout": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.005, "betas": [0.9, 0.95]}},
        "seed": 3,
        "log_interval": 2,
    }
    resume(train_iters=3)
    resume(train_iters=4)
    resume(**keys, train_iters=1, finetune=True, save=None)
    assert text not in unwrapped(capsys.readouterr().out)
    resume(**keys, train_iters=5)
    (line,) = [line for line in unwrapped(capsys.readouterr().out).splitlines() if text in line]
    folder = step.parent / "global_step4"
    assert line == (
        f"notice: {folder}: {text}: attention_dropout 0.1 here, 0.0 there; eod_mask_loss True "
        "here, False there; optimizer.params.betas [0.9, 0.95] here, [0.9, 0.999] there"
    )


def test_the_directory_without_checkpoint(resume, tmp_path, capsys):
    with pytest.raises(CheckpointError, match="no checkpoint to finetune from"):
        resume(finetune=True)
    assert resume(train_iters=1, save=None).iteration == 1
    assert "contains no checkpoint; training starts from scratch" in unwrapped(
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("keys", "tokens", "ranks", "expected"),
    [
        ({"make_vocab_size_divisible_by": 256}, 500, 2, 512),
        ({"make_vocab_size_divisible_by": 512}, 500, 4, 512),
        ({"make_vocab_size_divisible_by": 16}, 500, 2, 512),
        (
            {"make_vocab_size_divisible_by": 16},
            513,
            1,
            "its vocabulary is padded to 512 .* set padded_vocab_size to 512",
        ),
        (
            {"make_vocab_size_divisible_by": 12},
            200,
            1,
            "its vocabulary is padded to 512 .* set padded_vocab_size to 512",
        ),
        (
            {"make_vocab_size_divisible_by": 256},
            500,
            3,
            "cannot be split over model_parallel_size 3",
        ),
        ({"padded_vocab_size": 1024}, 500, 2, 1024),
    ],
)
def test_the_padding_of_the_checkpoints_vocabulary_is_kept(
    keys, tokens, ranks, expected, trained_run
):
    """The checkpoint has 512 rows."""
    config, step = (
        Config.from_flat(settings_of("kerple_log", "nowhere", **keys)),
        trained_run / "checkpoints/global_step2",
    )
    reports = []
    if isinstance(expected, int):
        assert checkpoint_vocab_size(step, config, tokens, ranks, reports.append) == expected
        own = padded_vocab_size(tokens, config.model.make_vocab_size_divisible_by, ranks)
        assert len(reports) == ("padded_vocab_size" not in keys and own != expected)
    else:
        with pytest.raises(CheckpointError, match=expected):
            checkpoint_vocab_size(step, config, tokens, ranks, reports.append)


@pytest.mark.parametrize(("iteration", "schedule"), [(0, "neox"), (4, "neox-2022")])
def test_the_schedule_after_a_checkpoint_of_another_program(
    iteration, schedule, resume, data_path, tmp_path
):
    """A converted model, of iteration 0, has not begun the release's schedule."""
    write_checkpoint(tmp_path / "converted", "kerple_log", data_path, iteration=iteration)
    keys = {"load": str(tmp_path / "converted"), "save": None}
    assert resume(**keys, train_iters=iteration + 1).lr_schedule == schedule


def test_another_folder_is_another_run(resume, step, tmp_path):
    states = [resume(), resume(save=str(tmp_path / "other"), load=str(step.parent), iteration=2)]
    assert [state.lineage for state in states] == [[1, 2, 3], [3]]
    assert states[0].run != states[1].run


def test_hosts_with_different_checkpoints_are_an_error(trained_run, resume, tmp_path, monkeypatch):
    monkeypatch.setattr(
        loading, "run_on_all_ranks", lambda function: [function(), b"another manifest"]
    )
    with pytest.raises(CheckpointError, match=r"load: .*iteration 2 on all hosts"):
        resume(load=str(trained_run / "checkpoints"))


def test_load_without_latest_does_not_start_from_scratch(step, resume):
    (step.parent / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoints: .*`latest`.*1, 2.*iteration 2"):
        resume()
    with pytest.raises(CheckpointError, match=r"save: .*`latest`"):
        resume(load=None)
    with pytest.raises(CheckpointError, match="global_step2"):
        resume(load=str(step), save=None)
    assert resume(fallback=True).iteration == 3


def test_code_in_a_checkpoints_configuration_is_not_run(step, resume, tmp_path):
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    config = json.loads((step / "configs" / "config.yml").read_text())
    (step / "configs" / "config.yml").write_text(
        json.dumps({**config, "pos_emb_module": str(tmp_path / "trap.py")})
    )
    write_manifest_of_folder(step, 2)
    assert resume().iteration == 3
    assert not (tmp_path / "sprung").exists()
