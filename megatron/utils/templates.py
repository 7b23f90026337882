"""Jinja templates, which are files of this package."""

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape


def templates(package: str) -> Environment:
    """The templates in a package. HTML escapes all values; a missing value is an error."""
    return Environment(
        loader=PackageLoader(package, ""),
        autoescape=select_autoescape(("html.j2",)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
