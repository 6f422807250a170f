"""Ways of weights to one receiver or several, for programs that send weights themselves."""

from __future__ import annotations

import multiprocessing
import queue
import select
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import distributed as dist
from torch import nn
from torch.distributed import rpc
from weight_parts import (
    PATIENCE,
    Uniform,
    Whole,
    WithState,
    answering,
    as_sent,
    numbers,
    other,
)

from trawl.weight_update import (
    DistributedTransport,
    DistributedWeightSyncScheme,
    InitialSyncTransport,
    MPTransport,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RPCTransport,
    RPCWeightSyncScheme,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
    TransportBackend,
    WeightStrategy,
)
from trawl.weights.store import WeightStore


def template(number: float = 0.0) -> TensorDict:
    return WeightStrategy().extract_weights(Uniform(number)).clone()


def receive_as_told(connection: Any, transport: Any) -> None:
    """Receives whenever it is asked to, with a time-out; tells the numbers."""
    answering(connection, lambda timeout: _numbers(transport.receive_weights(timeout)), "ready")


def send_as_told(connection: Any, transport: Any) -> None:
    """Sends whenever it is asked to."""
    answering(connection, lambda number: transport.send_weights(Uniform(number)))


def _numbers(found: Any) -> Any:
    return None if found is None else numbers(found)


# --- shared memory, one receiver


def test_shared_memory_rings_for_what_was_sent_and_for_what_was_taken():
    transport = SharedMemTransport()
    receiver = as_sent(transport)
    transport.connect_sender()
    receiver.connect_receiver()

    def rung(bell: Any) -> bool:
        return bool(select.select([bell._end], [], [], 0)[0])

    for number in range(3):
        assert not rung(receiver._theirs)
        transport.send_weights(Uniform(number))
        assert rung(receiver._theirs)
        assert not rung(transport._ours)
        receiver.receive_weights()
        assert rung(transport._ours)
        receiver.wait(0)
        transport.wait_ack(0)
        transport._ours.wait(0)
        receiver._theirs.wait(0)


def test_shared_memory_brings_the_newest_weights_and_tells_that_they_were_taken():
    """As the scheme does, whose channels are such transports."""
    store = WeightStore(2)
    transport, other = (SharedMemTransport(store, i, number=7 + i) for i in range(2))
    receiver, another = as_sent(transport), as_sent(other)
    assert receiver.receive_weights(0) is None
    transport.wait_ack(0)  # nothing was sent
    for number in (1, 2):
        transport.send_weights_async(Uniform(number))
    assert receiver.newer
    with pytest.raises(TimeoutError, match="receiver 7 did not receive the weights within 0 s"):
        transport.wait_ack(0)
    found = receiver.receive_weights()
    transport.wait_ack(0)
    assert (receiver.newer, receiver.count) == (False, 2)
    assert another.receive_weights(0) is None
    # What was received is the receiver's own.
    transport.send_weights(Uniform(3))
    assert numbers(found) == {2}
    found["count"].fill_(0)
    assert numbers(receiver.receive_weights(0)) == {3}
    with pytest.raises(KeyError, match="don't fit the policy of the receiver: missing"):
        transport.send_weights(nn.Linear(1, 1))
    assert receiver.receive_weights(0) is None


def test_each_end_of_shared_memory_does_its_own():
    transport = SharedMemTransport()
    receiver = as_sent(transport)
    for call in (lambda: receiver.send_weights(Uniform()), receiver.wait_ack):
        with pytest.raises(RuntimeError, match="this end of the transport only receives"):
            call()
    transport.connect_sender()
    with pytest.raises(RuntimeError, match="this end of the transport only sends"):
        transport.receive_weights()
    with pytest.raises(RuntimeError, match="can't be sent to another process once it is connected"):
        as_sent(transport)
    for _ in range(2):
        transport.close()


# --- shared memory, several receivers


def receive_several(connection: Any, transport: SharedMemTransport, number: int) -> None:
    model = Uniform()
    first = transport.setup_connection_and_weights_on_receiver(
        worker_idx=number, model=model, timeout=PATIENCE
    )

    def receive(timeout: float | None) -> Any:
        found = transport.receive_weights(timeout, model=model)
        return None if found is None else model.numbers

    answering(connection, receive, (numbers(first), model.numbers))


