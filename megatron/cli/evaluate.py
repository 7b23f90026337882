"""evaluate.py: how the perplexity of checkpoints changes with the length of the text."""

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.configuration import evaluated_method
from megatron.checkpoint.directory import iteration_of, weights_fingerprint
from megatron.checkpoint.inspection import positional_methods
from megatron.cli import eval_tasks as tasks
from megatron.cli.evaluate_options import LONGEST_DEFAULT, add_options, check_chosen, check_tasks_alone
from megatron.cli.model_options import (
    checkpoint_folders,
    chosen_step,
    first_process,
    load,
    parse_with_checkpoint,
    saved_config,
)
from megatron.config import Config, UserError
from megatron.evaluation.extrapolation import check_lengths, plan_work
from megatron.evaluation.measures.effective_length import effective_lengths, plan_effective_lengths
from megatron.evaluation.measures.passkey import DEPTHS, TRIALS, Prompts, plan_passkey
from megatron.evaluation.measures.resolution import plan_resolution
from megatron.evaluation.protocols import Protocol, parse_protocol
from megatron.evaluation.ranks import Ranks, joined
from megatron.evaluation.records import Checkpoint, Provenance, ResultsFile
from megatron.evaluation.text import Text, check_ids, text_by_document, validation_text
from megatron.evaluation.work import Work, measure
from megatron.model.settings import ModelSettings
from megatron.reporting.summary import print_summary, write_summary
from megatron.tokenizer import Tokenizer, build_tokenizer

DESCRIPTION = "Measure the perplexity of checkpoints on texts as long as those they were trained on, and longer."


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, evaluate every checkpoint on the same text, write one report. Raises UserError."""
    config, options = parse_with_checkpoint(DESCRIPTION, argv, add_options, several=True)
    request = tasks.Request.of(config, options)
    if request is not None:
        check_tasks_alone(options)
    check_chosen(options, config.model.seq_length)
    if request is not None and not first_process():
        return
    folders = checkpoint_folders(config, options)
    output = _output(folders, options.output or (config and config.evaluation.eval_results_prefix))
    if request is not None:
        return tasks.run_tasks(request, folders, config, options, output)
    with joined() as ranks:
        _evaluate(folders, output, config, options, ranks)


@dataclass(frozen=True)
class Model:
    """A checkpoint to measure, and the folder of its step."""

    folder: Path
    step: Path
    saved: Config
    origin: Provenance


def _evaluate(folders: Sequence[Path], output: Path, config: Config, options: argparse.Namespace, ranks: Ranks) -> None:
    models = _models(folders, config, options)
    _check_compared(models, options.compare_with)
    lengths = check_lengths(options.lengths or config.evaluation.lengths or _doubled(config.model.seq_length))
    if not options.lengths:
        _say(ranks, f"lengths: {' '.join(map(str, lengths))}")
    budget = options.tokens or config.evaluation.tokens
    protocols = [parse_protocol(name) for name in options.protocol]
    for protocol in protocols:
        if budget is not None and not protocol.kind.budgeted:
            _say(ranks, f"protocol {protocol.name} scores as many segments as it says, whatever the number of tokens")
    text = _text(config, options, ranks, lengths, protocols, budget)
    prompts = Prompts(_tokenizer(config)) if options.passkey else None
    planned = [_plan(text, prompts, lengths, protocols, budget, model.origin, options) for model in models]
    fingerprints = [model.origin.checkpoint["fingerprint"] for model in models]
    with contextlib.ExitStack() as stack:
        store = open_store(ResultsFile(output, fingerprints, replace=options.replace), stack, ranks)
        for model, works in zip(models, planned, strict=True):
            if options.effective_length and store is not None:
                _effective_lengths(model, text.corpus, store)
            _measure(model, works, text, prompts, store, config, options, ranks, check=len(models) == 1)
        if store is None:
            return
        print_summary(store.records, options.title, compare_with=options.compare_with)
        for path in write_summary(store.records, output, options.title, compare_with=options.compare_with):
            print(path, flush=True)


def open_store(store: ResultsFile, stack: contextlib.ExitStack, ranks: Ranks) -> ResultsFile | None:
    """The store on rank 0, None on the others. Raises UserError on every rank where rank 0 cannot open it: none waits
    for one that has left.
    """
    problem = None
    if ranks.is_main:
        try:
            stack.enter_context(store)
        except UserError as error:
            problem = str(error)
    problem = ranks.broadcast(problem)
    if problem is not None:
        raise UserError(problem)
    return store if ranks.is_main else None


def _measure(
    model: Model,
    works: list[Work],
    text: Text,
    prompts: Prompts | None,
    store: ResultsFile | None,
    config: Config,
    options: argparse.Namespace,
    ranks: Ranks,
    *,
    check: bool,
) -> None:
    """What is missing of one model's results; the model is not loaded for nothing."""
    missing = [i for i, work in enumerate(works) if store and not all(map(store.find, work.wanted))]
    missing = ranks.broadcast(missing)
    done = len(works) - len(missing)
    if done:
        _say(ranks, f"{model.folder}: {done} of {len(works)} results are there from an earlier run")
    if not missing:
        return
    loaded, _ = load(model.folder, config, options, check=check)
    check_ids(text.tokens, loaded.settings.padded_vocab_size)
    if prompts is not None:
        check_ids(prompts.vocabulary, loaded.settings.padded_vocab_size)
    measure(
        loaded,
        [works[i] for i in missing],
        query_chunk=options.query_chunk,
        batch_tokens=options.batch_tokens,
        ranks=ranks,
        on_record=store.add if store else None,
    )


