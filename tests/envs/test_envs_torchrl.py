"""TorchRL's environments beside ours, in ours, and in place of ours."""

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from trawl.collectors import Collector
from trawl.envs import GymEnv, ParallelEnv, SerialEnv
from trawl.envs.batches.serial import build_env
from trawl.envs.build import is_tensordict_env
from trawl.testing import NumberedEnv

pytest.importorskip("torchrl")
from torchrl import envs as torchrl_envs
from torchrl.data import Categorical, Composite, NonTensor, Unbounded


def keys(tensordict):
    return set(tensordict.keys(True, True))


def replay(actions):
    """A policy that takes these actions."""
    remaining = iter(actions)

    def policy(tensordict):
        return tensordict.set("action", next(remaining))

    return policy


@pytest.mark.parametrize("name", ["Pendulum-v1", "CartPole-v1", "MountainCar-v0"])
def test_frames_are_those_of_torchrls_environment(name):
    ours, theirs = GymEnv(name), torchrl_envs.GymEnv(name)
    actions = ours.full_action_spec.rand((20,))["action"]
    frames = []
    for env in (ours, theirs):
        env.set_seed(5)
        if env is ours:
            env.reset()  # TorchRL's does so when it is seeded
        frames.append(env.rollout(20, replay(actions)))
    assert keys(frames[0]) == keys(frames[1])
    for key in keys(frames[0]):
        assert frames[0][key].dtype == frames[1][key].dtype
        assert torch.equal(frames[0][key], frames[1][key]), key


def wrapper():
    return torchrl_envs.GymWrapper(NumberedEnv())


def test_torchrls_environments_are_known_by_their_protocol():
    env = wrapper()
    assert is_tensordict_env(env)
    assert build_env(env) is env
    assert build_env(wrapper).batch_size == ()
    assert build_env(torchrl_envs.GymEnv, {"env_name": "CartPole-v1"}).batch_size == ()


def test_a_list_of_torchrls_environments_is_batched_by_torchrl():
    env = build_env([wrapper, wrapper()])
    assert isinstance(env, torchrl_envs.SerialEnv)
    assert env.batch_size == (2,)


class Team(torchrl_envs.EnvBase):
    """Two agents, whose flags and rewards are nested; the second is done one step earlier.

    Args:
        whole: True to have flags of the whole team, too.
        wordy: True to show text, so that the layout isn't fixed.
    """

    def __init__(self, whole=True, wordy=False):
        super().__init__()
        flag = partial(Categorical, 2, dtype=torch.bool)
        spec = partial(Composite, shape=(2,))
        self.whole, self.wordy, self.count = whole, wordy, 0
        self.observation_spec = Composite(team=spec(observation=Unbounded((2, 3))))
        if wordy:
            self.observation_spec["said"] = NonTensor((), example_data="")
        self.action_spec = Composite(team=spec(action=Categorical(3, shape=(2,))))
        self.reward_spec = Composite(team=spec(reward=Unbounded((2, 1))))
        flags = {name: flag(shape=(2, 1)) for name in ("done", "terminated")}
        self.done_spec = Composite(team=spec(**flags))
        if whole:
            self.done_spec = self.done_spec.update({name: flag(shape=(1,)) for name in flags})

    def _shown(self):
        ended = torch.tensor([[self.count == 4], [self.count >= 3]])
        flags = {"done": ended, "terminated": ended}
        team = TensorDict({"observation": torch.full((2, 3), float(self.count)), **flags}, (2,))
        whole = {name: ended.all(0) for name in flags} if self.whole else {}
        return TensorDict({"team": team, **whole} | ({"said": "hm"} if self.wordy else {}))

    def _reset(self, tensordict=None, **kwargs):
        self.count = 0
        return self._shown()

    def _step(self, tensordict):
        self.count += 1
        shown = self._shown()
        shown["team", "reward"] = tensordict["team", "action"].unsqueeze(-1) + 1.0
        return shown

    def _set_seed(self, seed):
        pass


def alternate(tensordict):
    first = tensordict["team", "observation"][..., 0].long() % 3
    return tensordict.set(("team", "action"), first)


@pytest.mark.parametrize("wordy", [False, True])
def test_flags_of_agents_are_the_same_in_a_batch_as_alone(wordy):
    make, options = partial(Team, wordy=wordy), {"frames_per_batch": 18, "trust_policy": True}
    batches = {}
    for kind in (None, SerialEnv, ParallelEnv):
        source = make if kind is None else partial(kind, 2, make)
        with Collector(source, alternate, **options) as collector:
            batches[kind] = collector.next()
            path = collector.stats()["env_path"]
        assert path == ("array" if kind is ParallelEnv and not wordy else "tensordict")
    alone = batches[None][:9]
    assert alone["next", "team", "done"][..., 0].sum(0).tolist() == [2, 4]
    for kind in (SerialEnv, ParallelEnv):
        frames = batches[kind]
        assert frames.batch_size == (2, 9)
        assert keys(frames) == keys(alone)
        for key in keys(alone) - {("collector", "traj_ids"), "said", ("next", "said")}:
            assert torch.equal(frames[key], torch.stack([alone[key]] * 2)), (kind, key)


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_a_member_of_a_batch_needs_a_flag_of_its_own(kind):
    with pytest.raises(ValueError, match=r"it has only the flags .*'team', 'done'.*: add a flag"):
        kind(2, partial(Team, whole=False))
