"""evaluate.py on small checkpoints and data."""

import argparse
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

from kerple.attention import FULL, AttentionMode, Span
from kerple.positional import registry
from megatron.checkpoint.directory import STATE_FILE
from megatron.checkpoint.manifest import write_manifest_of_folder
from megatron.cli import evaluate
from megatron.cli.evaluate import main
from megatron.cli.prepare_data import main as prepare
from megatron.cli.report import main as report
from megatron.data.indexed_dataset import data_fingerprint, open_indexed_files, write_manifest
from megatron.evaluation.records import extrapolation_records, read_results
from megatron.tokenizer.hugging_face import HuggingFaceTokenizer, train_bpe
from megatron.utils.errors import UserError
from tests.support.checkpoints import (
    TRAIN_LENGTH,
    settings_of,
    write_checkpoint,
    write_corpus,
    write_yaml,
)
from tests.support.corpora import json_lines, manifest_of, part_tokens
from tests.support.errors import assert_rejected
from tests.support.language_models import direct_losses
from tests.support.texts import KINDS

LENGTHS = ["--lengths", "32", "64", "256"]


def mean_loss(model, data, length, total, piece=None, **span):
    """From one call, on evenly spaced pieces of the validation third of the corpus."""
    stream = torch.from_numpy(part_tokens(data, "2,1,0"))
    piece = piece or total
    pieces = [index * (len(stream) - 1) // (total // piece) for index in range(total // piece)]
    starts = [first + offset for first in pieces for offset in range(0, piece, length)]
    text = torch.stack([stream[start : start + length + 1] for start in starts])
    with torch.no_grad():
        return direct_losses(model(text[:, :-1], **span), text[:, 1:]).mean().item()


def rows_in(folder):
    return extrapolation_records(read_results(folder))


def test_one_checkpoint(tmp_path, configuration, checkpoints, data, capsys):
    report = tmp_path / "report"
    modes = ["--modes", "full", "window@16", "blockwise", f"blockwise@{TRAIN_LENGTH}"]
    main([configuration(), *LENGTHS, *modes, "--tokens", "1000", "--output", str(report)])
    output = capsys.readouterr()
    rows = rows_in(tmp_path / "report")
    spans = {"full": FULL, "window@16": Span(window=16), "blockwise": Span(block=TRAIN_LENGTH // 2)}
    assert [(row["mode"], row["length"]) for row in rows] == [
        (mode, length) for mode in spans for length in (32, 64, 256)
    ]
    for row in rows:
        span = spans[row["mode"]]
        loss = mean_loss(
            checkpoints["kerple_log"][1], data, row["length"], 768, 256, mode=AttentionMode(span)
        )
        assert row["loss"] == pytest.approx(loss, abs=1e-5)
        known = {key: row[key] for key in ("pos_emb", "seed", "train_length", "tokens")}
        assert known == {
            "pos_emb": "kerple_log",
            "seed": 77,
            "train_length": TRAIN_LENGTH,
            "tokens": 768,
        }
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == [
        f"extrapolation-text-2x32-{TRAIN_LENGTH}-non-overlapping.png",
        "extrapolation.md",
        "results.jsonl",
    ]
    assert "KERPLE (log)" in output.out
    assert output.err.count("tokens/s") == 9


def test_several_checkpoints_make_one_report(tmp_path, checkpoints, data):
    folders = [str(folder) for folder, _ in checkpoints.values()]
    main(["--checkpoint", *folders, *LENGTHS, "--tokens", "600", "--output", str(tmp_path)])
    rows = rows_in(tmp_path)
    assert [(row["pos_emb"], row["length"]) for row in rows] == [
        (m, n) for m in checkpoints for n in (32, 64, 256)
    ]
    for row in rows:
        if row["pos_emb"] == "learned" and row["length"] > TRAIN_LENGTH:
            assert row["loss"] is None
            assert "32" in row["note"]
        else:
            assert row["loss"] == pytest.approx(
                mean_loss(checkpoints[row["pos_emb"]][1], data, row["length"], 512, 256), abs=1e-5
            )
    text = (tmp_path / "extrapolation.md").read_text()
    assert all(name in text for name in ("KERPLE (log)", "ALiBi", "learned"))
    assert "n/a: learned at 64, 256" in text


def test_lengths_tokens_and_report_folder_of_the_configuration(tmp_path, configuration):
    folder = tmp_path / "results"
    main(
        [
            configuration(
                evaluation_lengths=[16, 48], eval_tokens=200, eval_results_prefix=str(folder)
            )
        ]
    )
    assert [(row["length"], row["tokens"]) for row in rows_in(folder)] == [(16, 192), (48, 192)]


def test_default_lengths(configuration, checkpoints, capsys):
    main([configuration()])
    output = capsys.readouterr().out
    folder = checkpoints["kerple_log"][0] / "evaluation"
    assert f"writing the report to {folder}" in output
    assert "lengths: 32 64 128 256 512" in output
    rows = rows_in(folder)
    assert [row["length"] for row in rows] == [32, 64, 128, 256, 512]
    # 20 of 60 documents of 201 tokens, of which the first token is no target
    assert {row["tokens"] for row in rows} == {(20 * 201 - 1) // 512 * 512}


def test_half_precision_changes_the_loss_a_little(tmp_path, configuration):
    losses = {}
    for name in ("fp32", "bf16"):
        words = [configuration(), "--lengths", "64", "--tokens", "640", "--precision", name]
        main([*words, "--output", str(tmp_path / name)])
        (row,) = rows_in(tmp_path / name)
        losses[name] = row["loss"]
        assert row["precision"] == name
    assert losses["fp32"] != losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)


@pytest.mark.parametrize(
    ("keys", "words", "message"),
    [
        ({}, ["--iteration", "5"], "iteration 5.*4"),
        ({}, ["--text", "a.txt", "--split", "test"], r"--text a\.txt.*--split"),
        ({"tokenizer_type": "GPT2BPETokenizer"}, ["--text", "a.txt"], "vocab-file"),
        ({}, ["--modes", "blockwise@33"], "33 is odd"),
        ({"eval_tasks": ["lambada_openai"]}, ["--lengths", "32"], "eval_tasks: --lengths"),
        ({}, ["--passkey-trials", "3"], "--passkey-trials.*--passkey"),
        ({"pos_emb": "alibi"}, [], "pos_emb kerple_log.*alibi"),
        ({"data_path": "nodata"}, ["--lengths", "32"], "nodata"),
    ],
)
def test_rejected_commands(tmp_path, monkeypatch, configuration, keys, words, message):
    monkeypatch.chdir(tmp_path)
    assert_rejected(message, main, [configuration(**keys), *words, "--output", "report"])
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "notes.md"])
def test_a_text_without_a_dataset(tmp_path, monkeypatch, configuration, checkpoints, name):
    """Its documents are tokenized as in a dataset, with an end-of-document token."""
    text = KINDS["python"][:2000]
    content = (
        json_lines(text[:900], text[900:]) if name == "a.jsonl" else b"\xef\xbb\xbf" + text.encode()
    )
    (tmp_path / name).write_bytes(content)
    keys = configuration(data_path=None, tokenizer_type="CharLevelTokenizer")
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["--text", f"~/{name}", "--lengths", "64", "--tokens", "1280"]
    main([keys, *words, "--output", str(tmp_path / "report")])
    documents = [text[:900], text[900:]] if name == "a.jsonl" else [text]
    ids = [token for document in documents for token in (*document.encode(), 0)]
    starts = [index * (len(ids) - 1) // 20 for index in range(20)]
    segments = torch.tensor([ids[start : start + 65] for start in starts])
    with torch.no_grad():
        losses = direct_losses(checkpoints["kerple_log"][1](segments[:, :-1]), segments[:, 1:])
    (row,) = rows_in(tmp_path / "report")
    assert row["loss"] == pytest.approx(losses.mean().item(), abs=1e-5)
    assert row["bits_per_byte"] is not None


TABLE = b"a,b\n1,2\n" * 99


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("table.csv", TABLE, r"table\.csv .*\.txt"),
        ("notes.log.gz", TABLE, r"notes\.log\.gz .*\.txt"),
        ("page.html", TABLE, r"page\.html .*\.txt"),
        ("a.txt", b"good\nb\xe9d\n", r"a\.txt.*2"),
    ],
)
def test_a_text_that_cannot_be_prepared(
    tmp_path, monkeypatch, configuration, name, content, message
):
    """The same files as for `kerple prepare`, whose option --bad-documents evaluate.py lacks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    keys = configuration(data_path=None, tokenizer_type="CharLevelTokenizer")
    with pytest.raises(UserError, match=message) as caught:
        main([keys, "--text", name, "--lengths", "64", "--output", "report"])
    assert "--bad-documents" not in str(caught.value)
    assert_rejected(message, prepare, ["own", "--from", name])


OWN = """
from kerple.positional import KerpleLog, register


