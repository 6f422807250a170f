"""State of a collector, from which another collector continues."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from trawl.checks import check_bool
from trawl.collectors.config import CollectorConfig, warn
from trawl.collectors.driver.background import BackgroundCollection
from trawl.collectors.driver.budget import FrameBudget
from trawl.collectors.driver.outbox import BatchOutbox
from trawl.collectors.driver.weights import CollectorWeights
from trawl.collectors.options import frame_options
from trawl.collectors.watch.watching import Watch
from trawl.errors import StateError
from trawl.rollout.normalization import Normalization

State: TypeAlias = Mapping[str, Any]
_MODES = ("raise", "new_episodes")
# Entries of a state with the statistics, and the version of the policy.
_NORMALIZATION, VERSION = "normalization", "policy_version"
# Entry of a state with options on which frames depend.
OPTIONS = "options"


class LoadOptions(NamedTuple):
    """Options with which a state is loaded.

    Attributes:
        strict: whether weights must fit exactly.
        trust: True to open pickled environments.
        raises: False to begin new episodes if the state of an environment can't be restored.
    """

    strict: bool
    trust: bool
    raises: bool


class CollectorState(ABC):
    """The part of a state that all collectors have, and the load of a state.

    A subclass implements :meth:`state_dict`, :meth:`_loader` and :meth:`_put_back`.

    Args:
        collector: the collector, to whose parts the object refers.

    Attributes:
        resumed: True if the episodes of the state that was loaded last go on.
    """

    # Errors of a load that are raised as they are.
    _known_errors: ClassVar[tuple[type[Exception], ...]] = (StateError,)

    def __init__(self, collector: Any) -> None:
        self.resumed = False
        self._config: CollectorConfig = collector.config
        self._options = frame_options(collector.config)
        self._background: BackgroundCollection = collector.parts.background
        self._budget: FrameBudget = collector.parts.budget
        self._outbox: BatchOutbox = collector.parts.outbox
        self._watch: Watch = collector.parts.watch
        self._weights: CollectorWeights = collector.parts.weights

    @property
    @abstractmethod
    def normalization(self) -> Normalization | None:
        """Statistics with which frames are normalised; None if they are not."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which this or another collector can continue."""

    @abstractmethod
    def _loader(self, state: State, how: LoadOptions, own: State | None) -> Callable[[], None]:
        """Checks a state, and returns a function that loads it.

        Args:
            state: the state.
            how: the options of the load.
            own: the present state; None if there is none.
        """

    @abstractmethod
    def _put_back(self, before: State | None) -> None:
        """Returns to the state before a load that failed."""

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        *,
        trust: bool = False,
        on_state_mismatch: Literal["raise", "new_episodes"] = "raise",
    ) -> None:
        """Restores a state that :meth:`state_dict` returned.

        A warning names those of the options that states have, such as ``max_frames_per_traj``, that
        have changed since the state was saved.

        Args:
            state_dict: the state.
            strict: whether to raise an error if the weights don't fit exactly.
            trust: True to open pickled environments, which can run any code. If False, only
                pickles that processes of this program made are opened.
            on_state_mismatch: reaction to the state of an environment that can't be restored.
                ``"raise"`` raises an error. ``"new_episodes"`` begins new episodes in all
                environments of the process, and warns.

        Raises:
            StateError: if an entry is missing, damaged or of another collector, or if the weights
                don't fit. This collector is as it was before.
            EnvStateError: if the state of an environment can't be restored. This collector is as it
                was before; where its own environments can't be captured, new episodes begin.
        """
        check_bool("trust", trust)
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"state_dict must be a mapping that state_dict() returned, but it is {state_dict!r}"
            )
        if on_state_mismatch not in _MODES:
            raise ValueError(
                f"on_state_mismatch must be one of {_MODES}, but it is {on_state_mismatch!r}"
            )
        with self._loading():
            before, resumed = self._present(), self.resumed
            how = LoadOptions(strict, trust, on_state_mismatch == "raise")
            load = self._loader(state_dict, how, before)
            try:
                load()
            except Exception as error:
                self._put_back(before)
                self.resumed = resumed
                if isinstance(error, self._known_errors):
                    raise
                raise StateError(
                    f"state_dict can't be loaded: {type(error).__name__}: {error}"
                ) from error
            self._warn_of_options(state_dict)

    def _loading(self) -> AbstractContextManager[Any]:
        """Returns a context in which a state can be loaded."""
        return self._background.held()

    def _present(self) -> dict[str, Any] | None:
        """Returns the present state; None if a step under way has failed."""
        try:
            return self.state_dict()
        except Exception:
            # The next batch raises the error of the step, unless a state is loaded.
            return None

    # --- entries of all collectors

    def _shared(self) -> dict[str, Any]:
        """Returns the entries that the states of all collectors have."""
        found = self._budget.state_dict() | self._outbox.state_dict() | self._watch.state_dict()
        found[OPTIONS] = dict(self._options)
        if self.normalization is not None:
            found[_NORMALIZATION] = self.normalization.state_dict()
        if self._weights.tracker is not None:
            found[VERSION] = self._weights.tracker.version
        return found

    def _warn_of_options(self, state: State) -> None:
        """Warns of options that were other ones when the state was saved."""
        saved, now = state.get(OPTIONS, {}), self._options
        changed = [
            f"{name}={saved[name]}, but this collector has {name}={now[name]}"
            for name in now
            if saved.get(name, now[name]) != now[name]
        ]
        if changed:
            warn(
                f"the state was saved with {', and with '.join(changed)}: the run goes on with the "
                "present options, so it doesn't continue bit for bit"
            )

    def _check_shared(self, state: State) -> None:
        """Checks that a state has the statistics that the collector needs.

        Raises:
            KeyError: if the state has no statistics.
            ValueError: if it has the statistics of other entries, or if the collector has none.
        """
        if self.normalization is None and _NORMALIZATION in state:
            raise ValueError(
                "state_dict has statistics for normalisation, but this collector has none: "
                "load it into a collector with the same normalize_observations and "
                "normalize_rewards"
            )
        if self.normalization is not None:
            if _NORMALIZATION not in state:
                raise KeyError(
                    f"state_dict has no {_NORMALIZATION!r}; it has {sorted(state)}: load it into "
                    "a collector without normalize_observations and normalize_rewards"
                )
            self.normalization.check_state(state[_NORMALIZATION])

    def _load_shared(self, state: State, order: int) -> None:
        """Loads the entries that the states of all collectors have, but the policy's version.

        Args:
            state: the state.
            order: see :meth:`BatchOutbox.load_state_dict`.
        """
        self._budget.load_state_dict(state)
        self._outbox.load_state_dict(state, order, self.resumed)
        self._watch.load_state_dict(state)
        if self.normalization is not None:
            self.normalization.load_state_dict(state[_NORMALIZATION])
