"""Calling functions on the ranks of a simulated process group."""

import pytest

from megatron.utils.errors import UserError
from megatron.utils.ranks import agree, run_on_all_ranks, run_on_rank_0


class DataError(UserError):
    pass


def fail(error):
    raise error


def test_single_process():
    assert run_on_rank_0(lambda: 3) == 3
    assert run_on_all_ranks(lambda: 3) == [3]
    with pytest.raises(KeyError):
        run_on_rank_0(lambda: fail(KeyError("x")))


def test_rank_0_computes_for_all(as_rank):
    as_rank(0)
    assert run_on_rank_0(lambda: [1, 2]) == [1, 2]
    as_rank(1)
    assert run_on_rank_0(lambda: fail(AssertionError("called on rank 1"))) == [1, 2]


@pytest.mark.parametrize(
    ("error", "reported_class", "message"),
    [
        (DataError("no space"), DataError, "^no space$"),
        (
            ZeroDivisionError("division\nby zero"),
            UserError,
            "^ZeroDivisionError on another rank: division$",
        ),
    ],
)
def test_all_ranks_raise_the_error_of_rank_0(as_rank, error, reported_class, message):
    as_rank(0)
    with pytest.raises(type(error)) as raised:
        run_on_rank_0(lambda: fail(error))
    assert raised.value is error
    assert not getattr(error, "printed_by_other_rank", False)
    as_rank(1)
    with pytest.raises(reported_class, match=message) as raised:
        run_on_rank_0(lambda: None)
    assert type(raised.value) is reported_class
    assert raised.value.printed_by_other_rank


def test_all_ranks_return_all_values(as_rank):
    as_rank(0)
    run_on_all_ranks(lambda: "a")
    as_rank(1)
    assert run_on_all_ranks(lambda: "b") == ["a", "b"]


def test_a_rank_fails_if_another_one_does(as_rank):
    as_rank(0)
    unpicklable = object.__subclasses__
    assert agree(lambda: (unpicklable, print)) == (unpicklable, print)
    with pytest.raises(DataError):
        agree(lambda: fail(DataError("damaged")))
    as_rank(1)
    with pytest.raises(DataError, match="damaged"):
        agree(lambda: 3)


@pytest.mark.parametrize("texts", [("damaged", "damaged"), ("rank 0", "rank 1")])
def test_the_same_error_on_several_ranks_is_printed_once(as_rank, texts):
    printed = []
    for rank, text in enumerate(texts):
        as_rank(rank)
        with pytest.raises(DataError, match=text) as raised:
            run_on_all_ranks(lambda text=text: fail(DataError(text)))
        if not raised.value.printed_by_other_rank:
            printed.append(text)
    assert printed == list(dict.fromkeys(texts))
