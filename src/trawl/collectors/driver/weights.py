"""The weights of a collector: sending, receiving, versions.

An update takes this way to the workers: ``update_policy_weights_`` calls the collector's
:class:`~trawl.collectors.workers.weight_sender.WeightSender`, which prepares the update and records
the version of each worker. Its scheme publishes the update: in the slot of a
:class:`~trawl.weights.store.WeightStore`, or as a message of a
:class:`~trawl.weights.messages.MessageStore`, which goes through the worker pool into an inbox of
the worker. Before its next batch, the worker's collector loads the newest weights, and refuses
those that don't fit its policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable
from weakref import ref

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from trawl.collectors.config import CollectorConfig, warn
from trawl.collectors.driver.background import BackgroundCollection
from trawl.collectors.driver.lifetime import Lifetime
from trawl.collectors.driver.parts import weak
from trawl.collectors.driver.policy_version import next_version
from trawl.collectors.watch.timeline import Tracing
from trawl.envs.transforms import PolicyVersion
from trawl.supported import UPDATER_MODELS
from trawl.weights.layout import ModuleWeights
from trawl.weights.scheme import WeightSyncScheme
from trawl.weights.store import Receiver, Version, WeightUpdate

POLICY = "policy"
# Workers by number, or by the device of their policy.
WorkerIds = int | torch.device | Sequence[int | torch.device] | None


class Updater(Protocol):
    """Interface of weight updaters, both Trawl's and TorchRL's, as a collector uses it."""

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Initialises the updater."""

    def register_collector(self, collector: Any) -> Any:
        """Registers a collector whose workers the updater serves."""

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> Any:
        """Sends weights to workers."""


@runtime_checkable
class OwnUpdater(Updater, Protocol):
    """Interface of Trawl's own updaters."""

    def reached(self) -> list[int] | None:
        """Returns the numbers of the workers that the last push reached; None for all."""

    def close(self) -> None:
        """Ends the updater when a collector that it serves is closed."""


