"""Weight updates of a collector that runs in its caller's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from typing_extensions import override

from trawl.collectors.driver.parts import weak
from trawl.collectors.driver.weights import POLICY, CollectorWeights, WorkerIds
from trawl.supported import CHOSEN_WORKERS_NONE
from trawl.weights.store import Receiver, WeightUpdate


class DirectWeights(CollectorWeights):
    """The weights of a collector without workers, which are loaded into its models.

    Attributes:
        source: the policy as the user gave it.
        copied: True if the policy that acts is a copy of the source, on another device.
    """

    source: Any = None
    copied = False

    def connect(self) -> None:
        """Connects the user's weight-sync schemes to the collector."""
        for model_id, scheme in (self._config.weight_sync_schemes or {}).items():
            if not scheme.initialized_on_sender:
                scheme.init_on_sender(model_id=model_id, context=self._owner())
                scheme.on_send = weak(self.update_model)
            self.schemes[model_id] = scheme
        self.begin()

    @override
    def prepare(
        self,
        by_model: Mapping[str, Any],
        worker_ids: WorkerIds,
        new_version: bool = True,
    ) -> Callable[[], None]:
        schemes = self.schemes
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
            with self._background.held() if loads else nullcontext():
                for load in loads:
                    load()
                if new_version and self.tracker is not None:
                    self.tracker.increment_version()
                for scheme, updates in sent:
                    if not scheme.synchronized_on_sender:
                        scheme.connect()
                    scheme.commit(updates, self.version)

        return change

    def _prepare_load(self, model_id: str, new: Any) -> Callable[[], None] | None:
        """Checks weights for a model of this collector.

        Returns:
            The function that loads the weights; None if the model has them already.
        """
        if new is None and model_id == POLICY and self.copied:
            new = self.source
        if new is None:
            if model_id != POLICY:
                self.models.live(model_id)  # raises an exception if there is no such model
                raise ValueError(f"the weights of {model_id!r} must be passed")
            return None
        return self.models.prepare(model_id, new)

    @override
    def receive(self, model_id: str, receiver: Receiver, known: int = 0) -> WeightUpdate:
        """Gets new weights for a model, and loads them, unless it has the first ``known`` ones."""

        def load(update: WeightUpdate) -> None:
            if update.slot is not None and update.count > known:
                update.load(self.models.live(model_id))

        update = receiver.receive(load)
        if self.tracker is not None and model_id == POLICY:
            if update.version is None:
                self.tracker.increment_version()
            else:
                self.tracker.version = update.version
        return update
