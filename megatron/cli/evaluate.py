"""evaluate.py: measures the perplexity of checkpoints by text length, and more."""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatron.checkpoint.configuration import evaluated_method
from megatron.checkpoint.directory import iteration_of, weights_fingerprint
from megatron.checkpoint.inspection import positional_methods
from megatron.cli.eval_tasks import TASK_RESULTS, add_task_options, harness_options, run_harness
from megatron.cli.model_options import (
    add_checkpoint_options,
    checkpoint_folders,
    chosen_step,
    first_process,
    load,
    parse_with_checkpoint,
    saved_config,
)
from megatron.config import Config, UserError
from megatron.config.command_line import OptionParser, add_lock_option, integer, number, option_name
from megatron.evaluation.measures.effective_length import effective_lengths, plan_effective_lengths
from megatron.evaluation.measures.passkey import DEPTHS, TRIALS, Prompts, plan_passkey
from megatron.evaluation.measures.resolution import plan_resolution
from megatron.evaluation.modes import parse_mode
from megatron.evaluation.protocols import PROTOCOLS, Protocol, parse_protocol
from megatron.evaluation.records import Checkpoint, Provenance, ResultsFile
from megatron.evaluation.runner import (
    BATCH_TOKENS_CPU,
    BATCH_TOKENS_GPU,
    LOSS_NOTE,
    QUERY_CHUNK,
    EvalTask,
    ExtrapolationTask,
    plan_extrapolation,
    run_eval_tasks,
    unique_lengths,
)
from megatron.evaluation.text import Text, check_ids, text_by_document, validation_text
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings
from megatron.reporting.summary import TITLE, print_summary, write_summary
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.utils.errors import shortened, visible
from megatron.utils.files import check_writable
from megatron.utils.locks import Lock
from megatron.utils.ranks import run_on_rank_0

DESCRIPTION = "Measure the perplexity of checkpoints on texts of their training length and longer."
MAX_LENGTH_FACTOR = 16  # the longest default length, as a multiple of the training length
POSITION_BINS = 64
RESOLUTION_TEXTS = 8

# Options that tasks of lm-evaluation-harness do not support.
EXTRAPOLATION_OPTIONS = (
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


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate the checkpoints on the same text and write one report. Raises UserError."""
    config, options = parse_with_checkpoint(DESCRIPTION, argv, add_options, several=True)
    harness = harness_options(config, options)
    _check(options, config.model.seq_length, tasks=harness is not None)
    if harness is not None and not first_process():
        return
    folders = checkpoint_folders(config, options)
    output = options.output or config.evaluation.eval_results_prefix
    if output is None:
        if len(folders) > 1:
            raise UserError("several checkpoints share one report: choose its folder with --output DIR")
        output = folders[0] / "evaluation"
        print(f"writing the report to {output} (--output)", flush=True)
    if harness is not None:
        check_writable(output, "--output")
        busy_message = (
            f"{output}: another evaluation is writing {TASK_RESULTS}; wait for it, or choose another --output"
        )
        with Lock(Path(output) / f"{TASK_RESULTS}.lock", busy_message, force=options.force_lock):
            return run_harness(harness, folders, config, options, Path(output))
    with _process_group() as (rank, world_size):
        run_on_rank_0(partial(check_writable, output, "--output"))
        _evaluate(folders, Path(output), config, options, rank, world_size)


# -- options ----------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of evaluate.py, except those for the configuration and the checkpoint."""
    measurement = parser.add_argument_group("measurement")
    measurement.add_argument(
        "--lengths",
        nargs="+",
        type=integer(1, 10**12),
        metavar="N",
        help="lengths in tokens (default: evaluation_lengths, or the training length, doubled up to "
        f"{MAX_LENGTH_FACTOR} times)",
    )
    measurement.add_argument(
        "--modes",
        nargs="+",
        default=["full"],
        metavar="MODE",
        help="full, window@W (each query attends to W keys), blockwise (blockwise causal attention with blocks of half "
        "the training length), blockwise@L (with blocks of L / 2)",
    )
    measurement.add_argument(
        "--protocol",
        nargs="+",
        default=[next(iter(PROTOCOLS))],
        metavar="PROTOCOL",
        help="non-overlapping (default), kerple, last-k, sliding, or with sizes kerple@SEGMENTS, last-k@K, "
        "sliding@STRIDE",
    )
    measurement.add_argument(
        "--tokens",
        type=integer(1, 10**12),
        metavar="N",
        help="tokens to score, evenly spaced in the validation split and the same at every length (default: "
        "eval_tokens, or the whole split)",
    )
    measurement.add_argument(
        "--document-aware",
        action="store_true",
        help="take each text of the longest length from a single document; concatenate documents that are too short",
    )
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
        help=f"measure the attention resolution (LEX) on the first TEXTS texts of each length ({RESOLUTION_TEXTS})",
    )
    further.add_argument(
        "--effective-length", action="store_true", help="measure the effective length of each head (KERPLE, Figure 6)"
    )
    further.add_argument(
        "--passkey",
        action="store_true",
        help="measure passkey retrieval: how often the model repeats a number hidden in a text of each length",
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
    report = parser.add_argument_group("report")
    report.add_argument(
        "--output",
        "--eval-results-prefix",
        metavar="DIR",
        help="folder for the report (default: eval_results_prefix, or `evaluation` in the checkpoint's folder); "
        "results "
        "that it already contains for these models are not measured again",
    )
    report.add_argument("--replace", action="store_true", help="delete results of other models from the folder")
    add_lock_option(report, "the folder")
    report.add_argument(
        "--label",
        nargs="+",
        type=printable,
        metavar="TEXT",
        help="one label per checkpoint, stored and shown with the method, to distinguish models with the same method "
        "and seed",
    )
    report.add_argument("--title", type=printable, default=TITLE, help="title of the report (default: %(default)s)")
    report.add_argument(
        "--compare-with",
        metavar="POS_EMB",
        help="show the loss of every other method minus that of POS_EMB, and mark with † the results that POS_EMB "
        "significantly improves on (paired two-sided t-test over seeds, p < .05)",
    )
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
        help=f"tokens per batch of short texts (default: {BATCH_TOKENS_CPU} on CPU, {BATCH_TOKENS_GPU} on GPU)",
    )
    add_task_options(parser)


