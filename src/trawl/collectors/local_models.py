"""Models in the process of their collector, and the loading of weights into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from trawl.weight_update.layout import ModuleWeights
from trawl.weight_update.tensors import check_extra_state, set_extra_state, weights_of


class LocalModels:
    """Loads weights into the models of a collector.

    Args:
        find: returns the model with a name or path; raises an exception if there is none.
    """

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = find
        self._lives: dict[str, ModuleWeights] = {}

    def find(self, model_id: str) -> Any:
        """Returns a model, by its name or path.

        Raises:
            KeyError: if there is no such model.
        """
        try:
            return self._find(model_id)
        except (AttributeError, KeyError, IndexError, ValueError):
            raise KeyError(
                f"there is no model {model_id!r}; there are 'policy', and paths in this collector"
            ) from None

    def live(self, model_id: str) -> ModuleWeights:
        """Returns the tensors of a model.

        Raises:
            KeyError: if there is no such model.
            TypeError: if it has no weights.
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
            Exception: the errors of :meth:`live` and
                :meth:`~trawl.weight_update.WeightSyncScheme.prepare`.
        """
        live, weights = self.live(model_id), weights_of(new)
        matched = live.layout.match(weights.tensors, type(live.module).__name__)
        check_extra_state(live.module, weights.extra)

        def load() -> None:
            # Extra state first: if the module refuses it, nothing else has changed.
            set_extra_state(live.module, weights.extra)
            live.load(matched)

        return load
