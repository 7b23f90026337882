import pytest

from tests.support.checkpoints import write_corpus


@pytest.fixture(scope="session")
def data_path(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents=80)
