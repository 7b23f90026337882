"""Downloads from a local server: range requests, broken connections, changed files, checksums."""

import hashlib
import http.server
import json
import re
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.preparation import download as module
from megatron.preparation.download import download, redact_url
from megatron.preparation.prepare import PrepareOptions, prepare
from megatron.utils.errors import UserError
from megatron.utils.locks import Lock
from tests.support.corpora import dataset_text
from tests.support.servers import serve_bytes

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
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    behaviour.url = f"http://127.0.0.1:{server.server_port}/corpora/a%20b.jsonl.zst?key=secret"
    yield behaviour
    server.shutdown()
    server.server_close()


def check_complete(folder) -> None:
    assert (folder / "a b.jsonl.zst").read_bytes() == CONTENT
    assert sorted(path.name for path in folder.iterdir()) == ["a b.jsonl.zst", "a b.jsonl.zst.source.json"]


def test_download(tmp_path, server, capsys):
    folder = tmp_path / "deep"
    assert download(f"{server.url}#sha256={SHA256}", folder) == folder / "a b.jsonl.zst"
    check_complete(folder)
    assert f"1,000,000 bytes, sha256={SHA256}" in capsys.readouterr().out
    download(server.url, folder)
    assert "already downloaded" in capsys.readouterr().out
    assert len(server.requests) == 1


def test_file_from_another_url(tmp_path, server, capsys):
    download(server.url, tmp_path)
    assert "secret" not in (tmp_path / "a b.jsonl.zst.source.json").read_text()
    other = server.url.replace("/corpora/", "/others/")
    with pytest.raises(UserError, match=r"a b.jsonl.zst was downloaded from another URL than .*/others/a%20b.*; rem"):
        download(other, tmp_path)
    download(f"{other}#sha256={SHA256}", tmp_path)
    (tmp_path / "a b.jsonl.zst").unlink()
    server.content = b"another file"
    assert download(other, tmp_path).read_bytes() == b"another file"
    assert "already downloaded" in capsys.readouterr().out
    with pytest.raises(UserError, match="was downloaded from another URL"):
        download(server.url, tmp_path)
    assert len(server.requests) == 2


@pytest.mark.parametrize("record", [None, b"", b"{", b'{"url": 1}', b'{"url": "\\ud800"}', b"[" * 100_000])
def test_file_without_a_record_of_its_url(tmp_path, server, record):
    """Files of earlier versions and of the user have no record."""
    (tmp_path / "a b.jsonl.zst").write_bytes(b"mine")
    if record is not None:
        (tmp_path / "a b.jsonl.zst.source.json").write_bytes(record)
    assert download(server.url, tmp_path).read_bytes() == b"mine"
    assert server.requests == []


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


def write_partial(folder, address, content, *, name="a b.jsonl.zst", **changes):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.partial").write_bytes(content)
    state = {
        "url": hashlib.sha256(address.encode()).hexdigest(),
        "etag": '"one"',
        "last_modified": None,
        "total": 1_000_000,
    }
    (folder / f"{name}.partial.json").write_text(json.dumps(state | changes))


def test_killed_before_renaming(tmp_path, server):
    write_partial(tmp_path, server.url, CONTENT)
    download(f"{server.url}#sha256={SHA256}", tmp_path)
    check_complete(tmp_path)
    assert server.requests == []


@pytest.mark.parametrize("etag", ['"two"', None])
def test_changed_file_is_downloaded_from_the_beginning(tmp_path, server, etag):
    write_partial(tmp_path, server.url, b"old" * 1000, etag=etag)
    download(server.url, tmp_path)
    check_complete(tmp_path)


def test_partial_file_longer_than_the_file(tmp_path, server):
    write_partial(tmp_path, server.url, CONTENT + b"more")
    download(server.url, tmp_path)
    check_complete(tmp_path)


