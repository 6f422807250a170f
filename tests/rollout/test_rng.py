"""A stream of random numbers of one's own."""

import random

import numpy as np
import pytest
import torch

from trawl.collectors import Collector
from trawl.rollout.rng import RandomStream


def draw():
    """One number of each global generator."""
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def draws(stream, count=3):
    found = []
    for _ in range(count):
        with stream.turn():
            found.append(draw())
    return found


def test_equal_seeds_give_equal_streams():
    assert draws(RandomStream(5)) == draws(RandomStream(5))


def test_other_seeds_give_other_streams():
    first, second = draws(RandomStream(5)), draws(RandomStream(6))
    assert not {x for row in first for x in row} & {x for row in second for x in row}


def test_a_stream_goes_on_over_its_turns():
    stream = RandomStream(5)
    with stream.turn():
        together = [draw() for _ in range(3)]
    assert draws(RandomStream(5)) == together


def test_drawing_outside_changes_nothing_within():
    stream, expected = RandomStream(5), draws(RandomStream(5))
    found = []
    for _ in range(3):
        draw()
        found += draws(stream, 1)
    assert found == expected


def test_drawing_within_changes_nothing_outside():
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = [draw() for _ in range(3)]
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    stream = RandomStream(5)
    found = []
    for _ in range(3):
        draws(stream)
        found.append(draw())
    assert found == expected


def test_the_outside_is_restored_after_an_error():
    stream = RandomStream(5)
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    with pytest.raises(ZeroDivisionError), stream.turn():
        torch.rand(()).item() // 0
    assert torch.rand(()) == expected


def test_streams_take_turns_without_touching_each_other():
    first, second = RandomStream(1), RandomStream(2)
    found = [draws(stream, 1) for _ in range(3) for stream in (first, second)]
    assert [x for (x,) in found[::2]] == draws(RandomStream(1))
    assert [x for (x,) in found[1::2]] == draws(RandomStream(2))


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
