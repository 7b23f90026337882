"""deepy.py with real processes on the CPU: ranks, signals and exit statuses.

test_multi_host.py (slow) starts ranks on two emulated hosts.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from megatron.launcher.commands import signal_command
from megatron.launcher.node import KILL_SIGNAL, Node, run_node
from tests.support.checkpoints import write_yaml
from tests.support.configs import MINIMAL
from tests.support.processes import wait_for

ROOT = Path(__file__).parents[2]
LAUNCHER_VARIABLES = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "LOCAL_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
}

ALL_REDUCE = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import deepspeed.ops
# DeepSpeed would compile an operator for shared memory, which is not needed here.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
import deepspeed, torch
from megatron.launcher.script_arguments import parse_arguments

config, options = parse_arguments(
    "all-reduce", add_options=lambda parser: parser.add_argument("--lengths", nargs="+")
)
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
total = torch.tensor([torch.distributed.get_rank() + 1.0])
torch.distributed.all_reduce(total)
facts = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
facts += [total.item(), config.training.seed]
typed = sys.stdin.readline().strip() if os.environ["RANK"] == "0" else "-"
with open("rank" + os.environ["RANK"], "w") as file:
    print(*facts, options.lengths, typed, file=file)
torch.distributed.destroy_process_group()
"""

# Both ranks then receive SIGTERM, while rank 0 still needs 2.5 seconds to save, and exit with
# status 9.
SAVE_ON_SIGTERM = """
import signal, time
received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(time.time()))
open("ready" + facts[0], "w").close()
while not received:
    time.sleep(0.05)
time.sleep(2.5 if facts[0] == "0" else 0)
with open("saved" + facts[0], "w") as file:
    print(received[0], time.time(), len(received), file=file)
while not os.path.exists("saved0"):
    time.sleep(0.05)
sys.exit(9)
"""


def start_deepy(folder: Path, *words: str, **variables: str) -> subprocess.Popen:
    """Start `python deepy.py WORDS` in `folder`, with pipes and without the variables of another
    launcher.
    """
    write_yaml(folder / "model.yml", MINIMAL)
    environment = {
        name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, str(ROOT / "deepy.py"), *words],
        cwd=folder,
        env={**environment, "DS_ACCELERATOR": "cpu", **variables},
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


@pytest.mark.ci
def test_two_ranks_compute_and_save_after_sigterm(tmp_path, forked_scripts):
    (tmp_path / "script.py").write_text(ALL_REDUCE + SAVE_ON_SIGTERM)
    process = start_deepy(
        tmp_path, "script.py", "model", "--set", "num_gpus=2", "seed=7", "--lengths", "8", "16"
    )
    process.stdin.write("typed\n")
    process.stdin.flush()
    wait_for(lambda: len(list(tmp_path.glob("ready?"))) == 2)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (
        9,
        "SIGTERM: asked 2 process(es) to save and exit; repeat to kill them\n",
    )
    assert "deepy: 2 processes on the CPU (DS_ACCELERATOR is cpu" in output
    assert "thread(s) per process (OMP_NUM_THREADS is not set)" in output
    assert (tmp_path / "rank0").read_text() == "0 0 2 3.0 7 ['8', '16'] typed\n"
    assert (tmp_path / "rank1").read_text() == "1 1 2 3.0 7 ['8', '16'] -\n"
    saved = [(tmp_path / f"saved{rank}").read_text().split() for rank in (0, 1)]
    signal_times, end_times = (
        [float(words[0]) for words in saved],
        [float(words[1]) for words in saved],
    )
    assert abs(signal_times[0] - signal_times[1]) < 1
    assert end_times[0] - signal_times[0] > 2  # rank 0 got the time it needed
    assert [words[2] for words in saved] == ["1", "1"]  # each rank received one signal


def run(command: list[str], ranks: int = 1, **options) -> int:
    return run_node(
        Node(None, list(range(ranks)), 0, ranks, "127.0.0.1", 29500), command, os.environ, **options
    )


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("sys.exit(7)", 7, ""),
        (
            "os.kill(os.getpid(), 9)",
            128 + 9,
            f"error: rank 0 on {socket.gethostname()} was killed by SIGKILL (9); usually: the host "
            "ran out of memory (see dmesg), or kill -9\n",
        ),
    ],
)
def test_exit_status(code, status, message, capfd):
    assert run([sys.executable, "-c", f"import os, sys; {code}"]) == status
    assert capfd.readouterr().err == message


