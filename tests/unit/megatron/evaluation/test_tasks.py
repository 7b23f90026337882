"""Tasks of lm-evaluation-harness on local files: the numbers of the exported Hugging Face model, and nothing cut."""

import io
import json
import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megatron.checkpoint.convert import to_hugging_face
from megatron.checkpoint.convert.tokenizer_files import TokenizerFiles
from megatron.cli.eval_tasks import RESULTS, print_tasks
from megatron.cli.evaluate import main
from megatron.evaluation.harness import _Generation
from megatron.inference import load_model
from megatron.tokenizer import build_tokenizer
from megatron.utils.errors import UserError
from tests.support.checkpoints import TRAIN_LENGTH, settings_of, write_checkpoint, write_yaml
from tests.support.conversion import quiet
from tests.support.texts import PYTHON

ROOT = Path(__file__).resolve().parents[4]
TASKS = ("choices", "pages", "continued")
LONG = 5 * TRAIN_LENGTH

CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.jsonl}}}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""

PAGES = """
task: pages
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/pages.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{page}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""

CONTINUED = """
task: continued
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/continued.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["HH", "z"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def write_tasks(folder, continued=None):
    """Local task files on passages from a few to five times the training length of characters."""
    passages = [PYTHON[1000 * i : 1000 * i + size] for i, size in enumerate((9, LONG, 20, 31, 64, LONG, 3, 77))]
    rows = {
        "choices": [
            {"question": text, "choices": ["a", "b", "longer one"], "answer": index % 3}
            for index, text in enumerate(passages)
        ],
        "pages": [{"page": text} for text in passages],
        "continued": continued or [{"question": text, "answer": "?"} for text in passages],
    }
    for name, written in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    for name, task in zip(TASKS, (CHOICES, PAGES, CONTINUED), strict=True):
        (folder / f"{name}.yaml").write_text(task.format(folder=folder))
    return str(folder)


@pytest.fixture(autouse=True)
def _offline(tmp_path_factory, monkeypatch):
    """No task here may look at the network, nor leave a data set in the user's cache."""
    import datasets
    import lm_eval.evaluator

    # Three seconds of asking the machine what it is; nothing here reads it.
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda storage: None)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True, raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Method -> folder. What these models say is ASCII: the output layer is zero for all other ids."""
    folders = {method: tmp_path_factory.mktemp(method) for method in ("kerple_log", "learned")}
    for method, folder in folders.items():
        write_checkpoint(folder, method, "nowhere")
        path = next((folder / "global_step4").glob("layer_06*"))
        layer = torch.load(path, weights_only=True)
        (name,) = (name for name in layer if name.endswith("weight"))
        layer[name][:32] = 0
        layer[name][127:] = 0
        torch.save(layer, path)
    return folders


@pytest.fixture(scope="module")
def exported(checkpoints, tmp_path_factory):
    """Method -> the harness's own model of the exported folder."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models = {}
    for method, folder in checkpoints.items():
        model, config = load_model(folder)
        out = tmp_path_factory.mktemp("hf") / method
        to_hugging_face(model, config, out, tokenizer=TokenizerFiles("CharLevelTokenizer"), report=quiet)
        models[method] = (
            AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float32).eval(),
            AutoTokenizer.from_pretrained(out, trust_remote_code=True),
        )
    return lambda method, length: HFLM(
        pretrained=models[method][0], tokenizer=models[method][1], max_length=length, batch_size=4
    )


def by_the_harness(model, folder, tasks=TASKS, **settings):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=[folder], include_defaults=False)
    return simple_evaluate(model, tasks=list(tasks), task_manager=manager, log_samples=True, **settings)


def adapted(folder, **settings):
    """This project's model of a checkpoint, as the harness sees one."""
    from megatron.evaluation.harness import HarnessModel

    model, config = load_model(folder)
    settings = {"rolling_length": 16 * TRAIN_LENGTH, "report": quiet, **settings}
    return HarnessModel(model, build_tokenizer(config.tokenizer.tokenizer_type), **settings)


def results_in(folder):
    return json.loads((Path(folder) / RESULTS).read_text())


@pytest.mark.parametrize(("method", "length"), [("kerple_log", 400), ("kerple_log", 24), ("learned", TRAIN_LENGTH)])
def test_every_answer_is_that_of_the_exported_model(method, length, checkpoints, exported, local):
    """With room for every prompt, and with prompts and pages cut as the harness cuts them."""
    ours = by_the_harness(adapted(checkpoints[method], max_length=length), local)
    theirs = by_the_harness(exported(method, length), local)
    for task in TASKS:
        compared = 0
        for mine, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            for answer, expected in zip(mine["resps"], other["resps"], strict=True):
                if task == "continued":
                    assert answer == expected
                elif task == "pages":
                    assert answer == pytest.approx(expected, rel=1e-6)
                else:
                    assert answer[0] == (pytest.approx(expected[0][0], abs=1e-4, rel=1e-6), expected[0][1])
                compared += 1
        assert compared == (24 if task == "choices" else 8)
    texts = [sample["resps"][0][0] for sample in ours["samples"]["continued"]]
    assert len(set(texts)) > 4
    assert any(0 < len(text) < 12 for text in texts)  # a stop word was met
    assert not any(word in text for text in texts for word in ("HH", "z"))


