"""One seed, many streams."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trawl.envs.seeding import check_seed, derive, next_seed

seeds = st.integers(0, 2**32 - 1)
paths = st.lists(st.integers(0, 2**31) | st.text("abé", max_size=5), min_size=1, max_size=3)


@given(seed=seeds, path=paths)
def test_equal_paths_give_equal_seeds(seed, path):
    assert derive(seed, *path) == derive(seed, *path)
    assert 0 <= derive(seed, *path) < 2**32


def test_seeds_are_the_same_on_every_machine():
    assert derive(12, "policy") == 1684568564
    assert derive(0, "torch") == 1670228095
    assert derive(0, "worker", 3) == 50163198


@given(seed=seeds)
def test_paths_lead_to_other_seeds(seed):
    found = [derive(seed, name, i) for name in ("torch", "numpy") for i in range(20)]
    assert len(set(found)) == len(found)


def test_a_chain_of_seeds_does_not_repeat():
    chain = [5]
    for _ in range(1000):
        chain.append(next_seed(chain[-1]))
    assert len(set(chain)) == len(chain)


def test_a_static_seed_stays():
    assert next_seed(5, static_seed=True) == 5


@pytest.mark.parametrize("seed", [0, 3, 2**63])
def test_a_seed_may_be_any_natural_number(seed):
    assert check_seed(seed) == seed
    assert isinstance(derive(seed, "x"), int)
