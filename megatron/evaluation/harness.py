"""Tasks of lm-evaluation-harness on a model's export to Hugging Face. Importing this module imports the harness."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from megatron.config import Config
from megatron.convert.hugging_face import load_written, to_hugging_face
from megatron.model.gpt import GPT
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.environment import check_version
from megatron.utils.errors import UserError

check_version("lm-eval")

# The harness's results that describe the scores, not the machine.
RESULT_KEYS = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples", "higher_is_better")


def harness_model(
    model: GPT,
    config: Config,
    tokenizer: TokenizerFiles,
    *,
    mode: str,
    dtype: torch.dtype,
    device: torch.device,
    **options: int,
) -> Any:
    """The harness's own model (HFLM) of the export of a float32 model on the CPU, and of its configuration, in an
    inference mode. options: max_length, batch_size. Raises UserError if the tokenizer is missing or the model cannot be
    exported.
    """
    prefix = tokenizer.build().first  # of documents and empty prompts
    with TemporaryDirectory() as folder:
        output = Path(folder) / "export"
        try:
            if any(method.length_dependent for method in model.positional_methods().values()):
                raise UserError("scaling dynamic: in transformers, angles depend on earlier texts")
            to_hugging_face(
                model,
                config,
                output,
                tokenizer=tokenizer,
                dtype=dtype,
                inference_mode=mode,
                report=lambda line: print(line.replace(str(output), "export"), flush=True),
            )
        except UserError as error:
            raise UserError(f"eval_tasks: the model cannot be exported to Hugging Face: {error}") from error
        exported = load_written(output, dtype).to(device)
        tokenizer_of_export = AutoTokenizer.from_pretrained(output, config=exported.config)
    options |= {"prefix_token_id": prefix}
    # By default, the harness sums log-probabilities in the model's dtype.
    return HFLM(exported, backend="causal", tokenizer=tokenizer_of_export, softmax_dtype="float32", **options)


def run_tasks(model: Any, tasks: Mapping[str, Any]) -> dict[str, Any]:
    """The harness's results (`RESULT_KEYS`) for one of its models.

    tasks: the values of the options `eval_tasks` (names, groups, patterns and YAML files), `num_fewshot`, `limit` and
    `include_path`. Raises UserError if a task is unknown or fails.
    """
    try:
        with _site_packages_first():
            manager = TaskManager(include_path=tasks["include_path"])
            results: Any = simple_evaluate(
                model,
                tasks=[match for name in tasks["eval_tasks"] for match in manager.match_tasks([name]) or [name]],
                task_manager=manager,
                num_fewshot=tasks["num_fewshot"],
                limit=tasks["limit"],
                log_samples=False,
            )
    except (OSError, ValueError, KeyError, ImportError, AssertionError) as error:
        # Task files and datasets can fail in many ways; only the harness's message says how.
        raise UserError(
            f"eval_tasks {' '.join(tasks['eval_tasks'])}: {type(error).__name__}: {str(error).strip()}. Without a "
            "network connection only tasks on local files run; see docs/evaluation.md"
        ) from error
    return {key: results[key] for key in RESULT_KEYS if key in results}


@contextmanager
def _site_packages_first() -> Iterator[None]:
    """Move the project's root to the end of sys.path: the harness imports Hugging Face's package `evaluate`, which
    evaluate.py in the root would shadow.
    """
    root, path = Path(__file__).resolve().parents[2], sys.path[:]
    sys.path.sort(key=lambda entry: Path(entry).resolve() == root)
    try:
        yield
    finally:
        sys.path[:] = path
