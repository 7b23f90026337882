"""Options of the dataset tools."""

from megatron.cli.dataset_options import split_inputs, split_words


def test_split_words():
    assert split_words(["a,b", "c", ",d,"]) == ["a", "b", "c", "d"]


def test_split_inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b.txt").touch()
    assert split_inputs(["a,b.txt", "c,d"]) == ["a,b.txt", "c", "d"]
