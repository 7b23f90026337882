"""Step times from training logs and benchmark files."""

import json

import pytest

from megatron.reporting.speed import benchmark_tables, step_time_tables, step_times
from megatron.reporting.training_log import read_log
from megatron.utils.errors import UserError
from tests.support.checkpoints import write_checkpoint
from tests.support.records import record


def line(iteration: int, rate: float) -> str:
    return json.dumps({"iteration": iteration, "train/tokens_per_second": rate, "train/tokens": float(iteration * 256)})


def test_seconds_per_step_from_logs(tmp_path):
    log = tmp_path / "logs" / "metrics.jsonl"
    log.parent.mkdir()
    lines = [line(5, 10.0), line(10, 256.0), line(15, 512.0), line(20, 1024.0), json.dumps({"iteration": 20}), '{"cut']
    log.write_text("\n".join(lines))
    assert read_log(log) == (0.5, 512.0), "the median without the first line"
    log.write_text(line(5, 128.0))
    assert read_log(log) == (2.0, 128.0)
    checkpoints = tmp_path / "checkpoints"
    write_checkpoint(checkpoints, "alibi", "nowhere")
    records = [record("alibi", 32, 3.0, checkpoint={"path": str(checkpoints), "iteration": 4}), record("rpe", 32, 3.0)]
    records.append(record("rpe", 64, 3.0, checkpoint={"path": "x" * 4000, "iteration": 4}))
    times = step_times(records)
    assert [(time.pos_emb, time.seconds, time.model) for time in times] == [("alibi", 2.0, (2, 32, 32))]
    (table,) = step_time_tables(times)
    assert table.columns == ("ALiBi",)
    assert [row.cells[0].text for row in table.rows] == ["2.000"], "no published row for another model size"
    log.write_text("")
    assert read_log(log) is None
    log.unlink()
    assert step_times(records) == []


def test_published_step_times(tmp_path):
    from megatron.reporting.speed import StepTime

    times = [
        StepTime("github", name, seed, 0.3 + seed / 10, (12, 768, 512)) for name in ("rpe", "x") for seed in (1, 2)
    ]
    (table,) = step_time_tables(times)
    assert table.columns == ("T5", "x")
    assert [[cell.text for cell in row.cells] for row in table.rows] == [["0.4500 ± 0.0707"] * 2, ["0.340", ""]]
    assert table.notes[-1] == 'Rows labeled "paper": KERPLE (arXiv 2205.09921), Table 4, on one A100.'


def test_benchmark_numbers(tmp_path):
    rows = [{"name": "plain PyTorch", "median": 0.5, "ratio": 1.0}, {"name": "alibi", "median": 0.6, "ratio": 1.2}]
    content = {"hardware": {"processor": "A processor"}, "tables": {"a step": rows, "nothing": []}}
    (tmp_path / "train_step.json").write_text(json.dumps(content))
    (table,) = benchmark_tables(tmp_path / "train_step.json")
    assert (table.name, table.title, table.columns) == ("train_step-1", "A step", ("plain PyTorch", "ALiBi"))
    assert [(row.labels, [cell.text for cell in row.cells]) for row in table.rows] == [
        (("sec/step",), ["0.5000", "0.6000"]),
        (("ratio to plain PyTorch",), ["1.000", "1.200"]),
    ]
    rows[0]["seconds"], rows[1]["seconds"] = [1.0, 2.0, 1.0], [2.0, 2.0, 4.0]
    (tmp_path / "train_step.json").write_text(json.dumps(content))
    (table,) = benchmark_tables(tmp_path / "train_step.json")
    assert [cell.text for cell in table.rows[1].cells] == ["1.000", "2.000"], "of the pairs, and not of the medians"
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UserError, match=r"other\.json.*benchmarks/train_step"):
        benchmark_tables(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"iteration": "5"}', r"metrics\.jsonl.*2: iteration.*'5'"),
        ('{"iteration": 5, "train/tokens": Infinity}', "2: train/tokens"),
    ],
)
def test_wrong_values_in_a_log(tmp_path, text, message):
    log = tmp_path / "metrics.jsonl"
    log.write_text(f"{line(5, 128.0)}\n{text}\n")
    with pytest.raises(UserError, match=message):
        read_log(log)
    log.write_text(f'{line(5, 128.0)}\n{{"iter\n{{"iteration": 3, "train/loss": NaN}}\n')
    assert read_log(log) == (2.0, 128.0)
