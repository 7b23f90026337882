"""deepy.py with real processes on the CPU: ranks, Slurm, signals and exit statuses.

Two tests start DeepSpeed's launcher; the others start a small program in its place.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron.launcher.deepspeed_runner import ReservedPort, run_launcher
from megatron.launcher.script_arguments import MERGED_CONFIG_OPTION

ROOT = Path(__file__).parents[2]
MODEL = '{"num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "seq-length": 16, "pos-emb": "none"}'
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

config, options = parse_arguments("all-reduce", add_options=lambda parser: parser.add_argument("--lengths", nargs="+"))
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
total = torch.tensor([torch.distributed.get_rank() + 1.0])
torch.distributed.all_reduce(total)
facts = [os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], total.item(), config.training.seed]
typed = sys.stdin.readline().strip() if os.environ["RANK"] == "0" else "-"
with open("rank" + os.environ["RANK"], "w") as file:
    print(*facts, options.lengths, typed, file=file)
torch.distributed.destroy_process_group()
"""

# Both ranks then receive SIGTERM, while rank 0 still needs 2.5 seconds to save, and exit with status 9.
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

FAKE_SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
assert words[:2] == ["-n", "2"], words
rest = words[2:]
while rest[0].startswith("-"):
    print("srun option", rest.pop(0))
sys.stdout.flush()
tasks = []
for rank in range(2):
    slurm = dict(SLURM_PROCID=str(rank), SLURM_LOCALID="0", SLURM_STEP_NUM_TASKS="2")
    tasks.append(subprocess.Popen(rest, env={{**os.environ, **slurm}}))
sys.exit(max(task.wait() for task in tasks))
"""


def start_deepy(folder: Path, *words: str, **variables: str) -> subprocess.Popen:
    """Start `python deepy.py WORDS` in `folder`, with pipes and without the variables of another launcher."""
    (folder / "model.yml").write_text(MODEL)
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
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


def test_two_ranks_compute_and_save_after_sigterm(tmp_path):
    (tmp_path / "script.py").write_text(ALL_REDUCE + SAVE_ON_SIGTERM)
    process = start_deepy(tmp_path, "script.py", "model", "--set", "num_gpus=2", "seed=7", "--lengths", "8", "16")
    process.stdin.write("typed\n")
    process.stdin.flush()
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (9, "SIGTERM: asked 2 process(es) to save and exit; repeat to kill them\n")
    assert "deepy: 2 processes on the CPU (no GPU was found; num_gpus sets the number of processes)" in output
    assert "thread(s) per process (OMP_NUM_THREADS is not set)" in output
    assert (tmp_path / "rank0").read_text() == "0 0 2 3.0 7 ['8', '16'] typed\n"
    assert (tmp_path / "rank1").read_text() == "1 1 2 3.0 7 ['8', '16'] -\n"
    saved = [(tmp_path / f"saved{rank}").read_text().split() for rank in (0, 1)]
    signal_times, end_times = [float(words[0]) for words in saved], [float(words[1]) for words in saved]
    assert abs(signal_times[0] - signal_times[1]) < 1
    assert end_times[0] - signal_times[0] > 2  # rank 0 got the time it needed
    assert [words[2] for words in saved] == ["1", "1"]  # each rank received one signal


def test_slurm(tmp_path):
    """Slurm is replaced by an `srun` that starts its tasks on this machine."""
    (tmp_path / "script.py").write_text(ALL_REDUCE)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", FAKE_SRUN), ("sinfo", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "hostfile").write_text("node-1 slots=1\nnode-2 slots=1\n")
    with ReservedPort() as port:
        keys = ["hostfile=hostfile", "launcher=slurm", "no_ssh_check=true", "account=lab", "seed=7"]
        keys += ["master_addr=127.0.0.1", f"master_port={port.number}"]
        path = f"{programs}:{os.environ['PATH']}"
        process = start_deepy(tmp_path, "script.py", "model", "--set", *keys, PATH=path, OMP_NUM_THREADS="1")
        output, errors = process.communicate("", timeout=200)
    assert process.returncode == 0, errors
    assert "deepy: 2 processes on 2 host(s) of hostfile" in output
    assert "srun option --account=lab" in output
    ranks = [(tmp_path / f"rank{rank}").read_text().split()[:5] for rank in (0, 1)]
    assert ranks == [["0", "0", "2", "3.0", "7"], ["1", "0", "2", "3.0", "7"]]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(7)", 7),
        ("sys.exit(256 - 9)", 128 + 9),  # how DeepSpeed's launcher reports a process killed by SIGKILL
        ("os.kill(os.getpid(), 9)", 128 + 9),
    ],
)
def test_exit_status(code, status):
    assert run_launcher([sys.executable, "-c", f"import os, sys; {code}"], os.environ) == status


def test_second_signal_kills(tmp_path, capfd, monkeypatch):
    """The program ignores SIGTERM; its parent takes the place of DeepSpeed's runner."""
    (tmp_path / "ignores_sigterm.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: open('signalled', 'w').close())\n"
        "with open('pid.new', 'w') as file:\n    file.write(str(os.getpid()))\n"
        "os.rename('pid.new', 'pid')\n"
        "time.sleep(60)\ntime.sleep(60)\n"
    )
    monkeypatch.chdir(tmp_path)

    def interrupt_twice() -> None:
        wait_for(tmp_path / "pid")
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(tmp_path / "signalled")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_twice)
    thread.start()
    code = "import subprocess, sys; subprocess.run([sys.executable, 'ignores_sigterm.py'])"
    assert run_launcher([sys.executable, "-c", code], os.environ) == 128 + signal.SIGKILL
    thread.join()
    errors = capfd.readouterr().err
    assert "SIGINT: asked 1 process(es) to save and exit" in errors
    assert "SIGINT again: killing all processes" in errors
    assert has_ended(int((tmp_path / "pid").read_text()))


def test_processes_of_a_launcher_that_died_are_killed(tmp_path, capfd, monkeypatch):
    """The launcher exits with 0 and leaves a process behind, as DeepSpeed's does after SIGKILL."""
    monkeypatch.setattr("megatron.launcher.deepspeed_runner._SECONDS_FOR_DATA_WORKERS", 0.5)
    command = [sys.executable, "-c", "import time; time.sleep(60)", MERGED_CONFIG_OPTION]
    code = f"import subprocess; print(subprocess.Popen({command!r}).pid)"
    assert run_launcher([sys.executable, "-c", code], os.environ) == 1
    output, errors = capfd.readouterr()
    assert "DeepSpeed's launcher died before its processes; they were killed" in errors
    assert has_ended(int(output))


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


def wait_for(*paths: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, f"{paths} did not appear"
        time.sleep(0.05)
