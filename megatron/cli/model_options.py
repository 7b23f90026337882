"""What the command lines of evaluate.py and generate.py have in common: a checkpoint, a device, a precision.

    SCRIPT a.yml b.yml ... [--checkpoint DIR] [--iteration N] [--device D] [--precision P]

The model is what the checkpoint's own configuration says; the files given here say where it is, and what to do with it.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kerple.positional import method_class
from megatron.checkpoint.configuration import checkpoint_config, evaluated_method, model_differences
from megatron.checkpoint.directory import find_step, find_valid_step, has_checkpoint, iteration_of
from megatron.checkpoint.layers import DTYPES
from megatron.config import Config, UserError
from megatron.config.command_line import OptionParser, take_overrides
from megatron.config.loader import canonical_path
from megatron.config.yaml_files import parse_override
from megatron.inference.loading import load_model
from megatron.launcher.script_arguments import MERGED_CONFIG_OPTION, parse_arguments
from megatron.model.gpt import GPT
from megatron.tokenizer import Tokenizer, build_tokenizer

# Sizes on which two configurations of one model agree.
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")

# What a checkpoint does not decide, but whoever runs it.
HOW_TO_RUN = ("attention_backend", "pos_emb_module", "release_bf16_distances")


def parse_with_checkpoint(
    description: str,
    argv: Sequence[str] | None,
    extra: Callable[[argparse.ArgumentParser], None],
    *,
    several: bool = False,
) -> tuple[Config, argparse.Namespace]:
    """The configuration and the options of a script that works on a checkpoint; `extra` adds the script's own options.

    The configuration files may be left out where --checkpoint names a folder: the configuration is then the (first)
    checkpoint's own with --set over it, and `options.own` is True. `options.checkpoint` is a list of folders, of one
    unless `several`; empty if not given. Raises UserError.
    """
    words = list(sys.argv[1:] if argv is None else argv)

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--checkpoint",
            nargs="+" if several else 1,
            default=[],
            metavar="DIR",
            help="folder that holds `latest`; default: `load` of the configuration, or else `save`",
        )
        parser.add_argument("--iteration", type=int, help="step of the checkpoint; default: the one named in `latest`")
        parser.add_argument("--device", help="cpu, cuda, cuda:1 ...; default: a GPU where there is one")
        parser.add_argument(
            "--precision", choices=DTYPES, default="fp32", help="of the weights and the computation (%(default)s)"
        )
        parser.set_defaults(own=False)
        extra(parser)

    overrides, rest = take_overrides(words)
    if not {"-h", "--help", MERGED_CONFIG_OPTION} & set(rest):
        alone = OptionParser(description=description)
        alone.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)
        alone.add_argument("--fallback", action="store_true")
        add_options(alone)
        options, unknown = alone.parse_known_args(rest)
        if options.checkpoint and not unknown:
            options.own = True
            options.overrides = dict(map(parse_override, overrides))
            step = _step(options.checkpoint[0], options.iteration, options.fallback)
            # The module of a method from outside must be known before the checkpoint's configuration can be read.
            module = {k: v for k, v in options.overrides.items() if canonical_path(k) == ("pos_emb_module",)}
            config = checkpoint_config(step, module)
            return config.updated(**options.overrides), options
    return parse_arguments(description, words, add_options)


def checkpoint_folders(config: Config, options: argparse.Namespace) -> list[Path]:
    """The folders of --checkpoint, or the configuration's `load`, or else `save`. Raises UserError if none is named."""
    if options.checkpoint:
        return [Path(folder) for folder in options.checkpoint]
    named = [config.checkpoint.load, config.checkpoint.save]
    folders = [Path(folder) for folder in named if folder is not None]
    if not folders:
        raise UserError('no checkpoint to load: give --checkpoint DIR, or "load" or "save" in the configuration')
    for folder in folders:
        if has_checkpoint(folder) or options.iteration is not None:
            return [folder]
    raise UserError(
        f"{' and '.join(map(str, folders))}: no checkpoint there yet (no file `latest`); train a model first"
    )


def load(folder: Path, config: Config, options: argparse.Namespace, *, check: bool = True) -> tuple[GPT, Config]:
    """The model in a folder, in evaluation mode on the chosen device, and the checkpoint's configuration.

    Raises UserError when the folder holds none, or, with `check`, when the configuration that was given describes
    another model.
    """
    step = chosen_step(folder, config, options)
    device = choose_device(options.device)
    model, saved = load_model(
        folder,
        iteration=iteration_of(step),
        device=device,
        dtype=DTYPES[options.precision],
        overrides=_overrides(step, config, options),
    )
    if check:
        _check_same_model(folder, saved, config)
    if int(os.environ.get("RANK", "0")) > 0:
        return model, saved  # one rank says what all have loaded
    attention = model.blocks[0].attention.attention.choice(device)
    print(
        f"loaded {step}: {evaluated_method(saved)}, {saved.model.num_layers} layers of "
        f"{saved.model.hidden_size}, {options.precision} on {device}, attention {attention}",
        file=sys.stderr,
        flush=True,
    )
    return model, saved