class CollectorWeights(ABC):
    """The weights of a collector's policies, and their versions.

    A subclass implements :meth:`prepare` for weights that the caller passes, and :meth:`receive`
    for weights that arrive through a scheme.

    Args:
        collector: the collector, to which the object has no strong reference.

    Attributes:
        tracker: counter of the policy's versions; None if they are not tracked.
        models: the models in this process.
        schemes: the weight-sync schemes that send weights, by model.
        receiver_schemes: the weight-sync schemes that receive weights, by model.
        receivers: where these deliver weights, by model.
    """

    def __init__(self, collector: Any) -> None:
        self._owner: Callable[[], Any] = ref(collector)
        self._config: CollectorConfig = collector.config
        self._lifetime: Lifetime = collector.parts.lifetime
        self._background: BackgroundCollection = collector.parts.background
        self._timeline: Tracing = collector.parts.timeline
        self.tracker: PolicyVersion | None = collector.policy_version_tracker
        self.models = LocalModels(weak(collector.get_model))
        self.schemes: dict[str, WeightSyncScheme] = {}
        self.receiver_schemes: dict[str, WeightSyncScheme] = {}
        self.receivers: dict[str, Receiver] = {}
        self._updater: Updater | None = None

    def begin(self) -> None:
        """Sets the updater and the receiving schemes; called when the sending ones are ready."""
        self.updater = self._config.weight_updater
        if self._config.weight_recv_schemes:
            self._owner().register_scheme_receiver(self._config.weight_recv_schemes)

    def close(self) -> None:
        """Closes the updater."""
        if isinstance(self._updater, OwnUpdater):
            self._updater.close()

    # --- versions

    @property
    def version(self) -> Version:
        """Version of the policy that collects; None if versions are not tracked."""
        return None if self.tracker is None else self.tracker.version

    def increment_version(self) -> None:
        """Advances to the next version of the policy, if versions are tracked."""
        if self.tracker is not None:
            with self._background.held():
                self.tracker.increment_version()

    def announce_version(  # noqa: B027 (there may be no workers)
        self, worker_ids: WorkerIds = None
    ) -> None:
        """Sends the version to workers that did not receive it with weights."""

    # --- sending

    @property
    def updater(self) -> Updater | None:
        """Updater that sends weights in place of weight-sync schemes, or None."""
        return self._updater

    @updater.setter
    def updater(self, updater: Any) -> None:
        collector = self._owner()
        made = made_updater(updater, getattr(collector, "policy", None))
        if made is not None:
            self.check_updater(made)
            made.register_collector(collector)
        self._updater = made

    def check_updater(self, updater: Updater) -> None:  # noqa: B027 (most reach what they update)
        """Raises a ``TypeError`` if an updater would reach nobody."""

    def reached(self, updater: Updater) -> Sequence[int] | None:
        """Returns the workers that an updater reached; None for all workers in ``worker_ids``."""
        return updater.reached() if isinstance(updater, OwnUpdater) else None

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
        self._lifetime.check_open("update_policy_weights_()")
        if self.updater is not None:
            for name, given in (("weights_dict", weights_dict), ("model_id", model_id)):
                if given is not None:
                    raise UPDATER_MODELS.error(name, given)
        with self._timeline.updating():
            self._send(by_model, worker_ids)

    def _send(self, by_model: Mapping[str, Any], worker_ids: WorkerIds) -> None:
        updater = self.updater
        if updater is None:
            self._update_models(by_model, worker_ids)
            return
        # The updater may write to the policy itself, so the policy must not act meanwhile.
        with self._background.held(), next_version(self.tracker):
            updater(by_model[POLICY], worker_ids=worker_ids)
            reached = self.reached(updater)
            self.announce_version(worker_ids if reached is None else reached)

    def _update_models(self, by_model: Mapping[str, Any], worker_ids: WorkerIds) -> None:
        try:
            self.prepare(by_model, worker_ids)()
        except Exception:
            # The collector may have been closed meanwhile, by an error in the background.
            self._lifetime.check_open("update_policy_weights_()")
            raise

    def deliver_weights(self, weights: Any, worker_ids: WorkerIds) -> None:
        """Sends weights to workers, without advancing the version."""
        self.prepare({POLICY: weights}, worker_ids, new_version=False)()

    def update_model(self, model_id: str, weights: Any, worker_ids: WorkerIds) -> None:
        """Updates the weights of one model, on behalf of its scheme."""
        update = self._owner().update_policy_weights_
        update(weights_dict={model_id: weights}, worker_ids=worker_ids)

    @abstractmethod
    def prepare(
        self,
        by_model: Mapping[str, Any],
        worker_ids: WorkerIds,
        new_version: bool = True,
    ) -> Callable[[], None]:
        """Checks weights without changing anything; returns the function that applies them."""

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Calls ``init`` of the ``weight_updater`` with these arguments, if there is an updater."""
        if self.updater is not None:
            self.updater.init(*args, **kwargs)

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
                scheme.init_on_receiver(model_id=model_id, context=self._owner())
            if not scheme.synchronized_on_receiver:
                scheme.connect()
            # The scheme is kept alive, because it shows the sender that this collector is alive.
            self.receiver_schemes[model_id] = scheme
            self.receivers[model_id] = scheme.incoming
        if synchronize_weights:
            with self._background.held():
                self.load_new()

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
        self._lifetime.check_open("receive_weights()")
        if not self.receivers:
            self.prepare(chosen_weights(forms, None), None)()
            return
        if given:
            raise ValueError(
                "receive_weights() takes no weights here, because a weight-sync scheme receives "
                "them: call it without arguments"
            )
        with self._background.held():
            self.load_new()

    def load_new(self) -> None:
        """Loads new weights into each model for which some have arrived."""
        for model_id, receiver in self.receivers.items():
            if receiver.newer:
                self.receive(model_id, receiver)

    @abstractmethod
    def receive(self, model_id: str, receiver: Receiver) -> WeightUpdate:
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
        return self.live(model_id).prepare(new)


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


def live_weights(policy: Any) -> TensorDictBase:
    """Returns the tensors of a policy, detached from autograd; none if it is not a module."""
    if not isinstance(policy, nn.Module):
        return TensorDict()
    weights: TensorDictBase = TensorDict.from_module(policy).data
    return weights


def is_updater(given: Any) -> bool:
    """Returns True if an object is a weight updater, of Trawl or TorchRL."""
    names = ("init", "push_weights", "register_collector", "__call__")
    return not isinstance(given, type) and all(hasattr(given, name) for name in names)


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


def check_reach(updater: Updater) -> None:
    """Raises a ``TypeError`` for an updater that would reach no worker."""
    kind = type(updater)
    if kind.__module__.startswith("torchrl.") and not hasattr(updater, "remote_collectors"):
        raise TypeError(
            f"weight_updater: TorchRL's {kind.__name__} can't reach the workers of this "
            "collector, because it only knows the memory and processes of TorchRL's own "
            "collectors. Leave it out: update_policy_weights_() needs no updater. "
            "trawl.weight_update has updaters of the same names"
        )
