"""evaluate.py --eval-tasks on local tasks."""

import json
import math
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from kerple.attention import FULL_MODE
from megatron.cli import eval_tasks, evaluate
from megatron.cli.eval_tasks import TASK_RESULTS
from megatron.cli.evaluate import main
from megatron.evaluation import harness
from megatron.tokenizer.tokenizer import build_tokenizer
from megatron.utils.errors import UserError
from megatron.utils.processes import Lock
from tests.support.checkpoints import TRAIN_LENGTH, settings_of, write_checkpoint, write_yaml
from tests.support.errors import assert_rejected
from tests.support.harness_tasks import (
    CHOICES,
    CONTINUED,
    LONG,
    TASKS,
    use_offline_harness,
    write_ascii_checkpoint,
    write_tasks,
)
from tests.support.sentencepiece import LLAMA, train_sentencepiece

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def _offline(tmp_path_factory, monkeypatch):
    use_offline_harness(monkeypatch, tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Method -> folder."""
    folders = {method: tmp_path_factory.mktemp(method) for method in ("kerple_log", "learned")}
    for method, folder in folders.items():
        write_ascii_checkpoint(folder, method)
    return folders


def results_in(folder):
    return json.loads((Path(folder) / TASK_RESULTS).read_text())


def test_the_folder_must_be_writable_and_unused(checkpoints, tmp_path, monkeypatch):
    """With and without tasks, before anything is read."""
    monkeypatch.setattr(evaluate, "_read_models", lambda *_: pytest.fail("too late"))
    monkeypatch.setattr(evaluate, "run_harness", lambda *_: pytest.fail("too late"))
    (tmp_path / "file").write_text("")
    for keys in ({}, {"eval_tasks": ["boolq"]}):
        config = settings_of("kerple_log", "nowhere", load=str(checkpoints["kerple_log"]), **keys)
        words = [str(write_yaml(tmp_path / "config.yml", config)), "--output"]
        assert_rejected("--output.*file/report", main, [*words, str(tmp_path / "file" / "report")])
    with (
        Lock(tmp_path / "tasks.json.lock", "busy"),
        pytest.raises(UserError, match=rf"{tmp_path}: .*tasks.json; .*\(held by process"),
    ):
        main([*words, str(tmp_path)])


def test_tasks_of_the_configuration(checkpoints, task_folder, tmp_path, capsys):
    keys = {"load": str(checkpoints["kerple_log"]), "eval_tasks": list(TASKS), "eval_num_fewshot": 0}
    config = write_yaml(tmp_path / "config.yml", settings_of("kerple_log", "nowhere", **keys))
    output = str(tmp_path / "results")
    main([str(config), "--include-path", task_folder, "--limit", "6", "--eval-results-prefix", output])
    printed = capsys.readouterr().out
    # The longest choice and its question without the last token exceed the training length, and are not truncated.
    longest = LONG + len(" longer one") - 1
    assert f"loglikelihood: 18 requests of up to {longest} tokens; max_length {longest}: all fit" in printed
    assert f"generate_until: 6 requests of up to {LONG + 12} tokens" in printed
    (checkpoint,) = results_in(output)["checkpoints"]
    assert (checkpoint["limit"], checkpoint["tasks"]) == (6, list(TASKS))
    assert {key: checkpoint[key] for key in ("iteration", "pos_emb", "train_length")} == {
        "iteration": 4,
        "pos_emb": "kerple_log",
        "train_length": TRAIN_LENGTH,
    }
    assert checkpoint["results"]["pages"]["bits_per_byte,none"] > 1
    for task in TASKS:
        for metric, value in checkpoint["results"][task].items():
            if isinstance(value, float) and not math.isnan(value) and abs(value) < 1e6:
                assert f"{value:.4f}" in printed, metric


def test_tasks_that_import_evaluate(checkpoints, tmp_path, monkeypatch):
    """Hugging Face's package, although the project's root, with evaluate.py, is first on the path."""
    write_tasks(tmp_path)
    task = CHOICES.format(folder=tmp_path).replace('"{{question}}"', "!function own.question")
    (tmp_path / "choices.yaml").write_text(task)
    (tmp_path / "own.py").write_text(
        "import evaluate\n\ndef question(doc):\n    assert evaluate.__path__\n    return doc['question']\n"
    )
    monkeypatch.delitem(sys.modules, "evaluate", raising=False)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    words = ["--checkpoint", str(checkpoints["kerple_log"]), "--eval-tasks", "choices", "--limit", "2"]
    main([*words, "--include-path", str(tmp_path), "--output", str(tmp_path)])
    assert "acc,none" in results_in(tmp_path)["checkpoints"][0]["results"]["choices"]
    assert sys.path[0] == str(ROOT)


def test_several_checkpoints_are_one_table(checkpoints, task_folder, tmp_path, capsys):
    folders = [str(folder) for folder in checkpoints.values()]
    words = [
        "--checkpoint",
        *folders,
        "--eval-tasks",
        "pages",
        "--include-path",
        task_folder,
        "--output",
        str(tmp_path),
    ]
    main([*words, "--max-length", "16"])
    results = results_in(tmp_path)["checkpoints"]
    assert [entry["pos_emb"] for entry in results] == ["kerple_log", "learned"]
    assert len({entry["results"]["pages"]["byte_perplexity,none"] for entry in results}) == 2
    output = capsys.readouterr().out
    assert output.count("max_length 16: 6 of them read in several windows") == 2
    assert output.count("bits_per_byte ↓") == 2


def test_tasks_in_modes(checkpoints, task_folder, tmp_path, capsys):
    """A mode given twice is measured once; one that only some checkpoints support has a note."""
    words = ["--checkpoint", *map(str, checkpoints.values()), "--eval-tasks", "pages", "--include-path", task_folder]
    modes = ["full", "window@4", "window@8+clip@4", f"full+logn@{TRAIN_LENGTH}", "full+logn"]
    main([*words, "--max-length", str(TRAIN_LENGTH), "--limit", "2", "--modes", *modes, "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    entries = {(entry["pos_emb"], entry["mode"]): entry for entry in results_in(tmp_path)["checkpoints"]}
    assert {mode for _, mode in entries} == {*modes[:3], "full+logn"}
    assert len(entries) == 8
    unsupported = entries.pop(("learned", "window@8+clip@4"))
    assert "distance map clip has no meaning" in unsupported["note"]
    assert unsupported["note"] in printed
    assert unsupported["results"] == {}
    values = {key: entry["results"]["pages"]["byte_perplexity,none"] for key, entry in entries.items()}
    assert values["learned", "full"] == values["learned", "full+logn"]  # not beyond the training length
    assert len(set(values.values())) == 5
    assert printed.count("byte_perplexity ↓") == 7
    assert all(name in printed.rpartition("Tasks")[2] for name in ("window@4", "full+logn", "window@8+clip@4"))


def test_tasks_json_keeps_and_resumes_earlier_results(checkpoints, tmp_path, monkeypatch, capsys):
    folder = write_tasks(tmp_path)
    words = ["--checkpoint", str(checkpoints["kerple_log"]), "--include-path", folder, "--limit", "2"]
    words += ["--output", str(tmp_path)]

    def stored():
        return [(entry["mode"], *entry["results"]) for entry in results_in(tmp_path)["checkpoints"]]

    main([*words, "--eval-tasks", "choices"])
    modes = ["--eval-tasks", "pages", "--modes", "full", "window@4"]
    evaluate_tasks = harness.evaluate_tasks

    def interrupted_in_the_second_mode(*arguments, mode, **options):
        if mode != FULL_MODE.attention:
            raise KeyboardInterrupt
        return evaluate_tasks(*arguments, mode=mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(harness, "evaluate_tasks", interrupted_in_the_second_mode)
        with pytest.raises(KeyboardInterrupt):
            main([*words, *modes])
    assert stored() == [("full", "choices"), ("full", "pages")]
    first = results_in(tmp_path)["checkpoints"]
    capsys.readouterr()
    main([*words, *modes])
    printed = capsys.readouterr().out
    assert "1 of 2 results exist from an earlier run" in printed
    assert "choices" not in printed
    assert printed.count("byte_perplexity ↓") == 2
    assert stored() == [("full", "choices"), ("full", "pages"), ("window@4", "pages")]
    assert results_in(tmp_path)["checkpoints"][:2] == first
    content = (tmp_path / TASK_RESULTS).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(eval_tasks, "load", lambda *_, **__: pytest.fail("a model was loaded"))
        main([*words, *modes])
        assert (tmp_path / TASK_RESULTS).read_bytes() == content
    # The task has changed.
    pages = (tmp_path / "pages.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "pages.jsonl").write_text("".join(pages[2:]))
    main([*words, *modes])
    assert stored() == [("full", "choices"), ("full", "pages"), ("window@4", "pages")]
    last = results_in(tmp_path)["checkpoints"]
    assert last[0] == first[0]
    assert last[1]["results"] != first[1]["results"]


def test_another_tokenizer_at_the_same_path_is_measured_again(checkpoints, task_folder, tmp_path, capsys):
    path = train_sentencepiece(tmp_path / "tokenizer.model", vocab_size=480, **LLAMA)
    words = ["--checkpoint", str(checkpoints["kerple_log"]), "--eval-tasks", "pages", "--include-path", task_folder]
    words += ["--limit", "2", "--output", str(tmp_path)]
    words += ["--set", "tokenizer-type=SPMTokenizer", f"vocab-file={path}"]
    values = []
    for vocab_size in (480, 512, 512):
        train_sentencepiece(path, vocab_size=vocab_size, **LLAMA)
        main(words)
        (entry,) = results_in(tmp_path)["checkpoints"]
        values.append(entry["results"]["pages"]["byte_perplexity,none"])
        assert entry["tokenizer_fingerprint"] == build_tokenizer("SPMTokenizer", path).fingerprint
    assert values[0] != values[1]
    assert capsys.readouterr().out.count("1 of 1 results exist from an earlier run") == 1


def test_entries_name_the_evaluated_method_and_weights(task_folder, tmp_path):
    run = tmp_path / "run"
    words = ["--checkpoint", str(run), "--eval-tasks", "pages", "--limit", "2", "--include-path", task_folder]
    words += ["--output", str(tmp_path)]
    write_checkpoint(run, "rotary", "nowhere")
    main(words)
    main([*words, "--set", "pos-emb-options.scaling=linear", "pos-emb-options.factor=4"])
    before = results_in(tmp_path)["checkpoints"]
    assert [entry["pos_emb"] for entry in before] == ["rotary", "rotary (scaling linear, factor 4)"]
    layer = next((run / "global_step4").glob("layer_03*"))
    torch.save({name: 2 * value for name, value in torch.load(layer, weights_only=True).items()}, layer)
    main(words)
    after = results_in(tmp_path)["checkpoints"]
    assert after[1] == before[1]
    assert after[0]["fingerprint"] != before[0]["fingerprint"]
    assert after[0]["results"] != before[0]["results"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"tasks\.json.*JSON"),
        ('{"tasks": ["pages"], "checkpoints": [{"checkpoint": "a"}]}', "tasks.json.*iteration"),
    ],
)
def test_other_files_are_not_replaced(content, message, checkpoints, task_folder, tmp_path):
    (tmp_path / TASK_RESULTS).write_text(content)
    words = ["--checkpoint", str(checkpoints["kerple_log"]), "--eval-tasks", "pages", "--include-path", task_folder]
    with pytest.raises(UserError, match=f"{message}.*; move or remove it, or choose another --output"):
        main([*words, "--output", str(tmp_path)])
    assert (tmp_path / TASK_RESULTS).read_text() == content


def test_texts_beyond_a_position_table_are_rejected(checkpoints, task_folder, tmp_path):
    words = ["--checkpoint", str(checkpoints["learned"]), "--eval-tasks", "pages", "--include-path", task_folder]
    with pytest.raises(UserError, match=r"pos_emb.*max-position-embeddings 32.*--max-length"):
        main([*words, "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-fewshot", "3"], "--num-fewshot.*--eval-tasks"),
        (["--eval-tasks", "pages", "--lengths", "64"], "--lengths"),
        (["--eval-tasks", "pages", "--modes", "full", "full+dynamic-ntk"], r"full\+dynamic-ntk"),
        (["--eval-tasks", "pages", "--protocol", "last-k@8", "--document-aware"], "--protocol, --document-aware"),
        (["--eval-tasks", "pages", "--limit", "2.5"], "--limit.*1"),
        (["--eval-tasks", "pages", "--include-path", "nowhere"], "--include-path nowhere"),
        (["--eval-tasks", "choices", "--max-length", "5"], "--max-length 5.*11"),
        (["--eval-tasks", "continued", "--max-length", "12"], "--max-length 12"),
    ],
)
def test_rejected_options(words, message, checkpoints, task_folder, tmp_path):
    checkpoint = ["--checkpoint", str(checkpoints["kerple_log"]), "--output", str(tmp_path / "out")]
    words = words if "--include-path" in words else [*words, "--include-path", task_folder]
    if "--eval-tasks" not in words:
        words = words[:2]
    with pytest.raises(UserError, match=message):
        main([*checkpoint, *words])
    assert not (tmp_path / "out").exists()


def test_unknown_tasks_and_missing_data(checkpoints, task_folder, tmp_path, monkeypatch):
    import lm_eval.tasks

    # Indexing the harness's own tasks takes seconds.
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))
    words = [
        "--checkpoint",
        str(checkpoints["kerple_log"]),
        "--include-path",
        task_folder,
        "--output",
        str(tmp_path / "out"),
    ]
    assert_rejected("'page'.*--include-path.*DIR", main, [*words, "--eval-tasks", "page"])
    (tmp_path / "gone.yaml").write_text(CHOICES.format(folder=tmp_path / "gone").replace("task: choices", "task: gone"))
    assert_rejected("eval_tasks", main, [*words, "--eval-tasks", "gone", "--include-path", str(tmp_path)])


def test_unknown_generation_options(checkpoints, tmp_path):
    write_tasks(tmp_path)
    task = CONTINUED.format(folder=tmp_path).replace("do_sample: false", "num_beams: 4")
    (tmp_path / "continued.yaml").write_text(task)
    words = ["--checkpoint", str(checkpoints["kerple_log"]), "--eval-tasks", "continued"]
    with pytest.raises(UserError, match="generation_kwargs 'num_beams'"):
        main([*words, "--include-path", str(tmp_path), "--output", str(tmp_path / "out")])


def test_without_the_harness_the_error_names_the_requirements(checkpoints, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    words = ["--checkpoint", str(checkpoints["kerple_log"]), "--eval-tasks", "pages", "--output", str(tmp_path / "out")]
    with pytest.raises(UserError, match=re.escape("pip install 'kerple-neox[eval]'")):
        main(words)
