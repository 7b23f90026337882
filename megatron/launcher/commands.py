"""The command lines that start the ranks: of each rank, of srun and mpirun, and of pdsh and what it
runs on a host.

A value on a command line is visible to every user of a host, so secrets are never put there: srun
and mpirun receive the names of variables only, and pdsh, which has no other way to pass variables,
does not receive secrets.
"""

import contextlib
import dataclasses
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron.config import Config
from megatron.launcher import node
from megatron.launcher.node import Node
from megatron.launcher.resources import Resources
from megatron.launcher.script_arguments import MERGED_CONFIG_OPTION
from megatron.utils.errors import UserError
from megatron.utils.secrets import contains_secret, is_secret_name

# Variables that have the same meaning on every host. srun passes all variables.
FORWARDED_PREFIXES = (
    "CUDA_", "CUBLAS_", "CUDNN_", "DS_", "FI_", "GLOO_", "HF_", "HUGGINGFACE_", "KERPLE_", "KMP_",
    "LD_LIBRARY_PATH", "MKL_", "MLFLOW_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_", "TENSORBOARD_",
    "TOKENIZERS_", "TORCH", "TP_", "TRANSFORMERS_", "TRITON_", "UCX_", "WANDB_",
)  # fmt: skip
NOT_FORWARDED = ("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE", "OMP_DISPLAY_ENV")


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port on this machine. Within the block, the system assigns it to no other process.

    The socket is bound with SO_REUSEADDR but does not listen, so rank 0 can listen on the port.
    """
    with socket.socket() as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stream.bind(("", 0))
        yield stream.getsockname()[1]


def rank_command(config: Config, program: Sequence[str], options: Sequence[str]) -> list[str]:
    """The command of every rank. It contains the configuration, so the hosts need not read the
    files.

    Args:
        program: an absolute path of a script, and words that precede its options.
    """
    return [
        sys.executable,
        "-u",
        *program,
        MERGED_CONFIG_OPTION,
        node.encode(config.to_flat()),
        *options,
    ]


def local_environment(resources: Resources, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of ranks on this machine. Prints a number of threads that it sets."""
    (slots,) = resources.slots.values()
    variables = dict(environment)
    if resources.on_cpu:
        variables |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    result = node.rank_environment(variables, slots)
    if result.keys() - variables.keys() == {"OMP_NUM_THREADS"}:
        threads = result["OMP_NUM_THREADS"]
        print(f"deepy: {threads} thread(s) per process (OMP_NUM_THREADS is not set)", flush=True)
    return result


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the ranks on other hosts receive: those with one of the prefixes above,
    and those of the file `.deepspeed_env` (lines NAME=VALUE) in the home or working directory, or
    of the file that DS_ENV_FILE names. As in a shell, $NAME and ${NAME} in a value are replaced,
    except within single quotes.

    Raises UserError if a line of the file is not NAME=VALUE or names a variable that is not set, or
    if the file that DS_ENV_FILE names cannot be read.
    """
    variables = {}
    for name, value in environment.items():
        if name.startswith(FORWARDED_PREFIXES) and name not in NOT_FORWARDED:
            variables[name] = value

    # Each file is read once, because $NAME may be the variable itself.
    name = environment.get("DS_ENV_FILE", "")
    folders = Path.home(), Path()
    files = dict.fromkeys((folder / (name or ".deepspeed_env")).resolve() for folder in folders)
    paths = [path for path in files if path.is_file()]
    if name and not paths:
        raise UserError(
            f"DS_ENV_FILE is {name}, but there is no such file; create it, or unset the variable"
        )
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise UserError(
                f"{path}: {reason}; it must be a text file with one NAME=VALUE per line"
            ) from error

        # Messages do not show values, which may be secrets.
        for number, line in enumerate(lines, start=1):
            text = line.strip().removeprefix("export ")
            if not text or text.startswith("#"):
                continue
            name, equals, value = text.partition("=")
            name = name.strip()
            if not equals or not name.isidentifier():
                raise UserError(f"{path}:{number}: not NAME=VALUE; correct or remove the line")
            try:
                variables[name] = _shell_value(value.strip(), {**environment, **variables})
            except KeyError as error:
                raise UserError(
                    f"{path}: the value of {name} has a $ before the name of a variable that is "
                    "not set; set it, or put the value in single quotes"
                ) from error
    return variables


def _shell_value(text: str, variables: Mapping[str, str]) -> str:
    """`text` without a pair of quotes around it, and, unless these are single quotes, with the
    values of $NAME and ${NAME}. Raises KeyError if there is no such variable.
    """
    quoted = re.fullmatch(r"""(['"])(.*)\1""", text, re.DOTALL)
    if quoted:
        text = quoted[2]
    if quoted and quoted[1] == "'":
        return text
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda match: variables[match[1] or match[2]], text)


def split_secrets(variables: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables that are not secrets, and the names of those that are."""
    public, secret = {}, []
    for name, value in variables.items():
        if is_secret_name(name) or contains_secret(value):
            secret.append(name)
        else:
            public[name] = value
    return public, secret


def job_command(
    config: Config, resources: Resources, variables: Sequence[str], command: Sequence[str]
) -> list[str]:
    """The command line of srun or mpirun that starts `command` as every rank.

    Args:
        variables: names of the variables that mpirun passes on from its own environment. srun
            passes all.
    """
    launcher = config.launcher
    hosts, ranks = resources.hosts, resources.world_size
    per_host = len(resources.slots[hosts[0]])
    if launcher.launcher == "slurm":
        words = [
            "srun",
            f"--ntasks={ranks}",
            f"--nodes={len(hosts)}",
            f"--ntasks-per-node={per_host}",
        ]
        words += [f"--nodelist={','.join(hosts)}", "--kill-on-bad-exit=1", "--export=ALL"]
        if launcher.num_gpus is not None and os.environ.get("DS_ACCELERATOR") != "cpu":
            words.append(f"--gpus-per-node={launcher.num_gpus}")
        options = {"--comment": launcher.comment, "--account": launcher.account}
        words += [f"{option}={value}" for option, value in options.items() if value is not None]
    else:
        slots = ",".join(f"{host}:{len(indices)}" for host, indices in resources.slots.items())
        # mpirun binds each process to one core by default, together with its threads and data
        # workers.
        words = ["mpirun", "-n", str(ranks), "-host", slots, "--bind-to", "none"]
        for name in variables:
            words += ["-x", name]
    return [*words, *command]


def make_nodes(resources: Resources, master_addr: str, master_port: int) -> list[Node]:
    """The ranks of every host, in the order of the hostfile."""
    nodes: list[Node] = []
    first_rank = 0
    for host, slots in resources.slots.items():
        nodes.append(Node(host, slots, first_rank, resources.world_size, master_addr, master_port))
        first_rank += len(slots)
    return nodes


def pdsh_command(hosts: Sequence[str], remote: str) -> list[str]:
    """Run a shell command on all hosts at once; pdsh returns the largest of their exit statuses."""
    return ["pdsh", "-S", "-f", str(len(hosts)), "-w", ",".join(hosts), remote]


def node_command(
    nodes: Sequence[Node], pid_file: str, command: Sequence[str], variables: Mapping[str, str]
) -> str:
    """The shell command that pdsh runs on every host. pdsh replaces %n in it with the index of the
    host.

    It works in sh, csh and fish. With `exec`, ssh exits with the status of node.py.

    Args:
        pid_file: the path prefix of a file where node.py stores its process id; the index is
            appended.
    """
    assignments = [f"{name}={value}" for name, value in variables.items()]
    start = (
        f"cd {shlex.quote(os.getcwd())} && exec env "
        f"{shlex.join([*assignments, sys.executable, '-u', node.__file__])}"
    )
    end = shlex.join(
        [node.encode([dataclasses.asdict(each) for each in nodes]), pid_file, *command]
    )
    escaped = [text.replace("%", "%%") for text in (start, end)]
    return " %n ".join(escaped)


def signal_command(pid_file: str, name: str) -> str:
    """The shell command that sends a signal to the node.py that `node_command` started on a host,
    if it still runs.

    If node.py was killed, another process may have its id: it gets no signal, and the file is
    removed.
    """
    script = (
        f'file={pid_file}%n; pid=`cat $file 2> /dev/null`; test -n "$pid" || exit 0; '
        f"if grep -Fqs {pid_file} /proc/$pid/cmdline; then kill -s {name} $pid; else rm -f $file; "
        "fi"
    )
    return f"sh -c {shlex.quote(script)}"