def check_run(words: Sequence[str], config: Config, place: str, *, has_data: bool) -> None:
    """Raises UserError, starting with `place`, if evaluate.py would reject these options for a run with this
    configuration. has_data: whether its dataset exists; otherwise the amount of text is not checked.
    """
    parser = OptionParser(prog=place, exit_on_error=False, add_help=False)
    add_checkpoint_options(parser, several=True)
    add_options(parser)
    try:
        options, unknown = parser.parse_known_args(words)
        if unknown:
            raise UserError(f"evaluate.py has no option {unknown[0].lstrip('-')} (see evaluate.py --help)")
        tasks = harness_options(config, options) is not None
        _check(options, config.model.seq_length, tasks=tasks)
        lengths, protocols, budget = _lengths(config, options), _protocols(options), _budget(config, options)
        if tasks or options.document_aware:
            return
        available = len(validation_text(config).tokens) if has_data else max(lengths) << 32
        for protocol in protocols:
            protocol.plan(available, lengths, budget)
    except (argparse.ArgumentError, UserError) as error:
        raise UserError(f"{place}: {error}") from None


def _check(options: argparse.Namespace, train_length: int | None, *, tasks: bool) -> None:
    """Raises UserError for unknown modes and protocols, and for options that exclude each other."""
    if tasks:
        parser = OptionParser()
        add_options(parser)
        names = {name: name[2:].replace("-", "_") for name in EXTRAPOLATION_OPTIONS}
        used = [option for option, name in names.items() if getattr(options, name) != parser.get_default(name)]
        if used:
            raise UserError(
                f"eval_tasks: {', '.join(used)}: cannot be combined with tasks; measure extrapolation in a separate run"
            )
    for name in ("passkey_depths", "passkey_trials"):
        if getattr(options, name) is not None and not options.passkey:
            raise UserError(f"{option_name(name)} requires --passkey; add it")
    for name in options.modes:
        parse_mode(name, train_length)
    for protocol in map(parse_protocol, options.protocol):
        if options.document_aware and not protocol.by_document:
            raise UserError(
                f"--document-aware: protocol {protocol.name} reads one stream; choose non-overlapping or last-k"
            )


def _lengths(config: Config, options: argparse.Namespace) -> list[int]:
    default = [config.model.seq_length << power for power in range(MAX_LENGTH_FACTOR.bit_length())]
    return unique_lengths(options.lengths or config.evaluation.lengths or default)


def _protocols(options: argparse.Namespace) -> list[Protocol]:
    return [parse_protocol(name) for name in options.protocol]


def _budget(config: Config, options: argparse.Namespace) -> int | None:
    return options.tokens or config.evaluation.tokens


def printable(text: str) -> str:
    """A title or label. Raises ArgumentTypeError if it has control characters or more than 300 characters."""
    if not text.isprintable() or len(text) > 300:
        raise argparse.ArgumentTypeError(
            f"must have at most 300 characters and no control characters, unlike {shortened(text)!r}"
        )
    return text


