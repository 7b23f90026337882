"""Running a sweep: order, failures, devices and signals, with fake trainings and evaluations."""

import json
import re
import shutil
import signal

import pytest

from megatron.cli import sweep as command
from megatron.evaluation.records import read_results
from megatron.sweep import runner
from megatron.utils.processes import Lock
from tests.support.errors import assert_rejected
from tests.support.sweeps import FakeProcess, fake_start_process, logged_iterations, write_sweep

SEEDS = {"pos_emb": ["kerple_log.yml", "alibi.yml"], "seed": [{"seed": 7}, {"seed": 13}]}


def test_finished_runs_are_not_run_again(sweep):
    sweep.write_reports = True
    output = sweep()
    assert "2 runs, 0 of them already finished" in output
    assert "[2/2] alibi/7: finished" in output
    assert (sweep.report / "report.html").is_file()
    table = (sweep.report / "tables" / "kerple-3-2x32-32-non-overlapping.md").read_text()
    assert "| 32 | **2.770** | **2.770** |" in table.splitlines()
    before = {path: path.read_bytes() for path in sweep.runs.rglob("*") if path.is_file()}
    assert "2 of them already finished" in sweep()
    assert {path: path.read_bytes() for path in sweep.runs.rglob("*") if path.is_file()} == before


def test_a_failed_run_is_reported_and_the_sweep_continues(sweep):
    output = sweep(axes=SEEDS, status=1)
    assert output.count("FAILED in training (exit status 3)") == 2
    assert "    the loss is not finite" in output
    assert f"failed: alibi/13 in training: {sweep.runs / 'alibi' / '13' / 'output.log'}" in output
    assert "[2/4, 2 failed] alibi/13" in output
    assert "report of 2 of 4 runs" in output
    for name in ("kerple_log/7", "alibi/7"):
        assert len(list((sweep.runs / name / "evaluation").glob("*.jsonl"))) == 1
    # The failed runs are retried, the finished ones are not.
    assert "4 runs, 2 of them already finished" in sweep(axes=SEEDS, status=1)
    assert len(sweep.output_lines("alibi/7")) == 2


def test_a_run_with_a_failed_evaluation_is_not_finished(sweep):
    axes = {"seed": [{"seed": 19, "pos-emb": "alibi", "name": "19"}]}
    assert "FAILED in evaluation (exit status 1)" in sweep(axes=axes, status=1)
    assert "19 in evaluation" in sweep(axes=axes, status=1)
    assert sweep.output_lines("19").count("training from 0, GPU None") == 1
    assert "report of" not in sweep(axes=axes, status=1)


def test_results_of_former_options_and_labels_are_not_reported(sweep):
    def measured():
        return {
            (record["pos_emb"], record["length"]) for record in read_results(sweep.runs / "alibi")
        }

    axes = {"pos_emb": ["alibi.yml"], "lr": [{"optimizer.params.lr": 0.1}], "seed": [{"seed": 7}]}
    sweep(axes=axes)
    sweep(axes=axes, evaluation={"lengths": [32], "tokens": 256})
    assert [line.split()[0] for line in sweep.output_lines("alibi/0.1/7")] == [
        "training",
        "evaluating",
        "evaluating",
    ]
    assert measured() == {("alibi", 32)}
    axes["lr"].append({"optimizer.params.lr": 0.2})
    sweep(axes=axes, evaluation={"lengths": [32], "tokens": 256})
    assert measured() == {("alibi (0.1)", 32), ("alibi (0.2)", 32)}
    previous = sorted((sweep.runs / "alibi" / "0.1" / "7" / "evaluation").glob("results.previous*"))
    assert [path.name for path in previous] == [
        "results.previous-1.jsonl",
        "results.previous-2.jsonl",
    ]
    lengths = [
        [json.loads(line)["length"] for line in path.read_text().splitlines()] for path in previous
    ]
    assert lengths == [[32, 64], [32]]


