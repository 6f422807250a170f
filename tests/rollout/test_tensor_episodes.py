"""Trajectory ids that are written for a whole batch, compared with those written step by step."""

import numpy as np
import pytest

from trawl.rollout.episodes import BatchEpisodeTracker, EpisodeTracker


@pytest.mark.parametrize("share", [0, 0.02, 0.6, 1])
def test_ids_are_those_of_single_steps(share: float) -> None:
    rng = np.random.default_rng(1)
    one, other = EpisodeTracker(5, None), BatchEpisodeTracker(5)
    for tracker in (one, other):
        tracker.load(7, stride=3)
    for _ in range(3):
        done = rng.random((40, 5)) < share
        skipped = (rng.random((40, 5)) < 0.1) & ~done
        np.testing.assert_array_equal(
            other.number(done, done & False), one.number(done, done & False)
        )
        assert other.state_dict()["ids"] == one.state_dict()["ids"]
        assert other.next_id == one.next_id
        ids = other.number(done, skipped)
        assert (ids[skipped] == -1).all()
        assert (ids[~skipped] >= 0).all()
        other.load_state_dict(one.state_dict())


def test_ids_without_skipped_steps() -> None:
    one, other = BatchEpisodeTracker(2), BatchEpisodeTracker(2)
    done = np.array([[False, True], [True, True], [False, False]])
    ids = one.number(done)
    assert ids.tolist() == [[0, 1], [0, 2], [3, 4]]
    np.testing.assert_array_equal(other.number(done, done & False), ids)
    one.restart_all(np.array([True, False]))
    assert one.state_dict()["ids"] == [5, 4]