def test_through_the_entry_point(checkpoints, exported, local, tmp_path):
    """Started as a user does, with a task that has code of its own: `import evaluate` there is not evaluate.py."""
    write_tasks(tmp_path)
    task = CHOICES.format(folder=tmp_path).replace('"{{question}}"', "!function own.question")
    (tmp_path / "choices.yaml").write_text(task)
    (tmp_path / "own.py").write_text(
        "import evaluate\n\ndef question(doc):\n    assert evaluate.__path__\n    return doc['question']\n"
    )
    config = write_yaml(
        tmp_path / "c.yml",
        settings_of(
            "kerple_log", "nowhere", load=str(checkpoints["kerple_log"]), eval_tasks=list(TASKS), eval_num_fewshot=0
        ),
    )
    command = [sys.executable, str(ROOT / "evaluate.py"), str(config), "--include-path", str(tmp_path)]
    run = subprocess.run(
        [*command, "--limit", "6", "--eval-results-prefix", "results"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    # Longer than the training length of 32, and not cut: the longest choice and its question, less the last token.
    longest = LONG + len(" longer one") - 1
    assert f"loglikelihood: 18 requests of up to {longest} tokens; max_length {longest}: nothing is cut" in run.stdout
    assert f"generate_until: 6 requests of up to {LONG + 12} tokens" in run.stdout
    written = results_in(tmp_path / "results")
    (ours,) = written["checkpoints"]
    assert {key: ours[key] for key in ("iteration", "pos_emb", "train_length")} == {
        "iteration": 4,
        "pos_emb": "kerple_log",
        "train_length": TRAIN_LENGTH,
    }
    expected = by_the_harness(exported("kerple_log", 400), local, limit=6)["results"]
    for task, values in expected.items():
        for metric, value in values.items():
            if isinstance(value, float):
                assert math.log1p(ours["results"][task][metric]) == pytest.approx(math.log1p(value), rel=1e-5), metric
                if not metric.startswith(("word_perplexity", "acc_stderr")):
                    assert f"{ours['results'][task][metric]:.4f}" in run.stdout
    assert ours["results"]["pages"]["bits_per_byte,none"] > 1
    assert written["limit"] == 6


def test_examples_before_a_question_make_prompts_longer(checkpoints, local, tmp_path):
    words = ["--checkpoint", str(checkpoints["kerple_log"]), "--eval-tasks", "choices", "--include-path", local]
    longest = []
    for shots in ("0", "3"):
        main([*words, "--num-fewshot", shots, "--limit", "2", "--output", str(tmp_path)])
        (found,) = results_in(tmp_path)["checkpoints"]
        assert found["n-shot"]["choices"] == int(shots)
        assert found["lengths"]["loglikelihood"]["cut"] == 0
        longest.append(found["lengths"]["loglikelihood"]["longest"])
    assert longest[1] > longest[0] + 20


def test_several_checkpoints_are_one_table(checkpoints, local, tmp_path, capsys):
    folders = [str(folder) for folder in checkpoints.values()]
    words = ["--checkpoint", *folders, "--eval-tasks", "pages", "--include-path", local, "--output", str(tmp_path)]
    main([*words, "--max-length", "16"])
    found = results_in(tmp_path)["checkpoints"]
    assert [entry["pos_emb"] for entry in found] == ["kerple_log", "learned"]
    assert len({entry["results"]["pages"]["byte_perplexity,none"] for entry in found}) == 2
    output = capsys.readouterr().out
    assert output.count("max_length 16: 6 of them are read in windows") == 2
    assert output.count("bits_per_byte ↓") == 2


@pytest.mark.parametrize("alike", [False, True])
def test_the_table_on_a_narrow_screen_shows_what_differs_and_cuts_nothing(alike):
    values = {"alias": "lambada_openai", "acc,none": 0.31234, "acc_stderr,none": 0.0065}
    if alike:
        values["exact_match,flexible-extract"] = 0.25
    found = [
        {"checkpoint": f"runs/{name}", "pos_emb": "kerple_log" if alike else name, "results": {"lambada": values}}
        for name in ("kerple_log", "alibi")
    ]
    screen = io.StringIO()
    print_tasks(found, Console(file=screen, width=60))
    text = screen.getvalue()
    assert all(word in text for word in ("kerple_log", "lambada_openai", "acc", "0.3123", "0.0065"))
    assert "…" not in text
    assert ("runs/alibi" in text) == ("flexible-extract" in text) == alike


@pytest.mark.parametrize("task", TASKS)
def test_positions_beyond_a_table_are_refused(task, checkpoints, local, tmp_path):
    words = ["--checkpoint", str(checkpoints["learned"]), "--eval-tasks", task, "--include-path", local]
    with pytest.raises(UserError, match=r"too long for pos_emb learned: .*max-position-embeddings 32.*--max-length N"):
        main([*words, "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-fewshot", "3"], "--num-fewshot is about tasks, and none is named"),
        (["--eval-tasks", "pages", "--lengths", "64"], "--lengths: not about tasks"),
        (["--eval-tasks", "pages", "--modes", "window@8"], "--modes: not about tasks"),
        (
            ["--eval-tasks", "pages", "--protocol", "last-k@8", "--document-aware"],
            "--protocol, --document-aware: not about",
        ),
        (["--eval-tasks", "pages", "--label", "a", "--replace"], "--replace, --label: not about tasks"),
        (["--eval-tasks", "pages", "--limit", "2.5"], "--limit must be a number of documents, or a share below 1"),
        (["--eval-tasks", "pages", "--max-length", "0"], "--max-length must be at least 1, not 0"),
        (["--eval-tasks", "pages", "--include-path", "nowhere"], "--include-path nowhere: no such folder"),
        (["--eval-tasks", "choices", "--max-length", "5"], "--max-length 5: a continuation alone has 11 tokens"),
        (["--eval-tasks", "continued", "--max-length", "12"], "--max-length 12 holds no prompt: .* 12 tokens after"),
    ],
)
def test_what_is_refused(words, message, checkpoints, local, tmp_path):
    checkpoint = ["--checkpoint", str(checkpoints["kerple_log"]), "--output", str(tmp_path / "out")]
    words = words if "--include-path" in words else [*words, "--include-path", local]
    if "--eval-tasks" not in words:
        words = words[:2]
    with pytest.raises(UserError, match=message):
        main([*checkpoint, *words])
    assert not (tmp_path / "out").exists()


