"""deepy.py's command line: which script to start, with which configuration and options."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config import Config, load_config
from megatron.data.indexed_dataset import bin_path, find_files, idx_path
from megatron.launcher.commands import (
    forwarded_variables,
    job_command,
    local_environment,
    make_nodes,
    node_command,
    rank_command,
    reserved_port,
    split_secrets,
)
from megatron.launcher.hosts import PID_FILE, check_hosts, run_job, run_pdsh
from megatron.launcher.node import Node, run_node
from megatron.launcher.rank import DEFAULT_PORT, check_starter, find_starter
from megatron.launcher.resources import (
    Resources,
    check_installed,
    check_slots,
    find_resources,
    uses_other_hosts,
)
from megatron.launcher.script_arguments import print_notices
from megatron.utils.command_line import extract_overrides
from megatron.utils.errors import UserError
from megatron.utils.progress import fitted

USAGE = """usage: python deepy.py SCRIPT.py [-d DIR] a.yml b.yml ... [--set key=value ...]
                       [options of the script]

Start SCRIPT once per GPU (without a GPU: on the CPU), on this machine or on the hosts of a
hostfile.

  SCRIPT.py             train.py, evaluate.py (or eval.py), generate.py, or a script that uses
                        megatron.launcher.script_arguments
  -d, --conf-dir DIR    folder of the configuration files
  a.yml b.yml ...       configuration files to merge; .yml may be omitted; a later file overrides an
                        earlier one
  --dry-run             check what can be checked without ssh, print what would be started on each
                        host, and exit
  --set key=value ...   override keys (nested ones with dots: optimizer.params.lr=1e-3); repeatable
  -H, --hostfile FILE, --wandb-group NAME, --wandb-team NAME, --wandb-run-name NAME
                        the same as --set hostfile=FILE, wandb_group=NAME ...
  options of the script the first other option and everything after it (python SCRIPT.py --help
                        lists them)

