"""The life of a weight-sync scheme, what it knows of itself, and what it refuses."""

from __future__ import annotations

import gc
import pickle
import select
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from weight_parts import Uniform, Whole, as_sent, numbers

from trawl.weight_update import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)
from trawl.weight_update.store import WeightStore

BOTH = pytest.mark.parametrize(
    "kind", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme], ids=["shared", "process"]
)
ALL = pytest.mark.parametrize(
    "kind",
    [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, NoWeightSyncScheme],
    ids=["shared", "process", "none"],
)


class Context:
    """What has a model, and is told of new weights."""

    def __init__(self, policy: nn.Module, workers: int | None = None) -> None:
        self.policy = policy
        self.parts = [SimpleNamespace(head=nn.Linear(2, 1))]
        self.told: list[Any] = []
        if workers is not None:
            self.num_workers = workers

    def update_policy_weights_(self, policy_or_weights: Any, *, model_id: str) -> None:
        self.told.append((model_id, policy_or_weights))


def sending(kind: Any, **kwargs: Any) -> Any:
    """A scheme that is a sender's end."""
    scheme = kind()
    scheme.init_on_sender(**({"model": Uniform()} | kwargs))
    return scheme


def pair(kind: Any, model: Any = None, index: int = 0, **kwargs: Any) -> tuple[Any, Any]:
    """Both ends, connected; the receiver's as it comes to another process."""
    sender = sending(kind, **kwargs)
    receiver = as_sent(sender)
    sender.connect()
    receiver.init_on_receiver(model=model, worker_idx=index)
    receiver.connect()
    return sender, receiver


# --- the life


@ALL
def test_a_life(kind):
    scheme = kind()
    assert not scheme.initialized_on_sender
    assert not scheme.initialized_on_receiver
    scheme.init_on_sender(model=Uniform(), num_workers=2)
    assert scheme.initialized_on_sender
    assert not scheme.synchronized_on_sender
    receiver = as_sent(scheme)
    assert not receiver.initialized_on_sender
    scheme.connect()
    assert scheme.synchronized_on_sender
    receiver.init_on_receiver(worker_idx=1)
    assert receiver.initialized_on_receiver
    assert not receiver.synchronized_on_receiver
    receiver.connect()
    assert receiver.synchronized_on_receiver
    scheme.send()
    receiver.receive(timeout=0)
    for end in (scheme, receiver):
        for _ in range(2):
            end.shutdown()
        assert not end.initialized_on_sender
        assert not end.initialized_on_receiver
        assert not end.synchronized_on_sender
        assert not end.synchronized_on_receiver


@BOTH
def test_what_is_sent_is_received(kind):
    model = Uniform(0)
    sender, receiver = pair(kind, model)
    assert receiver.receive(timeout=0) is None
    sender.send(Uniform(1))
    assert numbers(receiver.receive()) == {1}
    assert model.numbers == {1}
    assert receiver.receive(timeout=0) is None
    sender.wait_async(0)


@BOTH
def test_without_weights_those_of_the_moment_are_sent(kind):
    learner = Uniform(1)
    sender = sending(kind, model=learner)
    receiver = as_sent(sender)
    sender.connect()
    receiver.init_on_receiver()
    receiver.connect()
    for number in (1, 2):
        sender.send(None if number == 1 else learner.become(2))
        assert numbers(receiver.receive()) == {number}


@BOTH
def test_the_newest_weights_replace_those_before(kind):
    sender, receiver = pair(kind)
    for number in range(10):
        sender.send_async(Uniform(number))
    assert numbers(receiver.receive()) == {9}
    assert receiver.receive(timeout=0) is None
    sender.wait_async(timeout=0)


@BOTH
def test_who_waits_is_woken_by_what_is_sent(kind):
    sender, receivers = three(kind)
    sender.send(worker_ids=[0, 2])
    ends = [receiver.receiver_transport._theirs._end for receiver in receivers]
    assert select.select(ends, [], [], 0)[0] == [ends[0], ends[2]]


@BOTH
def test_connecting_may_send_weights(kind):
    sender = sending(kind)
    receiver = as_sent(sender)
    sender.connect(weights=Uniform(3))
    receiver.init_on_receiver()
    receiver.connect(worker_idx=0)
    assert numbers(receiver.receive(timeout=0)) == {3}


@BOTH
def test_a_scheme_may_live_again_after_its_end(kind):
    sender, receiver = pair(kind)
    sender.shutdown()
    receiver.shutdown()
    sender.init_on_sender(model=Uniform(4), num_workers=1)
    receiver = as_sent(sender)
    sender.connect()
    receiver.init_on_receiver()
    receiver.connect()
    sender.send()
    assert numbers(receiver.receive(timeout=0)) == {4}


