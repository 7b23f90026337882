"""evaluate.py: how the perplexity of checkpoints changes with the length of the text."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.checkpoint.configuration import evaluated_method
from megatron.config import Config, UserError
from megatron.data.streams import evaluation_tokens
from megatron.evaluation import tasks
from megatron.evaluation.extrapolation import BATCH_TOKENS_CPU, BATCH_TOKENS_GPU, QUERY_CHUNK, evaluate_extrapolation
from megatron.evaluation.modes import parse_mode
from megatron.evaluation.protocols import PROTOCOLS
from megatron.evaluation.report import TITLE, print_report, write_report
from megatron.evaluation.rows import Row
from megatron.inference.command_line import checkpoint_folders, first_process, load, parse_with_checkpoint

DESCRIPTION = "Measure the perplexity of checkpoints on texts as long as those they were trained on, and longer."
LONGEST_DEFAULT = 16  # times the training length


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, evaluate every checkpoint on the same text, write one report. Raises UserError."""
    config, options = parse_with_checkpoint(DESCRIPTION, argv, _options, several=True)
    request = tasks.Request.of(config, options)
    if request is not None and (options.lengths or options.tokens or options.modes != ["full"]):
        raise UserError("eval_tasks: --lengths, --tokens and --modes are not about tasks; give them in another run")
    for name in options.modes:
        parse_mode(name, config.model.seq_length)
    if not first_process():
        return
    folders = checkpoint_folders(config, options)
    output = _output(folders, options.output or (config and config.evaluation.eval_results_prefix))
    if request is not None:
        return tasks.run_tasks(request, folders, config, options, output)
    task = _task(config, options)
    rows: list[Row] = []
    first: Config | None = None
    for folder in folders:
        # One checkpoint must be the configuration's; of several, the configuration tells the text and the lengths.
        model, saved = load(folder, config, options, check=len(folders) == 1)
        first = first or saved
        if options.own:
            _check_text(saved, first, config, folder)
        rows += evaluate_extrapolation(
            model,
            task.tokens,
            task.lengths,
            modes=options.modes,
            protocol=options.protocol,
            token_budget=task.budget,
            query_chunk=options.query_chunk,
            batch_tokens=options.batch_tokens,
            vocab_size=model.settings.padded_vocab_size,
            pos_emb=evaluated_method(saved),
            seed=saved.training.seed,
            train_length=saved.model.seq_length,
        )
        del model  # before the next one is loaded
    print_report(rows, options.title)
    for path in write_report(rows, output, options.title):
        print(path, flush=True)


def check_options(words: Sequence[str], place: str) -> None:
    """Raises UserError, naming the place they stand in, if evaluate.py would not take these words."""
    parser = argparse.ArgumentParser(prog=place, allow_abbrev=False, exit_on_error=False, add_help=False)
    _options(parser)
    try:
        options, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UserError(f"{place}: {error}") from None
    if unknown:
        raise UserError(f"{place}: evaluate.py has no option {unknown[0].lstrip('-')} (see evaluate.py --help)")
    for name in options.modes:
        parse_mode(name)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=_positive,
        metavar="N",
        help=f"in tokens; default: evaluation_lengths, or the training length doubled up to {LONGEST_DEFAULT} times it",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        default=["full"],
        metavar="MODE",
        help="full, window@W (each query sees W keys), blockwise (blockwise causal attention of half the training "
        "length), blockwise@L (of L / 2)",
    )
    parser.add_argument(
        "--tokens",
        type=_positive,
        metavar="N",
        help="tokens to score, the same at every length; default: eval_tokens, or the whole validation split",
    )
    parser.add_argument("--protocol", choices=PROTOCOLS, default=next(iter(PROTOCOLS)), help="default: %(default)s")
    parser.add_argument(
        "--output",
        "--eval_results_prefix",
        metavar="DIR",
        help="folder of the report; default: eval_results_prefix, or `evaluation` in the checkpoint's",
    )
    parser.add_argument("--title", default=TITLE, help="of the report (%(default)s)")
    parser.add_argument(
        "--query_chunk", type=_positive, default=QUERY_CHUNK, metavar="N", help="queries at once (%(default)s)"
    )
    parser.add_argument(
        "--batch_tokens",
        type=_positive,
        metavar="N",
        help=f"tokens of short texts computed together (CPU: {BATCH_TOKENS_CPU}, GPU: {BATCH_TOKENS_GPU})",
    )
    tasks.add_options(parser)


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {word!r}")
    return int(word)


def _output(folders: Sequence[Path], output: str | None) -> Path:
    if output is not None:
        return Path(output)
    if len(folders) > 1:
        raise UserError("several checkpoints make one report: name its folder with --output DIR")
    folder = folders[0] / "evaluation"
    print(f"the report goes to {folder} (--output)", flush=True)
    return folder


@dataclass(frozen=True)
class Task:
    """What all checkpoints are measured on: int64 tokens `[n]`, how many of them to score, in which lengths."""

    tokens: np.ndarray
    budget: int | None
    lengths: list[int]


def _task(config: Config, options: argparse.Namespace) -> Task:
    """Options first, then the configuration, then what it implies."""
    budget = options.tokens or config.evaluation.tokens
    lengths = list(options.lengths or config.evaluation.lengths or _doubled(config.model.seq_length))
    if not options.lengths:
        print(f"lengths: {' '.join(map(str, lengths))}", flush=True)
    # Of n tokens n - 1 are targets. Too small a budget is for evaluate_extrapolation to tell from too short a text.
    tokens = evaluation_tokens(config, "valid", None if budget is None else max(budget, *lengths) + 1)
    return Task(tokens, budget, lengths)


def _check_text(saved: Config, first: Config, config: Config, folder: Path) -> None:
    """Raises UserError when a checkpoint's own configuration names another text than the first checkpoint's, and
    `config`, the first one's with --set over it, does not say which to take.
    """
    for key in ("data_path", "split", "valid_data_paths"):
        was, now = getattr(first.data, key), getattr(saved.data, key)
        if was != now and was == getattr(config.data, key):
            raise UserError(
                f"{folder}: has another {key} than the first checkpoint ({now}, not {was}); give a configuration, or "
                f"--set {key}=..., with the data to evaluate them all on"
            )


def _doubled(length: int) -> list[int]:
    """The length times 1, 2, 4 ... LONGEST_DEFAULT."""
    return [length << power for power in range(LONGEST_DEFAULT.bit_length())]