@register("{name}")
class Own(KerpleLog):
    pass
"""


def test_checkpoints_of_methods_in_several_files(tmp_path, data, monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    lines, folders = ["from kerple.positional import load_plugin"], []
    for name in ("test_own_1", "test_own_2"):
        file = tmp_path / f"{name}.py"
        file.write_text(OWN.format(name=name))
        lines.append(f"load_plugin({str(file)!r})")
        folders.append(tmp_path / name)
        write_checkpoint(folders[-1], "kerple_log", data)
        config = folders[-1] / "global_step4" / "configs" / "config.yml"
        config.write_text(config.read_text().replace("kerple_log", name))
    words = ["--checkpoint", *map(str, folders), *LENGTHS, "--output", str(tmp_path / "report")]
    (tmp_path / "both.py").write_text("\n".join(lines))
    one = f"pos-emb-module={tmp_path / 'test_own_1.py'}"
    assert_rejected(r"test_own_2.*pos-emb-module.*several files", main, [*words, "--set", one])
    registry._METHODS.pop("test_own_1")
    sys.modules.pop(next(name for name in sys.modules if "test_own_1" in name))
    main([*words, "--set", f"pos-emb-module={tmp_path / 'both.py'}"])
    assert {row["pos_emb"] for row in rows_in(tmp_path / "report")} == {"test_own_1", "test_own_2"}


@pytest.mark.parametrize("change", ["hidden-size=16", "layernorm-epsilon=0.5", "pos-emb=none"])
def test_set_changes_no_model_of_several_checkpoints(tmp_path, checkpoints, data, change):
    write_checkpoint(tmp_path / "other", "alibi", data)
    folders = [str(checkpoints["kerple_log"][0]), str(tmp_path / "other")]
    words = ["--checkpoint", *folders, *LENGTHS, "--output", str(tmp_path / "report")]
    name = change.partition("=")[0].replace("-", "_")
    assert_rejected(name, main, [*words, "--set", change])
    assert not (tmp_path / "report").exists()


def test_several_checkpoints_require_an_output_folder_and_the_same_data(
    tmp_path, checkpoints, data
):
    folders = [str(checkpoints["kerple_log"][0]), str(tmp_path / "other")]
    assert_rejected("--output", main, ["--checkpoint", *folders, *LENGTHS])
    (tmp_path / "data").mkdir()
    elsewhere = write_corpus(tmp_path / "data")
    write_checkpoint(tmp_path / "other", "alibi", elsewhere)
    assert_rejected(
        "data_path",
        main,
        ["--checkpoint", *folders, *LENGTHS, "--output", str(tmp_path / "report")],
    )
    common = str(write_yaml(tmp_path / "common.yml", settings_of("none", data)))
    main([common, "--checkpoint", *folders, *LENGTHS, "--output", str(tmp_path / "report")])
    assert {row["pos_emb"] for row in rows_in(tmp_path / "report")} == {"kerple_log", "alibi"}


def test_checkpoints_with_another_tokenizer_are_rejected(
    tmp_path, checkpoints, data, configuration
):
    train_bpe(["a text"] * 3, 270).save(str(tmp_path / "tokenizer.json"))
    keys = {"tokenizer_type": "HFTokenizer", "vocab_file": str(tmp_path / "tokenizer.json")}
    write_checkpoint(tmp_path / "other", "alibi", data, **keys)
    folders = [str(checkpoints["kerple_log"][0]), str(tmp_path / "other")]
    (tmp_path / "text.txt").write_text("a text" * 99)
    words = ["--lengths", "32", "--tokens", "64", "--output", str(tmp_path / "report")]
    for options in (
        ["--checkpoint", *folders],
        [configuration(), "--checkpoint", *folders],
        [configuration(), "--checkpoint", *folders, "--text", str(tmp_path / "text.txt")],
    ):
        assert_rejected(
            "other.*tokenizer.*HFTokenizer.*CharLevelTokenizer", main, [*options, *words]
        )
    # A configuration without a tokenizer has that of the checkpoint.
    keys = {
        key: value for key, value in settings_of("alibi", data).items() if key != "tokenizer_type"
    }
    settings = str(write_yaml(tmp_path / "data.yml", keys))
    main([settings, "--checkpoint", folders[1], "--text", str(tmp_path / "text.txt"), *words])
    (row,) = rows_in(tmp_path / "report")
    assert row["bits_per_byte"] is not None


def test_each_of_several_checkpoints_keeps_its_options(tmp_path, data):
    scaling = {"scaling": "linear", "factor": 4}
    write_checkpoint(tmp_path / "plain", "rotary", data)
    write_checkpoint(tmp_path / "scaled", "rotary", data, pos_emb_options=scaling)
    settings = str(write_yaml(tmp_path / "common.yml", settings_of("rotary", data)))
    folders = [str(tmp_path / "plain"), str(tmp_path / "scaled")]
    main(
        [
            settings,
            "--checkpoint",
            *folders,
            "--lengths",
            "64",
            "--output",
            str(tmp_path / "report"),
        ]
    )
    methods = [row["pos_emb"] for row in rows_in(tmp_path / "report")]
    assert methods == ["rotary", "rotary (scaling linear, factor 4)"]


def test_weights_that_are_not_finite_are_an_error(tmp_path, data):
    folder = tmp_path / "nan"
    write_checkpoint(folder, "alibi", data)
    path = next((folder / "global_step4").glob("layer_03*"))
    state = torch.load(path, weights_only=True)
    name = next(name for name in state if name.endswith("dense.weight"))
    state[name][0, 0] = float("nan")
    torch.save(state, path)
    (folder / "global_step4" / "manifest.json").unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"global_step4.*dense\.weight.*NaN"):
        main(
            [
                "--checkpoint",
                str(folder),
                "--lengths",
                "32",
                "--tokens",
                "64",
                "--output",
                str(tmp_path / "out"),
            ]
        )
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == b""


def test_a_loss_that_is_not_finite_is_an_error_after_the_report(
    tmp_path, configuration, monkeypatch
):
    loss = property(lambda sums: math.nan)
    monkeypatch.setattr("megatron.evaluation.scoring.LossAccumulator.loss", loss)
    words = [configuration(), "--lengths", "32", "--tokens", "64", "--output", str(tmp_path)]
    for _ in range(2):  # the second run finds the record
        assert_rejected(r"results\.jsonl.*kerple_log.*32", main, words)
    assert "n/a" in (tmp_path / "extrapolation.md").read_text()


def test_a_second_run_measures_only_what_is_missing(tmp_path, configuration, capsys, monkeypatch):
    words = [configuration(), "--tokens", "512", "--output", str(tmp_path)]
    main([*words, "--lengths", "32", "128", "--by-position", "4"])
    first = read_results(tmp_path)
    assert [(row["kind"], row["length"], row["corpus"]) for row in first] == [
        (kind, length, "text") for length in (32, 128) for kind in ("extrapolation", "positions")
    ]
    assert all(
        row["bits_per_byte"] > 1 and row["stderr"] > 0
        for row in first
        if row["kind"] == "extrapolation"
    )
    content = (tmp_path / "results.jsonl").read_bytes()
    capsys.readouterr()
    main([*words, "--lengths", "32", "64", "128", "--protocol", "non-overlapping", "last-k@16"])
    output = capsys.readouterr()
    assert "2 of 6 results exist from an earlier run" in output.out
    assert output.err.count("tokens/s") == 4
    assert (tmp_path / "results.jsonl").read_bytes().startswith(content)
    monkeypatch.setattr(
        "megatron.cli.evaluate.load", lambda *_, **__: pytest.fail("a model was loaded")
    )
    content = (tmp_path / "results.jsonl").read_bytes()
    main([*words, "--lengths", "32", "128"])
    assert (tmp_path / "results.jsonl").read_bytes() == content


@pytest.mark.ci
def test_further_measures_are_stored_and_not_measured_again(
    tmp_path, checkpoints, capsys, monkeypatch
):
    folders = [str(checkpoints[method][0]) for method in ("kerple_log", "learned")]
    words = [
        "--checkpoint",
        *folders,
        "--lengths",
        "256",
        "512",
        "--tokens",
        "512",
        "--output",
        str(tmp_path),
    ]
    words += ["--resolution", "2", "--effective-length"]
    words += ["--passkey", "--passkey-depths", "0", "1", "--passkey-trials", "2"]
    main(words)
    shown = capsys.readouterr().out
    assert all(
        title in shown for title in ("Perplexity", "Attention resolution", "Passkey retrieval")
    )
    records = read_results(tmp_path)
    assert all(
        record["environment"]["versions"].endswith(f"torch {torch.__version__}")
        for record in records
    )
    assert [
        (record["pos_emb"], record["length"])
        for record in records
        if record["kind"] == "resolution"
    ] == [(method, length) for method in ("kerple_log", "learned") for length in (256, 512)]
    assert [(r["length"], r["depth"], r["trials"]) for r in records if r["kind"] == "passkey"][
        :4
    ] == [(length, depth, 2) for length in (256, 512) for depth in (0, 1)]
    kerple, learned = (record for record in records if record["kind"] == "effective_length")
    assert kerple["layers"] == ["all layers"]
    method = checkpoints["kerple_log"][1].blocks[0].attention.rpe
    assert kerple["effective_lengths"] == [method.effective_length(kerple["length"]).tolist()]
    assert (learned["layers"], learned["effective_lengths"]) == ([], [])
    assert "learned has no bias" in learned["note"]
    # `kerple report` shows all of them.
    report(["--output", str(tmp_path / "report"), str(tmp_path)])
    files = {path.name for path in (tmp_path / "report").glob("*/*.*")}
    assert {
        "passkey-text-2x32-32.md",
        "passkey-text-2x32-32.png",
        "lex-resolution-2x32-32-first-2.tex",
    } <= files
    content = (tmp_path / "results.jsonl").read_bytes()
    monkeypatch.setattr(
        "megatron.cli.evaluate.load", lambda *_, **__: pytest.fail("a model was loaded")
    )
    main(words)
    assert (tmp_path / "results.jsonl").read_bytes() == content


def test_results_of_another_model_are_rejected(tmp_path, checkpoints):
    words = ["--lengths", "32", "--tokens", "64", "--output", str(tmp_path)]
    main(["--checkpoint", str(checkpoints["alibi"][0]), *words])
    other = ["--checkpoint", str(checkpoints["kerple_log"][0]), *words]
    assert_rejected("alibi.*77.*--output.*--replace", main, other)
    main([*other, "--replace"])
    assert {row["pos_emb"] for row in rows_in(tmp_path)} == {"kerple_log"}


def test_two_checkpoints_with_the_same_method_and_seed_need_labels(tmp_path, checkpoints, data):
    write_checkpoint(tmp_path / "again", "kerple_log", data, iteration=5)
    words = ["--lengths", "32", "--tokens", "64", "--output", str(tmp_path / "out"), "--checkpoint"]
    words += [str(checkpoints["kerple_log"][0]), str(tmp_path / "again")]
    assert_rejected("kerple_log.*4.*again.*5.*--label", main, words)
    assert not (tmp_path / "out").exists()
    assert_rejected("--label.*1.*2", main, [*words, "--label", "first"])
    main([*words, "--label", "first", "second"])
    rows = rows_in(tmp_path / "out")
    assert [row["pos_emb"] for row in rows] == ["kerple_log (first)", "kerple_log (second)"]
    assert (rows[0]["checkpoint"]["layers"], rows[0]["checkpoint"]["hidden_size"]) == (2, 32)


def test_checkpoints_of_equal_weights_and_other_settings(tmp_path, checkpoints):
    """Another epsilon changes losses, so it is another model."""
    original = checkpoints["kerple_log"][0]
    shutil.copytree(original, tmp_path / "other")
    config = tmp_path / "other/global_step4/configs/config.yml"
    values = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**values, "layernorm_epsilon": 0.3}))
    words = ["--lengths", "32", "--tokens", "64", "--output", str(tmp_path / "out"), "--checkpoint"]
    assert_rejected("other.*--label", main, [*words, str(original), str(tmp_path / "other")])
    main([*words, str(original)])
    (first,) = rows_in(tmp_path / "out")
    assert_rejected("another model.*--replace", main, [*words, str(tmp_path / "other")])
    main([*words, str(tmp_path / "other"), "--replace"])
    (second,) = rows_in(tmp_path / "out")
    assert second["loss"] != pytest.approx(first["loss"], abs=1e-3)


def test_an_edited_method_is_another_model(tmp_path, data, monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    folder, file = tmp_path / "run", tmp_path / "test_edited.py"
    write_checkpoint(folder, "kerple_log", data)
    config = folder / "global_step4" / "configs" / "config.yml"
    config.write_text(config.read_text().replace("kerple_log", "test_edited"))
    words = ["--checkpoint", str(folder), *LENGTHS, "--output", str(tmp_path / "report")]
    words += ["--set", f"pos-emb-module={file}"]
    losses = []
    for lines in ("", "    def bias(self, distance):\n        return -super().bias(distance)\n"):
        file.write_text(OWN.format(name="test_edited") + lines)
        if losses:
            assert_rejected("another model.*--replace", main, words)
            registry._METHODS.pop("test_edited")
            sys.modules.pop(next(name for name in sys.modules if "test_edited" in name))
        main([*words, "--replace"])
        losses.append([row["loss"] for row in rows_in(tmp_path / "report")])
        registry._METHODS.pop("test_edited")
        sys.modules.pop(next(name for name in sys.modules if "test_edited" in name))
    assert losses[0] != losses[1]


def test_a_mode_is_measured_once_it_is_supported(tmp_path, checkpoints):
    folder = str(checkpoints["kerple_log"][0])
    words = ["--checkpoint", folder, "--lengths", "64", "--tokens", "64", "--output", str(tmp_path)]
    words += ["--modes", "full", "sinks@2+9", "--skip-unsupported", "--by-position", "4"]
    main([*words, "--set", "attention-backend=sdpa"])
    full, sinks = rows_in(tmp_path)
    assert full["loss"] is not None
    assert "attention-backend sdpa" in sinks["note"]
    main(words)
    measured = {row["mode"]: row for row in rows_in(tmp_path)}
    assert measured["sinks@2+9"]["note"] is None
    assert measured["sinks@2+9"]["loss"] is not None
    assert measured["full"] == full
    positions = [record for record in read_results(tmp_path) if record["kind"] == "positions"]
    assert all(record["losses"] for record in positions)
    main([*words, "--set", "attention-backend=sdpa"])  # the measured value stays
    assert {row["mode"]: row for row in rows_in(tmp_path)} == measured


def test_data_of_another_tokenizer_are_rejected(tmp_path, checkpoints, capsys):
    prefix, output = write_corpus(tmp_path), str(tmp_path / "out")
    write_manifest(prefix, manifest_of(open_indexed_files(prefix), 255))
    words = [
        "--checkpoint",
        str(checkpoints["alibi"][0]),
        "--lengths",
        "32",
        "--tokens",
        "64",
        "--output",
        output,
    ]
    words += ["--set", f"data-path={prefix}"]
    assert_rejected("HFTokenizer.*tokenizer-type.*vocab-file", main, words)
    assert not Path(output).exists()
    main([*words, "tokenizer-type=HFTokenizer", "vocab-file=nowhere"])  # no usable tokenizer
    assert "bits per byte is not measured: vocab-file nowhere" in capsys.readouterr().out
    assert rows_in(output)[0]["loss"] > 0


def test_a_dataset_with_other_contents(tmp_path, monkeypatch):
    """Its validation split may contain what the checkpoint was trained on."""
    data = write_corpus(tmp_path)
    write_checkpoint(tmp_path / "run", "alibi", data)
    state = tmp_path / "run" / "global_step4" / STATE_FILE
    torch.save({"training": {"data": {data: data_fingerprint(data)}}}, state)
    write_manifest_of_folder(state.parent, 4)
    words = ["--checkpoint", str(tmp_path / "run"), "--lengths", "32", "--tokens", "64"]
    main(words)
    write_corpus(tmp_path, documents=50)
    assert_rejected("other contents of .*text_document", main, words)
    main([*words, "--set", "allow_other_data=true", "--replace"])


def test_the_token_at_the_beginning(tmp_path):
    """Without a token of the tokenizer, `always` chooses its end-of-document token."""
    train_bpe(["a text"] * 3, 270).save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "text.txt").write_text("a text")
    eod = tokenizer.eod
    for bos, choices in ((5, {"auto": 5, "always": 5, "never": None}), (None, {"always": eod})):
        tokenizer.bos = bos
        for choice, token in choices.items():
            options = argparse.Namespace(text=tmp_path / "text.txt", bos=choice)
            assert evaluate._read_text(None, tokenizer, options, print).bos == token


def test_a_folder_without_data_needs_a_text(tmp_path):
    write_checkpoint(tmp_path / "run", "alibi", None)
    assert_rejected(
        r"--text FILE", main, ["--checkpoint", str(tmp_path / "run"), "--lengths", "32"]
    )
