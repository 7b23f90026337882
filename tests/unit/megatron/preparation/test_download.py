"""Downloads from a local server: checksums, broken connections, files of other URLs; and the
request to the hub.
"""

import hashlib
import http.server
import os
import threading
from functools import partial
from types import SimpleNamespace
from unittest.mock import create_autospec

import numpy as np
import pytest
from huggingface_hub import hf_hub_download

from megatron.preparation import download as module
from megatron.preparation.download import RETRIES, download
from megatron.preparation.prepare import PrepareOptions, prepare
from megatron.utils.errors import UserError
from tests.support.corpora import dataset_text
from tests.support.errors import assert_rejected

CONTENT = np.random.default_rng(0).bytes(3_000_000)
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
        behaviour.requests.append(self.path)
        if behaviour.statuses:
            self.send_error(behaviour.statuses.pop(0))
            return
        start = 0
        if behaviour.etag and (
            self.headers["If-Range"] == behaviour.etag or behaviour.ignores_if_range
        ):
            start = int(
                self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-")
            )
        behaviour.starts.append(start)
        self.send_response(206 if start else 200)
        if behaviour.etag:
            self.send_header("ETag", behaviour.etag)
        if start:
            end = len(behaviour.content)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{end}")
        content = behaviour.content[start:]
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: behaviour.breaks.pop(0) if behaviour.breaks else None])


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    behaviour = SimpleNamespace(
        content=CONTENT,
        breaks=[],
        statuses=[],
        requests=[],
        starts=[],
        etag=None,
        ignores_if_range=False,
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, behaviour))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    behaviour.url = f"http://127.0.0.1:{server.server_port}/corpora/a%20b.jsonl.zst?key=secret"
    yield behaviour
    server.shutdown()
    server.server_close()


def check_complete(folder) -> None:
    assert (folder / "a b.jsonl.zst").read_bytes() == CONTENT
    assert sorted(path.name for path in folder.iterdir()) == [
        "a b.jsonl.zst",
        "a b.jsonl.zst.source.json",
    ]


def test_download(tmp_path, server, capsys):
    folder = tmp_path / "deep"
    assert download(f"{server.url}#sha256={SHA256}", folder) == folder / "a b.jsonl.zst"
    check_complete(folder)
    shown = capsys.readouterr()
    assert f"3,000,000 bytes, sha256={SHA256}" in shown.out
    assert "secret" not in shown.out + shown.err
    download(server.url, folder)
    assert len(server.requests) == 1


def test_file_from_another_url(tmp_path, server):
    download(server.url, tmp_path)
    assert "secret" not in (tmp_path / "a b.jsonl.zst.source.json").read_text()
    other = server.url.replace("/corpora/", "/others/")
    assert_rejected(r"b\.jsonl\.zst.*URL.*/others/a%20b", download, other, tmp_path)
    download(f"{other}#sha256={SHA256}", tmp_path)
    (tmp_path / "a b.jsonl.zst").unlink()
    server.content = b"another file"
    assert download(other, tmp_path).read_bytes() == b"another file"
    assert len(server.requests) == 2


def test_a_file_that_was_damaged_later(tmp_path, server):
    download(server.url, tmp_path)
    path = tmp_path / "a b.jsonl.zst"
    os.truncate(path, 2_000_000)
    assert_rejected(r"b\.jsonl\.zst.*changed", download, server.url, tmp_path)
    path.write_bytes(bytes(len(CONTENT)))
    assert_rejected(r"b\.jsonl\.zst.*changed", download, server.url, tmp_path)
    path.unlink()
    download(server.url, tmp_path)
    download(server.url, tmp_path)
    check_complete(tmp_path)
    assert len(server.requests) == 2


def test_file_of_the_user(tmp_path, server):
    (tmp_path / "a b.jsonl.zst").write_bytes(b"mine")
    assert download(server.url, tmp_path).read_bytes() == b"mine"
    assert server.requests == []
    assert_rejected(
        rf"a b.jsonl.zst exists.*{SHA256}", download, f"{server.url}#sha256={SHA256}", tmp_path
    )


@pytest.mark.parametrize("checksum", ["", f"#sha256={SHA256}"])
def test_broken_connections_and_server_errors_are_retried(tmp_path, server, checksum):
    server.statuses, server.breaks = [503], [100_000]
    download(server.url + checksum, tmp_path)
    check_complete(tmp_path)
    assert len(server.requests) == 3


@pytest.mark.parametrize("checksum", ["", f"#sha256={SHA256}"])
def test_a_cut_download_is_continued(tmp_path, server, checksum):
    """By a retry, and by a later process; the connection breaks at every request."""
    server.etag, server.breaks = '"1"', [1_000_000, 700_000, 600_000]
    assert_rejected("a%20b", download, server.url + checksum, tmp_path)
    download(server.url + checksum, tmp_path)
    check_complete(tmp_path)
    expected = [0, 1_000_000, 1_700_000, 2_300_000]
    assert server.starts == pytest.approx(expected, abs=250_000), "incomplete blocks are not kept"


