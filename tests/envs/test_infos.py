"""Entries of the info reach batches, at the step or reset that they belong to."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnasium.wrappers.vector import DictInfoToList
from gymnasium.wrappers.vector import RecordEpisodeStatistics as VectorStatistics
from scripted_infos import KEYS, Scripted, ScriptedJax, check
from tensordict.nn import TensorDictModule

from trawl.collectors import AsyncBatchedCollector, Collector
from trawl.envs import GymEnv, InfoKey, JaxEnv, ParallelEnv, SerialEnv
from trawl.envs.entries.info_keys import box
from trawl.envs.specs import Composite, Unbounded

MODES = ["NextStep", "SameStep", "Disabled"]


def single(**options):
    return GymEnv(Scripted(), info_keys=KEYS, **options)


def vector(mode, wrapper=None, **options):
    env = SyncVectorEnv([Scripted, partial(Scripted, 3)], autoreset_mode=mode)
    return GymEnv(env if wrapper is None else wrapper(env), info_keys=KEYS, **options)


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
ON_BOTH_PATHS = list(KINDS)[:6]


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        *((kind, ["array", "tensordict"][i % 2]) for i, kind in enumerate(KINDS)),
        *((kind, ["tensordict", "array"][i % 2]) for i, kind in enumerate(ON_BOTH_PATHS)),
    ],
)
def test_batches_have_the_infos_of_each_step_and_reset(kind, path):
    seen = []

    def policy(td):
        check(td)
        seen.append(1)
        action = torch.nn.functional.one_hot(torch.zeros(td.batch_size, dtype=torch.int64), 3)
        return td.set("action", action)

    policy = policy if path == "tensordict" else None
    with Collector(KINDS[kind](), policy, frames_per_batch=48, total_frames=144) as collector:
        for batch in collector:
            valid = batch
            if ("collector", "mask") in batch.keys(True):
                valid = batch[batch["collector", "mask"]]
            check(valid)
            check(valid["next"])
            assert valid["next", "done"].any()
    assert bool(seen) is (path == "tensordict")


def highest(mask):
    """The highest action that is allowed."""
    return torch.nn.functional.one_hot(mask.long().sum(-1) - 1, 3)


@pytest.mark.parametrize("kind", ["single", "list", "parallel", "SameStep", "groups", "ready"])
def test_a_policy_reads_the_infos_of_its_step(kind):
    module = TensorDictModule(highest, [("info", "action_mask")], ["action"])
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
    with Collector(env, mask_policy, frames_per_batch=40) as collector:
        batch = next(iter(collector))
    if ("collector", "mask") in batch.keys(True):
        batch = batch[batch["collector", "mask"]]
    done = batch["next", "done"]
    assert done.any()
    assert (batch["next", "info", "episode", "l"] == 4 * done).all()
    assert (batch["next", "info", "episode", "r"] == 4.0 * done).all()
    assert (batch["info", "episode", "l"] == 0).all()


def mask_policy(td):
    shape = td.batch_size
    return td.set("action", torch.nn.functional.one_hot(torch.zeros(shape, dtype=torch.int64), 3))


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


@pytest.mark.parametrize("kind", ["single", *MODES])
def test_text_is_non_tensor_data(kind):
    make = partial(Scripted, 4, True)
    env = make() if kind == "single" else SyncVectorEnv([make] * 2, autoreset_mode=kind)
    env = GymEnv(env, info_keys=["text", "count"])
    td = env.reset()
    for _ in range(9):
        count = td.batch_size.numel()
        action = torch.tensor([[1, 0, 0]] * count).reshape(*td.batch_size, 3)
        td, following = env.step_and_maybe_reset(td.set("action", action))
        for rows in (td["next"], following):
            seen = rows["observation"].reshape(count, 3).int().tolist()
            text = rows["info", "text"]
            assert ([text] if isinstance(text, str) else list(text)) == [
                f"{e}:{s}" for e, s, _ in seen
            ]
        td = following
    env.close()


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


class Changing(Scripted):
    """Changes one of its infos in the fourth step."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def shown(self):
        obs, info = super().shown()
        return obs, info | ({"vector": self.value} if self.steps == 4 else {})


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (np.zeros(4, np.float32), ValueError, r"info\['vector'\] has shape \(4,\).*\(3,\)"),
        (np.zeros(3, complex), TypeError, r"info\['vector'\] is ndarray.*float32"),
        ("text", TypeError, r"info\['vector'\] is str 'text'.*info_keys=\{'vector': object\}"),
    ],
)
def test_a_value_of_another_layout_is_an_error(value, error, words):
    env = GymEnv(Changing(value), info_keys=["vector"])
    with (
        Collector(env, mask_policy, frames_per_batch=12) as collector,
        pytest.raises(error, match=words),
    ):
        next(iter(collector))


