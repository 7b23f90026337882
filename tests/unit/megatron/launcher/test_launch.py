"""deepy.py for real: processes on the CPU, exit statuses, signals."""

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron.config.arguments import run_main
from megatron.launcher.command import ReservedPort
from megatron.launcher.main import main

ALL_REDUCE = """
import os
import deepspeed.ops
# DeepSpeed would compile an operator for shared memory; nothing here needs it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
import deepspeed, torch
from megatron.config.arguments import parse

config, options = parse("all-reduce", extra=lambda parser: parser.add_argument("--lengths", nargs="+", type=int))
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
total = torch.tensor([torch.distributed.get_rank() + 1.0])
torch.distributed.all_reduce(total)
facts = [os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], total.item(), config.training.seed]
with open("rank" + os.environ["RANK"], "w") as file:
    print(*facts, options.lengths, os.environ["MASTER_PORT"], os.environ["OMP_NUM_THREADS"], file=file)
torch.distributed.destroy_process_group()
"""

# Signals reach every process while rank 0 is still busy; both save, then exit with the status given.
SAVE_ON_SIGTERM = """
import os, signal, time
from megatron.config.arguments import parse

config, options = parse("saves", extra=lambda parser: parser.add_argument("--status", type=int))
rank = os.environ["RANK"]
stopped = []
signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(time.time()))
open("ready" + rank, "w").close()
while not stopped:
    time.sleep(0.05)
time.sleep(2.5 if rank == "0" else 0)
with open("saved" + rank, "w") as file:
    print(stopped[0], time.time(), len(stopped), file=file)
if rank == "1":
    while not os.path.exists("saved0"):
        time.sleep(0.05)
sys.exit(options.status)
"""


def test_runs_at_the_same_time_reduce_know_the_configuration_and_do_not_collide(workplace, tmp_path_factory):
    other = type(workplace)(tmp_path_factory.mktemp("other"))
    for place in (workplace, other):
        place.script(ALL_REDUCE)
    words = ["script.py", "model", "--set", "num_gpus=2", "seed=7", "--lengths", "8", "16"]
    first, second = workplace.start(*words), other.start("script.py", "model.yml", OMP_NUM_THREADS="1")
    output, errors = first.communicate(timeout=200)
    assert (first.returncode, errors) == (0, "")
    assert "deepy: 2 processes on the CPU (no GPU was found; num_gpus sets the number of processes)" in output
    assert "thread(s) per process (OMP_NUM_THREADS is not set)" in output
    second.communicate(timeout=200)
    assert second.returncode == 0
    ranks = [(workplace.folder / f"rank{rank}").read_text().split() for rank in (0, 1)]
    assert ranks[0][:7] == ["0", "0", "2", "3.0", "7", "[8,", "16]"]
    assert ranks[1][:7] == ["1", "1", "2", "3.0", "7", "[8,", "16]"]
    alone = (other.folder / "rank0").read_text().split()
    assert alone[:6] == ["0", "0", "1", "1.0", "1234", "None"]
    assert ranks[0][7] == ranks[1][7] != alone[6]


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


def test_slurm_starts_the_processes_and_they_find_each_other(workplace):
    """Slurm itself is not here: an `srun` that starts its tasks on this machine stands for it."""
    workplace.script(ALL_REDUCE)
    programs = workplace.folder / "bin"
    programs.mkdir()
    for name, text in (("srun", FAKE_SRUN), ("sinfo", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (workplace.folder / "hostfile").write_text("node-1 slots=1\nnode-2 slots=1\n")
    with ReservedPort() as port:
        keys = ["hostfile=hostfile", "launcher=slurm", "no_ssh_check=true", "account=lab", "seed=7"]
        words = ["script.py", "model", "--set", *keys, "master_addr=127.0.0.1", f"master_port={port.number}"]
        path = f"{programs}:{os.environ['PATH']}"
        status, output, errors = workplace.run(*words, PATH=path, OMP_NUM_THREADS="1")
    assert status == 0, errors
    assert "deepy: 2 processes on 2 host(s) of hostfile" in output
    assert "srun option --account=lab" in output
    ranks = [(workplace.folder / f"rank{rank}").read_text().split() for rank in (0, 1)]
    assert [rank[:5] for rank in ranks] == [["0", "0", "2", "3.0", "7"], ["1", "0", "2", "3.0", "7"]]


def test_one_process_with_standard_input_and_exit_status(workplace):
    workplace.script("import os\nprint(os.environ['WORLD_SIZE'], sys.stdin.readline().strip())\nsys.exit(7)")
    status, output, _ = workplace.run("script.py", "model.yml", typed="a line\n")
    assert status == 7
    assert "deepy: 1 process on the CPU" in output
    assert "1 a line" in output.splitlines()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py", "model"], "nowhere.py: no such script"),
        (["script.py"], "no configuration files were given for script.py"),
        (["script.py", "modell"], r"modell: no such file; nearest: model\.yml"),
        (["script.py", "model", "--set", "hidden-size=33"], "hidden_size 33 is not divisible by num_attention_heads 4"),
        (["script.py", "model", "--set", "num_gpus=3", "model-parallel-size=2"], r"3 process\(es\) cannot hold whole"),
        (
            ["script.py", "model", "--set", "train_batch_size=3", "train_micro_batch_size_per_gpu=2"],
            "train_batch_size 3 is not a multiple of",
        ),
        (["script.py", "model", "--set", "num_nodes=2"], "num_nodes 2 needs a hostfile"),
        (["script.py", "model", "--set", "hostfile=nowhere"], "hostfile nowhere: no such file"),
    ],
)
def test_errors_come_before_anything_is_started(workplace, monkeypatch, capsys, words, message):
    workplace.script("")
    monkeypatch.chdir(workplace.folder)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr("megatron.launcher.main.run_to_end", lambda *_: pytest.fail("something was started"))
    assert run_main(lambda: main(words)) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert re.fullmatch(f"error: .*{message}.*\n", errors)


