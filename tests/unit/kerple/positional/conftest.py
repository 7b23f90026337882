"""Fixtures for tests of positional methods."""

import pytest


@pytest.fixture
def small_chunks(monkeypatch):
    """Methods with `modify_scores` get chunks of 5 queries, so that results must not depend on the
    chunk.
    """
    for name in ("MODIFY_MIN_ROWS", "MODIFY_MAX_ROWS"):
        monkeypatch.setattr(f"kerple.attention.backends.chunk_plan.{name}", 5)
