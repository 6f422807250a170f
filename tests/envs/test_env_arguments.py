"""Errors for misspelt and wrong arguments of environments."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from trawl import Collector, Evaluator, GymEnv, MultiSyncCollector, ParallelEnv
from trawl.collectors import NormalizeObservation
from trawl.envs import FrameStack, InfoKey, JaxEnv, PettingZooEnv, TorchVectorEnv, VmasEnv
from trawl.envs.batches.serial import build_env
from trawl.envs.build import build_one
from trawl.testing import NumberedTorchEnv


def needs(name: str) -> Any:
    return pytest.importorskip(name)


def build(env_id: str, **options: Any) -> Any:
    """Makes an environment by its id; skips the test if its library is missing."""
    prefix, _, name = env_id.partition(":")
    if name and prefix in PREFIXES:
        needs(prefix)
    if prefix == "pettingzoo" and name.split("/")[0] in ("classic", "mpe2"):
        needs("pygame"), needs("mpe2")
    return build_one(env_id, options)


PREFIXES = ("gymnax", "brax", "jumanji", "envpool", "pettingzoo", "vmas", "dm_control")
SPREAD = "pettingzoo:mpe2/simple_spread_v3"


@pytest.mark.parametrize(
    ("env_id", "given", "nearest"),
    [
        ("CartPole-v1", "categorical_actions_encoding", "categorical_action_encoding"),
        ("CartPole-v1", "info_key", "info_keys"),
        ("FrozenLake-v1", "is_slipery", "is_slippery"),
        ("CartPole-v1", "vectorisation_mode", "vectorization_mode"),
        ("gymnax:CartPole-v1", "gravty", "gravity"),
        ("gymnax:CartPole-v1", "numenvs", "num_envs"),
        ("gymnax:MountainCar-v0", "num_env", "num_envs"),
        ("brax:inverted_pendulum", "episode_lenth", "episode_length"),
        ("brax:inverted_pendulum", "n_frame", "n_frames"),
        ("jumanji:Snake-v1", "num_row", "num_rows"),
        ("envpool:CartPole-v1", "max_episode_step", "max_episode_steps"),
        (SPREAD, "max_cycle", "max_cycles"),
        (SPREAD, "groupmap", "group_map"),
        ("pettingzoo:classic/rps-v2", "num_action", "num_actions"),
        ("vmas:balance", "max_step", "max_steps"),
        ("vmas:balance", "nagents", "n_agents"),
        ("vmas:football", "n_red_agent", "n_red_agents"),
        ("vmas:road_traffic", "n_agent", "n_agents"),
        ("dm_control:cheetah/run", "taskkwargs", "task_kwargs"),
    ],
)
@pytest.mark.filterwarnings("ignore:Brax System")
def test_a_misspelt_argument_of_an_id(env_id: str, given: str, nearest: str) -> None:
    words = f"{env_id} has no argument '{given}': it has {nearest}, "
    with pytest.raises(TypeError, match=words):
        build(env_id, **{given: 3})


class Calling(gymnasium.Env[Any, Any]):
    def __init__(self, gain: int = 1) -> None:
        _takes_nothing(gain=gain)  # type: ignore[call-arg]


def _takes_nothing() -> None:
    pass


LOCK = threading.Lock()
PENDULUM = "Pendulum-v1"
CHEETAH = "dm_control:cheetah/run"
TYPE_ERRORS: list[tuple[Callable[[], Any], str]] = [
    # --- names of arguments
    (lambda: GymEnv("CartPole-v1", num_envs=2, sutton=True), "'sutton': it has sutton_barto"),
    (lambda: build("vmas:football", n_blue_agents=2, n_red_agent=2),
     "football has no argument 'n_red_agent': it has n_red_ag"),
    *((partial(make, None, envv=3), f"{make.__name__} has no argument 'envv': it has env")
      for make in (TorchVectorEnv, PettingZooEnv, VmasEnv, JaxEnv)),
    (lambda: build(CHEETAH, task_kwargs={"timelimit": 3}),
     "task_kwargs .*'timelimit': it has time_limit"),
    (lambda: build(CHEETAH, environment_kwargs={"flat": 3}),
     "environment_kwargs .*'flat': it has flat_observ"),
    (lambda: Collector(PENDULUM, frames_per_batch=4, info_keys=["lives"]),
     r"info_keys\. .* in create_env_kwargs"),
    (lambda: Evaluator(PENDULUM, policy_factory=lambda: None, max_step=3),
     "Evaluator has no argument 'max_step': it has max_steps, "),
    (lambda: ParallelEnv(2, "CartPole-v1", n_envs=3),
     "ParallelEnv has no argument 'n_envs': it has "),
    (lambda: Evaluator("CartPole-v1", None, num_episodes=3),
     "the number of episodes is num_trajectories"),
    *((partial(cls, ["CartPole-v1"] * 2, frames_per_batch=10, n_envs=3),
       r"n_envs\. To step several environments, pass a list")
      for cls in (Collector, MultiSyncCollector)),
    # --- values
    (lambda: build(CHEETAH, task_kwargs=3),
     "task_kwargs must be a mapping of arguments by name, but it is 3"),
    (lambda: build(CHEETAH, render_options=3),
     "render_options must be a mapping of arguments by name"),
    (lambda: build("gymnax:CartPole-v1", gravity="x"), "gravity of .* must be a number"),
    (lambda: build("gymnax:CartPole-v1", device=1.5), "device must be a device, .* it is 1.5"),
    (lambda: build("brax:inverted_pendulum", auto_reset=True), "auto_reset=True can't be"),
    (lambda: build("brax:inverted_pendulum", batch_size=3), "batch_size=3 .*as num_envs"),
    (lambda: build("envpool:CartPole-v1", seed="x"), "seed of envpool:CartPole-v1 must be"),
    (lambda: build("envpool:CartPole-v1", base_path=3), "base_path .*must be a string, but"),
    (lambda: build(SPREAD, group_map={"a": "agent_0"}),
     r"group_map\['a'\] must be a list of agents, but it is 'agent_0'"),
    (lambda: JaxEnv(needs("gymnax").make("CartPole-v1")[0], 2, params={"gravity": 3}),
     r"params must be the parameters of CartPole-v1, .*dict"),
    (lambda: TorchVectorEnv(NumberedTorchEnv(2), device=1.5),  # type: ignore[arg-type]
     r"device must be a device, .* but it is 1\.5"),
    (lambda: TorchVectorEnv(NumberedTorchEnv(2), categorical_action_encoding="no"),  # type: ignore[arg-type]
     "categorical_action_encoding must be True or False"),
    (lambda: InfoKey("lives", 3), r"info_keys\['lives'\] must be a gymnasium space, .* is 3"),
    (lambda: FrameStack(4, keys=3), "keys must be a list of keys, but it is 3"),  # type: ignore[arg-type]
    (lambda: NormalizeObservation(keys=[3]),
     r"a key must be a string or a tuple of strings, .* is 3"),
    (lambda: Evaluator(PENDULUM, policy_factory=lambda: None, reward_keys=3),
     r"reward_keys must be a string or a tuple of .* is 3"),
    # --- environments of another kind
    (lambda: TorchVectorEnv("CartPole-v1"), "but it is an id: 'CartPole-v1'"),
    (lambda: TorchVectorEnv(NumberedTorchEnv), "but it is the class NumberedTorchEnv"),
    (lambda: needs("vmas") and VmasEnv("balance"),
     r"that vmas\.make_env made .*, but it is str: 'balance'"),
    (lambda: needs("vmas") and VmasEnv(gymnasium.make("CartPole-v1")), "but it is TimeLimit"),
    (lambda: needs("jax") and JaxEnv(gymnasium.make("CartPole-v1"), 2),
     r"must be written in JAX, but .* environment of Gymnasium"),
    # --- errors within a library stay as they are
    (lambda: build("vmas:balance", n_agents="x"),
     "not supported between instances of 'str' and 'int'"),
    (lambda: GymEnv("Calling-v0", gain=2), r"_takes_nothing\(\) got an unexpected keyword"),
    # --- what can't be sent to another process
    (lambda: ParallelEnv(2, ["CartPole-v1", partial(gymnasium.make, "CartPole-v1", LOCK)]),
     r"create_env_fn \(of environment 1\) can't be sent to another process: cannot pickle"),
    (lambda: ParallelEnv(2, "CartPole-v1", create_env_kwargs={"lock": LOCK}),
     r"create_env_kwargs \(of environment 0\) can't be sent"),
    (lambda: MultiSyncCollector(
        [PENDULUM] * 2, nn.utils.parametrizations.weight_norm(nn.Linear(3, 1)), frames_per_batch=10
     ), r"policy \(of worker 0\) can't be sent .*\n.* as policy_factory"),
]  # fmt: skip
VALUE_ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: build("vmas:balance", device="cuda:99"), "device is 'cuda:99', but torch finds"),
    (lambda: build("vmas:balance", num_envs=0), "num_envs must be at least 1, but it is 0"),
    (lambda: build_env(SPREAD, {"num_envs": 0}), "num_envs must be at least 1, but it is 0"),
    (lambda: build("gymnax:CartPole-v1", device="nothing"), "device 'nothing' is not a device"),
    (lambda: JaxEnv(needs("gymnax").make("Pendulum-v1"), 2, params=3), "params are given twice"),
    (lambda: TorchVectorEnv(NumberedTorchEnv(2), device="cuda:99"),
     "device is 'cuda:99', but torch finds"),
    (lambda: TorchVectorEnv(NumberedTorchEnv(2), device="nothing"),
     "device 'nothing' is not a device"),
    (lambda: TorchVectorEnv(NumberedTorchEnv(2), device=torch.device("meta")).rollout(2),
     r"is on cpu, but .* the argument device, is meta"),
    # --- ids
    (lambda: build("gymnex:CartPole-v1"), "names no library .*; did you mean gymnax"),
    (lambda: build("PettingZoo:classic/rps-v2"), "names no library .*; did you mean pettingzoo"),
    (lambda: build("pettingzoo:mpe2/simple_sprea_v3"),
     "environment 'mpe2/.*; did you mean mpe2/simple_sp"),
    (lambda: build("pettingzoo:classic/tictacto-v3"), "did you mean classic/tictactoe-v3"),
    (lambda: build("pettingzoo:mpe2/nothing_v0"), "there is no PettingZoo environment '.*nothing"),
    (lambda: build("pettingzoo:nothing/at_all"), "there is no PettingZoo environment '.*nothing"),
    (lambda: build("pettingzoo:"), "there is no PettingZoo environment ''"),
    (lambda: build("pettingzoo:abc/d_v1"), "there is no PettingZoo environment .abc/d_v1."),
    (lambda: build("envpool:cartpol-v1"),
     "EnvPool has no environment 'cartpol-v1'; did you mean CartPole-v1"),
    (lambda: build("gymnax:CartPol-v1"),
     "gymnax has no environment 'CartPol-v1': did you mean CartPole-v1"),
    (lambda: build("brax:antt"), "brax has no environment 'antt': did you mean ant"),
    (lambda: build("jumanji:Snak-v1"),
     "jumanji has no environment 'Snak-v1': did you mean Snake-v1"),
    (lambda: build("vmas:balanc"), "VMAS has no scenario 'balanc': it has balance, "),
    (lambda: build("dm_control:cheeta/run"), "no domain 'cheeta': it has cheetah, "),
    (lambda: build("dm_control:cheetah/fly"), "domain 'cheetah' has no task 'fly': it has run"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "call", "words"),
    [(TypeError, *row) for row in TYPE_ERRORS] + [(ValueError, *row) for row in VALUE_ERRORS],
    ids=[words for _, words in TYPE_ERRORS + VALUE_ERRORS],
)
@pytest.mark.filterwarnings("ignore:Brax System")
def test_a_mistake_is_named(
    error: Any, call: Callable[[], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = gymnasium.envs.registration.EnvSpec("Calling-v0", entry_point=Calling)
    monkeypatch.setitem(gymnasium.registry, "Calling-v0", spec)
    with pytest.raises(error, match=words):
        call()


def test_an_argument_that_tells_another_way() -> None:
    with pytest.warns(UserWarning, match="exactly 15 frames, pass exact_frames=True"):
        Collector("CartPole-v1", frames_per_batch=10, total_frames=15).shutdown()
    assert InfoKey("lives", spaces.Box(0, 9, (1,), np.int64)).path == ("lives",)


def spoiled(what: str, env: Any) -> Any:
    """Returns an environment whose step returns too little, or its reset too much."""
    found = getattr(env, what)
    some = slice(4) if what == "step" else 0
    setattr(env, what, lambda *args, **kwargs: found(*args, **kwargs)[some])
    return env


def pendulum(what: str) -> Any:
    return spoiled(what, gymnasium.make("Pendulum-v1"))


def vector(what: str) -> Any:
    return spoiled(what, gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync"))


def tensors(what: str) -> Any:
    return spoiled(what, NumberedTorchEnv(2, lengths=[3]))


@pytest.mark.parametrize(
    "make",
    [
        lambda what: _collect(pendulum(what)),
        lambda what: _collect(vector(what)),
        lambda what: _collect(tensors(what)),
        lambda what: _collect([lambda: pendulum(what)] * 2),
        lambda what: _collect(ParallelEnv(2, lambda: pendulum(what), backend="thread")),
        lambda what: _collect(TorchVectorEnv(tensors(what), device="cpu")),
        lambda what: GymEnv(pendulum(what)).rollout(2),
        lambda what: GymEnv(pendulum(what), frame_skip=2).rollout(2),
        lambda what: GymEnv(pendulum(what), info_keys=["nothing"]),
        lambda what: TorchVectorEnv(tensors(what), info_keys=["nothing"]),
    ],
)
def test_a_step_of_four_values_and_a_reset_without_info(make: Callable[[str], Any]) -> None:
    words = r"step of .* returned 4 values, but it must return \(observation, reward, "
    with pytest.raises(ValueError, match=words):
        make("step")
    words = r"reset of .* returned \w+, but it must return \(observation, info\)"
    with pytest.raises(TypeError, match=words):
        make("reset")


def _collect(env: Any) -> None:
    with Collector(env, frames_per_batch=4) as collector:
        collector.next()


def test_a_step_that_returns_nothing() -> None:
    env = gymnasium.make("Pendulum-v1")
    env.step = lambda action: None  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"step of .* returned NoneType, but it must return \(obs"):
        _collect(env)


class _WithoutInfo(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, of: str) -> None:
        self._of = of

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), None if self._of == "reset" else {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, True, False, None if self._of == "step" else {}


@pytest.mark.parametrize("of", ["reset", "step"])
@pytest.mark.parametrize("keys", [["x"], {"x": spaces.Discrete(2)}], ids=["found", "stated"])
def test_an_info_that_is_none_has_no_entries(keys: Any, of: str) -> None:
    with pytest.raises(TypeError, match=f"{of} of .* returned None as its info, .* return {{}} if"):
        Collector(GymEnv(_WithoutInfo(of), info_keys=keys), frames_per_batch=2).next()


@pytest.mark.parametrize("of", ["reset", "step"])
@pytest.mark.parametrize("parallel", [False, True])
def test_an_info_that_nobody_reads_may_be_none(parallel: bool, of: str) -> None:
    def make() -> Any:
        return GymEnv(_WithoutInfo(of))

    env = ParallelEnv(1, make, backend="thread") if parallel else make()
    with Collector(env, frames_per_batch=2) as collector:
        assert collector.next()["next", "terminated"].all()


def test_a_step_of_four_values_in_a_vector_environment() -> None:
    class Old(_WithoutInfo):
        def step(self, action: Any) -> Any:
            return super().step(action)[1:]

    env = gymnasium.vector.SyncVectorEnv([lambda: Old("nothing")] * 2)
    words = r"expected 5, got 4\)(.|\n)*step of each sub-environment must return \(observation, "
    with pytest.raises(ValueError, match=words), Collector(env, frames_per_batch=2) as collector:
        collector.next()


class _StableVecEnv:
    num_envs = 2

    def step_async(self, actions):
        pass

    def step_wait(self):
        pass


_OfGym = type("OldEnv", (), {"__module__": "gym.envs.classic_control"})


@pytest.mark.parametrize("make", [_StableVecEnv, _OfGym])
@pytest.mark.parametrize("called", [True, False])
def test_environments_of_other_libraries(make, called):
    words = "shimmy" if make is _OfGym else "pass a list of the functions that make"
    with pytest.raises(TypeError, match=words):
        Collector(make() if called else lambda: make(), frames_per_batch=10)
