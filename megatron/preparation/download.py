"""Downloads files over HTTP: resumes after interruptions, verifies checksums, and names a file only when complete."""

import contextlib
import hashlib
import http.client
import os
import re
import shutil
import socket
import string
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from megatron.utils.errors import UserError, first_line, visible
from megatron.utils.files import read_file, sync_folder, write_atomically
from megatron.utils.locks import Lock
from megatron.utils.progress import Progress

_BLOCK = 1 << 20
STALL_SECONDS = 60.0  # limit for connecting, for the headers, and for each _STALL_BYTES of the content
_STALL_BYTES = 1 << 16
_MAX_FAILURES = 6  # consecutive failures without receiving _STALL_BYTES
_MAX_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)
_URL_CHARACTERS = string.punctuation  # not quoted
RETRY_SECONDS = 1.0  # before the first retry; doubles with every further failure
_CHECKSUM = re.compile(r"sha256=([0-9a-fA-F]{64})")
_STRONG_ETAG = re.compile(r'"[\x21\x23-\x7e]{0,500}"')
_DATE = re.compile(r"[\x20-\x7e]{1,100}")
_LENGTH = re.compile(r"[0-9]{1,18}")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")


def download(url: str, folder: Path) -> Path:
    """Download `url` to `folder` under its own name, unless it is there already.

    `NAME.source.json` records the URL, so that a file of the same name from another URL is not used without notice.
    Files without this record are accepted, such as those that the user has copied to the folder.

    An interrupted download is resumed with an HTTP range request. If the server's ETag, modification date or total size
    has changed, the download starts over. Broken and stalled connections are retried.

    Args:
        url: http:// or https://. A fragment `#sha256=<64 hexadecimal digits>` is verified.

    Raises:
        UserError: there is no such file, the server's answer is malformed, the connection fails, the disk is full, the
            checksum is wrong, or the file is there from another URL and `url` has no checksum.
    """
    address, checksum = _split_checksum(url)
    path = folder / file_name(url)
    try:
        if path.exists():
            return _existing(path, address, checksum)
        with Lock(f"{path}.partial.lock", f"another process is downloading {path}; wait for it to finish"):
            partial = _PartialDownload(path, address)
            partial.fetch_with_retries()
            sha256 = _sha256(partial.content)
            if checksum is not None and sha256 != checksum:
                partial.remove()
                raise UserError(f"{redact_url(address)} has SHA-256 {sha256}, not {checksum}; the download was removed")
            partial.publish()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    print(f"{path}: {path.stat().st_size:,} bytes, sha256={sha256}")
    return path


def file_name(url: str) -> str:
    """Return the name that `download` gives the file. Raises UserError if the URL is invalid or names no file."""
    address = _split_checksum(url)[0]
    name = PurePosixPath(unquote(urlsplit(address).path)).name
    if name in ("", ".", "..") or not name.isprintable():
        raise UserError(f"{redact_url(address)} does not name a file")
    return name


def redact_url(address: str) -> str:
    """Return a URL for messages: without the password, and without the query, which may contain a key."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _existing(path: Path, address: str, checksum: str | None) -> Path:
    if not path.is_file():
        raise UserError(f"{path} exists, but is not a regular file; remove it, or choose another folder")
    if checksum is not None and _sha256(path) != checksum:
        raise UserError(f"{path} exists, but its SHA-256 is not {checksum}; remove it to download it again")
    source = _read_json(_Source, _source_path(path))
    if checksum is None and source is not None and source.url != _hash(address):
        raise UserError(
            f"{path} was downloaded from another URL than {visible(redact_url(address))}; remove it to download it "
            "again, or append #sha256=... to the URL if it is the same file"
        )
    print(f"{path}: already downloaded")
    return path


def _split_checksum(url: str) -> tuple[str, str | None]:
    """Return the URL without its fragment, with non-ASCII characters quoted, and the checksum in the fragment."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (raises ValueError for an invalid port)
        address = quote(urlunsplit(parts._replace(fragment="")), safe=_URL_CHARACTERS)
    except ValueError as error:
        raise UserError(f"{url.partition('?')[0]} is not a valid URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{url.partition('?')[0]} is not an http:// or https:// URL")
    if "@" in parts.netloc:
        raise UserError(f"{redact_url(url)}: URLs with a user name or password are not supported")
    checksum = None
    if parts.fragment:
        match = _CHECKSUM.fullmatch(parts.fragment)
        if match is None:
            raise UserError(f"{redact_url(url)}: the part after # must be sha256= and 64 hexadecimal digits")
        checksum = match.group(1).lower()
    return address, checksum


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


