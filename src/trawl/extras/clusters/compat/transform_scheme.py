"""Scheme that sends weights to a transform of TorchRL in an actor of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from typing_extensions import override

from trawl.extras.clusters.ray.cluster import import_ray
from trawl.extras.clusters.ray.weights import RayWeightSyncScheme
from trawl.foreign.torchrl import actor_of, connect_scheme, receive_weights
from trawl.weights.groups import PreparedUpdate
from trawl.weights.store import Version


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Sends weights to the module of TorchRL's ``RayModuleTransform``, which is in its own actor.

    Pass the scheme to the transform, which connects it to its actor::

        scheme = RayModuleTransformScheme()
        transform = RayModuleTransform(module=module, weight_sync_scheme=scheme, ...)
        env = TransformedEnv(base_env, transform)
        collector = Collector(
            env, policy, weight_sync_schemes={"transform_module": scheme}, frames_per_batch=100
        )
        collector.update_policy_weights_(new_weights, model_id="transform_module")

    Each update must include the weights, because only the actor has the module. An update returns
    once the actor has received the weights.

    Args:
        strategy: the form in which weights are returned: ``"tensordict"`` or ``"state_dict"``.
        backend: see :class:`RayWeightSyncScheme`.
    """

    model_is_elsewhere: ClassVar[bool] = True

    def __init__(self, strategy: str = "tensordict", backend: str = "object_store") -> None:
        super().__init__(strategy, backend)
        self._transform: Any = None

    def _set_transform(self, transform: Any) -> None:
        # TorchRL's transform calls this method, then init_on_sender() and connect().
        self._transform = transform

    @override
    def init_on_sender(
        self,
        *,
        model_id: str = "transform_module",
        context: Any = None,
        model: Any = None,
        weights: Any = None,
        devices: Sequence[Any] | None = None,
        params_map: Any = None,
        device_map_fn: Any = None,
        num_workers: int | None = None,
        ray_transform: Any = None,
    ) -> None:
        """Makes this scheme the sending end, with the transform's actor as the only receiver.

        Args:
            model_id: name of the module.
            context: not used.
            model: a module whose weights are sent if an update has none.
            weights: weights that are sent if an update has none.
            devices: not used.
            params_map: not used.
            device_map_fn: not used.
            num_workers: not used, because there is only one receiver.
            ray_transform: the transform, if it was not made with this scheme.

        Raises:
            ValueError: if there is no transform.
            RuntimeError: if the scheme was initialised before.
        """
        if ray_transform is not None:
            self._transform = ray_transform
        if self._transform is None:
            raise ValueError(
                "RayModuleTransformScheme needs a transform: make RayModuleTransform with "
                "weight_sync_scheme=, or pass ray_transform="
            )
        super().init_on_sender(model_id=model_id, model=model, weights=weights, num_workers=1)

    @override
    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        if not self.initialized_on_sender:
            super().connect(worker_idx=worker_idx, weights=weights)
            return
        super().connect(worker_idx=worker_idx)
        import_ray().get(connect_scheme(self._actor, self, self._model_id))
        if weights is not None:
            self.send(weights)

    @property
    def _actor(self) -> Any:
        return actor_of(self._transform)

    @override
    def init_on_receiver(
        self,
        *,
        model_id: str = "transform_module",
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        module = getattr(context, "module", None) if model is None else model
        super().init_on_receiver(model_id=model_id, model=module, worker_idx=0)

    @override
    def commit(self, prepared: Sequence[PreparedUpdate], version: Version) -> None:
        super().commit(prepared, version)
        if prepared:
            import_ray().get(receive_weights(self._actor))

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_transform": None}
