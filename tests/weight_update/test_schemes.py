"""The life of a weight-sync scheme, what it knows of itself, and what it refuses."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from weight_parts import PATIENCE, Uniform, Whole, answering, as_sent, numbers, other

from trawl.weight_update import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)
from trawl.weights.store import WeightStore

SHARED, PROCESS = SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme
BOTH = pytest.mark.parametrize("kind", [SHARED, PROCESS], ids=["shared", "process"])
ALL = pytest.mark.parametrize(
    "kind", [SHARED, PROCESS, NoWeightSyncScheme], ids=["shared", "process", "none"]
)


class Context:
    """What has a model, and is told of new weights."""

    def __init__(self, policy: nn.Module, **attributes: Any) -> None:
        self.policy = policy
        self.parts = [SimpleNamespace(head=nn.Linear(2, 1))]
        self.told: list[Any] = []
        self.__dict__.update(attributes)

    def update_policy_weights_(self, policy_or_weights: Any, *, model_id: str) -> None:
        self.told.append((model_id, policy_or_weights))


def sending(kind: Any, **kwargs: Any) -> Any:
    """A scheme that is a sender's end."""
    scheme = kind()
    scheme.init_on_sender(**({"model": Uniform()} | kwargs))
    return scheme


def joined(sender: Any, *models: Any, **options: Any) -> list[Any]:
    """Connects a sender with receivers, as they come to other processes; gives these."""
    receivers = [as_sent(sender) for _ in models]
    sender.connect()
    for worker, (receiver, model) in enumerate(zip(receivers, models, strict=True)):
        receiver.init_on_receiver(**({"model": model, "worker_idx": worker} | options))
        receiver.connect()
    return receivers


def got(*receivers: Any) -> list[Any]:
    """The numbers that each receiver gets."""
    found = [receiver.receive(timeout=0) for receiver in receivers]
    return [None if one is None else numbers(one) for one in found]


@ALL
def test_a_life(kind):
    scheme = kind()
    assert scheme.model is scheme.context is scheme.model_id is scheme.worker_idx is None
    assert scheme.receiver_transport is scheme.shared_transport is scheme.weights is None
    assert scheme.sender_transports == {}
    assert scheme.strategy == "tensordict"
    for _ in range(2):
        assert not scheme.initialized_on_sender
        assert not scheme.initialized_on_receiver
        scheme.init_on_sender(model=Uniform(4), num_workers=2)
        assert scheme.initialized_on_sender
        assert not scheme.synchronized_on_sender
        receiver = as_sent(scheme)
        assert not receiver.initialized_on_sender
        assert receiver.model is None
        scheme.connect()
        assert scheme.synchronized_on_sender
        receiver.init_on_receiver(worker_idx=1)
        assert receiver.initialized_on_receiver
        assert not receiver.synchronized_on_receiver
        receiver.connect()
        assert receiver.synchronized_on_receiver
        scheme.send()
        assert got(receiver) == [None if kind is NoWeightSyncScheme else {4}]
        for end in (scheme, receiver):
            for _ in range(2):
                end.shutdown()
            assert not end.initialized_on_sender
            assert not end.initialized_on_receiver
            assert not end.synchronized_on_sender
            assert not end.synchronized_on_receiver


@BOTH
def test_the_newest_weights_are_received(kind):
    learner, model = Uniform(7), Uniform(0)
    sender = sending(kind, model=learner)
    (receiver,) = joined(sender, model)
    assert got(receiver) == [None]
    sender.send(Uniform(1))
    sender.send()
    assert numbers(receiver.receive()) == model.numbers == {7}
    learner.become(2)
    sender.send_async()
    for number in range(3, 9):
        sender.send_async(Uniform(number))
    with pytest.raises(TimeoutError, match="receiver 0 did not receive the weights within 0 s"):
        sender.wait_async(0)
    ends = [receiver.receiver_transport._theirs._end]
    assert select.select(ends, [], [], 0)[0] == ends  # who waits is woken
    assert got(receiver, receiver) == [{8}, None]
    sender.wait_async(0)
    # Those that come with the connection are there at once, and one receiver needs no number.
    sender = sending(kind)
    receiver = as_sent(sender)
    sender.connect(weights=Uniform(3))
    receiver.init_on_receiver()
    receiver.connect(worker_idx=0)
    assert got(receiver) == [{3}]


