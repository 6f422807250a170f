"""The part of a collector that has to do with new weights: sent by it, and received."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trawl.collectors.config import CollectorConfig, warn
from trawl.collectors.policy_version import PolicyVersion
from trawl.weight_update.board import Posted
from trawl.weight_update.scheme import Receiver, WeightSyncScheme
from trawl.weight_update.updaters import Updater, WeightUpdaterBase, is_updater

POLICY = "policy"
# Workers by number, or by the device of their policy.
WorkerIds = int | torch.device | Sequence[int | torch.device] | None


class WeightControl(ABC):
    """What all collectors do about weights.

    A subclass says what becomes of new ones: in ``_prepare_weights`` of those that are given here,
    and in ``_take`` of those that come from elsewhere.
    """

    config: CollectorConfig
    _updater: Updater | None
    _version: PolicyVersion | None
    _receivers: dict[str, Receiver]
    _weight_sync_schemes: dict[str, WeightSyncScheme]
    _receiver_schemes: dict[str, WeightSyncScheme]

    if TYPE_CHECKING:

        def _check_open(self, what: str) -> None: ...
        def _held(self) -> AbstractContextManager[None]: ...

    def _init_weights(self) -> None:
        """To be called once the collector is made, and has its schemes."""
        self.weight_updater = self.config.weight_updater
        if self.config.weight_recv_schemes:
            self.register_scheme_receiver(self.config.weight_recv_schemes)

    # --- sending

    @property
    def _models_elsewhere(self) -> set[str]:
        """Names of models that neither this collector nor its workers have."""
        return {
            model_id
            for model_id, scheme in self._weight_sync_schemes.items()
            if scheme.model_is_elsewhere
        }

    @property
    def weight_updater(self) -> Any:
        """The updater that brings weights to workers, in the place of weight-sync schemes.

        An updater that is assigned serves this collector from then on. TorchRL's are taken as
        well, and a class or function that makes one.
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
        """Returns the workers that an updater brought weights to; None for all that were asked."""
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
        """Gives the policies that collect new weights; each batch that begins after it has them.

        All is checked before anything changes, and no worker is waited for.

        Args:
            policy_or_weights: a module, a TensorDict or a dict of weights, or a state dict. Without
                it, workers get those that the policy has now which the collector was made with,
                and a policy that was copied to another device those of its original.
            policy: the same, as a module.
            weights: the same, as weights.
            weights_dict: weights by model (``"policy"``, or a path, as ``"env.transform[0]"``).
            model_id: the model that the weights are for; ``"policy"`` by default.
            worker_ids: the workers that get them, by number or by the ``torch.device`` of their
                policy; None: all.
            policy_weights: an older name of ``policy_or_weights``.

        Raises:
            ValueError: if the arguments contradict each other, shapes don't fit, or there is no
                such worker.
            TypeError: if the policy has no weights, or there are no workers to choose from.
            KeyError: if names of the weights don't fit, or a model is unknown.
            RuntimeError: if there are no weights to take, or the collector is closed.
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
        if self.weight_updater is None:
            self._update(by_model, worker_ids)
            return
        if weights_dict is not None or model_id is not None:
            raise ValueError(
                "weights_dict and model_id can't be used with a weight_updater: it sends the "
                "weights of the policy only"
            )
        # It may write to the policy itself: not while that acts.
        with self._held(), self._next_version():
            self.weight_updater(by_model[POLICY], worker_ids=worker_ids)
            reached = self._reached(self.weight_updater)
            self._announce_version(worker_ids if reached is None else reached)

    @contextmanager
    def _next_version(self) -> Iterator[None]:
        """Within it the next version of the policy is made; a failure takes it back."""
        tracker = self._version
        if tracker is None:
            yield
            return
        before = tracker.version
        tracker.increment_version()
        try:
            yield
        except BaseException:
            tracker.version = before
            raise

    def _announce_version(  # noqa: B027 (there may be no workers)
        self, worker_ids: WorkerIds = None
    ) -> None:
        """Tells workers of the version, if they did not hear of it with weights."""

    def _deliver_weights(self, weights: Any, worker_ids: WorkerIds) -> None:
        """Gives weights to workers, as those of the version that there is."""
        self._prepare_weights({POLICY: weights}, worker_ids, new_version=False)()

    def _update(self, by_model: Mapping[str, Any], worker_ids: WorkerIds = None) -> None:
        """Checks weights, and then gives them to who is to have them."""
        self._prepare_weights(by_model, worker_ids)()

    @abstractmethod
    def _prepare_weights(
        self,
        by_model: Mapping[str, Any],
        worker_ids: WorkerIds,
        new_version: bool = True,
    ) -> Callable[[], None]:
        """Checks weights, and changes nothing; gives what makes the change."""

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Initialises the ``weight_updater``, with arguments of its ``init``, if there is one."""
        if self.weight_updater is not None:
            self.weight_updater.init(*args, **kwargs)

    # --- receiving

    def register_scheme_receiver(
        self, weight_recv_schemes: Mapping[str, Any], *, synchronize_weights: bool = True
    ) -> None:
        """Lets this collector have the weights that somebody sends by weight-sync schemes.

        New weights are looked for before each batch.

        Args:
            weight_recv_schemes: a scheme for each model (``"policy"``, or a path).
            synchronize_weights: whether weights that were sent before are taken at once.

        Raises:
            RuntimeError: if a scheme is a sender's, or was connected already.
        """
        for model_id, scheme in weight_recv_schemes.items():
            if scheme.sends:
                raise RuntimeError(
                    f"the weight-sync scheme of {model_id!r} is the sender's end: the receiver's "
                    "is what comes out of it in another process"
                )
            if not scheme.initialized_on_receiver:
                scheme.init_on_receiver(model_id=model_id, context=self)
            if not scheme.synchronized_on_receiver:
                scheme.connect()
            # Kept, as the sender hears from it that this collector lives.
            self._receiver_schemes[model_id] = scheme
            self._receivers[model_id] = scheme.incoming
        if synchronize_weights:
            with self._held():
                self._take_weights()

    def receive_weights(
        self,
        policy_or_weights: Any = None,
        *,
        policy: Any = None,
        weights: Any = None,
    ) -> None:
        """Takes new weights: those that were sent, or those that are given.

        Args:
            policy_or_weights: a module, a TensorDict or a dict of weights, for a collector that
                has no receiving scheme.
            policy: the same, as a module.
            weights: the same, as weights.

        Raises:
            ValueError: if weights are given though a scheme receives them.
            as :meth:`update_policy_weights_`.
        """
        forms = {"policy_or_weights": policy_or_weights, "policy": policy, "weights": weights}
        given = any(form is not None for form in forms.values())
        self._check_open("receive_weights()")
        if not self._receivers:
            self._update(chosen_weights(forms, None))
            return
        if given:
            raise ValueError(
                "receive_weights() takes no weights here: a weight-sync scheme receives them"
            )
        with self._held():
            self._take_weights()

    def _take_weights(self) -> None:
        """Takes what is new, if there is something."""
        for model_id, receiver in self._receivers.items():
            if receiver.newer:
                self._take(model_id, receiver)
                scheme = self._receiver_schemes.get(model_id)
                if scheme is not None:
                    # Somebody may wait for that.
                    scheme.acknowledge()

    @abstractmethod
    def _take(self, model_id: str, receiver: Receiver) -> Posted:
        """Takes new weights for a model."""