@pytest.mark.parametrize(
    "state",
    [{"url": "another"}, {"total": "1000000"}, {"total": -1}, {"etag": ["one"]}, {"more": 1}],
    ids=str,
)
def test_state_that_is_invalid_or_of_another_url(tmp_path, server, state):
    write_partial(tmp_path, server.url, b"old" * 1000, **state)
    download(server.url, tmp_path)
    check_complete(tmp_path)
    assert server.requests == [None]


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff", b'{"url": "\\ud800"}'])
def test_damaged_state(tmp_path, server, content):
    write_partial(tmp_path, server.url, b"old" * 1000)
    (tmp_path / "a b.jsonl.zst.partial.json").write_bytes(content)
    download(server.url, tmp_path)
    check_complete(tmp_path)


def test_file_of_the_user_is_kept(tmp_path, server):
    own = tmp_path / "a b.jsonl.zst.partial"
    own.write_text("mine")
    with pytest.raises(UserError, match="does not come from an unfinished download; move or remove it"):
        download(server.url, tmp_path)
    assert own.read_text() == "mine"
    own.unlink()
    (tmp_path / "a b.jsonl.zst").mkdir()
    with pytest.raises(UserError, match="exists, but is not a regular file"):
        download(server.url, tmp_path)


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
    with pytest.raises(UserError, match=r"cannot download http://127.0.0.1.*zst: the server returned 404 Not Found$"):
        download(server.url, tmp_path)
    server.statuses = [503] * 6
    with pytest.raises(UserError, match="the server returned 503") as error:
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
        ("http://a/%1b%5b2J", "does not name a file"),
        ("http://[::1/a", "is not a valid URL: Invalid IPv6 URL"),
        ("http://a:port/b?key=secret", "http://a:port/b is not a valid URL: Port could not be cast"),
        ("http://user:secret@a/b", "^http://a/b: URLs with a user name or password are not supported"),
        ("http:///b", "is not an http:// or https:// URL"),
        ("http://a/\udc80", "is not a valid URL"),
        (f"http://a/{'b' * 300}", "File name too long"),
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
    other = url.replace("/corpora/", "/others/")
    with pytest.raises(UserError, match="two of the URLs have the same file name"):
        prepare(PrepareOptions("pile", tmp_path, "CharLevelTokenizer", urls=(url, other)))
    assert len(server.requests) == 1


def test_concurrent_download_is_rejected(tmp_path, server):
    with (
        Lock(tmp_path / "a b.jsonl.zst.partial.lock", ""),
        pytest.raises(UserError, match=r"another process is downloading .*a b.jsonl.zst; wait for it to finish"),
    ):
        download(server.url, tmp_path)


def response(*headers, status="200 OK", body=b"content"):
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode("latin-1") + body


def fetch(folder, *responses, checksum=""):
    """Download from a server that sends these bytes. Returns the content and the requests."""
    with serve_bytes(responses) as (address, requests):
        return download(f"{address}/name{checksum}", folder).read_bytes(), requests


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)


