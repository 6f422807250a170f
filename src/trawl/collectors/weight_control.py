"""The part of a collector that sends and receives weights.

An update takes this way to the workers: ``update_policy_weights_`` calls the collector's
:class:`~trawl.collectors.weight_sender.WeightSender`, which prepares the update and records the
version of each worker. Its scheme publishes the update: in the slot of a
:class:`~trawl.weight_update.store.WeightStore`, or as a message
(:mod:`trawl.weight_update.messages`), which goes through the worker pool into an inbox of the
worker. Before its next batch, the worker's collector loads the newest weights, and refuses those
that don't fit its policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trawl.collectors.config import CollectorConfig, warn
from trawl.collectors.policy_version import next_version
from trawl.envs.transforms import PolicyVersion
from trawl.paths import get_local
from trawl.supported import UPDATER_MODELS
from trawl.weight_update.layout import ModuleWeights
from trawl.weight_update.scheme import WeightSyncScheme
from trawl.weight_update.store import Receiver, WeightUpdate
from trawl.weight_update.tensors import check_extra_state, set_extra_state, weights_of
from trawl.weight_update.updaters import Updater, WeightUpdaterBase, is_updater

POLICY = "policy"
# Workers by number, or by the device of their policy.
WorkerIds = int | torch.device | Sequence[int | torch.device] | None


class WeightControl(ABC):
    """The part of every collector that sends and receives weights.

    A subclass implements ``_prepare_weights`` for weights that the caller passes, and ``_receive``
    for weights that arrive through a scheme.
    """

    config: CollectorConfig
    policy: Any
    _updater: Updater | None
    _version: PolicyVersion | None
    _receivers: dict[str, Receiver]
    _weight_sync_schemes: dict[str, WeightSyncScheme]
    _receiver_schemes: dict[str, WeightSyncScheme]

    if TYPE_CHECKING:

        def _check_open(self, what: str) -> None: ...
        def _held(self) -> AbstractContextManager[None]: ...
        def _timed_update(self) -> AbstractContextManager[None]: ...

    def _init_weights(self) -> None:
        """Sets the updater and the receiving schemes; called when the collector has its schemes."""
        self.weight_updater = self.config.weight_updater
        if self.config.weight_recv_schemes:
            self.register_scheme_receiver(self.config.weight_recv_schemes)

    # --- sending

    @property
    def weight_updater(self) -> Any:
        """Updater that sends weights to workers in place of weight-sync schemes, or None.

        An updater of Trawl or TorchRL can be assigned, or a class or function that makes one.
        """
        return self._updater

    @weight_updater.setter
    def weight_updater(self, updater: Any) -> None:
        made = made_updater(updater, getattr(self, "policy", None))
        if made is not None:
            if getattr(self, "num_workers", None) is not None:
                _check_reach(made)
            made.register_collector(self)
        self._updater = made

    def _close_updater(self) -> None:
        updater = self.__dict__.get("_updater")
        if isinstance(updater, WeightUpdaterBase):
            updater.close()

    def _reached(self, updater: Updater) -> Sequence[int] | None:
        """Returns the workers that an updater reached; None for all workers in ``worker_ids``."""
        return updater.reached() if isinstance(updater, WeightUpdaterBase) else None

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        policy: Any = None,
        weights: Any = None,
        weights_dict: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        worker_ids: WorkerIds = None,
        policy_weights: Any = None,
    ) -> None:
        """Sends new weights to the policies that collect; batches that begin afterwards use them.

        The call checks everything before it changes anything, and it does not wait for workers.

        Args:
            policy_or_weights: a module, a TensorDict or a dict of weights, or a state dict.
                Default: the current weights of the policy that was passed to the constructor.
            policy: a module, as an alternative to ``policy_or_weights``.
            weights: weights, as an alternative to ``policy_or_weights``.
            weights_dict: weights by model. A model is named ``"policy"``, or by a path such as
                ``"env.transform[0]"``.
            model_id: the model that the weights are for; ``"policy"`` by default.
            worker_ids: the workers that get the weights, by number or by the ``torch.device`` of
                their policy; None for all workers.
            policy_weights: an older name of ``policy_or_weights``.

        Raises:
            ValueError: if the arguments contradict each other, shapes don't match, or a worker
                doesn't exist.
            TypeError: if the policy has no weights, or there are no workers to choose from.
            KeyError: if names of the weights don't match, or a model is unknown.
            RuntimeError: if there are no weights to send, or the collector is closed.
        """
        forms = {
            "policy_or_weights": policy_or_weights,
            "policy": policy,
            "weights": weights,
            "weights_dict": weights_dict,
            "policy_weights": policy_weights,
        }
        by_model = chosen_weights(forms, model_id)
        self._check_open("update_policy_weights_()")
        if self.weight_updater is not None:
            for name, given in (("weights_dict", weights_dict), ("model_id", model_id)):
                if given is not None:
                    raise UPDATER_MODELS.error(name, given)
        with self._timed_update():
            self._send(by_model, worker_ids)

    def _send(self, by_model: Mapping[str, Any], worker_ids: WorkerIds) -> None:
        if self.weight_updater is None:
            self._update_models(by_model, worker_ids)
            return
        # The updater may write to the policy itself, so the policy must not act meanwhile.
        with self._held(), next_version(self._version):
            self.weight_updater(by_model[POLICY], worker_ids=worker_ids)
            reached = self._reached(self.weight_updater)
            self._announce_version(worker_ids if reached is None else reached)

    def _update_models(self, by_model: Mapping[str, Any], worker_ids: WorkerIds) -> None:
        try:
            self._prepare_weights(by_model, worker_ids)()
        except Exception:
            # The collector may have been closed meanwhile, by an error in the background.
            self._check_open("update_policy_weights_()")
            raise

    def _announce_version(  # noqa: B027 (there may be no workers)
        self, worker_ids: WorkerIds = None
    ) -> None:
        """Sends the version to workers that did not receive it with weights."""

    def deliver_weights(self, weights: Any, worker_ids: WorkerIds) -> None:
        """Sends weights to workers, without advancing the version."""
        self._prepare_weights({POLICY: weights}, worker_ids, new_version=False)()

    def get_model(self, model_id: str) -> Any:
        """Returns the model named ``model_id`` (``"policy"``, or a path) in this process."""
        return self.policy if model_id == POLICY else get_local(self, model_id)

    def _update_model(self, model_id: str, weights: Any, worker_ids: WorkerIds) -> None:
        """Updates the weights of one model, on behalf of its scheme."""
        self.update_policy_weights_(weights_dict={model_id: weights}, worker_ids=worker_ids)

    @abstractmethod
    def _prepare_weights(
        self,
        by_model: Mapping[str, Any],
        worker_ids: WorkerIds,
        new_version: bool = True,
    ) -> Callable[[], None]:
        """Checks weights without changing anything; returns the function that applies them."""

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Calls ``init`` of the ``weight_updater`` with these arguments, if there is an updater."""
        if self.weight_updater is not None:
            self.weight_updater.init(*args, **kwargs)

    # --- receiving

    def register_scheme_receiver(
        self, weight_recv_schemes: Mapping[str, Any], *, synchronize_weights: bool = True
    ) -> None:
        """Makes this collector receive weights through weight-sync schemes.

        The collector checks for new weights before each batch.

        Args:
            weight_recv_schemes: a scheme for each model (``"policy"``, or a path).
            synchronize_weights: whether weights that were sent earlier are loaded immediately.

        Raises:
            RuntimeError: if a scheme is the sender's end.
        """
        for model_id, scheme in weight_recv_schemes.items():
            if scheme.sends:
                raise RuntimeError(
                    f"the weight-sync scheme of {model_id!r} is the sender's end. Send the "
                    "scheme to another process: there it becomes the receiver's end"
                )
            if not scheme.initialized_on_receiver:
                scheme.init_on_receiver(model_id=model_id, context=self)
            if not scheme.synchronized_on_receiver:
                scheme.connect()
            # The scheme is kept alive, because it shows the sender that this collector is alive.
            self._receiver_schemes[model_id] = scheme
            self._receivers[model_id] = scheme.incoming
        if synchronize_weights:
            with self._held():
                self._load_new_weights()

    def receive_weights(
        self,
        policy_or_weights: Any = None,
        *,
        policy: Any = None,
        weights: Any = None,
    ) -> None:
        """Loads the weights that schemes have received, or the weights that are passed.

        Args:
            policy_or_weights: a module, a TensorDict or a dict of weights, for a collector that
                has no receiving scheme.
            policy: a module, as an alternative to ``policy_or_weights``.
            weights: weights, as an alternative to ``policy_or_weights``.

        Raises:
            ValueError: if weights are passed, but the collector has a receiving scheme.
            Exception: any error that :meth:`update_policy_weights_` raises.
        """
        forms = {"policy_or_weights": policy_or_weights, "policy": policy, "weights": weights}
        given = any(form is not None for form in forms.values())
        self._check_open("receive_weights()")
        if not self._receivers:
            self._prepare_weights(chosen_weights(forms, None), None)()
            return
        if given:
            raise ValueError(
                "receive_weights() takes no weights here, because a weight-sync scheme receives "
                "them: call it without arguments"
            )
        with self._held():
            self._load_new_weights()

    def _load_new_weights(self) -> None:
        """Loads new weights into each model for which some have arrived."""
        for model_id, receiver in self._receivers.items():
            if receiver.newer:
                self._receive(model_id, receiver)

    @abstractmethod
    def _receive(self, model_id: str, receiver: Receiver) -> WeightUpdate:
        """Gets new weights for a model from its receiver, and applies them."""


