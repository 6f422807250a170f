"""Collectors whose weights come by weight-sync schemes: to their workers, and to themselves."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import reduction
from typing import Any

import pytest
import torch
from collector_parts import PATIENCE, Buffer
from multi_parts import CLASSES, Chooser, actions, make, worker_of
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from trawl.collectors import Collector, MultiSyncCollector
from trawl.testing import NumberedEnv
from trawl.weight_update import (
    DistributedWeightSyncScheme,
    MultiProcessedWeightUpdater,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
)

# Processes are forked from one that has imported this.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["trawl.weight_update", "trawl.collectors", "trawl.testing.envs", "tensordict.nn"]
)

BOTH = pytest.mark.parametrize("cls", CLASSES, ids=["sync", "async"])
ALL = pytest.mark.parametrize("cls", [Collector, *CLASSES], ids=["one", "sync", "async"])
#: Each scheme that sends, with each class.
SENDING = pytest.mark.parametrize(
    ("cls", "scheme"),
    [(CLASSES[0], SharedMemWeightSyncScheme), (CLASSES[1], MultiProcessWeightSyncScheme)],
    ids=["sync-shared", "async-process"],
)
RECEIVING = pytest.mark.parametrize(
    ("cls", "scheme"),
    [
        (Collector, SharedMemWeightSyncScheme),
        (CLASSES[0], MultiProcessWeightSyncScheme),
        (CLASSES[1], SharedMemWeightSyncScheme),
    ],
    ids=["one-shared", "sync-process", "async-shared"],
)


class Talking(nn.Module):
    """A policy with something beside its weight: it is what its actions are."""

    def __init__(self, choice: int = 0) -> None:
        super().__init__()
        self.choice = choice
        self.unused = nn.Parameter(torch.zeros(2))

    def get_extra_state(self) -> Any:
        return {"choice": self.choice}

    def set_extra_state(self, state: Any) -> None:
        self.choice = state["choice"]

    def forward(self, observation: Tensor) -> Tensor:
        action = nn.functional.one_hot(torch.tensor(self.choice), 4)
        return action.expand(*observation.shape[:-1], 4)


class HeadedEnv(NumberedEnv):
    """A numbered environment whose rewards are made by a module of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head = nn.Linear(1, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, float(self.head(torch.zeros(1))), *rest


class Wrapping:
    """A policy that is no module, but has one."""

    def __init__(self, choice: int = 0) -> None:
        self.net = Chooser(choice)

    def __call__(self, observation: Tensor) -> Tensor:
        action: Tensor = self.net(observation)
        return action


def head(number: float) -> nn.Linear:
    """Weights for the environment's module, by which it gives this reward."""
    made = nn.Linear(1, 1)
    nn.init.zeros_(made.weight)
    nn.init.constant_(made.bias, number)
    return made


def collector(cls: Any, policy: Any = None, **options: Any) -> Any:
    """A collector of two workers in this process, or of none."""
    options.setdefault("track_policy_version", True)
    policy = Chooser(1) if policy is None and "policy_factory" not in options else policy
    if cls is Collector:
        source = options.pop("create_env_fn", [NumberedEnv])[0]
        return Collector(source, policy, frames_per_batch=5, **options)
    return make(cls, policy=policy, **options)


def rows(batch: TensorDictBase) -> Iterator[TensorDictBase]:
    yield from batch if batch.ndim > 1 else [batch]


def settled(collector: Any, read: Callable[[Any], Any] = actions) -> list[Any]:
    """What is read of each worker's batches, and their versions, once new weights are in use."""
    found = {}
    for _ in range(8):
        for row in rows(collector.next()):
            versions = row["policy_version"].tolist()
            found[worker_of(row)] = read(row), versions.pop()
            assert set(versions) <= {found[worker_of(row)][1]}
    return [found[index] for index in sorted(found)]


def caught_up(collector: Any) -> list[Any]:
    """The same, of workers in processes of their own: one that is slow has batches of before."""
    workers = range(getattr(collector, "num_workers", 1))
    found: dict[int, Any] = dict.fromkeys(workers, (None, None))
    while {version for _, version in found.values()} != {collector.policy_version_tracker.version}:
        for row in rows(collector.next()):
            (version,) = set(row["policy_version"].tolist())
            found[worker_of(row)] = actions(row), version
    return [found[index] for index in workers]


def rewards(batch: TensorDictBase) -> set[float]:
    return set(batch["next", "reward"].flatten().tolist())


def workers_of(cls: Any) -> int:
    return 1 if cls is Collector else 2


def as_sent(thing: Any) -> Any:
    return reduction.ForkingPickler.loads(reduction.ForkingPickler.dumps(thing))


# --- a collector that sends


@SENDING
def test_a_scheme_brings_weights_to_the_workers(cls, scheme):
    policy = Chooser(1)
    with collector(cls, policy, weight_sync_schemes={"policy": scheme()}) as made:
        assert settled(made) == [({1}, 0)] * 2
        made.update_policy_weights_(Chooser(2))
        assert settled(made) == [({2}, 1)] * 2
        policy.become(3)
        made.update_policy_weights_()
        assert settled(made) == [({3}, 2)] * 2
        made.update_policy_weights_(weights_dict={"policy": Chooser(1)}, worker_ids=[1])
        assert settled(made) == [({3}, 2), ({1}, 3)]
        # Also to each its own.
        made.update_policy_weights_({0: Chooser(2), 1: Chooser(3).state_dict()})
        assert settled(made) == [({2}, 4), ({3}, 4)]
        made.update_policy_weights_(Chooser(1))
        assert settled(made) == [({1}, 5)] * 2


def test_a_scheme_that_sends_nothing_leaves_the_workers_alone():
    with collector(CLASSES[1], weight_sync_schemes={"policy": NoWeightSyncScheme()}) as made:
        made.update_policy_weights_(Chooser(2))
        assert settled(made) == [({1}, 0)] * 2
        # Versions come to them all the same, and what is loaded.
        made.increment_version()
        assert settled(made) == [({1}, 1)] * 2


@pytest.mark.parametrize(
    ("cls", "scheme"),
    [
        (CLASSES[0], SharedMemWeightSyncScheme),
        (CLASSES[1], MultiProcessWeightSyncScheme),
        (Collector, None),
        (CLASSES[1], None),
    ],
)
def test_what_a_policy_has_beside_its_weights_is_sent_as_well(cls, scheme):
    policy = Talking(1)
    schemes = {} if scheme is None else {"weight_sync_schemes": {"policy": scheme()}}
    with collector(cls, policy, **schemes) as made:
        policy.choice = 2
        made.update_policy_weights_()
        assert settled(made) == [({2}, 1)] * workers_of(cls)
        for version, form in enumerate((Talking(3), Talking(0).state_dict()), start=2):
            made.update_policy_weights_(form)
            assert settled(made) == [({0 if version == 3 else 3}, version)] * workers_of(cls)


@pytest.mark.parametrize(
    ("cls", "start_method", "scheme"),
    [
        (CLASSES[1], "messages", None),
        (CLASSES[0], "inline", SharedMemWeightSyncScheme),
    ],
)
def test_the_policy_beside_a_factory_is_where_weights_come_from(cls, scheme, start_method):
    policy = Chooser(3)
    options = {} if scheme is None else {"weight_sync_schemes": {"policy": scheme()}}
    factory = partial(Chooser, 1)
    with collector(
        cls, policy, policy_factory=factory, start_method=start_method, **options
    ) as made:
        policy.become(2)
        assert settled(made) == [({3}, 0)] * 2
        made.update_policy_weights_()
        assert settled(made) == [({2}, 1)] * 2


def test_a_policy_beside_a_factory_must_be_a_source_of_weights():
    with pytest.raises(TypeError, match="both be given only if the policy is a module"):
        collector(MultiSyncCollector, lambda observation: 0, policy_factory=Chooser)
    with pytest.raises(TypeError, match="can't both be given together with a weight_updater"):
        collector(
            MultiSyncCollector,
            Chooser(3),
            policy_factory=Chooser,
            weight_updater=MultiProcessedWeightUpdater(),
        )


BY_HAND = {
    "params_map": lambda model: {"params_map": dict.fromkeys(range(2), model.state_dict())},
    "weights": lambda model: {"weights": model.state_dict(), "num_workers": 2},
    "model": lambda model: {"model": model, "devices": ["cpu"] * 2},
}


@pytest.mark.parametrize(
    ("cls", "scheme", "how"),
    [
        (CLASSES[0], SharedMemWeightSyncScheme, "params_map"),
        (CLASSES[1], MultiProcessWeightSyncScheme, "model"),
        (CLASSES[0], DistributedWeightSyncScheme, "weights"),
    ],
)
def test_a_scheme_that_was_initialised_keeps_the_weights_that_it_sends(cls, scheme, how):
    source = Chooser(3)
    sender = scheme()
    sender.init_on_sender(**BY_HAND[how](source))
    start = "messages" if scheme is DistributedWeightSyncScheme else "inline"
    schemes = {"policy": sender}
    with collector(cls, Chooser(1), weight_sync_schemes=schemes, start_method=start) as made:
        assert settled(made) == [({3}, 0)] * 2
        source.become(2)
        made.update_policy_weights_()
        assert settled(made) == [({2}, 1)] * 2
        made.update_policy_weights_(Chooser(0))
        assert settled(made) == [({0}, 2)] * 2


def test_a_scheme_for_other_receivers_than_the_workers_is_refused():
    sender, fresh = SharedMemWeightSyncScheme(), SharedMemWeightSyncScheme()
    sender.init_on_sender(weights=Chooser(3).state_dict(), num_workers=3)
    match = r"'policy' was initialised for receivers \[0, 1, 2\], but the workers .* are \[0, 1\]"
    schemes = {"env.env.head": fresh, "policy": sender}
    with pytest.raises(ValueError, match=match):
        collector(MultiSyncCollector, Chooser(1), weight_sync_schemes=schemes)
    # The other scheme can be used again.
    assert not fresh.initialized_on_sender
    sender = SharedMemWeightSyncScheme()
    sender.init_on_sender(weights=Chooser(3).state_dict(), num_workers=2)
    sender.connect()
    with pytest.raises(RuntimeError, match="'policy' is already in use"):
        collector(MultiSyncCollector, Chooser(1), weight_sync_schemes={"policy": sender})


def test_a_scheme_belongs_to_one_collector_by_which_it_sends():
    for cls in (Collector, MultiSyncCollector):
        scheme = SharedMemWeightSyncScheme()
        with collector(cls, weight_sync_schemes={"policy": scheme}) as made:
            assert scheme.context is made
            assert scheme.initialized_on_sender
            assert scheme.model is made.policy
            scheme.send(Chooser(2))
            assert made.policy_version == 1
            assert settled(made) == [({2}, 1)] * workers_of(cls)
            if cls is not Collector:
                scheme.send({0: Chooser(3), 1: Chooser(3)})
                assert made.policy_version == 2
                with pytest.raises(RuntimeError, match="scheme of 'policy' is already in use"):
                    collector(cls, weight_sync_schemes={"policy": scheme})
                made.update_policy_weights_(Chooser(1))
                assert settled(made) == [({1}, 3)] * 2


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_schemes_are_given_by_model(cls):
    for name in ("weight_sync_schemes", "weight_recv_schemes"):
        for value in (SharedMemWeightSyncScheme(), {"policy": 3}, ["policy"]):
            with pytest.raises(TypeError, match=f"{name}.* must "):
                collector(cls, **{name: value})


# --- several models


@SENDING
def test_a_model_of_the_environment_is_found_by_its_path(cls, scheme):
    schemes = {"policy": scheme(), "env.env.head": scheme()}
    envs = [partial(HeadedEnv, number) for number in range(2)]
    with collector(cls, create_env_fn=envs, weight_sync_schemes=schemes) as made:
        assert settled(made, rewards) == [({0.0}, 0)] * 2

        made.update_policy_weights_(weights_dict={"policy": Chooser(2), "env.env.head": head(5)})
        assert settled(made) == [({2}, 1)] * 2
        assert settled(made, rewards) == [({5.0}, 1)] * 2

        made.update_policy_weights_(head(7), model_id="env.env.head", worker_ids=1)
        assert [found for found, _ in settled(made, rewards)] == [{5.0}, {7.0}]
        assert [found for found, _ in settled(made)] == [{2}, {2}]

        made.update_policy_weights_(Chooser(3))
        assert [found for found, _ in settled(made)] == [{3}, {3}]
        assert [found for found, _ in settled(made, rewards)] == [{5.0}, {7.0}]


def test_a_model_that_a_policy_has_is_found_by_its_path():
    schemes = {"policy.net": SharedMemWeightSyncScheme()}
    with collector(MultiSyncCollector, Wrapping(1), weight_sync_schemes=schemes) as made:
        assert [found for found, _ in settled(made)] == [{1}, {1}]
        made.update_policy_weights_(Chooser(2), model_id="policy.net")
        assert [found for found, _ in settled(made)] == [{2}, {2}]
        with pytest.raises(TypeError, match="policy Wrapping has no weights to update"):
            made.update_policy_weights_(Chooser(3))


def test_a_collector_in_this_process_finds_models_by_their_paths():
    with collector(Collector, create_env_fn=[HeadedEnv]) as made:
        made.update_policy_weights_(weights_dict={"policy": Chooser(2), "env.env.head": head(5)})
        assert settled(made) == [({2}, 1)]
        assert settled(made, rewards) == [({5.0}, 1)]
        for kwargs in ({"policy": head(1)}, {}):
            with pytest.raises(KeyError, match=r"no model 'env\.env\.tail'"):
                made.update_policy_weights_(model_id="env.env.tail", **kwargs)
        with pytest.raises(TypeError, match=r"env.env \w+ has no weights to update"):
            made.update_policy_weights_(head(1), model_id="env.env")
        assert made.policy_version == 1


def test_models_without_a_scheme_are_unknown_and_paths_that_lead_nowhere_are_told():
    schemes = {"env.env.head": SharedMemWeightSyncScheme()}
    envs = [partial(HeadedEnv, number) for number in range(2)]
    with collector(MultiSyncCollector, create_env_fn=envs, weight_sync_schemes=schemes) as made:
        with pytest.raises(KeyError, match=r"no model 'env.env.tail' .*\['env.env.head', 'policy'"):
            made.update_policy_weights_(head(1), model_id="env.env.tail")
        with pytest.raises(KeyError, match="no model 'critic'"):
            made.update_policy_weights_(weights_dict={"policy": Chooser(2), "critic": head(1)})
        with pytest.raises(ValueError, match=r"weights of 'env.env.head' must be passed"):
            made.update_policy_weights_(model_id="env.env.head")
        # Nothing of what was given with them has changed.
        assert settled(made) == [({1}, 0)] * 2
    with pytest.raises(KeyError, match=r"no model 'env\.env\.tail'"):
        collector(
            MultiSyncCollector, weight_sync_schemes={"env.env.tail": SharedMemWeightSyncScheme()}
        )


# --- while batches are made in the background


@ALL
def test_weights_may_be_updated_while_batches_are_made_in_the_background(cls):
    buffer = Buffer()
    made = collector(cls, replay_buffer=buffer)
    with made:
        made.start()
        for choice in (2, 3, 0):
            made.update_policy_weights_(Chooser(choice))
            buffer.wait_for(len(buffer) + 40)
    chosen = {0: 1, 1: 2, 2: 3, 3: 0}
    frames = buffer.content()
    versions = frames["policy_version"].tolist()
    assert NumberedEnv.action_numbers(frames).flatten().tolist() == [chosen[v] for v in versions]
    assert set(versions) >= {1, 2, 3}
    for worker in range(workers_of(cls)):
        own = frames["policy_version"][NumberedEnv.numbers(frames)[:, 0] == worker]
        assert own.tolist() == sorted(own.tolist())


# --- a collector that receives


class Learner:
    """Who sends: a scheme, and the end of it that a collector gets."""

    def __init__(self, scheme: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        self.scheme = scheme()
        self.scheme.init_on_sender(model=Chooser(2) if model is None else model, **kwargs)
        self.end = as_sent(self.scheme)
        self.scheme.connect()
        self.send = self.scheme.send


@pytest.mark.parametrize(
    ("cls", "scheme", "options"),
    [
        (Collector, SharedMemWeightSyncScheme, {}),
        (CLASSES[0], MultiProcessWeightSyncScheme, {}),
        (CLASSES[1], SharedMemWeightSyncScheme, {}),
        (CLASSES[0], SharedMemWeightSyncScheme, {"start_method": "forkserver"}),
        (CLASSES[1], MultiProcessWeightSyncScheme, {"start_method": "forkserver"}),
    ],
)
def test_a_collector_takes_the_weights_it_is_sent(cls, scheme, options):
    learner = Learner(scheme)
    with collector(cls, weight_recv_schemes={"policy": learner.end}, **options) as made:
        assert caught_up(made) == [({1}, 0)] * workers_of(cls)
        for version, choice in enumerate((2, 3, 0), start=1):
            learner.send(Chooser(choice))
            made.receive_weights()
            assert caught_up(made) == [({choice}, version)] * workers_of(cls)


@RECEIVING
def test_weights_are_received_before_a_batch_or_when_that_is_asked_for(cls, scheme):
    """Also those that were sent before; and who sent them may wait until they are taken."""
    for at_once in (True, False):
        learner = Learner(scheme)
        with collector(cls) as made:
            learner.send()
            schemes = {"policy": learner.end}
            made.register_scheme_receiver(schemes, synchronize_weights=at_once)
            assert made.policy_version == int(at_once)
            assert settled(made) == [({2}, 1)] * workers_of(cls)
            learner.send(Chooser(0))
            assert made.policy_version_tracker.version == 1
            for _ in range(2):
                made.receive_weights()
                assert made.policy_version_tracker.version == 2
            for given in (
                {"policy_or_weights": Chooser(3)},
                {"policy": Chooser(3)},
                {"weights": {}},
            ):
                with pytest.raises(ValueError, match=r"receive_weights\(\) takes no weights here"):
                    made.receive_weights(**given)
            learner.scheme.send_async(Chooser(3))
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(learner.scheme.wait_async, PATIENCE)
                assert settled(made) == [({3}, 3)] * workers_of(cls)
                waiting.result(PATIENCE)
            learner.scheme.wait_async(0)


@ALL
def test_without_schemes_weights_are_received_as_they_are_given(cls):
    forms = [{"policy_or_weights": Chooser(2)}, {"policy": Chooser(3)}]
    forms.append({"weights": Chooser(0).state_dict()})
    with collector(cls) as made:
        for version, form in enumerate(forms, start=1):
            made.receive_weights(**form)
            assert settled(made) == [({(version + 1) % 4}, version)] * workers_of(cls)
        with pytest.raises(ValueError, match="pass only one of policy, weights"):
            made.receive_weights(policy=Chooser(), weights={})
    with pytest.raises(RuntimeError, match=r"receive_weights\(\) failed .* shut down"):
        made.receive_weights(Chooser())


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_what_comes_beside_the_weights_is_received(cls):
    learner = Learner(SharedMemWeightSyncScheme, Talking(3))
    with collector(cls, Talking(1), weight_recv_schemes={"policy": learner.end}) as made:
        learner.send()
        assert settled(made) == [({3}, 1)] * workers_of(cls)


def test_a_collector_receives_for_several_models():
    policy, reward = Learner(SharedMemWeightSyncScheme), Learner(SharedMemWeightSyncScheme, head(5))
    schemes = {"policy": policy.end, "env.env.head": reward.end}
    with collector(Collector, create_env_fn=[HeadedEnv], weight_recv_schemes=schemes) as made:
        policy.send()
        reward.send()
        assert settled(made) == [({2}, 1)]
        assert settled(made, rewards) == [({5.0}, 1)]


@ALL
def test_weights_that_do_not_fit_are_told_when_they_are_taken(cls):
    learner = Learner(SharedMemWeightSyncScheme, nn.Linear(1, 1))
    with collector(cls, weight_recv_schemes={"policy": learner.end}) as made:
        learner.send()
        with pytest.raises(KeyError, match="don't fit the policy Chooser"):
            made.receive_weights()
        with pytest.raises(KeyError, match="don't fit the policy Chooser"):
            made.next()


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_the_senders_end_receives_nothing(cls):
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender(model=Chooser())
    with pytest.raises(RuntimeError, match="scheme of 'policy' is the sender's end"):
        collector(cls, weight_recv_schemes={"policy": scheme})
    with collector(cls) as made, pytest.raises(RuntimeError, match="is the sender's end"):
        made.register_scheme_receiver({"policy": scheme})


@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_a_collector_sends_to_another_one(scheme):
    """The receiver's end may be connected before."""
    one = scheme()
    with collector(Collector, weight_sync_schemes={"policy": one}) as sender:
        end = as_sent(one)
        end.init_on_receiver(worker_idx=0)
        end.connect()
        with collector(Collector, weight_recv_schemes={"policy": end}) as receiver:
            sender.update_policy_weights_(Chooser(3))
            assert settled(sender) == settled(receiver) == [({3}, 1)]
            # It is the version of who sent it.
            sender.increment_version()
            sender.update_policy_weights_(Chooser(2))
            assert settled(sender) == settled(receiver) == [({2}, 3)]


def test_a_collector_that_sends_knows_for_whom():
    scheme = SharedMemWeightSyncScheme()
    policy = Chooser(1)
    scheme.init_on_sender(model=policy, num_workers=2)
    ends = [as_sent(scheme) for _ in range(2)]
    for index, end in enumerate(ends):
        end.init_on_receiver(worker_idx=index)
    with (
        collector(Collector, policy, weight_sync_schemes={"policy": scheme}) as sender,
        collector(Collector, weight_recv_schemes={"policy": ends[0]}) as first,
        collector(Collector, weight_recv_schemes={"policy": ends[1]}) as second,
    ):
        sender.update_policy_weights_(Chooser(3), worker_ids=1)
        assert settled(first) == [({1}, 0)]
        assert settled(second) == [({3}, 1)]
        with pytest.raises(ValueError, match="worker_ids names worker 2"):
            sender.update_policy_weights_(Chooser(3), worker_ids=2)
    with (
        collector(Collector) as alone,
        pytest.raises(TypeError, match=r"worker_ids=0 can't be used with .* without workers"),
    ):
        alone.update_policy_weights_(worker_ids=0)


# --- policies of all sorts


class Growing(nn.Module):
    """A policy that has its shapes by its first call only."""

    def __init__(self, choice: int = 0) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(4)
        self.choice = nn.Parameter(torch.tensor(float(choice)))

    def forward(self, observation: Tensor) -> Tensor:
        self.layer(observation)
        action = nn.functional.one_hot(self.choice.long(), 4)
        return action.expand(*observation.shape[:-1], 4)


@BOTH
def test_a_policy_may_have_no_shapes_yet(cls):
    policy, trained = Growing(1), Growing(3)
    with pytest.warns(UserWarning, match=r"parameters without shapes, .* each worker draws"):
        made = collector(cls, policy)
    with made:
        assert settled(made) == [({1}, 0)] * 2
        told = r"Growing has parameters without shapes, .* layer\.weight, layer\.bias"
        with pytest.raises(ValueError, match=told):
            made.update_policy_weights_()
        trained(torch.zeros(1, 5))
        made.update_policy_weights_(trained)
        assert settled(made) == [({3}, 1)] * 2
        policy(torch.zeros(1, 5))
        made.update_policy_weights_()
        assert settled(made) == [({1}, 2)] * 2


def replaced(policy: Chooser) -> None:
    policy.choice = nn.Parameter(policy.choice.detach().clone())


@ALL
def test_what_becomes_of_the_policy_later_is_no_obstacle(cls):
    policy = Chooser(1)
    with collector(cls, policy) as made:
        for version, change in enumerate((Chooser.double, replaced, Chooser.float), start=1):
            change(policy)
            policy.become((version + 1) % 4)
            made.update_policy_weights_()
            assert settled(made) == [({(version + 1) % 4}, version)] * workers_of(cls)


def other_name(policy: Chooser) -> None:
    policy.another = nn.Parameter(torch.zeros(1))


def no_values(policy: Chooser) -> None:
    policy.to("meta")


@pytest.mark.parametrize("change", [other_name, no_values], ids=lambda change: change.__name__)
def test_a_policy_that_no_longer_fits_is_refused_at_the_call(change):
    policy = Chooser(1)
    with collector(MultiSyncCollector, policy) as made:
        change(policy)
        with pytest.raises((KeyError, ValueError), match=r"'choice'|'another'"):
            made.update_policy_weights_()
        assert made.policy_version == 0
        assert settled(made) == [({1}, 0)] * 2


@pytest.mark.parametrize(("cls", "method"), [*zip(CLASSES, ["messages", "inline"], strict=True)])
def test_several_threads_may_update_while_one_collects(cls, method):
    policy = TensorDictModule(Chooser(1), ["observation"], ["action"])
    with collector(cls, policy, start_method=method) as made, ThreadPoolExecutor(4) as pool:
        updates = [pool.submit(made.update_policy_weights_, policy) for _ in range(200)]
        for _ in range(5):
            made.next()
        assert [update.result(PATIENCE) for update in updates] == [None] * 200
        assert made.policy_version_tracker.version == 200
        assert settled(made) == [({1}, 200)] * 2
