"""BibTeX entries of the papers of positional methods, from `references.yml`."""

import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import yaml

from kerple.positional.registry import method_class, registered_names

FILE = Path(__file__).with_name("references.yml")


@cache
def papers() -> dict[str, tuple[str, str, int]]:
    """arXiv number -> (authors, title, year)."""
    return {number: tuple(entry) for number, entry in yaml.safe_load(FILE.read_text(encoding="utf-8")).items()}


def arxiv_number(pos_emb: str) -> str | None:
    """The number in the docstring of the method's module: in the line that starts with its name, or else the first one.

    None for a method that is not registered, or without a paper.
    """
    plain = pos_emb.partition(" (")[0]
    if plain not in registered_names() or plain == "learned":
        return None
    text = sys.modules[method_class(plain).__module__].__doc__ or ""
    number = r".*?arXiv (\d{4}\.\d{5})"
    found = re.search(rf"^ +{re.escape(plain)}\b{number}", text, re.MULTILINE) or re.search(number, text, re.DOTALL)
    return found[1] if found else None


def bibtex(pos_embs: Iterable[str]) -> str:
    """An entry for each paper of these methods, in their order; empty if there is none."""
    entries = []
    for number in dict.fromkeys(map(arxiv_number, pos_embs)):
        if number in papers():
            authors, title, year = papers()[number]
            name = re.sub(r"\W", "", authors.partition(",")[0].lower())
            fields = {"author": authors, "title": f"{{{title}}}", "year": year, "eprint": number}
            lines = [f"  {key} = {{{value}}},\n" for key, value in {**fields, "archivePrefix": "arXiv"}.items()]
            entries.append(f"@misc{{{name}{year}_{number.replace('.', '_')},\n{''.join(lines)}}}\n")
    return "\n".join(entries)
