"""Values after time limits, against sums by hand and the estimators of TorchRL."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import Collector
from trawl.data import BootstrapTimeLimits, bootstrap_time_limits

MASK = ("collector", "mask")
REWARD = ("next", "reward")


def frames(shape=(3, 20), seed=0, agents=None, own_flags=False):
    """Frames with ends of all kinds; with ``agents``, of several agents with their own rewards."""
    draw = torch.Generator().manual_seed(seed)

    def flags(*more):
        return torch.rand(*shape, *more, 1, generator=draw) < 0.2

    def numbers(*size):
        return torch.randn(*size, generator=draw)

    more = () if agents is None else (agents,)
    inner = {"reward": numbers(*shape, *more, 1), "observation": numbers(*shape, *more, 2)}
    terminated, truncated = flags(), flags()
    after = {
        **(inner if agents is None else {"agents": inner}),
        "terminated": terminated,
        "truncated": truncated,
        "done": terminated | truncated,
    }
    if own_flags:
        after["agents"] |= {"terminated": flags(agents), "truncated": flags(agents)}
    first = {"observation": numbers(*shape, *more, 2)}
    root = first if agents is None else {"agents": first}
    names = [*[None] * (len(shape) - 1), "time"]
    return TensorDict({**root, "next": after}, shape, names=names)


def critic(**keys):
    torch.manual_seed(0)
    given = {"in_keys": ["observation"], "out_keys": ["state_value"], **keys}
    return TensorDictModule(nn.Linear(2, 1), **given)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 9), st.booleans())
def test_the_value_is_added_where_a_time_limit_ends_an_episode(shape, seed, masked):
    batch, network = frames(tuple(shape), seed), critic()
    if masked:
        batch[MASK] = torch.rand(batch.shape) < 0.5
    before = batch.clone()
    found = bootstrap_time_limits(batch, network, 0.9)
    assert (batch == before).all()
    flat, own = batch.reshape(-1), found.reshape(-1)
    for one, other in zip(flat.unbind(0), own.unbind(0), strict=True):
        after = one["next"]
        expected = after["reward"]
        counts = one.get(MASK, torch.tensor(True))
        if after["truncated"] and not after["terminated"] and counts:
            expected = expected + 0.9 * network.module(after["observation"]).detach()
        torch.testing.assert_close(other[REWARD], expected)
    assert not found[REWARD].requires_grad
    assert (found.exclude(REWARD) == batch.exclude(REWARD)).all()
    assert found.names == batch.names


def test_only_these_steps_are_evaluated():
    batch, seen = frames(), []

    def value(steps):
        seen.append(steps.shape)
        return steps["observation"].sum(-1, keepdim=True)

    bootstrap_time_limits(batch, value, 1.0)
    after = batch["next"]
    assert seen == [torch.Size([int((after["truncated"] & ~after["terminated"]).sum())])]
    after["truncated"][...] = False
    bootstrap_time_limits(batch, value, 1.0)
    assert len(seen) == 1


def test_rewards_of_agents_get_the_values_of_their_group():
    keys = {"in_keys": [("agents", "observation")], "out_keys": [("agents", "state_value")]}
    network = critic(**keys)
    for own in (False, True):
        batch = frames(agents=3, own_flags=own)
        found = bootstrap_time_limits(batch, network, 0.9, set_terminated=True)
        after, group = batch["next"], batch["next", "agents"]
        flags = group if own else after
        cut = flags["truncated"] & ~flags["terminated"]
        values = network.module(group["observation"]).detach()
        cut_of_agents = cut if own else cut.unsqueeze(-2).expand(values.shape)
        expected = torch.where(cut_of_agents, group["reward"] + 0.9 * values, group["reward"])
        torch.testing.assert_close(found["next", "agents", "reward"], expected)
        place = ("next", "agents", "terminated") if own else ("next", "terminated")
        assert torch.equal(found[place], flags["terminated"] | cut)
        # A value of all agents has another shape.
        with pytest.raises(ValueError, match=r"the values have shape \(\d+, 1\), but the rewards"):
            bootstrap_time_limits(batch, lambda steps: torch.zeros(len(steps), 1), 0.9)


@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_estimates_are_those_of_torchrl(gamma):
    values = pytest.importorskip("torchrl.objectives.value")
    batch, network = frames(), critic()
    for key in ("terminated", "truncated", "done"):
        batch[key] = torch.zeros_like(batch["next", key])
    estimators = [
        values.GAE(gamma=gamma, lmbda=0.8, value_network=network),
        values.TD0Estimator(gamma=gamma, value_network=network),
        values.TDLambdaEstimator(gamma=gamma, lmbda=0.8, value_network=network),
    ]
    for estimate in estimators:
        expected = estimate(batch.clone())
        # The estimator reads "terminated": it must not add the value a second time.
        own = bootstrap_time_limits(batch, network, gamma, set_terminated=True)
        found = estimate(own)
        for key in ("advantage", "value_target"):
            torch.testing.assert_close(found[key], expected[key])


def test_a_collector_bootstraps_its_batches():
    torch.manual_seed(0)
    network = TensorDictModule(nn.Linear(3, 1), ["observation"], ["value"])
    found = []
    for postproc in (None, BootstrapTimeLimits(network, 0.9, value_key="value")):
        options = {"frames_per_batch": 60, "max_frames_per_traj": 20}
        with Collector(["Pendulum-v1"] * 2, postproc=postproc, **options) as collector:
            collector.set_seed(0)
            found.append(collector.next())
    raw, own = found
    added = torch.where(raw["next", "truncated"], network.module(raw["next", "observation"]), 0)
    torch.testing.assert_close(own[REWARD], raw[REWARD] + 0.9 * added.detach())
    assert raw["next", "truncated"].sum() > 0


def test_the_newest_weights_count():
    network = critic()
    transform = BootstrapTimeLimits(network, 0.9)
    first = transform(frames())
    with torch.no_grad():
        network.module.weight += 1
    assert not torch.equal(transform(frames())[REWARD], first[REWARD])
    assert "gamma=0.9" in repr(transform)


def test_a_key_names_the_values():
    batch = frames()
    network = critic(out_keys=["v"])
    expected = bootstrap_time_limits(batch, critic(), 0.9)
    found = bootstrap_time_limits(batch, network, 0.9, value_key="v")
    assert torch.equal(found[REWARD], expected[REWARD])
    with pytest.raises(KeyError, match=r"wrote no 'state_value'; pass the key .* as value_key"):
        bootstrap_time_limits(batch, network, 0.9)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: BootstrapTimeLimits(3), TypeError, "value_network must be a TensorDict module"),
        (lambda: BootstrapTimeLimits(nn.Linear), TypeError, r"but it is <class '.*Linear'>"),
        (lambda: BootstrapTimeLimits(critic(), 1.5), ValueError, r"from 0 to 1, but it is 1\.5"),
        (lambda: BootstrapTimeLimits(critic(), value_key=3), TypeError,
         "value_key must be a string or a tuple of strings"),
        (lambda: BootstrapTimeLimits(critic(), set_terminated="no"), TypeError,
         "set_terminated must be True or False"),
        (lambda: bootstrap_time_limits(frames(), critic(), None), TypeError,
         "gamma must be a number, but it is None"),
        (lambda: bootstrap_time_limits(frames(), lambda steps: 1.0), TypeError,
         "must return a TensorDict or a tensor"),
        (lambda: bootstrap_time_limits(frames().exclude(("next", "observation")), critic()),
         KeyError, r"reads 'observation', but .* compact_obs=True"),
        (lambda: bootstrap_time_limits(frames().exclude(("next", "truncated")), critic()),
         KeyError, "no flag 'truncated' under 'next'"),
        (lambda: bootstrap_time_limits(frames().exclude(REWARD), critic()), KeyError,
         "no .*reward"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("network", [nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 1), nn.Tanh())])
def test_a_module_of_tensors_is_refused_at_once(network):
    words = r"module that takes tensors, \w+\. .*needs a TensorDictModule around it"
    for call in (
        lambda: BootstrapTimeLimits(network),
        lambda: bootstrap_time_limits(frames(), network),
    ):
        with pytest.raises(TypeError, match=words):
            call()


def test_another_module_of_tensors_is_explained_when_it_fails():
    class OfTensors(nn.Module):
        def forward(self, observation):
            return torch.relu(observation)

    with pytest.raises(TypeError) as caught:
        bootstrap_time_limits(frames(), OfTensors())
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "value_network is called with a TensorDict" in text
    assert "needs a TensorDictModule" in text