def test_results_of_an_unfinished_evaluation_with_other_options_are_not_reported(
    sweep, monkeypatch
):
    def killed(*arguments):
        process = fake_start_process(*arguments)
        process.exit_status = 1 if "64" in arguments[0] else process.exit_status
        return process

    axes = {"pos_emb": ["alibi.yml"], "seed": [{"seed": 7}]}
    with monkeypatch.context() as patch:
        patch.setattr(runner, "start_process", killed)
        sweep(axes=axes, evaluation=[{"lengths": [32]}, {"lengths": [64]}], status=1)
    sweep(axes=axes, evaluation=[{"lengths": [32]}, {"lengths": [128]}])
    assert [record["length"] for record in read_results(sweep.runs / "alibi")] == [32, 128]


def test_several_evaluations_run_one_after_the_other(sweep):
    first, second, third = {"lengths": [32]}, {"lengths": [64]}, {"lengths": [32], "tokens": 64}
    axes = {"pos_emb": ["alibi.yml"], "seed": [{"seed": 7}]}
    sweep(axes=axes, evaluation=[first])
    assert sweep("--dry-run", axes=axes, evaluation=[first, second]).count("to evaluate") == 1
    sweep(axes=axes, evaluation=[first, second])
    sweep(axes=axes, evaluation=[first, second, third])
    calls = [line.partition("--skip-unsupported ")[2] for line in sweep.output_lines("alibi/7")]
    assert calls == ["", "--lengths 32", "--lengths 64", "--lengths 32 --tokens 64"]
    # The results of the third call replaced those of the first.
    assert sweep("--dry-run", axes=axes, evaluation=[second]).count("to evaluate") == 1


def test_every_run_has_a_gpu_of_its_own(sweep, monkeypatch):
    monkeypatch.setattr(command, "visible_gpus", lambda: [0, 2, 5])
    axes = {"pos_emb": ["alibi.yml"], "seed": [{"seed": seed} for seed in range(4)]}
    sweep(axes=axes)
    used = [sweep.output_lines(f"alibi/{seed}")[0].rpartition(" ")[2] for seed in range(4)]
    assert set(used) == {"0", "2", "5"}
    assert used[:3] == ["0", "2", "5"]


def test_a_run_waits_for_processes_of_an_earlier_sweep(sweep, monkeypatch):
    pids = [[4711], [4711], []]
    monkeypatch.setattr(runner, "find_processes", lambda folder: pids.pop(0) if pids else [])
    output = sweep()
    assert "kerple_log/7: processes of an earlier sweep are still running (4711)" in output
    assert pids == []
    assert "[2/2]" in output


def test_a_signal_stops_the_sweep(sweep, monkeypatch):
    """The first signal arrives while the process of the first run starts, the second while that
    process saves.
    """

    class RunningProcess(FakeProcess):
        def poll(self):
            polls.append(self)
            assert len(polls) < 10, "the process received no signal"
            return self.exit_status

        def send_signal(self, number):
            sent.append(number)
            self.exit_status = 0 if len(sent) == 2 else None

    def start_process(*_):
        signal.raise_signal(signal.SIGUSR1)
        return RunningProcess(None)

    def update(display, jobs):
        if len(sent) == 1 and not killed:
            killed.append(True)
            signal.raise_signal(signal.SIGTERM)

    sent, polls, killed = list[int](), list[RunningProcess](), list[bool]()
    monkeypatch.setattr(runner, "start_process", start_process)
    monkeypatch.setattr(runner.Display, "update", update)
    output = sweep(status=128 + signal.SIGUSR1)
    assert "stopping: the runs save and exit" in output
    assert "killing the runs" in output
    assert "run the same command again to resume" in output
    assert sent == [signal.SIGTERM, signal.SIGTERM]
    assert not (sweep.runs / "alibi").exists()


