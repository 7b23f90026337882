"""transformers' own tests of causal language models and of generation, on exported models.

The package on PyPI does not contain them. Run them with a checkout of transformers at the tag of the installed version:

    pip install parameterized
    TRANSFORMERS_CHECKOUT=~/transformers python -m pytest -m slow tests/integration/test_transformers_mixins.py
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kerple.positional import method_class
from megatron.convert.sources import self_contained_files

CHECKOUT = os.environ.get("TRANSFORMERS_CHECKOUT")
TESTS = Path(__file__).parents[1] / "support/mixins_of_transformers.py"

# Method -> tests that fail, with the reason in docs/huggingface.md.
FAILURES: dict[str, set[str]] = {
    "kerple_log": {"test_custom_4d_attention_mask"},
    "kerple_power_ap_ap": {"test_custom_4d_attention_mask"},
    "alibi": {"test_custom_4d_attention_mask"},
    "fire": set(),
    "dape_kerple": set(),
}


@pytest.mark.slow
@pytest.mark.skipif(CHECKOUT is None, reason="set TRANSFORMERS_CHECKOUT to a checkout of transformers")
@pytest.mark.parametrize("pos_emb", FAILURES)
def test_mixins(pos_emb, tmp_path):
    for name in ("tests", "src", "utils"):
        (tmp_path / name).symlink_to(Path(CHECKOUT or "").expanduser() / name)
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported/__init__.py").touch()
    for name, text in self_contained_files(method_class(pos_emb)).items():
        (tmp_path / "exported" / name).write_text(text)
    options = {"method": pos_emb, "supports_sdpa": pos_emb in ("kerple_log", "alibi")}
    (tmp_path / "options.json").write_text(json.dumps(options))
    (tmp_path / "test_exported.py").write_text(TESTS.read_text())
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "test_exported.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    # -m adds the folder to the path, before our own tests.
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    print(pos_emb, result.stdout.strip().splitlines()[-1])  # the counts, with -s
    failed = set(re.findall(r"^(?:SUB)?FAILED.*::(\w+)", result.stdout, flags=re.MULTILINE))
    assert re.search(r"\d+ passed", result.stdout), result.stdout[-3000:] + result.stderr[-3000:]
    assert failed == FAILURES[pos_emb], result.stdout[-3000:]
