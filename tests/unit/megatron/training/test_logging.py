"""The training log: console, metrics, TensorBoard, Weights & Biases, and the timing of
iterations.
"""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.checkpoint.directory import read_state_file
from megatron.checkpoint.state_dict import TrainingState
from megatron.config import Config
from megatron.training.engine import Engine
from megatron.training.logging import MAX_CONSECUTIVE_SKIPS, Logger, StepLog, profiled_steps
from megatron.training.loop import train
from tests.support.configs import make_config
from tests.support.errors import assert_rejected
from tests.support.runs import ROOT, metrics, trained, training_settings, unwrapped


def test_tensorboard_and_wandb_contain_the_metrics(
    tmp_path, data_path, monkeypatch, wandb_offline, capsys
):
    """Weights & Biases writes an offline run, and no file contains the API key."""
    secret = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    keys = {
        "tensorboard_dir": str(tmp_path / "tensorboard"),
        "use_wandb": True,
        "wandb_project": "extrapolation",
    }
    config = Config.from_flat(training_settings(tmp_path, data_path, **keys))
    config._flat["eval_include_path"] = [
        f"https://user:{secret}@example.org/tasks"
    ]  # not accepted from users
    train(config)

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == pytest.approx(metrics(tmp_path))
    tags = set(events.Tags()["scalars"])
    assert {
        "train/learning_rate",
        "train/grad_norm",
        "train/tokens_per_second",
        "train/memory_bytes",
    } <= tags
    assert {
        "validation/loss",
        "validation/perplexity",
        "kernel/bias_p/mean",
        "kernel/bias_a/max",
    } <= tags

    neox = [
        name
        for name, _ in re.findall(
            r"^\| `(\S+)` \| `(\S+)` \|$", (ROOT / "docs/monitoring.md").read_text(), re.M
        )
    ]
    assert len(neox) == 8
    assert set(neox) <= tags
    for name, ours in (("train/lm_loss", "train/loss"), ("validation/lm_loss", "validation/loss")):
        assert [event.value for event in events.Scalars(name)] == [
            event.value for event in events.Scalars(ours)
        ]
    for speed, seconds in zip(
        *map(events.Scalars, ("runtime/samples_per_sec", "runtime/iteration_time")), strict=True
    ):
        assert speed.value * seconds.value == pytest.approx(8)  # samples per step
    assert "train/lm_loss" not in (tmp_path / "logs" / "metrics.jsonl").read_text()

    (configuration,) = events.Tensors("configuration/text_summary")
    assert '"pos_emb": "kerple_log"' in configuration.tensor_proto.string_val[0].decode()

    (offline,) = wandb_offline.glob("offline-run-*")
    assert any(path.suffix == ".wandb" and path.stat().st_size > 1000 for path in offline.iterdir())
    console = capsys.readouterr().out
    assert "iteration 6/6 | lm loss" in console
    assert "bias_p: " in console
    for folder, _, files in os.walk(tmp_path):
        for name in files:
            with open(os.path.join(folder, name), "rb") as handle:
                assert secret.encode() not in handle.read(), name


@pytest.mark.parametrize(
    ("key", "package"), [("tensorboard_dir", "tensorboard"), ("use_wandb", "wandb")]
)
def test_missing_packages_are_named(tmp_path, data_path, monkeypatch, key, package):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    config = Config.from_flat(
        training_settings(tmp_path, data_path, **{key: "tb" if key != "use_wandb" else True})
    )
    logger = Logger(config, SimpleNamespace(is_main=True))
    assert_rejected(rf"{package}.*tracking", logger.start_metrics, TrainingState())
    logger.close()


def test_the_mfu_uses_the_configured_peak(tmp_path, data_path):
    """On a CPU there is no MFU without `peak_theoretical_tflops`."""
    keys = {"train_iters": 2, "eval_iters": 0, "save": None, "load": None}
    flops_per_token = []
    for tflops in (None, 0.5, 2.0):
        folder = tmp_path / str(tflops)
        trained(folder, data_path, **keys, peak_theoretical_tflops=tflops)
        mfu, rates = metrics(folder, "train/mfu"), metrics(folder, "train/tokens_per_second")
        assert bool(mfu) == (tflops is not None)
        if tflops is not None:
            flops_per_token.append(tflops * 1e12 * mfu[2] / rates[2])
    assert flops_per_token[0] == pytest.approx(flops_per_token[1])


