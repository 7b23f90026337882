"""Exact and near-duplicate documents."""

import random
import sys

import numpy as np
import pytest

from megatron.preparation.deduplication import Deduplicator, shingle_hashes
from megatron.utils.errors import UserError


def shingles(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[start : start + 5]) for start in range(len(words) - 4)}


def random_text(generator: random.Random, words: int = 2000) -> str:
    return " ".join(f"w{generator.randrange(5000)}" for _ in range(words))


def edited(text: str, generator: random.Random, changes: int) -> str:
    words = text.split()
    for position in generator.sample(range(len(words)), changes):
        words[position] = "changed"
    return " ".join(words)


def test_shingles_are_sets_of_five_words():
    generator = random.Random(0)
    first = random_text(generator)
    second = edited(first, generator, 60)
    hashes = [set(shingle_hashes(text.encode()).tolist()) for text in (first, second)]
    # 32-bit hashes of 2,000 shingles: a collision has probability 5e-4, and the seed is fixed.
    assert len(hashes[0]) == len(shingles(first))
    assert len(hashes[0] & hashes[1]) == len(shingles(first) & shingles(second))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("a b c d e", "a  b\n\tc d e", True),
        ("f(x, y);", "f( x,y ) ;", True),
        ("a b c d e", "e d c b a", False),
        ("a b", "a c", False),
        ("", " ", True),
    ],
)
def test_words_and_punctuation(one, other, equal):
    """White space does not count, order does, and short documents have one shingle."""
    hashes = [shingle_hashes(text.encode()) for text in (one, other)]
    assert np.array_equal(*hashes) is equal


def test_exact_and_near_duplicates():
    generator = random.Random(1)
    first, second = random_text(generator), random_text(generator)
    slightly, heavily = edited(first, generator, 40), edited(first, generator, 600)
    similarity = [
        len(shingles(first) & shingles(text)) / len(shingles(first) | shingles(text)) for text in (slightly, heavily)
    ]
    assert similarity[0] > 0.8
    assert similarity[1] < 0.2
    deduplicator = Deduplicator()
    decisions = [deduplicator.is_new(text.encode()) for text in (first, second, first, slightly, heavily, slightly)]
    # A removed near-duplicate that comes again is an exact duplicate.
    assert decisions == [True, True, False, False, True, False]
    assert str(deduplicator.counts) == "6 documents: 2 exact duplicates and 1 near-duplicates removed, 3 kept"


def test_pairs_are_found_by_similarity():
    """A change replaces five of 2,000 shingles, so 40 changes leave a similarity of 0.82, and 300 of less than 0.35."""
    generator = random.Random(2)
    found = {40: 0, 300: 0}
    for changes in found:
        for _ in range(30):
            deduplicator = Deduplicator()
            text = random_text(generator)
            assert deduplicator.is_new(text.encode())
            found[changes] += not deduplicator.is_new(edited(text, generator, changes).encode())
    assert found == {40: 30, 300: 0}


def test_results_are_the_same_everywhere():
    """Pinned, because the corpora of megatron.preparation.debian depend on these values."""
    assert shingle_hashes(b"int main(void)").tolist() == [842215148]
    deduplicator = Deduplicator()
    deduplicator.is_new(b"int main(void) { return 0; }")
    assert deduplicator._signatures[0][:3].tolist() == [309856390, 1901442119, 330517539]


def test_errors(monkeypatch):
    with pytest.raises(UserError, match="threshold 0 is not between 0 and 1"):
        Deduplicator(0)
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(UserError, match="datasketch"):
        Deduplicator()
