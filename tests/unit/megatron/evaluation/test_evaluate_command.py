"""evaluate.py on real checkpoints and data: one report of one or several, and what it refuses."""

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kerple.attention import FULL, Span
from megatron.cli.evaluate import main, open_store
from megatron.cli.report import main as report
from megatron.data.streams import validation_stream
from megatron.evaluation.ranks import Ranks
from megatron.evaluation.records import ResultsFile, read_results
from megatron.utils.errors import UserError
from tests.support.checkpoints import TRAIN_LENGTH, settings_of, write_checkpoint, write_corpus, write_yaml
from tests.support.language_models import direct_losses

ROOT = Path(__file__).resolve().parents[4]
LENGTHS = ["--lengths", "32", "64", "256"]
MEASURED = ("loss", "losses", "stderr", "perplexity", "bits_per_byte", "layers", "resolution")
METHODS = ("kerple_log", "alibi", "learned")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, data):
    """Method -> (folder, model)."""
    folders = {method: tmp_path_factory.mktemp(method) for method in METHODS}
    return {method: (folder, write_checkpoint(folder, method, data)) for method, folder in folders.items()}


@pytest.fixture
def configuration(tmp_path, data, checkpoints):
    """Writes a configuration of the kerple_log checkpoint, with further keys, and returns its path."""

    def write(**keys):
        settings = settings_of("kerple_log", data, load=str(checkpoints["kerple_log"][0]))
        return str(write_yaml(tmp_path / "all.yml", {**settings, **keys}))

    return write


def mean_loss(model, data, length, total, **span):
    """The definition, on the validation third of the corpus."""
    stream = torch.from_numpy(validation_stream(data, "2,1,0"))
    losses = []
    for start in range(0, total, length):
        text = stream[None, start : start + length + 1]
        with torch.no_grad():
            losses.append(direct_losses(model(text[:, :-1], **span), text[:, 1:]))
    return torch.cat(losses).mean().item()


def rows_in(folder):
    return json.loads((Path(folder) / "extrapolation.json").read_text())["rows"]