def test_one_transport_may_serve_several_receivers():
    context = multiprocessing.get_context("fork")
    same, own = template(1), template(2)
    params = {0: same, 1: same, 2: own}
    queues = {i: context.Queue() for i in params}
    transport = SharedMemTransport()
    transport.register_weights(params, queues, per_worker=True)
    assert [numbers(one) for one in transport.unique_weights] == [{1.0}, {2.0}]
    with (
        other(receive_several, transport, 0, method="fork") as zero,
        other(receive_several, transport, 1, method="fork") as one,
        other(receive_several, transport, 2, method="fork") as two,
    ):
        transport.setup_connection_and_weights_on_sender()
        assert [each.hear() for each in (zero, one, two)] == [({n}, {n}) for n in (1.0, 1.0, 2.0)]
        transport.send_weights(Uniform(3))
        assert [each.ask(PATIENCE) for each in (zero, one, two)] == [{3.0}] * 3
        transport.wait_ack(PATIENCE)
        transport.send_weights(Uniform(4), worker_ids=[1])
        assert one.ask(PATIENCE) == {4.0}
        assert zero.ask(0) is None
        transport.send_weights({0: Uniform(5), 2: Uniform(6)})
        assert zero.ask(PATIENCE) == {5.0}
        assert two.ask(PATIENCE) == {6.0}
        for given, ids in ((Uniform(4), [7]), ({0: Uniform(5)}, [0, 7])):
            with pytest.raises(ValueError, match=r"receivers don't exist.*\[7\]"):
                transport.send_weights(given, worker_ids=ids)
        two.kill()
        transport.send_weights(Uniform(8), worker_ids=[2])
        with pytest.raises(ConnectionError, match="receiver 2 ended before"):
            transport.wait_ack(PATIENCE)
    transport.close()


def test_several_receivers_need_queues_and_one_does_not():
    transport = SharedMemTransport()
    with pytest.raises(ValueError, match=r"no queue for receivers \[1\]"):
        transport.register_weights({0: template(), 1: template()}, {0: queue.Queue()})
    with pytest.raises(RuntimeError, match="call register_weights"):
        _ = transport.unique_weights
    transport.register_weights({0: template()}, {0: queue.Queue()})
    with pytest.raises(ValueError, match=r"worker_idx is 3, but the receivers are \[0\]"):
        transport.setup_connection_and_weights_on_receiver(worker_idx=3)
    with pytest.raises(TimeoutError, match=r"did not connect within 0\.01 s"):
        transport.setup_connection_and_weights_on_receiver(worker_idx=0, timeout=0.01)
    transport = SharedMemTransport()
    with other(receive_several, transport, 0) as receiver:
        transport.setup_connection_and_weights_on_sender()
        transport.send_weights(Uniform(1))
        assert receiver.hear() == ({1.0}, {1.0})


# --- queues


def test_a_queue_between_threads_brings_copies_of_weights_one_by_one():
    transport, model = MPTransport(queue.Queue(), queue.Queue(), timeout=PATIENCE), Uniform()
    transport.setup_connection_and_weights_on_sender()
    for number in (1, 2, 3):
        transport.send_weights_async(model.become(number), model_id="policy")
    target = Uniform()
    found = transport.setup_connection_and_weights_on_receiver(worker_idx=0, model=target)
    assert numbers(found) == target.numbers == {1}
    for number in (2, 3):
        assert numbers(transport.receive_weights()) == {number}
        transport.wait_ack()
    assert transport.receive_weights(0) is None
    transport.wait_ack(0)
    with pytest.raises(TimeoutError, match="the weights were not received within 0 s"):
        transport.wait_ack(0)
    # Without a queue of answers there is nothing to wait for.
    MPTransport(queue.Queue(), timeout=0).send_weights(Uniform())


