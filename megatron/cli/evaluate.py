"""evaluate.py: measures the perplexity of checkpoints by text length, and more."""

import argparse
import contextlib
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from megatron.checkpoint.configuration import (
    check_trained_data,
    check_trained_tokenizer,
    code_digests,
    evaluated_method,
    is_converted,
    saved_training,
    trained_text_notice,
    trained_tokenizer,
)
from megatron.checkpoint.directory import iteration_of
from megatron.checkpoint.inspection import positional_methods
from megatron.checkpoint.manifest import weights_fingerprint
from megatron.checkpoint.recipe import training_recipe
from megatron.cli.eval_tasks import evaluate_tasks, task_options
from megatron.cli.evaluation_options import (
    add_options,
    complete_options,
    plan_losses,
    plan_tasks,
)
from megatron.cli.evaluation_text import first_token, text_of_file
from megatron.cli.model_options import (
    checkpoint_folders,
    chosen_step,
    first_process,
    load,
    parse_with_checkpoint,
    saved_config,
    tokenizer_files,
)
from megatron.config import Config, UserError
from megatron.config.schema.model import ModelConfig
from megatron.data.indexed_dataset import data_fingerprint
from megatron.data.streams import evaluation_corpora, part_documents
from megatron.evaluation.metrics.effective_length import effective_lengths, plan_effective_lengths
from megatron.evaluation.metrics.passkey import Prompts
from megatron.evaluation.modes import supported_modes
from megatron.evaluation.records import Checkpoint, Provenance, Record, model_of
from megatron.evaluation.results_file import ResultsFile
from megatron.evaluation.runner import EvalTask, check_losses, run_eval_tasks
from megatron.evaluation.text import Text, check_range, evaluation_text
from megatron.inference.loading import check_finite
from megatron.tokenizer.interface import Tokenizer
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.environment import commit, machine, versions
from megatron.utils.errors import import_package, visible
from megatron.utils.files import check_writable
from megatron.utils.ranks import Report, run_on_rank_0