def test_one_checkpoint(tmp_path, configuration, checkpoints, data, capsys):
    report = tmp_path / "report"
    modes = ["--modes", "full", "window@16", "blockwise"]
    main([configuration(), *LENGTHS, *modes, "--tokens", "1000", "--output", str(report)])
    output = capsys.readouterr()
    rows = rows_in(tmp_path / "report")
    spans = {"full": FULL, "window@16": Span(window=16), "blockwise": Span(block=TRAIN_LENGTH // 2)}
    assert [(row["mode"], row["length"]) for row in rows] == [
        (mode, length) for mode in spans for length in (32, 64, 256)
    ]
    for row in rows:
        span = spans[row["mode"]]
        loss = mean_loss(checkpoints["kerple_log"][1], data, row["length"], 768, span=span)
        assert row["loss"] == pytest.approx(loss, abs=1e-5)
        known = {key: row[key] for key in ("pos_emb", "seed", "train_length", "tokens")}
        assert known == {"pos_emb": "kerple_log", "seed": 77, "train_length": TRAIN_LENGTH, "tokens": 768}
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == [
        "extrapolation.json",
        "extrapolation.md",
        "extrapolation.png",
        "results.jsonl",
    ]
    assert "kerple_log" in output.out
    assert output.err.count("tokens/s") == 9


def test_several_checkpoints_make_one_report(tmp_path, checkpoints, data):
    folders = [str(folder) for folder, _ in checkpoints.values()]
    main(["--checkpoint", *folders, *LENGTHS, "--tokens", "600", "--output", str(tmp_path), "--title", "All three"])
    rows = rows_in(tmp_path)
    assert [(row["pos_emb"], row["length"]) for row in rows] == [(m, n) for m in METHODS for n in (32, 64, 256)]
    for row in rows:
        if row["pos_emb"] == "learned" and row["length"] > TRAIN_LENGTH:
            assert row["loss"] is None
            assert "32" in row["note"]
        else:
            assert row["loss"] == pytest.approx(
                mean_loss(checkpoints[row["pos_emb"]][1], data, row["length"], 512), abs=1e-5
            )
    text = (tmp_path / "extrapolation.md").read_text()
    assert text.startswith("# All three\n")
    assert "n/a: learned (full) at 64, 256" in text


def test_lengths_and_tokens_of_the_configuration(tmp_path, configuration):
    main([configuration(evaluation_lengths=[16, 48], eval_tokens=200), "--output", str(tmp_path)])
    assert [(row["length"], row["tokens"]) for row in rows_in(tmp_path)] == [(16, 192), (48, 192)]


def test_without_lengths_the_training_length_is_doubled(configuration, checkpoints, capsys):
    main([configuration()])
    output = capsys.readouterr().out
    folder = checkpoints["kerple_log"][0] / "evaluation"
    assert f"the report goes to {folder}" in output
    assert "lengths: 32 64 128 256 512" in output
    rows = rows_in(folder)
    assert [row["length"] for row in rows] == [32, 64, 128, 256, 512]
    # 20 of 60 documents of 201 tokens, of which the first token is no target
    assert {row["tokens"] for row in rows} == {(20 * 201 - 1) // 512 * 512}


def test_the_same_run_gives_the_same_numbers(tmp_path, configuration):
    for name in ("a", "b"):
        main([configuration(), *LENGTHS, "--output", str(tmp_path / name)])
    assert rows_in(tmp_path / "a") == rows_in(tmp_path / "b")


def test_an_earlier_iteration(tmp_path, data):
    folder = tmp_path / "run"
    models = {iteration: write_checkpoint(folder, "alibi", data, iteration=iteration) for iteration in (2, 6)}
    for words, iteration in (([], 6), (["--iteration", "2"], 2)):
        output = tmp_path / f"of {iteration}"
        main(["--checkpoint", str(folder), *words, "--lengths", "64", "--tokens", "64", "--output", str(output)])
        assert rows_in(output)[0]["checkpoint"]["iteration"] == iteration
        assert rows_in(output)[0]["loss"] == pytest.approx(mean_loss(models[iteration], data, 64, 64), abs=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_changes_the_loss_a_little(tmp_path, configuration, precision):
    for name in ("fp32", precision):
        main([configuration(), "--lengths", "256", "--precision", name, "--output", str(tmp_path / name)])
    full, half = (rows_in(tmp_path / name)[0]["loss"] for name in ("fp32", precision))
    assert half == pytest.approx(full, rel=0.02)
    assert half != full


@pytest.mark.parametrize(
    ("keys", "words", "message"),
    [
        ({"load": None}, [], 'no checkpoint to load: give --checkpoint DIR, or "load" or "save"'),
        ({"load": "empty", "save": "unmade"}, [], "empty and unmade: no checkpoint there yet"),
        ({}, ["--checkpoint", "nowhere"], "nowhere: no such folder"),
        ({}, ["--iteration", "5"], "no checkpoint of iteration 5; it has 4"),
        ({}, ["--lengths", "100000"], "hold no segment of 100,000"),
        ({}, ["--lengths", "64", "--tokens", "63"], "a budget of 63 tokens holds no segment of 64"),
        ({}, ["--modes", "full", "sliding"], "'sliding' is not known"),
        ({}, ["--modes", "blockwise@33"], "33 is odd"),
        (
            {"eval_tasks": ["lambada_openai"]},
            ["--lengths", "32"],
            "eval_tasks: --lengths: not about tasks",
        ),
        (
            {},
            ["--compare-with", "alibi"],
            "--compare-with alibi: no checkpoint given is of it; choose one of kerple_log",
        ),
        ({}, ["--passkey-trials", "3"], "--passkey-trials: pass keys are measured with --passkey only"),
        ({}, ["--passkey", "--lengths", "64"], "--passkey: 64 tokens have no room"),
        ({}, ["--lengths", "64", "--resolution", "99"], "--resolution 99: the text holds 62 segments of 64 tokens"),
        ({"pos_emb": "alibi"}, [], "pos_emb kerple_log in the checkpoint, alibi here"),
        ({"data_path": "nodata"}, ["--lengths", "32"], "nodata"),
        ({"data_path": None}, ["--lengths", "32"], "data-path"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, configuration, keys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        main([configuration(**keys), *words, "--output", "report"])
    assert not (tmp_path / "report").exists()


def test_several_checkpoints_need_an_output_folder_and_the_same_data(tmp_path, checkpoints, data):
    folders = [str(checkpoints["kerple_log"][0]), str(tmp_path / "other")]
    with pytest.raises(UserError, match="name its folder with --output"):
        main(["--checkpoint", *folders, *LENGTHS])
    (tmp_path / "data").mkdir()
    elsewhere = write_corpus(tmp_path / "data")
    write_checkpoint(tmp_path / "other", "alibi", elsewhere)
    with pytest.raises(UserError, match="other: has another data_path than the first checkpoint"):
        main(["--checkpoint", *folders, *LENGTHS, "--output", str(tmp_path / "report")])
    common = str(write_yaml(tmp_path / "common.yml", settings_of("none", data)))
    main([common, "--checkpoint", *folders, *LENGTHS, "--output", str(tmp_path / "report")])
    assert {row["pos_emb"] for row in rows_in(tmp_path / "report")} == {"kerple_log", "alibi"}


def test_bad_options_are_one_line(tmp_path, configuration, capsys):
    with pytest.raises(SystemExit):
        main([configuration(), "--lengths", "12", "0"])
    assert "--lengths: must be a whole number from 1 on, not '0'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([configuration(), "--passkey", "--passkey-depths", "0.5", "2"])
    assert "--passkey-depths: must be a number from 0 to 1, not '2'" in capsys.readouterr().err
    command = [sys.executable, str(ROOT / "evaluate.py"), configuration(), "--lengths", "999999"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ")
    assert len(run.stderr.splitlines()) == 1


def test_the_configuration_may_name_the_folder_of_the_report(tmp_path, checkpoints, data):
    keys = settings_of("alibi", data, eval_results_prefix=str(tmp_path / "results"))
    config = write_yaml(tmp_path / "config.yml", keys)
    main([str(config), "--checkpoint", str(checkpoints["alibi"][0]), *LENGTHS])
    assert json.loads((tmp_path / "results" / "extrapolation.json").read_text())["rows"]


def test_a_second_run_computes_only_what_is_new(tmp_path, configuration, capsys, monkeypatch):
    words = [configuration(), "--tokens", "512", "--output", str(tmp_path)]
    main([*words, "--lengths", "32", "64", "--by-position", "4"])
    first = read_results(tmp_path)
    assert [(row["kind"], row["length"], row["corpus"]) for row in first] == [
        (kind, length, "text") for length in (32, 64) for kind in ("extrapolation", "positions")
    ]
    assert all(row["bits_per_byte"] > 1 and row["stderr"] > 0 for row in first if row["kind"] == "extrapolation")
    content = (tmp_path / "results.jsonl").read_bytes()
    capsys.readouterr()
    main([*words, "--lengths", "32", "64", "128", "--protocol", "non-overlapping", "last-k@16"])
    output = capsys.readouterr()
    assert "2 of 6 results are there from an earlier run" in output.out
    assert output.err.count("tokens/s") == 4
    assert (tmp_path / "results.jsonl").read_bytes().startswith(content)
    monkeypatch.setattr("megatron.cli.evaluate.load", lambda *_, **__: pytest.fail("a model was loaded"))
    whole = (tmp_path / "results.jsonl").read_bytes()
    main([*words, "--lengths", "32", "64"])
    assert (tmp_path / "results.jsonl").read_bytes() == whole


def test_further_measures_are_stored_and_resumed(tmp_path, checkpoints, capsys, monkeypatch):
    folders = [str(checkpoints[method][0]) for method in ("kerple_log", "learned")]
    words = ["--checkpoint", *folders, "--lengths", "32", "256", "--tokens", "512", "--output", str(tmp_path)]
    further = ["--resolution", "2", "--effective-length"]
    keys = ["--passkey", "--passkey-depths", "0", "1", "--passkey-trials", "2", "--lengths", "256", "512"]
    main([*words, *further])
    main([*words, *keys])
    shown = capsys.readouterr().out
    assert all(
        block in shown for block in ("bits per byte", "resolution", "pass keys found", "Effective length of kerple")
    )
    records = read_results(tmp_path)
    assert [(one["pos_emb"], one["length"]) for one in records if one["kind"] == "resolution"] == [
        (method, length) for method in ("kerple_log", "learned") for length in (32, 256)
    ]
    assert [(one["length"], one["depth"], one["trials"]) for one in records if one["kind"] == "passkey"][:4] == [
        (length, depth, 2) for length in (256, 512) for depth in (0, 1)
    ]
    kerple, learned = (one for one in records if one["kind"] == "effective_length")
    assert kerple["layers"] == ["all layers"]
    method = checkpoints["kerple_log"][1].blocks[0].attention.rpe
    assert kerple["effective_lengths"] == [method.effective_length(kerple["length"]).tolist()]
    assert (learned["layers"], learned["effective_lengths"]) == ([], [])
    assert "learned has no bias" in learned["note"]
    # The report takes them all.
    report(["--output", str(tmp_path / "report"), str(tmp_path)])
    made = {path.name for path in (tmp_path / "report").glob("*/*.*")}
    assert {"passkey-text-2x32-32.md", "passkey-text-2x32-32.png", "lex-resolution-2x32-32-first-2.tex"} <= made
    content = (tmp_path / "results.jsonl").read_bytes()
    monkeypatch.setattr("megatron.cli.evaluate.load", lambda *_, **__: pytest.fail("a model was loaded"))
    main([*words, *further])
    main([*words, *keys])
    assert (tmp_path / "results.jsonl").read_bytes() == content


def test_results_of_another_model_are_refused(tmp_path, checkpoints):
    words = ["--lengths", "32", "--tokens", "64", "--output", str(tmp_path)]
    main(["--checkpoint", str(checkpoints["alibi"][0]), *words])
    other = ["--checkpoint", str(checkpoints["kerple_log"][0]), *words]
    with pytest.raises(UserError, match=r"contains results of another model, alibi with seed 77 .*--output.*--replace"):
        main(other)
    main([*other, "--replace"])
    assert {row["pos_emb"] for row in rows_in(tmp_path)} == {"kerple_log"}


def test_a_killed_run_goes_on_where_it_stopped(tmp_path, configuration):
    words = [configuration(), "--lengths", "32", "64", "128", "256", "--query-chunk", "2", "--tokens", "512"]
    command = [sys.executable, str(ROOT / "evaluate.py"), *words, "--output"]
    process = subprocess.Popen([*command, str(tmp_path / "killed")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stderr:
        if b" at 64: " in line:
            process.kill()
            break
    process.communicate()
    left = (tmp_path / "killed" / "results.jsonl").read_bytes()
    assert 2 <= left.count(b"\n") < 4
    assert not (tmp_path / "killed" / "extrapolation.json").exists()
    main([*words, "--output", str(tmp_path / "killed")])
    assert (tmp_path / "killed" / "results.jsonl").read_bytes().startswith(left)
    main([*words, "--output", str(tmp_path / "whole")])
    assert rows_in(tmp_path / "killed") == rows_in(tmp_path / "whole")


def run_rank(folder, words, meeting, rank):
    """evaluate.py as one of several ranks; what it says goes to a file."""
    os.environ.update(meeting, RANK=str(rank), LOCAL_RANK=str(rank))
    with (
        open(folder / f"said by {rank}", "w") as said,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        main(words)


def test_two_ranks_give_the_numbers_of_one(tmp_path, configuration):
    words = [configuration(), "--lengths", "256", "512", "--modes", "full", "window@16", "--by-position", "8"]
    words += ["--resolution", "3", "--passkey", "--passkey-depths", "0.5", "--passkey-trials", "3"]
    words += ["--protocol", "non-overlapping", "last-k@16", "--tokens", "1280"]
    main([*words, "--output", str(tmp_path / "one")])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    # Forked, the ranks have everything imported.
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(tmp_path, [*words, "--output", str(tmp_path / "two")], meeting, rank))
             for rank in range(2)]  # fmt: skip
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=240)
    said = [(tmp_path / f"said by {rank}").read_text() for rank in range(2)]
    assert [process.exitcode for process in ranks] == [0, 0], said
    assert said[1] == ""  # one rank speaks
    alone, together = (read_results(tmp_path / name) for name in ("one", "two"))
    assert len(alone) == len(together) == 24
    for one, two in zip(alone, together, strict=True):
        assert one.keys() == two.keys()
        for key in one:
            assert one[key] == (pytest.approx(two[key], rel=1e-6) if key in MEASURED else two[key]), key


def test_every_rank_ends_where_the_results_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    told = []

    class Told(Ranks):
        def broadcast(self, value):
            told.extend([value] if self.is_main else [])
            return told[0]

    for rank in range(2):
        with contextlib.ExitStack() as stack, pytest.raises(UserError, match="cannot write results"):
            open_store(ResultsFile(tmp_path / "file" / "x"), stack, Told(rank, 2))
    told.clear()
    with contextlib.ExitStack() as stack:
        stores = [open_store(ResultsFile(tmp_path), stack, Told(rank, 2)) for rank in range(2)]
        assert [store is None for store in stores] == [False, True]


def test_by_document(tmp_path, configuration, checkpoints, data, capsys):
    """Documents have 201 tokens: a text of 128 lies in one, one of 256 is joined from several."""
    words = [configuration(), "--document-aware", "--protocol", "non-overlapping", "last-k@16"]
    main([*words, "--lengths", "32", "128", "--output", str(tmp_path)])
    rows = rows_in(tmp_path)
    assert [(row["protocol"], row["tokens"], row["documents"]) for row in rows] == [
        ("non-overlapping by document", 20 * 128, 20),
        ("non-overlapping by document", 20 * 128, 20),
        ("last-k@16 by document", 20 * 16, 20),
        ("last-k@16 by document", 20 * 16, 20),
    ]
    stream = torch.from_numpy(validation_stream(data, "2,1,0")).view(20, 201)[:, :129]
    with torch.no_grad():
        losses = direct_losses(checkpoints["kerple_log"][1](stream[:, :-1]), stream[:, 1:])
    assert rows[1]["loss"] == pytest.approx(losses.mean().item(), abs=1e-5)
    assert rows[3]["loss"] == pytest.approx(losses[:, -16:].mean().item(), abs=1e-5)
    assert "joined" not in capsys.readouterr().out
    main([*words, "--lengths", "256", "--output", str(tmp_path / "long")])
    assert "0 texts of 256 tokens are each from one document, 15 are" in capsys.readouterr().out
    with pytest.raises(UserError, match="--document-aware: protocol sliding@256 reads one stream"):
        main([*words, "sliding", "--lengths", "256", "--output", str(tmp_path / "no")])


def test_what_differs_from_a_method_is_marked(tmp_path, checkpoints):
    folders = [str(folder) for folder, _ in checkpoints.values()]
    words = ["--checkpoint", *folders, "--lengths", "32", "--tokens", "64", "--output", str(tmp_path)]
    with pytest.raises(
        UserError, match="--compare-with rotary: no checkpoint given is of it; choose one of kerple_log, alibi"
    ):
        main([*words, "--compare-with", "rotary"])
    main([*words, "--compare-with", "kerple_log"])
    assert "One seed" in (tmp_path / "extrapolation.md").read_text()


def test_labels_and_sizes_are_stored(tmp_path, checkpoints):
    folder = str(checkpoints["alibi"][0])
    words = ["--checkpoint", folder, "--lengths", "32", "--tokens", "64", "--output", str(tmp_path)]
    with pytest.raises(UserError, match="--label: 2 given for 1 checkpoints"):
        main([*words, "--label", "a", "b"])
    main([*words, "--label", "slow"])
    (row,) = rows_in(tmp_path)
    assert row["pos_emb"] == "alibi (slow)"
    assert (row["checkpoint"]["layers"], row["checkpoint"]["hidden_size"]) == (2, 32)
