"""Methods that make the scores themselves are tried in chunks of a few queries."""

import pytest


@pytest.fixture
def small_chunks(monkeypatch):
    for name in ("MODIFY_MIN_ROWS", "MODIFY_MAX_ROWS"):
        monkeypatch.setattr(f"kerple.attention.backends.chunked.{name}", 5)
