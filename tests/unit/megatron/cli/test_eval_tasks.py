"""evaluate.py --eval-tasks on local tasks."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from kerple.attention import parse_mode
from megatron.cli import eval_tasks, evaluate
from megatron.cli.evaluate import main
from megatron.inference import load_model
from megatron.tokenizer.tokenizer import build_tokenizer
from megatron.utils.errors import UserError
from tests.support.checkpoints import TRAIN_LENGTH, settings_of, write_checkpoint, write_yaml
from tests.support.errors import assert_rejected
from tests.support.harness_tasks import CHOICES, TASKS, use_offline_harness, write_tasks
from tests.support.sentencepiece import LLAMA, train_sentencepiece

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def _offline(tmp_path_factory, monkeypatch):
    use_offline_harness(monkeypatch, tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def checkpoints(checkpoints):
    """Method -> folder."""
    return {method: checkpoints[method][0] for method in ("kerple_log", "learned")}


def results_in(folder):
    """The entries of the only file of results, by method and mode."""
    (path,) = Path(folder).glob("tasks_*.json")
    entries = json.loads(path.read_text())["checkpoints"]
    return {(entry["pos_emb"], entry["mode"]): entry for entry in entries}


def byte_perplexity(folder, task_folder, mode, tokenizer):
    """Of the first two pages, computed by the checkpoint's model, which reads each page at once."""
    model, _ = load_model(folder)
    total = size = 0
    for line in (Path(task_folder) / "pages.jsonl").read_text().splitlines()[:2]:
        page = json.loads(line)["page"]
        tokens = torch.tensor([tokenizer.first, *tokenizer.tokenize(page)])
        with torch.no_grad():
            logits = model(
                tokens[None, :-1],
                mode=parse_mode(mode, TRAIN_LENGTH).attention.at_length(len(tokens) - 1),
            )
        total += logits[0].double().log_softmax(-1).gather(1, tokens[1:, None]).sum().item()
        size += len(page.encode())
    return math.exp(-total / size)


def test_the_folder_must_be_writable(checkpoints, tmp_path, monkeypatch):
    """With and without tasks, before anything is read."""
    monkeypatch.setattr(evaluate, "_read_models", lambda *_: pytest.fail("too late"))
    monkeypatch.setattr(evaluate, "evaluate_tasks", lambda *_: pytest.fail("too late"))
    (tmp_path / "file").write_text("")
    for keys in ({}, {"eval_tasks": ["boolq"]}):
        config = settings_of("kerple_log", "nowhere", load=str(checkpoints["kerple_log"]), **keys)
        words = [str(write_yaml(tmp_path / "config.yml", config)), "--output"]
        assert_rejected("--output.*file/report", main, [*words, str(tmp_path / "file" / "report")])


@pytest.mark.ci
def test_tasks_of_the_configuration(checkpoints, task_folder, tmp_path, capsys):
    keys = {
        "load": str(checkpoints["kerple_log"]),
        "eval_tasks": list(TASKS),
        "eval_num_fewshot": 0,
    }
    config = write_yaml(tmp_path / "config.yml", settings_of("kerple_log", "nowhere", **keys))
    output = str(tmp_path / "results")
    main(
        [
            str(config),
            "--include-path",
            task_folder,
            "--limit",
            "6",
            "--eval-results-prefix",
            output,
        ]
    )
    printed = capsys.readouterr().out
    ((_, entry),) = results_in(output).items()
    assert (entry["checkpoint"], entry["iteration"]) == (str(checkpoints["kerple_log"]), 4)
    assert (entry["pos_emb"], entry["mode"], entry["precision"]) == ("kerple_log", "full", "fp32")
    for task in TASKS:
        assert entry["n-samples"][task]["effective"] == 6
        for metric, value in entry["results"][task].items():
            if isinstance(value, float) and not math.isnan(value) and abs(value) < 1e6:
                assert f"{value:.4f}" in printed, metric


@pytest.mark.ci
def test_several_checkpoints_and_modes(checkpoints, task_folder, tmp_path, capsys):
    """A mode given twice is measured once. Texts beyond the training length are not truncated,
    except for a table.
    """
    words = [
        "--checkpoint",
        *map(str, checkpoints.values()),
        "--eval-tasks",
        "pages",
        "--include-path",
        task_folder,
    ]
    modes = ["full", "window@9", "full+linear", "sinks@2+9+reindexed+logn"]
    main(
        [
            *words,
            "--limit",
            "2",
            "--modes",
            *modes,
            f"full+linear@{TRAIN_LENGTH}",
            "--output",
            str(tmp_path),
        ]
    )
    printed = capsys.readouterr().out
    entries = results_in(tmp_path)
    supported = [("kerple_log", mode) for mode in modes] + [
        ("learned", mode) for mode in ("full", "window@9")
    ]
    assert list(entries) == supported
    assert re.search("learned.*full.linear.*not measured", printed.replace("+", "."))
    assert printed.count("|byte_perplexity|") == len(supported)
    for (method, mode), entry in entries.items():
        value = entry["results"]["pages"]["byte_perplexity,none"]
        assert value > 1
        if method == "kerple_log":
            expected = byte_perplexity(
                checkpoints[method], task_folder, mode, build_tokenizer("CharLevelTokenizer")
            )
            assert value == pytest.approx(expected, rel=1e-5)
            assert entry["max_length"] == 16 * TRAIN_LENGTH
        else:
            assert entry["max_length"] == TRAIN_LENGTH


