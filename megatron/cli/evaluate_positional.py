"""evaluate.py --positional: models of transformers with the methods of `use_positional`."""

import argparse
import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from kerple.transformers import load_positional, use_positional
from kerple.transformers.mask import MODULE
from megatron.checkpoint.layers import DTYPES
from megatron.cli.evaluation_options import add_options, changed_options, plan_losses
from megatron.cli.evaluation_text import first_token, text_of_file
from megatron.cli.model_options import add_checkpoint_options, first_process
from megatron.convert.hub import PREFIX, download
from megatron.convert.tokenizer_files import find_tokenizer
from megatron.data.indexed_dataset import file_sha256
from megatron.evaluation.protocols import parse_protocol
from megatron.evaluation.records import Checkpoint, Provenance
from megatron.evaluation.results_file import ResultsFile
from megatron.evaluation.runner import check_losses, run_eval_tasks, unique_lengths
from megatron.inference.decoder import as_decoder
from megatron.inference.loading import check_finite
from megatron.reporting.aggregate import measurements
from megatron.reporting.summary import write_summary
from megatron.utils.command_line import OptionParser, option_name
from megatron.utils.environment import choose_device, commit, machine, versions
from megatron.utils.errors import UserError, first_line, visible

OPTION = "--positional"
# In place of an adapter: the model as it is.
NONE = "none"
# The options that have a meaning for a model of transformers.
USED = (
    "checkpoint",
    "positional",
    "text",
    "bos",
    "lengths",
    "protocol",
    "tokens",
    "by_position",
    "output",
    "replace",
    "label",
    "query_chunk",
    "batch_tokens",
    "device",
    "precision",
)


def evaluate_positional(description: str, argv: Sequence[str]) -> None:
    """Measure the losses of one model with each of the methods, and write one report. Raises
    UserError.
    """
    if not first_process():
        return
    options = _parse(description, argv)

    # The model, its tokenizer and the text.
    name = options.checkpoint[0]
    folder = download(name) if name.startswith(PREFIX) else Path(name)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"--checkpoint {name}: has no config.json; {OPTION} needs a model of transformers"
        )
    tokenizer = find_tokenizer(folder).build()
    text = text_of_file(options.text, tokenizer, print)
    text = replace(text, bos=first_token(tokenizer, options.bos))

    # Every method is added before the first is measured, because it may not fit.
    model = _load_model(folder, options)
    sizes = model.config.get_text_config()
    tasks, fingerprints = [], []
    for index, adapter in enumerate(options.positional):
        for warning in _add_method(model, folder, adapter):
            print(f"note: {warning}", flush=True)
        method = as_decoder(model).pos_emb or model.config.model_type
        if options.label:
            method += f" ({options.label[index]})"
        fingerprints.append(_fingerprint(folder, adapter))
        source = Provenance(
            checkpoint=Checkpoint(
                path=visible(name),
                iteration=None,
                fingerprint=fingerprints[-1],
                layers=sizes.num_hidden_layers,
                hidden_size=sizes.hidden_size,
            ),
            pos_emb=method,
            train_length=getattr(sizes, "max_position_embeddings", None),  # as `from-hf` reads it
            settings=options.precision,
            precision=options.precision,
            environment={"commit": commit(), "machine": machine(), "versions": versions()},
        )
        tasks.append(plan_losses(text, ["full"], source, options))

    # The plans have read the tokens. An unknown one must not pass for a text that is too long.
    text.check_ids(model.get_input_embeddings().num_embeddings)

    # Rejects two methods of the same name.
    planned = [task.planned for own in tasks for task in own]
    measurements(chain.from_iterable(planned), "extrapolation", "loss")

    # Measure what the folder has no results for.
    with ResultsFile(options.output, fingerprints, replace=options.replace) as results:
        for adapter, own in zip(options.positional, tasks, strict=True):
            missing = []
            for task in own:
                if not all(map(results.is_measured, task.planned)):
                    missing.append(task)
            _add_method(model, folder, adapter)
            run_eval_tasks(
                model,
                missing,
                query_chunk=options.query_chunk,
                batch_tokens=options.batch_tokens,
                on_record=results.add,
            )
        for path in write_summary(results.records, Path(options.output)):
            print(path, flush=True)
        check_losses(results.records, results.path)


def _parse(description: str, argv: Sequence[str]) -> argparse.Namespace:
    """The options, with the values that are not given. Raises UserError."""
    parser = OptionParser(description=description)
    add_checkpoint_options(parser, several=True)
    add_options(parser)
    options = parser.parse_args(argv)
    unused = [option_name(each) for each in changed_options(parser, options) if each not in USED]
    if unused:
        raise UserError(f"{OPTION}: {', '.join(unused)}: only for models of this project")
    if len(options.checkpoint) != 1:
        raise UserError(f"{OPTION}: name one model with --checkpoint FOLDER, and several methods")
    for name in ("text", "lengths", "output"):
        if getattr(options, name) is None:
            raise UserError(f"{OPTION} requires {option_name(name)}")
    if options.label and len(options.label) != len(options.positional):
        raise UserError(
            f"--label: {len(options.label)} labels for {len(options.positional)} methods; give one "
            "label per method"
        )
    options.protocol = list(map(parse_protocol, options.protocol))
    options.lengths = unique_lengths(options.lengths)
    return options


def _load_model(folder: Path, options: argparse.Namespace) -> Any:
    """The model of transformers in a folder, in evaluation mode. Raises UserError."""
    # Weights are never unpickled, and code in the folder is not run.
    device, dtype = choose_device(options.device), DTYPES[options.precision]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"--checkpoint {folder}: {first_line(error)}") from error
    model, found = loaded
    random = [*map(str, found["missing_keys"]), *map(str, found["mismatched_keys"])]
    if random:
        raise UserError(
            f"--checkpoint {folder}: its weights are not those of {type(model).__name__}, which "
            f"also needs {', '.join(sorted(random)[:3])}"
        )
    if hasattr(model.config, MODULE) and NONE in options.positional:
        raise UserError(
            f"--checkpoint {folder}: was saved with a method; name it ({OPTION} {folder}), not "
            f"{NONE}"
        )
    check_finite(model, folder)
    return model.to(device).eval()


def _add_method(model: Any, folder: Path, adapter: str) -> list[str]:
    """Add the method in the folder `adapter` to the model, in place of another one, and return the
    warnings of this. Raises UserError.
    """
    use_positional(model, None)
    if adapter == NONE:
        return []
    if (Path(adapter) / "config.json").exists() and Path(adapter).resolve() != folder.resolve():
        raise UserError(
            f"{OPTION} {adapter}: is a complete model, with weights of its own; name it with "
            "--checkpoint too"
        )
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            load_positional(model, adapter)
    except (OSError, ValueError, NotImplementedError) as error:
        raise UserError(f"{OPTION} {adapter}: {error}") from error
    check_finite(model, adapter)
    return [str(each.message) for each in caught]


def _fingerprint(folder: Path, adapter: str) -> str:
    """16 hexadecimal digits of the weights and configurations of a model and a method."""
    digest = hashlib.sha256()
    folders = [folder]
    if adapter != NONE:
        folders.append(Path(adapter))
    for each in folders:
        for path in sorted((*each.glob("*.safetensors"), *each.glob("*.json"))):
            digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()[:16]