@BOTH
def test_weights_are_returned_in_the_form_of_the_strategy(kind):
    scheme = kind(strategy="state_dict")
    assert scheme.strategy == scheme.strategy_str == "state_dict"
    scheme.init_on_sender(model=Whole(1, "that"))
    model = Whole(0)
    (receiver,) = joined(scheme, model)
    assert type(scheme.weights) is dict
    scheme.send()
    found = receiver.receive(timeout=0)
    assert type(found) is dict
    assert found.pop("part._extra_state") == {"said": "that"}
    assert numbers(found) == model.part.numbers == {1}
    assert model.part.said == "that"


# --- where weights come from, and for whom they are


def fives(index: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"count": weights["count"] * (index + 5)}


@BOTH
@pytest.mark.parametrize(
    ("options", "workers", "found"),
    [
        ({"weights": WeightStrategy().extract_weights(Uniform(1))}, [0], [{1}]),
        ({"context": Context(Uniform(1), num_workers=2)}, [0, 1], [{1}, {1}]),
        (
            {"params_map": {0: Uniform(3), 1: Uniform(4).state_dict(), 3: Uniform(5)}},
            [0, 1, 3],
            [{3}, {4}, {5}],
        ),
        (
            {"weights": {"count": torch.ones(2)}, "device_map_fn": fives, "num_workers": 3},
            [0, 1, 2],
            [{5}, {6}, {7}],
        ),
        ({"model": Uniform(2), "devices": ["cpu", torch.device("cpu")]}, [0, 1], [{2}, {2}]),
    ],
    ids=["tensordict", "context", "params_map", "device_map_fn", "devices"],
)
def test_weights_have_sources(kind, options, workers, found):
    scheme = kind()
    scheme.init_on_sender(**options)
    assert scheme.receivers.workers == workers
    receivers = {index: as_sent(scheme) for index in workers}
    scheme.connect()
    scheme.send()
    for index, receiver in receivers.items():
        receiver.init_on_receiver(worker_idx=index)
        receiver.connect()
    assert got(*receivers.values()) == found


@BOTH
def test_weights_that_are_tensors_are_those_of_the_moment(kind):
    weights = WeightStrategy().extract_weights(Uniform(1))
    sender = sending(kind, model=None, weights=weights)
    (receiver,) = joined(sender, None)
    for number in (1, 2):
        weights.apply_(lambda tensor, number=number: tensor.fill_(number))
        assert numbers(sender.weights) == {number}
        sender.send()
        assert got(receiver) == [{number}]
    # In whatever order they come.
    one, two = torch.ones(2), torch.full((2,), 2.0)
    sender = sending(kind, model=None, num_workers=2)
    receivers = joined(sender, None, None)
    sender.send({0: {"a": one, "b": two}, 1: {"b": two, "a": one}})
    for receiver in receivers:
        found = receiver.receive(timeout=0)
        assert (numbers({"": found["a"]}), numbers({"": found["b"]})) == ({1}, {2})


@BOTH
def test_a_model_may_be_found_by_its_path(kind):
    context, model = Context(Uniform()), nn.Linear(2, 1)
    sender = sending(kind, model=None, context=context, model_id="parts[0].head")
    assert sender.model_id == "parts[0].head"
    assert sender.model is context.parts[0].head
    (receiver,) = joined(sender, model, model_id="parts[0].head")
    sender.send()
    receiver.receive(timeout=0)
    assert torch.equal(model.weight, context.parts[0].head.weight)


@BOTH
def test_weights_reach_those_they_are_for(kind):
    sender = sending(kind, num_workers=3)
    receivers = joined(sender, None, None, None)
    sender.send(Uniform(1), worker_ids=1)
    assert got(*receivers) == [None, {1}, None]
    sender.send(Uniform(2), worker_ids=[0, 2])
    ends = [receiver.receiver_transport._theirs._end for receiver in receivers]
    assert select.select([ends[0], ends[2]], [], [], 0)[0] == [ends[0], ends[2]]
    assert got(*receivers) == [{2}, None, {2}]
    sender.wait_async(0, worker_ids=[0, 1])
    sender.send({0: Uniform(1), 2: Uniform(3).state_dict()})
    assert got(*receivers) == [{1}, None, {3}]
    sender.send({0: Uniform(4), 1: Uniform(5), 2: Uniform(6)}, worker_ids=[1, 2])
    assert got(*receivers) == [None, {5}, {6}]
    # Whatever each had before.
    sender.send(Uniform(7))
    assert got(*receivers) == [{7}] * 3


