"""Policies on TorchRL's environments: the environment decides what it makes of an action."""

import itertools
import warnings

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn

import trawl.collectors
from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector

torchrl_collectors = pytest.importorskip("torchrl.collectors")

from torchrl.data import Bounded, Composite, Unbounded  # noqa: E402
from torchrl.envs import ActionMask, EnvBase, GymEnv, SerialEnv, TransformedEnv  # noqa: E402
from torchrl.modules import LSTMModule  # noqa: E402
from torchrl_parts import quiet, structure  # noqa: E402

from tests.oracle.torchrl_kinds import Masked  # noqa: E402

LIBRARIES = [trawl.collectors, torchrl_collectors]
SIZE = {"frames_per_batch": 6, "total_frames": 12}


class Adder(EnvBase):
    """Adds what it is told, in whatever shape, to a sum; without an action it adds 1.

    Args:
        batch_size: of the environment.
    """

    def __init__(self, batch_size=()):
        super().__init__(batch_size=batch_size)
        batch = self.batch_size
        self.observation_spec = Composite(observation=Unbounded((*batch, 1)), shape=batch)
        self.action_spec = Composite(action=Bounded(-1, 1, (*batch, 1)), shape=batch)
        self.reward_spec = Composite(reward=Unbounded((*batch, 1)), shape=batch)

    def _reset(self, tensordict, **kwargs):
        return self.full_observation_spec.zero().update(self.full_done_spec.zero())

    def _step(self, tensordict):
        found = self.full_observation_spec.zero().update(self.full_done_spec.zero())
        action = tensordict.get("action", torch.ones(self.batch_size))
        total = tensordict["observation"] + action.reshape(*self.batch_size, 1)
        return found.update({"observation": total, "reward": total})

    def _set_seed(self, seed):
        pass


def halves(observation):
    """An action without the last dimension."""
    return observation[..., 0] * 0 + 0.5


def index(observation):
    """The index of an action, by the pole's angle."""
    return (observation[..., 2] > 0).long()


def collected(library, env, policy, **options):
    with quiet():
        collector = library.Collector(env, policy, **SIZE | options)
        batches = list(collector)
        collector.shutdown()
    return batches


def module(function):
    return TensorDictModule(function, in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_an_action_without_its_last_dimension(batch):
    mine, theirs = (collected(lib, Adder(batch), module(halves)) for lib in LIBRARIES)
    assert structure(mine[0]) == structure(theirs[0])
    assert mine[0]["action"].shape == mine[0].batch_size
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one["next", "reward"], other["next", "reward"])
    with pytest.warns(UserWarning, match="with shape") as caught:
        Collector(Adder(batch), module(halves), **SIZE).shutdown()
    (warning,) = caught
    assert str(warning.message) == (
        f"policy wrote 'action' with shape {batch}, but the environment's action spec says "
        f"{(*batch, 1)}. How it is interpreted is up to the environment"
    )
    assert warning.filename == __file__


@pytest.mark.parametrize(
    ("kind", "method"), [(MultiSyncCollector, "inline"), (MultiAsyncCollector, "forkserver")]
)
def test_workers_warn_of_it_once(kind, method):
    with (
        pytest.warns(UserWarning, match="policy wrote 'action' with shape") as caught,
        kind([Adder] * 2, module(halves), start_method=method, **SIZE) as collector,
    ):
        batches = list(collector)
    assert len(caught) == 1
    assert all((batch["action"] == 0.5).all() for batch in batches)


@pytest.mark.parametrize(
    ("env", "shape"),
    [(lambda: GymEnv("CartPole-v1"), (6,)), (lambda: SerialEnv(2, carts), (2, 3))],
    ids=["single", "batch"],
)
def test_an_index_for_a_one_hot_spec(env, shape):
    mine, theirs = (collected(lib, env(), module(index)) for lib in LIBRARIES)
    assert mine[0]["action"].shape == theirs[0]["action"].shape == shape
    with pytest.warns(
        UserWarning, match=r": an index for a one-hot spec\. .*turns any index into action 0"
    ):
        Collector(env(), module(index), **SIZE).shutdown()


def carts():
    return GymEnv("CartPole-v1")


def test_what_is_as_the_spec_says_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        Collector(env, module(index), **SIZE).shutdown()


@pytest.mark.parametrize("lib", LIBRARIES, ids=["trawl", "torchrl"])
def test_a_policy_that_writes_no_action(lib):
    watcher = TensorDictModule(nn.Identity(), in_keys=["observation"], out_keys=["seen"])
    batches = collected(lib, Adder(), watcher)
    assert batches[0]["next", "reward"].flatten().tolist() == [1, 2, 3, 4, 5, 6]
    # An environment that needs one says so.
    with pytest.raises(KeyError, match='"action" not found') as caught:
        collected(lib, GymEnv("Pendulum-v1"), watcher)
    if lib is trawl.collectors:
        notes = "\n".join(getattr(caught.value, "__notes__", [str(caught.value)]))
        assert "policy TensorDictModule wrote no action: the environment takes 'action'" in notes


