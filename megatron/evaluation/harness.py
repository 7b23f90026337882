"""Tasks of lm-evaluation-harness on a model's export to Hugging Face. Importing this module imports
the harness.
"""

import difflib
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets.exceptions import DatasetsError
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from safetensors import SafetensorError
from transformers import AutoTokenizer

from megatron.config import Config
from megatron.convert.hugging_face import load_written, to_hugging_face
from megatron.model.gpt import GPT
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.environment import check_version
from megatron.utils.errors import UserError
from megatron.utils.files import read_file

check_version("lm-eval")

# The harness's results that describe the scores, not the machine.
RESULT_KEYS = (
    "results",
    "groups",
    "group_subtasks",
    "versions",
    "n-shot",
    "n-samples",
    "higher_is_better",
)


def harness_model(
    model: GPT,
    config: Config,
    tokenizer: TokenizerFiles,
    *,
    mode: str,
    dtype: torch.dtype,
    device: torch.device,
    allow_other_tokenizer: bool = False,
    **options: int,
) -> Any:
    """The harness's own model (HFLM) of the export of a float32 model on the CPU, and of its
    configuration, in an inference mode. options: max_length, batch_size. Raises UserError if the
    tokenizer is missing or not the one that the model was trained with, or if the model has dynamic
    scaling or cannot be exported.
    """
    prefix = tokenizer.build().first  # of documents and empty prompts
    if any(method.length_dependent for method in model.positional_methods().values()):
        raise UserError(
            "eval_tasks: tasks do not support rotary scaling dynamic, because in transformers its "
            "angles depend on earlier texts; choose another scaling, or remove it and add --modes "
            "full+dynamic-ntk@FACTOR"
        )

    # The export is read back and removed.
    try:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "export"
            to_hugging_face(
                model,
                config,
                output,
                tokenizer=tokenizer,
                dtype=dtype,
                inference_mode=mode,
                allow_other_tokenizer=allow_other_tokenizer,
                report=lambda line: print(line.replace(str(output), "export"), flush=True),
            )
            exported = load_written(output, dtype).to(device)
            tokenizer_of_export = AutoTokenizer.from_pretrained(output, config=exported.config)
    except (UserError, OSError) as error:
        of_disk = isinstance(error.__cause__, OSError | SafetensorError)
        if isinstance(error, UserError) and not of_disk:
            raise UserError(
                f"eval_tasks: the model cannot be exported to Hugging Face: {error}"
            ) from error
        raise UserError(
            f"eval_tasks: the export in the temporary folder {tempfile.tempdir} failed: {error}; "
            "the environment variable TMPDIR chooses another folder"
        ) from error

    # By default, the harness sums log-probabilities in the model's dtype.
    return HFLM(
        exported,
        backend="causal",
        tokenizer=tokenizer_of_export,
        softmax_dtype="float32",
        prefix_token_id=prefix,
        **options,
    )


def find_tasks(names: Sequence[str], include_path: Sequence[str] | None) -> dict[str, Any]:
    """The harness's options `tasks` and `task_manager` for names, groups, patterns and YAML files.
    Raises UserError if one is unknown.
    """
    # Tasks of the user's own folders and files.
    manager = TaskManager(include_path=include_path, include_defaults=False)
    own = {*manager.all_subtasks, *manager.all_tags}
    files = []
    for name in names:
        path = Path(name).expanduser()
        if name.endswith((".yaml", ".yml")) and path.is_file():
            files.append(name)
            if b"group:" not in read_file(path, 2**24):
                own.add(name)

    # Groups and patterns can contain the harness's own tasks, whose index takes seconds.
    if not own.issuperset(names):
        manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in files and not manager.match_tasks([name]):
            similar = difflib.get_close_matches(name, manager.all_tasks) or ["a YAML file"]
            raise UserError(
                f"eval_tasks {name}: unknown task; choose {' or '.join(similar)}, or add its "
                "folder by --include-path"
            )
    return {"tasks": [*manager.match_tasks(names), *files], "task_manager": manager}


def run_tasks(model: Any, tasks: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The harness's results (`RESULT_KEYS`) for one of its models. tasks: the values of the options
    `eval_tasks`, `num_fewshot` and `limit`. found: see `find_tasks`. Raises UserError if a task
    fails.
    """
    try:
        with _site_packages_first():
            results: Any = simple_evaluate(
                model,
                **found,
                num_fewshot=tasks["num_fewshot"],
                limit=tasks["limit"],
                log_samples=False,
            )
    except (OSError, DatasetsError, ValueError, KeyError, ImportError, AssertionError) as error:
        # Task files and datasets can fail in many ways; only the harness's message says how.
        names = " ".join(tasks["eval_tasks"])
        kind = type(error).__name__
        message = f"eval_tasks {names}: {kind}: {str(error).strip()}"
        failed = traceback.extract_tb(error.__traceback__)[-1].line or ""
        if isinstance(error, OSError | DatasetsError):
            message += (
                ". Without a network connection only tasks on local files run; see "
                "docs/evaluation.md"
            )
        elif "self.max_length" in failed or "max_ctx_len" in failed:  # assertions of HFLM
            message += (
                f". Answers do not fit into --max-length {model.max_length}; raise it, or lower "
                "max_gen_toks"
            )
        raise UserError(message) from error
    return {key: results[key] for key in RESULT_KEYS if key in results}


@contextmanager
def _site_packages_first() -> Iterator[None]:
    """Move the project's root to the end of sys.path: the harness imports Hugging Face's package
    `evaluate`, which evaluate.py in the root would shadow.
    """
    root = Path(__file__).resolve().parents[2]
    path = sys.path[:]
    sys.path.sort(key=lambda entry: Path(entry).resolve() == root)
    try:
        yield
    finally:
        sys.path[:] = path