def test_receivers_share_what_is_in_shared_memory_unless_they_are_to_differ():
    shared = sending(SHARED, num_workers=3)
    assert isinstance(shared.shared_transport, WeightStore)
    assert not shared.per_worker_weights
    own = SharedMemWeightSyncScheme(per_worker_weights=True)
    own.init_on_sender(model=Uniform(), num_workers=3)
    assert own.shared_transport is None
    assert MultiProcessWeightSyncScheme().per_worker_weights


def test_a_scheme_may_send_nothing():
    model = Uniform(0)
    sender = sending(NoWeightSyncScheme, num_workers=2)
    (receiver,) = joined(sender, model)
    sender.send(Uniform(1))
    sender.send_async(worker_ids=1)
    sender.wait_async()
    assert receiver.receive() is receiver.receive(timeout=0) is None
    assert model.numbers == {0}
    assert not receiver.incoming.newer
    assert sender.receivers.count(0) == 0


# --- what an end knows


@BOTH
def test_a_receivers_context_is_told_and_has_its_number(kind):
    context = Context(Uniform(0), config=SimpleNamespace(worker_idx=2))
    sender = sending(kind, num_workers=3)
    fourth = as_sent(sender)
    (receiver,) = joined(sender, None, context=context, worker_idx=None, model_id="policy")
    assert receiver.model is context.policy
    assert receiver.worker_idx == 2
    sender.send(Uniform(1))
    receiver.receive(timeout=0)
    ((model_id, weights),) = context.told
    assert model_id == "policy"
    assert numbers(weights.tensors) == {1}
    fourth.init_on_receiver(context=context, worker_idx=1)
    assert fourth.worker_idx == 1


@BOTH
def test_a_scheme_knows_its_transports_and_the_weights_of_its_model(kind):
    model = Uniform(1)
    sender = sending(kind, model=model, num_workers=2)
    assert isinstance(sender.weights, TensorDict)
    for number in (1, 2):
        model.become(number)
        assert numbers(sender.weights) == {number}
    assert list(sender.sender_transports) == [0, 1]
    assert all(isinstance(one, SharedMemTransport) for one in sender.sender_transports.values())
    assert as_sent(sender).receiver_transport is sender.receiver_transport is None
    receiver = joined(sender, None, None)[1]
    assert receiver.receiver_transport.number == 1
    assert receiver.sender_transports == {}
    model = Uniform(0)
    (receiver,) = joined(sending(kind), model)
    receiver.apply_weights(Uniform(5))
    assert model.numbers == {5}


@ALL
def test_a_copy_begins_anew_and_a_context_is_not_kept(kind):
    context = Context(Uniform())
    sender = sending(kind, model=None, context=context, num_workers=1, model_id="policy")
    receiver = as_sent(sender)
    assert receiver.context is receiver.model is receiver.worker_idx is None
    assert not receiver.initialized_on_sender
    assert not receiver.initialized_on_receiver
    receiver.init_on_receiver(context=context)
    assert sender.context is receiver.context is context
    del context
    gc.collect()
    assert sender.context is receiver.context is receiver.model is None
    fresh = pickle.loads(pickle.dumps(kind()))
    fresh.init_on_sender(model=Uniform())
    assert fresh.initialized_on_sender


def test_a_scheme_suits_a_place():
    places = {SHARED: ["shared", "thread"], PROCESS: ["process", "multiprocessing"]}
    for kind, names in {NoWeightSyncScheme: ["none", "direct"], **places}.items():
        assert [type(WeightSyncScheme.from_backend(name)) for name in names] == [kind, kind]
    scheme = WeightSyncScheme.from_backend("shared", per_worker_weights=True, sync=False)
    assert scheme.per_worker_weights
    assert not scheme.sync
    with pytest.raises(ValueError, match=r"backend must be one of none, direct, .* but it is 'sea"):
        WeightSyncScheme.from_backend("sea")
    for kind in (NoWeightSyncScheme, *places):
        with pytest.raises(ValueError, match="strategy must be 'tensordict' or 'state_dict', but"):
            kind("module")


# --- mistakes


def refuses(error: type[Exception], match: str, *calls: Any, **kwargs: Any) -> None:
    for call in calls:
        with pytest.raises(error, match=match):
            call(**kwargs)