All keys: configs/neox_arguments.md; its section Launcher has those for processes and nodes."""


DRY_RUN_OPTION = "--dry-run"
# -d DIR, -dDIR, --conf-dir DIR or --conf-dir=DIR, as in argparse.
_CONF_DIR = re.compile(r"-d(=?(?P<short>.+))?|--conf[-_]dir(=(?P<long>.+))?", re.DOTALL)


@dataclass(frozen=True)
class DeepyArguments:
    """The parsed command line of deepy.py. `program`: the absolute path of the script, and words
    before its options.
    """

    program: list[str]
    files: list[str]
    config_dir: str | None
    overrides: list[str]
    script_options: list[str]
    dry_run: bool


def parse_command_line(words: Sequence[str], program: Sequence[str] = ()) -> DeepyArguments | None:
    """Parse the words after `deepy.py`, without the script if `program` is given; None for -h or
    --help.

    Raises UserError if the script does not exist or no configuration file is given.
    """
    if not program:
        if not words or words[0] in ("-h", "--help"):
            return None
        program, words = [str(_find_script(words[0]))], words[1:]

    # Files come first, then the options of the script. Overrides and --dry-run can be anywhere.
    overrides, words = extract_overrides(words)
    script_words = [word for word in words if word.replace("_", "-") != DRY_RUN_OPTION]
    dry_run = len(script_words) < len(words)
    words = script_words
    files: list[str] = []
    config_dir = None
    while words and (not words[0].startswith("-") or _CONF_DIR.fullmatch(words[0])):
        word = words.pop(0)
        match = _CONF_DIR.fullmatch(word)
        if match is None:
            files.append(word)
        elif folder := match["short"] or match["long"]:
            config_dir = folder
        elif words:
            config_dir = words.pop(0)
        else:
            raise UserError(
                f"{word} is the last word; it must be followed by the folder of the configuration "
                "files"
            )
    if not files and {"-h", "--help"} & set(words):
        return None
    if not files:
        name = Path(program[0]).name if len(program) == 1 else program[-1]
        raise UserError(
            f"no configuration files were given for {name}; they come before the other options"
        )
    return DeepyArguments(list(program), files, config_dir, overrides, words, dry_run)


def _find_script(name: str) -> Path:
    """The absolute path of a script in the working directory or next to deepy.py."""
    for folder in (Path(), Path(__file__).resolve().parents[2]):
        if (folder / name).is_file():
            return (folder / name).absolute()
    raise UserError(
        f"{name}: no such script; the first word after deepy.py is the script, such as train.py"
    )


def main(
    words: Sequence[str],
    check_script: Callable[[Sequence[str], Config, Sequence[str], int], list[str]] = lambda *_: [],
    program: Sequence[str] = (),
    run_rank: Callable[[], int] | None = None,
    try_script: Callable[[Sequence[str], Config], None] = lambda *_: None,
) -> int:
    """Run deepy.py with these command-line arguments, and return the exit status of the script.

    Args:
        check_script: receives the program, the configuration, the options of the script and the
            number of processes. It raises UserError, or exits, if the script would reject them, and
            returns the prefixes of the datasets that every host needs.
        program: what to start instead of the script that the first word names (see `rank_command`).
        run_rank: runs this process as a rank, if srun or mpirun has started it as one of several
            (deepspeed_slurm or deepspeed_mpi). Without it, that is an error.
        try_script: with --dry-run, called with the script and the configuration before anything is
            printed. Raises UserError for what would fail in the ranks.

    Raises UserError, before anything is started, if the configuration is wrong or does not fit this
    machine.
    """
    arguments = parse_command_line(words, program)
    if arguments is None:
        print(USAGE)
        return 0

    # Where the ranks run.
    config = load_config(arguments.files, arguments.config_dir, arguments.overrides)
    if config.launcher.launcher == "pdsh":  # else deepy.py starts srun or mpirun
        check_starter(config, os.environ)
    if _is_one_of_several(config, can_be_rank=run_rank is not None):
        assert run_rank is not None
        return run_rank()
    print_notices(config)
    resources = find_resources(config)
    on_other_hosts = uses_other_hosts(config, resources)
    if on_other_hosts:
        check_slots(config, resources)
        if not arguments.dry_run:  # it may run on another machine
            check_installed(config)

    # What the script would reject, before it starts on every rank.
    program, options = arguments.program, arguments.script_options
    prefixes = check_script(program, config, options, resources.world_size)
    if not on_other_hosts:
        for prefix in prefixes:
            find_files(prefix)
    if arguments.dry_run:
        try_script(program, config)
    print(fitted(f"deepy: {resources.describe()}"), flush=True)
    if on_other_hosts:
        return _run_on_other_hosts(config, resources, arguments, prefixes)

    # On this machine, this process is the parent of the ranks.
    command = rank_command(config, program, options)
    if arguments.dry_run:
        _print_command("this machine", resources.world_size, shlex.join(command))
        return 0
    environment = local_environment(resources, os.environ)
    with reserved_port() as port:
        (slots,) = resources.slots.values()
        address = config.launcher.master_addr or "127.0.0.1"
        node = Node(None, slots, 0, len(slots), address, config.launcher.master_port or port)
        return run_node(node, command, environment)


def _is_one_of_several(config: Config, *, can_be_rank: bool) -> bool:
    """Whether srun or mpirun has started several of this process, which are the ranks.

    Raises UserError if they cannot be, because each of them would start all ranks.
    """
    starter = find_starter(config, os.environ)
    if starter is None:
        return False
    processes = int(os.environ[starter.variables[-1]])
    if processes == 1:
        return False
    if can_be_rank and getattr(config.launcher, starter.key):
        return True
    raise UserError(
        f"{starter.program} has started {processes} processes, and each of them would start all "
        f"ranks; remove {starter.program}, or let it start the ranks: {starter.program} kerple "
        f"train (or python train.py) with {starter.key}: true (docs/clusters.md)"
    )


def _run_on_other_hosts(
    config: Config, resources: Resources, arguments: DeepyArguments, prefixes: Sequence[str]
) -> int:
    """Start the ranks with config.launcher.launcher and wait for them; returns the exit status. A
    dry run only prints the commands.

    Raises UserError, before anything is started, if a host cannot be reached or lacks the project
    or a dataset.
    """
    launcher = config.launcher
    variables = forwarded_variables(os.environ)

    # Slurm starts the ranks itself, and so does an MPI library within a Slurm job.
    needs_ssh = launcher.launcher == "pdsh" or (
        launcher.launcher != "slurm" and "SLURM_JOB_ID" not in os.environ
    )
    first_address = None
    if needs_ssh and not launcher.no_ssh_check and not arguments.dry_run:
        files = [sys.executable, arguments.program[0]]
        for prefix in prefixes:
            files += [str(bin_path(prefix).absolute()), str(idx_path(prefix).absolute())]
        first_address = check_hosts(resources.hosts, os.getcwd(), files, os.environ)
    address = launcher.master_addr or first_address or resources.hosts[0]
    port = launcher.master_port or DEFAULT_PORT

    # pdsh starts one process per host, which starts the ranks.
    if launcher.launcher == "pdsh":
        command = rank_command(config, arguments.program, arguments.script_options)
        variables, names = split_secrets(variables)
        if names:
            line = (
                "deepy: not passed to other hosts, because pdsh would show them in the list of "
                f"processes: {', '.join(names)}; set them on the hosts themselves "
                "(docs/clusters.md)"
            )
            print(fitted(line), flush=True)
        nodes = make_nodes(resources, address, port)
        if not arguments.dry_run:
            return run_pdsh(nodes, command, variables, os.environ)
        remote = node_command(nodes, PID_FILE.format("dry-run"), command, variables)
        for index, node in enumerate(nodes):
            on_host = remote.replace(" %n ", f" {index} ").replace("%%", "%")
            _print_command(str(node.host), len(node.slots), on_host)
        return 0

    # srun and mpirun start every rank. With Slurm, the ranks compute the address and the port from
    # Slurm's variables.
    if launcher.launcher != "slurm":
        config = config.updated(master_addr=address, master_port=port)
    command = rank_command(config, arguments.program, arguments.script_options)
    command = job_command(config, resources, list(variables), command)
    if not arguments.dry_run:
        return run_job(command, {**os.environ, **variables}, resources.world_size)
    _print_command(", ".join(resources.hosts), resources.world_size, shlex.join(command))
    return 0


def _print_command(hosts: str, ranks: int, command: str) -> None:
    print(f"{hosts}, {ranks} rank(s): {command}", flush=True)
