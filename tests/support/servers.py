"""Local HTTP servers: one for the files of a folder, and one that sends prepared bytes."""

import contextlib
import http.server
import socketserver
import threading
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
def serve_bytes(responses: Sequence[bytes]) -> Iterator[str]:
    """Answer each connection with the next response, the last one repeatedly, as it is, including its status line and
    headers, and close it. Yields the address.
    """
    left = list(responses)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.recv(1 << 16)
                self.request.sendall(left.pop(0) if len(left) > 1 else left[0])

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
