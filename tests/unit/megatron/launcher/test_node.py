"""The variables and messages of the ranks of one host (tests/integration/test_launch.py starts
ranks).
"""

import socket
from dataclasses import asdict

import pytest

from megatron.launcher import node
from megatron.launcher.node import Node, _report_failure

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
