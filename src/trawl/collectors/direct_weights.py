"""Weight updates of a collector that runs in its caller's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from typing_extensions import override

from trawl.collectors.base import BaseCollector
from trawl.collectors.config import CollectorConfig
from trawl.collectors.weak import weak
from trawl.collectors.weight_control import POLICY, LocalModels, WorkerIds
from trawl.supported import CHOSEN_WORKERS_NONE
from trawl.weight_update.store import Receiver, WeightUpdate


class DirectWeights(BaseCollector):
    """The part of a collector without workers that loads weights into its models.

    Attributes:
        env: the environment.
        policy: the policy that acts; a copy if the user's policy is on another device.
    """

    env: Any
    policy: Any
    policy_device: torch.device | None
    _source: Any
    _copied: bool

    def __init__(self, config: CollectorConfig) -> None:
        super().__init__(config)
        self._models = LocalModels(weak(self.get_model))

    def _connect_schemes(self) -> None:
        """Connects the user's weight-sync schemes to this collector."""
        for model_id, scheme in (self.config.weight_sync_schemes or {}).items():
            if not scheme.initialized_on_sender:
                scheme.init_on_sender(model_id=model_id, context=self)
                scheme.on_send = weak(self._update_model)
            self._weight_sync_schemes[model_id] = scheme
        self._init_weights()

    @override
    def _prepare_weights(
        self,
        by_model: Mapping[str, Any],
        worker_ids: WorkerIds,
        new_version: bool = True,
    ) -> Callable[[], None]:
        schemes = self._weight_sync_schemes
        if worker_ids is not None and not schemes:
            raise CHOSEN_WORKERS_NONE.error("worker_ids", worker_ids)
        prepared = [
            self._prepare_load(model_id, new)
            for model_id, new in by_model.items()
            if model_id not in schemes or not schemes[model_id].model_is_elsewhere
        ]
        loads = [load for load in prepared if load is not None]
        sent = [
            (scheme, scheme.prepare(by_model[model_id], scheme.receivers.chosen(worker_ids)))
            for model_id, scheme in schemes.items()
            if model_id in by_model
        ]

        def change() -> None:
            # If the acting policy is the learner's own object, there is nothing to load, and no
            # need to wait for the current batch.
            with self._held() if loads else nullcontext():
                for load in loads:
                    load()
                if new_version and self._version is not None:
                    self._version.increment_version()
                for scheme, updates in sent:
                    if not scheme.synchronized_on_sender:
                        scheme.connect()
                    scheme.commit(updates, self.policy_version)

        return change

    def _prepare_load(self, model_id: str, new: Any) -> Callable[[], None] | None:
        """Checks weights for a model of this collector.

        Returns:
            The function that loads the weights; None if the model has them already.
        """
        if new is None and model_id == POLICY and self._copied:
            new = self._source
        if new is None:
            if model_id != POLICY:
                self._models.live(model_id)  # raises an exception if there is no such model
                raise ValueError(f"the weights of {model_id!r} must be passed")
            return None
        return self._models.prepare(model_id, new)

    @override
    def _receive(self, model_id: str, receiver: Receiver, known: int = 0) -> WeightUpdate:
        """Gets new weights for a model, and loads them, unless it has the first ``known`` ones."""

        def load(update: WeightUpdate) -> None:
            if update.slot is not None and update.count > known:
                update.load(self._models.live(model_id))

        update = receiver.receive(load)
        if self._version is not None and model_id == POLICY:
            if update.version is None:
                self._version.increment_version()
            else:
                self._version.version = update.version
        return update