@ALL
def test_things_have_their_order_on_the_senders_side(kind):
    scheme = kind()
    refuses(RuntimeError, r"call init_on_sender\(\) before send\(\)", scheme.send)
    refuses(RuntimeError, r"call init_on_sender\(\) or .* before connect\(\)", scheme.connect)
    scheme.init_on_sender(model=Uniform())
    refuses(RuntimeError, r"call connect\(\) before send\(\)", scheme.send, scheme.send_async)
    refuses(RuntimeError, r"call connect\(\) before wait_async\(\)", scheme.wait_async)
    match = "worker_idx=0 is for receivers, not for the sender"
    refuses(RuntimeError, match, scheme.connect, worker_idx=0)
    scheme.connect()
    refuses(RuntimeError, "already connected", scheme.connect)
    starts = scheme.init_on_sender, scheme.init_on_receiver
    refuses(RuntimeError, "already initialised", *starts, model=Uniform())


@BOTH
def test_things_have_their_order_on_the_receivers_side(kind):
    scheme = as_sent(sending(kind, num_workers=2))
    refuses(RuntimeError, r"call init_on_receiver\(\) before receive\(\)", scheme.receive)
    match = r"call init_on_receiver\(\) before apply_weights\(\)"
    refuses(RuntimeError, match, scheme.apply_weights, weights={})
    scheme.init_on_receiver(model=Uniform())
    refuses(RuntimeError, r"call connect\(\) before receive\(\)", scheme.receive)
    match = r"call connect\(\) before reading incoming"
    refuses(RuntimeError, match, lambda: scheme.incoming)
    refuses(RuntimeError, r"call init_on_sender\(\) before send\(\)", scheme.send)
    match = r"worker_idx is 2, but the receivers are \[0, 1\]"
    refuses(ValueError, match, scheme.connect, worker_idx=2)
    scheme.connect(worker_idx=1)
    refuses(RuntimeError, "already connected", scheme.connect)
    starts = scheme.init_on_sender, scheme.init_on_receiver
    refuses(RuntimeError, "already initialised", *starts, model=Uniform())
    alone = kind()
    alone.init_on_receiver(model=Uniform())
    refuses(ValueError, r"worker_idx is 0, but the receivers are \[\]", alone.connect)


@BOTH
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        ({"worker_ids": 2}, ValueError, "worker_ids names worker 2, but the workers are 0 to 1"),
        ({"worker_ids": -1}, ValueError, "worker_ids names worker -1"),
        ({"worker_ids": [0, 2]}, ValueError, "worker_ids names worker 2"),
        ({"worker_ids": []}, ValueError, "worker_ids is empty"),
        ({"worker_ids": "0"}, TypeError, "worker_ids must be the number"),
        ({"worker_ids": 0.5}, TypeError, "worker_ids must be the number"),
        ({"worker_ids": [None]}, TypeError, "worker_ids must be the number"),
        ({"worker_ids": True}, TypeError, "worker_ids must be the number"),
        ({"weights": {0: Uniform(1), 5: Uniform(1)}}, ValueError, "names worker 5"),
        (
            {"weights": {0: Uniform(1)}, "worker_ids": 1},
            ValueError,
            r"weights are only for workers \[0\], none of which was selected",
        ),
        ({"weights": {0: Uniform(1), 1: nn.Linear(1, 1)}}, KeyError, r"missing .*unknown"),
    ],
)
def test_weights_that_do_not_fit_or_are_for_nobody_are_refused(kind, call, error, match):
    sender = sending(kind, num_workers=2)
    receivers = joined(sender, None, None)
    refuses(error, match, sender.send, sender.send_async, **call)
    if "weights" not in call:
        refuses(error, match, sender.wait_async, timeout=0, **call)
    assert got(*receivers) == [None, None]


@BOTH
def test_weights_that_do_not_fit_the_receivers_model_are_refused_there(kind):
    sender = sending(kind, model=None, weights={"weight": torch.zeros(1, 1)})
    (receiver,) = joined(sender, nn.Linear(1, 1))
    sender.send()
    match = r"don't fit the policy Linear: missing \['bias'\]"
    refuses(KeyError, match, receiver.receive, receiver.receive, timeout=0)