def test_pauses_are_not_counted_as_training(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("megatron.training.logging.time.perf_counter", lambda: now[0])
    engine = SimpleNamespace(deepspeed=SimpleNamespace(skipped_steps=0))
    log = StepLog(None, engine, None, lambda _: 0.0, TrainingState())
    now[0] = 3.0
    with log.paused():
        now[0] = 100.0
    now[0] = 102.0
    with log.paused():
        assert log.seconds == pytest.approx(5.0)


def test_the_mean_loss_after_a_resume_covers_all_steps_since_the_last_line(tmp_path, data_path):
    keys = {"log_interval": 4, "train_iters": 8, "save_interval": 8, "eval_iters": 0}
    trained(tmp_path / "uninterrupted", data_path, **keys)
    trained(tmp_path / "resumed", data_path, **keys, exit_interval=6)
    trained(tmp_path / "resumed", data_path, **keys)
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "uninterrupted")
    assert list(metrics(tmp_path / "resumed")) == [4, 8]


def test_a_killed_and_resumed_run_is_one_curve(tmp_path, data_path, wandb_offline):
    """Steps that were trained twice appear once in TensorBoard, and Weights & Biases continues the
    run. Evaluating an earlier checkpoint drops no steps.
    """
    keys = {"tensorboard_dir": str(tmp_path / "tensorboard"), "use_wandb": True, "save_interval": 2}
    trained(tmp_path, data_path, **keys, train_iters=4)
    checkpoints = tmp_path / "checkpoints"
    shutil.rmtree(checkpoints / "global_step4")
    (checkpoints / "latest").write_text("global_step2")
    trained(tmp_path, data_path, **keys)
    del keys["use_wandb"]
    trained(tmp_path, data_path, **keys, train_iters=0, iteration=2, load=str(checkpoints))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    run = read_state_file(checkpoints / "global_step6")["training"]["run"]
    assert [run in path.name for path in wandb_offline.glob("offline-run-*")] == [True, True]
    assert {line["run"] for line in lines_of(tmp_path)[:-1]} == {run}


def lines_of(folder):
    return [
        json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    ]


