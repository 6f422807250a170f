"""Kinds of environments that packages add, and sources that are wrong."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import packages
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from trawl import Collector
from trawl.collectors import AsyncBatchedCollector
from trawl.envs import GymEnv, ParallelEnv, Source, TorchVectorEnv
from trawl.testing import Script, check_env
from trawl.testing.scripted_envs import ScriptedLooseEnv, ScriptedSource


class Counters(Source):
    """It counts the steps of its episodes, which have 2, 3 and 4 of them."""

    single_observation_space: Any = spaces.Box(-9, 9, (2,), np.float32)
    single_action_space: Any = spaces.Discrete(3)
    num_envs = 3

    def __init__(self) -> None:
        self.counts = np.zeros(3, np.int64)

    def begin(self, mask: Any, seeds: Any) -> Any:
        self.counts[np.asarray(mask)] = 0
        return self.observe(), {}

    def step(self, actions: Any) -> Any:
        self.counts += 1
        over = self.counts == [2, 3, 4]
        results = np.ones(3, np.float32), over, np.zeros(3, bool)
        return self.observe(), *map(self.own, results), {}

    def observe(self) -> Any:
        return self.own(np.stack([self.counts] * 2, 1).astype(np.float32))

    def own(self, array: Any) -> Any:
        return array if self.device is None else torch.from_numpy(np.array(array))


class TensorCounters(Counters):
    device = "cpu"


BOTH = pytest.mark.parametrize("kind", [Counters, TensorCounters])


def collect(env: Any) -> None:
    with Collector(env, frames_per_batch=12, total_frames=60) as collector:
        for _ in collector:
            pass


def wrong(kind: Any, **attributes: Any) -> Any:
    return type("Wrong", (kind,), attributes)()


@BOTH
def test_a_source_has_nothing_to_find_fault_with(kind: Any) -> None:
    collect(kind())
    assert check_env(kind).findings == ()


def stepping(position: int, value: Any) -> Any:
    def step(self: Any, actions: Any) -> Any:
        results = list(super(type(self), self).step(actions))
        results[position] = self.own(value) if isinstance(value, np.ndarray) else value
        return tuple(results)

    return step


def beginning(change: Any) -> Any:
    def begin(self: Any, mask: Any, seeds: Any) -> Any:
        return change(super(type(self), self).begin, mask, seeds)

    return begin


def observing(value: Any) -> Any:
    return lambda self: self.own(value) if isinstance(value, np.ndarray) else value


WRONG: dict[str, tuple[str, Any, str]] = {
    "shape": ("observe", observing(np.zeros((3, 5), np.float32)), r"has shape \(3, 5\), but"),
    "rows": ("observe", observing(np.zeros((2, 2), np.float32)), r"has shape \(2, 2\), but"),
    "dtype": (
        "observe",
        observing(np.zeros((3, 2), np.complex64)),
        "complex64, but its space says",
    ),
    "nothing": ("observe", observing(None), "observation 'observation' (has shape|must be)"),
    "reward": (
        "step",
        stepping(1, np.ones(2, np.float32)),
        r"reward of shape \(2,\), but the shape",
    ),
    "one reward": ("step", stepping(1, 1.0), r"returned reward (of shape \(\)|as float)"),
    "flags": ("step", stepping(2, np.zeros(4, bool)), r"returned terminated of shape \(4,\)"),
    "one flag": ("step", stepping(3, False), r"returned truncated (of shape \(\)|as bool)"),
    "no info": (
        "begin",
        beginning(lambda begin, *given: begin(*given)[0]),
        "begin of Wrong.* must return .*, info",
    ),
    "three values": (
        "begin",
        beginning(lambda begin, *given: (*begin(*given), 0)),
        "begin of Wrong.* returned 3 values, but it must return .*, info",
    ),
    "info of a reset": (
        "begin",
        beginning(lambda begin, *given: (begin(*given)[0], 5)),
        "begin of Wrong.* returned 5 as its info, but an info must be a dict",
    ),
    "ignored mask": (
        "begin",
        beginning(lambda begin, mask, seeds: begin(mask | True, seeds)),
        r"begin\(\[.*True,? False,? False\], None\).* also changed (sub-)?environment 1",
    ),
    "no method": ("step", Source.step, "abstract .*step"),
    "no number": ("num_envs", None, "Wrong.num_envs must be a positive integer, but it is None"),
    "no space": ("single_action_space", None, "single_action_space must be a gymnasium.Space"),
    "wrong space": ("single_observation_space", (2,), r"be a gymnasium.Space, but it is \(2,\)"),
    "mode": ("autoreset_mode", "often", "Wrong.autoreset_mode must be one of .* it is 'often'"),
    "no last observation": ("autoreset_mode", "SameStep", "no .?'?info|no 'final_obs'"),
}


@BOTH
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_source(kind: Any, name: str) -> None:
    attribute, value, words = WRONG[name]
    with pytest.raises((KeyError, TypeError, ValueError), match=words):
        collect(wrong(kind, **{attribute: value}))


def test_rows_of_a_reset() -> None:
    def only_new(begin: Any, mask: Any, seeds: Any) -> Any:
        return begin(mask, seeds)[0][mask], {}

    with pytest.raises(ValueError, match=r"returned observations with 1 rows, but it must return"):
        collect(wrong(Counters, begin=beginning(only_new)))
    with pytest.raises(ValueError, match=r"has shape \(1, 2\), but \(3, 2\) is expected"):
        collect(wrong(TensorCounters, begin=beginning(only_new)))


def test_an_info_that_is_no_dict() -> None:
    with pytest.raises(TypeError, match=r"step of Wrong.* returned 3 as its info, but an"):
        collect(wrong(Counters, step=stepping(4, 3)))
    with pytest.raises(TypeError, match="returned None as its info, but an info must be a dict"):
        collect(wrong(Counters, step=stepping(4, None)))


def test_what_a_source_gets() -> None:
    got = []

    class Telling(Counters):
        def begin(self, mask: Any, seeds: Any, **options: Any) -> Any:
            got.append((mask.tolist(), seeds, options))
            return super().begin(mask, seeds)

    env = GymEnv(Telling())
    env.set_seed(3)
    env.reset(options={"level": 2})
    env.rollout(3, break_when_any_done=False)
    tensors = TorchVectorEnv(type("Tensors", (Telling,), {"device": "cpu"})())
    tensors.set_seed(3)
    tensors.reset()
    seeds = got[0][1]
    assert len({*seeds}) == 3
    assert seeds[0] == 3
    assert got == [
        ([True] * 3, seeds, {"level": 2}),
        ([True] * 3, None, {}),
        ([True, False, False], None, {}),
        ([False, True, False], None, {}),
        ([True] * 3, seeds, {}),
    ]


class Waiting(ScriptedSource):
    """A source that can't restart only some of its environments."""

    can_restart = False


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("Disabled", ScriptedSource), ("SameStep", ScriptedSource), ("NextStep", Waiting)],
)
def test_several_tensor_sources_in_a_process_are_like_several_of_arrays(
    mode: str, kind: Any
) -> None:
    def batches(device: str | None) -> Any:
        make = partial(kind, Script(), range(3), mode, device)
        source = partial(ParallelEnv, 2, make, envs_per_worker=2)
        options = {"frame_stack": 2, "normalize_observations": True, "on_env_error": "restart"}
        with Collector(source, frames_per_batch=24, total_frames=72, **options) as collector:
            collector.set_seed(0)
            for batch in collector:
                yield batch[batch["collector", "mask"]]

    for one, other in zip(batches(None), batches("cpu"), strict=True):
        assert {*one.keys(True, True)} == {*other.keys(True, True)}
        assert (one == other).all()


