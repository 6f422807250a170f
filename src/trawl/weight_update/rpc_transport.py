"""The way of weights to another node of the user's own RPC framework."""

from __future__ import annotations

import queue
from collections import defaultdict
from typing import Any

from trawl.weight_update.strategy import WeightStrategy, in_form, take_in
from trawl.weight_update.tensors import Weights, weights_of

# What came for receivers of this process that are no collectors, by their number.
_inboxes: defaultdict[int, queue.Queue[Any]] = defaultdict(queue.Queue)


class RPCTransport:
    """Sends weights by ``torch.distributed.rpc``, in the framework that the user has started.

    With a reference to a collector (``collector_rref``) they are given to it, by its
    ``update_policy_weights_``. Without one they wait in the receiving node, for
    ``receive_weights`` of a transport there that has the same ``worker_rank``.

    Args:
        collector_info: the node of the receiver: its name, its number or its ``WorkerInfo``. None:
            that of ``collector_rref``.
        collector_rref: a reference (``RRef``) to the collector that gets the weights.
        collector_class: the class of that collector, of which ``update_policy_weights_`` is
            called. None: the one that it has.
        worker_rank: the number of the receiver, among those of its node.

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
            RuntimeError: if there is no such node, or it has ended.
            Exception: what the collector there raises.
        """
        self.send_weights_async(weights)
        self.wait_ack()

    def send_weights_async(self, weights: Any) -> None:
        """Sends weights, in any form; :meth:`wait_ack` waits until the receiver has them.

        Those sent before have to be there by then, as RPC may bring calls in another order.

        Raises:
            RuntimeError: if the transport has no receiver, or that has ended.
            Exception: what the collector there raised because of those sent before.
        """
        from torch.distributed import rpc

        self.wait_ack()
        given = weights_of(weights)
        # They are sent later: copies stay as they are now.
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
        """Waits until the receiver has what was sent last."""
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
        """Takes the newest weights that were sent to this node; None if none came in time.

        Args:
            timeout: seconds to wait; None waits as long as it takes.
            weights: tensors to put them into.
            model: a module to put them into.
            strategy: the form in which they are returned, and how they are put there.
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
        """Takes the first weights, if some were sent already, and returns them; or None.

        Args:
            worker_idx: the number of the receiver, if the constructor was given none.
            weights: tensors to put the weights into.
            model: a module to put them into.
            strategy: the form in which they are returned, and how they are put there.
        """
        if self.worker_rank is None:
            self.worker_rank = worker_idx
        return self.receive_weights(0, weights=weights, model=model, strategy=strategy)


def _update(rref: Any, kind: Any, weights: dict[str, Any]) -> None:
    """Called in the node of a collector, with new weights for it."""
    collector = rref.local_value()
    if kind is None:
        collector.update_policy_weights_(weights)
    else:
        kind.update_policy_weights_(collector, weights)


def _put(number: int, weights: dict[str, Any]) -> None:
    """Called in the node of a receiver, with new weights for it."""
    _inboxes[number].put(weights)
