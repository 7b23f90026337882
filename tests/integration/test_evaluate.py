"""evaluate.py in separate processes: through deepy.py and on two ranks."""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from megatron.cli import evaluate, model_options
from megatron.cli.evaluate import main
from megatron.cli.model_options import load
from megatron.convert import to_hugging_face
from megatron.evaluation import PROTOCOLS, read_results
from megatron.evaluation.records import KINDS
from megatron.inference import load_model
from megatron.tokenizer.tokenizer import TokenizerFiles
from tests.support.checkpoints import write_checkpoint
from tests.support.processes import free_ports
from tests.support.runs import run, trained, training_settings

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTATION = (ROOT / "docs" / "evaluation.md").read_text()


@pytest.mark.ci
def test_deepy_starts_two_ranks(tmp_path, data_path, forked_scripts):
    write_checkpoint(tmp_path / "checkpoints", "kerple_log", data_path, iteration=6)
    settings = training_settings(tmp_path, data_path)
    keys = {"evaluation_lengths": [32, 128, 512], "num_gpus": 2}
    words = ("--tokens", "1024", "--output", str(tmp_path / "report"))
    output = run(tmp_path, {**settings, **keys}, *words, script="evaluate.py")
    rows = read_results(tmp_path / "report")
    assert [(row["pos_emb"], row["seed"], row["length"]) for row in rows] == [
        ("kerple_log", 77, 32),
        ("kerple_log", 77, 128),
        ("kerple_log", 77, 512),
    ]
    assert len({row["tokens"] for row in rows}) == 1
    assert all(row["perplexity"] > 1 for row in rows)
    assert output.count("loaded ") == 1  # only rank 0 prints
    assert "global_step6" in output


@pytest.fixture(scope="module")
def seeds(tmp_path_factory, data_path) -> list[str]:
    """The checkpoints of two seeds of one training, in different places."""
    folder, keys = tmp_path_factory.mktemp("seeds"), {"train_iters": 1, "eval_iters": 0}
    shutil.copytree(Path(data_path).parent, folder / "data")
    copy = str(folder / "data" / Path(data_path).name)
    trained(folder / "1", data_path, **keys, seed=1, log_interval=5)
    trained(folder / "2", copy, **keys, seed=2, num_workers=1, eval_interval=9)
    return [str(folder / name / "checkpoints") for name in "12"]


def test_what_was_trained_on(tmp_path, data_path, seeds, capsys):
    """A split, or a list of datasets, that takes other documents for validation. Exports tell it
    too.
    """
    exported = tmp_path / "exported"
    to_hugging_face(*load_model(seeds[0]), exported, tokenizer=TokenizerFiles("CharLevelTokenizer"))
    paths = {"data_path": "null", "train-data-paths": [data_path], "valid-data-paths": [data_path]}
    for number, (keys, common) in enumerate(
        (
            ({"split": "9,1,0"}, None),
            ({"split": "6,4,0"}, "16 of the 32 documents"),
            ({key.replace("_", "-"): value for key, value in paths.items()}, "64 of the 80"),
        )
    ):
        folder = tmp_path / str(number)
        words = ["--lengths", "256", "--tokens", "256", "--output", str(folder)]
        words += ["--passkey", "--passkey-trials", "1", "--effective-length"]
        words += ["--set", *(f"{key}={value}" for key, value in keys.items())]
        words += ["allow_other_data=true"] * (number == 1)
        main(["--checkpoint", str(exported) if number == 2 else seeds[0], *words])
        output = capsys.readouterr().out
        notes = {row["kind"]: row.get("trained_text") for row in read_results(folder)}
        assert set(notes) == {"extrapolation", "passkey", "effective_length"}
        table = (folder / "extrapolation.md").read_text()
        if common is None:
            assert set(notes.values()) == {None}
            assert "may have been trained" not in output
        else:
            assert notes.pop("extrapolation").startswith(common)
            assert set(notes.values()) == {None}
            assert table.count(common) == 1
            assert re.search(f"notice: .*{common}", output)


def test_seeds_of_different_trainings(tmp_path, data_path, seeds):
    """A table does not average them without saying so."""
    folder = tmp_path / "other"
    params = {"type": "Adam", "params": {"lr": 0.004}}
    trained(folder, data_path, train_iters=1, eval_iters=0, seed=3, optimizer=params)
    data = Path(data_path)
    same_data = data.parent / ".." / data.parent.name / data.name
    words = ["--lengths", "32", "--tokens", "64", "--set", f"data_path={same_data}", "--output"]
    notes = []
    for number, places in enumerate((seeds, [*seeds, str(folder / "checkpoints")])):
        report = tmp_path / str(number)
        main(["--checkpoint", *places, *words, str(report)])
        table = (report / "extrapolation.md").read_text()
        notes.append(table.count("differ in more than their seed"))
    assert notes == [0, 1]


