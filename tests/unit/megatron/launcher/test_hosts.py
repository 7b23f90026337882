"""The check of all hosts over ssh (tests/integration/test_multi_host.py starts ranks on them)."""

from types import SimpleNamespace

import pytest

from megatron.config import UserError
from megatron.launcher import hosts
from megatron.launcher.hosts import Failure, check_hosts, parse_failure
from tests.support.errors import assert_rejected

ANSWERS = {
    "good": (0, "10.0.0.7 172.17.0.1\n", ""),
    "nameless": (0, "a banner\n\n", ""),
    "incomplete": (0, "missing: /env/bin/python\nmissing: /p/train.py\n10.0.0.8\n", ""),
    "refused": (255, "", "a banner\nssh: connect to host refused port 22: Connection refused\n"),
}


@pytest.fixture
def commands(monkeypatch) -> list[list[str]]:
    """The ssh commands; their answers depend on the host."""
    run: list[list[str]] = []

    def answer(command, **_):
        run.append(command)
        status, output, errors = ANSWERS[command[-2]]
        return SimpleNamespace(returncode=status, stdout=output, stderr=errors)

    monkeypatch.setattr(hosts.subprocess, "run", answer)
    monkeypatch.setattr(hosts.shutil, "which", lambda program: f"/usr/bin/{program}")
    return run


def test_address_of_the_first_host(commands):
    assert (
        check_hosts(["good", "good"], "/w", ["/p/train.py"], {"PDSH_SSH_ARGS_APPEND": "-p 2222"})
        == "10.0.0.7"
    )
    assert check_hosts(["nameless"], "/w", [], {}) == "nameless"  # its `hostname` has no -I
    ssh, *options, port_option, port, host, script = commands[0]
    assert (ssh, port_option, port, host) == ("ssh", "-p", "2222", "good")
    assert "BatchMode=yes" in options
    assert "test -e /w" in script
    assert "test -e /p/train.py" in script


def test_every_host_that_fails_is_named(commands):
    with pytest.raises(UserError) as caught:
        check_hosts(["good", "incomplete", "refused"], "/w", ["/env/bin/python"], {})
    assert str(caught.value).splitlines()[:3] == [
        "2 of 3 host(s) of the hostfile cannot be used:",
        "  incomplete: there is no /env/bin/python, /p/train.py",
        "  refused: ssh: connect to host refused port 22: Connection refused",
    ]


def test_without_ssh(commands, monkeypatch):
    monkeypatch.setattr(hosts.shutil, "which", lambda program: None)
    assert_rejected("ssh is not installed here", check_hosts, ["good"], "/w", [], {})
    assert commands == []


@pytest.mark.parametrize(
    ("line", "failure"),
    [
        ("srun: error: node-2: task 1: Killed\n", Failure(1, "node-2", 9)),
        (
            "srun: error: node-1: tasks 0-3: Segmentation fault (core dumped)\n",
            Failure(0, "node-1", 11),
        ),
        ("srun: error: node-2: task 1: Exited with exit code 1\n", Failure(1, "node-2", None)),
        (
            "srun: error: node-1: task 0: Exited with exit code 3\n",
            None,
        ),  # has lost the connection to another rank
        (
            "mpirun noticed that process rank 1 with PID 4711 on node node-2 exited on signal 6 "
            "(Aborted).\n",
            Failure(1, "node-2", 6),
        ),
        ("iteration 5/10: task 1: Killed\n", None),
    ],
)
def test_failures_in_the_output_of_srun_and_mpirun(line, failure):
    assert parse_failure(line) == failure
