"""A stream of random numbers of one's own."""

import random

import numpy as np
import pytest
import torch

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


def test_a_stream_depends_on_its_seed_alone_and_changes_nothing_outside():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    outside = [draw() for _ in range(4)]
    expected, other = draws(RandomStream(5)), draws(RandomStream(6))
    assert len({x for row in (*expected, *other) for x in row}) == 18
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    first, second, found, drawn = RandomStream(5), RandomStream(6), [], []
    for _ in range(3):
        drawn.append(draw())
        found.append((*draws(first, 1), *draws(second, 1)))
    assert [list(rows) for rows in zip(*found, strict=True)] == [expected, other]
    with pytest.raises(ZeroDivisionError), first.turn():
        draw()[0] // 0
    assert [*drawn, draw()] == outside
