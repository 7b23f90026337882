"""The command line of the page generator."""

from experiments.replication import generate
from tests.support.errors import assert_rejected


def test_a_folder_without_results_is_named_before_pages_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert_rejected(r"results\.jsonl", generate.main, [str(tmp_path / "nowhere")])
    assert not list(tmp_path.iterdir())