def second(td: Any) -> Any:
    return td.set("action", torch.tensor([0, 1, 0, 0]).expand(*td.batch_size, 4))


@pytest.mark.parametrize("place", ["threading", "multiprocessing"])
@pytest.mark.parametrize("mode", ["Disabled", "SameStep", "NextStep"])
def test_tensor_sources_that_act_when_they_are_ready(mode: str, place: str) -> None:
    script, mask = Script(), ("collector", "mask")
    makers = [partial(ScriptedSource, script, envs, mode, "cpu") for envs in ([0, 1], [2, 3])]
    options: dict[str, Any] = {"frame_stack": 2, "env_backend": place}
    with AsyncBatchedCollector(makers, policy=second, frames_per_batch=40, **options) as collector:
        for _ in range(3):
            batch = collector.next()
            for frame in batch[batch[mask]] if mask in batch.keys(True) else batch:
                following = frame["next"]
                stack, reward = following["observation"], float(following["reward"])
                env, episode, step = (int(number) for number in stack[-1, :3])
                before = script.observation(env, episode, step - 1, 1 if step > 1 else -1)
                assert stack[0].tolist() == before.tolist()
                assert stack[1].tolist() == script.observation(env, episode, step, 1).tolist()
                assert reward == script.reward(env, episode, step, 1)
                flags = bool(following["terminated"]), bool(following["truncated"])
                assert flags == script.flags(env, episode, step)


