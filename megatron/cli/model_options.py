"""Command-line options shared by evaluate.py and generate.py: a checkpoint, a device, a precision.

    SCRIPT a.yml b.yml ... [--checkpoint DIR] [--iteration N] [--device D] [--precision P]

The checkpoint's own configuration defines the model. The YAML files locate the checkpoint and
configure the script.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kerple.positional import RANDOM_OPTIONS, method_class
from megatron.checkpoint.configuration import checkpoint_config, evaluated_method, model_differences
from megatron.checkpoint.directory import (
    find_step,
    has_checkpoint,
    iteration_of,
    saved_iterations,
)
from megatron.checkpoint.layers import DTYPES
from megatron.checkpoint.manifest import find_valid_step
from megatron.config import Config
from megatron.config.schema import canonical_path
from megatron.config.yaml_files import parse_override
from megatron.convert.hub import local_checkpoint
from megatron.inference.loading import load_model
from megatron.launcher.script_arguments import (
    MERGED_CONFIG_OPTION,
    become_rank,
    make_parser,
    parse_arguments,
)
from megatron.model.attention import describe_backends
from megatron.model.gpt import GPT
from megatron.model.kernel_check import check_kernels
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.command_line import extract_overrides, integer, path_option
from megatron.utils.environment import choose_device, slow_dtype_notice
from megatron.utils.errors import UserError

# Keys that the user's configuration decides, not the checkpoint's.
RUNTIME_KEYS = ("attention_backend", "pos_emb_module", "release_bf16_distances")
# Keys of a training run -> the option that has their meaning for a checkpoint.
OPTION_OF_KEY = {
    "iteration": "--iteration",
    "fallback": "--fallback",
    "precision": "--precision",
    "fp16": "--precision",
    "bf16": "--precision",
}


def parse_with_checkpoint(
    description: str,
    argv: Sequence[str] | None,
    extra: Callable[[argparse.ArgumentParser], None],
    *,
    several: bool = False,
) -> tuple[Config, argparse.Namespace]:
    """Parse the command line of a script that loads a checkpoint. Raises UserError.

    If --checkpoint is given, configuration files are optional: without them the configuration is
    that of the (first) checkpoint with --set applied, `options.from_checkpoint` is True, and
    `options.overrides` contains the values of --set.

    extra: adds the script's own options. several: --checkpoint accepts several folders.
    `options.checkpoint` is always a list, empty if the option is not given.
    """
    if argv is None:
        argv = sys.argv[1:]

    def add_options(parser: argparse.ArgumentParser) -> None:
        add_checkpoint_options(parser, several=several)
        extra(parser)

    overrides, rest = extract_overrides(argv)
    if not {"-h", "--help", MERGED_CONFIG_OPTION} & set(rest):
        options, unknown = make_parser(description, add_options).parse_known_args(rest)
        configured = options.files or options.conf_dir or options.neox_config or unknown
        if options.checkpoint and not configured:
            options.from_checkpoint = True
            options.overrides = dict(map(parse_override, overrides))

            # The module that defines an external method must be known before reading the
            # checkpoint's configuration.
            module = {}
            for key, value in options.overrides.items():
                if canonical_path(key) == ("pos_emb_module",):
                    module[key] = value
            _find_on_hub(options, next(iter(module.values()), None))
            for key in options.overrides:
                option = OPTION_OF_KEY.get(canonical_path(key)[0])
                if option is not None:
                    raise UserError(f"--set {key}: has no effect on --checkpoint; use {option}")
            step = _find_step(options.checkpoint[0], options.iteration, options.fallback)
            trained = checkpoint_config(step, module)

            # The address is that of the training run.
            addresses = dict.fromkeys({"master_addr", "master_port"} & trained.to_flat().keys())
            config = trained.updated(**addresses).updated(**options.overrides)
            become_rank(config)
            return config, options
    config, options = parse_arguments(description, argv, add_options)
    _find_on_hub(options, config.model.pos_emb_module)
    return config, options


def _find_on_hub(options: argparse.Namespace, pos_emb_module: str | None) -> None:
    """Replace the Hugging Face models in --checkpoint (names on the hub, and folders) by folders of
    checkpoints; `options.hub_names` maps these to the names.
    """
    folders, options.hub_names = [], {}
    for name in options.checkpoint:
        folder = str(local_checkpoint(name, _print_line, pos_emb_module))
        folders.append(folder)
        if folder != str(Path(name)):
            options.hub_names[folder] = name
    options.checkpoint = folders


def add_checkpoint_options(parser: argparse.ArgumentParser, *, several: bool) -> None:
    """Add the options of all scripts that load a checkpoint."""
    count = "+" if several else 1
    parser.add_argument(
        "--checkpoint",
        nargs=count,
        type=path_option,
        default=[],
        metavar="DIR",
        help="folder with `latest`, Hugging Face folder, or hf:ORG/NAME[@REVISION]; default: "
        "`load` in the configuration, or else `save`",
    )
    parser.add_argument(
        "--iteration",
        type=integer(0),
        help="checkpoint to load; default: the one named in `latest`",
    )
    parser.add_argument(
        "--device", help="cpu, cuda, cuda:1 (one process only) ...; default: a GPU if available"
    )
    parser.add_argument(
        "--precision",
        choices=DTYPES,
        default="fp32",
        help="precision of weights and computation (default: %(default)s)",
    )
    parser.set_defaults(from_checkpoint=False)


def checkpoint_folders(config: Config, options: argparse.Namespace) -> list[Path]:
    """The folders in --checkpoint, or else `load` or `save`; prints a line if both have
    checkpoints. Raises UserError if there is none.
    """
    if options.checkpoint:
        return [Path(folder) for folder in options.checkpoint]
    configured = config.checkpoint.load, config.checkpoint.save
    folders = [Path(folder) for folder in configured if folder is not None]
    if not folders:
        raise UserError(
            'no checkpoint to load: give --checkpoint DIR, or "load" or "save" in the configuration'
        )
    for folder in folders:
        if has_checkpoint(folder) or options.iteration is not None:
            save = folders[-1]
            if folder.resolve() != save.resolve() and has_checkpoint(save):
                _print_line(
                    f"notice: these are the weights of load: {folder}; for those of save: {save}, "
                    f"pass --checkpoint {save}"
                )
            return [folder]
    names = " and ".join(map(str, dict.fromkeys(folders)))
    raise UserError(f"no checkpoint in {names} (no file `latest`); train a model first")


def _find_step(folder: str | Path, iteration: int | None, fallback: bool) -> Path:
    if not fallback:
        return find_step(folder, iteration)  # load_model verifies it
    return find_valid_step(folder, iteration, fallback=True, report=_print_line)


def chosen_step(folder: Path, config: Config, options: argparse.Namespace) -> Path:
    """The global_stepN that options and configuration select; prints a line if the configuration
    selects an earlier one than the last. Raises UserError if it is missing.
    """
    iteration, fallback = options.iteration, options.fallback
    # A checkpoint's own configuration has the iteration from which its run started: ignore that.
    if not options.from_checkpoint:
        fallback = fallback or config.checkpoint.fallback
        if iteration is None:
            iteration = config.checkpoint.iteration
            last = max(saved_iterations(folder), default=0)
            if iteration is not None and iteration < last:
                _print_line(
                    f"notice: the configuration has iteration {iteration}, but {folder} has also "
                    f"checkpoints up to {last}; for the last one, pass --iteration {last}"
                )
    return _find_step(folder, iteration, fallback)


def saved_config(
    step: Path, config: Config, options: argparse.Namespace, *, check: bool = True
) -> Config:
    """The configuration of the checkpoint in a global_stepN directory (see `chosen_step`), with the
    overrides of the user (see `overrides_of`). Raises UserError if it cannot be read or, with
    `check`, if `config` describes another model.
    """
    saved = checkpoint_config(step, overrides_of(step, config, options))
    _check_config(step, saved, config, options, check)
    return saved


def load(
    step: Path, config: Config, options: argparse.Namespace, *, check: bool = True
) -> tuple[GPT, Config]:
    """The model in a global_stepN directory (see `chosen_step`), in evaluation mode on the chosen
    device, and its `saved_config`. Raises UserError like `saved_config`.

    It takes the step and not the folder, because a running training changes the folder's `latest`.
    """
    device, dtype = choose_device(options.device), DTYPES[options.precision]
    model, saved = load_model(
        step.parent,
        iteration=iteration_of(step),
        device=device,
        dtype=dtype,
        overrides=overrides_of(step, config, options),
    )
    _check_config(step, saved, config, options, check)

    # The first rank tells what it does.
    report = _print_line
    if os.environ.get("RANK", "0") != "0":
        report = _print_nothing
    if notice := slow_dtype_notice(device, dtype):
        report(notice)
    check_kernels(model, device, dtype, training=False, report=report)
    report(
        f"loaded {step}: {evaluated_method(saved)}, {saved.model.num_layers} layers of hidden size "
        f"{saved.model.hidden_size}, {options.precision} on {device}, "
        f"attention {describe_backends(model, device, dtype)}"
    )
    return model, saved


def _check_config(
    step: Path, saved: Config, config: Config, options: argparse.Namespace, check: bool
) -> None:
    """Raises UserError if the user's keys are those of another model."""
    # Without files, `config` is that of the first checkpoint; what --set asks for is for all.
    if options.from_checkpoint:
        config = saved.updated(**options.overrides)
    elif not check:
        return
    differences = model_differences(saved, config, evaluation=True)
    if differences:
        raise UserError(
            f"{step}: was trained with another configuration ({'; '.join(differences)}); use that "
            "configuration or another checkpoint"
        )


