"""Hostile values and files of many kinds, and what a safe HTML report may not have."""

import html.parser
from typing import Any

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
