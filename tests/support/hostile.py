"""Hostile values and files of many kinds, and what a safe HTML report may not have."""

import html.parser
import tarfile
from typing import Any

import torch

from tests.support.records import passkey_record, record

WRONG_VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1e308, float("inf"), float("nan"), 0.5, "", "abc", "\0", "\x1b[31m"),
    *("../../escaped", "/dev/zero", "x" * 300, "\ud800", "global_step300", [], {}, [[]], [1, "a", None], {"a": {}}),
]
# Names of members of archives.
MEMBER_NAMES = [
    *(
        "../escaped",
        "../escaped.jsonl",
        "/etc/passwd",
        "/dev/zero",
        "/tmp/escaped.txt",
        "a\0b",
        "",
        ".",
        "..",
        "x" * 300,
    ),
    *("a\nb", "\x1b[2J", "é", "-rf", "nested.tar", "nested.zip", "a.parquet", "a.json", "run", "run/ab"),
]
# Each of these would execute, include or draw something if it were not escaped.
NAMES = (
    '"><img src=x onerror=alert(1)>',
    "<script>alert(1)</script>",
    "</title><script>alert(1)</script>",
    "'><svg onload=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "]]><!-- &lt;b&gt; &#60;",
    "a|b *c* _d_ `e` [f](javascript:alert(1)) <b>",
    "$x$ $\\frac{$ \\frac{ $$ ^_",
    "\\input{/etc/passwd} \\write18{id} % & # ~ ^ { }",
    '=cmd|"/c calc"!A1',
    "../../../../tmp/hostile",
    "/etc/passwd",
    ".",
    "-rf",
    "[bold red]rich[/] [/link]",
    "ünïcödé 漢字 عربى 🎉",
    "x" * 4000,
    "",
    " ",
)
# Scalars in YAML's own notation.
YAML_SCALARS = (
    ".inf", "-.inf", ".nan", "1e999", "-1e999", "0x" + "f" * 5000, "9" * 5000, "0b101", "0o17", "017", "1_000", "1:30",
    "!!int abc", "!!int '1'", "!!float x", "!!bool maybe", "!!null x", "!!str 5", "!!set {a}", "!!binary YWJj",
    "!!timestamp 2026-01-01", "!!omap [a: 1]", "!!pairs [a: 1]", "!!python/object/apply:os.system [ls]",
    "!!python/name:os.system", "!own 1", "&a [*a]", "*nowhere", "&a 1", "'", '"', '"\\0"', '"\\ud800"', "|", ">", "?",
    "-", "[", "{", "]", "}", "#", "@", "`", "%", "=", "<<", "yes", "~", "2026-01-01", "[" * 1000, "{a: " * 200,
    "'" + "x" * 100_000 + "'", "[" + "1, " * 20_000 + "]",
)  # fmt: skip
_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + previous] * 9)}]\n"
    for previous, name in zip("abcdefgh", "bcdefghi", strict=True)
)
# Whole files.
YAML_FILES: tuple[bytes, ...] = (
    b"", b"\0", b"\xff\xfe{}", b"\xef\xbb\xbf", b"---\n---\n", b"null", b"[]", b"1", b"{}", b"{}{}",
    b"%YAML 9.9\n---\n{}", b"a: 1\n\tb: 2", b"\x80", b"{1: 2}", b"{null: 1}", b"{[a]: 1}",
    b"{<<: 1}", b"{<<: [{seed: 1}, {seed: 2}]}",
    b"a: &a {b: *a}", b"? ? ? ? a", b"- " * 1000, b"[" * 100_000, b"{" * 100_000, b"x" * 2_000_000, b"a: 1\n" * 1000,
    b"\n" * 999_999, _BOMB.encode(), _BOMB.replace("[", "{<<: [").replace("]", "]}").encode(),
    _BOMB.replace("a: &a", "pos-emb-options: &a", 1).encode(),
    "\n".join(f"key_{index}: {index}" for index in range(20_000)).encode(),
)  # fmt: skip
YAML_KEYS = (
    "", " ", ".", "a.b", "x" * 1000, "x" * 100_000, "\0", "\x1b[31m", "é", "SEED", "Seed", "seed ", "--seed", "*", "..",
    "api_key", "optimizer.params.lr", "fp16.enabled", "__class__", "model", "_flat", "num-layers", "num_layers",
)  # fmt: skip
# Lines of a JSON lines file.
JSON_LINES = (
    b"[]", b"1", b"null", b'"text"', b"{}", b'{"text": null}', b'{"text": ["a", "b"]}', b'{"text": {"a": 1}}',
    b'{"text": "\\ud800"}', b'{"text": "\\u0000\\u001b[31m"}', b'{"text": "a", "text": "b"}', b'{"text": "a"',
    b"{'text': 'a'}", b'{"text": "\xff\xfe"}', b'\xef\xbb\xbf{"text": "a"}', b"[" * 100_000, b'{"a":' * 100_000,
    b'{"text": 1e999}', b'{"text": ' + b"9" * 5000 + b"}", b'{"text": NaN}', b"\0" * 100, b"", b" " * 1000, b"\r",
    b'{"text": "a", "meta": {"pile_set_name": []}}', b'{"text": "' + b"x" * 300_000 + b'"}',
)  # fmt: skip
# Parts of an HTTP server's responses, and the paths of its URLs.
_BODY = b"A text to download. " * 500
HTTP_HEADERS = (
    b"Content-Length: %d" % len(_BODY), b"Content-Length: -5", b"Content-Length: 99999999999999999999",
    b"Content-Length: abc", b"Content-Length: 20000\r\nContent-Length: 5", b"Content-Range: bytes 0-9/10",
    b"Content-Range: bytes 99999999999999999999-1/0", b"ETag: \x1b[31m", b"Last-Modified: never",
    b"Content-Encoding: gzip", b"Transfer-Encoding: chunked", b"Location: file:///etc/passwd", b"Location: /again",
    b"Location: http://127.0.0.1:1/", b"Location: ftp://[::1", b"Connection: x" * 9000, b"no colon", b": empty",
    b"Retry-After: 99999999",
)  # fmt: skip
HTTP_STATUSES = (
    *(b"HTTP/1.1 %d \x1b[31mtext" % status for status in (200, 200, 206, 302, 404, 416, 429, 500, 999, 204, 100)),
    *(b"HTTP/9.9 200 OK", b"", b"garbage", b"HTTP/1.1 200 " + b"x" * 70_000, b"\x16\x03\x01\x02"),
)
HTTP_BODIES = (
    *(_BODY, _BODY, _BODY[:50], _BODY * 3, b"", b"5\r\nhello\r\n0\r\n\r\n", b"-5\r\nx", b"FFFFFFFFFFFFFFFFFF\r\nx"),
)
URL_PATHS = (
    "a.txt", "a.txt", "..%2f..%2fescaped.txt", "%00.txt", "%1b[31m.txt", "x" * 300 + ".txt", "a.txt#sha256=00", "",
    "é.txt", "a.txt?key=secret", "a.txt#sha256=" + "0" * 64, "a\tb.txt", "%ff.txt",
)  # fmt: skip
# Opcodes that Python's or torch's unpickler would execute, or for which it would allocate memory.
OPCODES = (
    b"cos\nsystem\n(S'touch executed'\ntR", b"cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x04\x85R",
    b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R", b"ctorch._utils\n_rebuild_tensor_v2\n)R",
    b"ctorch._utils\n_rebuild_sparse_tensor\n)R", b"ccollections\nCounter\nJ\xff\xff\xff\x7f\x85R",
    b"ctorch\nSize\n(J\xff\xff\xff\x7ftR", b"]" * 10**6, b"(" * 10**6, b"r\xff\xff\xff\xff", b"j\xff\xff\xff\xff",
    b"X\xff\xff\xff\xffa", b"\x8a\xff" + b"\x7f" * 255, b"\x8b\xff\xff\xff\x7f", b"I" + b"9" * 5000 + b"\n", b"Q", b"0",
    b"b", b"u", b"\x80\x05", b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f", b"].", b"K\x01.", b"N.", b"}]]]s.",
)  # fmt: skip


