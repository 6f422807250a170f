"""Interface between batched environments whose data are tensors and the loop that steps them.

An environment of another library is adapted by a subclass of :class:`TensorEnv`. The batch writer
for tensors calls four methods, and knows nothing else about the environment:

1. :meth:`TensorEnv.begin` begins episodes and returns observations.
2. :meth:`TensorEnv.advance` takes a step. Where an episode ends, its result has the true last
   observation.
3. :meth:`TensorEnv.begin_next` returns the observations that the next step begins with.
4. :meth:`TensorEnv.check` raises errors that could not be raised during the steps.

None of them except the last waits for the device, unless the environment does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from trawl.envs.base import TensorDictEnv
from trawl.envs.capture.objects import ObjectGraph
from trawl.envs.entries.infos import rows_of
from trawl.envs.seeding import check_seed, next_seed, rebuilt_seed
from trawl.errors import EnvStateError
from trawl.keys import Key


class TensorStep(NamedTuple):
    """Results of a step, each with a row for each environment.

    Attributes:
        last: the observation leaves that the step returned.
        final: leaves with the true last observations of the episodes that the step ended; other
            rows may have any values. None if ``last`` has them.
        rewards: the reward leaves, each with the shape that its spec has.
        terminated: bool, ``(num_envs,)``.
        truncated: bool, ``(num_envs,)``.
        skipped: True where the step was only a reset, ``(num_envs,)``; None if no step ever is.
    """

    last: list[Tensor]
    final: list[Tensor] | None
    rewards: list[Tensor]
    terminated: Tensor
    truncated: Tensor
    skipped: Tensor | None

    def observations(self) -> list[Tensor]:
        """Returns the leaves with the true last observation where an episode ended."""
        if self.final is None:
            return self.last
        ended = self.terminated | self.truncated
        pairs = zip(self.final, self.last, strict=True)
        return [rows_of(ended, final, last) for final, last in pairs]


class TensorEnv(TensorDictEnv):
    """Base class of batches of environments whose data are tensors on one device.

    A subclass sets the attributes of :class:`~trawl.envs.base.TensorDictEnv` and those below. All
    leaves have the order of ``observation_keys``, ``reward_keys`` or ``action_keys``.

    Attributes:
        home: device of all tensors.
        observation_keys: keys of the observation leaves.
        can_restart: True if :meth:`begin_next` can begin an episode in any environment.
        skips: True if some steps are only resets.
        agents: number of agents by the key of their group, if there are groups of agents. The
            entries of a group have a dimension for its agents after those of the batch.
        env: the environment of the other library.
        shown_mask: newest action masks in the info, with a row for each environment; None if there
            are none.
        state_names: names of the attributes of the subclass that belong to its state, together with
            the state of ``simulator``; None if the state can't be captured.
    """

    env: Any
    shown_mask: Tensor | None = None
    state_names: Sequence[str] | None = None

    home: torch.device
    observation_keys: list[Key]
    can_restart: bool = False
    skips: bool = False
    agents: Mapping[str, int] = MappingProxyType({})
    _seed: int | None = None
    # The seed that was set last, and the number of rebuilds since.
    _given_seed: int | None = None
    _rebuilds: int = 0
    _last: TensorStep | None = None
    # True where the last step was only a reset; resets that follow it leave this unchanged.
    _skipped: Tensor | None = None

    @property
    def answers_at_once(self) -> bool:
        """True on the CPU. On a GPU, code that reads a value of a tensor waits for the device."""
        return self.home.type == "cpu"

    @abstractmethod
    def begin(self, mask: Tensor | None, **kwargs: Any) -> list[Tensor]:
        """Begins episodes in all environments, or where ``mask`` is True.

        Returns:
            The observations of all environments.
        """

    @abstractmethod
    def advance(self, actions: Iterable[Tensor]) -> TensorStep:
        """Takes a step with the leaves of the action."""

    @abstractmethod
    def begin_next(self, ended: Tensor, cut: Tensor | None = None) -> list[Tensor]:
        """Returns the observations that the next step begins with.

        The result may be the list ``last`` of the last step itself. The observations are then the
        same as those after the step.

        Args:
            ended: True where the last step ended an episode.
            cut: True where an episode that has not ended is cut off, which needs ``can_restart``;
                None if none is.
        """

    def _refuse_options(self, library: str, kwargs: Mapping[str, Any]) -> None:
        """Raises a ``ValueError`` if a reset of a library's environment is given options."""
        if kwargs.get("options") is not None:
            raise ValueError(
                f"environments of {library} take no options for a reset, but options is "
                f"{kwargs['options']!r}: leave it out"
            )

    def check(self) -> None:
        """Raises errors of the steps since the last call; called once per batch."""

    # --- the interface of TensorDicts

    def _observations(self, leaves: Iterable[Tensor]) -> TensorDict:
        result = TensorDict({}, self.batch_size)
        for key, value in zip(self.observation_keys, leaves, strict=True):
            # A copy, because an environment may reuse the memory of its observations.
            result.set(key, value.to(self.full_observation_spec[key].dtype, copy=True))
        return result

    @override
    def _reset(self, mask: Tensor | None, **kwargs: Any) -> TensorDict:
        last, self._last = self._last, None
        if mask is None or (mask.all() and (kwargs or self._seed is not None)):
            return self._observations(self.begin(None, **kwargs))
        mask = mask.to(self.home)
        if last is None:
            return self._observations(self.begin(mask, **kwargs))
        ended = last.terminated | last.truncated
        more = mask & ~ended
        return self._observations(self.begin_next(ended & mask, more if more.any() else None))

    @override
    def _as_given(self, action: Any) -> Any:
        return action.detach().to(self.home)

    @override
    def _after(self, actions: list[Tensor]) -> TensorDict:
        self._last = step = self.advance(actions)
        self._skipped = step.skipped
        self.check()
        following = self._observations(step.observations())
        shape = (*self.batch_size, 1)
        for key, value in zip(self.reward_keys, step.rewards, strict=True):
            following.set(key, value.to(torch.float32, copy=True))
        for name in ("terminated", "truncated"):
            following.set(name, getattr(step, name).to(torch.bool, copy=True).reshape(shape))
        return following.set("done", following.get("terminated") | following.get("truncated"))

    @override
    def newest_mask(self) -> Tensor | None:
        return self.shown_mask

    @override
    def action_mask(self) -> NDArray[Any] | None:
        mask = self.newest_mask()
        return None if mask is None else mask.cpu().numpy()

    @override
    def autoreset_mask(self) -> Tensor | None:
        if not self.skips:
            return None
        if self._skipped is None:
            return torch.zeros(self.batch_size, dtype=torch.bool, device=self.home)
        return self._skipped

    @override
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the next reset, from which the environment derives the seeds of its parts."""
        self._seed = self._given_seed = seed = check_seed(seed)
        self._rebuilds = 0
        for _ in range(self.batch_size.numel()):
            seed = next_seed(seed, static_seed)
        return seed

    @override
    def to(self, device: torch.device | str) -> TensorDictEnv:
        """Sets the device of the TensorDicts, which must be that of the environment's data.

        Raises:
            ValueError: if the environment's data are on another device.
        """
        wanted = torch.device(device)
        if wanted.type != self.home.type or wanted.index not in (None, self.home.index):
            raise ValueError(
                f"device={str(device)!r}: the data of {self!r} are on {self.home}, and can't be "
                "moved. Make the environment on that device, or pass storing_device or "
                "policy_device to the collector"
            )
        self.device = self.home
        self.full_observation_spec = self.full_observation_spec.to(self.home)
        self.full_action_spec = self.full_action_spec.to(self.home)
        return self

    @override
    def rebuild(self) -> None:
        """Closes the environment, ignoring errors, and makes a new one in the same way.

        If the environment was seeded, its next reset has a seed derived from that seed and the
        number of rebuilds.

        Raises:
            RuntimeError: if the environment was passed as an object.
            ValueError: if the new one has other specs, or is the same object as before.
        """
        fresh = self._made_again(type(self), self.close)
        seed, count = self._given_seed, self._rebuilds + 1
        own = {"remake": self.remake, "_given_seed": seed, "_rebuilds": count, "is_closed": False}
        vars(self).update({**vars(fresh), **own})
        self._seed = None if seed is None else rebuilt_seed(seed, count)
        self._last = self._skipped = None

    # --- the state of the environment

    @property
    def simulator(self) -> Any:
        """Object that is captured with all objects in it; None if ``state_names`` has everything.

        See :mod:`trawl.envs.capture.objects`.
        """
        return self.env

    @property
    def _graph(self) -> ObjectGraph:
        if self.state_names is None:
            raise EnvStateError(f"the state of {self!r} can't be captured")
        names = ("_seed", "_given_seed", "_rebuilds", *self.state_names)
        return ObjectGraph(self.simulator, self, names)

    @property
    @override
    def state_methods(self) -> list[str]:
        way = "none" if self.state_names is None else self._graph.way
        return [way] * self.batch_size.numel()

    @override
    def capture(self) -> dict[str, Any]:
        return self._graph.capture()

    @override
    def check_state(self, state: Mapping[str, Any]) -> None:
        self._graph.check(state)

    @override
    def restore(self, state: Mapping[str, Any], trust: bool = False) -> None:
        self._last = self._skipped = None
        self._graph.restore(state)

    @property
    @override
    def cannot_restart(self) -> list[str]:
        return [] if self.can_restart else [type(self.env).__name__]

    def __repr__(self) -> str:
        size = list(self.batch_size)
        return f"{type(self).__name__}({self.name}, batch_size={size}, device={self.home})"