@BOTH
def test_weights_are_returned_in_the_form_of_the_strategy(kind):
    scheme = kind(strategy="state_dict")
    assert scheme.strategy == "state_dict"
    scheme.init_on_sender(model=Whole(1, "that"))
    receiver = as_sent(scheme)
    scheme.connect()
    assert type(scheme.weights) is dict
    model = Whole(0)
    receiver.init_on_receiver(model=model)
    receiver.connect()
    scheme.send()
    found = receiver.receive(timeout=0)
    assert type(found) is dict
    assert found.pop("part._extra_state") == {"said": "that"}
    assert numbers(found) == model.part.numbers == {1}
    assert model.part.said == "that"


# --- where weights come from


@BOTH
def test_weights_may_come_from_a_tensordict(kind):
    weights = WeightStrategy().extract_weights(Uniform(1))
    sender = kind()
    sender.init_on_sender(weights=weights)
    receiver = as_sent(sender)
    sender.connect()
    model = Uniform(0)
    receiver.init_on_receiver(model=model)
    receiver.connect()
    for number in (1, 2):
        weights["count"].fill_(number)
        sender.send()
        receiver.receive(timeout=0)
        assert set(model.count.tolist()) == {number}


@BOTH
def test_weights_may_come_from_the_model_of_a_context(kind):
    context = Context(Uniform(1), workers=2)
    sender = kind()
    sender.init_on_sender(context=context)
    assert sender.model is context.policy
    assert sender.context is context
    assert sender.receivers.workers == [0, 1]
    receiver = as_sent(sender)
    sender.connect()
    receiver.init_on_receiver(worker_idx=1)
    receiver.connect()
    sender.send()
    assert numbers(receiver.receive(timeout=0)) == {1}


@BOTH
def test_a_model_may_be_found_by_its_path(kind):
    context = Context(Uniform())
    sender = kind()
    sender.init_on_sender(context=context, model_id="parts[0].head")
    assert sender.model_id == "parts[0].head"
    assert sender.model is context.parts[0].head
    receiver = as_sent(sender)
    sender.connect()
    model = nn.Linear(2, 1)
    receiver.init_on_receiver(model_id="parts[0].head", model=model)
    receiver.connect()
    sender.send()
    receiver.receive(timeout=0)
    assert torch.equal(model.weight, context.parts[0].head.weight)


def received(sender: Any) -> list[set[float]]:
    """What each receiver gets."""
    found = []
    receivers = {index: as_sent(sender) for index in sender.receivers.workers}
    sender.connect()
    sender.send()
    for index, receiver in receivers.items():
        receiver.init_on_receiver(worker_idx=index)
        receiver.connect()
        found.append(numbers(receiver.receive(timeout=0)))
    return found


@BOTH
def test_each_receiver_may_have_a_model_of_its_own(kind):
    scheme = kind()
    scheme.init_on_sender(params_map={0: Uniform(3), 1: Uniform(4).state_dict(), 3: Uniform(5)})
    assert scheme.receivers.workers == [0, 1, 3]
    assert received(scheme) == [{3}, {4}, {5}]


@BOTH
def test_weights_may_be_made_for_each_receiver(kind):
    scheme = kind()
    scheme.init_on_sender(
        weights={"count": torch.ones(2)},
        device_map_fn=lambda index, weights: {"count": weights["count"] * (index + 5)},
        num_workers=3,
    )
    assert received(scheme) == [{5}, {6}, {7}]


@BOTH
def test_there_are_as_many_receivers_as_devices(kind):
    scheme = kind()
    scheme.init_on_sender(model=Uniform(2), devices=["cpu", torch.device("cpu")])
    assert received(scheme) == [{2}, {2}]


# --- for whom


def three(kind: Any) -> tuple[Any, list[Any]]:
    sender = sending(kind, num_workers=3)
    receivers = [as_sent(sender) for _ in range(3)]
    sender.connect()
    for index, receiver in enumerate(receivers):
        receiver.init_on_receiver(worker_idx=index)
        receiver.connect()
    return sender, receivers


def got(receivers: list[Any]) -> list[Any]:
    found = [receiver.receive(timeout=0) for receiver in receivers]
    return [None if one is None else numbers(one) for one in found]


