"""Base class of weight-sync schemes: the model of a scheme, and the form of its weights."""

from __future__ import annotations

import weakref
from typing import Any

from trawl.paths import get_local
from trawl.weight_update.strategy import WeightStrategy, check_strategy


class SchemeEnd:
    """Model whose weights an end of a scheme sends or receives, and the form of the weights.

    Args:
        strategy: the form in which weights are returned: ``"tensordict"`` or ``"state_dict"``.

    Raises:
        ValueError: for another strategy.
    """

    def __init__(self, strategy: str) -> None:
        check_strategy("strategy", strategy)
        self._strategy = WeightStrategy(strategy)
        self._model_id: str | None = None
        self._model: Any = None
        self._context: weakref.ref[Any] | None = None
        self._worker_idx: int | None = None

    def _set_model(self, model_id: str, model: Any, context: Any) -> None:
        self._model_id, self._model = model_id, model
        self._context = None if context is None else weakref.ref(context)

    @property
    def context(self) -> Any:
        """Collector that has the model; None if there was none, or it no longer exists."""
        return None if self._context is None else self._context()

    @property
    def model(self) -> Any:
        """Model that was given, or else the model of the context at the path ``model_id``."""
        if self._model is not None or self.context is None or self._model_id is None:
            return self._model
        return _model_of(self.context, self._model_id)

    @property
    def model_id(self) -> str | None:
        """Name, or path, of the model."""
        return self._model_id

    @property
    def strategy(self) -> str:
        """Form in which weights are returned."""
        return self._strategy.extract_as

    @property
    def strategy_str(self) -> str:
        """Another name of :attr:`strategy`, which TorchRL's trainers read."""
        return self.strategy

    @property
    def worker_idx(self) -> int | None:
        """Number of this receiver; None on the sender's side."""
        return self._worker_idx

    @property
    def initialized_on_receiver(self) -> bool:
        """True if this is a receiver's end."""
        return self._worker_idx is not None

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Loads weights into the receiver's model.

        Raises:
            RuntimeError: if the scheme is not initialised.
        """
        if not self.initialized_on_receiver:
            raise RuntimeError("call init_on_receiver() before apply_weights()")
        self._strategy.apply_weights(self.model, weights, inplace)

    def prepare_weights(
        self,
        weights: Any,
        model_id: str = "policy",
        strategy: WeightStrategy | None = None,
        context: Any = None,
    ) -> Any:
        """Returns weights in the form in which they are sent, without copying them.

        Args:
            weights: weights in any form; the path of a model of the context; or None for the
                current weights of the model.
            model_id: name of the model that the weights belong to.
            strategy: determines the form; by default, the strategy of this scheme.
            context: the collector that has the model; by default, the context of this scheme.

        Raises:
            RuntimeError: if there are no weights to return.
            TypeError: if weights are in no known form.
        """
        form = strategy or self._strategy
        owner = self.context if context is None else context
        if isinstance(weights, str):
            model_id, weights = weights, None
        if weights is None:
            weights = self._model if owner is None else _model_of(owner, model_id)
        if weights is None:
            raise RuntimeError(
                f"there are no weights of {model_id!r} to prepare: pass them, or a context that "
                "has the model"
            )
        return form.extract_weights(weights)


def _model_of(context: Any, model_id: str) -> Any:
    find = getattr(context, "get_model", None)
    return get_local(context, model_id) if find is None else find(model_id)
