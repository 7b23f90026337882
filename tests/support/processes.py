"""Waiting for processes, and free ports for them."""

import contextlib
import random
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
    """Ports that servers can use. They are below those that the system gives to outgoing
    connections, one of which could take a port before its server has started.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            port = random.SystemRandom().randrange(10_000, 32_768)
            each = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                each.bind(("", port))
                ports.append(port)
        return ports
