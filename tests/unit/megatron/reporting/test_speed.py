"""Step times from training logs."""

import json
import math

import torch

from megatron.checkpoint.configuration import checkpoint_config
from megatron.checkpoint.manifest import weights_fingerprint
from megatron.checkpoint.recipe import training_recipe
from megatron.reporting.speed import StepTime, step_time_tables, step_times
from megatron.reporting.training_log import seconds_per_step
from tests.support.checkpoints import write_checkpoint
from tests.support.records import record


def line(iteration: int, rate: float, tokens_per_step: float = 256, **keys: object) -> str:
    values = {
        "train/loss": math.nan,
        "train/tokens_per_second": rate,
        "train/seconds_per_step": tokens_per_step / rate,
    }
    return json.dumps({**keys, "iteration": iteration, **values})


def test_seconds_per_step_from_logs(tmp_path):
    log = tmp_path / "logs" / "metrics.jsonl"
    log.parent.mkdir()
    lines = [
        '{"itera{"iteration": 3}',
        line(5, 10.0),
        line(10, 256.0),
        line(15, 512.0),
        line(20, 1024.0),
    ]
    lines += [json.dumps({"iteration": 20}), line(25, 9.0)[:-3]]
    log.write_text("\n".join(lines))
    assert seconds_per_step(log) == 0.5, "the median without the first line"
    log.write_text(line(5, 128.0))
    assert seconds_per_step(log) == 2.0
    checkpoints = tmp_path / "checkpoints"
    write_checkpoint(checkpoints, "alibi", "nowhere")
    records = [
        record("alibi (fp32)", 32, 3.0, checkpoint={"path": str(checkpoints), "iteration": 4}),
        record("rpe", 32, 3.0),
    ]
    records.append(record("rpe", 64, 3.0, checkpoint={"path": "x" * 4000, "iteration": 4}))
    times = step_times(records, [])
    # The records are of another text than the training.
    assert [(time.corpus, time.pos_emb, time.seconds, time.model) for time in times] == [
        ("nowhere", "alibi (fp32)", 2.0, (2, 32, 32))
    ]
    (table,) = step_time_tables(times)
    assert table.columns == ("ALiBi (fp32)",)
    assert [row.cells[0].text for row in table.rows] == ["2.000"], (
        "no published row for another model size"
    )
    log.write_text("")
    assert seconds_per_step(log) is None
    log.unlink()
    assert step_times(records, []) == []


def test_only_the_lines_of_the_run_count(tmp_path):
    """Of several runs in one log-dir, and of a run that was resumed with other batches."""
    write_checkpoint(tmp_path / "checkpoints", "alibi", "nowhere")
    state = tmp_path / "checkpoints" / "global_step4" / "mp_rank_00_model_states.pt"
    torch.save({"iteration": 4, "training": {"run": "second"}}, state)
    second = [line(step, 1024.0, 1024, run="second") for step in (1, 2, 3)] + [
        line(4, 1024.0, 4096, run="second")
    ]
    first, last = ([line(step, 64.0, run=run) for step in range(1, 9)] for run in ("first", "last"))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "metrics.jsonl").write_text(
        "\n".join([line(1, 32.0), *first, *second, *last])
    )
    evaluated = record(
        "alibi", 32, 3.0, checkpoint={"path": str(tmp_path / "checkpoints"), "iteration": 4}
    )
    assert [time.seconds for time in step_times([evaluated], [])] == [1.0]
    assert seconds_per_step(tmp_path / "logs" / "metrics.jsonl") == 8.0, (
        "of an earlier version, without a run"
    )
    assert seconds_per_step(tmp_path / "logs" / "metrics.jsonl", "first") == 4.0
    assert seconds_per_step(tmp_path / "logs" / "metrics.jsonl", "third") is None


def test_a_run_that_was_continued_with_other_batches(tmp_path):
    """The batches of most lines count."""
    log = tmp_path / "metrics.jsonl"
    before = [line(step, 512.0, 1024) for step in range(1, 4)]
    after = [line(step, 2048.0, 8192) for step in range(4, 9)]
    log.write_text("\n".join(before + after))
    assert seconds_per_step(log) == 4.0


def test_a_folder_that_was_trained_anew_has_no_time(tmp_path):
    write_checkpoint(tmp_path / "checkpoints", "rotary", "nowhere")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "metrics.jsonl").write_text("\n".join([line(1, 32.0), line(2, 32.0)]))
    step = tmp_path / "checkpoints" / "global_step4"
    recipe = training_recipe(step, checkpoint_config(step))
    fingerprint = weights_fingerprint(step)
    # Iteration 3 is no longer there.
    for iteration, found, used, is_same in (
        (4, fingerprint, recipe, True),
        (4, fingerprint, "of --set", True),
        (4, "other", recipe, False),
        (3, "other", recipe, True),
        (3, "other", "other", False),
    ):
        notes: list[str] = []
        checkpoint = {"path": str(tmp_path / "checkpoints"), "iteration": iteration}
        checkpoint |= {"fingerprint": found, "recipe": used}
        seed = checkpoint_config(step).training.seed
        times = step_times([record("alibi", 32, 3.0, seed, checkpoint=checkpoint)], notes)
        assert len(times) == is_same
        assert [str(tmp_path) in note for note in notes] == [True] * (not is_same)


def test_published_step_times():
    measured = [(name, seconds) for name in ("rpe", "x") for seconds in (0.4, 0.5)]
    times = [StepTime("github", name, seconds, (12, 768, 512)) for name, seconds in measured]
    (table,) = step_time_tables(times)
    assert table.columns == ("T5", "x")
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        ["0.4500 ± 0.0707"] * 2,
        ["0.340", ""],
    ]
    assert (
        table.notes[-1] == 'Rows labeled "paper": KERPLE (arXiv 2205.09921), Table 4, on one A100.'
    )