# -- evaluation -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _process_group() -> Iterator[tuple[int, int]]:
    """(rank, world size) of this process, from the launcher's environment variables. Several ranks form a gloo process
    group, because they only exchange sums on the CPU.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield 0, 1
        return
    torch.distributed.init_process_group("gloo")
    try:
        yield torch.distributed.get_rank(), world_size
    finally:
        torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class EvaluatedModel:
    """A checkpoint to evaluate: its folder, the folder of its step, its configuration, and the keys of its records."""

    folder: Path
    step: Path
    saved: Config
    provenance: Provenance
    fingerprint: str


def _evaluate(
    folders: Sequence[Path], output: Path, config: Config, options: argparse.Namespace, rank: int, world_size: int
) -> None:
    """Measure what the output folder has no results for, then print and write the report."""
    report: Callable[[str], None] = partial(print, flush=True) if rank == 0 else lambda line: None
    models = _read_models(folders, config, options)
    methods = list(dict.fromkeys(str(model.provenance.pos_emb) for model in models))
    if options.compare_with is not None and options.compare_with not in methods:
        raise UserError(
            f"--compare-with {options.compare_with}: none of the checkpoints has this method; choose one of "
            f"{', '.join(methods)}, or add a checkpoint of it to --checkpoint"
        )
    lengths, protocols, budget = _lengths(config, options), _protocols(options), _budget(config, options)
    if not options.lengths:
        report(f"lengths: {' '.join(map(str, lengths))}")
    for protocol in protocols:
        if budget is not None and not protocol.uses_budget:
            report(f"protocol {protocol.name} scores a fixed number of segments and ignores the number of tokens")

    # Plan everything first: invalid options should fail before anything is measured.
    text = _read_text(config, options, lengths, protocols, budget, report, quiet=rank > 0)
    prompts = Prompts(_tokenizer(config)) if options.passkey else None
    planned: list[list[EvalTask]] = []
    for model in models:
        source = model.provenance
        tasks: list[EvalTask] = []
        tasks += plan_extrapolation(text, lengths, options.modes, protocols, budget, source, options.by_position)
        if options.resolution is not None:
            tasks += plan_resolution(text, lengths, options.modes, options.resolution, source)
        if prompts is not None:
            depths, trials = options.passkey_depths or DEPTHS, options.passkey_trials or TRIALS
            tasks += plan_passkey(prompts, lengths, options.modes, depths, trials, source, text.corpus)
        planned.append(tasks)
    for line in _sample_lines(text, planned[0]):
        report(line)

    fingerprints = [model.fingerprint for model in models]
    results = ResultsFile(output, fingerprints, replace=options.replace, force_lock=options.force_lock)
    with contextlib.ExitStack() as stack:
        # Only rank 0 opens the file. If that fails, all ranks raise the error.
        run_on_rank_0(lambda: stack.enter_context(results) and None)
        for model, tasks in zip(models, planned, strict=True):
            if options.effective_length:
                run_on_rank_0(partial(_measure_effective_lengths, model, text.corpus, results))
            missing = run_on_rank_0(partial(_missing_tasks, tasks, results))
            if len(missing) < len(tasks):
                report(f"{model.folder}: {len(tasks) - len(missing)} of {len(tasks)} results exist from an earlier run")
            if not missing:
                continue  # without loading the model
            loaded, _ = load(model.folder, config, options, check=len(models) == 1)
            _check_weights(loaded, model.step)
            text.check_ids(loaded.settings.padded_vocab_size)
            if prompts is not None:
                check_ids(prompts.token_ids, loaded.settings.padded_vocab_size)
            run_eval_tasks(
                loaded,
                [tasks[index] for index in missing],
                query_chunk=options.query_chunk,
                batch_tokens=options.batch_tokens,
                rank=rank,
                world_size=world_size,
                on_record=results.add if rank == 0 else None,
            )
            del loaded  # free its memory before the next one is loaded
        if rank == 0:
            print_summary(results.records, options.title, compare_with=options.compare_with)
            for path in write_summary(results.records, output, options.title, compare_with=options.compare_with):
                report(str(path))
            _check_losses(results)


def _check_weights(model: GPT, step: Path) -> None:
    """Raises UserError if a weight is NaN or infinite."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise UserError(
                f"{step}: weight {name} contains NaN or infinity, so no loss can be measured; choose an earlier "
                "checkpoint (--iteration N), or train again with a lower learning rate"
            )


