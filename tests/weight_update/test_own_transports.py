"""Ways of weights for programs that carry them themselves."""

from __future__ import annotations

import multiprocessing
import queue
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import distributed as dist
from torch import nn
from torch.distributed import rpc
from weight_parts import PATIENCE, Uniform, WithState, answering, numbers, other

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


def template(number: float = 0.0) -> TensorDict:
    return WeightStrategy().extract_weights(Uniform(number)).clone()


# --- shared memory, several receivers


def receive_several(connection: Any, transport: SharedMemTransport, number: int) -> None:
    model = Uniform()
    first = transport.setup_connection_and_weights_on_receiver(
        worker_idx=number, model=model, timeout=PATIENCE
    )
    connection.send((numbers(first), model.numbers))

    def receive(timeout: float | None) -> Any:
        found = transport.receive_weights(timeout, model=model)
        return None if found is None else model.numbers

    answering(connection, receive)


@pytest.mark.parametrize("method", ["forkserver", "fork"])
@pytest.mark.parametrize("per_worker", [False, True])
def test_one_transport_may_serve_several_receivers(method, per_worker):
    context = multiprocessing.get_context(method)
    same, own = template(1), template(2)
    params = {0: same, 1: same, 2: own}
    queues = {i: context.Queue() for i in params}
    transport = SharedMemTransport()
    transport.register_weights(params, queues, per_worker=per_worker)
    assert [numbers(one) for one in transport.unique_weights] == [{1.0}, {2.0}]
    with (
        other(receive_several, transport, 0, method=method) as zero,
        other(receive_several, transport, 1, method=method) as one,
        other(receive_several, transport, 2, method=method) as two,
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
        with pytest.raises(ValueError, match=r"receivers don't exist.*\[7\]"):
            transport.send_weights(Uniform(4), worker_ids=[7])
        two.kill()
        transport.send_weights(Uniform(8), worker_ids=[2])
        with pytest.raises(ConnectionError, match="receiver 2 ended before"):
            transport.wait_ack(PATIENCE)
    transport.close()


def test_receivers_need_queues():
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


def test_one_receiver_is_set_up_by_the_same_methods():
    transport = SharedMemTransport()
    with other(receive_several, transport, 0) as receiver:
        transport.setup_connection_and_weights_on_sender()
        transport.send_weights(Uniform(1))
        assert receiver.hear() == ({1.0}, {1.0})


# --- queues


def test_the_first_weights_come_by_a_queue():
    transport = MPTransport(queue.Queue(), queue.Queue(), timeout=PATIENCE)
    transport.setup_connection_and_weights_on_sender()
    transport.send_weights_async(Uniform(3), model_id="policy")
    model = Uniform()
    found = transport.setup_connection_and_weights_on_receiver(worker_idx=0, model=model)
    assert numbers(found) == model.numbers == {3.0}
    transport.wait_ack()


# --- process groups


def in_group(port: int, rank: int) -> Any:
    limit = timedelta(seconds=PATIENCE)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, limit, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    return store


def stated(number: float = 0.0) -> WithState:
    """A model that has a tensor of the same number as extra state."""
    return WithState(number, torch.full((2,), float(number)))


def buffer(number: float = 0.0) -> TensorDict:
    return WeightStrategy().extract_weights(stated(number))


def send_to_rank(connection: Any, port: int, stored: bool, sync: bool) -> None:
    store = in_group(port, 0)
    transport = DistributedTransport(
        weights_buffer=buffer(7), store=store if stored else None, rank=1, sync=sync
    )
    transport.setup_connection_and_weights_on_sender()

    def send(number: Any) -> str:
        if number == "wait":
            transport.wait_ack(PATIENCE)
        else:
            transport.send_weights(stated(number))
        return "done"

    answering(connection, send)


def receive_as_rank(connection: Any, port: int, stored: bool) -> None:
    store = in_group(port, 1)
    model = stated()
    transport = DistributedTransport(weights_buffer=buffer(), store=store if stored else None)
    first = transport.setup_connection_and_weights_on_receiver(worker_idx=0, model=model)
    connection.send((numbers(first), model.numbers))

    def receive(timeout: float | None) -> Any:
        found = transport.receive_weights(timeout, model=model)
        return None if found is None else (numbers(found), model.numbers)

    answering(connection, receive)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize("sync", [False, True])
def test_a_rank_gets_weights(sync):
    port = free_port()
    with (
        other(send_to_rank, port, True, sync) as sender,
        other(receive_as_rank, port, True) as receiver,
    ):
        assert receiver.hear() == ({7.0}, {7.0})
        assert receiver.ask(0.01) is None
        for number in (1.0, 2.0, 3.0):
            sender.tell(number)
            assert receiver.ask(PATIENCE) == ({number}, {number})
            assert sender.hear() == "done"
        assert sender.ask("wait") == "done"


def test_a_rank_gets_weights_without_a_store():
    port = free_port()
    with (
        other(send_to_rank, port, False, True) as sender,
        other(receive_as_rank, port, False) as receiver,
    ):
        assert receiver.hear() == ({7.0}, {7.0})
        sender.tell(2.0)
        assert receiver.ask(None) == ({2.0}, {2.0})
        assert sender.hear() == "done"
        kind, text = receiver.ask(1.0)
        assert kind is ValueError
        assert "timeout=1.0 needs a store" in text


def test_a_rank_needs_a_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        DistributedTransport(weights_buffer=template())


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
    model = Uniform()
    transport = RPCTransport(worker_rank=3)
    connection.send(transport.setup_connection_and_weights_on_receiver(worker_idx=0))

    def receive(timeout: float | None) -> Any:
        found = transport.receive_weights(timeout, model=model)
        return None if found is None else (numbers(found), model.numbers)

    answering(connection, receive)


def test_nodes_get_weights():
    port = free_port()
    with (
        other(learner_node, port) as learner,
        other(actor_node, port) as actor,
    ):
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


def test_a_node_is_needed():
    with pytest.raises(RuntimeError, match="no receiver"):
        RPCTransport().send_weights(Uniform())


# --- what schemes make


def test_schemes_make_transports_of_their_kind():
    assert isinstance(SharedMemWeightSyncScheme().create_transport(), SharedMemTransport)
    made = MultiProcessWeightSyncScheme().create_transport(weight_queue=queue.Queue())
    assert isinstance(made, MPTransport)
    made = RPCWeightSyncScheme().create_transport(collector_info="actor", worker_rank=2)
    assert isinstance(made, RPCTransport)
    assert made.worker_rank == 2
    nothing = NoWeightSyncScheme().create_transport()
    nothing.send_weights(Uniform(1))
    assert nothing.receive_weights(0) is None
    with pytest.raises(RuntimeError, match="init_process_group"):
        DistributedWeightSyncScheme().create_transport(weights_buffer=template())


@pytest.mark.parametrize("transport", [SharedMemTransport(), MPTransport(None), RPCTransport()])
def test_transports_can_be_told_from_others(transport):
    assert isinstance(transport, TransportBackend)
    assert isinstance(transport, InitialSyncTransport)
    assert not isinstance(object(), TransportBackend)


def test_weights_are_prepared_for_sending():
    scheme = SharedMemWeightSyncScheme()
    given = scheme.prepare_weights(WithState(2, "x"), "policy", WeightStrategy())
    assert numbers(given) == {2.0}
    flat = scheme.prepare_weights(template(3), "policy", WeightStrategy("state_dict"))
    assert set(flat) == set(dict(Uniform().state_dict()))
    with pytest.raises(RuntimeError, match="no weights of 'critic' to prepare"):
        scheme.prepare_weights(None, "critic", WeightStrategy())
    with pytest.raises(TypeError, match="weights must be a module"):
        scheme.prepare_weights(3, "policy", WeightStrategy())

    class Owner:
        policy, critic = Uniform(4), nn.Sequential(Uniform(5))

        def get_model(self, model_id: str) -> Any:
            return getattr(self, model_id)

    owner = Owner()
    for given, model_id, number in ((None, "policy", 4.0), (None, "critic", 5.0)):
        found = scheme.prepare_weights(given, model_id, WeightStrategy(), owner)
        assert numbers(found) == {number}
    assert numbers(scheme.prepare_weights("critic", "policy", WeightStrategy(), owner)) == {5.0}
    scheme.init_on_sender(model=Uniform(6))
    assert numbers(scheme.prepare_weights(None, "policy", WeightStrategy())) == {6.0}
    scheme.shutdown()
    assert isinstance(found, TensorDict)
    assert torch.is_tensor(found["0", "count"])