@pytest.mark.parametrize(
    ("dtype", "value", "kind"),
    [
        (np.int64, 0.5, "float64"),
        (np.bool_, 0.5, "float64"),
        (np.int64, 2**70, "int 118"),
        (np.uint8, -1, "int64"),
    ],
)
def test_a_number_of_another_kind_is_an_error(dtype, value, kind):
    env = GymEnv(Changing(1), info_keys={"count": box((1,), dtype)})
    env.env.shown = lambda: (np.zeros(3), {"count": value})
    with pytest.raises(TypeError, match=rf"info\['count'\] is {kind}.*{np.dtype(dtype)}"):
        env.reset()
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


def number_box(dtype):
    return {"x": box((1,), dtype)}


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (np.int32, 2**40),
        (np.int8, np.int64(300)),
        (np.int8, [300]),
        (np.uint8, np.uint64(300)),
        (np.int64, np.uint64(2**63)),
    ],
)
@pytest.mark.parametrize("kind", ["single", "vector"])
def test_a_number_that_the_dtype_cannot_hold_is_an_error(kind, dtype, value):
    env = Counting(np.uint8(1), value)
    if kind == "vector":
        env = SyncVectorEnv([lambda: env] * 2, autoreset_mode="SameStep")
    env = GymEnv(env, info_keys=number_box(dtype))
    with (
        Collector(env, frames_per_batch=8) as collector,
        pytest.raises(TypeError, match=r"info\['x'\] is .*can't hold this number"),
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
    env = Counting(value, value)
    if kind == "vector":
        env = SyncVectorEnv([lambda: env] * 2, autoreset_mode="SameStep")
    env = GymEnv(env, info_keys=number_box(dtype))
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


def test_a_number_in_place_of_text_is_an_error():
    for keys in (["x"], {"x": str}):
        env = GymEnv(Counting("a", "a"), info_keys=keys)
        env.env.values = "a", 3
        with (
            Collector(env, frames_per_batch=4) as collector,
            pytest.raises(TypeError, match=r"info\['x'\] is int 3, but its layout, .* is text"),
        ):
            collector.next()


@pytest.mark.parametrize("key", ["is_init", ("group", "is_init")])
def test_a_key_that_a_collector_writes_is_refused(key):
    with pytest.raises(ValueError, match="a collector writes 'is_init' itself"):
        InfoKey("prob", key=key)


@pytest.mark.parametrize("options", [{}, {"num_envs": 2}])
def test_a_number_that_is_an_integer_only_at_a_reset(options):
    env = GymEnv("FrozenLake-v1", info_keys=["prob"], **options)
    assert env.full_observation_spec["info", "prob"].dtype is torch.float64
    with Collector(env, frames_per_batch=4, total_frames=4) as collector:
        (batch,) = collector
    assert (batch["next", "info", "prob"] - 1 / 3).abs().max() < 1e-6


def test_a_missing_value_is_zero_and_none_counts_as_missing():
    env = GymEnv(Changing(None), info_keys=["vector"])
    td = env.reset()
    for _ in range(4):
        assert td["info", "vector"][2] == 1
        td = env.step(td.set("action", torch.tensor([1, 0, 0])))["next"]
    assert td["info", "vector"].tolist() == [0, 0, 0]
    env.close()


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        (["absent"], ValueError, r"'absent'.*'count'.*'nested'"),
        ("count", TypeError, "list of names"),
        ([1], TypeError, "a name must be .* but it is 1"),
        (["count", "count"], ValueError, r"\(.info., .count.\) more than once"),
        (["final_obs"], ValueError, "under 'next'"),
        ({"count": 3}, TypeError, r"info_keys\['count'\]"),
        (
            ["nested/absent"],
            ValueError,
            r"'nested/absent'.*'nested', 'nested/deep', ",
        ),
        ([("nested", "absent")], ValueError, r"\('nested', 'absent'\)"),
        ([("nested", 1)], TypeError, r"must be a string or a tuple of strings"),
        (
            ["nested", "nested/flag"],
            ValueError,
            r"'nested'\) and .*'flag'\), but one contains ",
        ),
        (["count", InfoKey("vector", key=("info", "count"))], ValueError, "more than once"),
    ],
)
def test_bad_keys(keys, error, words):
    with pytest.raises(error, match=words):
        GymEnv(Scripted(), info_keys=keys)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"name": ()}, TypeError, "the name of an InfoKey must be"),
        ({"name": "count", "key": 3}, TypeError, "the key of an InfoKey must be .* but it is 3"),
        ({"name": "count", "key": ("next", "count")}, ValueError, "leave 'next' out"),
        ({"name": "final_info"}, ValueError, "under 'next'"),
    ],
)
def test_bad_info_keys(options, error, words):
    with pytest.raises(error, match=words):
        InfoKey(**options)


