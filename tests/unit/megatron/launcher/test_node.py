"""The variables and messages of the ranks of one host (tests/integration/test_launch.py starts
ranks).
"""

import signal
import socket
from dataclasses import asdict

import pytest

from megatron.launcher import node
from megatron.launcher.node import STATUS_OF_LOST_CONNECTION, Node, _Ranks, _report_failure

NODE = Node("n2", [4, 5], first_rank=2, world_size=4, master_addr="n1", master_port=29500)


@pytest.mark.parametrize(
    ("host", "world_size", "code", "message"),
    [
        (
            "n2",
            4,
            -9,
            "rank 3 on n2 was killed by SIGKILL (9); usually: the host ran out of memory (see "
            "dmesg), or",
        ),
        (
            None,
            1,
            -11,
            f"rank 3 on {socket.gethostname()} was killed by SIGSEGV (11); usually: native code "
            "crashed",
        ),
        ("n2", 4, -8, "rank 3 on n2 was killed by SIGFPE (8)\n"),
        ("n2", 4, -40, "rank 3 on n2 was killed by a signal (40)\n"),
        ("n2", 4, 1, "rank 3 on n2 exited with status 1; its message is above\n"),
        (None, 1, 1, ""),  # its message is the last line
        ("n2", 4, 2, ""),  # a UserError, which the rank has printed
    ],
)
def test_failed_rank_is_named(capsys, host, world_size, code, message):
    _report_failure(Node(host, [0], 3, world_size, "n1", 29500), 3, code)
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {message}" if message else "")
    assert errors.count("\n") == bool(message)


def test_ranks_on_the_cpu_of_a_host_share_its_cores(tmp_path, monkeypatch):
    environments = []
    monkeypatch.setattr(
        node,
        "run_node",
        lambda node, command, environment, *_: environments.append(environment) or 0,
    )
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    words = ["1", node.encode([{}, asdict(NODE)]), f"{tmp_path}/pid.", "python"]
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for threads in (None, "3"):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if threads is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert node.main(words) == 0
    assert [environment["OMP_NUM_THREADS"] for environment in environments] == ["4", "3"]


@pytest.mark.parametrize(
    ("received", "counted"),
    [
        (["SIGTERM", "SIGHUP"], ["SIGTERM"]),
        (["SIGHUP", "SIGHUP", "SIGTERM"], ["SIGHUP", "SIGTERM"]),
        (["SIGINT", "SIGINT"], ["SIGINT", "SIGINT"]),
    ],
)
def test_sighup_is_never_the_second_signal(received, counted):
    ranks = _Ranks(NODE, None)
    for name in received:
        ranks.receive(signal.Signals[name], None)
    assert ranks.received == counted


@pytest.mark.parametrize(
    ("failures", "status", "rank"),
    [
        ([(2, STATUS_OF_LOST_CONNECTION), (3, 1)], 1, 3),
        ([(2, STATUS_OF_LOST_CONNECTION), (3, -9)], 137, 3),
        ([(2, 1), (3, 4)], 1, 2),
        ([(2, STATUS_OF_LOST_CONNECTION)], STATUS_OF_LOST_CONNECTION, None),
    ],
)
def test_a_lost_connection_is_not_the_cause(failures, status, rank, capsys):
    ranks = _Ranks(NODE, None)
    ranks.failures = failures
    assert ranks.exit_status() == status
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: rank {rank} ") if rank is not None else not errors


def test_the_earliest_deadline_counts(monkeypatch):
    monkeypatch.setattr(node.time, "monotonic", lambda: 1000.0)
    ranks = _Ranks(NODE, None)
    for seconds, kill_at in ((300, 1300.0), (10, 1010.0), (300, 1010.0)):
        ranks.kill_within(seconds)
        assert ranks.kill_at == kill_at