def chosen_weights(forms: Mapping[str, Any], model_id: str | None) -> dict[str, Any]:
    """The weights by model, from the one form in which they were given; None for none.

    Args:
        forms: the arguments that weights may be given by, by name.
        model_id: the model that they are for.

    Raises:
        ValueError: if there are several, or ``weights_dict`` comes with a ``model_id``.
        TypeError: if ``weights_dict`` is no mapping.
    """
    given = {name: form for name, form in forms.items() if form is not None}
    if "policy_weights" in given:
        warn("policy_weights is an older name of policy_or_weights: use that", DeprecationWarning)
    if len(given) > 1:
        raise ValueError(f"give one of {', '.join(given)}, not several")
    by_model = given.get("weights_dict")
    if by_model is None:
        return {model_id or POLICY: next(iter(given.values()), None)}
    if model_id is not None:
        raise ValueError(f"weights_dict names its models; leave model_id={model_id!r} out")
    if not isinstance(by_model, Mapping):
        raise TypeError(
            f"weights_dict must map models to weights, but it is {type(by_model).__name__}"
        )
    if not by_model:
        raise ValueError("weights_dict is empty: there is nothing to update")
    return dict(by_model)


def made_updater(given: Any, policy: Any = None) -> Updater | None:
    """Returns the weight updater, from itself, its class, or a function that makes it.

    Args:
        given: what the user gave.
        policy: the policy that a class may make its updater for.

    Raises:
        TypeError: if it is none of these.
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
    """Refuses updaters that would reach no worker."""
    kind = type(updater)
    if kind.__module__.startswith("torchrl.") and not hasattr(updater, "remote_collectors"):
        raise TypeError(
            f"weight_updater: TorchRL's {kind.__name__} reaches no worker of this collector, as it "
            "writes to memory, or calls processes, of TorchRL's own collectors. Leave it out: "
            "update_policy_weights_() does it. trawl.weight_update has updaters of the same names"
        )
