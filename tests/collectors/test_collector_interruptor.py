import pytest
import torch
from collector_parts import Buffer, layout

from trawl.collectors import Collector
from trawl.testing import NumberedEnv

TRAJ_IDS = ("collector", "traj_ids")


class StopEvery:
    """Says stop each time it has been asked ``times`` times."""

    def __init__(self, times):
        self.times = times
        self.asked = 0

    def collection_stopped(self):
        self.asked += 1
        return self.asked % self.times == 0


def test_an_interrupted_batch_keeps_its_shape():
    with Collector(
        NumberedEnv(lengths=[2]), frames_per_batch=8, interruptor=StopEvery(3)
    ) as collector:
        batch = next(iter(collector))
        assert layout(batch) == layout(collector.fake_tensordict())
    assert batch[TRAJ_IDS].tolist() == [0, 0, 1, -1, -1, -1, -1, -1]
    assert batch["next", "reward"][:, 0].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


def test_the_last_step_taken_is_marked_as_truncated():
    with Collector(
        NumberedEnv(lengths=[100]), frames_per_batch=6, interruptor=StopEvery(4), set_truncated=True
    ) as collector:
        batch = next(iter(collector))
    assert batch["next", "truncated"][:, 0].tolist() == [False] * 3 + [True] + [False] * 2


def test_rows_without_a_step_are_no_trajectory():
    with pytest.warns(UserWarning, match=r"split_trajs"):
        collector = Collector(
            NumberedEnv(lengths=[2]), frames_per_batch=8, interruptor=StopEvery(3), split_trajs=True
        )
    with collector:
        batch = next(iter(collector))
    assert batch["collector", "mask"].tolist() == [[True, True], [True, False]]


def test_rows_without_a_step_do_not_reach_the_buffer():
    buffer = Buffer()
    with Collector(
        NumberedEnv(lengths=[100]),
        frames_per_batch=8,
        total_frames=16,
        replay_buffer=buffer,
        interruptor=StopEvery(3),
    ) as collector:
        assert list(collector) == [None] * 6
    assert buffer.content()["next", "reward"][:, 0].tolist() == list(range(1, 19))


def test_single_steps_are_interrupted_too():
    buffer = Buffer()
    with Collector(
        NumberedEnv(),
        frames_per_batch=8,
        replay_buffer=buffer,
        extend_buffer=False,
        interruptor=StopEvery(3),
    ) as collector:
        collector.next()
        assert len(buffer) == 3
        collector.next()
        assert len(buffer) == 6


def test_an_error_of_the_interruptor_closes_the_collector():
    def broken():
        raise LookupError("no signal")

    collector = Collector(NumberedEnv(), frames_per_batch=8, interruptor=broken)
    with pytest.raises(LookupError, match=r"no signal"):
        next(iter(collector))
    assert collector.closed


def test_with_ragged_observations_an_interrupted_batch_is_shorter_or_padded():
    # Whichever it is: what was stepped is there, and nothing else has a trajectory.
    from trawl.testing import RaggedEnv

    with Collector(RaggedEnv(), frames_per_batch=8, interruptor=StopEvery(3)) as collector:
        batch = next(iter(collector))
    ids = batch[TRAJ_IDS]
    assert ids[:3].tolist() == [0, 0, 0]
    assert (ids[3:] == -1).all()
    assert torch.equal(batch["next", "reward"][:3, 0], torch.tensor([1.0, 2.0, 3.0]))