def test_vector_environments_without_a_layout_in_processes() -> None:
    class Own(SyncVectorEnv):
        """A class that can't restart only some of its environments."""

    def make(first: int) -> Any:
        envs = [partial(ScriptedLooseEnv, Script(), first + i) for i in range(2)]
        return Own(envs, autoreset_mode=AutoresetMode.SAME_STEP)

    makers = [partial(make, 0), partial(make, 2)]
    found = []
    for source in (makers, lambda: ParallelEnv(2, makers, backend="thread")):
        with Collector(source, frames_per_batch=120, total_frames=120) as collector:
            collector.set_seed(0)
            found.append(collector.next()["observation"][..., :3])
    assert (found[0] == found[1]).all()


# --- packages

PROJECT = """
[project]
name = "{name}"
version = "1.0"

[project.entry-points."trawl.sources"]
{entry}
"""
MODULE = """
import numpy as np
from gymnasium import spaces
from trawl.envs import EnvKind, Source

class Thing:
    def __init__(self, count, step):
        self.counts, self.by = np.zeros(count, np.int64), step

class ThingSource(Source):
    single_observation_space = spaces.Box(0, 99, (1,), np.int64)
    single_action_space = spaces.Discrete(2)

    def __init__(self, thing):
        self.thing, self.num_envs = thing, len(thing.counts)

    def begin(self, mask, seeds):
        self.thing.counts[mask] = 0
        return self.thing.counts[:, None].copy(), {"twice": 2 * self.thing.counts}

    def step(self, actions):
        self.thing.counts += self.thing.by
        flags = self.thing.counts > 5, np.zeros(self.num_envs, bool)
        found = self.thing.counts[:, None].copy(), np.ones(self.num_envs), *flags
        return *found, {"twice": 2 * self.thing.counts}

KIND = EnvKind(
    ThingSource,
    lambda env: isinstance(env, Thing),
    lambda name, num_envs=1, step=1: Thing(num_envs, step),
)
"""


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Installs a package with a kind of environments."""
    folder = tmp_path_factory.mktemp("things")
    project = PROJECT.format(name="the-things", entry='thing = "things:KIND"')
    packages.install(folder, project, {"things.py": MODULE})
    return folder


def test_a_kind_of_another_package(things: Path, tmp_path: Path) -> None:
    packages.run(
        """
import sys, gymnasium, trawl
from trawl.envs.build import build_one, is_env
from trawl.envs.batches.serial import batch_source, build_env
build_env("CartPole-v1")
def fail():
    raise ValueError("no simulator")
try:
    # Threads leave no warnings to the driver, which would look for packages.
    trawl.envs.ParallelEnv(2, fail, backend="thread")
except ValueError as error:
    assert "no simulator" in str(error), error
else:
    raise AssertionError("it was made")
assert is_env(gymnasium.make("CartPole-v1")) and not is_env(build_env)
assert "things" not in sys.modules, "it is loaded when it isn't needed"
env = build_env(batch_source("thing:any", 3), {"step": 2, "info_keys": ["twice"]})
assert repr(env) == "GymEnv(ThingSource, batch_size=[3])", env
found = env.rollout(2)
assert found["info", "twice"].tolist() == [[[0], [4]]] * 3, found["info", "twice"]
env.rebuild()
assert env.rollout(1).shape == (3, 1)
from things import Thing, ThingSource
try:
    trawl.envs.GymEnv(Thing(2, 1), info_keys=["twice"])
