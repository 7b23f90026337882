"""The file that a benchmark writes with `--json`."""

import json
from pathlib import Path


def write_json(path: Path, content: object) -> None:
    """Write the content as JSON, and create the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