@pytest.mark.parametrize("options", [{}, {"policy_device": "cpu"}], ids=str)
def test_an_action_that_comes_later_is_kept(options):
    """Also of a policy that uses its output's memory again."""
    calls = itertools.count(1)  # a trial call counts, too, because it can't be undone
    memory = torch.zeros(1)

    def policy(tensordict):
        if (call := next(calls)) > 1:
            tensordict["action"] = memory.fill_(call)
        return tensordict

    (batch, _) = collected(trawl.collectors, Adder(), policy, **options)
    assert batch["action"].flatten().tolist() == [2, 3, 4, 5, 6, 7]


class Holder(TensorDictModuleBase):
    """Has a recurrent module, whose keys it doesn't name."""

    in_keys = ("observation",)
    out_keys = ("action",)

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, tensordict):
        return self.inner(tensordict)


class Plain(nn.Module):
    """The same as an ordinary module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, tensordict):
        return self.inner(tensordict)


def recurrent():
    lstm = LSTMModule(input_size=3, hidden_size=4, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(4, 1), in_keys=["features"], out_keys=["action"])
    return TensorDictSequential(lstm, head)


@pytest.mark.parametrize(
    "wrapped", [lambda inner: inner, Holder, Plain], ids=["", "base", "module"]
)
def test_transforms_are_added_that_the_policy_s_modules_ask_for(wrapped):
    policy = wrapped(recurrent())
    (mine, _) = collected(trawl.collectors, GymEnv("Pendulum-v1"), policy)
    # TorchRL does so if it is told to.
    options = {"auto_register_policy_transforms": True}
    (theirs, _) = collected(torchrl_collectors, GymEnv("Pendulum-v1"), policy, **options)
    assert structure(mine) == structure(theirs)
    assert mine["is_init"].flatten().tolist() == [True, *[False] * 5]


@pytest.mark.parametrize(
    "options",
    [{"policy_device": "cpu"}, {"device": "cpu"}, {"env_device": "cpu", "policy_device": "cpu"}],
    ids=str,
)
@pytest.mark.parametrize(
    ("env", "own"),
    [(carts, None), (lambda: SerialEnv(2, carts), None), (carts, ["CartPole-v1"])],
    ids=["single", "batch", "own"],
)
def test_the_policy_s_tensordict_says_its_device(env, own, options):
    def seen_by(library):
        seen = []

        def policy(tensordict):
            seen.append(tensordict.device)
            action = nn.functional.one_hot(index(tensordict["observation"]), 2)
            return tensordict.set("action", action)

        source = own if own and library is trawl.collectors else env()
        return seen, collected(library, source, policy, **options)

    (mine, batches), (theirs, expected) = map(seen_by, LIBRARIES)
    assert set(mine) == set(theirs) == {torch.device("cpu")}
    if own is None:
        assert [batch.device for batch in batches] == [batch.device for batch in expected]
        assert structure(batches[0]) == structure(expected[0])


def last(action_mask):
    """The last action that is allowed."""
    return action_mask.shape[-1] - 1 - action_mask.flip(-1).long().argmax(-1)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (lambda: None, {}),
        (trawl.collectors.RandomPolicy, {}),
        (torchrl_collectors.RandomPolicy, {}),
        (lambda: last, {"init_random_frames": 400}),
        (lambda: TensorDictModule(last, ["action_mask"], ["action"]), {}),
    ],
    ids=["none", "own", "torchrl", "first", "trained"],
)
def test_actions_are_those_that_a_mask_allows(policy, options):
    env = TransformedEnv(Masked(), ActionMask())
    options |= {"frames_per_batch": 200, "total_frames": 400}
    for batch in collected(trawl.collectors, env, policy(), **options):
        assert batch["action_mask"].gather(-1, batch["action"][..., None]).all()


def test_an_inference_server_acts_through_a_client():
    servers = pytest.importorskip("torchrl.modules.inference_server")

    def policy(bias):
        made = nn.Linear(3, 1)
        nn.init.zeros_(made.weight)
        nn.init.constant_(made.bias, bias)
        return TensorDictModule(made, ["observation"], ["action"])

    server = servers.InferenceServer(policy(0.5))
    server.start()
    try:
        with pytest.raises(ValueError, match="policy_factory can't be used with an inference"):
            Collector("Pendulum-v1", server, policy_factory=policy, frames_per_batch=4)
        with Collector("Pendulum-v1", server, frames_per_batch=4) as collector:
            assert collector.next()["action"].flatten().tolist() == [0.5] * 4
            with pytest.raises(ValueError, match="needs weights"):
                collector.update_policy_weights_()
            collector.update_policy_weights_(policy(0.25))
            assert collector.next()["action"].flatten().tolist() == [0.25] * 4
        assert server.is_alive
    finally:
        server.shutdown()