def test_seeds_with_different_pasts(tmp_path, data_path):
    """Finetuned from models of different training, or resumed with another rate or seed."""
    keys = {"eval_iters": 0, "lr_decay_iters": 9}
    params = {"type": "Adam", "params": {"lr": 0.004}}
    for name, iterations, seed in (("1", 1, 1), ("2", 2, 2), ("4", 1, 4)):
        trained(tmp_path / name, data_path, **keys, train_iters=iterations, seed=seed)
        tuned = {**keys, "finetune": True, "load": str(tmp_path / name / "checkpoints")}
        trained(tmp_path / f"tuned{name}", data_path, **tuned, train_iters=1, seed=seed)
    trained(tmp_path / "3", data_path, **keys, train_iters=1, seed=3, optimizer=params)
    trained(tmp_path / "3", data_path, **keys, train_iters=2, seed=3)
    trained(tmp_path / "4", data_path, **keys, train_iters=2, seed=4)
    trained(tmp_path / "5", data_path, **keys, train_iters=1, seed=4)
    trained(tmp_path / "5", data_path, **keys, train_iters=2, seed=5)
    trained(tmp_path / "6", data_path, **keys, train_iters=1, seed=6)
    trained(tmp_path / "6", data_path, **keys, train_iters=2, seed=6, no_load_optim=True)
    trained(tmp_path / "7", data_path, **keys, train_iters=1, seed=7, precision="bfloat16")
    trained(tmp_path / "7", data_path, **keys, train_iters=2, seed=7)
    notes = {}
    pairs = [("tuned1", "tuned4"), ("tuned1", "tuned2"), ("2", "4"), ("2", "3")]
    pairs += [("2", "5"), ("2", "6"), ("2", "7")]
    for names in pairs:
        places = [str(tmp_path / name / "checkpoints") for name in names]
        report = tmp_path / "-".join(names)
        words = ["--lengths", "32", "--tokens", "64", "--set", f"data_path={data_path}"]
        main(["--checkpoint", *places, *words, "--output", str(report)])
        table = (report / "extrapolation.md").read_text()
        notes[names] = table.count("differ in more than their seed")
    assert list(notes.values()) == [0, 1, 0, 1, 1, 1, 1]


def run_rank(folder, words, rendezvous, rank, expected_error):
    """evaluate.py as one of several ranks, with its output in a file."""
    os.environ.update(rendezvous, RANK=str(rank), LOCAL_RANK=str(rank))
    with (
        open(folder / f"output of {rank}", "w") as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        pytest.raises(Exception, match=expected_error)
        if expected_error
        else contextlib.nullcontext(),
    ):
        faulthandler.dump_traceback_later(300, file=output)
        main(words)
        faulthandler.cancel_dump_traceback_later()
    os._exit(
        0
    )  # the interpreter of a fork may hang at its exit, because threads of its parent held locks


