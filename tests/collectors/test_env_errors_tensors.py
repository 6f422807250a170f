"""``on_env_error="restart"`` with environments of tensors, compared with those of arrays."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from trawl.collectors import Collector
from trawl.envs import TorchVectorEnv
from trawl.rollout.env_restarts import MOST_FAILURES
from trawl.testing import NumberedEnv, NumberedTorchEnv, SelfResettingVectorEnv

COUNT, LENGTHS = 3, [4, 3, 5]
IDS = ("collector", "traj_ids")
FAILS = pytest.mark.filterwarnings("ignore:environments 0 to 2 failed at step:RuntimeWarning")


class Broken(Exception):
    """An error of the environment itself."""


class Failing:
    """Mixin that counts calls of all environments of a maker, and fails at some."""

    calls: list[str]
    steps: tuple[int, ...]
    resets: tuple[int, ...]

    def note(self, name: str) -> None:
        self.calls.append(name)
        if self.calls.count(name) - 1 in getattr(self, name):
            raise Broken(name)

    def step(self, actions: Any) -> Any:
        self.note("steps")
        return super().step(actions)  # type: ignore[misc]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.note("resets")
        return super().reset(seed=seed, options=options)  # type: ignore[misc]


class OnTorch(Failing, NumberedTorchEnv):
    pass


class OnNumpy(Failing, SyncVectorEnv):
    pass


class ItsOwn(Failing, SelfResettingVectorEnv):
    pass


def maker(
    torch_data: bool, mode: AutoresetMode, steps: Any = (), resets: Any = ()
) -> Callable[[], Any]:
    calls: list[str] = []

    def kept(kind: Any, *args: Any, **kwargs: Any) -> Any:
        named = {"calls": calls, "steps": steps, "resets": resets}
        return type(kind.__name__, (kind,), named)(*args, **kwargs)

    def make() -> Any:
        if torch_data:
            return TorchVectorEnv(kept(OnTorch, COUNT, LENGTHS, autoreset_mode=mode))
        envs = [
            partial(NumberedEnv, i, [*LENGTHS[i % len(LENGTHS) :], *LENGTHS]) for i in range(COUNT)
        ]
        if mode is AutoresetMode.NEXT_STEP:
            return kept(ItsOwn, envs)
        return kept(OnNumpy, envs, autoreset_mode=mode)

    return make


class Recurrent(TensorDictModuleBase):
    in_keys = ["observation", "h", "is_init"]  # noqa: RUF012 - as tensordict
    out_keys = ["action", ("next", "h")]  # noqa: RUF012

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        h = td.get("h", torch.zeros(*td.batch_size, 1))
        td["action"] = nn.functional.one_hot(h[..., 0].long() % 4, 4)
        td["next", "h"] = h + 1
        return td


def collected(make: Any, count: int = 4, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    options = {"frames_per_batch": 8 * COUNT, "on_env_error": "restart", **options}
    with Collector(make, Recurrent(), **options) as collector:
        collector.set_seed(1)
        return [collector.next().clone() for _ in range(count)], collector.stats()


def trajectories(batches: list[Any]) -> list[int]:
    """Returns the ids of all frames, numbered in the order of their first frames."""
    ids = torch.cat([batch[IDS] for batch in batches], -1).flatten().tolist()
    numbers: dict[int, int] = {-1: -1}
    return [numbers.setdefault(one, len(numbers)) for one in ids]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    # Arrays number the episodes that begin after a failure in another order.
    assert trajectories(found) == trajectories(expected)
    for one, other in zip(found, expected, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        for key in one.keys(True, True):
            assert key == IDS or torch.equal(one[key], other[key]), key


@FAILS
def test_a_failed_reset_ends_the_episodes_after_their_step() -> None:
    mode = AutoresetMode.DISABLED
    expected, _ = collected(maker(False, mode, resets=(3,)))
    found, stats = collected(maker(True, mode, resets=(3,)))
    assert_same(found, expected)
    assert stats["env_restarts"] == 1
    assert found[0]["collector", "mask"].all()


@FAILS
def test_an_environment_that_always_fails_is_an_error() -> None:
    make = maker(True, AutoresetMode.SAME_STEP, steps=range(1, 1000))
    with (
        Collector(make, Recurrent(), frames_per_batch=90, on_env_error="restart") as collector,
        pytest.raises(Broken) as caught,
    ):
        collector.next()
    assert any(f"failed {MOST_FAILURES} times" in note for note in caught.value.__notes__)


@FAILS
def test_seeds_of_rebuilt_environments_are_part_of_the_state() -> None:
    make = maker(True, AutoresetMode.SAME_STEP, steps=(2,))
    with Collector(make, Recurrent(), frames_per_batch=24, on_env_error="restart") as collector:
        collector.set_seed(1)
        collector.next()
        env = collector.env
        state = env.capture()
        before = env._rebuilds
        env.rebuild()
        seed = env._seed
        env.begin(None)
        env.restore(state)
        assert env._rebuilds == before == 1
        env.rebuild()
        assert env._seed == seed


def test_an_existing_environment_is_refused() -> None:
    with pytest.raises(ValueError, match="create_env_fn is an existing environment"):
        Collector(NumberedTorchEnv(2), frames_per_batch=8, on_env_error="restart")


def test_a_maker_must_make_new_environments() -> None:
    env = type("Same", (OnTorch,), {"calls": [], "steps": (2,), "resets": ()})(2)
    with (
        Collector(lambda: env, frames_per_batch=20, on_env_error="restart") as collector,
        pytest.raises(Broken) as caught,
    ):
        collector.next()
    assert any("same object again" in note for note in caught.value.__notes__)
