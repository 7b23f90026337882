"""configs/neox_arguments.md is current and complete."""

from pathlib import Path

from megatron.config import checks
from megatron.config.generate_docs import generate
from megatron.config.schema import FIELDS

ROOT = Path(__file__).parents[4]
DOCUMENT = ROOT / "configs" / "neox_arguments.md"


def test_document_is_current():
    assert DOCUMENT.read_text(encoding="utf-8") == generate(), (
        "run python tools/configs/generate_docs.py"
    )


def test_every_key_is_documented_once():
    lines = generate().splitlines()
    for path in FIELDS:
        assert sum(line.startswith(f"| `{'.'.join(path)}`") for line in lines) == 1
    for key in checks.KNOWN_KEYS:
        assert sum(line.startswith("- ") and f"`{key}`" in line for line in lines) == 1
