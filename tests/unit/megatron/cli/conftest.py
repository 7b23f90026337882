import pytest

from tests.support.checkpoints import settings_of, write_checkpoint, write_corpus, write_yaml
from tests.support.sweeps import sweep  # noqa: F401 (a fixture)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, data):
    """Method -> (folder, model)."""
    folders = {
        method: tmp_path_factory.mktemp(method) for method in ("kerple_log", "alibi", "learned")
    }
    return {
        method: (folder, write_checkpoint(folder, method, data))
        for method, folder in folders.items()
    }


@pytest.fixture
def configuration(tmp_path, data, checkpoints):
    """Writes a configuration of the kerple_log checkpoint, with further keys, and
    returns its path.
    """

    def write(**keys):
        settings = settings_of("kerple_log", data, load=str(checkpoints["kerple_log"][0]))
        return str(write_yaml(tmp_path / "all.yml", {**settings, **keys}))

    return write
