"""The collector that has the name and the arguments of TorchRL's collector over RPC."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from trawl.collectors.arguments import accepts, describe
from trawl.extras.clusters.base import ClusterArguments
from trawl.extras.clusters.process_group import RemoteCollector
from trawl.extras.clusters.process_group_config import RemoteOptions
from trawl.weights.message_schemes import RPCWeightSyncScheme
from trawl.weights.scheme import WeightSyncScheme


@dataclass(frozen=True, kw_only=True)
class RPCOptions(RemoteOptions):
    """The options of an :class:`RPCCollector`.

    Attributes:
        tensorpipe_options: arguments of ``torch.distributed.rpc.TensorPipeRpcBackendOptions``,
            such as ``num_worker_threads``. They are checked, and have no effect.
        visible_devices: a list of devices, which has no effect: batches and weights travel between
            CPUs, and ``storing_device`` says where batches are delivered.
    """

    tensorpipe_options: Mapping[str, Any] | None = None
    visible_devices: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.tensorpipe_options
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                f"tensorpipe_options must be a mapping, but it is {type(given).__name__}"
            )
        if isinstance(self.visible_devices, str):
            raise TypeError(
                f"visible_devices must be a list of devices, but it is {self.visible_devices!r}"
            )
        if given:
            _check_names(given)


def _check_names(options: Mapping[str, Any]) -> None:
    from torch.distributed import rpc

    known = inspect.signature(rpc.TensorPipeRpcBackendOptions).parameters
    unknown = options.keys() - known
    if unknown:
        raise ValueError(
            f"tensorpipe_options has unknown options {', '.join(map(repr, sorted(unknown)))}: "
            f"TensorPipeRpcBackendOptions takes {', '.join(sorted(known))}"
        )


@dataclass(frozen=True)
class RPCArguments(RPCOptions, ClusterArguments):
    """The arguments of a :class:`RPCCollector`."""


@describe(RPCArguments)
class RPCCollector(RemoteCollector):
    """Collects experience in other processes, on any machine.

    This is a :class:`~trawl.collectors.distributed.DistributedCollector` with the name, the options
    and the shape of batches of TorchRL's collector over ``torch.distributed.rpc``. It does not use
    RPC, so programs that use RPC themselves can have any number of such collectors.

    A worker that dies is replaced if the ``launcher`` can start another. With ``sync=True``, all
    workers contribute to each batch, and their parts are concatenated (``cat_results=0``).
    Otherwise, each batch comes from one worker, and batches are delivered in the order in which
    they are finished.

    Args:
        **options: options of the collector, which these classes document:
            :class:`~trawl.extras.clusters.rpc.RPCOptions`,
            :class:`~trawl.extras.clusters.base.ClusterOptions` and
            :class:`~trawl.collectors.MultiConfig`.
    """

    remote: RPCOptions
    _options = RPCOptions

    @accepts(RPCArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        if options.get("sync"):
            options.setdefault("cat_results", 0)
        super().__init__(create_env_fn, policy, *more, **options)

    @override
    def _new_scheme(self) -> WeightSyncScheme:
        return RPCWeightSyncScheme()
