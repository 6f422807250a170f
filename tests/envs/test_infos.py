"""Entries of the info reach batches, at the step or reset that they belong to."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics, TransformObservation
from gymnasium.wrappers.vector import DictInfoToList
from gymnasium.wrappers.vector import RecordEpisodeStatistics as VectorStatistics
from scripted_infos import KEYS, Scripted, ScriptedJax, check
from tensordict.nn import TensorDictModule

from trawl.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector
from trawl.envs import GymEnv, InfoKey, JaxEnv, ParallelEnv, SerialEnv
from trawl.envs.build import build_one
from trawl.envs.entries.info_keys import box
from trawl.envs.specs import Composite, Unbounded
from trawl.testing import Script
from trawl.testing.scripted_envs import ScriptedPool

MODES = ["NextStep", "SameStep", "Disabled"]


def single(text=False):
    return GymEnv(Scripted(4, text), info_keys=TEXTS if text else KEYS)


def vector(mode, wrapper=None, text=False):
    make = partial(Scripted, text=text)
    env = SyncVectorEnv([make, partial(make, 3)], autoreset_mode=mode)
    return GymEnv(wrapper(env) if wrapper else env, info_keys=TEXTS if text else KEYS)


def registered():
    if "ScriptedInfos-v0" not in gymnasium.registry:
        gymnasium.register("ScriptedInfos-v0", Scripted)
    return "ScriptedInfos-v0"


def jax_batch():
    pytest.importorskip("jax")
    return JaxEnv(ScriptedJax(), 2, info_keys=KEYS)


KINDS = {
    "single": single,
    "list": lambda: SerialEnv(2, single),
    "parallel": lambda: ParallelEnv(2, single, backend="thread"),
    **{mode: partial(vector, mode) for mode in MODES},
    **{f"dicts {mode}": partial(vector, mode, wrapper=DictInfoToList) for mode in MODES},
    "two in a process": lambda: ParallelEnv(4, single, envs_per_worker=2),
    "groups": lambda: ParallelEnv(4, single, groups=2, backend="thread"),
    "jax": jax_batch,
}


def first(td):
    """The action that is always allowed."""
    action = torch.zeros(td.batch_size, dtype=torch.int64)
    return td.set("action", torch.nn.functional.one_hot(action, 3))


def frames_of(batch):
    """The rows of a batch that are frames."""
    mask = ("collector", "mask")
    return batch[batch[mask]] if mask in batch.keys(True) else batch


@pytest.mark.parametrize(
    ("kind", "path"), [(kind, ["array", "tensordict"][i % 2]) for i, kind in enumerate(KINDS)]
)
def test_batches_have_the_infos_of_each_step_and_reset(kind, path):
    seen = []

    def policy(td):
        check(td)
        seen.append(1)
        return first(td)

    policy = policy if path == "tensordict" else None
    with Collector(KINDS[kind](), policy, frames_per_batch=48, total_frames=144) as collector:
        for batch in collector:
            valid = frames_of(batch)
            check(valid)
            check(valid["next"])
            assert valid["next", "done"].any()
            if path == "array":
                # An observed mask comes before that of the info.
                assert (valid["action"] * valid["action_mask"]).sum() == len(valid.reshape(-1))
    assert bool(seen) is (path == "tensordict")


@pytest.mark.parametrize("kind", ["single", "list", "parallel", "SameStep", "groups", "ready"])
def test_a_policy_reads_the_infos_of_its_step(kind):
    def highest(mask):
        return torch.nn.functional.one_hot(mask.long().sum(-1) - 1, 3)

    module = TensorDictModule(highest, ["action_mask"], ["action"])
    if kind == "ready":
        collector = AsyncBatchedCollector([single] * 3, policy=module, frames_per_batch=12)
    else:
        collector = Collector(KINDS[kind](), module, frames_per_batch=24)
    with collector:
        batch = collector.next()
    check(batch)
    check(batch["next"])
    assert (batch["action"].argmax(-1) == batch["observation"][..., 1] % 2).all()


class Single(gymnasium.Env):
    """Environment that may exist only once, like an emulator with a fixed port."""

    observation_space = gymnasium.spaces.Box(0, 9, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    made = 0

    def __init__(self):
        type(self).made += 1
        self.handle = (one for one in ())

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, "f4"), {}

    def step(self, action):
        return np.zeros(1, "f4"), 0.0, False, False, {"fuel": self.np_random.random()}


@pytest.mark.parametrize("num_envs", [None, 2])
def test_an_id_makes_each_environment_once(num_envs, monkeypatch):
    monkeypatch.setattr(Single, "made", 0)
    monkeypatch.setitem(
        gymnasium.registry,
        "Single-v0",
        gymnasium.envs.registration.EnvSpec("Single-v0", entry_point=Single),
    )
    kwargs = {} if num_envs is None else {"num_envs": num_envs, "vectorization_mode": "sync"}
    env = GymEnv("Single-v0", info_keys=["fuel"], **kwargs)
    with Collector(env, frames_per_batch=8) as collector:
        assert (collector.next()["next", "info", "fuel"] > 0).all()
    assert Single.made == (num_envs or 1)


def test_an_id_keeps_its_first_reset():
    """The steps that find the layout leave the environment as it was."""
    env = GymEnv(registered(), info_keys=["count"])
    assert env.reset()["observation"].tolist() == [1, 0, 4]
    env.close()
    env = GymEnv(registered(), info_keys=["at_end"], num_envs=2)
    assert env.reset()["observation"].tolist() == [[1, 0, 4]] * 2
    env.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outside", [False, True])
def test_statistics_of_episodes(mode, outside):
    if outside and mode == "Disabled":
        pytest.skip("this wrapper loses its statistics in a partial reset, and Trawl warns")
    make = Scripted if outside else lambda: RecordEpisodeStatistics(Scripted())
    env = SyncVectorEnv([make] * 2, autoreset_mode=mode)
    env = GymEnv(VectorStatistics(env) if outside else env, info_keys=["episode"])
    with Collector(env, first, frames_per_batch=40) as collector:
        batch = frames_of(collector.next())
    done = batch["next", "done"]
    assert done.any()
    assert (batch["next", "info", "episode", "l"] == 4 * done).all()
    assert (batch["next", "info", "episode", "r"] == 4.0 * done).all()
    assert (batch["info", "episode", "l"] == 0).all()


class Choosy(gymnasium.Env):
    """Shows in its observations which action is allowed, and its info from the second step on."""

    observation_space = spaces.Dict(action_mask=spaces.MultiBinary(4))
    action_space = spaces.Discrete(4)

    def shown(self):
        mask = np.zeros(4, np.int8)
        mask[self.steps % 4] = 1
        return {"action_mask": mask}, {"late": self.steps} if self.steps > 1 else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.shown()

    def step(self, action):
        assert action == self.steps % 4
        self.steps += 1
        obs, info = self.shown()
        return obs, 1.0, self.steps == 7, False, info


@pytest.mark.parametrize("kind", ["single", *MODES])
def test_masks_in_observations_hold_while_infos_are_found(kind):
    env = Choosy() if kind == "single" else SyncVectorEnv([Choosy] * 2, autoreset_mode=kind)
    with Collector(GymEnv(env, info_keys=["late"]), frames_per_batch=40) as collector:
        assert collector.next()["next", "info", "late"].max() == 7


TEXTS = {"text": str, "never": str, "nothing": object, "count": None}


@pytest.mark.parametrize("kind", ["single", *MODES, "list", "processes", "workers"])
def test_text(kind):
    make, cls, options = partial(single, text=True), Collector, {}
    sources = {
        "single": make,
        "list": [make] * 2,
        "processes": partial(ParallelEnv, 2, make),
        "workers": [make] * 2,
    }
    if kind == "workers":
        cls, options = MultiSyncCollector, {"start_method": "inline"}
    source = sources[kind] if kind in sources else vector(kind, text=True)
    with cls(source, None, frames_per_batch=24, **options) as collector:
        batch = frames_of(collector.next().reshape(-1))
    assert batch["next", "done"].any()
    for rows in (batch, batch["next"]):
        seen = rows["observation"].int().tolist()
        assert list(rows["info", "text"]) == [f"{episode}:{step}" for episode, step, _ in seen]
        assert set(rows["info", "never"]) == {""}
        assert set(rows["info", "nothing"]) == {None}


def test_a_mapping_states_spaces():
    keys = {
        "count": spaces.Discrete(1000),
        "vector": Unbounded((3,), torch.float64),
        "nested": Composite({"flag": Unbounded((1,), torch.uint8)}),
        "never": spaces.Box(-1, 1, (2, 2)),
        "at_end": None,
    }
    env = GymEnv(Scripted(), info_keys=keys, categorical_action_encoding=True)
    td = env.reset()
    assert td["info", "count"] == int(td["observation"][0] * 100)
    assert td["info", "vector"].dtype is torch.float64
    assert td["info", "nested", "flag"].dtype is torch.uint8
    assert td["info", "never"].tolist() == [[0, 0], [0, 0]]
    assert td["info", "at_end"].shape == (1,)
    assert env.full_observation_spec.is_in(td)
    env.close()


class Counting(gymnasium.Env):
    """Reports one value at each reset, and another in each step."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, first, later):
        self.values = first, later

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {"x": self.values[0]}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {"x": self.values[1]}


