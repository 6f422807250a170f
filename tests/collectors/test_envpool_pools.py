"""EnvPool with ``batch_size`` below ``num_envs``, compared with all at once."""

import pytest
import torch

from trawl.collectors import AsyncBatchedCollector, Collector


def frames_of(source, policy, frames, **options):
    """Frames of each environment, in order."""
    with AsyncBatchedCollector(
        source, policy=policy, frames_per_batch=frames // 4, total_frames=frames, **options
    ) as collector:
        found = torch.cat(list(collector))
    return [found[found["env_index"] == env] for env in range(collector.n_env)]


def together(source, policy, frames, seed=None):
    """Frames of each environment, if all step at once."""
    with Collector(source, policy, frames_per_batch=frames) as collector:
        if seed is not None:
            collector.set_seed(seed)
        found = collector.next()
    mask = found.get(("collector", "mask"), torch.ones(found.shape, dtype=torch.bool))
    return [row[kept] for row, kept in zip(found, mask, strict=True)]


def check_same(one, other):
    """Each environment made the same frames, as far as both go."""
    for mine, theirs in zip(one, other, strict=True):
        count = min(len(mine), len(theirs))
        assert count > 20
        for key in ("observation", "action", "terminated", "truncated", "done"):
            assert torch.equal(mine[key][:count], theirs[key][:count])
            if key != "action":
                following = ("next", key)
                assert torch.equal(mine[following][:count], theirs[following][:count])
        assert torch.equal(mine["next", "reward"][:count], theirs["next", "reward"][:count])
        starts = [part["collector", "traj_ids"][:count].diff() != 0 for part in (mine, theirs)]
        assert torch.equal(*starts)


@pytest.fixture
def envpool():
    return pytest.importorskip("envpool")


def leans(observation):
    """Pushes to the side to which the pole leans, or, for the first few steps, to the left."""
    push = (observation[..., 2] > 0.05).long()
    return torch.nn.functional.one_hot(push, 2)


def test_envpool_makes_the_frames_that_it_makes_together(envpool):
    def make(**options):
        return envpool.make_gymnasium("CartPole-v1", num_envs=8, seed=3, num_threads=2, **options)

    found = frames_of(lambda: make(batch_size=3), leans, 800)
    check_same(found, together(make(), leans, 1600))


def test_envpool_resets_some_environments(envpool):
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=7, batch_size=3, seed=3)
    with AsyncBatchedCollector(pool, policy=leans, frames_per_batch=40) as collector:
        for chosen in ([2, 5], [0], None):
            before = collector.next()
            collector.reset(chosen)
            after = collector.next()
            for env in range(7):
                last = before[before["env_index"] == env][-1]
                first = after[after["env_index"] == env][0]
                if chosen is None or env in chosen:
                    assert first["collector", "traj_ids"] > before["collector", "traj_ids"].max()
                    assert first["observation"].abs().max() <= 0.05
                elif not last["next", "done"]:
                    assert torch.equal(first["observation"], last["next", "observation"])


def test_envpool_takes_its_seed_when_it_is_made(envpool):
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=4, batch_size=2)
    with (
        AsyncBatchedCollector(pool, policy=leans, frames_per_batch=40) as collector,
        pytest.raises(ValueError, match="takes its seed when it is made"),
    ):
        collector.set_seed(3)


@pytest.mark.parametrize("name", ["Pendulum-v1", "Acrobot-v1", "FrozenLake-v1"])
def test_envpool_with_other_spaces(envpool, name):
    pool = envpool.make_gymnasium(name, num_envs=6, batch_size=2, seed=1)
    with Collector(pool, frames_per_batch=60) as collector:
        batch = collector.next()
    assert batch.shape == (60,)
    for env in range(6):
        own = batch[batch["env_index"] == env]
        goes_on = ~own["next", "done"][:-1, 0]
        assert torch.equal(
            own["next", "observation"][:-1][goes_on], own["observation"][1:][goes_on]
        )


@pytest.mark.parametrize("limit", [1, 7])
def test_envpool_ends_episodes_at_a_limit(envpool, limit):
    def make():
        return envpool.make_gymnasium("CartPole-v1", num_envs=6, batch_size=2, seed=3)

    found = frames_of(make, leans, 800, max_frames_per_traj=limit)
    for mine in found:
        count, late = mine["step_count"][:, 0], mine["next", "step_count"][:, 0] == limit
        done = mine["next", "done"][:, 0]
        assert count.max() == limit - 1
        assert late.any()
        assert torch.equal(done, late | mine["next", "terminated"][:, 0])
        assert (mine["next", "truncated"][:, 0] == late).all()
        assert torch.equal(count[1:], torch.where(done, 0, count + 1)[:-1])
        # An episode begins close to the middle.
        assert (mine["observation"][count == 0].abs() <= 0.05).all()
        going = ~done[:-1]
        assert torch.equal(mine["observation"][1:][going], mine["next", "observation"][:-1][going])
        ids = mine["collector", "traj_ids"]
        assert torch.equal(ids.diff() != 0, done[:-1])
