"""Counts, limits and refusals of a collector that continues from a state."""

import pytest
import torch
from multi_parts import TRAJ_IDS
from tensordict.nn import TensorDictModule
from torch import nn

from tests.oracle.continuing import (
    CLOSED,
    THREE,
    Masked,
    Walk,
    closed,
    equal,
    following,
    recurrent,
    same,
    saved,
    sync,
)
from trawl.collectors import Collector, MultiSyncCollector
from trawl.errors import EnvStateError
from trawl.testing import NumberedEnv


@pytest.mark.parametrize("prefetch", [0, 1])
def test_parts_of_preempted_batches_are_part_of_the_state(prefetch):
    """Each step of each worker is delivered once, before the state or after it."""
    options = {"frames_per_batch": 40, "prefetch": prefetch, "preemptive_threshold": 0.5}

    def make():
        return MultiSyncCollector([NumberedEnv] * 2, **options)

    with make() as collector:
        found = following(collector, 3)
        state = saved(collector.state_dict())
    with make() as other:
        other.load_state_dict(state)
        assert other.resumed
        found += following(other, 3)
    for worker in (0, 1):
        rows = torch.cat([batch[worker] for batch in found])
        mask = rows["collector", "mask"]
        steps = rows["observation"][mask][:, 3].tolist()
        assert steps == list(range(len(steps)))


class Stop:
    """Interrupts each third batch after some steps."""

    def __init__(self):
        self.calls = 0

    def collection_stopped(self):
        self.calls += 1
        return self.calls % 97 == 0


def test_batches_that_are_cut_short():
    def make():
        return Collector(closed, THREE(), frames_per_batch=40, interruptor=Stop())

    with make() as collector, make() as other:
        collector.set_seed(1)
        lengths = {batch[TRAJ_IDS].ge(0).sum().item() for batch in following(collector, 8)}
        assert len(lengths) > 1
        other.config.interruptor.calls = collector.config.interruptor.calls
        other.load_state_dict(saved(collector.state_dict()))
        assert equal(following(other, 4), following(collector, 4))


def test_a_batch_that_was_given_up_is_not_replayed():
    class Broken(nn.Module):
        fails = False

        def forward(self, observation):
            if self.fails:
                raise KeyboardInterrupt
            return nn.functional.one_hot(torch.zeros((), dtype=torch.int64), 3)

    net = Broken()
    policy = TensorDictModule(net, ["observation"], ["action"])
    collector = Collector(CLOSED, policy, frames_per_batch=5)
    rollout = collector.parts.loop.rollout
    rollout.run()
    net.fails = True
    with pytest.raises(KeyboardInterrupt):
        rollout.run()
    net.fails = False
    rollout.writer.begin()
    assert collector.env_state_methods() == ["none"]
    collector.shutdown()


# --- states that don't fit

CART, PENDULUM = "CartPole-v1", "Pendulum-v1"
TWO_WALKS = sync("SameStep", Walk, Walk)


@pytest.mark.parametrize(
    ("source", "other", "policy", "match"),
    [
        (CART, [CART] * 2, None, "1 environments.* has 2"),
        (CART, PENDULUM, None, "environment 0: .* another environment: its id is CartPole-v1"),
        (CART, CART, recurrent, "the state has .* in 'action', but the collector has no entry"),
        (
            TWO_WALKS,
            sync("SameStep", Walk, Walk, Walk),
            None,
            "environment 0: .* number of environments is 2, but that of .* is 3",
        ),
        (
            TWO_WALKS,
            sync("SameStep", Walk, Masked),
            None,
            "environment 0: .* its wrapper chain is .*Walk, but that of .*Masked",
        ),
    ],
)
def test_the_state_of_another_collector_is_refused(source, other, policy, match):
    with Collector(source, frames_per_batch=12) as collector:
        state = collector.state_dict()
    with Collector(other, policy and policy(), frames_per_batch=12) as collector:
        collector.next()
        before = saved(collector.state_dict()["resume"])
        with pytest.raises((ValueError, EnvStateError), match=match):
            collector.load_state_dict(state, strict=False)
        assert str(collector.state_dict()["resume"]) == str(before)


def test_the_state_of_another_environment_is_refused_or_begins_new_episodes():
    with Collector("CartPole-v1", frames_per_batch=10) as collector:
        collector.next()
        state = collector.state_dict()
    state["resume"]["envs"][0]["env"]["identity"]["id"] = "CartPole-v0"
    with Collector("CartPole-v1", frames_per_batch=10) as other:
        with pytest.raises(EnvStateError, match=r"environment 0: .* its id is CartPole-v0"):
            other.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="new episodes begin in all environments"):
            other.load_state_dict(state, on_state_mismatch="new_episodes")
        assert not other.resumed
        assert other.next()[TRAJ_IDS].min() >= 1


def test_bad_options_of_loading_are_refused():
    with Collector("CartPole-v1", frames_per_batch=10) as collector:
        state = collector.state_dict()
        with pytest.raises(ValueError, match="on_state_mismatch must be one of"):
            collector.load_state_dict(state, on_state_mismatch="ignore")
        with pytest.raises(TypeError, match="trust"):
            collector.load_state_dict(state, trust="yes")


def test_no_worker_is_changed_if_the_environments_of_another_one_differ():
    options = {"frames_per_batch": 40, "start_method": "inline"}
    with MultiSyncCollector([Walk, Walk], **options) as collector:
        state = collector.state_dict()
    with (
        MultiSyncCollector([Walk, Masked], **options) as other,
        MultiSyncCollector([Walk, Masked], **options) as untouched,
    ):
        other.set_seed(1), untouched.set_seed(1)
        with pytest.raises(EnvStateError, match=r"worker 1.* its wrapper chain is .*Walk"):
            other.load_state_dict(state)
        assert same(other.next(), untouched.next())