def saved_config(folder: Path, config: Config, options: argparse.Namespace, *, check: bool = True) -> Config:
    """The configuration that `load` returns, without the model. Raises UserError as it does."""
    step = chosen_step(folder, config, options)
    saved = checkpoint_config(step, _overrides(step, config, options))
    if check:
        _check_same_model(folder, saved, config)
    return saved


def _overrides(step: Path, config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """The keys of the checkpoint's configuration that whoever runs it decides."""
    given = config.to_flat()
    overrides = {key: given[key] for key in HOW_TO_RUN if key in given}
    return {**overrides, **_positional_options(step, config, options, overrides)}


def load_tokenizer(config: Config, saved: Config, rows: int) -> Tokenizer:
    """The tokenizer that the given configuration names, or else the checkpoint's, for a model of so many embeddings."""
    named = {"tokenizer_type", "vocab_file", "merge_file"} & config.to_flat().keys()
    chosen = (config if named else saved).tokenizer
    tokenizer = build_tokenizer(chosen.tokenizer_type, chosen.vocab_file, chosen.merge_file)
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {rows} embeddings; "
            "give the tokenizer-type, vocab-file and merge-file it was trained with"
        )
    return tokenizer


def _positional_options(
    step: Path, config: Config, options: argparse.Namespace, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """`pos_emb_options` as the checkpoint has them, but for the evaluation-time ones, which are those asked for: the
    configuration's or, where that is the checkpoint's own, --set's. Empty where nothing is asked.

    Raises UserError for a --set of what the checkpoint's method has not, or what changes with its weights.
    """
    saved = checkpoint_config(step, overrides).model
    method = method_class(saved.pos_emb)
    at_evaluation = method.evaluation_options
    trained = saved.pos_emb_options
    if not options.own:
        asked = config.model.pos_emb_options if method_class(config.model.pos_emb) is method else trained
    else:
        asked = dict(trained)
        for key, value in options.overrides.items():
            first, *rest = canonical_path(key)
            if first == "pos_emb_options":
                asked = {**asked, rest[0]: value} if rest else dict(value)
        for name in asked.keys() | trained.keys():
            if name not in at_evaluation and asked.get(name) != trained.get(name):
                raise UserError(
                    f"--set pos-emb-options: {step} was trained with pos_emb {saved.pos_emb}, of which only "
                    f"{', '.join(at_evaluation) or 'nothing'} can be chosen at evaluation, not {name}"
                )
    merged = {name: value for name, value in trained.items() if name not in at_evaluation}
    merged |= {name: value for name, value in asked.items() if name in at_evaluation and value is not None}
    return {"pos_emb_options": merged} if merged != trained else {}


def _step(folder: str | Path, iteration: int | None, fallback: bool) -> Path:
    """The checkpoint to load; with `fallback` the newest whole one, where that is damaged."""
    if not fallback:
        return find_step(folder, iteration)  # load_model checks it
    return find_valid_step(folder, iteration, fallback=True, report=partial(print, file=sys.stderr, flush=True))


def chosen_step(folder: Path, config: Config, options: argparse.Namespace) -> Path:
    """The checkpoint of a folder that the options and the configuration ask for. Raises UserError if there is none."""
    iteration = options.iteration
    if iteration is None and not options.own:  # a checkpoint's own `iteration` is the one it was started from
        iteration = config.checkpoint.iteration
    return _step(folder, iteration, options.fallback or (config.checkpoint.fallback and not options.own))


def choose_device(name: str | None) -> torch.device:
    """The device of that name; without one, this process's GPU where there is one. Raises UserError for a bad name."""
    if name is None:
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device


def first_process() -> bool:
    """Whether this process does the work: one does, and says so where a launcher has started several."""
    if int(os.environ.get("RANK", "0")) > 0:
        return False
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        note = f"note: this runs in one process; the other {processes - 1} that were started have ended"
        print(note, file=sys.stderr, flush=True)
    return True


def _check_same_model(folder: Path, saved: Config, config: Config) -> None:
    """Raises UserError when the configuration that was given describes another model than the checkpoint's."""
    given = config.to_flat()
    sizes = (
        f"{key} {getattr(saved.model, key)} in the checkpoint, {getattr(config.model, key)} here"
        for key in SIZES
        if key in given and getattr(saved.model, key) != getattr(config.model, key)
    )
    differences = [*sizes, *model_differences(saved, config, evaluation=True)]
    if differences:
        raise UserError(
            f"{folder}: was trained with another configuration ({'; '.join(dict.fromkeys(differences))}); give the "
            "one it was trained with, or another folder"
        )
