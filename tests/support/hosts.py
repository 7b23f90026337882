"""Two hosts emulated on this machine: sshd on 127.0.0.1 and 127.0.0.2, and a Slurm cluster with
these two nodes.

All daemons run as the current user from a temporary folder, listen only on loopback, and end with
the context. `ssh` is replaced by a script that reads our own configuration, so ~/.ssh is neither
used nor changed.
"""

import contextlib
import getpass
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.support.processes import free_ports
from tests.support.runs import environment

HOSTS = ("127.0.0.1", "127.0.0.2")
# MPI starts ranks on a loopback address without ssh, but on an unknown name with ssh, which
# resolves it.
MPI_HOSTS = ("host-1", "host-2")
PACKAGES = {
    "/usr/sbin/sshd": "openssh-server",
    "/usr/bin/pdsh": "pdsh",
    "/usr/bin/mpirun.openmpi": "openmpi-bin",
    "/usr/sbin/slurmctld": "slurm-wlm",
    "/usr/sbin/munged": "munge",
}


class Cluster:
    """The two hosts. A context manager."""

    def __init__(self, folder: Path):
        missing = [package for program, package in PACKAGES.items() if not os.path.exists(program)]
        assert not missing, f"install the missing packages: apt-get install {' '.join(missing)}"
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen] = {}
        self.ssh_port, self._controller_port, *self._node_ports = free_ports(4)
        self.environment = {
            **environment(),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMPI_MCA_oob_tcp_if_include": "lo",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    def __enter__(self) -> "Cluster":
        with contextlib.ExitStack() as stack:
            stack.callback(self._stop)
            self._write_ssh_files()
            self._write_slurm_files()
            for host in HOSTS:
                self._start(
                    f"sshd-{host}",
                    "/usr/sbin/sshd",
                    "-D",
                    "-e",
                    "-f",
                    str(self.folder / f"sshd-{host}.conf"),
                )
            munge = self.folder / "munge"
            files = {f"--{name}-file": munge / name for name in ("key", "pid", "log", "seed")}
            files["--socket"] = munge / "socket"
            options = [f"{option}={path}" for option, path in files.items()]
            program = ["/usr/sbin/munged", "--foreground", "--force", "--num-threads=2"]
            self._start("munged", *program, *options)
            self._start("slurmctld", "/usr/sbin/slurmctld", "-D")
            for host in HOSTS:
                self._start(f"slurmd-{host}", "/usr/sbin/slurmd", "-D", "-N", host)
            self._wait_until_ready()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run_in(self, folder: Path, command: list[str], **variables: str) -> subprocess.Popen:
        """Start a command on the first host, in `folder` and with its output in a pipe."""
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.log", "a") as log:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log
            )

    def _stop(self) -> None:
        for daemon in self._daemons.values():
            kill_trees(daemon.pid)
            daemon.wait()
        # slurmd's helper process for each job step leaves its tree. Its environment starts with
        # zeros, where psutil stops reading.
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if (
                    self.environment["SLURM_CONF"].encode()
                    in Path(f"/proc/{pid}/environ").read_bytes()
                ):
                    os.kill(pid, signal.SIGKILL)

    def _write_ssh_files(self) -> None:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd requires it as root
        folder = self.folder
        for name in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
            )
        for host in HOSTS:
            (folder / f"sshd-{host}.conf").write_text(
                f"ListenAddress {host}:{self.ssh_port}\nHostKey {folder}/host_key\n"
                f"AuthorizedKeysFile {folder}/user_key.pub\nPidFile none\nStrictModes no\nUsePAM "
                "no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
            )
        aliases = "".join(
            f"Host {a}\n  HostName {b}\n" for a, b in zip(MPI_HOSTS, HOSTS, strict=True)
        )
        (folder / "ssh_config").write_text(
            f"{aliases}Host *\n  Port {self.ssh_port}\n  IdentityFile {folder}/user_key\n  "
            f"IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n  "
            "StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
        )
        (folder / "bin").mkdir()
        ssh = folder / "bin" / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/ssh_config "$@"\n')
        ssh.chmod(0o755)

    def _write_slurm_files(self) -> None:
        folder = self.folder
        (folder / "munge").mkdir()
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        (folder / "state").mkdir()
        user = getpass.getuser()
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": "localhost(127.0.0.1)",
            "SlurmctldPort": self._controller_port,
            "SlurmUser": user,
            "SlurmdUser": user,
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={folder}/munge/socket",
            "CredType": "cred/munge",
            "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",
            "MpiDefault": "none",
            "StateSaveLocation": folder / "state",
            "SlurmdSpoolDir": folder / "spool.%n",
            "SlurmctldPidFile": folder / "ctld.pid",
            "SlurmdPidFile": folder / "slurmd.%n.pid",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SwitchType": "switch/none",
            "ReturnToService": 2,
            "SlurmdParameters": "config_overrides",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        for host, port in zip(HOSTS, self._node_ports, strict=True):
            lines.append(
                f"NodeName={host} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2"
            )
        lines.append("PartitionName=test Nodes=ALL Default=YES State=UP")
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")

    def _wait_until_ready(self) -> None:
        checks = [["pdsh", "-R", "ssh", "-S", "-w", ",".join(HOSTS), "true"]]
        checks.append(["srun", "--nodes=2", "--ntasks=2", "--immediate=2", "true"])
        end = time.monotonic() + 30
        while checks:
            result = subprocess.run(checks[0], env=self.environment, capture_output=True, text=True)
            if result.returncode == 0:
                checks.pop(0)
                continue
            if time.monotonic() > end:
                logs = "\n".join(
                    f"{path.name}:\n{path.read_text()}"
                    for path in sorted(self.folder.glob("*.log"))
                )
                raise AssertionError(f"{checks[0]}: {result.stderr}\n{logs}")
            time.sleep(0.2)


def kill_trees(*pids: int) -> None:
    """Kill processes and all their descendants."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


def processes_in(folder: Path) -> Iterator[psutil.Process]:
    """The processes of the run in `folder`: all that have it as working directory."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def rank_process(folder: Path, rank: int) -> psutil.Process:
    """The process of a rank of the run in `folder`."""
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    for process in processes_in(folder):
        variables = process.environ()
        script = [word for word in process.cmdline() if word.endswith("train.py")]
        if script and str(rank) in [variables.get(name) for name in names]:
            parent = process.parent()
            if parent is None or parent.cmdline() != process.cmdline():  # not a data worker
                return process
    raise AssertionError(f"rank {rank} is not running")


def wait_for_none(folder: Path, seconds: float = 240) -> None:
    """Wait until no process of the run is left."""
    end = time.monotonic() + seconds
    while left := [str(process) for process in processes_in(folder)]:
        assert time.monotonic() < end, left
        time.sleep(0.2)