def test_a_user_error_is_one_line_and_status_2(workplace):
    workplace.script("open('started', 'w')")
    status, output, errors = workplace.run("script.py", "model", "--set", "num-layer=3")
    assert (status, output) == (2, "")
    assert errors.startswith('error: --set: "num-layer" is not a known key; nearest known: num_layers')
    assert errors.count("\n") == 1
    assert not (workplace.folder / "started").exists()


def test_one_failing_process_ends_the_run(workplace):
    workplace.script("import os, time\nif os.environ['RANK'] == '1':\n    sys.exit(5)\ntime.sleep(60)")
    start = time.monotonic()
    assert workplace.run("script.py", "model", "--set", "num_gpus=2")[0] == 5
    assert time.monotonic() - start < 30


def test_a_process_that_a_signal_ends_gives_128_and_the_signal(workplace):
    workplace.script("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert workplace.run("script.py", "model")[0] == 128 + signal.SIGKILL


def test_processes_save_after_a_signal(workplace):
    workplace.script(SAVE_ON_SIGTERM)
    process = workplace.start("script.py", "model", "--set", "num_gpus=2", "--status", "9")
    wait_for(workplace.folder / "ready0", workplace.folder / "ready1")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 9
    assert "SIGTERM: asked 2 process(es) to save and exit" in errors
    saved = [(workplace.folder / f"saved{rank}").read_text().split() for rank in (0, 1)]
    # Both were told at once, once, and rank 0 had the time it needed.
    assert abs(float(saved[0][0]) - float(saved[1][0])) < 1
    assert float(saved[0][1]) - float(saved[0][0]) > 2
    assert [one[2] for one in saved] == ["1", "1"]


def test_interrupt_is_passed_on_as_sigterm_and_a_second_one_kills(workplace):
    workplace.script(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, lambda *_: open('told', 'w').close())\n"
        "with open('pid', 'w') as file:\n    file.write(str(os.getpid()))\nopen('ready', 'w').close()\n"
        "while True:\n    time.sleep(0.1)\n"
    )
    process = workplace.start("script.py", "model")
    wait_for(workplace.folder / "ready")
    process.send_signal(signal.SIGINT)
    wait_for(workplace.folder / "told")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert "SIGINT: asked 1 process(es)" in errors
    assert "SIGINT again: killing all processes" in errors
    assert is_gone(int((workplace.folder / "pid").read_text()))


def test_processes_do_not_outlive_a_launcher_that_was_killed(workplace):
    workplace.script(
        "import os, time\nwith open('pids.new', 'w') as file:\n    print(os.getppid(), os.getpid(), file=file)\n"
        "os.rename('pids.new', 'pids')\ntime.sleep(100)\n"
    )
    process = workplace.start("script.py", "model")
    wait_for(workplace.folder / "pids")
    launcher, training = map(int, (workplace.folder / "pids").read_text().split())
    os.kill(launcher, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "DeepSpeed's launcher died before its processes" in errors
    assert is_gone(training)


def is_gone(pid: int) -> bool:
    """True once the process has ended (a dead one that nobody has waited for counts)."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(timeout=10)
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def wait_for(*paths: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, f"{paths} did not appear"
        time.sleep(0.05)
