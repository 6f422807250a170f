"""Random numbers and exploration types of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn
from torch.distributions import Beta, Categorical, Dirichlet, Gamma, Normal, Poisson
from torch.nn import functional

from trawl.collectors.evaluation.isolation import PrivateRandom, isolated, policy_seed
from trawl.envs.seeding import derive
from trawl.rollout.rng import RandomStream

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


def test_a_generator_that_is_given_is_used() -> None:
    with PrivateRandom(5):
        drawn = torch.rand(3, generator=torch.Generator().manual_seed(8))
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(8)))


def test_it_can_begin_anew() -> None:
    with PrivateRandom(5) as random:
        first = torch.rand(3)
        random.seed(5)
        assert torch.equal(torch.rand(3), first)


def test_the_seed_is_that_of_a_collector() -> None:
    with RandomStream(derive(9, "policy")).turn():
        expected = torch.rand(3)
    with PrivateRandom(policy_seed(9)):
        assert torch.equal(torch.rand(3), expected)


def test_threads_have_types_of_their_own() -> None:
    seen: list[Any] = []
    inside, go_on = threading.Event(), threading.Event()

    def evaluate() -> None:
        with isolated(0):
            seen.append(interaction_type())
            with set_interaction_type(InteractionType.MODE):
                inside.set()
                assert go_on.wait(60)
                seen.append(interaction_type())
            seen.append(interaction_type())

    thread = threading.Thread(target=evaluate)
    with set_interaction_type(InteractionType.MEAN):
        thread.start()
        assert inside.wait(60)
        assert interaction_type() is InteractionType.MEAN
    # What the thread sets and takes back has no part in what is set here, in whatever order.
    assert interaction_type() is None
    go_on.set()
    thread.join()
    assert interaction_type() is None
    assert seen == [None, InteractionType.MODE, None]


def test_compiled_code_of_the_learner_still_compiles() -> None:
    with isolated(0):
        pass

    def kind() -> int:
        return 1 if interaction_type() is InteractionType.MEAN else 2

    def learn(x: Tensor) -> Tensor:
        return x * kind()

    compiled = torch.compile(learn, backend="eager", fullgraph=True)
    done = threading.Event()
    held = threading.Thread(target=lambda: _hold(done))
    held.start()
    try:
        assert compiled(ONES).tolist() == [2.0] * 4
        with set_interaction_type(InteractionType.MEAN):
            assert compiled(ONES).tolist() == [1.0] * 4
    finally:
        done.set()
        held.join()


def _hold(done: threading.Event) -> None:
    with isolated(0):
        assert done.wait(60)
