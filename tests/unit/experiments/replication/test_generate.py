"""The command line of the page generator."""

import pytest

from experiments.replication import generate
from megatron.utils.errors import UserError


def test_a_folder_without_results_is_named_before_pages_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    with pytest.raises(UserError, match=r"results\.jsonl"):
        generate.main([str(tmp_path / "nowhere")])
    assert not list(tmp_path.iterdir())
