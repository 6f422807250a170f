"""Errors for misspelt and wrong arguments of environments."""

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import VectorWrapper
from torch import nn

from trawl import Collector, Evaluator, GymEnv, MultiSyncCollector, ParallelEnv
from trawl.collectors import NormalizeObservation
from trawl.envs import FrameStack, InfoKey, JaxEnv, PettingZooEnv, TorchVectorEnv, VmasEnv
from trawl.envs.build import build_one
from trawl.testing import NumberedTorchEnv


@pytest.mark.parametrize(
    ("env_id", "given", "nearest"),
    [
        ("gymnax:CartPole-v1", "gravty", "gravity"),
        ("gymnax:CartPole-v1", "numenvs", "num_envs"),
        ("gymnax:MountainCar-v0", "num_env", "num_envs"),
        ("brax:inverted_pendulum", "episode_lenth", "episode_length"),
        ("brax:inverted_pendulum", "n_frame", "n_frames"),
        ("jumanji:Snake-v1", "num_row", "num_rows"),
        ("envpool:CartPole-v1", "max_episode_step", "max_episode_steps"),
        ("pettingzoo:mpe2/simple_spread_v3", "max_cycle", "max_cycles"),
        ("pettingzoo:mpe2/simple_spread_v3", "groupmap", "group_map"),
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
    _import(env_id)
    words = f"{env_id} has no argument '{given}': it has {nearest}, "
    with pytest.raises(TypeError, match=words):
        build_one(env_id, {given: 3})


@pytest.mark.parametrize(
    ("env_id", "given", "nearest"),
    [
        ("CartPole-v1", "categorical_actions_encoding", "categorical_action_encoding"),
        ("CartPole-v1", "info_key", "info_keys"),
        ("FrozenLake-v1", "is_slipery", "is_slippery"),
        ("CartPole-v1", "vectorisation_mode", "vectorization_mode"),
    ],
)
def test_a_misspelt_argument_of_gymnasium(env_id: str, given: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"{env_id} has no argument '{given}': it has {nearest}, "):
        GymEnv(env_id, **{given: True})


def _import(env_id: str) -> None:
    prefix, _, name = env_id.partition(":")
    pytest.importorskip(prefix)
    if "/" in name and prefix == "pettingzoo":
        pytest.importorskip("pygame")
        pytest.importorskip({"classic": "pettingzoo"}.get(name.split("/")[0], name.split("/")[0]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"task_kwargs": {"timelimit": 3}},
            "task_kwargs .*'timelimit': it has time_limit",
        ),
        ({"environment_kwargs": {"flat": 3}}, "environment_kwargs .*'flat': it has flat_observ"),
        ({"task_kwargs": 3}, "task_kwargs must be a mapping of arguments by name, but it is 3"),
        ({"render_options": 3}, "render_options must be a mapping of arguments by name"),
    ],
)
def test_arguments_within_those_of_dm_control(options: Any, words: str) -> None:
    pytest.importorskip("dm_control")
    with pytest.raises(TypeError, match=words):
        build_one("dm_control:cheetah/run", options)


def test_an_argument_of_a_vector_environment() -> None:
    with pytest.raises(
        TypeError, match="CartPole-v1 has no argument 'sutton': it has sutton_barto"
    ):
        GymEnv("CartPole-v1", num_envs=2, sutton=True)


def test_an_error_in_a_constructor_stays_as_it_is() -> None:
    class Calling(gymnasium.Env):
        def __init__(self, gain: int = 1) -> None:
            _takes_nothing(gain=gain)  # type: ignore[call-arg]

    gymnasium.register("Calling-v0", Calling)
    try:
        with pytest.raises(TypeError, match=r"_takes_nothing\(\) got an unexpected keyword"):
            GymEnv("Calling-v0", gain=2)
    finally:
        gymnasium.registry.pop("Calling-v0")


def _takes_nothing() -> None:
    pass