def overrides_of(step: Path, config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """The user's values that replace those in the checkpoint's configuration: RUNTIME_KEYS, and the
    `pos_emb_options` that may change after training. Raises UserError if --set changes an option
    that may not.
    """
    # Keys of the run, and options of the method that do not change what was trained.
    flat = config.to_flat()
    overrides = {key: flat[key] for key in RUNTIME_KEYS if key in flat}
    saved = checkpoint_config(step, overrides).model
    method = method_class(saved.pos_emb)
    changeable = (*method.evaluation_options, *RANDOM_OPTIONS)

    # Options the user asks for: in the configuration, or with --set.
    trained: Mapping[str, Any] = saved.pos_emb_options
    requested = dict(trained)
    if not options.from_checkpoint:
        if method_class(config.model.pos_emb) is method:
            requested = dict(config.model.pos_emb_options)
        if len(options.checkpoint) > 1 and not any(name in changeable for name in requested):
            requested = {**trained, **requested}  # the configuration is not that of all of them
    else:
        for key, value in options.overrides.items():
            first, *rest = canonical_path(key)
            if first != "pos_emb_options":
                continue
            if rest:
                requested[rest[0]] = value
            elif value is None:
                requested = {}
            else:
                requested |= value

    # With --set, other options are rejected. A configuration may be that of another model.
    try:
        fixed = method.trained_options(**trained)
        requested_fixed = method.trained_options(**requested)
    except ValueError as error:
        raise UserError(f"pos-emb-options: {error}") from error
    if options.from_checkpoint:
        for name in fixed.keys() | requested_fixed.keys():
            if requested_fixed.get(name) != fixed.get(name):
                allowed = ", ".join(changeable)
                if name == "methods":
                    allowed += ", of the methods in the list"
                raise UserError(
                    f"--set pos-emb-options: option {name} of pos_emb {saved.pos_emb} cannot be "
                    f"changed after training ({step}); options that can: {allowed}"
                )

    # An option that is None has the trained value.
    source = requested if requested_fixed == fixed else trained
    merged = {name: value for name, value in source.items() if name not in changeable}
    for name, value in requested.items():
        if name in changeable and value is not None:
            merged[name] = value
    if merged != trained:
        # Overrides are merged with the checkpoint's options, so those that are left out are reset.
        defaults = method.default_options()
        reset = {name: defaults.get(name) for name in trained if name not in merged}
        overrides["pos_emb_options"] = {**merged, **reset}
    return overrides


def tokenizer_files(config: Config, saved: Config) -> TokenizerFiles:
    """The tokenizer that the user's configuration names, or else the checkpoint's."""
    if {"tokenizer_type", "vocab_file", "merge_file"} & config.to_flat().keys():
        return TokenizerFiles.of(config)
    return TokenizerFiles.of(saved)


def first_process() -> bool:
    """Whether this is rank 0, which does all the work. Prints a note if there are others."""
    if int(os.environ.get("RANK", "0")) > 0:
        return False
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        _print_line(f"note: this script runs in one process; the other {processes - 1} exit")
    return True


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_nothing(line: str) -> None:
    pass
