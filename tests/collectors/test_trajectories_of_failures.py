"""Trajectories that a failure ends are delivered, wherever in a batch the failure falls."""

from functools import partial
from itertools import cycle, islice

import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from multi_parts import CLASSES, make

from tests.envs.agents import Walkers
from trawl import Collector, RandomPolicy
from trawl.collectors import AsyncBatchedCollector
from trawl.data import MinariSink, load
from trawl.envs import ParallelEnv, PettingZooEnv, TorchVectorEnv
from trawl.testing import FaultyEnv, NumberedTorchEnv

pytestmark = pytest.mark.filterwarnings("ignore:.*rebuilt because of on_env_error:RuntimeWarning")

# Each new environment ends an episode, and fails in the second step of the next one.
LENGTHS, AT = [3], 4
EXPECTED = [(3, False), (1, True)]
Faulty = partial(FaultyEnv, AT, ZeroDivisionError("worn out"), lengths=LENGTHS)


class FaultyTorchEnv(NumberedTorchEnv):
    """Fails in a step of its life, with all its environments."""

    steps = 0

    def step(self, actions):
        self.steps += 1
        if self.steps == AT + 1:
            raise ZeroDivisionError("worn out")
        return super().step(actions)


class FaultyWalkers(Walkers):
    """Fails in the third step of each episode."""

    def step(self, actions):
        if self.t == 2:
            raise ZeroDivisionError("worn out")
        return super().step(actions)


def of_torchrl():
    from torchrl.envs import GymWrapper

    return GymWrapper(Faulty())


def of_tensors(mode):
    return TorchVectorEnv(FaultyTorchEnv(2, LENGTHS, autoreset_mode=mode))


SOURCES = {
    "gymnasium": Faulty,
    "list": [Faulty, Faulty],
    "vector": lambda: SyncVectorEnv([Faulty] * 2, autoreset_mode=AutoresetMode.SAME_STEP),
    "processes": lambda: ParallelEnv(2, Faulty),
    "torchrl": of_torchrl,
    "tensors": partial(of_tensors, AutoresetMode.SAME_STEP),
}


def ends(trajectories):
    """Length of each trajectory, and whether it was truncated."""
    flags = [one["next", "truncated"].flatten().tolist() for one in trajectories]
    assert not any(any(one[:-1]) for one in flags)
    assert all(one["next", "done"][-1].all() for one in trajectories)
    return [(len(one), one[-1]) for one in flags]


def options(**more):
    return {"trajs_per_batch": 1, "traj_format": "cat", "on_env_error": "restart", **more}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_every_trajectory_is_delivered(kind, rows):
    many = 1 if kind in ("gymnasium", "torchrl") else 2
    with Collector(SOURCES[kind], frames_per_batch=rows * many, **options()) as collector:
        found = [collector.next() for _ in range(6 * many)]
        episodes = collector.stats()["episodes"]
    assert ends(found) == [one for one in islice(cycle(EXPECTED), 6) for _ in range(many)]
    assert episodes >= len(found)
    assert len({int(one["collector", "traj_ids"][0]) for one in found}) == len(found)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_so_are_those_of_agents(rows):
    def walkers():
        return PettingZooEnv(FaultyWalkers(late=False), done_on_any=False)

    with Collector(walkers, frames_per_batch=rows, **options()) as collector:
        found = [collector.next() for _ in range(3)]
    assert ends(found) == [(2, True)] * 3
    for one in found:
        assert one["next", "walker", "done"][-1].all()
        assert one["next", "walker", "truncated"][-1].all()


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("method", ["inline", "messages"])
def test_so_are_those_of_workers(cls, method):
    with make(
        cls, create_env_fn=[Faulty] * 2, frames_per_batch=4, start_method=method, **options()
    ) as collector:
        found = [collector.next() for _ in range(12)]
    by_worker = [[one for one in found if one["collector", "traj_ids"][0] % 2 == i] for i in (0, 1)]
    for one in by_worker:
        assert ends(one) == list(islice(cycle(EXPECTED), len(one)))


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_so_are_those_of_environments_at_their_own_pace(size):
    check_own_pace(size, backend="threading")


def test_so_are_those_of_an_inference_process():
    check_own_pace(2, policy_backend="multiprocessing")


def check_own_pace(size, **more):
    with AsyncBatchedCollector(
        [Faulty] * 2,
        policy_factory=RandomPolicy,
        frames_per_batch=size,
        yield_completed_trajectories=True,
        on_env_error="restart",
        **more,
    ) as collector:
        found = [collector.next() for _ in range(12)]
        assert collector.stats()["episodes"] >= 12
    for env in range(2):
        own = [one for one in found if one["env_index"][0] == env]
        assert ends(own) == list(islice(cycle(EXPECTED), len(own)))


def test_a_replay_buffer_gets_them_whole():
    data = pytest.importorskip("torchrl.data")
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(100))
    with Collector(
        Faulty,
        frames_per_batch=2,
        total_frames=16,
        replay_buffer=buffer,
        trajs_per_batch=1,
        on_env_error="restart",
    ) as collector:
        list(collector)
    assert buffer[:]["next", "done"].flatten().nonzero().flatten().tolist() == [
        2,
        3,
        6,
        7,
        10,
        11,
        14,
        15,
    ]
    assert buffer[:]["next", "truncated"].flatten().nonzero().flatten().tolist() == [3, 7, 11, 15]


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_sink_of_episodes_ends_them(rows, tmp_path):
    pytest.importorskip("minari")
    options = {"frames_per_batch": rows, "total_frames": 16, "on_env_error": "restart"}
    with (
        MinariSink(tmp_path / "d", env=Faulty(), dataset_id="own/faulty-v0") as sink,
        Collector(Faulty, sink=sink, **options) as collector,
    ):
        list(collector)
    frames = load(tmp_path / "d")
    ids = frames["collector", "traj_ids"]
    found = [frames[ids == one] for one in ids.unique()]
    assert ends(found) == EXPECTED * 4


def test_a_reset_still_drops_what_is_unfinished():
    with Collector(Faulty, frames_per_batch=2, **options()) as collector:
        collector.next()
        collector.reset()
        assert ends([collector.next(), collector.next()]) == EXPECTED
