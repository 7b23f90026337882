"""Output that loses its reader during training: the terminal is closed, or `tee` in `... | tee log` has ended."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class DetachableStream:
    """Wraps stdout or stderr, so that training can save a checkpoint after its output has lost its reader.

    The first failed write redirects the stream to /dev/null and raises SIGHUP in this process, so training saves and
    exits. Under nohup, training continues.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with self._detached_without_reader():
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._detached_without_reader():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _detached_without_reader(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            signal.raise_signal(signal.SIGHUP)


@contextlib.contextmanager
def detachable_output() -> Iterator[None]:
    """Within the block, sys.stdout and sys.stderr are `DetachableStream`s; a closed one is replaced by /dev/null."""
    with contextlib.ExitStack() as stack:
        for stream, redirect in (
            (sys.stdout, contextlib.redirect_stdout),
            (sys.stderr, contextlib.redirect_stderr),
        ):
            if stream is None:  # closed before Python started, as by >&-
                stream = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect(DetachableStream(stream)))
        yield