class _Source(BaseModel):
    """The content of `NAME.source.json`: where a complete file was downloaded from.

    Attributes:
        url: SHA-256 of the URL, which may contain a key.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    url: str


class _State(_Source):
    """The content of `NAME.partial.json`: identifies the version of the file that was downloaded in part.

    Attributes:
        etag: only a strong one. Files with the same weak ETag may differ in bytes.
        last_modified: as sent by the server.
        total: size of the complete file in bytes; None if unknown.
    """

    etag: str | None
    last_modified: str | None
    total: NonNegativeInt | None

    @property
    def validator(self) -> str | None:
        """The value for If-Range; None if a download of this version cannot be resumed."""
        return self.etag or self.last_modified


_Model = TypeVar("_Model", bound=_Source)


def _read_json(model: type[_Model], path: Path) -> _Model | None:
    """Return None if the file is missing or damaged."""
    try:
        return model.model_validate_json(read_file(path, _BLOCK))
    except (UserError, ValidationError):
        return None


def _source_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.source.json")


def _hash(address: str) -> str:
    return hashlib.sha256(address.encode()).hexdigest()


class _RequestFailed(Exception):
    """A request failed in a way that a retry may fix."""


class _PartialDownload:
    """An unfinished download: its content in `NAME.partial`, and the version it belongs to in `NAME.partial.json`."""

    def __init__(self, path: Path, address: str):
        self._path = path
        self._address = address
        self._address_hash = _hash(address)
        self.content = path.with_name(f"{path.name}.partial")
        self._state_path = path.with_name(f"{path.name}.partial.json")
        if self.content.exists() and not (self.content.is_file() and self._state_path.exists()):
            raise UserError(f"{self.content} does not come from an unfinished download; move or remove it")

    @property
    def size(self) -> int:
        return self.content.stat().st_size if self.content.exists() else 0

    def fetch_with_retries(self) -> None:
        """Fetch the rest of the file. Gives up after several failures in a row without progress."""
        print(f"downloading {self._name}", file=sys.stderr, flush=True)
        failures, largest_size = 0, self.size
        while True:
            try:
                self._fetch()
                return
            except _RequestFailed as error:
                # Restarts from the beginning are not progress until they exceed the earlier attempts.
                failures = 1 if self.size >= largest_size + _STALL_BYTES else failures + 1
                largest_size = max(largest_size, self.size)
                if failures == _MAX_FAILURES:
                    hint = f"; {self.size:,} bytes are saved, and the same command resumes" if self.size else ""
                    raise UserError(f"cannot download {self._name}: {error}{hint}") from error
                print(f"{self._name}: {error}; retrying", file=sys.stderr, flush=True)
            time.sleep(RETRY_SECONDS * 2 ** (failures - 1))

    def _fetch(self) -> None:
        """Fetch the rest of the file in one request. Raises _RequestFailed, and UserError if a retry cannot help."""
        state = self._read_state()
        start = self.size if state is not None and state.validator is not None else 0
        if state is not None and start and state.total == start:
            return  # complete: an earlier run was killed before renaming it
        headers = {"Accept-Encoding": "identity"}
        if start:
            assert state is not None
            assert state.validator is not None
            headers |= {"Range": f"bytes={start}-", "If-Range": state.validator}
        with self._open(headers, start) as response:
            total: int | None
            if start and response.status == http.HTTPStatus.PARTIAL_CONTENT:
                assert state is not None
                total = self._check_continuation(state, response.headers, start)
            elif response.status == http.HTTPStatus.OK:
                start = 0
                # Remove the old content before writing the new state; otherwise, a kill in between would mix two
                # versions.
                self.remove()
                sync_folder(self._path.parent)
                state = self._new_state(response.headers)
                self._write_state(state)
                total = state.total
            else:
                raise UserError(f"cannot download {self._name}: the server returned status {response.status}")
            self._receive(response, start, total)

    @contextlib.contextmanager
    def _open(self, headers: dict[str, str], start: int) -> Iterator[http.client.HTTPResponse]:
        """Send the request, follow redirects, and yield the response. Raises _RequestFailed and UserError."""
        address = self._address
        for _ in range(_MAX_REDIRECTS):
            try:
                response = _opener().open(urllib.request.Request(address, headers=headers), timeout=STALL_SECONDS)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code in _REDIRECTS and error.headers.get("Location"):
                        address = self._redirected(address, error.headers["Location"])
                        continue
                    reason = f"the server returned {error.code} {_readable(error.reason)}"
                    if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
                        self.remove()
                        raise _RequestFailed("the file on the server is shorter than the partial download") from error
                    if error.code < 500 and error.code not in (408, 429):  # a retry cannot help
                        raise UserError(f"cannot download {self._name}: {reason}") from error
                    raise _RequestFailed(reason) from error
            except (http.client.InvalidURL, ValueError, OverflowError) as error:  # e.g. of the port
                raise UserError(f"cannot download {self._name}: invalid URL: {_readable(error)}") from error
            except (OSError, http.client.HTTPException) as error:
                raise _RequestFailed(_readable(getattr(error, "reason", None) or error)) from error
            with response:
                yield response
                return
        raise UserError(f"cannot download {self._name}: more than {_MAX_REDIRECTS} redirects")

    def _redirected(self, address: str, location: str) -> str:
        """The URL that a redirect leads to. urllib would also follow it to ftp://, after reading a body of any size."""
        try:
            address = urljoin(address, quote(location, encoding="iso-8859-1", safe=_URL_CHARACTERS))
            parts = urlsplit(address)
            parts.port  # noqa: B018
        except ValueError as error:
            raise UserError(f"cannot download {self._name}: invalid redirect: {_readable(error)}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"cannot download {self._name}: the server redirects to {_readable(redact_url(address))}, which is not "
                "an http:// or https:// URL"
            )
        return address

    def _read_state(self) -> _State | None:
        """The state of an earlier attempt; None if it is missing or damaged, or belongs to another URL."""
        state = _read_json(_State, self._state_path)
        return state if state is not None and state.url == self._address_hash else None

    def _write_state(self, state: _State) -> None:
        write_atomically(self._state_path, state.model_dump_json().encode())

    def _new_state(self, headers: Message) -> _State:
        """The version of the file in a response that starts at byte 0."""
        total = None
        if not _is_chunked(headers):
            lengths = {value.strip() for value in headers.get_all("Content-Length", [])}
            if len(lengths) > 1 or not all(_LENGTH.fullmatch(length) for length in lengths):
                raise UserError(f"cannot download {self._name}: the server sent {_shown(headers, 'Content-Length')}")
            total = int(lengths.pop()) if lengths else None
            if total is None:
                print(
                    f"{self._name}: the server does not send the size of the file, so a truncated download would go "
                    "unnoticed; append #sha256=... to the URL to verify it",
                    file=sys.stderr,
                    flush=True,
                )
        return _State(
            url=self._address_hash,
            etag=_matching(_STRONG_ETAG, headers, "ETag"),
            last_modified=_matching(_DATE, headers, "Last-Modified"),
            total=total,
        )

    def _check_continuation(self, state: _State, headers: Message, start: int) -> int:
        """Return the size of the complete file, or of its part until the end of the response if the size is unknown.

        Removes the partial download and raises _RequestFailed unless the response continues the same version.
        """
        content_range = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
        date = _matching(_DATE, headers, "Last-Modified")
        same_version = (
            _matching(_STRONG_ETAG, headers, "ETag") == state.etag
            # A server that sends an ETag may omit the date.
            and (date == state.last_modified or (date is None and state.etag is not None))
            and (content_range is None or state.total is None or content_range[3] in ("*", str(state.total)))
        )
        if content_range is None or int(content_range[1]) != start:
            problem = f"the server sent {_shown(headers, 'Content-Range')} instead of byte {start:,} onwards"
        elif not same_version:
            problem = "the file on the server has changed"
        elif content_range[3] == "*":
            return state.total or int(content_range[2]) + 1
        else:
            total = int(content_range[3])
            if state.total is None:  # the first response was chunked, or had no Content-Length
                self._write_state(state.model_copy(update={"total": total}))
            return total
        self.remove()
        raise _RequestFailed(f"{problem}; starting from the beginning")

    def _receive(self, response: http.client.HTTPResponse, start: int, total: int | None) -> None:
        """Append the content of a response to the partial file, which has `start` bytes."""
        size = window_size = start
        free = shutil.disk_usage(self._path.parent).free
        if total is not None and total - start > free:
            raise UserError(f"{self._name} needs {total - start:,} more bytes, but only {free:,} are free")
        with open(self.content, "ab") as stream, Progress(self._path.name, total, unit="MB") as display:
            display.restart(size, size / 1e6)
            window_start = time.monotonic()
            while block := _read_block(response):
                stream.write(block)
                size += len(block)
                display.update(size, f"{size / 1e6:,.0f} MB", size / 1e6)
                if size >= window_size + _STALL_BYTES:
                    window_start, window_size = time.monotonic(), size
                elif time.monotonic() - window_start > STALL_SECONDS:
                    raise _RequestFailed(f"only {size - window_size:,} bytes arrived in {STALL_SECONDS:.0f} seconds")
            stream.flush()
            os.fsync(stream.fileno())
        if total is not None and size > total:
            self.remove()
            raise _RequestFailed(f"the server sent {size:,} bytes of a file of {total:,}")
        # http.client does not report a connection that is closed in the middle of the headers.
        if size < (total or 0) or (total is None and size == 0):
            of_total = "" if total is None else f" of {total:,}"
            raise _RequestFailed(f"the connection was closed after {size:,}{of_total} bytes")

    @property
    def _name(self) -> str:
        return visible(redact_url(self._address))

    def publish(self) -> None:
        """Give the file its final name, after recording its URL."""
        write_atomically(_source_path(self._path), _Source(url=self._address_hash).model_dump_json().encode())
        self.content.replace(self._path)
        self._state_path.unlink(missing_ok=True)
        sync_folder(self._path.parent)

    def remove(self) -> None:
        self.content.unlink(missing_ok=True)
        self._state_path.unlink(missing_ok=True)


