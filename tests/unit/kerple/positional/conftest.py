"""Methods that make the scores themselves are tried in chunks of a few queries."""

import pytest


@pytest.fixture
def small_chunks(monkeypatch):
    for name in ("FEWEST_ROWS", "MOST_ROWS"):
        monkeypatch.setattr(f"kerple.attention.backends.adaptive.{name}", 5)
