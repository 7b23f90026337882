"""Options shared by evaluate.py and generate.py: which checkpoint, device and
tokenizer are used.
"""

import argparse
import json
import os
import shutil

import pytest
import torch

from kerple.positional.rotary import Rotary
from megatron.cli.model_options import (
    checkpoint_folders,
    chosen_step,
    first_process,
    load,
    parse_with_checkpoint,
    saved_config,
)
from megatron.config import Config
from tests.support.checkpoints import settings_of, write_checkpoint, write_yaml
from tests.support.errors import assert_rejected


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with checkpoints of iterations 4 and 8; `latest` names 8."""
    folder = tmp_path_factory.mktemp("run")
    for iteration in (4, 8):
        write_checkpoint(folder, "rotary", "nowhere", iteration=iteration)
    return folder


def parse(*arguments):
    return parse_with_checkpoint(
        "test", [str(argument) for argument in arguments], lambda parser: None
    )


def configured(**keys):
    return Config.from_flat(settings_of("rotary", "nowhere", **keys))


def test_a_checkpoint_in_the_home_folder(run, monkeypatch):
    monkeypatch.setenv("HOME", str(run.parent))
    _, options = parse(f"--checkpoint=~/{run.name}")
    assert options.checkpoint == [str(run)]


def test_a_checkpoint_without_configuration_files(run):
    config, options = parse(
        "--checkpoint", run, "--set", "seed=3", "pos-emb-options={scaling: linear, factor: 4}"
    )
    assert options.from_checkpoint
    assert options.checkpoint == [str(run)]
    assert (config.model.pos_emb, config.training.seed) == ("rotary", 3)
    assert saved_config(run / "global_step8", config, options).model.pos_emb_options == {
        "scaling": "linear",
        "factor": 4,
    }
    assert chosen_step(run, config, options).name == "global_step8"


def test_options_of_the_method_are_merged_with_those_of_the_checkpoint(tmp_path):
    """--set changes some of them; those that configuration files leave out are at
    their defaults.
    """
    write_checkpoint(
        tmp_path,
        "rotary",
        "nowhere",
        pos_emb_options={"fraction": 0.5, "scaling": "linear", "factor": 2},
    )
    step = tmp_path / "global_step4"
    for words in (["pos-emb-options={factor: 8}"], ["pos-emb-options.factor=8"]):
        config, options = parse("--checkpoint", tmp_path, "--set", *words)
        options = saved_config(step, config, options).model.positional_options
        assert (options["fraction"], options["scaling"], options["factor"]) == (0.5, "linear", 8)
    words = ["pos-emb-options=null", "pos-emb-options.fraction=0.5"]
    options = saved_config(
        step, *parse("--checkpoint", tmp_path, "--set", *words)
    ).model.positional_options
    assert (options["fraction"], options["scaling"]) == (0.5, Rotary.default_options()["scaling"])
    reset = parse("--checkpoint", tmp_path, "--set", "pos-emb-options=null")
    assert_rejected("fraction.*rotary", saved_config, step, *reset)
    keys = settings_of("rotary", "nowhere", load=str(tmp_path), pos_emb_options={"fraction": 0.5})
    options = saved_config(
        step, *parse(write_yaml(tmp_path / "a.yml", keys))
    ).model.positional_options
    assert (options["fraction"], options["scaling"]) == (0.5, Rotary.default_options()["scaling"])


def test_methods_of_layers(tmp_path):
    """In the list, only the options that evaluation can change may be new; null removes them."""
    trained = {"methods": [{"rotary": {"fraction": 0.5}}, {"alibi": {"random_range": 64}}]}
    write_checkpoint(tmp_path, "per_layer", "nowhere", pos_emb_options=trained)
    for scaling, random in (
        ({"scaling": "linear", "factor": 4}, {"random_length": 50}),
        ({}, {"random_range": None}),
    ):
        methods = [
            {"rotary": {"fraction": 0.5, **scaling}},
            {"alibi": {"random_range": 64, **random}},
        ]
        word = f"pos-emb-options.methods={json.dumps(methods)}"
        config, options = parse("--checkpoint", tmp_path, "--set", word)
        assert saved_config(tmp_path / "global_step4", config, options).model.pos_emb_options == {
            "methods": methods
        }
        config = Config.from_flat(
            settings_of("per_layer", "nowhere", pos_emb_options={"methods": methods})
        )
        options.from_checkpoint, options.overrides = False, {}
        assert saved_config(tmp_path / "global_step4", config, options).model.pos_emb_options == {
            "methods": methods
        }
    for methods in ([{"rotary": {"fraction": 0.25}}, "alibi"], ["rotary"]):
        config, options = parse(
            "--checkpoint", tmp_path, "--set", f"pos-emb-options.methods={json.dumps(methods)}"
        )
        assert_rejected(
            "pos_emb.*per_layer.*random_length",
            saved_config,
            tmp_path / "global_step4",
            config,
            options,
        )


def test_configuration_files(run, tmp_path, capsys):
    config, options = parse(
        write_yaml(tmp_path / "a.yml", settings_of("rotary", "nowhere", load=str(run), iteration=4))
    )
    assert not options.from_checkpoint
    assert checkpoint_folders(config, options) == [run]
    assert chosen_step(run, config, options).name == "global_step4"
    assert "--iteration 8" in capsys.readouterr().err
    options.iteration = 8
    assert chosen_step(run, config, options).name == "global_step8"
    assert capsys.readouterr().err == ""


def test_the_folder_with_a_checkpoint(run, tmp_path, capsys):
    options = argparse.Namespace(checkpoint=[], iteration=None)
    assert checkpoint_folders(configured(load=str(tmp_path), save=str(run)), options) == [run]
    assert checkpoint_folders(configured(load=str(run), save=f"{run}/."), options) == [run]
    assert capsys.readouterr().err == ""
    # Both have one, as after finetune.
    tuned = tmp_path / "tuned"
    shutil.copytree(run, tuned)
    assert checkpoint_folders(configured(load=str(run), save=str(tuned)), options) == [run]
    assert f"--checkpoint {tuned}" in capsys.readouterr().err
    assert_rejected('--checkpoint DIR.*"load".*"save"', checkpoint_folders, configured(), options)
    assert_rejected(
        "empty and unmade", checkpoint_folders, configured(load="empty", save="unmade"), options
    )
    assert_rejected(
        "no checkpoint in ", checkpoint_folders, configured(save=str(tmp_path)), options
    )


@pytest.mark.parametrize("supported", [False, True])
def test_a_dtype_that_is_slow_on_this_processor(supported, run, monkeypatch, capsys):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    config, options = parse("--checkpoint", run, "--device", "cpu", "--precision", "bf16")
    load(run / "global_step8", config, options)
    assert ("no fast matrix products in bf16" in capsys.readouterr().err) != supported


def test_another_model_is_rejected(run):
    _, options = parse("--checkpoint", run)
    options.from_checkpoint = False
    assert_rejected(
        "num_layers.*2.*3", saved_config, run / "global_step8", configured(num_layers=3), options
    )
    assert (
        saved_config(
            run / "global_step8", configured(num_layers=3), options, check=False
        ).model.num_layers
        == 2
    )


def test_ranks_of_slurm_with_only_a_checkpoint(run, monkeypatch):
    variables = {"PROCID": "1", "LOCALID": "1", "STEP_NUM_TASKS": "2", "STEP_NODELIST": "n[1-2]"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    followed = []
    monkeypatch.setattr(
        "megatron.launcher.script_arguments.follow_launcher", lambda: followed.append(True)
    )
    parse("--checkpoint", run, "--set", "deepspeed_slurm=true")
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")] == [
        "1",
        "1",
        "2",
        "n1",
    ]
    assert followed == [True]


def test_only_rank_0_does_the_work(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert not first_process()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert first_process()
    assert "runs in one process; the other 3 exit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ("iteration=4", "iteration"),
        ("fallback=true", "fallback"),
        ("precision=bfloat16", "precision"),
        ("fp16.enabled=true", "precision"),
    ],
)
def test_set_does_not_replace_options(run, change, option):
    key = change.partition("=")[0]
    assert_rejected(f"--set {key}.*--{option}", parse, "--checkpoint", run, "--set", change)
