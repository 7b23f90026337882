"""The documents of the tokens of each row."""

import pytest
import torch

from kerple.attention import Documents, attend, document_positions, ids_of_sequences
from tests.support.attention import attend_arguments


def test_documents_of_equal_size_are_one_group():
    ids = torch.tensor([[0, 0, 0, 1, 1], [7, 7, 8, 8, 8]])
    sizes = []
    for queries, keys, _ in Documents(ids).groups(q_len=5):
        assert queries.shape == keys.shape
        sizes.append(list(queries.shape))
    # Two documents of two tokens, and two of three.
    assert sorted(sizes) == [[2, 2], [2, 3]]


def test_positions_of_the_queries_count():
    """A cache of attention sinks has a gap between the sinks and the window."""
    positions = torch.tensor([[0, 1, 10, 11, 12, 13]])
    ids = torch.zeros(1, 6).long()
    ((queries, keys, dropped),) = Documents(ids, positions).groups(q_len=2)
    assert queries.tolist() == [[0, 1]]
    assert keys.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert dropped == 8


IDS = torch.tensor([[0, 0, 0, 0, 0], [3, 3, 4, 4, 4]])


@pytest.mark.parametrize(
    "documents",
    [
        Documents(IDS[:1]),
        Documents(IDS),
        Documents(IDS, torch.arange(7, 12).expand(2, -1)),
        Documents(IDS, queries=torch.tensor([2, 3])),
    ],
)
def test_moved_documents(documents):
    """The same queries, keys and positions, also for calls with another number of queries."""
    moved = documents.to(torch.device("cpu"))
    assert moved.fill_rows == documents.fill_rows
    assert (moved.ranges is None) == (documents.ranges is None)
    for q_len in (2, 5) if documents.queries is None else (2,):
        fresh = Documents(documents.ids, documents.positions, documents.queries)
        expected = fresh.groups(q_len)
        found = moved.groups(q_len)
        for (queries, keys, dropped), others in zip(found, expected, strict=True):
            assert queries.tolist() == others[0].tolist()
            assert keys.tolist() == others[1].tolist()
            assert dropped == others[2]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([[0, 0, 1], [1, 1, 1]], [[0, 0, 2], [0, 2, 1], [1, 0, 3]]),
        ([[-1, 0, 0], [2, 2, -1]], [[0, 1, 2], [1, 0, 2]]),
        ([[3, 4, 3]], None),
    ],
)
def test_ranges(ids, expected):
    """Rows end a range, padding is none, and a document with a gap has none."""
    documents = Documents(torch.tensor(ids))
    if expected is None:
        assert documents.ranges is None
        return
    assert documents.ranges.tolist() == expected
    assert Documents(documents.ids, documents.positions).ranges is None
    assert Documents(documents.ids, queries=torch.arange(3)).ranges is None


def test_positions_count_the_tokens_of_a_document():
    ids = torch.tensor([[3, 3, 1, 1, 1, 3], [-1, 0, 0, 2, -1, 2]])
    positions = [[0, 1, 0, 1, 2, 2], [0, 0, 1, 0, 1, 1]]
    assert document_positions(ids).tolist() == positions


def test_ids_of_sequences_with_lengths():
    ends = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert ids_of_sequences(ends).tolist() == [[0, 0, 2, 2, 2]]


LARGEST = torch.iinfo(torch.int64).max


@pytest.mark.parametrize(
    "numbers",
    [
        (0, 1, LARGEST),
        (LARGEST - 1, LARGEST, 2**62),
        (7_046_029_254_386_353_131, 3, 2**63 - 59),
    ],
)
@pytest.mark.parametrize("name", ["alibi", "xpos"])
def test_any_integers_are_ids(numbers, name):
    """Rows with the same ids have documents of their own; a negative id is padding."""
    small = torch.tensor([0, 0, 1, 1, 1, 2, 2, 0, -1]).repeat(4, 1)
    small[2, :2] = 2
    large_ids = torch.tensor([*numbers, -LARGEST - 1])
    arguments = attend_arguments(name, 4, 4, 9, 9, 8)
    of_small = attend(document_ids=small, **arguments)
    of_large = attend(document_ids=large_ids[small], **arguments)
    # All but the padding.
    assert torch.equal(of_small[:, :, :-1], of_large[:, :, :-1])


@pytest.mark.parametrize(
    ("ids", "value"),
    [
        (torch.zeros(2, 8, dtype=torch.int64), "8"),
        (torch.zeros(2, 9), "float32"),
        (torch.zeros(17, dtype=torch.int64), "17"),
    ],
)
def test_ids_that_do_not_fit(ids, value):
    arguments = attend_arguments("alibi", 2, 4, 9, 9, 8)
    with pytest.raises(ValueError, match=rf"document_ids .*{value}"):
        attend(document_ids=ids, **arguments)
