"""A stream of random numbers of one's own."""

import random

import numpy as np
import pytest
import torch

from trawl.collectors import Collector
from trawl.envs.generators import RandomStream


def draw():
    """One number of each global generator."""
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def draws(stream, count=3):
    found = []
    for _ in range(count):
        with stream.turn():
            found.append(draw())
    return found


def test_a_stream_depends_on_its_seed_alone():
    stream, expected = RandomStream(5), draws(RandomStream(5))
    with stream.turn():
        assert [draw() for _ in range(3)] == expected
    other = draws(RandomStream(6))
    assert not {x for row in expected for x in row} & {x for row in other for x in row}
    first, second, found = RandomStream(5), RandomStream(6), []
    for _ in range(3):
        draw()
        found.append((*draws(first, 1), *draws(second, 1)))
    assert [list(rows) for rows in zip(*found, strict=True)] == [expected, other]


def seed_all():
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def test_drawing_within_changes_nothing_outside_even_after_an_error():
    seed_all()
    expected = [draw() for _ in range(4)]
    seed_all()
    stream, found = RandomStream(5), []
    for _ in range(3):
        draws(stream)
        found.append(draw())
    with pytest.raises(ZeroDivisionError), stream.turn():
        draw()[0] // 0
    assert [*found, draw()] == expected


def noisy(observation):
    """Draws from each of the generators that a policy may use."""
    return torch.rand(1) + float(np.random.rand()) + random.random() - 2.0


def test_collectors_that_take_turns_collect_as_if_they_were_alone():
    def collector(seed):
        made = Collector("Pendulum-v1", noisy, frames_per_batch=20)
        made.set_seed(seed)
        return made

    with collector(1) as first, collector(2) as second:
        mixed = [
            (a.clone(), b.clone()) for a, b in ((first.next(), second.next()) for _ in range(3))
        ]
    for index, seed in enumerate([1, 2]):
        with collector(seed) as alone:
            for pair in mixed:
                assert (alone.next() == pair[index]).all()
