from collections.abc import Iterator

import pytest

from tests.support.checkpoints import write_corpus
from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def data_path(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents=80)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two rank processes, shared by all tests: their imports take longer than most trainings."""
    with Ranks(2) as two_ranks:
        yield two_ranks
