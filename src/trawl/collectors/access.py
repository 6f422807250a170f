"""Access to a collector's parts, by path or by the attribute names of TorchRL's collectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict, TensorDictBase
from torch import nn

from trawl.collectors.config import CollectorConfig
from trawl.paths import call_each, call_path, get_path
from trawl.weight_update.scheme import WeightSyncScheme


class CollectorAccess:
    """Provides access to the parts of a collector, with the interface of TorchRL's collectors.

    Attributes:
        verbose: always False, because Trawl's collectors write no log.
    """

    verbose = False

    config: CollectorConfig
    _batches: int
    _version: Any
    _weight_sync_schemes: dict[str, WeightSyncScheme]

    if TYPE_CHECKING:

        def _held(self) -> AbstractContextManager[Any]: ...

    @property
    def _iter(self) -> int:
        """Number of batches collected so far."""
        return self._batches

    @property
    def policy_version_tracker(self) -> Any:
        """The :class:`~trawl.collectors.PolicyVersion` in use; None if versions are not tracked."""
        return self._version

    @property
    def compiled_policy(self) -> bool:
        """True if the policy is compiled."""
        return getattr(self, "compile_policy", None) not in (False, None)

    @property
    def weight_sync_schemes(self) -> Mapping[str, WeightSyncScheme]:
        """The weight-sync schemes that send weights, keyed by model."""
        return MappingProxyType(self._weight_sync_schemes)

    @property
    def policy_weights(self) -> TensorDictBase:
        """Parameters and buffers of the policy; empty if the policy is not a module.

        The tensors share memory with the policy's tensors, and are detached from autograd.
        """
        return _weights(getattr(self, "policy", None))

    @property
    def get_weights_fn(self) -> Callable[[], TensorDictBase] | None:
        """Function that returns the policy's weights; None if the policy is not a module.

        If the policy was copied to another device, these are the weights of the original.
        """
        source = getattr(self, "_source", getattr(self, "policy", None))
        if not isinstance(source, nn.Module):
            return None
        return lambda: _weights(source)

    # --- access by path

    @property
    def worker_idx(self) -> int:
        """Index of the worker that this collector belongs to.

        Raises:
            RuntimeError: if the collector does not belong to a worker.
        """
        if self.config.worker_idx is None:
            raise RuntimeError("worker_idx was not set: this collector does not belong to a worker")
        return self.config.worker_idx

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[dict[str, Any]] | None = None,
    ) -> list[Any]:
        """Calls the method at path ``method_name``, once for each entry of the lists.

        If both lists are None, the method is called once, without arguments.

        Args:
            method_name: path of the method, for example ``"env.close"``.
            list_of_args: list with the positional arguments of each call; None to pass none.
            list_of_kwargs: list with the keyword arguments of each call; None to pass none.

        Returns:
            The results of the calls, in order.

        Raises:
            ValueError: if the lists differ in length.
            AttributeError: if there is no method at that path.
        """
        given = list_of_kwargs if list_of_args is None else list_of_args
        count = 1 if given is None else len(given)
        args = [()] * count if list_of_args is None else list_of_args
        kwargs = [{}] * count if list_of_kwargs is None else list_of_kwargs
        if len(args) != len(kwargs):
            raise ValueError(
                f"list_of_args and list_of_kwargs must have the same length, but they have "
                f"{len(args)} and {len(kwargs)} entries"
            )
        with self._held():
            return call_each(self, method_name, list(zip(args, kwargs, strict=True)))

    def get_distant_attr(self, attr: str) -> Any:
        """Returns the attribute at a path; if it is in another process, a copy.

        Args:
            attr: path of the attribute, for example ``"env.batch_size"``,
                ``"env.envs[0].unwrapped.level"`` or ``"policy.module[0].weight"``.
        """
        with self._held():
            return get_path(self, attr)

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the method at ``attr_path``, or returns the attribute if it is not callable.

        Raises:
            ValueError: if arguments are given for an attribute that is not callable.
        """
        with self._held():
            return call_path(self, attr_path, args, kwargs)

    def getattr_rb(self, attr: str) -> Any:
        """Returns the replay buffer's attribute at path ``attr``.

        Raises:
            AttributeError: if there is no attribute at that path, or no replay buffer.
        """
        if self.config.replay_buffer is None:
            raise AttributeError(f"there is no replay buffer to get {attr!r} from")
        return get_path(self.config.replay_buffer, attr)


def _weights(policy: Any) -> TensorDictBase:
    if not isinstance(policy, nn.Module):
        return TensorDict()
    weights: TensorDictBase = TensorDict.from_module(policy).data
    return weights
