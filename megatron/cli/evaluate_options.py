"""The options of evaluate.py, in groups."""

import argparse
import math
from collections.abc import Sequence

from megatron.cli import eval_tasks as tasks
from megatron.config.command_line import OptionParser, option_name
from megatron.evaluation.measures.passkey import DEPTHS, TRIALS
from megatron.evaluation.modes import parse_mode
from megatron.evaluation.protocols import PROTOCOLS, parse_protocol
from megatron.evaluation.work import BATCH_TOKENS_CPU, BATCH_TOKENS_GPU, QUERY_CHUNK
from megatron.reporting.summary import TITLE
from megatron.utils.errors import UserError

LONGEST_DEFAULT = 16  # times the training length
POSITION_BINS = 64
RESOLUTION_TEXTS = 8

NOT_ABOUT_TASKS = (
    "--lengths",
    "--modes",
    "--protocol",
    "--tokens",
    "--document-aware",
    "--by-position",
    "--resolution",
    "--effective-length",
    "--passkey",
    "--replace",
    "--label",
    "--title",
    "--compare-with",
    "--query-chunk",
    "--batch-tokens",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What evaluate.py takes beside the configuration and the checkpoint."""
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--lengths",
        nargs="+",
        type=positive,
        metavar="N",
        help=f"in tokens; default: evaluation_lengths, or the training length doubled up to {LONGEST_DEFAULT} times it",
    )
    what.add_argument(
        "--modes",
        nargs="+",
        default=["full"],
        metavar="MODE",
        help="full, window@W (each query sees W keys), blockwise (blockwise causal attention of half the training "
        "length), blockwise@L (of L / 2)",
    )
    what.add_argument(
        "--protocol",
        nargs="+",
        default=[next(iter(PROTOCOLS))],
        metavar="PROTOCOL",
        help="any of non-overlapping (default), kerple, last-k, sliding, or with sizes kerple@SEGMENTS, last-k@K, "
        "sliding@STRIDE",
    )
    what.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help="tokens to score, the same at every length; default: eval_tokens, or the whole validation split",
    )
    what.add_argument(
        "--document-aware",
        action="store_true",
        help="texts of the longest length that are each from one document, where documents are long enough",
    )
    more = parser.add_argument_group("further measures")
    more.add_argument(
        "--by-position",
        nargs="?",
        type=positive,
        const=POSITION_BINS,
        metavar="BINS",
        help=f"also the loss by position in the text, in so many bins ({POSITION_BINS})",
    )
    more.add_argument(
        "--resolution",
        nargs="?",
        type=positive,
        const=RESOLUTION_TEXTS,
        metavar="TEXTS",
        help=f"also the attention resolution (LEX) on the first so many texts of each length ({RESOLUTION_TEXTS})",
    )
    more.add_argument(
        "--effective-length", action="store_true", help="also the effective length of every head (KERPLE, Figure 6)"
    )
    more.add_argument(
        "--passkey", action="store_true", help="also how often a number hidden in a text of each length is found again"
    )
    more.add_argument(
        "--passkey-depths",
        nargs="+",
        type=share,
        metavar="DEPTH",
        help=f"where it is hidden, from 0, the beginning, to 1, the end ({' '.join(f'{depth:g}' for depth in DEPTHS)})",
    )
    more.add_argument(
        "--passkey-trials", type=positive, metavar="N", help=f"prompts for each length and depth ({TRIALS})"
    )
    report = parser.add_argument_group("report")
    report.add_argument(
        "--output",
        "--eval-results-prefix",
        metavar="DIR",
        help="folder of the report; default: eval_results_prefix, or `evaluation` in the checkpoint's. What it already "
        "holds of these models is not measured again",
    )
    report.add_argument("--replace", action="store_true", help="drop results of other models that the folder holds")
    report.add_argument(
        "--label",
        nargs="+",
        metavar="TEXT",
        help="stored and shown behind the method, one for each checkpoint: tells models apart that differ in neither "
        "method nor seed",
    )
    report.add_argument("--title", default=TITLE, help="of the report (%(default)s)")
    report.add_argument(
        "--compare-with",
        metavar="POS_EMB",
        help="mark with † what this method is significantly better than (paired two-sided t-test over seeds, p < .05)",
    )
    speed = parser.add_argument_group("memory and speed")
    speed.add_argument(
        "--query-chunk", type=positive, default=QUERY_CHUNK, metavar="N", help="queries at once (%(default)s)"
    )
    speed.add_argument(
        "--batch-tokens",
        type=positive,
        metavar="N",
        help=f"tokens of short texts computed together (CPU: {BATCH_TOKENS_CPU}, GPU: {BATCH_TOKENS_GPU})",
    )
    tasks.add_options(parser)


def check_options(words: Sequence[str], place: str) -> None:
    """Raises UserError, naming the place they stand in, if evaluate.py would not take these words."""
    parser = OptionParser(prog=place, exit_on_error=False, add_help=False)
    add_options(parser)
    try:
        options, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UserError(f"{place}: {error}") from None
    if unknown:
        raise UserError(f"{place}: evaluate.py has no option {unknown[0].lstrip('-')} (see evaluate.py --help)")
    for name in options.modes:
        parse_mode(name)
    for name in options.protocol:
        parse_protocol(name)


def check_chosen(options: argparse.Namespace, train_length: int | None) -> None:
    """Raises UserError for modes and protocols that there are not, and for options that do not go together."""
    for name in ("passkey_depths", "passkey_trials"):
        if getattr(options, name) is not None and not options.passkey:
            raise UserError(f"{option_name(name)}: pass keys are measured with --passkey only; give it too")
    for name in options.modes:
        parse_mode(name, train_length)
    for protocol in map(parse_protocol, options.protocol):
        if options.document_aware and not protocol.kind.by_document:
            raise UserError(
                f"--document-aware: protocol {protocol.name} reads one stream; choose non-overlapping or last-k"
            )


def check_tasks_alone(options: argparse.Namespace) -> None:
    """Raises UserError for options about measurements and their report, which tasks do not take."""
    parser = OptionParser()
    add_options(parser)
    given = []
    for name in NOT_ABOUT_TASKS:
        stored = name[2:].replace("-", "_")
        if getattr(options, stored) != parser.get_default(stored):
            given.append(name)
    if given:
        raise UserError(f"eval_tasks: {', '.join(given)}: not about tasks; give them in another run")


def positive(word: str) -> int:
    """An argument that is a whole number from 1 on."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {word!r}")
    return int(word)


def share(word: str) -> float:
    """An argument that is a number from 0 to 1."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, not {word!r}")
    return value
