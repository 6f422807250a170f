"""The same seed and the same number of workers: the same batches."""

import math

import pytest
import torch
from multi_parts import PLACES, TRAJ_IDS, same, together
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Categorical

from trawl.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiSyncCollector,
    RandomPolicy,
)
from trawl.envs import GymEnv


def sampling():
    """A policy that draws its actions."""
    torch.manual_seed(0)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=Categorical
        ),
    )


def cartpoles(cls=MultiSyncCollector, workers=2, lanes=None, **options):
    source = "CartPole-v1" if lanes is None else ["CartPole-v1"] * lanes
    options.setdefault("start_method", "inline")
    options.setdefault("frames_per_batch", 48)
    if options.get("policy") is not None:
        options["create_env_kwargs"] = {"categorical_action_encoding": True}
    return cls([source] * workers, **options)


def test_a_static_seed_is_the_same_for_all():
    with cartpoles(workers=3, lanes=2) as collector:
        assert collector.set_seed(3, static_seed=True) == 3
        batch = collector.next()
    assert len({tuple(row) for row in batch["observation"][..., 0, :].reshape(6, 4).tolist()}) == 1
    assert torch.equal(batch["action"][0], batch["action"][2])


@pytest.mark.parametrize("policy", [None, sampling()], ids=["random", "sampling"])
def test_each_worker_is_a_collector_whose_seed_follows(policy):
    with cartpoles(policy=policy, workers=3) as collector:
        after = collector.set_seed(11)
        found = [collector.next() for _ in range(3)]
    seed = 11
    for worker in range(3):
        with Collector(
            "CartPole-v1",
            policy,
            frames_per_batch=16,
            create_env_kwargs={"categorical_action_encoding": True} if policy else None,
        ) as alone:
            seed = alone.set_seed(seed)
            for batch in found:
                assert same(batch[worker], alone.next(), but=[TRAJ_IDS])
    assert seed == after


@PLACES
def test_a_seed_given_while_iterating_gives_the_same_batches(cls, method):
    def after_seeding(collector, begun):
        rows = {0: [], 1: []}
        for _ in range(begun):
            collector.next()
        collector.set_seed(5)
        # What was collected before the seed comes first: its frames say that.
        while min(map(len, rows.values())) < 8:
            batch = collector.next()
            for index, row in enumerate(batch if together(cls) else [batch]):
                number = index if together(cls) else int(row[TRAJ_IDS][0]) % 2
                rows[number].append(row["observation"].clone())
        return {number: torch.cat(parts) for number, parts in rows.items()}

    with cartpoles(cls, start_method=method, frames_per_batch=10) as collector:
        fresh = after_seeding(collector, 0)
    with cartpoles(cls, start_method=method, frames_per_batch=10) as collector:
        again = after_seeding(collector, 4)
    for number, expected in fresh.items():
        begin = expected[:20]
        length = len(again[number])
        places = [
            start
            for start in range(length - 20)
            if torch.equal(again[number][start : start + 20], begin)
        ]
        assert len(places) == 1
        if together(cls):
            assert places == [0]


def test_without_a_seed_workers_differ():
    with cartpoles(start_method="forkserver") as one, cartpoles(start_method="forkserver") as other:
        first, second = one.next(), other.next()
    assert not torch.equal(first[0]["observation"], first[1]["observation"])
    assert not torch.equal(first["observation"], second["observation"])
    assert not torch.equal(first[0]["action"], first[1]["action"])


def one(count, **options):
    return Collector(["CartPole-v1"] * count, frames_per_batch=24, **options)


def workers(count, **options):
    return cartpoles(workers=count, frames_per_batch=24, **options)


def whoever_is_ready(count, **options):
    policy = RandomPolicy(GymEnv("CartPole-v1").full_action_spec.expand(count))
    return AsyncBatchedCollector(
        ["CartPole-v1"] * count,
        policy=policy,
        frames_per_batch=24,
        env_backend="threading",
        min_batch_size=count,
        server_timeout=math.inf,
        **options,
    )


@pytest.mark.parametrize("make", [one, workers, whoever_is_ready])
def test_the_option_seeds_like_the_method(make):
    with make(2, seed=4) as given, make(2) as other:
        other.set_seed(4)
        assert all(same(given.next(), other.next()) for _ in range(3))
        other.set_seed(5)
        assert not same(given.next(), other.next())
        for seed, error in (
            ("4", TypeError),
            (1.5, TypeError),
            (True, TypeError),
            (-1, ValueError),
        ):
            for refuses in (lambda seed: make(2, seed=seed), other.set_seed):
                with pytest.raises(error, match=r"^seed must (not be negative|be an integer)"):
                    refuses(seed)