def test_arguments_that_are_right_are_not_blamed() -> None:
    pytest.importorskip("vmas")
    with pytest.raises(TypeError, match="football has no argument 'n_red_agent': it has n_red_ag"):
        build_one("vmas:football", {"n_blue_agents": 2, "n_red_agent": 2})


@pytest.mark.parametrize("make", [TorchVectorEnv, PettingZooEnv, VmasEnv, JaxEnv])
def test_a_misspelt_argument_of_an_adapter(make: Any) -> None:
    with pytest.raises(TypeError, match=rf"{make.__name__} has no argument 'envv': it has env"):
        make(None, envv=3)


@pytest.mark.parametrize(
    ("env_id", "options", "error", "words"),
    [
        ("gymnax:CartPole-v1", {"gravity": "x"}, TypeError, "gravity of .* must be a number"),
        ("brax:inverted_pendulum", {"auto_reset": True}, TypeError, "auto_reset=True can't be"),
        ("brax:inverted_pendulum", {"batch_size": 3}, TypeError, "batch_size=3 .*as num_envs"),
        (
            "envpool:CartPole-v1",
            {"seed": "x"},
            TypeError,
            "seed of envpool:CartPole-v1 must be",
        ),
        ("envpool:CartPole-v1", {"base_path": 3}, TypeError, "base_path .*must be a string, but"),
        ("vmas:balance", {"device": "cuda:99"}, ValueError, "device is 'cuda:99', but torch finds"),
        ("gymnax:CartPole-v1", {"device": 1.5}, TypeError, "device must be a device, .* it is 1.5"),
        (
            "gymnax:CartPole-v1",
            {"device": "nothing"},
            ValueError,
            "device 'nothing' is not a device",
        ),
    ],
)
def test_a_wrong_value(env_id: str, options: Any, error: Any, words: str) -> None:
    pytest.importorskip(env_id.partition(":")[0])
    with pytest.raises(error, match=words):
        build_one(env_id, options)


def test_an_error_within_a_library_stays_as_it_is() -> None:
    pytest.importorskip("vmas")
    with pytest.raises(TypeError, match="not supported between instances of 'str' and 'int'"):
        build_one("vmas:balance", {"n_agents": "x"})


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("gymnex:CartPole-v1", "'gymnex:CartPole-v1' names no library .*; did you mean gymnax"),
        ("PettingZoo:classic/rps-v2", "names no library .*; did you mean pettingzoo"),
        (
            "pettingzoo:mpe2/simple_sprea_v3",
            "environment 'mpe2/.*; did you mean mpe2/simple_sp",
        ),
        ("pettingzoo:classic/tictacto-v3", "did you mean classic/tictactoe-v3"),
        ("pettingzoo:", "there is no PettingZoo environment ''"),
        ("pettingzoo:abc/d_v1", "there is no PettingZoo environment .abc/d_v1."),
        ("envpool:cartpol-v1", "EnvPool has no environment 'cartpol-v1'; did you mean CartPole-v1"),
    ],
)
def test_a_misspelt_id(env_id: str, words: str) -> None:
    for package in ("pettingzoo", "mpe2", "envpool"):
        pytest.importorskip(package)
    with pytest.raises(ValueError, match=words):
        build_one(env_id)


def test_parameters_of_gymnax_of_another_type() -> None:
    gymnax = pytest.importorskip("gymnax")
    env, params = gymnax.make("CartPole-v1")
    with pytest.raises(TypeError, match=r"params must be the parameters of CartPole-v1, .*dict"):
        JaxEnv(env, 2, params={"gravity": 3})
    with pytest.raises(ValueError, match="params are given twice"):
        JaxEnv((env, params), 2, params=params)


class _Wrong:
    """Mixin for an environment that returns too much or too little."""

    wrong = ""

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        return obs if self.wrong == "reset" else (obs, info)

    def step(self, action: Any) -> Any:
        return super().step(action)[: 4 if self.wrong == "step" else 5]


class _WrongTensors(_Wrong, NumberedTorchEnv):
    """Environment of tensors."""


class _WrongArrays(_Wrong, VectorWrapper):
    """Vector environment of arrays."""


