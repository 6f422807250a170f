"""Every kind of environment and collector has infos in its batches, or says what to do instead."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from scripted_infos import Scripted

from trawl.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector
from trawl.envs import GymEnv, InfoKey, ParallelEnv, SerialEnv
from trawl.envs.build import build_one
from trawl.testing import Script
from trawl.testing.scripted_envs import ScriptedPool


def pushing(td):
    left = torch.zeros(td.batch_size, dtype=torch.int64)
    return td.set("action", torch.nn.functional.one_hot(left, 2))


def telling():
    return GymEnv(
        Scripted(4, True), info_keys={"text": str, "never": str, "nothing": object, "count": None}
    )


@pytest.mark.parametrize("kind", ["a list", "processes", "workers"])
def test_text(kind):
    options = {"frames_per_batch": 24}
    if kind == "workers":
        collector = MultiSyncCollector([telling] * 2, None, start_method="inline", **options)
    else:
        source = [telling] * 2 if kind == "a list" else ParallelEnv(2, telling)
        collector = Collector(source, None, **options)
    with collector:
        batch = collector.next().reshape(-1)
    for rows in (batch, batch["next"]):
        seen = rows["observation"].int().tolist()
        assert list(rows["info", "text"]) == [f"{episode}:{step}" for episode, step, _ in seen]
        assert set(rows["info", "never"]) == {""}
        assert set(rows["info", "nothing"]) == {None}


def test_text_needs_environments_that_step_together():
    with pytest.raises(ValueError, match="have no inputs besides"):
        AsyncBatchedCollector([telling] * 2, policy=pushing, frames_per_batch=24)


@pytest.mark.parametrize("ready", [4, 2])
@pytest.mark.parametrize("kind", [Collector, AsyncBatchedCollector])
def test_envpool(kind, ready):
    pytest.importorskip("envpool")
    if kind is AsyncBatchedCollector and ready == 4:
        pytest.skip("such an EnvPool steps as a whole")
    with pytest.raises(ValueError, match=r"'absent'.*elapsed_step"):
        GymEnv("envpool:CartPole-v1", num_envs=2, info_keys=["absent"])
    options = {"num_envs": 4, "batch_size": ready, "info_keys": ["elapsed_step"], "seed": 1}
    source = partial(GymEnv, "envpool:CartPole-v1", **options)
    with kind(source(), policy=pushing, frames_per_batch=200) as collector:
        batch = collector.next()
    flat = batch.reshape(-1)
    before, after = (rows["info", "elapsed_step"][:, 0] for rows in (flat, flat["next"]))
    assert (after == before + 1).all()
    assert before.min() == 0
    assert flat["next", "done"].any()


@pytest.mark.parametrize("mode", AutoresetMode)
def test_ale(mode):
    pytest.importorskip("ale_py", minversion="0.12")
    from ale_py.vector_env import AtariVectorEnv

    if mode is AutoresetMode.DISABLED:
        pytest.skip("ALE's vector environment always resets itself")
    env = AtariVectorEnv("pong", 2, img_height=21, img_width=21, autoreset_mode=mode)
    env = GymEnv(env, info_keys=["lives", "frame_number"])
    with Collector(env, None, frames_per_batch=8) as collector:
        batch = collector.next()
    before, after = (rows["info", "frame_number"] for rows in (batch, batch["next"]))
    assert (after > before).all()
    assert (before[:, 1:] == after[:, :-1]).all()


def test_dm_env_has_an_empty_info():
    pytest.importorskip("dm_control")
    with pytest.raises(ValueError, match=r"'x', but the info of DMEnv.* has only \[\]"):
        build_one("dm_control:cartpole/balance", {"info_keys": ["x"]})


def numbers(env):
    """The environment with arrays only in its info, which it allows any action."""

    class Numbers(gymnasium.Wrapper):
        def reset(self, **kwargs):
            obs, info = self.env.reset(**kwargs)
            return obs, self.own(info)

        def step(self, action):
            *result, info = self.env.step(0)
            return *result, self.own(info)

        def own(self, info):
            return {"vector": info["vector"], "count": np.array([info["count"]])}

    return Numbers(env)


def test_torchrl_has_a_way_of_its_own():
    envs = pytest.importorskip("torchrl.envs")
    from torchrl.envs.gym_like import default_info_dict_reader

    specs = {"count": torch.int64, "vector": torch.float32}
    from torchrl.data import Unbounded

    sizes = {"count": 1, "vector": 3}
    reader = default_info_dict_reader(
        list(specs), [Unbounded((sizes[name],), dtype=dtype) for name, dtype in specs.items()]
    )
    env = envs.GymWrapper(numbers(Scripted())).set_info_dict_reader(reader)
    with Collector(env, None, frames_per_batch=12) as collector:
        batch = collector.next()
    for rows in (batch, batch["next"]):
        episode, steps, _ = rows["observation"].split(1, -1)
        assert (rows["count"] == 100 * episode + steps).all()
        assert (rows["vector"][:, :1] == steps).all()


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        (Scripted, TypeError, "unexpected keyword argument 'info_keys'"),
        (Scripted(), RuntimeError, r"Scripted\): pass a function that makes it, or GymEnv\(env, i"),
        ("CartPole-v1", ValueError, r"'count', but the info of .*CartPole.* has only \[\]"),
    ],
    ids=["function", "object", "id"],
)
def test_where_the_keys_can_not_be_passed(source, error, words):
    with pytest.raises(error, match=words):
        Collector(
            source, None, frames_per_batch=8, create_env_kwargs={"info_keys": ["count"]}
        ).shutdown()


def test_ids_of_other_libraries():
    with pytest.raises(TypeError, match="can't be used with vmas:balance, because VmasEnv has"):
        build_one("vmas:balance", {"info_keys": ["x"]})


def test_other_kinds_are_passed_as_they_are():
    envs = pytest.importorskip("torchrl.envs")
    with pytest.raises(TypeError, match=r"but it is GymEnv.* Pass an environment of another kind"):
        GymEnv(envs.GymEnv("CartPole-v1"), info_keys=["x"])


def test_a_pool_of_ale():
    pytest.importorskip("ale_py", minversion="0.12")
    from ale_py.vector_env import AtariVectorEnv

    env = AtariVectorEnv("pong", 2, batch_size=1, img_height=21, img_width=21)
    with Collector(GymEnv(env, info_keys=["frame_number"]), None, frames_per_batch=40) as collector:
        batch = collector.next()
    before, after = (rows["info", "frame_number"][:, 0] for rows in (batch, batch["next"]))
    assert (after > before).all()
    for number in range(2):
        mine = batch["env_index"] == number
        assert (before[mine][1:] == after[mine][:-1]).all()


SCRIPT = Script(lengths=[3, 1, 4], levels=True, masks=True)


def test_a_pool_that_can_be_reset_only_once_needs_layouts():
    def pool():
        return ScriptedPool(SCRIPT, range(3), "NextStep", 2)

    with pytest.raises(ValueError, match="state its space"):
        GymEnv(pool(), info_keys=["level"])


def test_a_chosen_key_in_each_place():
    keys = ["count", InfoKey("action_mask", key="action_mask")]
    make = partial(GymEnv, info_keys=keys)
    sources = [
        lambda: make(Scripted()),
        lambda: SerialEnv(2, lambda: make(Scripted())),
        lambda: make(SyncVectorEnv([Scripted] * 2, autoreset_mode="SameStep")),
        lambda: ParallelEnv(2, lambda: make(Scripted())),
    ]
    for source in sources:
        # An observed mask comes before that of the info.
        with Collector(source(), None, frames_per_batch=24) as collector:
            batch = collector.next()
        steps = batch["observation"][..., 1]
        assert (batch["action_mask"][..., 1] == steps % 2).all()
        assert (batch["next", "action_mask"][..., 1] == (steps + 1) % 2).all()
        assert (batch["action"] * batch["action_mask"]).sum() == batch.numel()
