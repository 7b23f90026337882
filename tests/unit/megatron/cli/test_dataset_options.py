"""Options of the dataset tools."""

from megatron.cli.dataset_options import split_paths, split_words


def test_split_words():
    assert split_words(["a,b", "c", ",d,"]) == ["a", "b", "c", "d"]


def test_paths_are_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("CORPUS", "books")
    assert split_paths(["~/a,$CORPUS/b", "c~"]) == ["/home/me/a", "books/b", "c~"]