class _WrongSingle(_Wrong, gymnasium.Wrapper):
    """Single environment."""


def _single(wrong: str, name: str = "Pendulum-v1") -> Any:
    env = _WrongSingle(gymnasium.make(name))
    env.wrong = wrong
    return env


def _arrays(wrong: str) -> Any:
    env = _WrongArrays(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync"))
    env.wrong = wrong
    return env


def _tensors(wrong: str) -> Any:
    env = _WrongTensors(2, lengths=[3])
    env.wrong = wrong
    return env


@pytest.mark.parametrize(
    "make",
    [
        _single,
        _arrays,
        _tensors,
        lambda wrong: [lambda: _single(wrong)] * 2,
        lambda wrong: ParallelEnv(2, lambda: _single(wrong), backend="thread"),
        lambda wrong: TorchVectorEnv(_tensors(wrong), device="cpu"),
    ],
    ids=["single", "arrays", "tensors", "list", "threads", "device"],
)
def test_a_step_of_four_values_and_a_reset_without_info(make: Callable[[str], Any]) -> None:
    words = r"step of .* returned 4 values, but it must return \(observation, reward, "
    with pytest.raises(ValueError, match=words):
        _collect(make("step"))
    words = r"reset of .* returned \w+, but it must return \(observation, info\)"
    with pytest.raises(TypeError, match=words):
        _collect(make("reset"))


def _collect(env: Any) -> None:
    with Collector(env, frames_per_batch=4) as collector:
        collector.next()


def test_a_step_of_four_values_on_other_paths() -> None:
    words = "step of .* returned 4 values"
    with pytest.raises(ValueError, match=words):
        GymEnv(_single("step")).rollout(2)
    with pytest.raises(ValueError, match=words):
        GymEnv(_single("step"), frame_skip=2).rollout(2)
    with pytest.raises(ValueError, match=words):
        GymEnv(_single("step"), info_keys=["nothing"])
    with pytest.raises(ValueError, match=words):
        TorchVectorEnv(_tensors("step"), info_keys=["nothing"])
    with pytest.raises(TypeError, match=r"reset of .* returned Tensor"):
        TorchVectorEnv(_tensors("reset"), info_keys=["nothing"])


def test_a_step_that_returns_nothing() -> None:
    env = _single("")
    env.step = lambda action: None  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"step of .* returned NoneType, but it must return \(obs"):
        _collect(env)


def test_devices_of_tensors() -> None:
    env = NumberedTorchEnv(2, lengths=[3])
    with pytest.raises(ValueError, match="device is 'cuda:99', but torch finds"):
        TorchVectorEnv(env, device="cuda:99")
    with pytest.raises(ValueError, match="device 'nothing' is not a device"):
        TorchVectorEnv(env, device="nothing")
    with pytest.raises(TypeError, match=r"device must be a device, .* but it is 1\.5"):
        TorchVectorEnv(env, device=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"is on cpu, but .* the argument device, is meta"):
        TorchVectorEnv(env, device=torch.device("meta")).rollout(2)


def test_an_id_or_a_class_is_no_environment_of_tensors() -> None:
    with pytest.raises(TypeError, match="but it is an id: 'CartPole-v1'"):
        TorchVectorEnv("CartPole-v1")
    with pytest.raises(TypeError, match="but it is the class NumberedTorchEnv"):
        TorchVectorEnv(NumberedTorchEnv)
    with pytest.raises(TypeError, match="categorical_action_encoding must be True or False"):
        TorchVectorEnv(NumberedTorchEnv(2), categorical_action_encoding="no")  # type: ignore[arg-type]


def test_a_layout_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"info_keys\['lives'\] must be a gymnasium space, .* is 3"):
        InfoKey("lives", 3)
    assert InfoKey("lives", spaces.Box(0, 9, (1,), np.int64)).path == ("lives",)


def test_arguments_of_the_environment_go_elsewhere() -> None:
    with pytest.raises(TypeError, match=r"info_keys\. .* in create_env_kwargs"):
        Collector("Pendulum-v1", frames_per_batch=4, info_keys=["lives"])


