"""A check that the tests of chaos share."""

from collections.abc import Iterator

import pytest
from chaos_parts import family, runs


@pytest.fixture
def nobody_is_left() -> Iterator[None]:
    """What a test started is gone after it, but for the process that workers come from."""
    before = set(family())
    yield
    # Of what has ended, that process may not have been told yet.
    left = [pid for pid in set(family()) - before if runs(pid)]
    assert len(left) <= 1, "there is more than the process that workers come from"
