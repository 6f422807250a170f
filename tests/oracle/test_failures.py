"""Failures in any row, at any boundary of a batch, however frames are delivered."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, cycle, islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from tests.oracle.cases import DELIVERIES, Case, can_pad, collector_of, policy_of
from tests.oracle.comparing import AGENTS, check
from trawl.collectors import AsyncBatchedCollector, Collector
from trawl.envs import ParallelEnv
from trawl.testing.faces import FACES, Face
from trawl.testing.oracle import Options
from trawl.testing.script import Script, ScriptedFailure
from trawl.testing.scripted_envs import ScriptedEnv, ScriptedLooseEnv, ScriptedPool

pytestmark = pytest.mark.filterwarnings("ignore")
FAILING = [face for face in FACES if face != "jax"]
# Where steps and resets fail: environment, episode, step. An environment that is built anew fails
# there again, after some steps that succeed.
STEPS = [(0, 0, 3), (0, 1, 1), (0, 2, 2), (0, 2, 4), (2, 0, 4), (2, 1, 1), (1, 1, 2), (1, 2, 1)]
RESETS = [(0, 2, 0), (1, 2, 0), (2, 2, 0)]


# Options that hold something of the batch while it is collected.
STAGES: list[dict[str, Any]] = [
    {"frame_stack": 3},
    {"normalize_observations": True, "normalize_rewards": True},
    {},
]


@dataclass(frozen=True)
class Failing(Case):
    """A case in which one step or reset fails."""

    at: tuple[int, int, int] = (0, 0, 3)

    @property
    def script(self) -> Script:
        return replace(super().script, failures=frozenset([self.at]))


def places(face: str) -> Iterator[tuple[int, int, int]]:
    """Yields where the environments of a kind fail; one of the first is a reset."""
    kind, index = FACES[face], list(FACES).index(face)
    # The first episode of agents is spent on finding out what they return.
    first = 2 if face in AGENTS else 0
    steps, resets = (
        [at for at in places if at[1] >= first and not (at[0] and kind.single)]
        for places in (STEPS, RESETS)
    )
    found = steps[index % len(steps) :] + steps[: index % len(steps)]
    # In a list of vectors of tensors, whose frames are TensorDicts, the step before a reset that
    # fails is lost with it.
    if kind.kind.resets == "after" and face != "tensors_list":
        found.insert(index % 3, resets[index % len(resets)])
    return cycle(found)


@pytest.fixture(autouse=True)
def libraries(request: pytest.FixtureRequest) -> None:
    """Skips tests of faces whose libraries are missing."""
    face = getattr(request.node, "callspec", None) and request.node.callspec.params.get("face")
    if face and FACES[face].needs:
        pytest.importorskip(FACES[face].needs)


@pytest.mark.parametrize("face", FAILING)
def test_every_real_frame_is_delivered_once(face) -> None:
    where, rows, index = places(face), cycle([1, 2, 3, 5]), FAILING.index(face)
    for number, delivery in enumerate(DELIVERIES):
        # Each delivery meets stacks, and each kind does.
        stack = 3 if (index + number) % 2 else None
        size = next(rows) * (1 if FACES[face].single else 3)
        # Failed steps are in no stack, and in no statistics.
        normalize = stack is None
        options = Options(
            frames_per_batch=size,
            restart=True,
            frame_stack=stack,
            normalize_observations=normalize,
            normalize_rewards=normalize,
        )
        if delivery != "steps" and can_pad(face, delivery):
            check(Failing(face, options, delivery=delivery, at=next(where)))


@pytest.mark.parametrize("face", FAILING)
def test_an_error_names_the_step_and_closes_the_collector(face) -> None:
    where, index = places(face), FAILING.index(face)
    for place in ("one", "sync"):
        options = Options(frames_per_batch=6, **STAGES[(index + len(place)) % len(STAGES)])
        case = Failing(face, options, place, at=next(where))
        message = "environment {} fails in episode {} at step {}".format(*case.at)
        collector = collector_of(case)
        with pytest.raises(ScriptedFailure, match=message) as error:
            deque(islice(collector, 60), maxlen=0)
        told = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
        assert "while collecting from" in told
        assert collector.closed
        # Only the traceback holds the memory of the batch, and workers have a part of it.
        del error
        assert place == "sync" or collector.stats().get("batches_held", 0) == 0
        with pytest.raises(RuntimeError, match="shut down after ScriptedFailure"):
            list(collector)


# --- processes of environments


class Dying(ScriptedEnv):
    """Does something to its process in the step or reset that fails.

    Args:
        what: does it.
        script: the script.
        env: number of the environment.
    """

    def __init__(self, what: Callable[[], Any], script: Script, env: int) -> None:
        super().__init__(script, env)
        self.what = what

    def reset(self, **kwargs: Any) -> Any:
        return self.play(super().reset, **kwargs)

    def step(self, action: Any) -> Any:
        return self.play(super().step, action)

    def play(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except ScriptedFailure:
            self.what()
            raise


class DyingLoose(Dying, ScriptedLooseEnv):
    """Its observations have no fixed layout."""


KILLED, EXITED = partial(signal.raise_signal, signal.SIGKILL), partial(os._exit, 3)
TOLD = {
    KILLED: "WorkerDied: environments? .*: its process was killed by SIGKILL",
    EXITED: "WorkerDied: environments? .*: its process exited with status 3",
    signal.pause: "WorkerDied: environment .: its process took more than 3 s for a step",
    # It fails in a process that can print nothing any more.
    partial(os.close, 1): "ScriptedFailure: in environment ",
}
CLOSED = list(TOLD)[-1]


@dataclass(frozen=True)
class InProcesses(Failing):
    """A case in which environments are in processes, one of which dies.

    Attributes:
        what: kills it.
        settings: those of the ``ParallelEnv``.
    """

    what: Any = KILLED
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Face:
        loose, each = self.face == "loose", self.settings.get("envs_per_worker", 1)
        resets, grouped = "after" if loose else "same", "groups" in self.settings
        kind = replace(super().kind.kind, resets=resets, together=each, grouped=grouped)
        make = partial(partial, self.made, DyingLoose if loose else Dying)
        return replace(super().kind, make=make, kind=kind)

    def made(self, cls: Any, script: Script, envs: Sequence[int]) -> Any:
        makers = [partial(cls, self.what, script, env) for env in envs]
        return ParallelEnv(len(makers), makers, **self.settings)


@pytest.mark.parametrize(
    ("face", "settings", "what", "at"),
    [
        ("parallel", {}, CLOSED, (0, 1, 1)),
        ("parallel", {"envs_per_worker": 2}, KILLED, (2, 0, 4)),
        ("parallel", {"groups": 3}, EXITED, (0, 2, 2)),
        ("parallel", {"groups": 3, "worker_timeout": 3}, signal.pause, (1, 3, 2)),
        ("loose", {"envs_per_worker": 2}, KILLED, (1, 1, 2)),
        ("loose", {"worker_timeout": 3}, signal.pause, (0, 3, 1)),
        ("loose", {}, CLOSED, (0, 1, 0)),
    ],
)
def test_the_death_of_a_process_is_as_a_failure_of_its_environments(
    face, settings, what, at
) -> None:
    options = Options(12, restart=True)
    with pytest.warns(RuntimeWarning, match=TOLD[what]):
        check(InProcesses(face, options, at=at, what=what, settings=settings))


# --- pools


@pytest.mark.parametrize("cls", [Collector, AsyncBatchedCollector])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("at", [(0, 2, 2), (2, 0, 4)])
def test_a_pool_is_made_anew_with_all_that_it_has(cls, mode, at) -> None:
    script = replace(Case("pool_next_step").script, failures=frozenset([at]))
    seeds = count()
    collector = cls(
        lambda: ScriptedPool(script, range(3), mode, 1, next(seeds)),
        policy=policy_of(Case("list")),
        frames_per_batch=7,
        on_env_error="restart",
    )
    with pytest.warns(RuntimeWarning, match="environments 0 to 2 failed after"):
        frames, cut = torch.cat([batch.clone() for batch in islice(collector, 12)]), 0
    assert collector.stats()["env_restarts"] >= 2
    collector.shutdown()
    for env in range(3):
        mine = frames[frames["env_index"] == env]
        after = mine["observation"][:, :3] + torch.tensor([0, 0, 1])
        assert torch.equal(mine["next", "observation"][:, :3], after)
        assert (mine["observation"][:, 0] == env).all()
        for before, frame in pairwise(mine):
            episode, step = map(int, frame["observation"][1:3])
            last, was = before["next"], int(before["observation"][1])
            same = frame["collector", "traj_ids"] == before["collector", "traj_ids"]
            assert same == bool(step)
            if step:
                assert not last["done"]
                assert last["observation"][1:3].tolist() == [episode, step]
            elif last["observation"][2] < script.length(env, was):
                cut += int(last["truncated"])
    # Failures truncate the frames before, unless these were delivered already.
    assert cut


@pytest.mark.parametrize("cls", [Collector, AsyncBatchedCollector])
@pytest.mark.parametrize(
    "failures",
    [
        [(env, 0, 1) for env in range(3)],
        # The others have taken no step before this one fails.
        [(2, 0, 2)],
    ],
)
def test_a_pool_that_always_fails_ends_the_collector(cls, failures) -> None:
    script = replace(Case("pool_next_step").script, failures=frozenset(failures))
    make = partial(ScriptedPool, script, range(3), "NextStep", 1)
    collector = cls(
        make, policy=policy_of(Case("list")), frames_per_batch=500, on_env_error="restart"
    )
    with pytest.warns(RuntimeWarning), pytest.raises(ScriptedFailure, match="in episode 0"):
        next(iter(collector))
    assert collector.closed


# --- other mistakes


class Mistaken(ScriptedEnv):
    """Returns something else than it says, in a step of its second episode."""

    def __init__(self, mistake: str, env: int) -> None:
        super().__init__(Script(lengths=[3, 4]), env)
        self.mistake = mistake

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.player.env == 1 and self.player.now[1:] == (1, 2):
            wrong = {"shape": np.zeros(5, np.float32), "text": "high"}
            obs = wrong.get(self.mistake, obs) if self.mistake != "reward" else obs
            reward = {"nan": float("nan"), "reward": None}.get(self.mistake, reward)
        return obs, reward, terminated, truncated, info


BATCHES_OF = {
    "list": list,
    "sync": lambda makers: SyncVectorEnv(makers),
    "parallel": lambda makers: ParallelEnv(len(makers), makers, backend="thread"),
}


@pytest.mark.parametrize("mistake", ["shape", "text", "reward", "nan"])
@pytest.mark.parametrize("kind", BATCHES_OF)
def test_a_mistake_of_an_environment_is_told_or_is_no_frame(kind, mistake) -> None:
    makers = [partial(Mistaken, mistake, env) for env in range(3)]
    source = lambda: BATCHES_OF[kind](makers)  # noqa: E731
    source = source() if kind == "list" else source
    policy = policy_of(Case("list"))
    with pytest.raises((TypeError, ValueError)):  # noqa: SIM117
        with Collector(source, policy, frames_per_batch=9) as collector:
            list(islice(collector, 4))
    assert collector.closed
    assert collector.stats()["batches_held"] == 0
    # Gymnasium's vector environments make a NaN of None.
    if mistake != "nan" and (kind, mistake) != ("sync", "reward"):
        with Collector(source, policy, frames_per_batch=9, on_env_error="restart") as collector:
            batches = [batch.clone() for batch in islice(collector, 4)]
            assert collector.stats()["env_restarts"] >= 1
        for batch in batches:
            real = batch[batch["collector", "mask"]]
            seen = real["next", "observation"]
            assert not ((seen[:, 0] == 1) & (seen[:, 1] == 1) & (seen[:, 2] >= 2)).any()


@pytest.mark.parametrize("delivery", ["rows", "split", "padded", "cat", "in_turn"])
@pytest.mark.parametrize("restart", [False, True])
def test_an_error_of_the_policy_closes_the_collector(delivery, restart) -> None:
    def fails(observation: torch.Tensor) -> torch.Tensor:
        if observation[0, 2] == 2:
            raise ZeroDivisionError("no action")
        return torch.nn.functional.one_hot(torch.zeros(len(observation), dtype=torch.long), 4)

    more = {"on_env_error": "restart"} if restart else {}
    makers = [partial(ScriptedEnv, Script(), env) for env in range(3)]
    collector = Collector(makers, fails, frames_per_batch=6, **DELIVERIES[delivery], **more)
    with pytest.raises(ZeroDivisionError, match="no action"):
        list(islice(collector, 9))
    assert collector.closed
