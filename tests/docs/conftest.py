"""Examples may connect to Ray: the next test begins without."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_cluster_is_left() -> Iterator[None]:
    """Ends the connection to Ray that an example has made."""
    yield
    if "ray" in sys.modules:
        from trawl.backends.ray_cluster import disconnect

        disconnect()
