"""Transport of weights to another node of the user's own RPC framework."""

from __future__ import annotations

import queue
from collections import defaultdict
from typing import Any

from trawl.weight_update.strategy import WeightStrategy, in_form, take_in
from trawl.weight_update.tensors import Weights, weights_of

# Weights for receivers of this process that are not collectors, by the receiver's number.
_inboxes: defaultdict[int, queue.Queue[Any]] = defaultdict(queue.Queue)


class RPCTransport:
    """Sends weights by ``torch.distributed.rpc``, in the framework that the user has started.

    With a reference to a collector (``collector_rref``), the transport calls the collector's
    ``update_policy_weights_``. Without one, the weights wait in the receiving node until a
    transport there, with the same ``worker_rank``, calls ``receive_weights``.

    Args:
        collector_info: node of the receiver: its name, its number or its ``WorkerInfo``. None for
            the node of ``collector_rref``.
        collector_rref: reference (``RRef``) to the collector that gets the weights.
        collector_class: class whose ``update_policy_weights_`` is called with the collector. None
            for the collector's own class.
        worker_rank: number of the receiver among those of its node.

    Example:
        >>> from trawl.weight_update import RPCTransport
        >>> def learner(weights):
        ...     RPCTransport("actor", worker_rank=0).send_weights(weights)
        >>> def actor(policy):
        ...     RPCTransport(worker_rank=0).receive_weights(timeout=10, model=policy)
    """

    def __init__(
        self,
        collector_info: Any = None,
        collector_rref: Any = None,
        collector_class: Any = None,
        worker_rank: int | None = None,
    ) -> None:
        self.collector_info = collector_info
        self.collector_rref = collector_rref
        self.collector_class = collector_class
        self.worker_rank = worker_rank
        self._under_way: Any = None

    # --- the sender

    def send_weights(self, weights: Any) -> None:
        """Sends weights, in any form, and waits until the receiver has them.

        Raises:
            RuntimeError: if the node does not exist, or has ended.
            Exception: any error that the collector raises.
        """
        self.send_weights_async(weights)
        self.wait_ack()

    def send_weights_async(self, weights: Any) -> None:
        """Sends weights, in any form; :meth:`wait_ack` waits until the receiver has them.

        The call first waits until earlier weights have arrived, because RPC may reorder calls.

        Raises:
            RuntimeError: if the transport has no receiver, or the receiver has ended.
            Exception: any error that the collector raised for earlier weights.
        """
        from torch.distributed import rpc

        self.wait_ack()
        given = weights_of(weights)
        # RPC sends the tensors later. Copies keep their present values until then.
        copies = {name: tensor.detach().cpu().clone() for name, tensor in given.tensors.items()}
        sent = in_form(Weights(copies, given.extra), "state_dict")
        to = self.collector_info
        if self.collector_rref is not None:
            to = self.collector_rref.owner() if to is None else to
            arguments = (self.collector_rref, self.collector_class, sent)
            self._under_way = rpc.rpc_async(to, _update, args=arguments)
        elif to is not None:
            self._under_way = rpc.rpc_async(to, _put, args=(self.worker_rank or 0, sent))
        else:
            raise RuntimeError(
                "this transport has no receiver: give collector_info, collector_rref, or both"
            )

    def wait_ack(self) -> None:
        """Waits until the receiver has the last weights."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.wait()

    def setup_connection_and_weights_on_sender(self) -> None:
        """Does nothing: the framework has connected the nodes."""

    # --- the receiver

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Returns the newest weights that were sent to this node, or None if none arrive in time.

        Args:
            timeout: seconds to wait; None waits as long as it takes.
            weights: tensors to copy the weights into.
            model: a module to load the weights into.
            strategy: determines how weights are loaded, and in which form they are returned.
        """
        inbox = _inboxes[self.worker_rank or 0]
        try:
            found = inbox.get(timeout=timeout) if timeout != 0 else inbox.get_nowait()
            while not inbox.empty():
                found = inbox.get_nowait()
        except queue.Empty:
            return None
        return take_in(weights_of(found), model if model is not None else weights, strategy)

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Returns the first weights if some have arrived already, and None otherwise.

        Args:
            worker_idx: number of the receiver, if the constructor got none.
            weights: tensors to copy the weights into.
            model: a module to load the weights into.
            strategy: determines how weights are loaded, and in which form they are returned.
        """
        if self.worker_rank is None:
            self.worker_rank = worker_idx
        return self.receive_weights(0, weights=weights, model=model, strategy=strategy)


def _update(rref: Any, kind: Any, weights: dict[str, Any]) -> None:
    """Passes new weights to a collector; called in the collector's node."""
    collector = rref.local_value()
    if kind is None:
        collector.update_policy_weights_(weights)
    else:
        kind.update_policy_weights_(collector, weights)


def _put(number: int, weights: dict[str, Any]) -> None:
    """Stores new weights for a receiver; called in the receiver's node."""
    _inboxes[number].put(weights)