LATER = "Tue, 03 Nov 2026 10:00:00 GMT"
EARLIER = "Mon, 02 Nov 2026 10:00:00 GMT"


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (['ETag: "a"'], ['ETag: "a"', "Content-Range: bytes 4-9/10"], True),
        (['ETag: "a"', f"Last-Modified: {EARLIER}"], ['ETag: "a"', "Content-Range: bytes 4-9/10"], True),
        ([f"Last-Modified: {EARLIER}"], [f"Last-Modified: {EARLIER}", "Content-Range: bytes 4-9/*"], True),
        (['ETag: "a"'], ['ETag: "b"', "Content-Range: bytes 4-9/10"], False),
        (['ETag: "a"'], ['ETag: W/"a"', "Content-Range: bytes 4-9/10"], False),
        (['ETag: "a"'], ["Content-Range: bytes 4-9/10"], False),
        (['ETag: "a"'], ['ETag: "a"', "Content-Range: bytes 4-10/11"], False),
        (['ETag: "a"'], ['ETag: "a"', "Content-Range: bytes 5-9/10"], False),
        (['ETag: "a"'], ['ETag: "a"', "Content-Range: bytes abc"], False),
        (['ETag: "a"'], ['ETag: "a"'], False),
        (
            ['ETag: "a"', f"Last-Modified: {EARLIER}"],
            ['ETag: "a"', f"Last-Modified: {LATER}", "Content-Range: bytes 4-9/10"],
            False,
        ),
        ([f"Last-Modified: {EARLIER}"], [f"Last-Modified: {LATER}", "Content-Range: bytes 4-9/10"], False),
        ([f"Last-Modified: {EARLIER}"], ["Content-Range: bytes 4-9/10"], False),
    ],
)
def test_continuation_of_another_version(tmp_path, no_waiting, first, second, same):
    """A 206 response is appended only if its ETag, date and total size are those of the first response."""
    content, requests = fetch(
        tmp_path,
        response("Content-Length: 10", *first, body=b"0123"),
        response("Content-Length: 6", *second, status="206 Partial Content", body=b"456789"),
        response("Content-Length: 6", body=b"second"),
    )
    assert content == (b"0123456789" if same else b"second")
    assert len(requests) == (2 if same else 3)
    validator = '"a"' if "ETag" in first[0] else EARLIER
    assert "Range: bytes=4-\r\n" in requests[1]
    assert f"If-Range: {validator}\r\n" in requests[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["name", "name.source.json"]


def test_versions_that_keep_changing(tmp_path, no_waiting):
    """The download gives up instead of starting over forever."""
    pair = [
        response("Content-Length: 10", 'ETag: "a"', body=b"0123"),
        response('ETag: "b"', "Content-Range: bytes 4-9/10", status="206 Partial Content", body=b"456789"),
    ]
    with pytest.raises(UserError, match=r"cannot download .*/name: the file on the server has changed"):
        fetch(tmp_path, *pair * 10)


def test_kill_while_starting_over(tmp_path, monkeypatch):
    """The old content is gone before the new version is recorded."""
    with serve_bytes([response("Content-Length: 7", 'ETag: "two"')]) as (address, _):
        write_partial(tmp_path, f"{address}/name", b"old", name="name")
        monkeypatch.setattr(
            module, "write_atomically", lambda path, content: (_ for _ in ()).throw(KeyboardInterrupt())
        )
        with pytest.raises(KeyboardInterrupt):
            download(f"{address}/name", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (response("Content-Length: abc"), "the server sent Content-Length: abc$"),
        (response("Content-Length: -5"), "the server sent Content-Length: -5$"),
        (response("Content-Length: 5", "Content-Length: 7"), "the server sent Content-Length: 5, 7$"),
        (response("Content-Length: " + "9" * 5000), r"the server sent Content-Length: 9{200}$"),
        (response("Content-Length: 999999999999999999"), "needs 999,999,999,999,999,999 more bytes, but only "),
        (response("Content-Length: 100"), "the connection was closed after 7 of 100 bytes"),
        (response("Transfer-Encoding: chunked", body=b"zz\r\ncontent"), "IncompleteRead|chunk|invalid"),
        (response("Transfer-Encoding: chunked", body=b"7\r\ncontent"), "IncompleteRead"),
        (response(status="206 Partial Content"), "the server returned status 206$"),
        (response(status="204 No Content", body=b""), "the server returned status 204$"),
        (response(status="404 \x1b[2J\x07"), r"the server returned 404 \\x1b\[2J\\x07$"),
        (b"\x1b]0;title\x07\r\n\r\n", r"\\x1b\]0;title\\x07"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200, "got more than 100 headers"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "the connection was closed after 0 bytes"),
        (b"", "Remote end closed connection without response"),
        (response("Location: file:///etc/passwd", status="302 Found"), "redirects to file:///etc/passwd, which is not"),
        (response("Location: ftp://a/b", status="301 Moved"), "redirects to ftp://a/b, which is not an http:// or"),
        (response("Location: http://[", status="302 Found"), "invalid redirect: Invalid IPv6 URL"),
        (
            response("Location: http://127.0.0.1:99999/", status="302 Found"),
            "invalid redirect: Port out of range 0-65535",
        ),
        (response("Location: /name", status="307 Again"), "more than 10 redirects"),
        (response(status="302 Found"), "the server returned 302 Found"),
    ],
    ids=range(21),
)
def test_malformed_responses(tmp_path, no_waiting, capsys, sent, message):
    with pytest.raises(UserError, match=message) as error:
        fetch(tmp_path, sent)
    assert "\n" not in str(error.value)
    shown = capsys.readouterr().err
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert not (tmp_path / "name").exists()


