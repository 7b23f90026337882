"""Downloading a file over HTTP: taken up where it was interrupted, checked, and named only when whole."""

import fcntl
import hashlib
import http.client
import json
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote, urlsplit, urlunsplit

from megatron.utils.errors import UserError
from megatron.utils.files import sync_folder, write_atomically

_BLOCK = 1 << 20
_TIMEOUT_SECONDS = 60
_ATTEMPTS_WITHOUT_PROGRESS = 6
_FIRST_WAIT_SECONDS = 1.0
_SECONDS_BETWEEN_LINES = 10.0
_CHECKSUM = re.compile(r"sha256=([0-9a-fA-F]{64})")


def download(url: str, folder: Path) -> Path:
    """The file at `url`, in `folder` under its own name; not fetched again if it is there whole.

    What an interrupted download left is continued with an HTTP range request, if the server still has the same file
    (its ETag or date of modification tell). A connection that breaks is tried again a few times.

    Args:
        url: http:// or https://; a fragment `#sha256=<64 hexadecimal digits>` is checked.

    Raises:
        UserError: naming the URL: no such file, no connection, too little space, a wrong checksum.
    """
    address, checksum = _parse(url)
    path = folder / _file_name(address)
    if path.exists():
        if checksum is None or _sha256(path) == checksum:
            print(f"{path}: already downloaded")
            return path
        raise UserError(f"{path} is there, but its SHA-256 is not {checksum}: remove it to download it again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = _Partial(path, address)
        _fetch_all(partial, address, _Display(path.name))
        found = _sha256(partial.content)
        if checksum is not None and found != checksum:
            partial.remove()
            raise UserError(f"{shown(address)} has SHA-256 {found}, not {checksum}; what was downloaded is removed")
        partial.put_in_place()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    print(f"{path}: {path.stat().st_size:,} bytes, sha256={found}")
    return path


def shown(address: str) -> str:
    """A URL for messages: without a password, and without a query, which can hold a key."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _parse(url: str) -> tuple[str, str | None]:
    """The URL without its fragment, and the checksum in that."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"{url} is no http:// or https:// address")
    checksum = None
    if parts.fragment:
        match = _CHECKSUM.fullmatch(parts.fragment)
        if match is None:
            raise UserError(f"{url}: what follows # is not sha256= and 64 hexadecimal digits")
        checksum = match.group(1).lower()
    return urlunsplit(parts._replace(fragment="")), checksum


def _file_name(address: str) -> str:
    name = PurePosixPath(unquote(urlsplit(address).path)).name
    if not name or name in (".", "..") or "\0" in name:
        raise UserError(f"{shown(address)} names no file")
    return name


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


class _Partial:
    """What there is of a download so far, `NAME.partial`, and what it is of, `NAME.partial.json`."""

    def __init__(self, path: Path, address: str):
        self._path = path
        self._address = address
        self.content = path.with_name(f"{path.name}.partial")
        self._about = path.with_name(f"{path.name}.partial.json")

    @property
    def size(self) -> int:
        return self.content.stat().st_size if self.content.exists() else 0

    def fetch(self, display: Callable[[int, int | None], None]) -> None:
        """Fetch what is missing. Raises the errors of urllib, and UserError for a disk too small."""
        version = self._version()
        start = self.size if version else 0
        request = urllib.request.Request(self._address, headers={"Accept-Encoding": "identity"})
        if start:
            request.add_header("Range", f"bytes={start}-")
            request.add_header("If-Range", version)
        try:
            response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
                total = (error.headers.get("Content-Range") or "").rpartition("/")[2]
                if total == str(start):
                    return  # it had been killed between the last byte and the renaming
                self.remove()
                raise ConnectionError("what was there does not fit the file") from error
            raise
        with response:
            if response.status != http.HTTPStatus.PARTIAL_CONTENT:
                start = 0
            elif not (response.headers.get("Content-Range") or "").startswith(f"bytes {start}-"):
                self.remove()
                raise ConnectionError("the server sent another part than asked for")
            left = response.headers.get("Content-Length")
            total = None if left is None else start + int(left)
            self._check_space(None if left is None else int(left))
            etag = response.headers.get("ETag") or ""
            # A weak ETag may be the same for files that differ in bytes.
            version = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")
            write_atomically(self._about, json.dumps({"version": version, "url": _digest(self._address)}).encode())
            with open(self.content, "ab") as stream:
                self._lock(stream)
                stream.truncate(start)
                size = start
                while block := response.read(_BLOCK):
                    stream.write(block)
                    size += len(block)
                    display(size, total)
            if total is not None and size < total:
                raise ConnectionError(f"the connection broke after {size:,} of {total:,} bytes")

    def _version(self) -> str | None:
        """The server's word for the state of the file that the content is of; None if it cannot be continued."""
        try:
            about = json.loads(self._about.read_bytes())
            return about["version"] if about["url"] == _digest(self._address) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _check_space(self, needed: int | None) -> None:
        free = shutil.disk_usage(self._path.parent).free
        if needed is not None and needed > free:
            raise UserError(f"{shown(self._address)} needs {needed:,} bytes more, but {free:,} are free")

    def _lock(self, stream: BinaryIO) -> None:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is downloading {self._path}; wait for it") from error

    def put_in_place(self) -> None:
        self.content.replace(self._path)
        self._about.unlink(missing_ok=True)
        sync_folder(self._path.parent)

    def remove(self) -> None:
        self.content.unlink(missing_ok=True)
        self._about.unlink(missing_ok=True)


def _digest(address: str) -> str:
    return hashlib.sha256(address.encode()).hexdigest()


def _fetch_all(partial: "_Partial", address: str, display: Callable[[int, int | None], None]) -> None:
    """Fetch until everything is there, trying again as long as that brings something."""
    failures = 0
    while True:
        before = partial.size
        try:
            partial.fetch(display)
            return
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(error, urllib.error.HTTPError):
                reason = f"the server answers {error.code} {error.reason}"
                if error.code < 500 and error.code not in (408, 429):  # trying again does not mend it
                    raise UserError(f"cannot download {shown(address)}: {reason}") from error
            failures = 1 if partial.size > before else failures + 1
            if failures == _ATTEMPTS_WITHOUT_PROGRESS:
                again = "; what is there is kept, the same command goes on from it" if partial.size else ""
                raise UserError(f"cannot download {shown(address)}: {reason}{again}") from error
            print(f"{shown(address)}: {reason}; trying again", file=sys.stderr, flush=True)
        time.sleep(_FIRST_WAIT_SECONDS * 2 ** (failures - 1))


class _Display:
    """A line now and then: how much is there, how fast, how long yet."""

    def __init__(self, name: str):
        self._name = name
        self._begun = self._shown = time.monotonic()
        self._first: int | None = None

    def __call__(self, size: int, total: int | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = size
        if now - self._shown < _SECONDS_BETWEEN_LINES:
            return
        self._shown = now
        rate = (size - self._first) / max(now - self._begun, 1e-9)
        of = "" if total is None else f" of {total / 1e6:,.0f}, {(total - size) / max(rate, 1.0):.0f} s left"
        print(f"{self._name}: {size / 1e6:,.0f} MB{of}, {rate / 1e6:.1f} MB/s", file=sys.stderr, flush=True)
