"""Attributes by which programs written for TorchRL read the state of a collector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import nn

from trawl.weight_update.scheme import WeightSyncScheme


class FamiliarAttributes:
    """The attributes of TorchRL's collectors that are not options of the constructor.

    Attributes:
        verbose: always False: collectors of Trawl write no log.
    """

    verbose = False

    _batches: int
    _version: Any
    _weight_sync_schemes: dict[str, WeightSyncScheme]

    @property
    def _iter(self) -> int:
        """Number of batches that were collected."""
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
        """The weight-sync schemes that send weights, by model."""
        return MappingProxyType(self._weight_sync_schemes)

    @property
    def policy_weights(self) -> TensorDictBase:
        """Parameters and buffers of the policy; empty if the policy is not a module.

        The tensors are the policy's own, without gradients.
        """
        return _weights(getattr(self, "policy", None))

    @property
    def get_weights_fn(self) -> Callable[[], TensorDictBase] | None:
        """Function that returns the weights of the given policy; None if that is not a module."""
        source = getattr(self, "_source", getattr(self, "policy", None))
        if not isinstance(source, nn.Module):
            return None
        return lambda: _weights(source)


def _weights(policy: Any) -> TensorDictBase:
    if not isinstance(policy, nn.Module):
        return TensorDict()
    weights: TensorDictBase = TensorDict.from_module(policy).data
    return weights
