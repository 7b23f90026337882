"""Downloads of files: from the Hugging Face hub with `huggingface_hub`, from other servers with
`pooch`.
"""

import hashlib
import json
import re
import string
import sys
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import pooch
from huggingface_hub import hf_hub_download

from megatron.data.indexed_dataset import file_sample
from megatron.utils.errors import UserError, first_line, visible
from megatron.utils.files import read_file, write_atomically, write_errors
from megatron.utils.processes import Lock

RETRIES = 2
_BLOCK = 1 << 16
_CHECKSUM = re.compile(r"sha256=([0-9a-fA-F]{64})")
_HUB_DATASET = re.compile(r"https://huggingface\.co/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


def download(url: str, folder: Path) -> Path:
    """Download `url` to `folder` under its own name, unless it is there already. Returns the path
    of the file.

    A file gets its name when it is complete. `NAME.source.json` has the hash of its URL and
    `file_sample` of the file, so that a file of the same name from another URL, or one that was
    damaged later, is not used without notice; the user's own files have none. Broken connections
    are retried. A retry, and a later process, continue with the missing part if the server supports
    that and the file is the same.

    Args:
        url: http:// or https://. A fragment `#sha256=<64 hexadecimal digits>` is verified.

    Raises UserError if the URL is invalid, the file cannot be downloaded or written, the checksum
    is wrong, or `url` has none and the file is there from another URL or has changed.
    """
    address, checksum = _split_checksum(url)
    shown = visible(redact_url(address))
    path = folder / file_name(url)
    source = folder / f"{path.name}.source.json"
    record = {"url": hashlib.sha256(address.encode()).hexdigest()}
    with write_errors(path):
        if path.exists():
            if checksum is not None and pooch.file_hash(str(path)) != checksum:
                raise UserError(
                    f"{path} exists, but its SHA-256 is not {checksum}; remove it to download it "
                    "again"
                )
            if checksum is None and source.exists():
                complete = {**record, "sample": file_sample(path)}
                # Without a sample, it was complete when the process was killed, or is from an
                # earlier version.
                if read_file(source) not in (
                    json.dumps(record).encode(),
                    json.dumps(complete).encode(),
                ):
                    raise UserError(
                        f"{path} was downloaded from another URL than {shown}, or has changed "
                        "since; remove it to download it again, or append #sha256=... to the URL "
                        "if it is the right file"
                    )
            print(f"{path}: already downloaded")
            return path
        folder.mkdir(parents=True, exist_ok=True)
        source.write_text(json.dumps(record))
    print(f"downloading {shown}", file=sys.stderr, flush=True)
    try:
        _fetch(address, checksum, path)
    except Exception as error:  # both libraries raise exceptions of several others
        source.unlink(missing_ok=True)
        # The message may quote an address with its query, which may contain a key.
        reason = re.sub(r"\?\S+", "", first_line(error))[:300]
        raise UserError(f"cannot download {shown}: {visible(reason)}") from error
    write_atomically(source, json.dumps({**record, "sample": file_sample(path)}).encode())
    print(f"{path}: {path.stat().st_size:,} bytes, sha256={pooch.file_hash(str(path))}")
    return path


def file_name(url: str) -> str:
    """The name that `download` gives the file. Raises UserError if the URL names no file."""
    address = _split_checksum(url)[0]
    name = PurePosixPath(unquote(urlsplit(address).path)).name
    if name in ("", ".", "..") or not name.isprintable():
        raise UserError(f"{redact_url(address)} does not name a file")
    return name


def redact_url(address: str) -> str:
    """Return a URL for messages: without the password, and without the query, which may contain a
    key.
    """
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _fetch(address: str, checksum: str | None, path: Path) -> None:
    """Download the file. Raises an exception of the library if that fails."""
    if (match := _HUB_DATASET.fullmatch(address.partition("?")[0])) and checksum is None:
        repository, revision, name = match[1], unquote(match[2]), unquote(match[3])
        if "/" not in name:
            hf_hub_download(
                repository, name, repo_type="dataset", revision=revision, local_dir=path.parent
            )
            return
    pooch.get_logger().setLevel("WARNING")  # its other messages contain the query of the URL
    known = None
    if checksum is not None:
        known = f"sha256:{checksum}"
    registry, urls = {path.name: known}, {path.name: address}
    files = pooch.create(path.parent, "", registry=registry, urls=urls, retry_if_failed=RETRIES)
    busy = f"{path}: another process downloads it; wait until it ends"
    with Lock(path.with_name(f".{path.name}.lock"), busy):
        files.fetch(path.name, downloader=_ResumingDownloader(path))


class _ResumingDownloader:
    """A downloader of `pooch` that keeps the received part of a file, `.NAME.part`, when the
    connection breaks.

    `.NAME.part.json` has the URL's hash and what identifies the version of the file on the server
    (its ETag, or else its time of modification). The next call requests the rest of the same
    version, with the HTTP headers Range and If-Range; a server that has another one, or does not
    support them, sends the whole file.
    """

    def __init__(self, path: Path):
        self._part = path.with_name(f".{path.name}.part")
        self._state = path.with_name(f".{path.name}.part.json")

    def __call__(self, url: str, output_file: str, files: Any) -> None:
        # A server may send a compressed body only if the request allows it; then its size and
        # checksum would differ.
        headers = {"Accept-Encoding": "identity"}
        url_hash = hashlib.sha256(url.encode()).hexdigest()
        version = self._version(url_hash)
        if version is None:
            self._remove()
        else:
            headers |= {"Range": f"bytes={self._part.stat().st_size}-", "If-Range": version}
        with open(self._part, "ab") as stream:

            def start(response: Any, **_: Any) -> None:
                """Called before the body is read; also for redirects."""
                etag = response.headers.get("ETag", "W/")
                served = response.headers.get("Last-Modified") if etag.startswith("W/") else etag
                if response.status_code in (200, 416):  # the whole file, or none of it
                    stream.truncate(0)
                    self._state.write_text(json.dumps({"url": url_hash, "version": served}))
                elif response.status_code == 206:
                    # A server may ignore If-Range. pooch tries again after a ValueError, from the
                    # beginning.
                    begin = (
                        response.headers.get("Content-Range", "")
                        .removeprefix("bytes ")
                        .partition("-")[0]
                    )
                    if served != version or begin != str(stream.tell()):
                        self._state.unlink(missing_ok=True)
                        raise ValueError(
                            "the file changed on the server after a part of it was received"
                        )

            request = pooch.HTTPDownloader(
                progressbar=sys.stderr.isatty(),
                chunk_size=_BLOCK,
                headers=headers,
                hooks={"response": start},
            )
            try:
                request(url, stream, files)
            finally:
                if stream.tell() == 0:
                    self._remove()
        self._part.replace(output_file)
        self._remove()

    def _version(self, url_hash: str) -> str | None:
        """The version of the part; None if there is none that can be continued."""
        try:
            state = json.loads(self._state.read_text())
        except (OSError, ValueError):
            return None
        if not self._part.is_file() or state.get("url") != url_hash:
            return None
        version: str | None = state.get("version")
        return version

    def _remove(self) -> None:
        self._part.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)


def _split_checksum(url: str) -> tuple[str, str | None]:
    """Return the URL without its fragment, with non-ASCII characters quoted, and the checksum in
    the fragment.
    """
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (raises ValueError for an invalid port)
        address = quote(urlunsplit(parts._replace(fragment="")), safe=string.punctuation)
    except ValueError as error:
        raise UserError(f"{url.partition('?')[0]} is not a valid URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{url.partition('?')[0]} is not an http:// or https:// URL")
    if "@" in parts.netloc:
        raise UserError(f"{redact_url(url)}: URLs with a user name or password are not supported")
    if not parts.fragment:
        return address, None
    match = _CHECKSUM.fullmatch(parts.fragment)
    if match is None:
        raise UserError(
            f"{redact_url(url)}: the part after # must be sha256= and 64 hexadecimal digits"
        )
    return address, match.group(1).lower()