def hostile_tensors(tensor: torch.Tensor) -> list[tuple[str, Any]]:
    """Tensors that a model cannot use instead of `tensor`, by name."""
    quantized = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    return [
        ("integer", tensor.to(torch.int64)),
        ("boolean", tensor.bool()),
        ("complex", tensor.to(torch.complex64)),
        ("float8", tensor.to(torch.float8_e4m3fn)),
        ("meta", tensor.to("meta")),
        ("sparse", tensor.to_sparse()),
        ("quantized", quantized),
        ("expanded", torch.ones(1).expand(10**6, 10**6)),
        ("empty", torch.empty(0)),
        ("a scalar", torch.tensor(1.0)),
        ("of another shape", torch.ones(7)),
        ("of 60 dimensions", torch.ones((1,) * 60)),
        ("not finite", torch.full(tensor.shape, float("nan"))),
        ("infinite", torch.full(tensor.shape, float("inf"))),
        ("a parameter", torch.nn.Parameter(torch.ones(tensor.shape))),
    ]


_REGEX = ["(?<a>.)(?<a>.)", "(", "(a+)+$", "\\K", "(?<=a+)b", "[", "\\p{Nope}", "(?R)", "a{100000}{100000}", "\x00"]
HOSTILE_PARTS: list[tuple[str, Any]] = [
    *(
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False})
        for regex in _REGEX
    ),
    *(("normalizer", {"type": "Replace", "pattern": {"Regex": regex}, "content": "x" * 100}) for regex in _REGEX),
    *(
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": text})
        for text in ("", "AAAA", "/////w==", "AQAAAA==", "BAAAAAAAAAA=", "not base64!", "AAQAAP////8AAAAA")
    ),
    ("decoder", {"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
    ("decoder", {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 2**63, "stop": 2**63}]}),
    ("post_processor", {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}),
    ("post_processor", {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
                        "pair": [], "special_tokens": {}}),
    ("truncation", {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5}),
    ("padding", {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "x"}),
    ("added_tokens", [{"id": 2**32 - 1, "content": "<|endoftext|>", "single_word": False, "lstrip": False,
                       "rstrip": False, "normalized": False, "special": True}]),
    ("added_tokens", [{"id": 0, "content": "", "single_word": False, "lstrip": False, "rstrip": False,
                       "normalized": True, "special": True}]),
    ("model", {"type": "Unigram", "unk_id": 7, "vocab": []}),
    ("model", {"type": "Unigram", "unk_id": 0, "vocab": [["<|endoftext|>", float("-1e308")], ["a", 0.0]]}),
    ("model", {"type": "WordPiece", "unk_token": "x", "continuing_subword_prefix": "##",
               "max_input_chars_per_word": 2**62, "vocab": {"<|endoftext|>": 0}}),
    ("model", {"type": "WordLevel", "unk_token": "x", "vocab": {"<|endoftext|>": 2**32 - 1}}),
    ("model", {"type": "BPE", "vocab": {"<|endoftext|>": 2**32 - 1, "a": 5}, "merges": [["a", "b"]]}),
]  # fmt: skip


