import pytest
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


@pytest.mark.parametrize(("extend", "frames"), [(True, 18), (False, 16)])
def test_rows_without_a_step_do_not_reach_the_buffer(extend, frames):
    """Single steps end exactly at the total."""
    buffer = Buffer()
    options = {"frames_per_batch": 8, "total_frames": 16, "interruptor": StopEvery(3)}
    with Collector(
        NumberedEnv(lengths=[100]), replay_buffer=buffer, extend_buffer=extend, **options
    ) as collector:
        collector.next()
        assert len(buffer) == 3
        assert list(collector) == [None] * 5
    assert buffer.content()["next", "reward"][:, 0].tolist() == list(range(1, frames + 1))
