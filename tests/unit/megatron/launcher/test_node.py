"""The variables and messages of the ranks of one host (tests/integration/test_launch.py starts ranks)."""

import pytest

from megatron.launcher.node import Node, _report_failure

NODE = Node("n2", [4, 5], first_rank=2, world_size=4, master_addr="n1", master_port=29500)


def test_variables():
    assert NODE.variables(1) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_SIZE": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
    }


@pytest.mark.parametrize(
    ("host", "code", "message"),
    [
        ("n2", -9, "error: rank 3 was killed by SIGKILL; the system does this when memory runs out (host n2)\n"),
        ("n2", -11, "error: rank 3 was killed by SIGSEGV (host n2)\n"),
        ("n2", 1, "error: rank 3 exited with status 1; its message is above (host n2)\n"),
        ("n2", 2, ""),  # a UserError, which the rank has printed
        (None, -15, "error: rank 3 was killed by SIGTERM\n"),
        (None, 1, ""),
    ],
)
def test_failed_rank_is_named(capsys, host, code, message):
    _report_failure(Node(host, [0], 3, 4, "n1", 29500), 3, code)
    assert capsys.readouterr().err == message