@pytest.mark.parametrize("key", ["observation", "reward", "action", ("done", "count")])
def test_a_key_that_is_taken(key):
    with pytest.raises(ValueError, match="pass another key"):
        GymEnv(Scripted(), info_keys=[InfoKey("count", key=key)])


CHOSEN = [
    "count",
    InfoKey(("nested", "flag"), key="flag"),
    InfoKey("nested/deep", key=("task", "deep")),
    InfoKey("vector", Unbounded((3,), torch.float64), key="vector"),
    "nested/deep/half",
]


@pytest.mark.parametrize("observed", ["array", "dict"])
@pytest.mark.parametrize("kind", ["single", *MODES])
def test_keys_that_the_user_chooses(kind, observed):
    def make():
        env = Scripted()
        if observed == "array":
            return env
        return gymnasium.wrappers.TransformObservation(
            env, lambda obs: {"observation": obs}, spaces.Dict(observation=env.observation_space)
        )

    env = make() if kind == "single" else SyncVectorEnv([make] * 2, autoreset_mode=kind)
    with Collector(
        GymEnv(env, info_keys=CHOSEN), None, frames_per_batch=24, total_frames=48
    ) as collector:
        for batch in collector:
            if ("collector", "mask") in batch.keys(True):
                batch = batch[batch["collector", "mask"]]
            for rows in (batch, batch["next"]):
                episode, steps, _ = rows["observation"].split(1, -1)
                assert (rows["info", "count"] == 100 * episode + steps).all()
                assert (rows["flag"] == (steps % 2 == 1)).all()
                assert rows["flag"].dtype is torch.bool
                assert (rows["task", "deep", "half"] == steps / 2).all()
                assert (rows["info", "nested", "deep", "half"] == steps / 2).all()
                assert rows["vector"].dtype is torch.float64
                assert (rows["vector"][..., :1] == steps).all()
                assert set(rows["info"].keys()) == {"count", "nested"}


def test_one_of_the_statistics_of_an_episode():
    keys = ["episode/r", InfoKey(("episode", "l"), key="length")]
    env = GymEnv(RecordEpisodeStatistics(Scripted()), info_keys=keys)
    with Collector(env, mask_policy, frames_per_batch=40) as collector:
        batch = next(iter(collector))
    done = batch["next", "done"]
    assert (batch["next", "length"] == 4 * done).all()
    assert (batch["next", "info", "episode", "r"] == 4.0 * done).all()
    assert list(batch["info"].keys(True, True)) == [("episode", "r")]


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


def test_chosen_keys_of_an_id_are_kept_when_it_is_made_again():
    env = GymEnv(registered(), info_keys=CHOSEN)
    before = env.full_observation_spec
    env.rebuild()
    assert env.full_observation_spec == before
    assert ("task", "deep", "half") in env.full_observation_spec.keys(True, True)
    env.close()


def test_an_observation_named_info():
    env = gymnasium.wrappers.TransformObservation(
        Scripted(), lambda obs: {"info": obs}, spaces.Dict({"info": Scripted().observation_space})
    )
    with pytest.raises(ValueError, match="or rename the observation"):
        GymEnv(env, info_keys=["count"])


def test_without_keys_nothing_changes():
    for keys in (None, []):
        env = GymEnv(Scripted(), info_keys=keys)
        assert list(env.full_observation_spec.keys(True)) == ["observation"]
        assert isinstance(env.env, Scripted)
        env.close()