def test_a_server_that_ignores_if_range(tmp_path, server):
    """The file changed: the rest of the new one does not fit to the part of the old one."""
    server.etag, server.breaks, server.ignores_if_range = '"1"', [900_000] * (1 + RETRIES), True
    assert_rejected("a%20b", download, server.url, tmp_path)
    server.etag, server.content = '"2"', CONTENT[::-1]
    assert download(server.url, tmp_path).read_bytes() == CONTENT[::-1]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("change", ["etag", "weak", "url", "damaged"])
def test_the_part_of_another_file_is_not_continued(change, tmp_path, server):
    server.etag, server.breaks = 'W/"1"' if change == "weak" else '"1"', [900_000] * (1 + RETRIES)
    assert_rejected("a%20b", download, server.url, tmp_path)
    url = server.url.replace("/corpora/", "/others/") if change == "url" else server.url
    if change == "etag":
        server.etag, server.content = '"2"', CONTENT[::-1]
    elif change == "damaged":
        (tmp_path / ".a b.jsonl.zst.part.json").write_text("{")
    assert download(url, tmp_path).read_bytes() == server.content
    assert server.starts[-1] == 0
    assert not list(tmp_path.glob(".*"))


def test_failed_downloads(tmp_path, server, capsys):
    """Only the received part is left behind, and the URL is shown without its query."""
    server.statuses = [503] * (1 + RETRIES)
    with pytest.raises(
        UserError, match=r"http://127.0.0.1:\d+/corpora/a%20b.jsonl.zst: 503"
    ) as error:
        download(server.url, tmp_path)
    assert "secret" not in str(error.value) + capsys.readouterr().err
    server.breaks = [100_000] * (1 + RETRIES)
    assert_rejected("a%20b", download, server.url, tmp_path)
    assert all(path.name.startswith(".a b.jsonl.zst.part") for path in tmp_path.iterdir())
    assert_rejected(SHA256, download, f"{server.url}#sha256={'0' * 64}", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("query", ["", "?download=true"])
def test_file_on_the_hub(query, tmp_path, monkeypatch):
    def fake(*arguments, **options):
        (tmp_path / "a.tar").write_bytes(b"content")

    hub = create_autospec(hf_hub_download, side_effect=fake)
    monkeypatch.setattr(module, "hf_hub_download", hub)
    url = "https://huggingface.co/datasets/user/set/resolve/refs%2Fpr%2F1/a.tar" + query
    assert download(url, tmp_path).read_bytes() == b"content"
    hub.assert_called_once_with(
        "user/set", "a.tar", repo_type="dataset", revision="refs/pr/1", local_dir=tmp_path
    )


def test_file_in_a_folder_of_the_hub(tmp_path, monkeypatch):
    """The library would keep the folder."""
    monkeypatch.setattr(module, "hf_hub_download", lambda *_, **__: pytest.fail("not used"))
    files = SimpleNamespace(
        fetch=lambda name, downloader: (tmp_path / name).write_bytes(b"content")
    )
    monkeypatch.setattr(module.pooch, "create", lambda *_, **__: files)
    url = "https://huggingface.co/datasets/user/set/resolve/main/data%2Fa.jsonl"
    assert download(url, tmp_path) == tmp_path / "a.jsonl"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://a/b", "is not an http:// or https:// URL"),
        ("http://a/b#sha256=12", "the part after # must be sha256="),
        ("http://a/", "does not name a file"),
        ("http://[::1/a", "is not a valid URL: Invalid IPv6 URL"),
        (
            "http://a:port/b?key=secret",
            "http://a:port/b is not a valid URL: Port could not be cast",
        ),
        (
            "https://user:secret@a:80/b?key=1",
            "^https://a:80/b: URLs with a user name or password are not supported",
        ),
    ],
)
def test_invalid_urls(tmp_path, url, message):
    assert_rejected(message, download, url, tmp_path)


def test_url_to_dataset(tmp_path, server):
    server.content = b'{"text": "downloaded"}\n'
    url = server.url.replace("a%20b.jsonl.zst", "a.jsonl")
    prefix = prepare(PrepareOptions("pile", tmp_path, "CharLevelTokenizer", urls=(url,)))
    assert dataset_text(prefix) == "downloaded\0"
    assert "secret" not in (tmp_path / "pile" / "pile_text_document.json").read_text()
    other = url.replace("/corpora/", "/others/")
    assert_rejected(
        "URLs", prepare, PrepareOptions("pile", tmp_path, "CharLevelTokenizer", urls=(url, other))
    )
    assert len(server.requests) == 1
