"""The options of evaluate.py, and their checks."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron.cli.eval_tasks import MAX_LENGTH_FACTOR, TASK_OPTIONS, add_task_options, task_options
from megatron.cli.model_options import add_checkpoint_options
from megatron.config import Config, UserError
from megatron.data.streams import evaluation_stream
from megatron.evaluation.metrics.passkey import DEPTHS, TRIALS, Prompts, plan_passkey
from megatron.evaluation.metrics.resolution import plan_resolution
from megatron.evaluation.modes import parse_modes, supported_modes
from megatron.evaluation.protocols import parse_protocol
from megatron.evaluation.records import Provenance
from megatron.evaluation.runner import (
    BATCH_TOKENS_CPU,
    BATCH_TOKENS_GPU,
    QUERY_CHUNK,
    EvalTask,
    ExtrapolationTask,
    plan_extrapolation,
    unique_lengths,
)
from megatron.evaluation.text import PlannedText, Text, text_source
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.command_line import OptionParser, integer, number, option_name, path_option

POSITION_BINS = 64
RESOLUTION_TEXTS = 8

# Options that can be combined with tasks of lm-evaluation-harness.
WITH_TASKS = (*TASK_OPTIONS, "modes", "skip_unsupported", "output", "batch_tokens")

# Options that cannot be used in a sweep: it sets them, or measures extrapolation on the datasets of
# its runs.
NOT_IN_SWEEPS = (
    "--checkpoint",
    "--iteration",
    "--output",
    "--eval-results-prefix",
    "--replace",
    "--skip-unsupported",
    "--text",
    "--positional",
    "--set",
    "--fallback",
    "--conf-dir",
    "--hostfile",
    *map(option_name, TASK_OPTIONS),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of evaluate.py, except those for the configuration and the checkpoint."""
    # Lengths and inference modes.
    measurement = parser.add_argument_group("measurement")
    measurement.add_argument(
        "--lengths",
        nargs="+",
        type=integer(1, 10**12),
        metavar="N",
        help="lengths in tokens (default: evaluation_lengths, or the training length, and its "
        f"doubles up to {MAX_LENGTH_FACTOR} times it)",
    )
    measurement.add_argument(
        "--modes",
        nargs="+",
        default=["full"],
        metavar="MODE",
        help="inference modes, such as full (default), window@W (each query attends to W keys) or "
        "sinks@4+508+clip@256 (see docs/evaluation.md)",
    )
    measurement.add_argument(
        "--skip-unsupported",
        action="store_true",
        help="report n/a for a mode that none of the checkpoints supports, instead of stopping "
        "with an error",
    )

    # The text, and how to cut it.
    measurement.add_argument(
        "--protocol",
        nargs="+",
        default=["non-overlapping"],
        metavar="PROTOCOL",
        help="non-overlapping (default), kerple, last-k, sliding, or with sizes kerple@SEGMENTS, "
        "last-k@K, sliding@STRIDE",
    )
    measurement.add_argument(
        "--tokens",
        type=integer(1, 10**12),
        metavar="N",
        help="tokens to score, evenly spaced in the split and the same at every length (default: "
        "eval_tokens, or the whole split)",
    )
    measurement.add_argument(
        "--text",
        type=path_option,
        metavar="FILE",
        help="evaluate this text in place of the dataset, with the model's tokenizer: UTF-8, or "
        "any input of prepare_data.py, such as JSON lines",
    )
    measurement.add_argument(
        "--split",
        choices=("valid", "test"),
        default="valid",
        help="split of the dataset (default: %(default)s)",
    )
    measurement.add_argument(
        "--bos",
        choices=("auto", "always", "never"),
        default="auto",
        help="replace the first token of each text, which is not scored, by the beginning-of-text "
        "token; auto: if the tokenizer adds one; always: otherwise by the end-of-document token "
        "(default: %(default)s)",
    )

    measurement.add_argument(
        "--positional",
        nargs="+",
        metavar="ADAPTER",
        help="evaluate the model of transformers in --checkpoint with each of these methods: "
        "folders written by save_positional, or none for the model as it is (docs/transformers.md)",
    )

    # Other measures than the perplexity.
    further = parser.add_argument_group("further measures")
    further.add_argument(
        "--by-position",
        nargs="?",
        type=integer(1, 10**12),
        const=POSITION_BINS,
        metavar="BINS",
        help=f"measure the loss by position in the text ({POSITION_BINS} bins)",
    )
    further.add_argument(
        "--resolution",
        nargs="?",
        type=integer(1, 10**12),
        const=RESOLUTION_TEXTS,
        metavar="TEXTS",
        help="measure the attention resolution (LEX) on the first TEXTS texts of each length "
        f"({RESOLUTION_TEXTS})",
    )
    further.add_argument(
        "--effective-length",
        action="store_true",
        help="measure the effective length of each head (KERPLE, Figure 6)",
    )

    # Passkey retrieval.
    further.add_argument(
        "--passkey",
        action="store_true",
        help="measure passkey retrieval: how often the model repeats a number hidden in a text of "
        "each length",
    )
    further.add_argument(
        "--passkey-depths",
        nargs="+",
        type=number(0, 1),
        metavar="DEPTH",
        help="position of the number, from 0 (start) to 1 (end) "
        f"(default: {' '.join(f'{depth:g}' for depth in DEPTHS)})",
    )
    further.add_argument(
        "--passkey-trials",
        type=integer(1, 10**12),
        metavar="N",
        help=f"prompts per length and depth (default: {TRIALS})",
    )

    # Where the results go, and how the report shows them.
    report = parser.add_argument_group("report")
    report.add_argument(
        "--output",
        "--eval-results-prefix",
        type=path_option,
        metavar="DIR",
        help="folder for the report (default: eval_results_prefix, or `evaluation` in the "
        "checkpoint's folder); results that it already contains for these models are not measured "
        "again",
    )
    report.add_argument(
        "--replace", action="store_true", help="delete results of other models from the folder"
    )
    report.add_argument(
        "--label",
        nargs="+",
        metavar="TEXT",
        help="one label per checkpoint, stored and shown with the method, to distinguish models "
        "with the same method and seed",
    )

    # Sizes of batches, and the tasks of the harness.
    speed = parser.add_argument_group("memory and speed")
    speed.add_argument(
        "--query-chunk",
        type=integer(1, 10**12),
        default=QUERY_CHUNK,
        metavar="N",
        help="queries computed at once (default: %(default)s)",
    )
    speed.add_argument(
        "--batch-tokens",
        type=integer(1, 10**12),
        metavar="N",
        help=f"tokens per batch of short texts (default: {BATCH_TOKENS_CPU} on CPU, "
        f"{BATCH_TOKENS_GPU} on GPU)",
    )
    add_task_options(parser)


