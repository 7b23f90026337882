"""Local HTTP servers: one for the files of a folder, and one that sends prepared bytes."""

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve the files of a folder; yields the address, http://127.0.0.1:PORT.

    As a proxy (environment variable http_proxy), it serves http://HOST/PATH from `folder`/http:/HOST/PATH.
    """
    handler = partial(_QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextlib.contextmanager
def serve_bytes(responses: Sequence[bytes | tuple[bytes, bytes, float]]) -> Iterator[tuple[str, list[str]]]:
    """Answer the n-th connection with the n-th response (the last one from then on), and close it.

    A response is sent as it is, including its status line and headers. Of (beginning, rest, interval), the rest is sent
    byte by byte, one every `interval` seconds. Yields the address, and the list of requests, which grows.
    """
    requests: list[str] = []

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            received = b""
            while b"\r\n\r\n" not in received:
                received += connection.recv(1 << 16)
            requests.append(received.decode("latin-1"))
            response = responses[min(len(requests), len(responses)) - 1]
            beginning, rest, interval = (response, b"", 0.0) if isinstance(response, bytes) else response
            connection.sendall(beginning)
            for byte in rest:
                time.sleep(interval)
                connection.sendall(bytes([byte]))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
        listener.shutdown(socket.SHUT_RDWR)