def write_long_header(target: Any, kind: bytes, size: int) -> None:
    """A tar file whose first header is of type `kind` (x, g: PAX; L, K: GNU long name; S: sparse) with `size` bytes."""
    info = tarfile.TarInfo("run/latest")
    info.type, info.size = kind, size
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    if kind == b"S":  # another sparse header follows, and so on
        header[482] = 1
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
    target.write(bytes(header))
    block = (b"1" * 504 + b"\1" + bytes(7)) if kind == b"S" else b"a" * 512
    for _ in range(size // (512 * 2048)):
        target.write(block * 2048)


class _Page(html.parser.HTMLParser):
    """Collects what a page must not have: scripts, event handlers, external addresses, duplicate ids."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self._ids: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "object", "embed", "base", "form", "svg"):
            self.problems.append(f"element {tag}")
        for name, value in attributes:
            address = value or ""
            if name.startswith("on") or (name in ("src", "href") and not address.startswith(("data:", "#"))):
                self.problems.append(f"{tag} {name}={address[:80]}")
            if name == "id":
                self.problems += [f"id {address!r}"] if address in self._ids or not address.isprintable() else []
                self._ids.add(address)


def page_problem(text: str) -> str | None:
    """Why an HTML report is not safe; None if it is."""
    page = _Page()
    page.feed(text)
    if "script-src 'none'" not in text and "default-src 'none'" not in text:
        page.problems.append("no Content-Security-Policy that forbids scripts")
    return "; ".join(page.problems) or None


def valid_records(name: str = "kerple_log") -> list[dict[str, Any]]:
    """Records of every kind, of two methods, seeds and lengths, with the keys that evaluate.py writes."""
    records = []
    for pos_emb, offset in ((name, 0.0), ("alibi", 0.2)):
        for seed in (1, 2):
            for length in (32, 64):
                loss = 2.0 + offset + seed / 100
                keys: dict[str, Any] = {"segments": 4, "documents": 2, "stderr": 0.1, "bits_per_byte": 1.5}
                keys |= {"targets": "ab", "measurement": "cd", "loss": loss}
                keys |= {"groups": {"tokens": [500, 500], "losses": [loss, loss]}}
                losses = record(pos_emb, length, 8.0 + offset, seed, **keys)
                positions = {"kind": "positions", "edges": [0, 16, 32], "losses": [loss, loss], "counts": [9, 9]}
                resolution = {"kind": "resolution", "texts": 2, "layers": [0.1, 0.2], "resolution": 0.15}
                effective = {"kind": "effective_length", "layers": ["all layers"], "effective_lengths": [[3, 9]]}
                passkey = passkey_record(pos_emb, length, 0.5, 0.4, seed=seed, measurement="ef")
                context = {"kind": "context", "contexts": [8, 16], "differences": [0.2, 0.1], "stderrs": [0.01, None]}
                records += [losses, {**losses, **positions}, {**losses, **resolution}, {**losses, **effective}, passkey]
                records.append({**losses, **context})
    return records