def test_a_copied_run_is_a_new_one_and_a_moved_run_is_not(
    tmp_path, data_path, wandb_offline, capsys
):
    """Its curves do not continue those of the original, which may continue too."""
    keys = {"use_wandb": True, "save_interval": 2, "eval_iters": 0}
    trained(tmp_path / "run", data_path, **keys, train_iters=2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    capsys.readouterr()
    trained(tmp_path / "copy", data_path, **keys, train_iters=4)
    assert [
        line
        for line in unwrapped(capsys.readouterr().out).splitlines()
        if "copy of" in line and str(tmp_path / "run") in line
    ]
    (tmp_path / "run").rename(tmp_path / "moved")
    trained(tmp_path / "moved", data_path, **keys, train_iters=4)
    assert f"moved from {tmp_path / 'run'}" in unwrapped(capsys.readouterr().out)
    trained(tmp_path / "copy", data_path, **keys, train_iters=6)
    assert "notice" not in unwrapped(capsys.readouterr().out)
    (original,) = {line["run"] for line in lines_of(tmp_path / "moved")}
    first, second = dict.fromkeys(line["run"] for line in lines_of(tmp_path / "copy"))
    assert (first, len({original, second})) == (original, 2)
    # offline-run-DATE-ID, and -1 for a second one of the same second.
    names = [path.name.split("-")[3] for path in wandb_offline.glob("offline-run-*")]
    assert sorted(names) == sorted([original, original, second, second])


def test_several_runs_in_one_folder_of_logs(tmp_path, data_path, capsys):
    keys = {
        "log_dir": str(tmp_path / "logs"),
        "tensorboard_dir": str(tmp_path / "tb"),
        "eval_iters": 0,
    }
    trained(tmp_path / "a", data_path, **keys, train_iters=1)
    assert "notice" not in unwrapped(capsys.readouterr().out)
    trained(tmp_path / "b", data_path, **keys, train_iters=1)
    notices = [
        line
        for line in unwrapped(capsys.readouterr().out).splitlines()
        if line.startswith("notice")
    ]
    assert [line.split(":")[1].strip() for line in notices] == ["log-dir", "tensorboard-dir"]
    trained(tmp_path / "b", data_path, **keys, train_iters=2)
    assert "notice" not in unwrapped(capsys.readouterr().out)
    first, *others = (line["run"] for line in lines_of(tmp_path))
    assert others == [others[0]] * 2
    assert first != others[0]


def test_the_line_of_a_killed_run_does_not_swallow_the_next(tmp_path, data_path):
    keys = {"log_dir": str(tmp_path / "logs"), "eval_iters": 0}
    trained(tmp_path, data_path, **keys, train_iters=2)
    path = tmp_path / "logs" / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    trained(tmp_path, data_path, **keys, train_iters=4)
    lines = path.read_bytes().splitlines()
    assert lines[1] == content[:-20].splitlines()[-1]
    assert [json.loads(line)["iteration"] for line in lines if line != lines[1]] == [1, 3, 4]


def test_an_evaluation_does_not_write_to_save(tmp_path, data_path, wandb_offline):
    trained(tmp_path, data_path, train_iters=1)
    keys = {"use_wandb": True, "train_iters": 0, "load": str(tmp_path / "checkpoints")}
    trained(tmp_path, data_path, **keys, save=str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_lines_on_the_console_fit_a_terminal(tmp_path, capsys):
    """The file has them unbroken. A part that is too long by itself is not broken."""
    config = make_config(log_dir=str(tmp_path))
    logger = Logger(config, SimpleNamespace(is_main=True))
    parts = [
        "iteration 1,234,567/2,000,000",
        *(f"quantity {number} 1.2345e-06" for number in range(7)),
        "x" * 90,
        "end",
    ]
    logger.info(" | ".join(parts))
    logger.close()
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 or "x" * 90 in line for line in lines)
    assert [part for line in lines for part in line.strip().split(" | ")] == parts
    assert (tmp_path / "train.log").read_text().endswith(f" {' | '.join(parts)}\n")


def test_lines_of_a_run_fit_a_terminal(tmp_path, data_path, capsys):
    keys = {
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "extrapolation_lengths": [8, 16, 32, 64],
    }
    trained(
        tmp_path, data_path, train_iters=2, eval_interval=1, peak_theoretical_tflops=100, **keys
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if str(tmp_path) not in line]
    assert len(lines) > 8
    assert max(map(len, lines)) <= 80


# -- skipped steps
# --------------------------------------------------------------------------------------------------


def step_log(train_iters=1000, **precision):
    """The log of a run whose steps are given by `run`."""
    engine = SimpleNamespace(
        deepspeed=SimpleNamespace(skipped_steps=0), grad_norm=1.0, loss_scale=None
    )
    config = make_config(train_iters=train_iters, train_micro_batch_size_per_gpu=1, **precision)
    return StepLog(config, engine, None, lambda _: 0.0, TrainingState()), engine


def run(log, engine, steps, start=0):
    """Add steps of (loss, norm, loss scale after the step), and check every 10 steps and at the
    end.
    """
    for iteration, (loss, engine.grad_norm, engine.loss_scale) in enumerate(steps, start + 1):
        log.add(torch.tensor(loss))
        if iteration % 10 == 0:
            log.check(iteration)
    log.check(start + len(steps))


def test_the_speed_is_that_of_the_steps_of_this_process():
    """The losses of earlier steps are part of the mean loss only."""
    written = []
    logger = SimpleNamespace(info=lambda text: None, metrics=lambda *values: written.append(values))
    engine = SimpleNamespace(
        deepspeed=SimpleNamespace(skipped_steps=0),
        grad_norm=1.0,
        loss_scale=None,
        global_batch=4,
        layout=SimpleNamespace(device=torch.device("cpu"), world_size=1),
        kernel_statistics=dict,
    )
    config = make_config(train_iters=9, train_micro_batch_size_per_gpu=1)
    state = TrainingState(iteration=5, tokens=1000, unlogged_losses=[6.0, 6.0])
    log = StepLog(config, engine, logger, lambda _: 1.0, state)
    log.add(torch.tensor(3.0))
    log.seconds, log._started_at = 2.0, time.perf_counter()
    log.write(replace(state, iteration=6, tokens=1064), 0.1)
    ((values, iteration),) = written
    assert (iteration, values["train/loss"]) == (6, 5.0)
    assert values["train/seconds_per_step"] == pytest.approx(2.0, rel=0.1)
    assert values["train/samples_per_second"] == pytest.approx(2.0, rel=0.1)
    assert values["train/tokens_per_second"] == pytest.approx(32.0, rel=0.1)


@pytest.mark.parametrize("hysteresis", [1, 2, 100])
def test_the_descent_of_the_loss_scale_is_not_an_error(hysteresis):
    """From 2^32 to 1, as DeepSpeed lowers it: the hysteresis is used up once. Then training goes
    on.
    """
    log, engine = step_log(
        fp16={"enabled": True, "initial_scale_power": 32, "hysteresis": hysteresis}
    )
    descent = [2.0**32] * (hysteresis - 1) + [2.0**power for power in range(31, -1, -1)]
    run(log, engine, [(5.0, math.inf, scale) for scale in descent] + [(5.0, 1.0, 1.0)])
    assert log.skipped_steps == engine.deepspeed.skipped_steps == len(descent)


@pytest.mark.parametrize(
    ("fp16", "scale", "message"),
    [
        ({"loss_scale": 2.0**40}, 2.0**40, r"fp16.loss_scale"),
        ({}, 1.0, r"fp16.min_loss_scale"),
        (None, None, r"gradient_clipping"),
    ],
)
def test_too_many_consecutive_skipped_steps_stop_the_run(fp16, scale, message):
    precision = {"precision": "bfloat16"} if fp16 is None else {"fp16": {"enabled": True, **fp16}}
    for norm in (math.inf, torch.tensor(math.nan)):
        log, engine = step_log(**precision)
        skipped = [(5.0, norm, scale)] * MAX_CONSECUTIVE_SKIPS
        # A step that is not skipped starts a new count.
        run(log, engine, [(5.0, 1.0, scale), *skipped, (5.0, 1.0, scale), *skipped])
        assert log.skipped_steps == 2 * MAX_CONSECUTIVE_SKIPS
        assert_rejected(rf"33 steps up to 67.*{message}", run, log, engine, skipped[:1], start=66)


FP16 = {"enabled": True, "initial_scale_power": 30}
SKIPPED = [(5.0, math.inf, 2.0**power) for power in (30, 29, 28, 27, 26)]


@pytest.mark.parametrize(
    ("keys", "skipped", "steps", "message"),
    [
        ({"train_iters": 5, "fp16": FP16}, 0, SKIPPED, r"5.*fp16\.initial_scale_power.*30"),
        # Also if the earlier steps were skipped before the run was resumed.
        ({"train_iters": 9, "fp16": FP16}, 4, SKIPPED, "all 9 steps were skipped"),
        # After the loss scale has reached its end.
        ({"fp16": {"enabled": True}}, 0, [(math.nan, math.inf, 1.0)] * 34, "at iteration 34;"),
        ({"precision": "bfloat16"}, 0, [(math.nan, 1.0, None)], "at iteration 1;"),
    ],
)
def test_steps_that_end_a_run(keys, skipped, steps, message):
    log, engine = step_log(**keys)
    log.skipped_steps = skipped
    assert_rejected(message, run, log, engine, steps, start=skipped)


@pytest.mark.ci
def test_fp16_that_never_updates_is_not_a_success(tmp_path, data_path):
    """A loss scale of 2^40: the gradients of every step overflow."""
    keys = {
        "fp16": {"enabled": True, "loss_scale": 2.0**40},
        "train_iters": 50,
        "log_interval": 10,
        "eval_iters": 0,
    }
    assert_rejected(r"fp16\.loss", trained, tmp_path, data_path, save_interval=None, **keys)
    assert not list((tmp_path / "checkpoints").glob("global_step*"))
    assert metrics(tmp_path, "train/skipped_steps") == {10: 10.0, 20: 20.0, 30: 30.0}
    assert "skipped steps 30" in (tmp_path / "logs" / "train.log").read_text()


def test_the_minimum_loss_scale_is_tolerated_for_some_steps(tmp_path, data_path, monkeypatch):
    """DeepSpeed would raise an Exception at the first overflow at the minimum."""
    step = Engine.train_step

    def overflowing(engine, batches, learning_rate, iteration):
        factor = float("inf") if iteration in (1, 2) else 1.0
        handle = next(engine.model.parameters()).register_hook(lambda gradient: gradient * factor)
        loss = step(engine, batches, learning_rate, iteration)
        handle.remove()
        return loss

    monkeypatch.setattr(Engine, "train_step", overflowing)
    keys = {"fp16": {"enabled": True, "initial_scale_power": 0, "hysteresis": 1}}
    trained(tmp_path, data_path, **keys)
    assert list(metrics(tmp_path, "train/skipped_steps").values()) == [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]


def test_a_log_that_cannot_be_written_to(tmp_path, data_path, monkeypatch):
    """/dev/full fails as a full disk does, but passes the check at startup because it is a file."""
    log = tmp_path / "logs"
    log.mkdir()
    (log / "metrics.jsonl").symlink_to("/dev/full")
    assert_rejected(r"log-dir.*logs/metrics\.jsonl", trained, tmp_path, data_path)


def test_output_without_a_reader_asks_to_stop_once(tmp_path, data_path, monkeypatch):
    config = Config.from_flat(training_settings(tmp_path, data_path))
    received, logger = [], Logger(config, SimpleNamespace(is_main=True))
    monkeypatch.setattr(signal, "raise_signal", received.append)
    reader, writer = os.pipe()
    with open(writer, "w") as stream, contextlib.closing(logger):
        monkeypatch.setattr(sys, "stdout", stream)
        logger.info("read")
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)
        for _ in range(3):
            logger.info("lost")
    assert received == [signal.SIGHUP]
    assert (tmp_path / "logs" / "train.log").read_text().count("lost") == 3