def run_ranks(folder, words, expected_error=None):
    """evaluate.py on two ranks; returns their outputs. Forked processes have all
    modules imported.
    """
    (port,) = free_ports(1)
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    fork = multiprocessing.get_context("fork")
    arguments = [(folder, words, rendezvous, rank, expected_error) for rank in range(2)]
    processes = [fork.Process(target=run_rank, args=rank_arguments) for rank_arguments in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
    outputs = [(folder / f"output of {rank}").read_text() for rank in range(2)]
    assert [process.exitcode for process in processes] == [0, 0], outputs
    return outputs


@pytest.mark.ci
def test_two_ranks_measure_what_one_rank_measures(tmp_path, data_path):
    write_checkpoint(tmp_path / "run", "kerple_log", data_path)
    words = [
        "--checkpoint",
        str(tmp_path / "run"),
        "--lengths",
        "256",
        "512",
        "--modes",
        "full",
        "window@16",
    ]
    words += ["--by-position", "8", "--resolution", "3", "--passkey", "--passkey-depths", "0.5"]
    words += [
        "--passkey-trials",
        "3",
        "--protocol",
        "non-overlapping",
        "last-k@16",
        "--tokens",
        "1280",
        "--output",
    ]
    main([*words, str(tmp_path / "one")])
    outputs = run_ranks(tmp_path, [*words, str(tmp_path / "two")])
    assert outputs[1] == ""  # only rank 0 prints
    records, expected_records = (read_results(tmp_path / name) for name in ("two", "one"))
    assert len(records) == len(expected_records) == 24
    measured = {"loss", "losses", "stderr", "perplexity", "bits_per_byte", "layers", "resolution"}
    for record, expected in zip(records, expected_records, strict=True):
        assert record.keys() == expected.keys()
        for key, value in expected.items():
            assert record[key] == (pytest.approx(value, rel=1e-6) if key in measured else value), (
                key
            )
    # Rank 1 does not wait for rank 0 if the results cannot be written.
    (tmp_path / "file").write_text("")
    run_ranks(tmp_path, [*words, str(tmp_path / "file" / "x")], expected_error="cannot write to")


def test_checkpoints_saved_during_an_evaluation_are_ignored(tmp_path, data_path, monkeypatch):
    """Each checkpoint is measured at the iteration, and with the fingerprint, of its records."""
    write_checkpoint(tmp_path / "a", "kerple_log", data_path, iteration=2)
    write_checkpoint(tmp_path / "b", "alibi", data_path, iteration=2)
    words = ["--lengths", "64", "--tokens", "64", "--output"]
    main(["--checkpoint", str(tmp_path / "b"), *words, str(tmp_path / "before")])

    def load_and_save_another(step, *arguments, **options):
        loaded = load(step, *arguments, **options)
        if step.parent.name == "a":
            write_checkpoint(tmp_path / "b", "alibi", data_path, iteration=4)
        return loaded

    monkeypatch.setattr(evaluate, "load", load_and_save_another)
    main(
        ["--checkpoint", str(tmp_path / "a"), str(tmp_path / "b"), *words, str(tmp_path / "during")]
    )
    assert (tmp_path / "b" / "latest").read_text() == "global_step4"
    _, record = read_results(tmp_path / "during")
    assert record == read_results(tmp_path / "before")[0]


def test_two_ranks_evaluate_the_same_step(tmp_path, data_path, monkeypatch):
    """Rank 1 looks later, when training has saved another checkpoint."""
    for iteration in (4, 2):
        write_checkpoint(tmp_path / "run", "kerple_log", data_path, iteration=iteration)

    def find_step(*_):
        return (
            tmp_path / "run" / ("global_step4" if os.environ.get("RANK") == "1" else "global_step2")
        )

    words = [
        "--checkpoint",
        str(tmp_path / "run"),
        "--lengths",
        "64",
        "--tokens",
        "256",
        "--output",
    ]
    monkeypatch.setattr(model_options, "_find_step", find_step)
    run_ranks(tmp_path, [*words, str(tmp_path / "two")])
    main([*words, str(tmp_path / "one")])
    (record,), (expected,) = (read_results(tmp_path / name) for name in ("two", "one"))
    assert record["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def test_a_killed_evaluation_loses_nothing(tmp_path, data_path):
    """Each run continues where the last one was killed."""
    write_checkpoint(tmp_path / "checkpoints", "kerple_log", data_path)
    lengths = [str(length) for length in range(16, 48, 8)]
    words = [
        "--checkpoint",
        str(tmp_path / "checkpoints"),
        "--lengths",
        *lengths,
        "--modes",
        "full",
        "window@4",
    ]
    words += ["--protocol", "last-k@8", "--output"]
    results, fork = tmp_path / "killed" / "results.jsonl", multiprocessing.get_context("fork")
    for kill in (True, False):
        process = fork.Process(
            target=run_rank, args=(tmp_path, [*words, str(results.parent)], {}, 0, None)
        )
        process.start()
        while kill and process.is_alive() and lines_in(results) < 3:
            time.sleep(0.001)
        if kill:
            process.kill()
        process.join(timeout=240)
        assert process.exitcode == (-9 if kill else 0), (tmp_path / "output of 0").read_text()
        assert len(read_results(results.parent)) >= 3
        assert (results.parent / "extrapolation.md").exists() != kill
    assert lines_in(results) == 8, "nothing was measured twice"
    main([*words, str(tmp_path / "whole")])
    assert read_results(results.parent) == read_results(tmp_path / "whole")


def test_the_example_in_the_documentation():
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENTATION, flags=re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "docs/evaluation.md", "exec"), {})
    lines = [line.split() for line in printed.getvalue().splitlines()]
    assert [line[:3] for line in lines] == [
        ["non-overlapping", "64", "1024"],
        ["non-overlapping", "256", "1024"],
        ["last-k@32", "64", "128"],
        ["last-k@32", "256", "128"],
    ]
    assert all(
        100 < float(line[3]) < 600 and float(line[4]) > 0 for line in lines
    )  # about 256, untrained


def test_the_documentation_describes_every_protocol_and_kind():
    for name in (*PROTOCOLS, *KINDS):
        assert f"`{name}`" in DOCUMENTATION
