"""Evaluations in a thread and in processes: episodes, seeds, metrics."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from evaluation_parts import Staged, Walk, linear, stochastic
from tensordict import TensorDict, TensorDictBase
from torch import nn

from trawl import ExplorationType
from trawl.collectors import Collector, EvaluationResult, Evaluator, MultiSyncCollector
from trawl.envs import GymEnv, SerialEnv
from trawl.extras.evaluation.environments import episode_seed

BACKENDS = ["thread", "process"]


def act_at_random(observation: torch.Tensor) -> torch.Tensor:
    """Acts as a policy that is a function."""
    return torch.rand((*observation.shape[:-1], 1))


def by_hand(policy: Any, episodes: int, seed: int = 0) -> tuple[list[float], list[int]]:
    """Returns and lengths by a loop over one environment."""
    env, returns, lengths = Walk(), [], []
    for episode in range(episodes):
        obs, _ = env.reset(seed=episode_seed(seed, episode))
        total, length, over = 0.0, 0, False
        while not over:
            with torch.no_grad():
                action = policy.module(torch.from_numpy(obs))
            obs, reward, over, _, _ = env.step(action.numpy())
            total += float(np.float32(reward))
            length += 1
        returns.append(total)
        lengths.append(length)
    return returns, lengths


def evaluated(env: Any = Walk, policy: Any = None, **options: Any) -> Any:
    """The results of single episodes."""
    policy = linear() if policy is None and "policy_factory" not in options else policy
    with Evaluator(env, policy, **options) as evaluator:
        return evaluator.evaluate().episodes


PROCESS = {"backend": "process"}


@pytest.mark.parametrize(
    ("env", "options"),
    [(Walk, {}), (Walk, {"num_envs": 8}), (Walk, {"num_envs": 3, "max_steps": 100}),
     (Walk, {"num_envs": 3, **PROCESS}), (Walk, {"num_workers": 2, "num_envs": 2, **PROCESS}),
     # Environments of all kinds.
     (Walk(), {}), (partial(GymEnv, Walk()), {}), (GymEnv(Walk()), {}), ([Walk, Walk], {}),
     (partial(SerialEnv, 2, Walk), {}),
     # Factories of policies, with an environment and without.
     (Walk, {"policy_factory": lambda: linear()}), (Walk, {"policy_factory": linear}),
     (Walk, {"policy_factory": lambda env=None: linear()}),
     # Collectors of one's own.
     (Walk, {"collector_cls": MultiSyncCollector}),
     (Walk, {"collector_cls": "MultiSyncCollector"})],
    ids=str,
)  # fmt: skip
def test_episodes_are_those_of_a_loop_by_hand(env: Any, options: dict[str, Any]) -> None:
    policy = linear()
    returns, lengths = by_hand(policy, 7)
    drawn = "policy_factory" in options  # weights that nobody knows
    options = options if drawn else {"policy": policy, **options}
    with Evaluator(env, num_trajectories=7, **options) as evaluator:
        several = "collector_cls" in options or options.get("backend") == "process"
        assert evaluator.backend == ("process" if several else "thread")
        for _ in range(2):
            result = evaluator.evaluate()
            assert result.episodes.lengths.tolist() == lengths
            returns = result.episodes.returns if drawn else returns
            assert result.episodes.returns == pytest.approx(returns, rel=1e-6)
    assert isinstance(result, EvaluationResult)
    assert result["eval/num_episodes"] == 7
    assert result["eval/reward"] == pytest.approx(np.mean(returns), rel=1e-6)
    assert result["eval/reward_std"] == pytest.approx(np.std(returns, ddof=1), rel=1e-6)
    assert result["eval/episode_length"] == pytest.approx(np.mean(lengths))
    assert result["eval/fps"] > 0


def staged(*lengths: int) -> list[Any]:
    return [partial(Staged, length) for length in lengths]


@pytest.mark.parametrize(
    ("env", "options", "lengths"),
    [
        # Among the first to end, the short ones would be 12 times as many.
        (staged(2, 24), {"num_trajectories": 6}, [2, 24] * 3),
        (lambda: gymnasium.vector.SyncVectorEnv(staged(2, 24)), {"num_trajectories": 6},
         [2, 24] * 3),
        # Fewer episodes than environments.
        (partial(Staged, 4), {"num_trajectories": 2, "num_envs": 5}, [4, 4]),
        (partial(Staged, 50), {"num_trajectories": 3, "max_steps": 20}, [20] * 3),
        # Longer than a batch.
        (staged(250, 7), {"num_trajectories": 3, "frames_per_batch": 20}, [250, 7, 250]),
    ],
    ids=["environments", "vector", "few", "limit", "long"],
)  # fmt: skip
def test_each_environment_contributes_the_same_number_of_episodes(
    env: Any, options: dict[str, Any], lengths: list[int]
) -> None:
    episodes = evaluated(env, **options)
    assert episodes.lengths.tolist() == lengths
    # The step that a vector environment spends on a reset is none of an episode.
    assert episodes.returns.tolist() == lengths


def test_environments_that_are_done_are_left_alone() -> None:
    made: list[Walk] = []

    def make() -> Walk:
        made.append(Walk())
        return made[-1]

    with Evaluator(make, linear(), num_trajectories=3, num_envs=2) as evaluator:
        result = evaluator.evaluate()
    steps = [env.steps for env in made]
    assert steps == [sum(result.episodes.lengths[::2]), sum(result.episodes.lengths[1::2])]
    assert made[0].resets[-2:] == [episode_seed(0, 0), episode_seed(0, 2)]
    assert made[1].resets[-1:] == [episode_seed(0, 1)]


@pytest.mark.parametrize("envs", [1, 3])
def test_a_stochastic_policy_gives_the_same_on_each_backend(envs: int) -> None:
    results = []
    for backend in BACKENDS:
        with Evaluator(
            Walk,
            stochastic(),
            num_trajectories=6,
            num_envs=envs,
            exploration_type=ExplorationType.RANDOM,
            backend=backend,
        ) as evaluator:
            results += [evaluator.evaluate().episodes.returns.tolist() for _ in range(2)]
    assert all(result == results[0] for result in results)
    with Evaluator(Walk, stochastic(), num_trajectories=6, num_envs=envs) as evaluator:
        assert evaluator.evaluate().episodes.returns.tolist() != results[0]


def test_another_seed_gives_other_episodes() -> None:
    zero, one = (evaluated(num_trajectories=3, seed=seed).returns.tolist() for seed in (0, 1))
    assert zero != one
    with Evaluator(Walk, linear(), num_trajectories=3, seed=None) as evaluator:
        first, second = evaluator.evaluate().episodes, evaluator.evaluate().episodes
    assert first.returns.tolist() != second.returns.tolist()
    assert first.seed != second.seed
    # A result can be repeated by its seed.
    again = evaluated(num_trajectories=3, seed=first.seed)
    assert again.returns.tolist() == first.returns.tolist()


@pytest.mark.parametrize(
    ("layout", "backend"),
    [(None, "thread"), (None, "process"), ("cat", "thread"), ("padded", "thread")],
)
def test_metrics_fn_sees_whole_trajectories(layout: str | None, backend: str) -> None:
    seen: list[TensorDictBase] = []

    def metrics(trajectories: TensorDictBase) -> dict[str, float]:
        seen.append(trajectories)
        return {"most": float(trajectories["action"].max())}

    options = {} if layout is None else {"collector_kwargs": {"traj_format": layout}}
    common = {"num_trajectories": 5, "num_envs": 2, "metrics_fn": metrics, "backend": backend}
    with Evaluator(Walk, linear(), **common, **options) as evaluator:
        result = evaluator.evaluate()
    (frames,) = seen
    assert result["eval/most"] == float(frames["action"].max())
    lengths = torch.from_numpy(result.episodes.lengths)
    if layout == "cat":
        assert frames.shape == (int(lengths.sum()),)
        return
    assert frames.shape == (5, int(lengths.max()))
    mask = frames["collector", "mask"]
    assert torch.equal(mask.sum(-1), lengths)
    totals = (frames["next", "reward"].squeeze(-1) * mask).double().sum(-1)
    assert torch.allclose(totals, torch.from_numpy(result.episodes.returns))


def test_a_callback_gets_all_metrics() -> None:
    given: list[TensorDictBase] = []
    # A metric of metrics_fn replaces that of its name.
    own = {"length": 7.0, "episode_length": -3}
    options = {"metrics_fn": lambda _: own, "log_prefix": "test", "on_result": given.append}
    env = partial(Walk, "rgb_array")
    with Evaluator(env, linear(), num_trajectories=1, **options) as evaluator:
        result = evaluator.evaluate(step=12)
    (metrics,) = given
    assert metrics.batch_size == torch.Size([])
    assert set(metrics.keys()) == set(result)
    assert metrics["test/step"] == 12
    assert metrics["test/fps"] > 0
    assert float(metrics["test/reward"]) == pytest.approx(result["test/reward"])
    assert torch.equal(metrics["test/video"], result["test/video"])
    assert {name: result[f"test/{name}"] for name in own} == own
    own.clear()
    own |= {"reward": 7.0, "step": -3, "video": "mine"}
    with Evaluator(env, linear(), num_trajectories=1, metrics_fn=lambda _: own) as evaluator:
        result = evaluator.evaluate()
    assert {name: result[f"eval/{name}"] for name in own} == own


def test_weights_in_all_forms() -> None:
    other = linear(1)
    with Evaluator(Walk, other, num_trajectories=3) as evaluator:
        expected = evaluator.evaluate().episodes.returns.tolist()
    forms = [
        {"weights": other},
        {"weights": TensorDict.from_module(other).data},
        {"weights": other.state_dict()},
        {"weights": Evaluator.extract_weights(other)},
        {"weights_dict": {"policy": other}},
        {"weights": linear(2), "weights_dict": {"policy": other}},
    ]
    assert Evaluator.extract_weights(other).device == torch.device("cpu")
    for backend in BACKENDS:
        policy = linear(0)
        with Evaluator(Walk, policy, num_trajectories=3, backend=backend) as evaluator:
            first = evaluator.evaluate().episodes.returns.tolist()
            assert first != expected
            for form in forms:
                assert evaluator.evaluate(**form).episodes.returns.tolist() == expected
            # Without weights: those of the policy that was given, as it is now.
            assert evaluator.evaluate().episodes.returns.tolist() == first
            policy.load_state_dict(other.state_dict())
            assert evaluator.evaluate().episodes.returns.tolist() == expected


class Scaled(nn.Module):
    def __init__(self, env: Any) -> None:
        super().__init__()
        self.env_batch = tuple(env.batch_size)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation[..., :1] * self.scale


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_factory_makes_the_policy_where_it_acts(backend: str) -> None:
    with Evaluator(
        Walk, policy_factory=Scaled, num_trajectories=3, num_envs=2, backend=backend
    ) as evaluator:
        first = evaluator.evaluate()
        second = evaluator.evaluate({"scale": torch.full((1,), 5.0)})
        # It keeps the weights that it has.
        third = evaluator.evaluate()
    assert first.episodes.returns.tolist() != second.episodes.returns.tolist()
    assert second.episodes.returns.tolist() == third.episodes.returns.tolist()


def test_a_function_as_policy() -> None:
    with Evaluator(Walk, act_at_random, num_trajectories=2) as evaluator:
        evaluator.evaluate()
        with pytest.raises(TypeError, match="policy function has no weights to replace"):
            evaluator.evaluate(linear())


def test_a_comparison_is_paired() -> None:
    policy = linear()
    better = {**policy.state_dict(), "module.bias": policy.module.bias.detach() + 1.0}
    with Evaluator(Walk, policy, num_trajectories=20, num_envs=4) as evaluator:
        compared = evaluator.compare(better, policy)
        assert evaluator.state_dict() == {"step_counter": 0}
        alike = evaluator.compare(copy.deepcopy(policy))
    # On the same episodes the first gains 1 in each step, and chance adds nothing.
    lengths = compared.second.episodes.lengths
    gains = compared.first.episodes.returns - compared.second.episodes.returns
    assert gains == pytest.approx(lengths, rel=1e-4)
    assert compared.difference == pytest.approx(lengths.mean(), rel=1e-4)
    assert compared.low < compared.difference < compared.high
    assert compared.wins == 1.0
    assert compared.sem == pytest.approx(lengths.std(ddof=1) / 20**0.5, rel=1e-4)
    assert "better in 100% of 20 episodes" in str(compared)
    assert alike.difference == alike.low == alike.high == 0.0
    assert alike.wins == 0.5


def test_which_policies_are_compared() -> None:
    policy, other = linear(), linear(1)
    with Evaluator(Walk, linear(), num_trajectories=5, seed=None) as evaluator:
        assert evaluator.compare(linear()).difference == 0.0
    with Evaluator(Walk, policy, num_trajectories=5) as evaluator:
        # One is compared with that of the evaluator.
        expected = evaluator.compare(other, linear())
        assert evaluator.compare(other).difference == expected.difference != 0.0
        for pair in ((), (policy,), (None, policy), (policy, policy)):
            with pytest.raises(ValueError, match="are both the evaluator's own policy: pass ano"):
                evaluator.compare(*pair)
        with pytest.raises(ValueError, match="are both the same TensorDictModule: pass another"):
            evaluator.compare(other, other)
    with Evaluator(Walk, policy_factory=linear, num_trajectories=3) as evaluator:
        for given in ((), (linear(1),)):
            with pytest.raises(ValueError, match=r"compare\(\) needs two policies, but second is"):
                evaluator.compare(*given)
        assert evaluator.compare(linear(1), linear(2)).difference != 0.0


WRONG_VALUES = [
    ({"backend": "fork"}, "backend must be 'thread', 'process' or 'ray', but it is 'fork'"),
    ({"busy_policy": "wait"}, "busy_policy must be .*, but it is 'wait'"),
    ({"policy": None}, "pass either policy or policy_factory: neither is given"),
    ({"policy_factory": linear}, "pass either policy or policy_factory: both are given"),
    ({"num_workers": 2}, "num_workers=2 needs backend='process' or 'ray'"),
    ({"env": Walk(), "backend": "process"}, "env is an existing environment"),
    ({"env": Walk(), "num_envs": 2}, "num_envs=2 needs an id, or a function"),
    ({"num_trajectories": 0}, "num_trajectories must be at least 1, but it is 0"),
    ({"max_steps": 0}, "max_steps must be at least 1"),
    ({"seed": -1}, "seed must not be negative"),
    ({"collector_cls": "RPCCollector"}, "collector_cls must be Collector, .*'RPCCollector'"),
    ({"device": "abacus"}, "^device 'abacus' is not a device"),
    ({"reward_keys": []}, "reward_keys must be .*, but the list is empty"),
    ({"collector_kwargs": {"cudagraph_policy": True}}, "cudagraph_policy needs backend='process'"),
    ({"collector_kwargs": {"traj_format": "x"}}, "traj_format must be .*, but it is 'x'"),
]
WRONG_TYPES = [
    ({"collector_kwargs": {"total_frames": 5}}, "collector_kwargs can't contain total_frames"),
    ({"collector_kwargs": {"sorage_device": "cpu"}}, "sorage_device"),
    ({"policy": None, "policy_factory": linear()}, "pass a policy as policy="),
    ({"collector_kwargs": 3}, "collector_kwargs must be a mapping of options, but it is 3"),
    ({"env": 5}, "^env: expected an id.* but got int: 5"),
    ({"env": 5, "backend": "process"}, "TypeError: env: expected an id"),
    ({"env": lambda: 5}, "^env made an object that is not an environment: .* got int: 5"),
    ({"dump_video": "False"}, "dump_video must be True or False, but it is the string 'False'"),
    ({"metrics_fn": 5}, "metrics_fn must be callable, but it is int: 5"),
    ({"on_result": 5}, "on_result must be callable, but it is int: 5"),
    ({"env": 3, "policy": None, "policy_factory": linear}, "env must be .* but it is int: 3"),
]


REWARDS = ", .*its rewards are \\[\\('next', 'reward'\\)\\]"
SWAPPED = "must be .* but it is an env.*are env and policy swapped\\?"
# Where the environment is looked at, which is in another process with backend="process".
FOR_EACH_BACKEND = [
    (ValueError, {"reward_keys": ("next", "score")}, f"\\('next', 'score'\\){REWARDS}"),
    (ValueError, {"reward_keys": "reward"}, f"reward_keys has 'reward'{REWARDS}"),
    (TypeError, {"env": linear(), "policy": Walk},
     "^env must be a Gymnasium id.* but it is a module, TensorDictModule: .*swapped\\?"),
    *((TypeError, {"env": act_at_random, "policy": policy}, f"^policy {SWAPPED}")
      for policy in ("Pendulum-v1", Walk(), Walk)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        *((ValueError, *row) for row in WRONG_VALUES),
        *((TypeError, *row) for row in WRONG_TYPES),
        *((error, {**row, "backend": backend}, message)
          for backend in BACKENDS for error, row, message in FOR_EACH_BACKEND),
    ],
)  # fmt: skip
def test_wrong_arguments(error: Any, options: dict[str, Any], message: str) -> None:
    arguments = {"env": Walk, "policy": linear(), **options}
    with pytest.raises(error, match=message):
        Evaluator(arguments.pop("env"), **arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reward_keys": "score"}, KeyError, "no 'score'; they have"),
        ({"metrics_fn": lambda _: 3}, TypeError, "must return a dict .* returned int: 3$"),
        ({"metrics_fn": lambda _: None}, TypeError, "must return a dict .* NoneType: None$"),
        ({"metrics_fn": lambda _: [(1, 2)]}, TypeError, r"return a dict .* list: \[\(1, 2\)\]$"),
    ],
)
def test_what_an_evaluation_lacks_is_told(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with (
        Evaluator(Walk, linear(), num_trajectories=2, **options) as evaluator,
        pytest.raises(error, match=message),
    ):
        evaluator.evaluate()


class Doubling(Collector):
    """Collector whose batches have the doubled rewards as well."""

    def next(self) -> TensorDictBase | None:
        batch = super().next()
        return None if batch is None else batch.set(("next", "double"), 2 * batch["next", "reward"])


def test_a_class_of_the_user_may_add_what_is_counted() -> None:
    options = {"num_trajectories": 2, "collector_cls": Doubling, "reward_keys": ("next", "double")}
    assert (
        evaluated(**options).returns.tolist()
        == (2 * evaluated(num_trajectories=2).returns).tolist()
    )
    # The count of steps can be counted.
    options = {"num_trajectories": 2, "max_steps": 3, "reward_keys": ("next", "step_count")}
    assert evaluated(**options).returns.mean() == 1 + 2 + 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_factories_are_called_by_the_first_evaluation(backend: str, tmp_path: Path) -> None:
    made = tmp_path / "made"

    def note(name: str) -> None:
        with made.open("a") as file:
            file.write(f"{name} ")

    def make_policy() -> Any:
        note("policy")
        if backend == "thread" and made.read_text().count("policy") < 3:
            raise OSError("no display")
        return linear()

    def make_env() -> Walk:
        note("env")
        return Walk()

    options = {"policy_factory": make_policy, "num_trajectories": 1, "backend": backend}
    with Evaluator(make_env, **options) as evaluator:
        assert not made.exists()
        for _ in range(2 if backend == "thread" else 0):
            with pytest.raises(OSError, match="no display"):
                evaluator.evaluate()
        evaluator.evaluate()
        assert made.read_text().split()[:2] == ["env", "policy"]


def test_a_state_loses_no_result() -> None:
    results: list[Any] = []
    with Evaluator(Walk, linear(), num_trajectories=1) as evaluator:
        evaluator.trigger_eval()
        evaluator.evaluate()
        with pytest.raises(RuntimeError, match=r"1 result\(s\) of evaluations that were not"):
            evaluator.state_dict()
        assert evaluator.wait() is not None
        assert evaluator.state_dict() == {"step_counter": 2}
    with Evaluator(Walk, linear(), num_trajectories=1, on_result=results.append) as evaluator:
        evaluator.trigger_eval()
        evaluator.evaluate()
        assert evaluator.state_dict() == {"step_counter": 2}
        assert len(results) == 2