@BOTH
def test_without_a_source_weights_have_to_be_given(kind):
    sender = sending(kind, model=None, num_workers=1)
    sender.connect()
    refuses(RuntimeError, "no weights to send", sender.send)
    sender.send(Uniform(1))
    refuses(KeyError, "missing", sender.send, weights=nn.Linear(1, 1))


@BOTH
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"model": Uniform(), "weights": {}}, TypeError, "pass only one of model, weights"),
        ({"params_map": {0: Uniform()}, "weights": {}}, TypeError, "one of weights, params_map"),
        ({"model": 3}, TypeError, "weights must be a module"),
        ({"num_workers": 3, "devices": ["cpu"]}, ValueError, "on the number of .*'devices': 1"),
        ({"params_map": {0: Uniform()}, "num_workers": 2}, ValueError, r"disagree .*'params_map'"),
        ({"num_workers": 0}, ValueError, "num_workers is 0, but there must be at least one"),
        ({"num_workers": True}, TypeError, "num_workers must be an integer, but it is True"),
    ],
)
def test_a_beginning_that_is_refused_may_be_tried_again(kind, options, error, match):
    scheme = kind()
    refuses(error, match, scheme.init_on_sender, **options)
    assert not scheme.initialized_on_sender
    scheme.init_on_sender(model=Uniform(1))
    scheme.connect()
    scheme.send()


# --- processes of the user's own


def receive(connection: Any, scheme: Any, index: int) -> None:
    """A receiver: asked for weights, it says what it has then, and what was returned."""
    model = Whole(0)
    scheme.init_on_receiver(model=model, worker_idx=index)
    scheme.connect()

    def answer(timeout: float | None) -> Any:
        found = scheme.receive(timeout)
        if found is not None:
            assert found["part", "__extra_state__", "said"] == model.part.said
            assert numbers(found) == model.part.numbers
        return model.part.numbers, model.part.said, found is not None

    answering(connection, answer, "ready")


# Python warns of a fork while there are threads; pytest may have some.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (SHARED, "fork"),
        (SHARED, "spawn"),
        (PROCESS, "fork"),
        (PROCESS, "forkserver"),
        (DistributedWeightSyncScheme, "forkserver"),
    ],
)
def test_weights_come_to_processes_of_ones_own(kind, method):
    learner = Whole(1, "first")
    scheme = kind()
    scheme.init_on_sender(model=learner, num_workers=2)
    with ExitStack() as stack:
        receivers = [
            stack.enter_context(other(receive, scheme, index, method=method)) for index in range(2)
        ]
        scheme.connect()
        assert [one.hear() for one in receivers] == ["ready"] * 2
        assert [one.ask(0) for one in receivers] == [({0}, None, False)] * 2

        scheme.send()
        assert receivers[0].ask(None) == ({1}, "first", True)
        scheme.wait_async(PATIENCE, worker_ids=0)
        with pytest.raises(TimeoutError, match="receiver 1 did not receive the weights within"):
            scheme.wait_async(0.01)
        waited: list[Any] = []
        thread = threading.Thread(target=lambda: waited.append(scheme.wait_async()))
        thread.start()
        assert receivers[1].ask(None) == ({1}, "first", True)
        thread.join(PATIENCE)
        assert waited == [None]

        learner.part.become(2).said = "second"
        scheme.send(worker_ids=1)
        assert receivers[0].ask(0) == ({1}, "first", False)
        assert receivers[1].ask(None) == ({2}, "second", True)

        scheme.send({0: Whole(3, "own"), 1: Whole(4, "other")})
        assert receivers[0].ask(PATIENCE) == ({3}, "own", True)
        assert receivers[1].ask(PATIENCE) == ({4}, "other", True)

        # One that waits is woken.
        for one in receivers:
            one.tell(None)
        scheme.send_async(Whole(5, "last"))
        assert [one.hear() for one in receivers] == [({5}, "last", True)] * 2
        scheme.wait_async(PATIENCE)

        scheme.send()
        receivers[1].kill()
        assert receivers[0].ask(None)[0] == {2}
        scheme.wait_async(worker_ids=0)
        with pytest.raises(ConnectionError, match="receiver 1 ended before it received the weigh"):
            scheme.wait_async()
        # Others get theirs, even those that were sent before the end.
        scheme.send(Whole(6, "end"))
        scheme.shutdown()
        assert receivers[0].ask(None) == ({6}, "end", True)
        assert receivers[0].ask(None) == (ConnectionError, "the sender of weights has ended")


