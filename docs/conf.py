"""Sphinx configuration of the documentation site (`make docs`).

The sources are Markdown files of the whole repository, whose links also work on GitHub. README.md
is the first page.
"""

from sphinx.application import Sphinx

project = "KERPLE-NeoX"
root_doc = "README"
exclude_patterns = [".*", "data", "runs", "site", "docs/templates"]
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "configs/*.md",
    "docs/**",
    "experiments/**/*.md",
]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_theme = "furo"
html_title = project
templates_path = ["templates"]
html_additional_pages = {"index": "redirect.html"}
default_role = "code"
myst_enable_extensions = ["html_image"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "imported-members": True, "show-inheritance": True}

CONTENTS = {
    "Usage": [
        "docs/tutorial",
        "docs/versions",
        "configs/README",
        "docs/data",
        "docs/checkpoints",
        "docs/evaluation",
        "docs/experiments",
        "docs/monitoring",
        "docs/huggingface",
        "docs/clusters",
        "docs/troubleshooting",
        "configs/neox_arguments",
    ],
    "Methods": [
        "docs/positional-methods",
        "docs/adding-a-method",
        "docs/standalone",
        "docs/transformers",
        "docs/api",
    ],
    "Results": [
        "docs/results/README",
        "docs/results/bytes",
        "docs/results/long-context",
        "docs/results/retrofit",
        "docs/results/replication",
        "docs/results/recall",
        "docs/results/full-scale",
        "experiments/corpora/README",
        "experiments/bytes/README",
        "experiments/retrofit/README",
        "experiments/long_context/README",
        "docs/chomsky",
        "docs/benchmarks/cpu",
        "docs/benchmarks/gpu",
        "docs/reliability",
    ],
    "Development": ["docs/ARCHITECTURE", "CONTRIBUTING", "CHANGELOG"],
}


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Append the table of contents to the first page, which has none on GitHub."""
    if name == root_doc:
        for caption, pages in CONTENTS.items():
            source[0] += "\n".join(
                ["\n```{toctree}", ":hidden:", f":caption: {caption}", *pages, "```\n"]
            )


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
