"""Random numbers and exploration types of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from evaluation_parts import Gate, Walk, stochastic
from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn
from torch.distributions import Beta, Categorical, Dirichlet, Gamma, Normal, Poisson
from torch.nn import functional

from trawl.collectors import Collector, Evaluator
from trawl.envs.generators import RandomStream
from trawl.envs.seeding import derive
from trawl.extras.evaluation.isolation import PrivateRandom, isolated, policy_seed
from trawl.rollout.policy.exploration import own_type

ONES = torch.ones(4)
DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(3),
    "rand float64": lambda: torch.rand(3, dtype=torch.float64),
    "rand_like": lambda: torch.rand_like(ONES),
    "randn": lambda: torch.randn(3),
    "randn_like": lambda: torch.randn_like(ONES),
    "randint": lambda: torch.randint(2, 9, (5,)),
    "randint of one bound": lambda: torch.randint(9, (5,)),
    "randint_like": lambda: torch.randint_like(ONES, 3, 9),
    "randint_like of one bound": lambda: torch.randint_like(ONES, high=9),
    "randperm": lambda: torch.randperm(9),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "bernoulli": lambda: torch.bernoulli(ONES / 2),
    "multinomial": lambda: ONES.multinomial(2),
    "in place": lambda: torch.zeros(3).uniform_().add_(torch.zeros(3).exponential_()),
    "Normal": lambda: Normal(ONES, 1.0).rsample(),
    "Categorical": lambda: Categorical(ONES).sample((9,)),
    "Gamma": lambda: Gamma(ONES, 1.0).sample(),
    "Beta": lambda: Beta(ONES, ONES).sample(),
    "Dirichlet": lambda: Dirichlet(ONES).sample(),
    "Poisson": lambda: Poisson(ONES).sample(),
    "dropout": lambda: functional.dropout(torch.ones(64)),
    "gumbel_softmax": lambda: functional.gumbel_softmax(ONES),
    "a layer": lambda: nn.Linear(3, 3).weight.detach(),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(3, 3)),
    "a recurrent layer": lambda: nn.GRUCell(3, 3).weight_ih.detach(),
}


@pytest.mark.parametrize("name", list(DRAWS))
def test_private_draws_are_those_of_the_default_generator(name: str) -> None:
    draw, state = DRAWS[name], torch.get_rng_state()
    with PrivateRandom(5):
        first, second = draw(), draw()
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        assert torch.equal(draw(), first)
        assert torch.equal(draw(), second)


def test_a_generator_that_is_given_is_used_and_a_seed_begins_anew() -> None:
    with PrivateRandom(5) as random:
        first = torch.rand(3)
        drawn = torch.rand(3, generator=torch.Generator().manual_seed(8))
        random.seed(5)
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(8)))
    # The seed is that of a collector.
    with RandomStream(derive(9, "policy")).turn():
        expected = torch.rand(3)
    with PrivateRandom(policy_seed(9)):
        assert torch.equal(torch.rand(3), expected)


def test_compiled_code_sees_the_type_of_its_thread() -> None:
    with isolated(0):
        pass

    def kind() -> int:
        return 1 if interaction_type() is InteractionType.MEAN else 2

    def act(x: Tensor) -> Tensor:
        return x * kind()

    compiled = torch.compile(act, backend="eager", fullgraph=True)
    seen: list[list[float]] = []

    def evaluate() -> None:
        with own_type(InteractionType.MODE):
            seen.append(compiled(ONES).tolist())
            with set_interaction_type(InteractionType.MEAN):
                seen.append(compiled(ONES).tolist())

    for expected, kinds in ((2.0, InteractionType.MODE), (1.0, InteractionType.MEAN)):
        with set_interaction_type(kinds):
            assert compiled(ONES).tolist() == [expected] * 4
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()
            assert compiled(ONES).tolist() == [expected] * 4
    assert seen == [[2.0] * 4, [1.0] * 4] * 2


def test_an_evaluation_in_a_thread_may_be_compiled() -> None:
    """It acts in its own way, and draws nothing of the learner's."""
    policy = stochastic()
    returns: list[Any] = []
    state = torch.get_rng_state()
    for options in ({}, {"compile_policy": {"backend": "eager"}}):
        for kind in (InteractionType.RANDOM, InteractionType.MEAN):
            with Evaluator(
                Walk, policy, num_trajectories=2, exploration_type=kind, collector_kwargs=options
            ) as evaluator:
                returns.append(evaluator.evaluate().episodes.returns.tolist())
    assert returns[:2] == returns[2:]
    assert returns[0] != returns[1]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("later", [InteractionType.MEAN, InteractionType.RANDOM])
def test_collectors_in_threads_explore_in_their_own_way(later: InteractionType) -> None:
    """Also if the one that began first ends first."""
    first, second = Gate(), Gate()
    acted: dict[str, list[Any]] = {"first": [], "second": []}

    def policy(name: str) -> Any:
        def act(td: Any) -> Any:
            acted[name].append(interaction_type())
            return td.set("action", td["observation"][..., :1])

        return act

    def collect(env: Any, name: str, kind: InteractionType) -> None:
        options = {"frames_per_batch": 4, "total_frames": 4, "exploration_type": kind}
        with Collector(env, policy(name), **options) as collector:
            list(collector)

    kinds = {"first": InteractionType.MODE, "second": later}
    threads = [
        threading.Thread(target=collect, args=(env, name, kind))
        for env, (name, kind) in zip((first, second), kinds.items(), strict=True)
    ]
    for thread, env in zip(threads, (first, second), strict=True):
        thread.start()
        assert env.stepped.wait(60)
    for thread, env in zip(threads, (first, second), strict=True):
        env.go_on.set()
        thread.join()
    assert interaction_type() is None
    for name, kind in kinds.items():
        assert set(acted[name]) == {kind}
        assert len(acted[name]) >= 4
