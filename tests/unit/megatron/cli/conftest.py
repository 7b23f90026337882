import pytest

from tests.support.checkpoints import write_corpus
from tests.support.sweeps import sweep  # noqa: F401 (a fixture)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("data"))
