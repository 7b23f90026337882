from tests.support.sweeps import sweep  # noqa: F401 (a fixture)
