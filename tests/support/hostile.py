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
