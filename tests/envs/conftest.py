"""Fixtures for tests of environments."""

import pytest


@pytest.fixture
def opened():
    """Makes environments that are closed at the end, whatever comes."""
    envs = []

    def make(cls, *args, **options):
        envs.append(cls(*args, **options))
        return envs[-1]

    yield make
    for env in envs:
        env.close(raise_if_closed=False)