def _check_losses(results: ResultsFile) -> None:
    """Raises UserError if a loss is NaN or infinite although all weights are finite, as with fp16 overflows."""
    for record in results.records:
        if record["kind"] == "extrapolation" and str(record["note"]).startswith(LOSS_NOTE):
            raise UserError(
                f"{results.path}: {record['pos_emb']} {record['mode']} at {record['length']:,}: {record['note']} (n/a "
                "in the report); evaluate with --precision fp32"
            )


def _sample_lines(text: Text, tasks: Sequence[EvalTask]) -> list[str]:
    """What each protocol scores at the longest length."""
    longest: dict[str, EvalTask] = {}
    for task in tasks:
        if isinstance(task, ExtrapolationTask):
            name = task.planned[0]["protocol"]
            if name not in longest or task.segments.length > longest[name].segments.length:
                longest[name] = task
    return [line for name, task in longest.items() for line in text.sample_lines(name, task.segments)]


def _missing_tasks(tasks: Sequence[EvalTask], results: ResultsFile) -> list[int]:
    """Indices of the tasks without stored results."""
    return [index for index, task in enumerate(tasks) if not all(map(results.find, task.planned))]


def _measure_effective_lengths(model: EvaluatedModel, corpus: str | None, results: ResultsFile) -> None:
    """Reads only the positional parameters."""
    planned = plan_effective_lengths(model.provenance, corpus)
    if results.find(planned) is None:
        settings = ModelSettings.from_config(model.saved, padded_vocab_size=1)
        record = effective_lengths(planned, positional_methods(model.step, settings))
        results.add(record)
        if record["note"] is not None:
            print(f"{model.folder}: {record['note']}", flush=True)


def _read_models(folders: Sequence[Path], config: Config, options: argparse.Namespace) -> list[EvaluatedModel]:
    """The checkpoints in the folders. Raises UserError if one cannot be evaluated with the others."""
    models: list[EvaluatedModel] = []
    labels = options.label
    if labels and len(labels) != len(folders):
        raise UserError(f"--label: {len(labels)} labels for {len(folders)} checkpoints; give one label per checkpoint")
    for folder in folders:
        step = chosen_step(folder, config, options)
        # A single checkpoint must match the configuration. For several, it only defines the text and the lengths.
        saved = saved_config(folder, config, options, check=len(folders) == 1)
        first = models[0].saved if models else saved
        if options.own:
            # `config` is that of the first checkpoint with --set applied.
            for key in ("data_path", "split", "valid_data_paths"):
                first_value, value = getattr(first.data, key), getattr(saved.data, key)
                if first_value != value and first_value == getattr(config.data, key):
                    raise UserError(
                        f"{folder}: {key} differs from the first checkpoint's ({value}, not {first_value}); give a "
                        f"configuration, or --set {key}=..., with the data to evaluate all of them on"
                    )
        settings = (options.precision, saved.model.release_bf16_distances, sorted(saved.model.pos_emb_options.items()))
        fingerprint = weights_fingerprint(step)
        provenance = Provenance(
            checkpoint=Checkpoint(
                path=visible(str(folder)),
                iteration=iteration_of(step),
                fingerprint=fingerprint,
                layers=saved.model.num_layers,
                hidden_size=saved.model.hidden_size,
            ),
            pos_emb=evaluated_method(saved) + (f" ({labels[len(models)]})" if labels else ""),
            seed=saved.training.seed,
            train_length=saved.model.seq_length,
            settings=repr(settings),
        )
        models.append(EvaluatedModel(folder, step, saved, provenance, fingerprint))
    return models


def _read_text(
    config: Config,
    options: argparse.Namespace,
    lengths: Sequence[int],
    protocols: Sequence[Protocol],
    budget: int | None,
    report: Callable[[str], None],
    *,
    quiet: bool,
) -> Text:
    """The validation text; for --document-aware, as many rows of it as the budget needs."""
    token_bytes = None
    try:
        token_bytes = _tokenizer(config).byte_lengths()
    except UserError as error:
        report(f"bits per byte is not measured: {error}")
    longest = max(lengths)
    if options.document_aware:
        targets_per_row = min(protocol.size or longest for protocol in protocols)
        max_tokens = None if budget is None else max(budget // targets_per_row, 1) * longest
        return text_by_document(config, longest, max_tokens, token_bytes, quiet=quiet)
    return validation_text(config, token_bytes)


def _tokenizer(config: Config) -> Tokenizer:
    """Raises UserError if its files cannot be read."""
    settings = config.tokenizer
    return build_tokenizer(settings.tokenizer_type, settings.vocab_file, settings.merge_file)
