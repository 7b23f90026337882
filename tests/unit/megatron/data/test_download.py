"""Downloads from a local server: range requests, broken connections, changed files, checksums."""

import hashlib
import http.server
import re
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.data import download as module
from megatron.data.download import download, redact_url
from megatron.data.prepare import PrepareOptions, prepare
from megatron.utils.errors import UserError
from megatron.utils.locks import Lock
from tests.support.corpora import dataset_text

CONTENT = np.random.default_rng(0).bytes(1_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves one file. `behaviour` defines which errors occur."""

    def __init__(self, behaviour, *arguments):
        self.behaviour = behaviour
        super().__init__(*arguments)

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        behaviour = self.behaviour
        behaviour.requests.append(self.headers.get("Range"))
        if behaviour.statuses:
            self.send_error(behaviour.statuses.pop(0))
            return
        content, start = behaviour.content, 0
        requested = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if requested and behaviour.ranges and self.headers.get("If-Range") == behaviour.etag:
            start = int(requested.group(1))
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start + behaviour.shift}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("ETag", behaviour.etag)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        sent = behaviour.breaks.pop(0) if behaviour.breaks else len(content)
        self.wfile.write(content[start : start + sent])


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    behaviour = SimpleNamespace(
        content=CONTENT, etag='"one"', ranges=True, breaks=[], statuses=[], shift=0, requests=[]
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, behaviour))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    behaviour.url = f"http://127.0.0.1:{server.server_port}/corpora/a%20b.jsonl.zst?key=secret"
    yield behaviour
    server.shutdown()
    server.server_close()


def check_complete(folder) -> None:
    assert (folder / "a b.jsonl.zst").read_bytes() == CONTENT
    assert [path.name for path in folder.iterdir()] == ["a b.jsonl.zst"]


def test_download(tmp_path, server, capsys):
    folder = tmp_path / "deep"
    assert download(f"{server.url}#sha256={SHA256}", folder) == folder / "a b.jsonl.zst"
    check_complete(folder)
    assert f"1,000,000 bytes, sha256={SHA256}" in capsys.readouterr().out
    download(server.url, folder)
    assert "already downloaded" in capsys.readouterr().out
    assert len(server.requests) == 1


def test_broken_connections(tmp_path, server):
    """Retries resume as long as each receives something."""
    server.breaks = [100_000] * 9
    download(f"{server.url}#sha256={SHA256}", tmp_path)
    check_complete(tmp_path)
    assert server.requests == [None, *(f"bytes={100_000 * part}-" for part in range(1, 10))]


def test_resume(tmp_path, server, monkeypatch):
    server.breaks = [400_000]
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "sleep", lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            download(server.url, tmp_path)
    assert (tmp_path / "a b.jsonl.zst.partial").stat().st_size == 400_000
    assert not (tmp_path / "a b.jsonl.zst").exists()
    download(server.url, tmp_path)
    check_complete(tmp_path)
    assert server.requests == [None, "bytes=400000-"]


def write_partial(folder, server, content, etag='"one"'):
    folder.mkdir(exist_ok=True)
    (folder / "a b.jsonl.zst.partial").write_bytes(content)
    metadata = f'{{"version": {module.json.dumps(etag)}, "url": "{hashlib.sha256(server.url.encode()).hexdigest()}"}}'
    (folder / "a b.jsonl.zst.partial.json").write_text(metadata)


def test_killed_before_renaming(tmp_path, server):
    write_partial(tmp_path, server, CONTENT)
    download(f"{server.url}#sha256={SHA256}", tmp_path)
    check_complete(tmp_path)
    assert server.requests == ["bytes=1000000-"]


@pytest.mark.parametrize("etag", ['"two"', None])
def test_changed_file_is_downloaded_from_the_beginning(tmp_path, server, etag):
    write_partial(tmp_path, server, b"old" * 1000, etag)
    download(server.url, tmp_path)
    check_complete(tmp_path)


def test_partial_file_longer_than_the_file(tmp_path, server):
    write_partial(tmp_path, server, CONTENT + b"more")
    download(server.url, tmp_path)
    check_complete(tmp_path)


def test_partial_file_of_another_url(tmp_path, server):
    write_partial(tmp_path, server, b"old" * 1000)
    (tmp_path / "a b.jsonl.zst.partial.json").write_text('{"version": "\\"one\\"", "url": "another"}')
    download(server.url, tmp_path)
    check_complete(tmp_path)
    assert server.requests == [None]


@pytest.mark.parametrize("problem", ["no ranges", "weak etag", "wrong range"])
def test_servers_that_cannot_resume(tmp_path, server, problem):
    server.breaks = [300_000]
    if problem == "no ranges":
        server.ranges = False
    elif problem == "weak etag":
        server.etag = 'W/"one"'
    else:
        server.shift = 7
    download(server.url, tmp_path)
    check_complete(tmp_path)


def test_server_errors_are_retried(tmp_path, server):
    server.statuses = [503, 429, 500]
    download(server.url, tmp_path)
    check_complete(tmp_path)


def test_failed_downloads(tmp_path, server):
    server.statuses = [404]
    with pytest.raises(UserError, match=r"cannot download http://127.0.0.1.*zst: the server answers 404 Not Found$"):
        download(server.url, tmp_path)
    server.statuses = [503] * 6
    with pytest.raises(UserError, match="the server answers 503") as error:
        download(server.url, tmp_path)
    assert "secret" not in str(error.value)
    assert len(server.requests) == 7
    assert list(tmp_path.iterdir()) == []


def test_wrong_checksum(tmp_path, server):
    with pytest.raises(UserError, match=rf"has SHA-256 {SHA256}, not 0+; the download was removed"):
        download(f"{server.url}#sha256={'0' * 64}", tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a b.jsonl.zst").write_bytes(b"damaged")
    with pytest.raises(UserError, match=rf"its SHA-256 is not {SHA256}; remove it"):
        download(f"{server.url}#sha256={SHA256}", tmp_path)


def test_full_disk(tmp_path, server, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=999_999))
    with pytest.raises(UserError, match="needs 1,000,000 more bytes, but only 999,999 are free"):
        download(server.url, tmp_path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://a/b", "is not an http:// or https:// URL"),
        ("file:///etc/passwd", "is not an http:// or https:// URL"),
        ("http://a/b#sha256=12", "the part after # must be sha256="),
        ("http://a/", "does not name a file"),
        ("http://a/b/..", "does not name a file"),
    ],
)
def test_invalid_urls(tmp_path, url, message):
    with pytest.raises(UserError, match=message):
        download(url, tmp_path)


def test_redact_url():
    assert redact_url("https://user:password@host:80/a/b.zst?token=1") == "https://host:80/a/b.zst"


def test_url_to_dataset(tmp_path, server):
    server.content = b'{"text": "downloaded"}\n'
    url = server.url.replace("a%20b.jsonl.zst", "a.jsonl")
    prefix = prepare(PrepareOptions("pile", tmp_path, "CharLevelTokenizer", urls=(url,)))
    assert dataset_text(prefix) == "downloaded\0"
    assert "secret" not in (tmp_path / "pile" / "pile_text_document.json").read_text()
    with pytest.raises(UserError, match="two of the URLs have the same file name"):
        prepare(PrepareOptions("pile", tmp_path, "CharLevelTokenizer", urls=(url, url)))


def test_concurrent_download_is_rejected(tmp_path, server):
    with (
        Lock(tmp_path / "a b.jsonl.zst.partial.lock", ""),
        pytest.raises(UserError, match=r"another process is downloading .*a b.jsonl.zst; wait for it to finish"),
    ):
        download(server.url, tmp_path)