@pytest.mark.parametrize("kind", ["shared memory", "queue"])
def test_weights_are_put_into_a_model_or_tensors_in_the_form_that_is_asked_for(kind):
    transport = SharedMemTransport() if kind == "shared memory" else MPTransport(queue.Queue())
    receiver = as_sent(transport) if kind == "shared memory" else transport
    model = Whole(0, "this")
    transport.send_weights(Whole(1, "that"))
    found = receiver.receive_weights(model=model, strategy=WeightStrategy("state_dict"))
    assert (model.part.numbers, model.part.said) == ({1}, "that")
    assert set(found) == {*dict(model.named_parameters()), "part.count", "part._extra_state"}
    for form in ("tensordict", "state_dict"):
        tensors = WeightStrategy(form).extract_weights(Whole(0).part)
        transport.send_weights(Whole(2))
        found = receiver.receive_weights(weights={"part": tensors})
        assert isinstance(found, TensorDict)
        assert numbers(found["part"].exclude("__extra_state__")) == {2}
        assert set(tensors["count"].tolist()) == {2}


def test_queues_bring_weights_to_and_from_another_process():
    context = multiprocessing.get_context("forkserver")
    there = MPTransport(context.Queue(), context.Queue(), timeout=PATIENCE)
    back = MPTransport(context.Queue(), timeout=PATIENCE)
    with other(receive_as_told, there) as receiver, other(send_as_told, back) as sender:
        assert receiver.hear() == "ready"
        for number in (1, 2):
            receiver.tell(PATIENCE)
            there.send_weights(Uniform(number))
            assert receiver.hear() == {number}
            sender.ask(number)
            assert numbers(back.receive_weights()) == {number}
        assert receiver.ask(0) is None
    for one in (there.weight_queue, there.ack_queue, back.weight_queue):
        one.close()
        one.join_thread()


# --- process groups


def stated(number: float = 0.0) -> WithState:
    """A model that has a tensor of the same number as extra state."""
    return WithState(number, torch.full((2,), float(number)))


def in_group(port: int, own: int, **options: Any) -> DistributedTransport:
    limit = timedelta(seconds=PATIENCE)
    store = dist.TCPStore("127.0.0.1", port, 2, own == 0, limit, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=own, world_size=2, timeout=limit)
    buffer = WeightStrategy().extract_weights(stated(0 if own else 7))
    if not options.pop("stored"):
        store = None
    return DistributedTransport(weights_buffer=buffer, store=store, **options)


def send_to_rank(connection: Any, port: int, stored: bool, sync: bool) -> None:
    transport = in_group(port, 0, stored=stored, rank=1, sync=sync)
    transport.setup_connection_and_weights_on_sender()

    def send(number: Any) -> None:
        if number == "wait":
            transport.wait_ack(PATIENCE)
        elif number == "hurry":
            transport.wait_ack(0.01)
        else:
            transport.send_weights(stated(number))

    answering(connection, send)


def receive_as_rank(connection: Any, port: int, stored: bool) -> None:
    model, transport = stated(), in_group(port, 1, stored=stored)
    first = transport.setup_connection_and_weights_on_receiver(worker_idx=0, model=model)

    def receive(timeout: float | None) -> Any:
        found = transport.receive_weights(timeout, model=model)
        return None if found is None else (numbers(found), model.numbers)

    answering(connection, receive, (numbers(first), model.numbers))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize(("stored", "sync"), [(True, False), (False, True)])
def test_a_rank_gets_weights(stored, sync):
    port = free_port()
    with (
        other(send_to_rank, port, stored, sync) as sender,
        other(receive_as_rank, port, stored) as receiver,
    ):
        assert receiver.hear() == ({7.0}, {7.0})
        if stored:
            assert receiver.ask(0.01) is receiver.ask(0) is None
        else:
            kind, text = receiver.ask(1.0)
            assert kind is ValueError
            assert "timeout=1.0 needs a store" in text
        for number in (1.0, 2.0, 3.0):
            sender.tell(number)
            if not sync:
                assert sender.hear() is None
                kind, text = sender.ask("hurry")
                assert kind is TimeoutError
                assert "rank 1 did not receive the weights within 0.01 s" in text
            assert receiver.ask(PATIENCE if stored else None) == ({number}, {number})
            if sync:
                assert sender.hear() is None
        assert sender.ask("wait") is None


# --- RPC


class Collecting:
    """What stands for a collector: it takes weights, as one does."""

    def __init__(self) -> None:
        self.model = Uniform()

    def update_policy_weights_(self, weights: Any) -> None:
        if numbers(weights) == {13.0}:
            raise ValueError("13 is refused")
        WeightStrategy().apply_weights(self.model, weights)

    def numbers(self) -> set[float]:
        return self.model.numbers


