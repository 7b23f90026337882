"""Exact and near-duplicate documents."""

import random

from experiments.corpora.deduplication import Deduplicator, shingle_hashes


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


def test_exact_and_near_duplicates():
    generator = random.Random(1)
    first, second = random_text(generator), random_text(generator)
    slightly, heavily = edited(first, generator, 40), edited(first, generator, 600)
    similarity = [
        len(shingles(first) & shingles(text)) / len(shingles(first) | shingles(text))
        for text in (slightly, heavily)
    ]
    assert similarity[0] > 0.8
    assert similarity[1] < 0.2
    deduplicator = Deduplicator()
    decisions = [
        deduplicator.is_new(text.encode())
        for text in (first, second, first, slightly, heavily, slightly)
    ]
    # A removed near-duplicate that comes again is an exact duplicate.
    assert decisions == [True, True, False, False, True, False]
    assert (
        str(deduplicator) == "6 documents: 2 exact duplicates and 1 near-duplicates removed, 3 kept"
    )


def test_results_are_the_same_everywhere():
    """Pinned, because the corpora of experiments.corpora.debian depend on these values."""
    assert shingle_hashes(b"int main(void)").tolist() == [842215148]
    deduplicator = Deduplicator()
    deduplicator.is_new(b"int main(void) { return 0; }")
    assert deduplicator._signatures[0][:3].tolist() == [309856390, 1901442119, 330517539]