def _read_block(response: http.client.HTTPResponse) -> bytes:
    """The bytes that have arrived. Waits for at least one, and returns b"" at the end."""
    try:
        return response.read1(_BLOCK)
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: a malformed chunk size
        raise _RequestFailed(_readable(error)) from error


def _is_chunked(headers: Message) -> bool:
    return "chunked" in headers.get("Transfer-Encoding", "").lower()


def _matching(pattern: re.Pattern[str], headers: Message, name: str) -> str | None:
    """The value of a header if it matches, otherwise None."""
    value = headers.get(name, "")
    return value if pattern.fullmatch(value) else None


def _shown(headers: Message, name: str) -> str:
    """For example "Content-Length: abc"."""
    values = headers.get_all(name)
    return f"{name}: {_readable(', '.join(values))}" if values else f"no {name}"


def _readable(text: object) -> str:
    """One line of limited length without control characters, for text that comes from a server."""
    line = first_line(text) if isinstance(text, BaseException) else (str(text).strip().splitlines() or [""])[0]
    return visible(line[:200])


class _LimitedConnection(http.client.HTTPConnection):
    """Closes a connection whose status line and headers do not arrive in time.

    The timeout of a socket limits only the time between two bytes, and a server may send them one by one.
    """

    def getresponse(self) -> http.client.HTTPResponse:
        connection, timed_out = self.sock, threading.Event()

        def shut_down() -> None:
            timed_out.set()
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(STALL_SECONDS, shut_down)
        timer.daemon = True
        timer.start()
        try:
            return super().getresponse()
        finally:
            timer.cancel()
            if timed_out.is_set():
                raise TimeoutError(f"the headers did not arrive within {STALL_SECONDS:.0f} seconds")


class _LimitedTLSConnection(_LimitedConnection, http.client.HTTPSConnection):
    pass


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_LimitedConnection, request)


class _TLSHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_LimitedTLSConnection, request)


def _opener() -> urllib.request.OpenerDirector:
    """An opener for http and https only, that uses the proxies of the environment and does not follow redirects."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        _Handler(),
        _TLSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener
