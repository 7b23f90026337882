"""tools/datasets/ruler_tasks.py: write retrieval tasks at given lengths for evaluate.py --eval-tasks."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron.checkpoint.configuration import checkpoint_config
from megatron.checkpoint.convert.hub import local_checkpoint
from megatron.checkpoint.directory import find_step
from megatron.config.command_line import OptionParser, integer
from megatron.evaluation.ruler import RULER_TASKS, TAG, documents, write_task
from megatron.tokenizer import build_tokenizer
from megatron.utils.files import check_writable
from megatron.utils.progress import Progress

DESCRIPTION = (
    "Write needle-in-a-haystack and variable-tracking tasks in the style of RULER for lm-evaluation-harness, with "
    "prompts of given lengths. Nothing is downloaded except a checkpoint on the Hugging Face hub."
)
LENGTHS = (512, 1024, 2048, 4096)
SAMPLES = 100


def main(argv: Sequence[str] | None = None) -> None:
    """Write the task files and their documents, and print how to run them. Raises UserError."""
    parser = OptionParser(description=DESCRIPTION)
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="folder with `latest`, or hf:ORG/NAME[@REVISION]: its tokenizer determines the lengths of the prompts",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder for the tasks")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=integer(1, 2**24),
        default=LENGTHS,
        metavar="N",
        help=f"tokens of prompt and answer (default: {' '.join(map(str, LENGTHS))})",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=RULER_TASKS,
        default=list(RULER_TASKS),
        metavar="TASK",
        help=f"tasks to write (default: all: {', '.join(RULER_TASKS)})",
    )
    parser.add_argument(
        "--samples",
        type=integer(1, 10**6),
        default=SAMPLES,
        metavar="N",
        help="prompts per task (default: %(default)s)",
    )
    parser.add_argument("--seed", type=integer(0, 2**32 - 1), default=0, metavar="N", help="default: %(default)s")
    options = parser.parse_args(argv)
    check_writable(options.output, "--output")
    folder = local_checkpoint(options.checkpoint, partial(print, flush=True))
    settings = checkpoint_config(find_step(folder, None)).tokenizer
    tokenizer = build_tokenizer(settings.tokenizer_type, settings.vocab_file, settings.merge_file)
    wanted = [(name, length) for length in dict.fromkeys(options.lengths) for name in dict.fromkeys(options.tasks)]
    contents = []  # nothing is written if a prompt does not fit
    with Progress("generating tasks", len(wanted), unit="tasks") as bar:
        for done, (name, length) in enumerate(wanted, start=1):
            contents.append(documents(name, tokenizer, length, options.samples, options.seed))
            bar.update(done, f"{name}, {length:,} tokens")
    options.output.mkdir(parents=True, exist_ok=True)
    for (name, length), content in zip(wanted, contents, strict=True):
        write_task(options.output, name, length, options.seed, *content)
    print(
        f"{options.output}: {len(wanted)} tasks with {options.samples} prompts each; to run them: evaluate.py "
        f"--checkpoint {options.checkpoint} --eval-tasks {TAG} --include-path {options.output}"
    )