def counting(kind, first, later, keys):
    """Such environments, alone or as a vector environment."""
    env = Counting(first, later)
    if kind == "vector":
        env = SyncVectorEnv([lambda: env] * 2, autoreset_mode="SameStep")
    return GymEnv(env, info_keys=keys)


THREE = {"x": box((3,), np.float32)}


UNFIT = [
    (THREE, np.ones(3), np.ones(4), r"has shape \(4,\).*\(3,\)"),
    (THREE, np.ones(3), np.ones(3, complex), "is ndarray.*float32"),
    (THREE, np.ones(3), "text", r"is str 'text'.*info_keys=\{'x': object\}"),
    (["x"], "a", 3, "is int 3, but its layout, .* is text"),
    ({"x": str}, "a", 3, "is int 3, but its layout, .* is text"),
    *(
        ({"x": box((1,), dtype)}, dtype(1), value, words)
        for dtype, value, words in (
            (np.int64, 0.5, "is float64.*int64"),
            (np.bool_, 0.5, "is float64.*bool"),
            (np.int64, 2**70, "is int 118.*int64"),
            (np.uint8, -1, "is int64.*uint8"),
            (np.int32, 2**40, "is .*can't hold this number"),
            (np.int8, np.int64(300), "is .*can't hold this number"),
            (np.int8, [300], "is .*can't hold this number"),
            (np.uint8, np.uint64(300), "is .*can't hold this number"),
            (np.int64, np.uint64(2**63), "is .*can't hold this number"),
        )
    ),
]


