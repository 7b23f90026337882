"""A process group of two ranks, simulated in one process: they run one after the other and exchange
pickled objects.
"""

import pickle

import pytest

from megatron.utils import ranks


@pytest.fixture
def as_rank(monkeypatch):
    """Returns as_rank(rank), which makes the process that rank of a group of two; rank 0 must run
    first.
    """
    sent = {}

    def all_gather(outcomes, outcome):
        sent[sent["rank"]] = pickle.dumps(outcome)
        outcomes[:] = [
            pickle.loads(sent.get(rank, pickle.dumps((None, None)))) for rank in range(2)
        ]

    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks.dist, "get_rank", lambda: sent["rank"])
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(ranks.dist, "all_gather_object", all_gather)
    return lambda rank: sent.__setitem__("rank", rank)