except TypeError as error:
    assert "as it is, or this one to ThingSource" in str(error), error
env = trawl.envs.GymEnv(ThingSource(Thing(2, 1)), info_keys=["twice"])
assert env.reset()["info"].shape == (2,)
assert build_one(Thing(2, 1)).batch_size == build_one(lambda: Thing(2, 1)).batch_size == (2,)
for given, words in [({"stp": 2}, "has no argument 'stp': it has step"), ({"step": []}, "")]:
    try:
        build_one("thing:any", given).rollout(1)
    except Exception as error:
        assert words in str(error), error
    else:
        raise AssertionError
try:
    build_one("thin:any")
except ValueError as error:
    assert "did you mean thing" in str(error), error
try:
    trawl.envs.GymEnv("thing:any")
except ValueError as error:
    assert "pass the id to the collector, or the environment to ThingSource" in str(error), error
else:
    raise AssertionError
""",
        things,
        here=tmp_path,
    )


BROKEN = {
    "lacking": ("no_such_module:KIND", "ModuleNotFoundError: No module named 'no_such"),
    "dividing": ("dividing:KIND", "can't be loaded: ZeroDivisionError: division by zero"),
    "three": ("three:KIND", "must name an EnvKind, but it names 3"),
    "nameless": ("three:MISSING", "AttributeError: module 'three' has no"),
}


def test_broken_packages(things: Path, tmp_path: Path) -> None:
    first, last, rude = tmp_path / "first", tmp_path / "last", "lambda env: env.nothing"
    modules = {
        "dividing.py": "1 / 0",
        "three.py": "KIND = 3",
        "rude.py": f"from trawl.envs import EnvKind\nKIND = EnvKind(dict, {rude})",
    }
    entries = {name: target for name, (target, _) in BROKEN.items()}
    for site, name, own in [
        (first, "a-broken", entries),
        (first, "a-rude", {"rude": "rude:KIND"}),
        # Their names belong to others.
        (last, "one", {"thing": "one:KIND"}),
        (last, "other", {"vmas": "other:KIND"}),
    ]:
        lines = "\n".join(f'{entry} = "{target}"' for entry, target in own.items())
        packages.install(site, PROJECT.format(name=name, entry=lines), modules)
    found = packages.run(
        f"""
from trawl.envs.build import build_one
from things import Thing
# Other kinds are not concerned.
build_one("CartPole-v1"), build_one("thing:any")
assert build_one(Thing(2, 1)).batch_size == (2,)
for name in {list(BROKEN)}:
    try:
        build_one(name + ":any")
    except Exception as error:
        print(type(error), error)
""",
        first,
        things,
        last,
        here=tmp_path,
    )
    for name, (target, words) in BROKEN.items():
        assert words in found
        # As a warning, where an object was shown to all kinds, and as an error for the id.
        assert found.count(f"the entry point {name} = '{target}' of trawl.sources, in ") == 2
    assert "in the package a-rude 1.0, is left out, because of AttributeError" in found
    assert "in the package one 1.0, is ignored, because the name belongs to the entry" in found
    assert "in the package other 1.0, is ignored, because" in found


def test_the_driver_warns_of_a_broken_package(things: Path, tmp_path: Path) -> None:
    project = PROJECT.format(name="a-broken", entry='broken = "broken:KIND"')
    module = "from trawl.envs import EnvKind\nKIND = EnvKind(None)"
    packages.install(tmp_path / "site", project, {"broken.py": module})
    code = """
from trawl.envs import ParallelEnv
from things import Thing
if __name__ == "__main__":
    env = ParallelEnv(2, lambda: Thing(2, 1))
    env.close()
"""
    found = packages.run(code, tmp_path / "site", things, here=tmp_path)
    assert found.count("a-broken") == 1
    assert "the adapter of an EnvKind must be a class or a function, but it is None" in found


def test_no_warning_without_other_packages() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match="expected an id"):
            Collector(object(), frames_per_batch=1)