@BOTH
def test_weights_reach_those_they_are_for(kind):
    sender, receivers = three(kind)
    sender.send(Uniform(1), worker_ids=1)
    assert got(receivers) == [None, {1}, None]
    sender.send(Uniform(2), worker_ids=[0, 2])
    assert got(receivers) == [{2}, None, {2}]
    sender.wait_async(0, worker_ids=[0, 1])


@BOTH
def test_each_receiver_may_get_weights_of_its_own(kind):
    sender, receivers = three(kind)
    sender.send({0: Uniform(1), 2: Uniform(3).state_dict()})
    assert got(receivers) == [{1}, None, {3}]
    sender.send({0: Uniform(4), 1: Uniform(5), 2: Uniform(6)}, worker_ids=[1, 2])
    assert got(receivers) == [None, {5}, {6}]
    # Whatever each had before.
    sender.send(Uniform(7))
    assert got(receivers) == [{7}] * 3


def test_receivers_share_what_is_in_shared_memory_unless_they_are_to_differ():
    shared = sending(SharedMemWeightSyncScheme, num_workers=3)
    assert isinstance(shared.shared_transport, WeightStore)
    assert not shared.per_worker_weights
    own = SharedMemWeightSyncScheme(per_worker_weights=True)
    own.init_on_sender(model=Uniform(), num_workers=3)
    assert own.shared_transport is None
    assert MultiProcessWeightSyncScheme().per_worker_weights


# --- who receives


@BOTH
def test_a_context_is_told_of_new_weights(kind):
    context = Context(Uniform(0))
    sender = sending(kind)
    receiver = as_sent(sender)
    sender.connect()
    receiver.init_on_receiver(context=context, model_id="policy")
    assert receiver.model is context.policy
    receiver.connect()
    sender.send(Uniform(1))
    receiver.receive(timeout=0)
    ((model_id, weights),) = context.told
    assert model_id == "policy"
    assert numbers(weights.tensors) == {1}


@BOTH
def test_a_receiver_has_the_number_of_its_context(kind):
    context = Context(Uniform())
    context.config = SimpleNamespace(worker_idx=2)
    for given, index in ((None, 2), (1, 1)):
        receiver = as_sent(sending(kind, num_workers=3))
        receiver.init_on_receiver(context=context, worker_idx=given)
        assert receiver.worker_idx == index


@BOTH
def test_weights_may_be_applied_by_hand(kind):
    model = Uniform(0)
    _, receiver = pair(kind, model)
    receiver.apply_weights(Uniform(5))
    assert model.numbers == {5}
    source = Uniform(6)
    receiver.apply_weights(source, inplace=False)
    source.become(7)
    assert model.numbers == {7}


@BOTH
def test_weights_that_do_not_fit_the_receivers_model_are_refused_there(kind):
    sender = sending(kind, model=None, weights={"weight": torch.zeros(1, 1)})
    model = nn.Linear(1, 1)
    receiver = as_sent(sender)
    sender.connect()
    receiver.init_on_receiver(model=model)
    receiver.connect()
    sender.send()
    for _ in range(2):
        with pytest.raises(KeyError, match=r"don't fit the policy Linear: missing \['bias'\]"):
            receiver.receive(timeout=0)


# --- what it knows of itself


@ALL
def test_a_fresh_scheme_knows_nothing(kind):
    scheme = kind()
    assert scheme.model is scheme.context is scheme.model_id is scheme.worker_idx is None
    assert scheme.weights is None
    assert scheme.sender_transports == {}
    assert scheme.receiver_transport is scheme.shared_transport is None
    assert scheme.strategy == "tensordict"


@BOTH
def test_a_scheme_knows_its_transports(kind):
    sender = sending(kind, num_workers=2)
    assert list(sender.sender_transports) == [0, 1]
    assert all(isinstance(one, SharedMemTransport) for one in sender.sender_transports.values())
    receiver = as_sent(sender)
    assert receiver.receiver_transport is None
    receiver.init_on_receiver(worker_idx=1)
    receiver.connect()
    assert receiver.receiver_transport.number == 1
    assert receiver.sender_transports == {}
    assert sender.receiver_transport is None


@BOTH
def test_a_scheme_knows_the_weights_of_its_model(kind):
    model = Uniform(1)
    scheme = sending(kind, model=model)
    assert isinstance(scheme.weights, TensorDict)
    assert numbers(scheme.weights) == {1}
    model.become(2)
    assert numbers(scheme.weights) == {2}


