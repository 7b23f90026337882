"""`kerple chomsky`, called in-process."""

import json

import pytest

from kerple.positional import primary_names
from megatron.chomsky.decoder import DecoderExperiment
from megatron.cli import chomsky as command
from megatron.cli.chomsky import main
from megatron.utils.errors import UserError
from megatron.utils.processes import Lock
from tests.support.errors import assert_rejected

TINY = {
    "steps": 6,
    "batch": 4,
    "train_longest": 6,
    "test_longest": 9,
    "test_samples": 4,
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
}
DECODER = {
    **{
        "architecture": "decoder",
        "train_longest": 40,
        "test_longest": 80,
        "hidden_size": 16,
        "num_heads": 2,
    },
    **{"steps": 3, "batch": 2, "test_samples": 4},
}


def arguments(folder, *words, settings=TINY):
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return ["--output", str(folder), *options, *words]


def decoder_words(folder, *words):
    return arguments(folder, *words, settings=DECODER)


def test_missing_experiments_are_run_and_reported(tmp_path, capsys):
    words = (
        "--tasks",
        "even_pairs",
        "binary_addition",
        "--methods",
        "none",
        "kerple_c",
        "dape_kerple",
        "--seeds",
        "0",
    )
    main(arguments(tmp_path, *words))
    printed = capsys.readouterr().out
    assert "4 experiments on cpu, 0 of them already finished" in printed
    assert "[4/4] binary_addition, dape_kerple, seed 0: loss " in printed
    stored = json.loads((tmp_path / "chomsky.json").read_text())
    assert [
        (result["task"], result["pos_emb"], result["seed"]) for result in stored["results"]
    ] == [
        (task, method, 0)
        for task in ("even_pairs", "binary_addition")
        for method in ("none", "dape_kerple")
    ]
    assert (tmp_path / "chomsky.md").read_text().startswith("# Tasks of the Chomsky hierarchy\n")
    assert (tmp_path / "chomsky.png").read_bytes()[:4] == b"\x89PNG"

    main(arguments(tmp_path, *words))
    assert "4 of them already finished" in capsys.readouterr().out
    assert json.loads((tmp_path / "chomsky.json").read_text()) == stored


@pytest.mark.ci
def test_decoders_on_all_length_tests(tmp_path, capsys, monkeypatch):
    """Interrupted between training and testing, and run again."""
    words = ("--methods", "kerple_log", "rotary")

    assert not main(decoder_words(tmp_path / "whole", *words))
    stored = json.loads((tmp_path / "whole/chomsky.json").read_text())
    assert [(result["task"], result["pos_emb"]) for result in stored["results"]] == [
        (task, method)
        for task in ("copying", "induction", "associative_recall", "variable_tracking")
        for method in ("kerple_log", "rotary")
    ]
    text = (tmp_path / "whole/chomsky.md").read_text()
    assert "accuracy by length" in text
    assert "accuracy by distance at length 80" in text
    assert (tmp_path / "whole/chomsky.png").read_bytes()[:4] == b"\x89PNG"
    with monkeypatch.context() as patch:
        tested = DecoderExperiment.test
        patch.setattr(
            DecoderExperiment,
            "test",
            lambda self, report: 1 / 0 if self.name == "induction" else tested(self, report),
        )
        with pytest.raises(ZeroDivisionError):
            main(decoder_words(tmp_path / "killed", *words))
    steps = []
    loss = DecoderExperiment.loss
    monkeypatch.setattr(
        DecoderExperiment,
        "loss",
        lambda self, *given: steps.append(self.name) or loss(self, *given),
    )
    capsys.readouterr()
    assert not main(decoder_words(tmp_path / "killed", *words))
    assert "8 experiments on cpu, 2 of them already finished" in capsys.readouterr().out
    assert steps.count("induction") == 6
    assert "copying" not in steps
    assert json.loads((tmp_path / "killed/chomsky.json").read_text()) == stored


@pytest.mark.ci
def test_decoders_support_every_method(tmp_path):
    small = ("--num-layers", "1", "--steps", "1", "--test-samples", "1")
    main(decoder_words(tmp_path, "--tasks", "induction", "--methods", "all", *small))
    stored = json.loads((tmp_path / "chomsky.json").read_text())["results"]
    assert [result["pos_emb"] for result in stored] == list(primary_names())
    assert_rejected(
        "--tasks.*parity_check.*--architecture",
        main,
        decoder_words(tmp_path, "--tasks", "parity_check"),
    )
    with pytest.raises(UserError, match=r"--train-longest 10.*associative_recall.*16"):
        main(decoder_words(tmp_path / "new", "--train-longest", "10"))
    assert not (tmp_path / "new").exists()
    assert_rejected(
        "--tasks copying.*--architecture", main, arguments(tmp_path, "--tasks", "copying")
    )


def test_the_folder_must_be_writable_and_unused(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "read_chomsky_results", lambda *_: pytest.fail("too late"))
    (tmp_path / "file").write_text("")
    assert_rejected("--output.*file/results", main, arguments(tmp_path / "file" / "results"))
    with (
        Lock(tmp_path / "chomsky.lock", "busy"),
        pytest.raises(UserError, match=rf"{tmp_path}: .* --output .*\(held by process"),
    ):
        main(arguments(tmp_path))


def test_unsupported_methods_are_rejected(tmp_path):
    assert_rejected("dape_v2", main, arguments(tmp_path / "results", "--methods", "dape_v3"))
    odd = arguments(tmp_path / "results", "--methods", "none", "rotary", "--hidden-size", "6")
    assert_rejected("head size 3", main, odd)
    assert not (tmp_path / "results").exists()