@pytest.mark.ci
def test_other_ranks_are_killed_after_a_failure(monkeypatch, capfd):
    """Rank 0 has started a process of its own, and waits for rank 1, which aborts."""
    monkeypatch.setattr("megatron.launcher.node._SECONDS_AFTER_FAILURE", 0.5)
    code = (
        "import os, subprocess, sys, time\n"
        "if os.environ['RANK'] == '1': time.sleep(2); os.abort()\n"
        "print(subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
        "time.sleep(60)"
    )
    assert run([sys.executable, "-c", code], ranks=2) == 128 + signal.SIGABRT
    output, errors = capfd.readouterr()
    first, last = errors.splitlines()
    assert first == "killing rank 0, which did not exit"
    assert last.startswith(
        f"error: rank 1 on {socket.gethostname()} was killed by SIGABRT (6); usually: native code"
    )
    assert has_ended(int(output))


def test_the_cause_is_named_even_if_another_rank_ends_first(capfd):
    """Rank 0 notices that rank 1 will be killed, and exits as if it had lost the connection."""
    code = (
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '0': sys.exit(3)\n"
        "time.sleep(1)\n"
        "os.kill(os.getpid(), signal.SIGSEGV)"
    )
    assert run([sys.executable, "-c", code], ranks=2) == 128 + signal.SIGSEGV
    assert capfd.readouterr().err.startswith(
        f"error: rank 1 on {socket.gethostname()} was killed by SIGSEGV (11)"
    )


# Ignores SIGTERM.
IGNORING = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: open('signalled', 'w').close())
with open('pid.new', 'w') as file:
    file.write(str(os.getpid()))
os.rename('pid.new', 'pid')
time.sleep(60)
time.sleep(60)
"""


@pytest.mark.parametrize("second", [signal.SIGINT, KILL_SIGNAL])
def test_second_signal_kills(tmp_path, capfd, monkeypatch, second):
    monkeypatch.chdir(tmp_path)

    def interrupt_twice() -> None:
        wait_for((tmp_path / "pid").exists)
        os.kill(os.getpid(), signal.SIGINT)
        wait_for((tmp_path / "signalled").exists)
        os.kill(os.getpid(), second)

    thread = threading.Thread(target=interrupt_twice)
    thread.start()
    assert run([sys.executable, "-c", IGNORING]) == 128 + signal.SIGKILL
    thread.join()
    errors = capfd.readouterr().err
    assert "SIGINT: asked 1 process(es) to save and exit" in errors
    assert f"{second.name} again: killing all processes" in errors
    assert has_ended(int((tmp_path / "pid").read_text()))


def test_the_warning_of_a_batch_system(capfd):
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "os.kill(os.getppid(), signal.SIGUSR1)\n"
        "time.sleep(60)"
    )
    assert run([sys.executable, "-c", code]) == 5
    assert capfd.readouterr().err.startswith("SIGUSR1: asked 1 process(es) to save and exit")


def test_nohup():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code = "import os, signal, time; os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.5)"
        assert run([sys.executable, "-c", code]) == 0
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_ranks_without_a_connection_are_stopped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron.launcher.node._SECONDS_TO_SAVE", 0.5)
    status = run(
        [sys.executable, "-c", IGNORING], connected=lambda: not (tmp_path / "pid").exists()
    )
    assert status == 128 + signal.SIGKILL
    assert (tmp_path / "signalled").exists()


def has_ended(pid: int) -> bool:
    """True once the process has ended (a zombie has ended)."""
    try:
        process = psutil.Process(pid)
        process.wait(timeout=10)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.parametrize(
    ("argument", "status"), [("{prefix}", -signal.SIGTERM), ("another program", 0)]
)
def test_signals_go_only_to_node_py(argument, status, tmp_path):
    """If node.py was killed, its process id may belong to another process."""
    prefix = f"{tmp_path}/deepy-1."
    command = ["sh", "-c", signal_command(prefix, "TERM").replace("%n", "0")]
    assert subprocess.run(command, check=False).returncode == 0  # node.py has not started yet
    program = ["python", "-c", "input()", argument.format(prefix=prefix)]
    with subprocess.Popen(program, executable=sys.executable, stdin=subprocess.PIPE) as process:
        file = Path(f"{prefix}0")
        file.write_text(str(process.pid))
        assert subprocess.run(command, check=False).returncode == 0
        assert file.exists() == (status != 0)
        if status == 0:
            process.communicate(b"\n")
    assert process.returncode == status