@ALL
def test_a_context_is_not_kept(kind):
    context = Context(Uniform())
    sender = kind()
    sender.init_on_sender(context=context, num_workers=1)
    receiver = as_sent(sender)
    receiver.init_on_receiver(context=context)
    assert sender.context is receiver.context is context
    del context
    gc.collect()
    assert sender.context is receiver.context is None
    assert receiver.model is None


@ALL
def test_a_copy_begins_anew(kind):
    context = Context(Uniform())
    scheme = sending(kind, model=context.policy, context=context, model_id="actor")
    copy = as_sent(scheme)
    assert copy.context is copy.model is copy.worker_idx is None
    assert not copy.initialized_on_sender
    assert not copy.initialized_on_receiver
    assert scheme.initialized_on_sender
    fresh = pickle.loads(pickle.dumps(kind()))
    fresh.init_on_sender(model=Uniform())
    assert fresh.initialized_on_sender


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("none", NoWeightSyncScheme),
        ("direct", NoWeightSyncScheme),
        ("shared", SharedMemWeightSyncScheme),
        ("thread", SharedMemWeightSyncScheme),
        ("process", MultiProcessWeightSyncScheme),
        ("multiprocessing", MultiProcessWeightSyncScheme),
    ],
)
def test_a_scheme_suits_a_place(name, kind):
    assert type(WeightSyncScheme.from_backend(name)) is kind


def test_a_scheme_for_a_place_takes_the_schemes_arguments():
    scheme = WeightSyncScheme.from_backend("shared", per_worker_weights=True, sync=False)
    assert scheme.per_worker_weights
    assert not scheme.sync


# --- a scheme that sends nothing


def test_a_scheme_may_send_nothing():
    model = Uniform(0)
    sender, receiver = pair(NoWeightSyncScheme, model, num_workers=2)
    sender.send(Uniform(1))
    sender.send_async(worker_ids=1)
    sender.wait_async()
    assert receiver.receive() is None
    assert receiver.receive(timeout=0) is None
    assert model.numbers == {0}
    assert not receiver.incoming.newer
    assert sender.count(0) == 0


# --- mistakes


@ALL
def test_a_strategy_must_be_known(kind):
    if kind is not NoWeightSyncScheme:
        with pytest.raises(ValueError, match="strategy must be 'tensordict' or 'state_dict', but"):
            kind(strategy="module")
    with pytest.raises(ValueError, match="strategy must be"):
        NoWeightSyncScheme("module")


def test_a_place_must_be_known():
    with pytest.raises(
        ValueError, match=r"backend must be one of none, direct, .* but it is 'sea'"
    ):
        WeightSyncScheme.from_backend("sea")


@ALL
def test_things_have_their_order_on_the_senders_side(kind):
    scheme = kind()
    with pytest.raises(RuntimeError, match=r"call init_on_sender\(\) before send\(\)"):
        scheme.send(Uniform())
    with pytest.raises(RuntimeError, match=r"call init_on_sender\(\) or .* before connect\(\)"):
        scheme.connect()
    scheme.init_on_sender(model=Uniform())
    for call in (scheme.send, scheme.send_async):
        with pytest.raises(RuntimeError, match=r"call connect\(\) before send\(\)"):
            call()
    with pytest.raises(RuntimeError, match=r"call connect\(\) before wait_async\(\)"):
        scheme.wait_async()
    with pytest.raises(RuntimeError, match="worker_idx=0 is for receivers, not for the sender"):
        scheme.connect(worker_idx=0)
    scheme.connect()
    with pytest.raises(RuntimeError, match="already connected"):
        scheme.connect()
    for init in (scheme.init_on_sender, scheme.init_on_receiver):
        with pytest.raises(RuntimeError, match="already initialised"):
            init(model=Uniform())


@BOTH
def test_things_have_their_order_on_the_receivers_side(kind):
    scheme = as_sent(sending(kind))
    with pytest.raises(RuntimeError, match=r"call init_on_receiver\(\) before receive\(\)"):
        scheme.receive()
    with pytest.raises(RuntimeError, match=r"call init_on_receiver\(\) before apply_weights\(\)"):
        scheme.apply_weights({})
    scheme.init_on_receiver(model=Uniform())
    with pytest.raises(RuntimeError, match=r"call connect\(\) before receive\(\)"):
        scheme.receive()
    with pytest.raises(RuntimeError, match=r"call connect\(\) before reading incoming"):
        _ = scheme.incoming
    with pytest.raises(RuntimeError, match=r"call init_on_sender\(\) before send\(\)"):
        scheme.send()
    scheme.connect()
    with pytest.raises(RuntimeError, match="already connected"):
        scheme.connect()
    for init in (scheme.init_on_sender, scheme.init_on_receiver):
        with pytest.raises(RuntimeError, match="already initialised"):
            init(model=Uniform())