def test_a_run_with_damaged_files_fails_alone(sweep):
    sweep()
    (sweep.runs / "kerple_log" / "7" / "evaluation" / "evaluated.json").write_text("{")
    (sweep.runs / "alibi" / "7" / "checkpoints" / "latest").write_text("global_step9")
    shutil.rmtree(sweep.runs / "alibi" / "7" / "checkpoints" / "global_step6")
    axes = {
        "pos_emb": ["kerple_log.yml", "alibi.yml"],
        "seed": [{"seed": 7}, {"seed": 8}, {"seed": 13}],
    }
    planned = sweep("--dry-run", axes=axes)
    assert "global_step9" in planned
    assert "alibi/8" in planned
    output = sweep(axes=axes, status=1)
    assert "kerple_log/7: FAILED in preparation (" in output
    assert "alibi/7: FAILED in preparation (" in output
    assert "alibi/8: finished" in output
    # The failures come first, in case that the report fails.
    failed, _, report = output.partition("note: run kerple_log/7 is not in the report: ")
    assert re.search(
        r"failed: alibi/7 in preparation: .*latest: names 'global_step9', which does not exist",
        failed,
    )
    assert re.search(r"failed: kerple_log/7 in preparation: .*evaluated\.json", failed)
    assert "failed: alibi/13 in training" in failed
    assert "note: run alibi/7 is not in the report: " in report
    assert "report of 2 of 6 runs" in report
    # No claim is left behind.
    assert not list(sweep.runs.rglob(runner.CLAIM))


def test_a_run_whose_files_are_damaged_during_the_sweep_fails_alone(sweep, monkeypatch):
    def start_process(command, folder, *arguments):
        process = fake_start_process(command, folder, *arguments)
        if command[2] == "evaluate" and folder.parent.name == "kerple_log":
            (folder / "evaluation" / "evaluated.json").write_text("{")
        return process

    monkeypatch.setattr(runner, "start_process", start_process)
    output = sweep(status=1)
    assert "kerple_log/7: FAILED in evaluation (" in output
    assert "alibi/7: finished" in output
    assert not list(sweep.runs.rglob(runner.CLAIM))


# Several sweep processes in one folder


def test_a_run_that_another_process_started_with_another_configuration_is_left_alone(
    sweep, monkeypatch
):
    """The sweep file is edited after this process has read it, and another process trains the
    second run.
    """

    def start_process(*arguments):
        monkeypatch.setattr(runner, "start_process", fake_start_process)
        write_sweep(sweep.folder, set={"train-iters": 8})
        assert command.main([str(sweep.folder / "sweep.yml"), "--only", "alibi/7"]) == 0
        return fake_start_process(*arguments)

    monkeypatch.setattr(runner, "start_process", start_process)
    output = sweep(
        "--only",
        "alibi/*",
        status=1,
        axes={"pos_emb": ["alibi.yml"], "seed": [{"seed": 1}, {"seed": 7}]},
    )
    assert "alibi/7: FAILED in preparation (" in output
    assert "train_iters: 8 in the folder, 6 in the sweep" in output
    assert "note: run alibi/7 is not in the report: " in output
    assert not (sweep.runs / "alibi" / "7" / "failed.json").exists()
    assert logged_iterations(sweep.runs / "alibi" / "7") == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_run_of_another_process_is_left_to_it(sweep):
    with Lock(sweep.runs / "kerple_log" / "7" / runner.CLAIM, ""):
        output = sweep()
        assert "[1/2] alibi/7: finished" in output
        assert "kerple_log/7: another sweep process is working on it (held by process" in output
        assert "1 runs are left to other sweep processes" in output
    assert "[2/2] kerple_log/7: finished" in sweep()


def test_a_run_is_taken_over_when_the_other_process_dies(sweep, monkeypatch):
    claim = Lock(sweep.runs / "kerple_log" / "7" / runner.CLAIM, "")
    claim.acquire()

    def start_process(*arguments):
        claim.release()
        return fake_start_process(*arguments)

    monkeypatch.setattr(runner, "start_process", start_process)
    assert "[2/2] kerple_log/7: finished" in sweep()


@pytest.mark.parametrize(
    ("seed", "outcome"), [(7, "finished by another"), (13, "failed in another")]
)
def test_a_run_that_another_process_has_tried_is_not_tried_again(seed, outcome, sweep, monkeypatch):
    """The first run starts a second sweep process, which works on the second run."""

    def start_process(*arguments):
        monkeypatch.setattr(runner, "start_process", fake_start_process)
        assert command.main([str(sweep.folder / "sweep.yml"), "--only", f"alibi/{seed}"]) == (
            seed == 13
        )
        return fake_start_process(*arguments)

    monkeypatch.setattr(runner, "start_process", start_process)
    axes = {"pos_emb": ["alibi.yml"], "seed": [{"seed": 1}, {"seed": seed}]}
    assert f"alibi/{seed}: {outcome} sweep process" in sweep(axes=axes)
    assert (
        len([line for line in sweep.output_lines(f"alibi/{seed}") if line.startswith("training")])
        == 1
    )


