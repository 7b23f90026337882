"""Downloads files over HTTP: resumes after interruptions, verifies checksums, and names a file only when complete."""

import contextlib
import hashlib
import http.client
import json
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit, urlunsplit

from megatron.utils.errors import UserError
from megatron.utils.files import sync_folder, write_atomically
from megatron.utils.locks import Lock
from megatron.utils.progress import Progress

_BLOCK = 1 << 20
_TIMEOUT_SECONDS = 60
_MAX_FAILURES = 6  # consecutive failures without receiving a byte
RETRY_SECONDS = 1.0  # before the first retry; doubles with every further failure
_CHECKSUM = re.compile(r"sha256=([0-9a-fA-F]{64})")


def download(url: str, folder: Path) -> Path:
    """Download `url` to `folder` under its own name, unless it is there already.

    An interrupted download is resumed with an HTTP range request if the server still has the same version of the file,
    according to its ETag or modification date. Broken connections are retried.

    Args:
        url: http:// or https://. A fragment `#sha256=<64 hexadecimal digits>` is verified.

    Raises:
        UserError: there is no such file, the connection fails, the disk is full, or the checksum is wrong.
    """
    address, checksum = _split_checksum(url)
    name = PurePosixPath(unquote(urlsplit(address).path)).name
    if not name or name in (".", "..") or "\0" in name:
        raise UserError(f"{redact_url(address)} does not name a file")
    path = folder / name
    if path.exists():
        if checksum is not None and _sha256(path) != checksum:
            raise UserError(f"{path} exists, but its SHA-256 is not {checksum}; remove it to download it again")
        print(f"{path}: already downloaded")
        return path
    with Lock(f"{path}.partial.lock", f"another process is downloading {path}; wait for it to finish"):
        try:
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


def redact_url(address: str) -> str:
    """Return a URL for messages: without the password, and without the query, which may contain a key."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _split_checksum(url: str) -> tuple[str, str | None]:
    """Return the URL without its fragment, and the checksum in the fragment."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"{url} is not an http:// or https:// URL")
    checksum = None
    if parts.fragment:
        match = _CHECKSUM.fullmatch(parts.fragment)
        if match is None:
            raise UserError(f"{url}: the part after # must be sha256= and 64 hexadecimal digits")
        checksum = match.group(1).lower()
    return urlunsplit(parts._replace(fragment="")), checksum


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


class _PartialDownload:
    """An unfinished download: its content in `NAME.partial`, and the version it belongs to in `NAME.partial.json`."""

    def __init__(self, path: Path, address: str):
        self._path = path
        self._address = address
        self._address_hash = hashlib.sha256(address.encode()).hexdigest()
        self.content = path.with_name(f"{path.name}.partial")
        self._metadata = path.with_name(f"{path.name}.partial.json")

    @property
    def size(self) -> int:
        return self.content.stat().st_size if self.content.exists() else 0

    def fetch_with_retries(self) -> None:
        """Fetch the rest of the file. Gives up after several failures in a row without receiving a byte."""
        failures = 0
        while True:
            size_before = self.size
            try:
                self._fetch()
                return
            except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
                reason = getattr(error, "reason", None) or error
                if isinstance(error, urllib.error.HTTPError):
                    reason = f"the server answers {error.code} {error.reason}"
                    if error.code < 500 and error.code not in (408, 429):  # a retry cannot help
                        raise UserError(f"cannot download {redact_url(self._address)}: {reason}") from error
                failures = 1 if self.size > size_before else failures + 1
                if failures == _MAX_FAILURES:
                    hint = f"; {self.size:,} bytes are saved, and the same command resumes" if self.size else ""
                    raise UserError(f"cannot download {redact_url(self._address)}: {reason}{hint}") from error
                print(f"{redact_url(self._address)}: {reason}; retrying", file=sys.stderr, flush=True)
            time.sleep(RETRY_SECONDS * 2 ** (failures - 1))

    def _fetch(self) -> None:
        """Fetch the rest of the file in one request. Raises exceptions of urllib, and UserError if the disk is full."""
        version = None  # the server's version of the file that the saved content belongs to
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            metadata = json.loads(self._metadata.read_bytes())
            version = metadata["version"] if metadata["url"] == self._address_hash else None
        start = self.size if version else 0
        request = urllib.request.Request(self._address, headers={"Accept-Encoding": "identity"})
        if start and version:
            request.add_header("Range", f"bytes={start}-")
            request.add_header("If-Range", version)
        try:
            response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
                if (error.headers.get("Content-Range") or "").rpartition("/")[2] == str(start):
                    return  # complete: an earlier run was killed before renaming it
                self.remove()
                raise ConnectionError("the partial download is longer than the file on the server") from error
            raise
        with response:
            if response.status != http.HTTPStatus.PARTIAL_CONTENT:
                start = 0
            elif not (response.headers.get("Content-Range") or "").startswith(f"bytes {start}-"):
                self.remove()
                raise ConnectionError("the server sent a different range than requested")
            length = response.headers.get("Content-Length")
            total = None if length is None else start + int(length)
            free = shutil.disk_usage(self._path.parent).free
            if total is not None and total - start > free:
                raise UserError(
                    f"{redact_url(self._address)} needs {total - start:,} more bytes, but only {free:,} are free"
                )
            etag = response.headers.get("ETag") or ""
            # Files with the same weak ETag may differ in bytes.
            version = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")
            write_atomically(self._metadata, json.dumps({"version": version, "url": self._address_hash}).encode())
            with open(self.content, "ab") as stream, Progress(self._path.name, total, unit="MB") as display:
                stream.truncate(start)
                size = start
                display.restart(size, size / 1e6)
                while block := response.read(_BLOCK):
                    stream.write(block)
                    size += len(block)
                    display.update(size, f"{size / 1e6:,.0f} MB", size / 1e6)
            if total is not None and size < total:
                raise ConnectionError(f"the connection was closed after {size:,} of {total:,} bytes")

    def publish(self) -> None:
        """Give the file its final name."""
        self.content.replace(self._path)
        self._metadata.unlink(missing_ok=True)
        sync_folder(self._path.parent)

    def remove(self) -> None:
        self.content.unlink(missing_ok=True)
        self._metadata.unlink(missing_ok=True)