# Gymnasium's vector environments refuse some of them.
@pytest.mark.parametrize(
    ("kind", "layout", "first", "later", "words"),
    [("single", *row) for row in UNFIT] + [("vector", *row) for row in UNFIT[-5:]],
)
def test_a_value_that_does_not_fit_its_layout_is_an_error(kind, layout, first, later, words):
    env = counting(kind, first, later, layout)
    with (
        Collector(env, frames_per_batch=8) as collector,
        pytest.raises((TypeError, ValueError), match=rf"info\['x'\] {words}"),
    ):
        collector.next()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *[(np.int8, 100), (np.float32, 0.1), (np.float32, 1e300), (np.float16, 0.1)],
        *[(np.float32, 7), (np.int64, 7), (np.int64, np.uint8(7)), (np.bool_, True)],
        *[(np.bool_, np.bool_(True)), (np.float32, np.float32(1.5)), (np.float32, np.float64(1.5))],
        *[(np.float64, np.array(1.5)), (np.float64, np.array([1.5]))],
        (np.float32, torch.tensor([1.5])),
    ],
)
@pytest.mark.parametrize("kind", ["single", "vector"])
def test_numbers_of_any_class_are_taken_and_rounded(kind, dtype, value):
    env = counting(kind, value, value, {"x": box((1,), dtype)})
    with Collector(env, frames_per_batch=4) as collector, np.errstate(over="ignore"):
        for _ in range(2):
            batch = collector.next()
            for rows in (batch, batch["next"]):
                found = rows["info", "x"].numpy()
                assert (found == np.asarray(value).astype(dtype)).all()


def test_a_dictionary_whose_names_are_not_text_is_stored_unchanged():
    value = {1: 2.0, "two": {3: 4}}
    env = GymEnv(Counting({"a": 1, "b": value}, {"a": 1, "b": value}), info_keys=["x"])
    with Collector(env, frames_per_batch=4) as collector:
        batch = collector.next()
    assert batch["next", "info", "x", "a"].flatten().tolist() == [1] * 4
    assert list(batch["next", "info", "x", "b"]) == [value] * 4