def check_run(argv: Sequence[str], config: Config, place: str, *, has_data: bool) -> None:
    """Raises UserError, starting with `place`, if evaluate.py would reject these options for a run
    of a sweep with this configuration. has_data: whether its dataset exists; otherwise what depends
    on the text is not checked.
    """
    try:
        options = _parse_sweep_options(argv)
        if task_options(config, options) is not None:
            raise UserError(
                "eval-tasks cannot be used in a sweep; remove it (set: {eval-tasks: null})"
            )
        complete_options(options, config, tasks=False)
        if options.label is not None and len(options.label) > 1:
            raise UserError(f"label must be a single label, not {len(options.label)}")
        [(modes, _)] = supported_modes([config], options.modes, skip_unsupported=True)
        if has_data:
            # The size of the text that evaluate.py would read.
            stream, _ = evaluation_stream(config, options.split)
            tokens = torch.empty(len(stream), dtype=torch.int8, device="meta")
            text = PlannedText(tokens, source=text_source(config, options.split))
            prompts = None
            if options.passkey:
                prompts = Prompts(TokenizerFiles.of(config).build())
            source = Provenance(train_length=config.model.seq_length)
            plan_tasks(text, prompts, [mode.name for mode in modes], source, options)
    except (argparse.ArgumentError, UserError) as error:
        raise UserError(f"{place}: {error}") from None


