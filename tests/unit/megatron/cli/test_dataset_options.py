"""Options of the dataset tools."""

from megatron.cli.dataset_options import split_words


def test_split_words():
    assert split_words(["a,b", "c", ",d,"]) == ["a", "b", "c", "d"]
