"""Tasks of lm-evaluation-harness on local files."""

import json
from functools import partial
from pathlib import Path

from tests.support.checkpoints import TRAIN_LENGTH
from tests.support.texts import PYTHON

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


def write_tasks(folder: Path) -> str:
    """Write task files on texts of a few characters up to five times the training length; returns
    the folder.
    """
    texts = [
        PYTHON[1000 * i : 1000 * i + size]
        for i, size in enumerate((9, LONG, 20, 31, 64, LONG, 3, 77))
    ]
    documents = {
        "choices": [
            {"question": text, "choices": ["a", "b", "longer one"], "answer": index % 3}
            for index, text in enumerate(texts)
        ],
        "pages": [{"page": text} for text in texts],
        "continued": [{"question": text, "answer": "?"} for text in texts],
    }
    for name, lines in documents.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, task in zip(TASKS, (CHOICES, PAGES, CONTINUED), strict=True):
        (folder / f"{name}.yaml").write_text(task.format(folder=folder))
    return str(folder)


def use_offline_harness(monkeypatch, folder: Path) -> None:
    """Keep the harness from using the network, the user's dataset cache, and its own tasks."""
    import datasets
    import lm_eval.evaluator

    from megatron.evaluation import harness

    # Take seconds, and no test reads them.
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda storage: None)
    monkeypatch.setattr(
        harness, "TaskManager", partial(harness.TaskManager, include_defaults=False)
    )
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True, raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