class LocalModels:
    """Loads weights into the models of a collector.

    Args:
        find: function that returns a model by its name or path, and raises an exception if the
            model doesn't exist.
    """

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = find
        self._lives: dict[str, ModuleWeights] = {}

    def find(self, model_id: str) -> Any:
        """Returns a model, by its name or path.

        Raises:
            KeyError: if the model doesn't exist.
        """
        try:
            return self._find(model_id)
        except (AttributeError, KeyError, IndexError, ValueError):
            raise KeyError(
                f"there is no model {model_id!r}: pass 'policy', or the path of a model in this "
                "collector"
            ) from None

    def live(self, model_id: str) -> ModuleWeights:
        """Returns the tensors of a model.

        Raises:
            KeyError: if the model doesn't exist.
            TypeError: if the model has no weights.
        """
        model = self.find(model_id)
        if not isinstance(model, nn.Module):
            raise TypeError(f"{model_id} {type(model).__name__} has no weights to update")
        known = self._lives.get(model_id)
        if known is None or known.module is not model:
            known = self._lives[model_id] = ModuleWeights(model)
        return known

    def prepare(self, model_id: str, new: Any) -> Callable[[], None]:
        """Checks weights for a model, and returns the function that loads them.

        Raises:
            Exception: any error that :meth:`live` or
                :meth:`~trawl.weight_update.WeightSyncScheme.prepare` raises.
        """
        live, weights = self.live(model_id), weights_of(new)
        matched = live.layout.match(weights.tensors, type(live.module).__name__)
        check_extra_state(live.module, weights.extra)

        def load() -> None:
            # Extra state is set first, so that nothing else has changed if the module rejects it.
            set_extra_state(live.module, weights.extra)
            live.load(matched)

        return load


