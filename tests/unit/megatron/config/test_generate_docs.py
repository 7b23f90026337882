"""configs/neox_arguments.md is current and complete."""

from pathlib import Path

from megatron.config import checks
from megatron.config.generate_docs import generate
from megatron.config.loader import FIELDS

ROOT = Path(__file__).parents[4]
DOCUMENT = ROOT / "configs" / "neox_arguments.md"


def test_document_is_current():
    assert DOCUMENT.read_text(encoding="utf-8") == generate(), "run python tools/configs/generate_docs.py"


def test_every_key_is_documented_once():
    lines = generate().splitlines()
    for path in FIELDS:
        assert sum(line.startswith(f"| `{'.'.join(path)}`") for line in lines) == 1
    for key in checks.KNOWN_KEYS:
        assert sum(line.startswith("- ") and f"`{key}`" in line for line in lines) >= 1


def test_types_bounds_defaults_and_aliases_are_shown():
    text = generate()
    assert "| `num_layers` | integer, at least 1, at most 10000 | required | Number of transformer blocks. |" in text
    assert "| `save_interval` or `checkpoint_factor` | number, at least 1 |  |" in text
    assert "| `optimizer.params.betas` | list of 2: number, at least 0, below 1 |  | Decay rates" in text
    assert "| `hidden_dropout` | number, at least 0, below 1 | `0.0` |" in text
    assert '| `lr_decay_style` | `constant`, `linear`, `cosine`, `exponential` | `"linear"` |' in text
    assert "`type:transformer\\|mlp`" in text.replace('"', "")
