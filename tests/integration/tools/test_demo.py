"""`make demo`: its options, and which steps it skips or refuses. `test_readme.py` runs it."""

import pytest

from megatron.utils.errors import UserError
from tests.support.records import record
from tests.support.runs import ROOT
from tools import demo


def test_a_wrong_option_is_an_error_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "run_step", lambda title, command: pytest.fail(f"ran {command}"))
    for words, message in (
        (["--tokens", "512"], r"--tokens 512: .* 2,048 tokens; choose at least 2048"),
        (["--methods", "kerple_log", "../demo"], r"--methods \.\./demo: there is no configs/pos_emb file"),
        (["--methods", "alibi", "rotary", "alibi"], "--methods alibi: is given more than once"),
    ):
        with pytest.raises(UserError, match=message):
            demo.main(["--output", str(tmp_path), *words])


def write_corpus(folder) -> None:
    corpus = folder / demo.CORPUS
    corpus.mkdir(parents=True)
    (corpus / f"{demo.CORPUS}_text_document.idx").write_bytes(b"1")
    (corpus / "tokenizer.json").write_bytes(b"2")


def test_other_methods_are_evaluated_again(tmp_path, monkeypatch):
    write_corpus(tmp_path / "data")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "results.jsonl").write_text("")
    evaluated = []

    def run_step(title, command):
        evaluated.append(command[command.index("--checkpoint") + 1 : command.index("--lengths")])
        return 0

    monkeypatch.setattr(demo, "run_step", run_step)
    for methods in (["alibi", "rotary"], ["alibi", "rotary"], ["alibi"]):
        words = ["--output", str(tmp_path), "--data", str(tmp_path / "data"), "--methods", *methods]
        assert demo.evaluate(demo.parse_options(words)) == 0
    assert evaluated == [
        [str(tmp_path / method / "checkpoints") for method in methods] for methods in (["alibi", "rotary"], ["alibi"])
    ]


def test_checkpoints_of_others_and_damaged_records_are_kept(tmp_path):
    write_corpus(tmp_path / "data")
    checkpoints = tmp_path / "alibi" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest").write_text("global_step9")
    options = demo.parse_options(["--output", str(tmp_path), "--data", str(tmp_path / "data")])
    with pytest.raises(UserError, match=r"checkpoints: was not written by the demo"):
        demo.train("alibi", options, "model 1 of 1")
    (tmp_path / "alibi" / "made_from.json").write_text('{"iterations": 6')
    with pytest.raises(UserError, match=r"made_from\.json.*JSON"):
        demo.train("alibi", options, "model 1 of 1")
    assert (checkpoints / "latest").read_text() == "global_step9"


def test_the_conclusions_claim_what_the_standard_errors_support():
    def record_of(pos_emb, length, losses):
        groups = {"tokens": [100, 100, 100, 100], "losses": losses}
        keys = {"loss": sum(losses) / 4, "targets": "a", "groups": groups}
        return record(pos_emb, length, 2.0, **keys)

    kerple = [3.0, 2.0, 1.0, 4.0]
    records = [
        record_of("kerple_log", 128, kerple),
        record_of("kerple_log", 2048, [2.89, 1.91, 0.9, 3.9]),
        record_of("alibi", 128, kerple),
        record_of("alibi", 2048, [3.2, 1.85, 1.1, 3.9]),
        record_of("rotary", 128, kerple),
        record_of("rotary", 2048, [4.0, 3.1, 2.0, 4.9]),
    ]
    assert demo.conclusions(records) == [
        "kerple_log: from 128 to 2,048 tokens the loss falls (-0.1000 ± 0.0041 nats per token)",
        "alibi: from 128 to 2,048 tokens the loss shows no clear change (+0.013 ± 0.083 nats per token)",
        "rotary: from 128 to 2,048 tokens the loss rises (+1.000 ± 0.041 nats per token)",
        "alibi minus kerple_log at 2,048: +0.113 ± 0.086 nats per token: a tie on this text",
        "rotary minus kerple_log at 2,048: +1.100 ± 0.039 nats per token: kerple_log is better on this text",
        "± is the standard error over documents. With one seed per method, this does not rank the methods in general.",
    ]


def test_the_demo_uses_the_iterations_of_its_configuration():
    text = (ROOT / "configs" / "demo.yml").read_text()
    assert '"train-iters": 600' in text
    assert demo.parse_options([]).iterations == 600