def chosen_weights(forms: Mapping[str, Any], model_id: str | None) -> dict[str, Any]:
    """Returns the weights by model, taken from the only argument that has weights.

    If no argument has weights, the value for the model is None.

    Args:
        forms: the arguments that may have weights, by name.
        model_id: the model that the weights are for.

    Raises:
        ValueError: if several arguments have weights, or if ``weights_dict`` is empty or passed
            together with ``model_id``.
        TypeError: if ``weights_dict`` is not a mapping.
    """
    given = {name: form for name, form in forms.items() if form is not None}
    if "policy_weights" in given:
        warn(
            "policy_weights is an older name of policy_or_weights: use the new name",
            DeprecationWarning,
        )
    if len(given) > 1:
        raise ValueError(f"pass only one of {', '.join(given)}")
    by_model = given.get("weights_dict")
    if by_model is None:
        return {model_id or POLICY: next(iter(given.values()), None)}
    if model_id is not None:
        raise ValueError(f"weights_dict already names its models: leave model_id={model_id!r} out")
    if not isinstance(by_model, Mapping):
        raise TypeError(
            f"weights_dict must map models to weights, but it is {type(by_model).__name__}"
        )
    if not by_model:
        raise ValueError("weights_dict is empty: there is nothing to update")
    return dict(by_model)


def made_updater(given: Any, policy: Any = None) -> Updater | None:
    """Returns the given weight updater, or makes one with the given class or function.

    Args:
        given: an updater, a class of updaters, or a function that makes an updater; or None.
        policy: argument of ``from_policy()``, if ``given`` is a class that has this method.

    Raises:
        TypeError: if ``given`` is none of these.
    """
    if given is None or is_updater(given):
        return given  # type: ignore[no-any-return]
    made = None
    if isinstance(given, type) and hasattr(given, "from_policy"):
        made = given.from_policy(policy)
    if made is None:
        made = given() if callable(given) else given
    if not is_updater(made):
        raise TypeError(
            "weight_updater must be a WeightUpdaterBase, or a function that makes one, but it is "
            f"{type(made).__name__}"
        )
    return made  # type: ignore[no-any-return]


def _check_reach(updater: Updater) -> None:
    """Raises a ``TypeError`` for an updater that would reach no worker."""
    kind = type(updater)
    if kind.__module__.startswith("torchrl.") and not hasattr(updater, "remote_collectors"):
        raise TypeError(
            f"weight_updater: TorchRL's {kind.__name__} can't reach the workers of this "
            "collector, because it only knows the memory and processes of TorchRL's own "
            "collectors. Leave it out: update_policy_weights_() needs no updater. "
            "trawl.weight_update has updaters of the same names"
        )