def test_a_failed_run_that_another_process_tried_again_and_left_is_tried(sweep, monkeypatch):
    """The other process deletes failed.json, and is stopped before the run ends."""
    axes = {"pos_emb": ["alibi.yml"], "seed": [{"seed": 1}, {"seed": 17}]}
    sweep("--only", "alibi/17", axes=axes, status=1)
    failure = sweep.runs / "alibi" / "17" / "failed.json"
    assert json.loads(failure.read_text()) == {"task": "training", "exit_status": 9}

    def start_process(*arguments):
        failure.unlink(missing_ok=True)
        return fake_start_process(*arguments)

    monkeypatch.setattr(runner, "start_process", start_process)
    assert "[2/2] alibi/17: finished" in sweep(axes=axes)


@pytest.mark.parametrize(("cores", "each"), [(8, 4), (1, 1)])
def test_parallel_runs_on_a_cpu_share_the_cores(cores, each, sweep, monkeypatch):
    threads = []

    def start_process(command, folder, environment, log):
        threads.append(environment.get("OMP_NUM_THREADS"))
        return fake_start_process(command, folder, environment, log)

    monkeypatch.setattr(runner, "start_process", start_process)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(cores))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert f"{each} thread(s) per run" in sweep("--jobs", "2")
    assert set(threads) == {str(each)}


def test_selected_runs(sweep):
    axes = {"pos_emb": ["alibi.yml"], "seed": [{"seed": seed} for seed in range(4)]}
    assert "2 runs, 0 of them" in sweep("--only", "*/[13]", axes=axes)
    assert sorted(path.name for path in (sweep.runs / "alibi").iterdir()) == ["1", "3"]
    # The report is on all finished runs of the sweep.
    assert "report of 3 of 4 runs" in sweep("--only", "alibi/0", axes=axes)
    assert_rejected(r"--only rotary/\*: .*alibi/0", sweep, "--only", "rotary/*", axes=axes)


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"lengths": [32, 64], "protocol": ["last-k"]}, "kerple_log/7.*last-k"),
        ({"lengths": [32], "tokens": 16}, "kerple_log/7.*16"),
        ({"lengths": [32], "depth": 3}, "kerple_log/7.*depth"),
        ({"lengths": [32], "label": ["a", "b"]}, "kerple_log/7: label"),
        (
            {"lengths": [32], "modes": ["full", "full+dynamic-ntk"]},
            r"full\+dynamic-ntk.*pos_emb kerple_log",
        ),
        ({"lengths": [32], "checkpoint": "folder"}, "kerple_log/7: checkpoint"),
        ({"lengths": [32], "output": "folder"}, "kerple_log/7: output"),
        ({"lengths": [32], "set": ["seed=1"]}, "kerple_log/7: set"),
        ({"lengths": [32], "eval-tasks": "lambada"}, "kerple_log/7: eval-tasks"),
    ],
)
def test_evaluation_options_are_checked_before_anything_is_trained(evaluation, message, sweep):
    assert_rejected(message, sweep, evaluation=evaluation)
    assert not sweep.runs.exists()


def test_tasks_in_the_configuration_are_rejected(sweep):
    assert_rejected("kerple_log/7: eval-tasks", sweep, set={"eval-tasks": ["lambada"]})
    axes = {"pos_emb": ["alibi.yml"], "tasks": [{"name": "none", "eval-tasks": None}]}
    sweep("--dry-run", axes=axes, set={"eval-tasks": ["lambada"]})


def test_a_mode_is_checked_for_all_runs_of_the_sweep(sweep):
    """rotary supports the mode, so the other runs report n/a, also if only they are selected."""
    axes = {"pos_emb": ["alibi.yml", {"pos-emb": "rotary"}], "seed": [{"seed": 7}]}
    sweep(
        "--only",
        "alibi/7",
        axes=axes,
        evaluation={"lengths": [32], "modes": ["full", "full+dynamic-ntk"]},
    )
    assert "--skip-unsupported" in sweep.output_lines("alibi/7")[-1]
