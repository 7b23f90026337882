from tests.support.simulated_ranks import as_rank  # noqa: F401 (a fixture)