@pytest.mark.parametrize("options", [{}, {"num_envs": 2}])
def test_a_number_that_is_an_integer_only_at_a_reset(options):
    env = GymEnv("FrozenLake-v1", info_keys=["prob"], **options)
    assert env.full_observation_spec["info", "prob"].dtype is torch.float64
    with Collector(env, frames_per_batch=4, total_frames=4) as collector:
        (batch,) = collector
    assert (batch["next", "info", "prob"] - 1 / 3).abs().max() < 1e-6


def test_none_counts_as_missing_and_a_missing_value_is_zero():
    env = counting("single", np.ones(3, np.float32), None, THREE)
    with Collector(env, frames_per_batch=2) as collector:
        batch = collector.next()
    assert batch["info", "x"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert not batch["next", "info", "x"].any()


OBSERVED = TransformObservation(
    Scripted(), lambda obs: {"info": obs}, spaces.Dict({"info": Scripted().observation_space})
)


def of_id(env_id, *keys):
    pytest.importorskip(env_id.split(":")[0])
    return build_one(env_id, {"info_keys": [*keys]})


def passed(source):
    Collector(source, frames_per_batch=8, create_env_kwargs={"info_keys": ["count"]}).shutdown()


def pool():
    script = Script(lengths=[3, 1, 4], levels=True, masks=True)
    return GymEnv(ScriptedPool(script, range(3), "NextStep", 2), info_keys=["level"])


def of_torchrl():
    envs = pytest.importorskip("torchrl.envs")
    return GymEnv(envs.GymEnv("CartPole-v1"), info_keys=["x"])


def ready():
    make = partial(single, text=True)
    return AsyncBatchedCollector([make] * 2, policy=first, frames_per_batch=24)


TAKEN = ["observation", "reward", "action", ("done", "count")]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        *(
            (partial(GymEnv, Scripted(), info_keys=keys), error, words)
            for keys, error, words in (
                (["absent"], ValueError, r"'absent'.*'count'.*'nested'"),
                ("count", TypeError, "list of names"),
                ([1], TypeError, "a name must be .* but it is 1"),
                (["count", "count"], ValueError, r"\(.info., .count.\) more than once"),
                (["final_obs"], ValueError, "under 'next'"),
                ({"count": 3}, TypeError, r"info_keys\['count'\]"),
                (["nested/absent"], ValueError, r"'nested/absent'.*'nested', 'nested/deep', "),
                ([("nested", "absent")], ValueError, r"\('nested', 'absent'\)"),
                ([("nested", 1)], TypeError, r"must be a string or a tuple of strings"),
                (["nested", "nested/flag"], ValueError, r"'nested'\) and .*'flag'\), but one"),
                (["count", InfoKey("vector", key=("info", "count"))], ValueError, "more than once"),
                *(([InfoKey("count", key=key)], ValueError, "pass another key") for key in TAKEN),
            )
        ),
        *(
            (partial(InfoKey, *args), error, words)
            for args, error, words in (
                (["prob", None, "is_init"], ValueError, "a collector writes 'is_init' itself"),
                (["prob", None, ("group", "is_init")], ValueError, "writes 'is_init' itself"),
                ([()], TypeError, "the name of an InfoKey must be"),
                (["count", None, 3], TypeError, "the key of an InfoKey must be .* but it is 3"),
                (["count", None, ("next", "count")], ValueError, "leave 'next' out"),
                (["final_info"], ValueError, "under 'next'"),
            )
        ),
        (partial(GymEnv, OBSERVED, info_keys=["count"]), ValueError, "or rename the observation"),
        (partial(passed, Scripted), TypeError, "unexpected keyword argument 'info_keys'"),
        (
            partial(passed, Scripted()),
            RuntimeError,
            r"Scripted\): pass a function .*GymEnv\(env, i",
        ),
        (partial(passed, "CartPole-v1"), ValueError, r"'count', but .*CartPole.* has only \[\]"),
        (partial(of_id, "envpool:CartPole-v1", "absent"), ValueError, "'absent'.*elapsed_step"),
        (partial(of_id, "dm_control:cartpole/balance", "x"), ValueError, r"DMEnv.* has only \[\]"),
        (
            partial(of_id, "vmas:balance", "x"),
            TypeError,
            "can't be used with vmas:balance, because",
        ),
        (of_torchrl, TypeError, r"but it is GymEnv.* Pass an environment of another kind"),
        (pool, ValueError, "state its space"),
        (ready, ValueError, "have no inputs besides"),
    ],
)
def test_what_can_not_be_used_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_name_with_a_slash_comes_before_a_nested_one():
    class Both(Scripted):
        def shown(self):
            obs, info = super().shown()
            return obs, info | {"nested/flag": 5.0}

    env = GymEnv(Both(), info_keys=["nested/flag", ("nested", "flag")])
    td = env.reset()
    assert td["info", "nested/flag"] == 5
    assert not td["info", "nested", "flag"]
    env.close()
    # With a layout, a name is never split.
    env = GymEnv(Scripted(), info_keys={"nested/flag": spaces.Box(0, 9, (1,))})
    assert list(env.reset()["info"].keys()) == ["nested/flag"]
    env.close()


