"""Batches of several workers: whole trajectories, episodes and datasets out of them."""

import pytest

from trawl import MultiCollector
from trawl.data import MemmapSink, TrajectoryAssembler, load
from trawl.observe import EpisodeStats
from trawl.testing import NumberedEnv

LENGTHS = [3, 1, 4, 7]


def collector(sync, num_envs, **options):
    def make(worker, index):
        return lambda: NumberedEnv(number=10 * worker + index, lengths=LENGTHS)

    envs = [[make(worker, index) for index in range(num_envs)] for worker in range(2)]
    return MultiCollector(
        envs if num_envs > 1 else [env for (env,) in envs],
        sync=sync,
        frames_per_batch=20,
        total_frames=400,
        start_method="inline",
        **options,
    )


@pytest.mark.parametrize(
    ("sync", "num_envs", "how"), [(False, 2, None), (True, 1, None), (True, 2, 0), (True, 2, -1)]
)
def test_trajectories_are_whole(sync, num_envs, how, tmp_path):
    assembler, stats = TrajectoryAssembler(workers=2), EpisodeStats()
    with (
        collector(sync, num_envs, cat_results=how) as source,
        MemmapSink(tmp_path / "d") as sink,
    ):
        for batch in source:
            assembler.add(batch)
            stats.update(batch)
            sink.write(batch)
    whole = assembler.take()
    assert stats.frames == len(load(tmp_path / "d")) == 400
    assert stats.count == len(whole) > 50
    by_env = {}
    for trajectory in whole:
        # Of what is observed, [0] is the environment, [1] the episode and [2] the step in it.
        env, episode, _ = trajectory["observation"][0, :3].int().tolist()
        by_env.setdefault(env, []).append(episode)
        assert len(trajectory) == LENGTHS[episode % len(LENGTHS)]
        assert trajectory["observation"][:, 2].tolist() == list(range(len(trajectory)))
        assert (trajectory["observation"][:, 1] == episode).all()
    assert set(by_env) == {10 * worker + index for worker in range(2) for index in range(num_envs)}
    assert all(found == list(range(len(found))) for found in by_env.values())
    again = EpisodeStats()
    again.update(load(tmp_path / "d"))
    assert again.count == stats.count
    assert again.returns.mean == pytest.approx(stats.returns.mean)


def test_a_wrong_number_of_workers_is_noticed():
    assembler = TrajectoryAssembler()
    with collector(True, 1, cat_results=-1) as source:
        batch = source.next()
    with pytest.raises(ValueError, match="pass the number of workers"):
        assembler.add(batch)