def _plan(
    text: Text,
    prompts: Prompts | None,
    lengths: Sequence[int],
    protocols: Sequence[Protocol],
    budget: int | None,
    origin: Provenance,
    options: argparse.Namespace,
) -> list[Work]:
    """Everything to measure of one model by running it."""
    works: list[Work] = [*plan_work(text, lengths, options.modes, protocols, budget, origin, options.by_position)]
    if options.resolution is not None:
        works += plan_resolution(text, lengths, options.modes, options.resolution, origin)
    if prompts is not None:
        depths, trials = options.passkey_depths or DEPTHS, options.passkey_trials or TRIALS
        works += plan_passkey(prompts, lengths, options.modes, depths, trials, origin, text.corpus)
    return works


def _effective_lengths(model: Model, corpus: str | None, store: ResultsFile) -> None:
    """From the positional parameters alone."""
    wanted = plan_effective_lengths(model.origin, corpus)
    if store.find(wanted) is None:
        settings = ModelSettings.from_config(model.saved, padded_vocab_size=1)
        record = effective_lengths(wanted, positional_methods(model.step, settings))
        store.add(record)
        if record["note"] is not None:
            print(f"{model.folder}: {record['note']}", flush=True)


def _models(folders: Sequence[Path], config: Config, options: argparse.Namespace) -> list[Model]:
    """What is in the folders. Raises UserError for one that cannot be measured together with the others."""
    models: list[Model] = []
    labels = options.label
    if labels and len(labels) != len(folders):
        raise UserError(f"--label: {len(labels)} given for {len(folders)} checkpoints; give one for each")
    for folder in folders:
        step = chosen_step(folder, config, options)
        # One checkpoint must be the configuration's; of several, the configuration tells the text and the lengths.
        saved = saved_config(folder, config, options, check=len(folders) == 1)
        if options.own:
            _check_text(saved, models[0].saved if models else saved, config, folder)
        settings = (options.precision, saved.model.release_bf16_distances, sorted(saved.model.pos_emb_options.items()))
        origin = Provenance(
            Checkpoint(
                path=str(folder),
                iteration=iteration_of(step),
                fingerprint=weights_fingerprint(step),
                layers=saved.model.num_layers,
                hidden_size=saved.model.hidden_size,
            ),
            evaluated_method(saved) + (f" ({labels[len(models)]})" if labels else ""),
            saved.training.seed,
            saved.model.seq_length,
            repr(settings),
        )
        models.append(Model(folder, step, saved, origin))
    return models


def _text(
    config: Config,
    options: argparse.Namespace,
    ranks: Ranks,
    lengths: list[int],
    protocols: Sequence[Protocol],
    budget: int | None,
) -> Text:
    """The validation text, as much of it as the protocols read."""
    token_bytes = None
    try:
        token_bytes = _tokenizer(config).byte_lengths()
    except UserError as error:
        _say(ranks, f"bits per byte are not measured: {error}")
    longest = max(lengths)
    if options.document_aware:
        scored = min(protocol.size or longest for protocol in protocols)  # targets of a row, at least
        most = None if budget is None else max(budget // scored, 1) * longest
        return text_by_document(config, longest, most, token_bytes, quiet=not ranks.is_main)
    needed = [protocol.needed(lengths, budget) for protocol in protocols]
    return validation_text(config, None if None in needed else max(needed), token_bytes)


def _tokenizer(config: Config) -> Tokenizer:
    """Raises UserError where its files cannot be read."""
    settings = config.tokenizer
    return build_tokenizer(settings.tokenizer_type, settings.vocab_file, settings.merge_file)


def _say(ranks: Ranks, line: str) -> None:
    if ranks.is_main:
        print(line, flush=True)


def _output(folders: Sequence[Path], output: str | None) -> Path:
    if output is not None:
        return Path(output)
    if len(folders) > 1:
        raise UserError("several checkpoints make one report: name its folder with --output DIR")
    folder = folders[0] / "evaluation"
    print(f"the report goes to {folder} (--output)", flush=True)
    return folder


def _check_compared(models: Sequence[Model], compare_with: str | None) -> None:
    """Raises UserError when none of the models is of the method that the others are to be compared with."""
    known = list(dict.fromkeys(model.origin.pos_emb for model in models))
    if compare_with is not None and compare_with not in known:
        raise UserError(
            f"--compare-with {compare_with}: no checkpoint given is of it; choose one of {', '.join(known)}, or give "
            "one to --checkpoint too"
        )


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