def begin_rpc(name: str, rank: int, port: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=PATIENCE
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def learner_node(connection: Any, port: int) -> None:
    begin_rpc("learner", 0, port)
    collector = rpc.remote("actor", Collecting)
    ways = {
        "node": RPCTransport("actor", worker_rank=3),
        "collector": RPCTransport(collector_rref=collector),
        "class": RPCTransport("actor", collector, Collecting),
    }

    def send(asked: tuple[str, float]) -> Any:
        way, number = asked
        ways[way].setup_connection_and_weights_on_sender()
        ways[way].send_weights(Uniform(number))
        return "sent" if way == "node" else collector.rpc_sync().numbers()

    answering(connection, send)


def actor_node(connection: Any, port: int) -> None:
    begin_rpc("actor", 1, port)
    model, transport = Uniform(), RPCTransport()
    first = transport.setup_connection_and_weights_on_receiver(worker_idx=3)

    def receive(timeout: float | None) -> Any:
        found = transport.receive_weights(timeout, model=model)
        return None if found is None else (numbers(found), model.numbers)

    answering(connection, receive, first)


def test_nodes_get_weights():
    port = free_port()
    with other(learner_node, port) as learner, other(actor_node, port) as actor:
        assert actor.hear() is None
        assert learner.ask(("node", 1.0)) == "sent"
        assert actor.ask(PATIENCE) == ({1.0}, {1.0})
        assert actor.ask(0) is None
        # The newest counts.
        learner.ask(("node", 2.0))
        learner.ask(("node", 3.0))
        assert actor.ask(PATIENCE) == ({3.0}, {3.0})
        assert learner.ask(("collector", 4.0)) == {4.0}
        assert learner.ask(("class", 5.0)) == {5.0}
        kind, text = learner.ask(("collector", 13.0))
        assert kind is ValueError
        assert "13 is refused" in text
    with pytest.raises(RuntimeError, match="no receiver"):
        RPCTransport().send_weights(Uniform())


# --- what schemes make


def test_schemes_make_transports_of_their_kind():
    made = [
        (SharedMemWeightSyncScheme().create_transport(), SharedMemTransport),
        (MultiProcessWeightSyncScheme().create_transport(weight_queue=queue.Queue()), MPTransport),
        (RPCWeightSyncScheme().create_transport(worker_rank=2), RPCTransport),
    ]
    for transport, kind in made:
        assert type(transport) is kind
        assert isinstance(transport, TransportBackend)
        assert isinstance(transport, InitialSyncTransport)
    assert made[2][0].worker_rank == 2
    assert not isinstance(object(), TransportBackend)
    nothing = NoWeightSyncScheme().create_transport()
    nothing.send_weights(Uniform(1))
    assert nothing.receive_weights(0) is None
    with pytest.raises(RuntimeError, match="init_process_group"):
        DistributedWeightSyncScheme().create_transport(weights_buffer=template())


def test_weights_are_prepared_for_sending():
    scheme, form = SharedMemWeightSyncScheme(), WeightStrategy()
    assert numbers(scheme.prepare_weights(WithState(2, "x"), "policy", form)) == {2.0}
    flat = scheme.prepare_weights(template(3), "policy", WeightStrategy("state_dict"))
    assert set(flat) == set(dict(Uniform().state_dict()))
    with pytest.raises(RuntimeError, match="no weights of 'critic' to prepare"):
        scheme.prepare_weights(None, "critic", form)
    with pytest.raises(TypeError, match="weights must be a module"):
        scheme.prepare_weights(3, "policy", form)

    class Owner:
        policy, critic = Uniform(4), nn.Sequential(Uniform(5))

        def get_model(self, model_id: str) -> Any:
            return getattr(self, model_id)

    for given, model_id, number in ((None, "policy", 4), (None, "critic", 5), ("critic", "", 5)):
        found = scheme.prepare_weights(given, model_id, form, Owner())
        assert isinstance(found, TensorDict)
        assert numbers(found) == {number}
    scheme.init_on_sender(model=Uniform(6))
    assert numbers(scheme.prepare_weights(None)) == {6.0}
