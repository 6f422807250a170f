"""States of collectors whose environments have torch tensors as data."""

import io
import threading
import warnings
from itertools import count
from typing import Any

import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from tests.oracle.continuing import assert_continues, row, saved
from trawl.collectors import Collector
from trawl.envs import TorchVectorEnv
from trawl.errors import EnvStateError
from trawl.testing import NumberedTorchEnv

COUNT = 3


class Body:
    """Part of a simulator, which refers to the whole."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.place = torch.zeros(COUNT, 2)
        # The first numbers of each row, in the same memory.
        self.first = self.place[:, 0]


class Drawing:
    """Simulator that draws from a generator of its own, with objects inside."""

    num_envs = COUNT
    device = torch.device("cpu")
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium
    single_observation_space = Box(-float("inf"), float("inf"), (2,))
    single_action_space = Box(-1, 1, (2,))

    def __init__(self, start: int = 0) -> None:
        self.unwrapped = self
        self.generator = torch.Generator().manual_seed(start)
        self.bodies = [Body(self), Body(self)]
        self.touching = {*self.bodies, Body, None, (1, ("a", None))}
        self.names = {"a": 1, 3: None}
        self.last: Tensor | None = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Tensor, Any]:
        if seed is not None:
            self.generator.manual_seed(seed)
        self.age = torch.arange(COUNT)
        for body in self.bodies:
            body.place.normal_(generator=self.generator)
        return self.bodies[0].place, {}

    def step(self, action: Tensor) -> tuple[Any, ...]:
        one, other = self.bodies
        one.place += torch.randn(COUNT, 2, generator=self.generator) + other.place + action
        one.first.mul_(0.5)
        self.last = final = one.place.clone()
        self.age = self.age + 1
        ended = self.age % 7 == 0
        one.place[ended] = 0
        return one.place, final[:, 0], ended, ended & False, {"final_obs": final}

    def close(self) -> None:
        pass


class Stateful(Drawing):
    """Simulator that states its own state, and has an attribute that can't be captured."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.lock = threading.Lock()

    def get_state(self) -> dict[str, Any]:
        places = [body.place for body in self.bodies]
        return {"age": self.age, "places": places, "generator": self.generator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.age = state["age"]
        for body, place in zip(self.bodies, state["places"], strict=True):
            body.place.copy_(place)
        self.generator.set_state(state["generator"])


class Noisy(nn.Module):
    def forward(self, observation: Tensor) -> Tensor:
        return torch.tanh(observation[..., :2] + torch.rand_like(observation[..., :2]))


def noisy(*prefix: str) -> TensorDictModule:
    keys: Any = [(*prefix, "observation")], [(*prefix, "action")]
    return TensorDictModule(Noisy(), *keys)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(("kind", "way"), [(Drawing, "attributes"), (Stateful, "get_state")])
def test_collectors_resume(kind: Any, way: str, seed: int | None) -> None:
    assert_continues(row(kind, way, noisy, seed=seed, frames_per_batch=8 * COUNT), used=1)


class Failing(Drawing):
    """Simulator that fails in its fifth step."""

    steps = 0

    def step(self, action: Tensor) -> tuple[Any, ...]:
        self.steps += 1
        if self.steps == 5:
            raise RuntimeError("it fails")
        return super().step(action)


@pytest.mark.filterwarnings("ignore:environments .* failed at step:RuntimeWarning")
def test_simulators_that_are_made_anew_have_the_same_seeds() -> None:
    options = {"on_env_error": "restart", "frames_per_batch": 8 * COUNT}
    assert_continues(row(lambda: TorchVectorEnv(Failing()), policy=noisy, **options), used=1)


def test_a_reset_after_a_resume_begins_with_a_frame() -> None:
    def make() -> Any:
        return NumberedTorchEnv(COUNT, [3], autoreset_mode=AutoresetMode.NEXT_STEP)

    # The last step of each batch ends all episodes.
    options: dict[str, Any] = {"frames_per_batch": 3 * COUNT, "reset_at_each_iter": True}
    with Collector(make(), **options) as collector, Collector(make(), **options) as other:
        collector.next()
        other.load_state_dict(saved(collector.state_dict()))
        for _ in range(2):
            assert other.next()["collector", "mask"].all()


def test_vmas_resumes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gym, which VMAS imports, warns about itself.
        vmas = pytest.importorskip("vmas")
    seeds = count()

    def make() -> Any:
        return vmas.make_env("balance", num_envs=COUNT, max_steps=7, seed=next(seeds))

    assert_continues(row(make, policy=lambda: noisy("agents"), frames_per_batch=8 * COUNT), used=1)


class Locked(Drawing):
    """Simulator with an attribute that can't be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.stream = io.BytesIO()


def test_what_cant_be_captured_is_named() -> None:
    with Collector(Locked(), noisy(), frames_per_batch=6) as collector:
        assert collector.env_state_methods() == ["none"] * COUNT
        with pytest.raises(EnvStateError, match=r"Locked.stream, .* get_state\(\) and set_state"):
            collector.env.capture()
        state = collector.state_dict()
        collector.load_state_dict(state)
        assert not collector.resumed


class Undeclared(TorchVectorEnv):
    """Adapter that doesn't say what its state is."""

    state_names = None


class Complete(TorchVectorEnv):
    """Adapter whose attributes are the whole state."""

    state_names = ("_shown", "_ended", "age")
    simulator = None
    age = 3


def test_adapters_say_what_their_state_is() -> None:
    with Collector(Undeclared(Drawing()), noisy(), frames_per_batch=6) as collector:
        assert collector.env_state_methods() == ["none"] * COUNT
        collector.load_state_dict(collector.state_dict())
        assert not collector.resumed
    env, other = Complete(Locked()), Complete(Locked())
    env.age = 7
    assert env.state_methods == ["attributes"] * COUNT
    other.restore(saved(env.capture()))
    assert other.age == 7


class Longer(Drawing):
    """Simulator with one more object."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies.append(Body(self))


def test_states_of_other_environments_are_refused() -> None:
    env = TorchVectorEnv(Drawing())
    env.rollout(1)
    state = env.capture()
    other = TorchVectorEnv(Longer())
    with pytest.raises(EnvStateError, match=r"\['objects'\] must be a list of 4"):
        other.check_state(state)
    fewer = TorchVectorEnv(NumberedTorchEnv(2))
    with pytest.raises(EnvStateError, match=r"\['objects'\] must be a list of"):
        fewer.restore(state)


def test_references_stay() -> None:
    one, other = TorchVectorEnv(Drawing()), TorchVectorEnv(Drawing())
    one.rollout(3)
    one.env.last = None
    del one.env.names
    other.rollout(1)
    memory = other.env.bodies[0].place
    other.restore(saved(one.capture()))
    bodies = other.env.bodies
    assert bodies[0].place is memory
    assert bodies[0].first.data_ptr() == memory.data_ptr()
    assert torch.equal(memory, one.env.bodies[0].place)
    assert other.env.last is None
    assert not hasattr(other.env, "names")
    assert other.env.touching == {*bodies, Body, None, (1, ("a", None))}