def test_options_of_the_checkpoint_and_the_tokenizer(task_folder, tmp_path):
    """A tokenizer of another type, and a scaling chosen after training."""
    run = tmp_path / "run"
    write_checkpoint(run, "rotary", "nowhere")
    path = train_sentencepiece(tmp_path / "tokenizer.model", vocab_size=480, **LLAMA)
    words = [
        "--checkpoint",
        str(run),
        "--eval-tasks",
        "pages",
        "--limit",
        "2",
        "--include-path",
        task_folder,
    ]
    words += ["--set", "tokenizer-type=SPMTokenizer", f"vocab-file={path}"]
    main([*words, "--output", str(tmp_path / "plain")])
    main(
        [
            *words,
            "pos-emb-options.scaling=linear",
            "pos-emb-options.factor=4",
            "--output",
            str(tmp_path / "scaled"),
        ]
    )
    values = {
        name: entry["results"]["pages"]["byte_perplexity,none"]
        for folder in ("plain", "scaled")
        for (name, _), entry in results_in(tmp_path / folder).items()
    }
    expected = byte_perplexity(run, task_folder, "full", build_tokenizer("SPMTokenizer", path))
    assert values["rotary"] == pytest.approx(expected, rel=1e-5)
    assert values["rotary (scaling linear, factor 4)"] != pytest.approx(expected, rel=1e-5)


def test_another_tokenizer_than_the_trained_one(task_folder, tmp_path):
    write_checkpoint(tmp_path / "run", "none", "nowhere")
    state = tmp_path / "run" / "global_step4" / "mp_rank_00_model_states.pt"
    torch.save({"iteration": 4, "tokenizer": "ab" * 32}, state)
    words = ["--checkpoint", str(tmp_path / "run"), "--eval-tasks", "pages", "--limit", "1"]
    words += ["--include-path", task_folder, "--output", str(tmp_path / "out")]
    assert_rejected("abababab.*allow_other_tokenizer", main, words)
    main([*words, "--set", "allow_other_tokenizer=true"])
    assert results_in(tmp_path / "out")


def test_tasks_that_import_evaluate(checkpoints, tmp_path, monkeypatch):
    """Hugging Face's package, although the project's root, with evaluate.py, is first
    on the path.
    """
    write_tasks(tmp_path)
    task = CHOICES.format(folder=tmp_path).replace('"{{question}}"', "!function own.question")
    (tmp_path / "choices.yaml").write_text(task)
    (tmp_path / "own.py").write_text(
        "import evaluate\n\ndef question(doc):\n    assert evaluate.__path__\n    return "
        "doc['question']\n"
    )
    monkeypatch.delitem(sys.modules, "evaluate", raising=False)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    words = [
        "--checkpoint",
        str(checkpoints["kerple_log"]),
        "--eval-tasks",
        "choices",
        "--limit",
        "2",
    ]
    main([*words, "--include-path", str(tmp_path), "--output", str(tmp_path)])
    entry = results_in(tmp_path)["kerple_log", "full"]
    assert "acc,none" in entry["results"]["choices"]
    assert " at 0x" not in json.dumps(entry)
    assert sys.path[0] == str(ROOT)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-fewshot", "3"], "--num-fewshot.*--eval-tasks"),
        (["--eval-tasks", "pages", "--lengths", "64"], "--lengths"),
        (["--eval-tasks", "pages", "--modes", "full", "full+dynamic-ntk"], r"full\+dynamic-ntk"),
        (["--eval-tasks", "pages", "--protocol", "last-k@8", "--passkey"], "--protocol, --passkey"),
        (["--eval-tasks", "pages", "--limit", "2.5"], "--limit.*1"),
        (["--eval-tasks", "pages", "--include-path", "nowhere"], "--include-path nowhere"),
        (
            ["--eval-tasks", "continued", "--max-length", "12"],
            "eval_tasks continued.*--max-length 12.*max_gen_toks",
        ),
        (["--eval-tasks", "choices", "--max-length", "9"], "eval_tasks choices.*--max-length 9"),
    ],
)
def test_rejected_options(words, message, checkpoints, task_folder, tmp_path):
    checkpoint = ["--checkpoint", str(checkpoints["kerple_log"]), "--output", str(tmp_path / "out")]
    if "--eval-tasks" in words and "--include-path" not in words:
        words = [*words, "--include-path", task_folder]
    with pytest.raises(UserError, match=message) as raised:
        main([*checkpoint, *words])
    assert "network" not in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "hidden", "message"),
    [
        (["pages", "page"], None, "eval_tasks page: unknown task; choose pages.*--include-path$"),
        (
            ["pages", "--max-length", str(TRAIN_LENGTH + 1)],
            None,
            f"--max-length.*at most {TRAIN_LENGTH}",
        ),
        (["pages"], "lm_eval.utils", re.escape("pip install 'kerple-neox[eval]'")),
    ],
)
def test_options_rejected_before_a_model_is_loaded(
    words, hidden, message, checkpoints, task_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(eval_tasks, "load_model", lambda *_, **__: pytest.fail("too late"))
    if hidden is not None:
        monkeypatch.setitem(sys.modules, hidden, None)
    options = ["--checkpoint", *map(str, checkpoints.values()), "--include-path", task_folder]
    options += ["--output", str(tmp_path / "out"), "--skip-unsupported"]
    assert_rejected(message, main, [*options, "--eval-tasks", *words])


def test_missing_data(checkpoints, tmp_path):
    text = CHOICES.format(folder=tmp_path / "gone").replace("task: choices", "task: gone")
    (tmp_path / "gone.yaml").write_text(text)
    words = ["--checkpoint", str(checkpoints["kerple_log"]), "--output", str(tmp_path / "out")]
    words += ["--eval-tasks", "gone", "--include-path", str(tmp_path)]
    assert_rejected("eval_tasks gone.*network", main, words)