def test_an_unknown_task_and_data_that_cannot_be_had(checkpoints, local, tmp_path, monkeypatch):
    import lm_eval.tasks

    # Without the harness's own, whose reading takes seconds.
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))
    words = ["--checkpoint", str(checkpoints["kerple_log"]), "--include-path", local, "--output", str(tmp_path / "out")]
    with pytest.raises(UserError, match=r"no task 'page'; nearest: pages; --include-path DIR"):
        main([*words, "--eval-tasks", "page"])
    (tmp_path / "gone.yaml").write_text(CHOICES.format(folder=tmp_path / "gone").replace("task: choices", "task: gone"))
    with pytest.raises(UserError, match=r"eval_tasks gone: .*Without a network only tasks on local files run"):
        main([*words, "--eval-tasks", "gone", "--include-path", str(tmp_path)])


def test_an_option_of_generation_that_is_not_known(checkpoints, tmp_path):
    write_tasks(tmp_path)
    task = CONTINUED.format(folder=tmp_path).replace("do_sample: false", "num_beams: 4")
    (tmp_path / "continued.yaml").write_text(task)
    words = ["--checkpoint", str(checkpoints["kerple_log"]), "--eval-tasks", "continued"]
    with pytest.raises(UserError, match="generation_kwargs 'num_beams': not known here"):
        main([*words, "--include-path", str(tmp_path), "--output", str(tmp_path / "out")])


def test_without_the_harness_the_error_says_what_to_install(checkpoints, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    words = ["--checkpoint", str(checkpoints["kerple_log"]), "--eval-tasks", "pages", "--output", str(tmp_path / "out")]
    with pytest.raises(UserError, match=re.escape("pip install -r requirements/eval.txt")):
        main(words)


def test_long_prompts_in_chunks_and_batches(checkpoints):
    """What a batch, its filling and the cache's chunks do changes no number."""
    harness = adapted(checkpoints["kerple_log"])
    lengths = (3, 700, 513, 512, 40, 1100)
    pairs = [(list(PYTHON[:length].encode()), list(b" end")) for length in lengths]
    model, _ = load_model(checkpoints["kerple_log"])
    for (context, continuation), (value, greedy) in zip(pairs, harness._score(pairs), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([context + continuation[:-1]]))[0, -4:].double()
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])
        assert value == pytest.approx(chosen.sum().item(), abs=1e-4)
        assert greedy == (logits.argmax(-1).tolist() == continuation)


def test_a_stop_word_spread_over_tokens_ends_the_text(checkpoints):
    """The text ends as soon as the word is complete, not at the end of its tokens."""
    harness = adapted(checkpoints["kerple_log"])
    wish = _Generation(40, (), ())
    (text,) = harness._generate([[100, 101, 102]], wish)
    word = text[5:8]
    (ended,) = harness._generate([[100, 101, 102]], _Generation(40, (word,), ()))
    assert ended == text[: text.index(word)]