def send(connection: Any, kind: Any) -> None:
    """A sender: gives its receiver's end away, and sends when it is told, or ends."""
    scheme = kind()
    scheme.init_on_sender(model=Whole(0))
    connection.send(scheme)
    connection.recv()
    scheme.connect()

    def send(number: int | None) -> None:
        if number is None:
            os.kill(os.getpid(), signal.SIGKILL)
        scheme.send(Whole(number))

    answering(connection, send)


@pytest.mark.parametrize(
    ("kind", "waits"), [(SHARED, True), (SHARED, False), (DistributedWeightSyncScheme, True)]
)
def test_the_end_of_the_sender_is_noticed(kind, waits):
    model = Whole(0)
    with other(send, kind) as sender:
        scheme = sender.hear()
        scheme.init_on_receiver(model=model)
        sender.tell("go on")
        scheme.connect()
        for number in (1, 2):
            assert sender.ask(number) is None
            scheme.receive()
            assert model.part.numbers == {number}
        if waits:
            # What it is told at last ends it, while this waits for weights.
            sender.tell(None)
        else:
            assert sender.ask(3) is None
            sender.kill()
            # What was sent is taken first.
            scheme.receive()
            assert model.part.numbers == {3}
        for timeout in (None, PATIENCE):
            with pytest.raises(ConnectionError, match="the sender of weights has ended"):
                scheme.receive(timeout)
    scheme.shutdown()


SIZES = (10_000, 3, 500)


def count(connection: Any, scheme: Any, last: int) -> None:
    """Receives until the last number; says whether one was torn, or came after a greater one."""
    model = Uniform(0, SIZES)
    scheme.init_on_receiver(model=model, worker_idx=0)
    scheme.connect()
    # What was sent before it began is there.
    wrong, before = [], numbers(scheme.receive(0))
    connection.send(before)
    while before != {last}:
        found = numbers(scheme.receive())
        if found != model.numbers or len(found) > 1 or found <= before:
            wrong.append((found, before))
        before = found
    connection.send(wrong)


def test_weights_are_whole_and_in_order_while_they_are_sent_all_the_time():
    """Over a network; the tests of stores do the same in shared memory."""
    last, learner, scheme = 1_000, Uniform(0, SIZES), DistributedWeightSyncScheme()
    scheme.init_on_sender(model=learner)
    with other(count, scheme, last) as receiver:
        scheme.connect(weights=learner.become(1))
        assert receiver.hear() == {1}
        for number in range(2, last + 1):
            learner.become(number)
            scheme.send()
        scheme.wait_async()
        assert receiver.hear() == []


def refused(connection: Any, scheme: Any) -> None:
    """A receiver that can't be one."""
    try:
        scheme.init_on_receiver(model=Whole(0))
    except RuntimeError as error:
        connection.send(str(error))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_can_not_join_a_sender_that_has_threads_and_holds_nobody_up():
    scheme = DistributedWeightSyncScheme()
    scheme.init_on_sender(model=Whole(1))
    with other(refused, scheme, method="fork") as receiver:
        assert "get_context('spawn')" in receiver.hear()
    scheme.connect()
    scheme.send()
    with pytest.raises(TimeoutError, match="receiver 0 did not receive the weights"):
        scheme.wait_async(0.01)
    scheme.shutdown()
    with pytest.raises(RuntimeError, match="RPCWeightSyncScheme needs a collector"):
        RPCWeightSyncScheme().init_on_sender(model=Whole(1))


def test_sender_and_receiver_wait_for_each_other_only_for_so_long():
    scheme = DistributedWeightSyncScheme(timeout=0.1)
    scheme.init_on_sender(model=Whole(1))
    receiver = as_sent(scheme)
    receiver.init_on_receiver(model=Whole(0))
    with pytest.raises(TimeoutError, match=r"the sender of weights did not connect within 0\.1 s"):
        receiver.connect()
    other_scheme = DistributedWeightSyncScheme(timeout=0.1)
    other_scheme.init_on_sender(model=Whole(1))
    other_scheme.connect(weights=Whole(2))
    with pytest.raises(ConnectionError, match="receiver 0 ended before it received the weights"):
        other_scheme.wait_async(PATIENCE)
    for one in (scheme, other_scheme):
        late = as_sent(one)
        one.shutdown()
        late.init_on_receiver(model=Whole(0))
        with pytest.raises(ConnectionError):
            late.connect()
