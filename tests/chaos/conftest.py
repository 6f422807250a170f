"""A check that the chaos tests share."""

from collections.abc import Iterator

import pytest
from chaos_parts import family, runs


@pytest.fixture
def nobody_is_left() -> Iterator[None]:
    """Checks that a test leaves no process, except the server process that starts workers."""
    before = set(family())
    yield
    # The server process may not have waited yet for workers that ended, which are zombies then.
    left = [pid for pid in set(family()) - before if runs(pid)]
    assert len(left) <= 1, "there is more than the process that workers come from"