def test_redirect(tmp_path):
    content, requests = fetch(tmp_path, response("Location: ./b%20c d\xe4?x", status="302 Found"), response())
    assert content == b"content"
    assert requests[1].startswith("GET /b%20c%20d%E4?x HTTP/1.1\r\n")


def test_chunked_and_unknown_length(tmp_path, capsys):
    chunked = response("Transfer-Encoding: chunked", body=b"3\r\ncon\r\n4\r\ntent\r\n0\r\n\r\n")
    assert fetch(tmp_path / "chunked", chunked)[0] == b"content"
    assert "does not say" not in capsys.readouterr().err
    assert fetch(tmp_path / "unknown", response())[0] == b"content"
    assert "the server does not send the size of the file" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["10", "*"])
def test_interrupted_continuation_of_an_unknown_length(tmp_path, no_waiting, size):
    """If the first response was chunked, the size of the file is that of the continuation."""
    rest = [f"Content-Range: bytes {start}-9/{size}" for start in (4, 6)]
    content, requests = fetch(
        tmp_path,
        response("Transfer-Encoding: chunked", 'ETag: "a"', body=b"4\r\n0123\r\n"),
        response("Content-Length: 6", 'ETag: "a"', rest[0], status="206 Partial Content", body=b"45"),
        response("Content-Length: 4", 'ETag: "a"', rest[1], status="206 Partial Content", body=b"6789"),
    )
    assert content == b"0123456789"
    assert len(requests) == 3
    assert "Range: bytes=6-\r\n" in requests[2]


def test_size_of_a_continuation_is_kept(tmp_path, no_waiting):
    """A later answer about a file of another size is another version."""
    content, requests = fetch(
        tmp_path,
        response("Transfer-Encoding: chunked", 'ETag: "a"', body=b"4\r\n0123\r\n"),
        response("Content-Length: 6", 'ETag: "a"', "Content-Range: bytes 4-9/10", status="206 Partial", body=b"45"),
        response("Content-Length: 6", 'ETag: "a"', "Content-Range: bytes 6-11/12", status="206 Partial", body=b"678"),
        response("Content-Length: 6", body=b"second"),
    )
    assert content == b"second"
    assert len(requests) == 4


def test_slow_server(tmp_path, no_waiting, monkeypatch):
    """The limits are on waiting for a byte, on the headers, and on the rate. The total time is not limited."""
    monkeypatch.setattr(module, "_MAX_FAILURES", 2)
    monkeypatch.setattr(module, "STALL_SECONDS", 0.2)
    headers, content = response("Content-Length: 100", body=b""), b"x" * 100
    with pytest.raises(UserError, match="the headers did not arrive within 0 seconds"):
        fetch(tmp_path, (b"", headers, 0.05))
    with pytest.raises(UserError, match="timed out"):
        fetch(tmp_path, (headers, content, 0.5))
    with pytest.raises(UserError, match=r"only \d+ bytes arrived in 0 seconds"):
        fetch(tmp_path, (headers, content, 0.02))
    monkeypatch.setattr(module, "_STALL_BYTES", 5)
    assert fetch(tmp_path, (headers, content, 0.005))[0] == content


def test_checksum_mismatch_keeps_other_files(tmp_path):
    (tmp_path / "other").write_text("other")
    with pytest.raises(UserError, match="the download was removed"):
        fetch(tmp_path, response("Content-Length: 7"), checksum=f"#sha256={'0' * 64}")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