def test_an_environment_of_another_kind() -> None:
    pytest.importorskip("vmas")
    pytest.importorskip("jax")
    env = gymnasium.make("CartPole-v1")
    with pytest.raises(TypeError, match=r"that vmas\.make_env made .*, but it is str: 'balance'"):
        VmasEnv("balance")
    with pytest.raises(TypeError, match="but it is TimeLimit"):
        VmasEnv(env)
    with pytest.raises(TypeError, match=r"must be written in JAX, but .* environment of Gymnasium"):
        JaxEnv(env, 2)
    env.close()


def test_a_group_that_is_one_name() -> None:
    pytest.importorskip("mpe2")
    words = r"group_map\['a'\] must be a list of agents, but it is 'agent_0'"
    with pytest.raises(TypeError, match=words):
        build_one("pettingzoo:mpe2/simple_spread_v3", {"group_map": {"a": "agent_0"}})


def test_keys_that_are_none() -> None:
    with pytest.raises(TypeError, match="keys must be a list of keys, but it is 3"):
        FrameStack(4, keys=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a key must be a string or a tuple of strings, .* is 3"):
        NormalizeObservation(keys=[3])
    with pytest.raises(TypeError, match=r"reward_keys must be a string or a tuple of .* is 3"):
        Evaluator("Pendulum-v1", policy_factory=lambda: None, reward_keys=3)


def test_a_misspelt_argument_of_an_evaluator() -> None:
    words = "Evaluator has no argument 'max_step': it has max_steps, "
    with pytest.raises(TypeError, match=words):
        Evaluator("Pendulum-v1", policy_factory=lambda: None, max_step=3)


@pytest.mark.parametrize(
    ("env_id", "missing", "words"),
    [
        ("pettingzoo:mpe2/simple_spread_v3", "mpe2", "no package 'mpe2' is installed: pip install"),
        ("brax:fast", "brax", "brax:fast needs another package: pip install brax$"),
        ("brax:fast", "mujoco", "brax:fast needs another package: pip install mujoco$"),
    ],
)
def test_a_missing_package_is_named(
    env_id: str, missing: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(env_id.partition(":")[0])
    for name in [name for name in sys.modules if name.split(".")[0] in (missing, "brax")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises((ImportError, ValueError), match=words):
        build_one(env_id)


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


def test_names_of_other_libraries():
    for cls in (Collector, MultiSyncCollector):
        with pytest.raises(TypeError, match=r"n_envs\. To step several environments, pass a list"):
            cls(["CartPole-v1"] * 2, frames_per_batch=10, n_envs=3)
    with pytest.raises(TypeError, match="ParallelEnv has no argument 'n_envs': it has "):
        ParallelEnv(2, "CartPole-v1", n_envs=3)
    with pytest.raises(TypeError, match="the number of episodes is num_trajectories"):
        Evaluator("CartPole-v1", None, num_episodes=3)
    with pytest.warns(UserWarning, match="exactly 15 frames, pass exact_frames=True"):
        Collector("CartPole-v1", frames_per_batch=10, total_frames=15).shutdown()


def test_what_can_not_be_sent_to_processes_of_environments():
    lock = threading.Lock()
    words = r"create_env_fn \(of environment 1\) can't be sent to another process: cannot pickle"
    with pytest.raises(TypeError, match=words):
        ParallelEnv(2, ["CartPole-v1", partial(gymnasium.make, "CartPole-v1", lock)])
    words = r"create_env_kwargs \(of environment 0\) can't be sent"
    with pytest.raises(TypeError, match=words):
        ParallelEnv(2, "CartPole-v1", create_env_kwargs={"lock": lock})


def test_a_policy_that_can_not_be_sent():
    policy = nn.utils.parametrizations.weight_norm(nn.Linear(3, 1))
    words = r"policy \(of worker 0\) can't be sent .*\n.* as policy_factory"
    with pytest.raises(TypeError, match=words):
        MultiSyncCollector(["Pendulum-v1"] * 2, policy, frames_per_batch=10)