def test_a_profiled_run(tmp_path, data_path):
    """Iterations 3 and 4 of 6: forward and backward, in a trace and the log."""
    keys = {"profile": True, "profile_step_start": 2, "profile_step_stop": 4}
    trained(tmp_path, data_path, eval_iters=0, save_interval=None, **keys)
    (trace,) = (tmp_path / "logs").glob("rank_0.*.pt.trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert sorted(name for name in set(names) if name.startswith("ProfilerStep")) == [
        "ProfilerStep#2",
        "ProfilerStep#3",
    ]
    assert "GeluBackward0" in names
    assert any("Input Dims" in event.get("args", {}) for event in events)
    log = (tmp_path / "logs" / "train.log").read_text()
    assert "profile: iterations 3 to 4; traces" in log


def recorded(tmp_path, iteration, total):
    """The lines, and the steps in the trace, of a run from `iteration` to `total`; steps 3 and 4
    are to be profiled.
    """
    logging = SimpleNamespace(
        profile=True,
        profile_step_start=3,
        profile_step_stop=5,
        tensorboard_dir=str(tmp_path),
        log_dir=None,
    )
    layout = SimpleNamespace(rank=1)
    lines = []
    with profiled_steps(SimpleNamespace(logging=logging), layout, iteration, lines.append) as step:
        for index in range(iteration, total):
            with torch.profiler.record_function(f"step {index}"):
                torch.ones(2).sum()
            step()
    traces = list(tmp_path.glob("rank_1.*.json"))
    events = json.loads(traces[0].read_text())["traceEvents"] if traces else []
    return lines, sorted({event["name"] for event in events if event["name"].startswith("step ")})