def test_an_id_keeps_its_keys_when_it_is_made_again():
    env = GymEnv(registered(), info_keys=KEYS)
    before = env.full_observation_spec
    env.rebuild()
    assert env.full_observation_spec == before
    assert ("task", "deep", "half") in env.full_observation_spec.keys(True, True)
    env.close()


def test_without_keys_nothing_changes():
    for keys in (None, []):
        env = GymEnv(Scripted(), info_keys=keys)
        assert list(env.full_observation_spec.keys(True)) == ["observation"]
        assert isinstance(env.env, Scripted)
        env.close()


# --- environments of other libraries


def pushing(td):
    left = torch.zeros(td.batch_size, dtype=torch.int64)
    return td.set("action", torch.nn.functional.one_hot(left, 2))


@pytest.mark.parametrize("ready", [4, 2])
@pytest.mark.parametrize("kind", [Collector, AsyncBatchedCollector])
def test_envpool(kind, ready):
    pytest.importorskip("envpool")
    if kind is AsyncBatchedCollector and ready == 4:
        pytest.skip("such an EnvPool steps as a whole")
    options = {"num_envs": 4, "batch_size": ready, "info_keys": ["elapsed_step"], "seed": 1}
    source = partial(GymEnv, "envpool:CartPole-v1", **options)
    with kind(source(), policy=pushing, frames_per_batch=200) as collector:
        batch = collector.next()
    flat = batch.reshape(-1)
    before, after = (rows["info", "elapsed_step"][:, 0] for rows in (flat, flat["next"]))
    assert (after == before + 1).all()
    assert before.min() == 0
    assert flat["next", "done"].any()


@pytest.mark.parametrize(
    "options", [{"autoreset_mode": "NextStep"}, {"autoreset_mode": "SameStep"}, {"batch_size": 1}]
)
def test_ale(options):
    pytest.importorskip("ale_py", minversion="0.12")
    from ale_py.vector_env import AtariVectorEnv

    env = AtariVectorEnv("pong", 2, img_height=21, img_width=21, **options)
    with Collector(GymEnv(env, info_keys=["frame_number"]), None, frames_per_batch=40) as collector:
        batch = collector.next()
    pool = "env_index" in batch.keys()  # noqa: SIM118
    for number in range(2):
        mine = batch[batch["env_index"] == number] if pool else batch[number]
        before, after = (rows["info", "frame_number"] for rows in (mine, mine["next"]))
        assert (after > before).all()
        assert (before[1:] == after[:-1]).all()


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
    from torchrl.data import Unbounded as Theirs
    from torchrl.envs.gym_like import default_info_dict_reader

    specs = {"count": Theirs((1,), dtype=torch.int64), "vector": Theirs((3,))}
    reader = default_info_dict_reader(list(specs), list(specs.values()))
    env = envs.GymWrapper(numbers(Scripted())).set_info_dict_reader(reader)
    with Collector(env, None, frames_per_batch=12) as collector:
        batch = collector.next()
    for rows in (batch, batch["next"]):
        episode, steps, _ = rows["observation"].split(1, -1)
        assert (rows["count"] == 100 * episode + steps).all()
        assert (rows["vector"][:, :1] == steps).all()
