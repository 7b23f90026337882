"""Waiting for processes, and free ports for them."""

import contextlib
import socket
import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], seconds: float = 240) -> None:
    """Wait until `condition` is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