@pytest.mark.parametrize(
    ("iteration", "total", "steps", "line"),
    [
        (0, 7, ["step 3", "step 4"], "profile: iterations 4 to 5;"),
        (4, 7, ["step 4"], "profile: iterations 5 to 5;"),  # resumed
        (
            5,
            7,
            [],
            "profile: no step is profiled, because training resumes after profile_step_stop 5",
        ),
        (0, 4, ["step 3"], "profile: iterations 4 to 4;"),  # stopped by a signal
    ],
)
def test_steps_are_counted_from_iteration_0(tmp_path, iteration, total, steps, line):
    lines, profiled = recorded(tmp_path, iteration, total)
    assert profiled == steps
    assert lines[0].startswith(line)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"profile_step_start": 4, "profile_step_stop": 4},
            "profile_step_stop 4.*profile_step_start",
        ),
        ({}, "profile_step_start 10.*train_iters.*6"),
        (
            {"profile_step_start": 6, "profile_step_stop": 9},
            "profile_step_start 6.*train_iters.*6",
        ),
        ({"profile_step_start": 1, "log_dir": None}, "neither is set; set one of them"),
    ],
)
def test_contradictions(tmp_path, keys, message):
    assert_rejected(
        message, Config.from_flat, training_settings(tmp_path, "nowhere", profile=True, **keys)
    )
    Config.from_flat(training_settings(tmp_path, "nowhere", profile=True, train_iters=0))