DESCRIPTION = "Measure the perplexity of checkpoints on texts of their training length and longer."


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate the checkpoints on the same text and write one report. Raises UserError."""
    # Models of transformers have no configuration of this project.
    argv = sys.argv[1:] if argv is None else argv
    if any(word.partition("=")[0] == "--positional" for word in argv):
        import_package("transformers", "eval", "--positional")
        try:
            from megatron.cli.evaluate_positional import evaluate_positional
        except ImportError as error:  # of kerple.transformers, for versions that it does not read
            raise UserError(f"--positional: {error}") from error
        return evaluate_positional(DESCRIPTION, argv)

    # Tasks of the harness run in one process.
    config, options = parse_with_checkpoint(DESCRIPTION, argv, add_options, several=True)
    tasks = task_options(config, options)
    complete_options(options, config, tasks=tasks is not None)
    if tasks is not None and not first_process():
        return
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = 0
    if world_size > 1:
        rank = int(os.environ.get("RANK", "0"))

    # The folder of the report is by default that of the checkpoint.
    folders = checkpoint_folders(config, options)
    output = options.output or config.evaluation.eval_results_prefix
    if output is None:
        if len(folders) > 1:
            raise UserError(
                "several checkpoints share one report: choose its folder with --output DIR"
            )
        if options.hub_names:
            raise UserError(
                f"{', '.join(options.hub_names.values())}: choose the folder of the report with "
                "--output DIR"
            )
        output = folders[0] / "evaluation"
        if rank == 0:
            print(f"writing the report to {output} (--output)", flush=True)

    # Several ranks share the work of the losses.
    if tasks is not None:
        check_writable(output, "--output")
        return evaluate_tasks(tasks, folders, config, options, Path(output))
    with contextlib.ExitStack() as stack:
        if world_size > 1:
            torch.distributed.init_process_group("gloo")  # the ranks only exchange sums on the CPU
            stack.callback(torch.distributed.destroy_process_group)
        run_on_rank_0(partial(check_writable, output, "--output"))
        _evaluate(folders, Path(output), config, options, rank, world_size)


@dataclass(frozen=True)
class EvaluatedModel:
    """A checkpoint to evaluate: its folder, the folder of its step, its configuration, and the keys
    of its records.
    """

    folder: Path
    step: Path
    saved: Config
    provenance: Provenance


def _evaluate(
    folders: Sequence[Path],
    output: Path,
    config: Config,
    options: argparse.Namespace,
    rank: int,
    world_size: int,
) -> None:
    """Measure what the output folder has no results for, then print and write the report."""
    # These import pandas and matplotlib, which is slow.
    from megatron.reporting.aggregate import measurements
    from megatron.reporting.summary import write_summary

    def report(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    models = _read_models(folders, config, options)

    # Plan everything first: invalid options should fail before anything is measured.
    report(f"lengths: {' '.join(map(str, options.lengths))}")
    for protocol in options.protocol:
        if options.tokens is not None and not protocol.uses_budget:
            report(
                f"protocol {protocol.name} scores a fixed number of segments and ignores the "
                "number of tokens"
            )
    tokenizer = _build_tokenizer(models, config, options, report)
    text = _read_text(config, tokenizer, options, report)
    trained_texts: list[str | None] = [None] * len(models)
    if options.text is None:
        trained_texts = _check_data(models, config, options.split, report)
    prompts = Prompts(tokenizer) if options.passkey and tokenizer is not None else None

    # The tasks of each model, and the records of the modes that it does not support.
    planned: list[list[EvalTask]] = []
    not_measured: list[Record] = []
    records: list[Record] = []
    configs = [model.saved for model in models]
    supported = supported_modes(configs, options.modes, skip_unsupported=options.skip_unsupported)
    for model, trained_text, (modes, unsupported) in zip(
        models, trained_texts, supported, strict=True
    ):
        source = replace(model.provenance, trained_text=trained_text)
        tasks = plan_tasks(text, prompts, [mode.name for mode in modes], source, options)
        planned.append(tasks)
        for task in tasks:
            records += task.planned
        for name, reason in unsupported.items():
            report(f"{source.pos_emb}: inference mode {name} {reason} (n/a in the report)")
            for loss_task in plan_losses(text, [name], source, options):
                not_measured += loss_task.not_measured(reason)

    # Rejects two checkpoints with the same method and seed.
    measurements([*records, *not_measured], "extrapolation", "loss")

    # Measure one model after the other.
    known = [str(model_of({"checkpoint": model.provenance.checkpoint})) for model in models]
    results = ResultsFile(output, known, replace=options.replace)
    on_record = results.add if rank == 0 else None
    with contextlib.ExitStack() as stack:
        # Only rank 0 opens the file. If that fails, all ranks raise the error.
        run_on_rank_0(lambda: stack.enter_context(results) and None)
        for model, tasks in zip(models, planned, strict=True):
            if options.effective_length:
                run_on_rank_0(partial(_measure_effective_lengths, model, text.corpus, results))
            missing = run_on_rank_0(partial(_missing_tasks, tasks, results))
            if len(missing) < len(tasks):
                report(
                    f"{model.folder}: {len(tasks) - len(missing)} of {len(tasks)} results exist "
                    "from an earlier run"
                )
            if not missing:
                continue  # without loading the model

            # Invalid weights, or tokens without an embedding, would give meaningless losses.
            loaded, _ = load(model.step, config, options, check=len(models) == 1)
            check_finite(loaded, model.step)
            vocab_size = loaded.settings.padded_vocab_size
            text.check_ids(vocab_size)
            if prompts is not None:
                check_range(int(prompts.token_ids.min()), int(prompts.token_ids.max()), vocab_size)
            run_eval_tasks(
                loaded,
                [tasks[index] for index in missing],
                query_chunk=options.query_chunk,
                batch_tokens=options.batch_tokens,
                rank=rank,
                world_size=world_size,
                on_record=on_record,
            )
            del loaded  # free its memory before the next one is loaded

        # Report the results of this run and of earlier ones.
        if rank == 0:
            for record in not_measured:
                if results.find(record) is None:
                    results.add(record)
            for path in write_summary(results.records, output):
                report(str(path))

            check_losses(results.records, results.path)


def _missing_tasks(tasks: Sequence[EvalTask], results: ResultsFile) -> list[int]:
    """Indices of the tasks without stored results. The modes of all tasks are supported."""
    missing = []
    for index, task in enumerate(tasks):
        if not all(map(results.is_measured, task.planned)):
            missing.append(index)
    return missing


def _measure_effective_lengths(
    model: EvaluatedModel, corpus: str | None, results: ResultsFile
) -> None:
    """Reads only the positional parameters."""
    planned = plan_effective_lengths(model.provenance, corpus)
    if results.find(planned) is None:
        record = effective_lengths(planned, positional_methods(model.step, model.saved.model))
        results.add(record)
        if record["note"] is not None:
            print(f"{model.folder}: {record['note']}", flush=True)


def _read_models(
    folders: Sequence[Path], config: Config, options: argparse.Namespace
) -> list[EvaluatedModel]:
    """The checkpoints in the folders. Raises UserError if one cannot be evaluated with them."""
    # Names for the checkpoints.
    models: list[EvaluatedModel] = []
    labels = options.label
    if labels and len(labels) != len(folders):
        raise UserError(
            f"--label: {len(labels)} labels for {len(folders)} checkpoints; give one label per "
            "checkpoint"
        )

    # Once, on rank 0: if a run is still training, `latest` changes at any time.
    steps = run_on_rank_0(lambda: [chosen_step(folder, config, options) for folder in folders])
    for folder, step in zip(folders, steps, strict=True):
        # A single checkpoint must match the configuration. For several, it only defines the text
        # and the lengths.
        saved = saved_config(step, config, options, check=len(folders) == 1)
        if models and options.from_checkpoint and options.text is None:
            # `config` is that of the first checkpoint with --set applied.
            for key in ("data_path", "split", f"{options.split}_data_paths"):
                first_value, value = getattr(models[0].saved.data, key), getattr(saved.data, key)
                if first_value != value and first_value == getattr(config.data, key):
                    raise UserError(
                        f"{folder}: {key} differs from the first checkpoint's ({value}, not "
                        f"{first_value}); give a configuration, or --set {key}=..., with the data "
                        "to evaluate all of them on"
                    )

        fingerprint, digest = weights_fingerprint(step), _model_digest(saved.model)
        imported = options.hub_names.get(str(folder))
        label = None
        if labels:
            label = labels[len(models)]
        elif imported:
            label = Path(imported.removeprefix("hf:")).name
        seed: int | None = saved.training.seed
        if is_converted(step):
            seed = None
        pos_emb = evaluated_method(saved)
        if label:
            pos_emb += f" ({label})"
        provenance = Provenance(
            checkpoint=Checkpoint(
                path=visible(imported or str(folder)),
                iteration=iteration_of(step),
                fingerprint=fingerprint,
                layers=saved.model.num_layers,
                hidden_size=saved.model.hidden_size,
                model=digest,
                recipe=training_recipe(step, saved),
            ),
            pos_emb=pos_emb,
            seed=seed,
            train_length=saved.model.seq_length,
            settings=options.precision,
            precision=options.precision,
            environment={"commit": commit(), "machine": machine(), "versions": versions()},
        )
        models.append(EvaluatedModel(folder, step, saved, provenance))
    return models


def _model_digest(config: ModelConfig) -> str:
    """16 hexadecimal digits that identify the model's configuration and the code of an external
    method, which change what the weights compute.
    """
    keys = config.model_dump(exclude={"attention_backend", "pos_emb_module"})
    identity = sorted(keys.items()), code_digests(config)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]


def _build_tokenizer(
    models: Sequence[EvaluatedModel],
    config: Config,
    options: argparse.Namespace,
    report: Report,
) -> Tokenizer | None:
    """The tokenizer that the user's configuration names, or else the first checkpoint's; None if it
    cannot be read and no option needs it. Raises UserError if one needs it, or a checkpoint has
    another one.
    """
    # Losses need no tokenizer, only bits per byte and the options below.
    files = tokenizer_files(config, models[0].saved)
    try:
        tokenizer = files.build()
    except UserError as error:
        if options.text is not None or options.passkey or options.bos == "always":
            raise
        report(f"bits per byte is not measured: {error}; no token is put before the texts (--bos)")
        return None
    if config.checkpoint.allow_other_tokenizer:
        return tokenizer

    # Checkpoints name their tokenizer, and their configuration its files. Files may differ
    # in what changes no id: transformers writes tokenizer.json anew with each model that it saves.
    for model in models:
        trained = trained_tokenizer(model.step)
        own = TokenizerFiles.of(model.saved)
        if trained == tokenizer.fingerprint or (trained is None and own == files):
            continue
        try:
            theirs = own.build()
        except UserError:  # its files are elsewhere
            check_trained_tokenizer(trained, tokenizer, allowed=False, place=model.step)
            if options.text is not None:
                raise
            continue
        if trained not in (None, theirs.fingerprint):  # its files have changed
            check_trained_tokenizer(trained, tokenizer, allowed=False, place=model.step)
        if theirs.definition != tokenizer.definition:
            raise UserError(
                f"{model.folder}: its tokenizer ({own.tokenizer_type} {own.vocab_file or ''}) is "
                f"not the one in use ({files.tokenizer_type} {files.vocab_file or ''}); evaluate "
                "it in a run of its own, without keys of another tokenizer"
            )
    return tokenizer


def _check_data(
    models: Sequence[EvaluatedModel], config: Config, part: str, report: Report
) -> list[str | None]:
    """The `trained_text` of each model's records. Reports it, and the datasets that a model was not
    trained with.

    Raises UserError if a dataset to evaluate on has other contents than when a checkpoint was
    trained with it: it may contain the text of that training.
    """
    prefixes, _ = evaluation_corpora(config, part)
    data = {prefix: data_fingerprint(prefix) for prefix in prefixes}
    documents = part_documents(config, part)
    trained_texts = []
    for model in models:
        if not config.checkpoint.allow_other_data:
            for prefix in check_trained_data(model.step, data):
                report(
                    f"notice: {Path(prefix).absolute()} is not one of the datasets that "
                    f"{model.step} was trained with"
                )
        trained_text = trained_text_notice(saved_training(model.step), documents, prefixes)
        if trained_text is not None:
            report(f"notice: {model.step} may have been trained on the text: {trained_text}")
        trained_texts.append(trained_text)
    return trained_texts


def _read_text(
    config: Config, tokenizer: Tokenizer | None, options: argparse.Namespace, report: Report
) -> Text:
    """The text of --text, or of the split. Its `bos` is that of --bos."""
    bos = None
    if tokenizer is not None:
        bos = first_token(tokenizer, options.bos)
    if options.text is not None:
        assert tokenizer is not None
        return replace(text_of_file(options.text, tokenizer, report), bos=bos)
    try:
        return replace(evaluation_text(config, tokenizer, options.split), bos=bos)
    except UserError as error:
        raise UserError(f"{error}; or name a text: --text FILE") from error