@BOTH
def test_a_receivers_end_comes_from_a_senders(kind):
    scheme = kind()
    scheme.init_on_receiver(model=Uniform())
    with pytest.raises(ValueError, match=r"worker_idx is 0, but the receivers are \[\]"):
        scheme.connect()


@BOTH
def test_a_receiver_must_have_a_number_that_the_sender_knows(kind):
    receiver = as_sent(sending(kind, num_workers=2))
    receiver.init_on_receiver()
    with pytest.raises(ValueError, match=r"worker_idx is 2, but the receivers are \[0, 1\]"):
        receiver.connect(worker_idx=2)


@BOTH
@pytest.mark.parametrize("ids", [2, -1, [0, 2]])
def test_weights_for_an_unknown_receiver_are_refused(kind, ids):
    sender, receiver = pair(kind, num_workers=2)
    for call in (sender.send, sender.send_async, lambda **kw: sender.wait_async(0, **kw)):
        with pytest.raises(ValueError, match=r"worker_ids names worker -?\d, but the workers are"):
            call(worker_ids=ids)
    assert receiver.receive(timeout=0) is None


@BOTH
def test_weights_for_nobody_are_refused(kind):
    sender, receiver = pair(kind, num_workers=2)
    with pytest.raises(ValueError, match="worker_ids is empty"):
        sender.send(worker_ids=[])
    with pytest.raises(ValueError, match="worker_ids names worker 5"):
        sender.send({0: Uniform(1), 5: Uniform(1)})
    with pytest.raises(
        ValueError, match=r"weights are only for workers \[0\], none of which was selected"
    ):
        sender.send({0: Uniform(1)}, worker_ids=1)
    assert receiver.receive(timeout=0) is None


@BOTH
@pytest.mark.parametrize("ids", ["0", 0.5, [None], True])
def test_receivers_are_named_by_numbers(kind, ids):
    sender, _ = pair(kind)
    with pytest.raises(TypeError, match=r"worker_ids must be the number|not iterable"):
        sender.send(worker_ids=ids)


@BOTH
@pytest.mark.parametrize(
    ("weights", "error", "match"),
    [
        (3, TypeError, "weights must be a module"),
        ({}, KeyError, "missing"),
        (nn.Linear(1, 1), KeyError, "missing .*unknown"),
        (Uniform(sizes=(1, 1, 1)), ValueError, "has shape"),
        ({0: Uniform(1), 1: nn.Linear(1, 1)}, KeyError, "missing .*unknown"),
        ({"count": "many"}, TypeError, "must be a tensor"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nobody_gets_any(kind, weights, error, match):
    sender, receiver = pair(kind, num_workers=2)
    with pytest.raises(error, match=match):
        sender.send(weights)
    assert receiver.receive(timeout=0) is None


@BOTH
def test_without_a_source_weights_have_to_be_given(kind):
    sender = kind()
    sender.init_on_sender(num_workers=1)
    sender.connect()
    with pytest.raises(RuntimeError, match="no weights to send"):
        sender.send()
    sender.send(Uniform(1))
    with pytest.raises(KeyError, match="missing"):
        sender.send(nn.Linear(1, 1))


@BOTH
def test_there_is_one_source(kind):
    with pytest.raises(TypeError, match="pass only one of model, weights"):
        kind().init_on_sender(model=Uniform(), weights={})
    with pytest.raises(TypeError, match="pass only one of weights, params_map"):
        kind().init_on_sender(params_map={0: Uniform()}, weights={})
    with pytest.raises(TypeError, match="weights must be a module"):
        kind().init_on_sender(model=3)


@BOTH
def test_the_number_of_receivers_must_be_clear(kind):
    with pytest.raises(
        ValueError, match=r"the arguments disagree on the number of receivers: .*'devices': 2"
    ):
        kind().init_on_sender(model=Uniform(), num_workers=3, devices=["cpu", "cpu"])
    with pytest.raises(
        ValueError, match=r"the arguments disagree on the number of receivers: .*params_map"
    ):
        kind().init_on_sender(params_map={0: Uniform()}, num_workers=2)


@BOTH
def test_a_failed_beginning_may_be_tried_again(kind):
    scheme = kind()
    with pytest.raises(TypeError):
        scheme.init_on_sender(model=3)
    assert not scheme.initialized_on_sender
    scheme.init_on_sender(model=Uniform(1))
    scheme.connect()
    scheme.send()