def plan_tasks(
    text: Text,
    prompts: Prompts | None,
    modes: Sequence[str],
    source: Provenance,
    options: argparse.Namespace,
) -> list[EvalTask]:
    """The measurements of one model that the options ask for, except effective lengths. Raises
    UserError if one of them cannot be measured. prompts: those of --passkey; None: do not measure
    it.
    """
    lengths = options.lengths
    tasks: list[EvalTask] = [*plan_losses(text, modes, source, options)]
    if options.resolution is not None:
        tasks += plan_resolution(text, lengths, modes, options.resolution, source)
    if prompts is not None:
        source = replace(source, trained_text=None)  # the prompts are not of the text
        depths, trials = options.passkey_depths or DEPTHS, options.passkey_trials or TRIALS
        tasks += plan_passkey(prompts, lengths, modes, depths, trials, source, text.corpus)
    return tasks


def plan_losses(
    text: Text, modes: Sequence[str], source: Provenance, options: argparse.Namespace
) -> list[ExtrapolationTask]:
    """The measurements of the losses that the options ask for."""
    lengths, protocols, bins = options.lengths, options.protocol, options.by_position
    return plan_extrapolation(text, lengths, modes, protocols, options.tokens, source, bins)


def check_modes(argv: Sequence[str], configs: Sequence[Config], place: str) -> None:
    """Raises UserError, starting with `place`, if these options of evaluate.py contain a mode that
    none of the runs with these configurations supports.
    """
    try:
        supported_modes(configs, _parse_sweep_options(argv).modes)
    except (argparse.ArgumentError, UserError) as error:
        raise UserError(f"{place}: {error}") from None


def _parse_sweep_options(argv: Sequence[str]) -> argparse.Namespace:
    """Raises UserError or ArgumentError for invalid options, and for those not for sweeps."""
    for word in argv:
        name = word.partition("=")[0].replace("_", "-")
        if name in NOT_IN_SWEEPS:
            raise UserError(f"{name.lstrip('-')} cannot be used in a sweep; remove it")
    parser = OptionParser(exit_on_error=False, add_help=False)
    add_checkpoint_options(parser, several=True)
    add_options(parser)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UserError(
            f"evaluate.py has no option {unknown[0].lstrip('-')} (see evaluate.py --help)"
        )
    return options


def changed_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """The names of the options of a parser that do not have their default values."""
    changed = []
    for name, default in vars(parser.parse_args([])).items():
        if getattr(options, name) != default:
            changed.append(name)
    return changed


def complete_options(options: argparse.Namespace, config: Config, *, tasks: bool) -> None:
    """Replace the names of protocols by protocols, and lengths and tokens that are not given by
    those of the configuration. Raises UserError for unknown modes and protocols, and for options
    that exclude each other.
    """
    # Options that exclude each other.
    if tasks:
        parser = OptionParser()
        add_options(parser)
        changed = changed_options(parser, options)
        used = [option_name(name) for name in changed if name not in WITH_TASKS]
        if used:
            raise UserError(
                f"eval_tasks: {', '.join(used)}: cannot be combined with tasks; measure "
                "extrapolation in a separate run"
            )
    for name in ("passkey_depths", "passkey_trials"):
        if getattr(options, name) is not None and not options.passkey:
            raise UserError(f"{option_name(name)} requires --passkey; add it")
    if options.text is not None and options.split != "valid":
        raise UserError(f"--text {options.text}: cannot be combined with --split; remove one")

    # Their values.
    parse_modes(options.modes, config.model.seq_length)
    options.protocol = list(map(parse_protocol, options.protocol))
    default = [config.model.seq_length << power for power in range(MAX_LENGTH_FACTOR.bit_length())]
    options.lengths = unique_lengths(options.lengths or config.evaluation.lengths or default)
    options.tokens = options.tokens or config.evaluation.tokens
