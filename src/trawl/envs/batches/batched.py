"""Base class of environments that are batches of other environments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.envs.attributes import (
    Application,
    call_named,
    check_method,
    check_name,
    chosen,
    get_named,
    set_named,
    values_of,
)
from trawl.envs.base import TensorDictEnv
from trawl.envs.seeding import check_seed
from trawl.envs.specs import Composite
from trawl.envs.types import is_list
from trawl.keys import as_key, show_key


class BatchedEnv(TensorDictEnv):
    """Batch of environments with equal specs.

    A subclass sets ``device``, and calls :meth:`_set_members` in its constructor.

    Attributes:
        members: the environments; if they are in other processes, their descriptions.
    """

    members: Sequence[Any]

    def _set_members(self, members: Sequence[Any]) -> None:
        """Sets the members, and the batch size and specs of the whole batch.

        Raises:
            ValueError: if a member differs from the first one; the message names the entry that
                differs.
        """
        self.members = members
        first = members[0]
        for index, member in enumerate(members[1:], 1):
            found = _difference(first, member)
            if found is not None:
                what, expected, got = found
                raise ValueError(
                    f"environments in one batch must be alike, but environment {index} has {what} "
                    f"{got}, and environment 0 has {expected}"
                )
        self.batch_size = torch.Size([len(members), *first.batch_size])
        place = self.device or "cpu"
        self.full_observation_spec = self._of_all(first.full_observation_spec).to(place)
        self.full_action_spec = self._of_all(first.full_action_spec).to(place)
        # Agents have rewards and flags of their own.
        self._reward_spec = self._of_all(first.full_reward_spec)
        self._done_spec = self._of_all(first.full_done_spec)

    def _of_all(self, spec: Any) -> Any:
        """Returns the specs of all members, made from those of one."""
        if isinstance(spec, Composite):
            return spec.expand(len(self.members))
        # Specs of other libraries take the whole shape.
        return spec.expand(len(self.members), *spec.shape)

    @property
    def name(self) -> str:
        """Names of the environments, without repetitions."""
        names = (getattr(member, "name", repr(member)) for member in self.members)
        return " ".join(dict.fromkeys(names))

    @property
    @override
    def fixed_layout(self) -> bool:
        """True if all actions and observations have a fixed shape and dtype."""
        return all(getattr(member, "fixed_layout", False) for member in self.members)

    @property
    def action_spec_unbatched(self) -> Any:
        """Action spec of a single environment in the batch."""
        return self.members[0].action_spec_unbatched

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the next reset of each environment.

        Args:
            seed: seed of the first environment. Each further environment gets a seed derived from
                the previous environment's seed.
            static_seed: True to give the same seed to all environments.

        Returns:
            The seed for another environment; if ``static_seed``, the same seed.
        """
        seed = check_seed(seed)
        for index in range(len(self.members)):
            seed = self._seed_member(index, seed, static_seed)
        return seed

    @abstractmethod
    def _seed_member(self, index: int, seed: int, static_seed: bool) -> int:
        """Seeds one environment, and returns the seed for the next one."""

    # --- attributes of the environments

    def call(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of each environment, or reads an attribute that can't be called.

        The environments' next resets and steps see what the method has changed. An environment
        that is made anew after a failure is as its function makes it.

        Args:
            name: name of a method of the environment, or of a wrapper around it; also a path, such
                as ``"opponent.eval"``.
            *args: positional arguments of the method.
            indices: numbers of the environments, as an integer or a sequence of integers; None for
                all.
            **kwargs: keyword arguments of the method.

        Returns:
            The results, in the order of ``indices``. What comes from another process is a copy.

        Raises:
            AttributeError: if an environment has no such attribute.
            IndexError: if there is no environment with one of the numbers.
            TypeError: if the arguments or the results can't be sent between processes.
            ValueError: if there are arguments, but the attribute can't be called, or if the method
                is ``reset``, ``step`` or ``close``.

        Examples:
            >>> from trawl.envs import SerialEnv
            >>> env = SerialEnv(2, "CartPole-v1")
            >>> env.set_attr("gravity", [9.8, 1.6])
            >>> env.get_attr("gravity")
            (9.8, 1.6)
            >>> env.call("get_wrapper_attr", "gravity", indices=1)
            (1.6,)
            >>> env.close()
        """
        numbers, name = chosen(indices, len(self.members)), check_method(name)
        found = self._apply(dict.fromkeys(numbers, (call_named, name, args, kwargs)))
        return tuple(found[index] for index in numbers)

    def get_attr(self, name: str, indices: Any = None) -> tuple[Any, ...]:
        """Returns an attribute of each environment, without calling it.

        Args:
            name: name of an attribute of the environment, or of a wrapper around it; also a path.
            indices: numbers of the environments; None for all.

        Raises:
            AttributeError: if an environment has no such attribute.
            IndexError: if there is no environment with one of the numbers.
            TypeError: if the attribute can't be sent from another process.
        """
        numbers, name = chosen(indices, len(self.members)), check_name(name)
        found = self._apply(dict.fromkeys(numbers, (get_named, name)))
        return tuple(found[index] for index in numbers)

    def set_attr(self, name: str, values: Any, indices: Any = None) -> None:
        """Sets an attribute of each environment.

        Args:
            name: name of an attribute that the environment, or a wrapper around it, has already;
                also a path.
            values: a list or tuple with one value for each environment, or one value for all.
            indices: numbers of the environments; None for all.

        Raises:
            AttributeError: if an environment has no such attribute.
            IndexError: if there is no environment with one of the numbers.
            ValueError: if a list does not have exactly one value for each environment.
        """
        numbers, name = chosen(indices, len(self.members)), check_name(name)
        each = zip(numbers, values_of(values, len(numbers)), strict=True)
        self._apply({index: (set_named, name, value) for index, value in each})

    @abstractmethod
    def _apply(self, calls: Mapping[int, Application]) -> dict[int, Any]:
        """Calls functions with some of the environments, and returns the results by number."""

    def _join(self, rows: Sequence[TensorDictBase], keys: Sequence[Any]) -> TensorDict:
        chosen = [row.select(*keys, strict=False) for row in rows]
        result: TensorDict = TensorDict.maybe_dense_stack(chosen, 0)
        return result

    def _join_resets(self, rows: Sequence[TensorDictBase]) -> TensorDict:
        """Stacks what resets returned; frames of zeros may stand for environments without one."""
        specs = self.full_observation_spec, self.full_done_spec
        return self._join(rows, [key for spec in specs for key in spec.keys(True, True)])

    def _join_masks(self, masks: Sequence[Tensor | None]) -> Tensor:
        """Stacks the autoreset masks of the environments; None counts as a mask without resets."""
        nothing = torch.zeros(self.batch_size[1:], dtype=torch.bool)
        return torch.stack([nothing if mask is None else mask for mask in masks])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.members)} x {self.members[0]!r})"


def factories_of(count: int, create: Any) -> list[Any]:
    """Returns the source of each of ``count`` environments; ``create`` is one source or a list."""
    if isinstance(count, bool) or not isinstance(count, int):
        order = ": the number of environments comes first, and what makes them second"
        hint = order if isinstance(create, int) else ""
        raise TypeError(f"num_workers must be an integer, but it is {count!r}{hint}")
    if count < 1:
        raise ValueError(f"num_workers must be positive, but it is {count}")
    if is_list(create):
        if len(create) != count:
            raise ValueError(f"create_env_fn has {len(create)} entries, but num_workers is {count}")
        return list(create)
    return [create] * count


def check_env_kwargs(name: str, value: Any) -> Any:
    """Returns the value, which must be None, a mapping, or a list of mappings and Nones."""
    for one in value if is_list(value) else [value]:
        if one is not None and not isinstance(one, Mapping):
            raise TypeError(
                f"{name} must be a mapping of keyword arguments, or a list of mappings, but got "
                f"{type(one).__name__}: {one!r}"
            )
    return value


def arguments_of(count: int, kwargs: Any, counted: str = "num_workers is") -> list[Any]:
    """Returns the keyword arguments for each environment.

    Args:
        count: number of environments.
        kwargs: the user's ``create_env_kwargs``.
        counted: text before the number of environments in the error message.

    Raises:
        TypeError: if ``kwargs`` are neither a mapping nor a list of mappings.
        ValueError: if a list does not have exactly one entry for each environment.
    """
    check_env_kwargs("create_env_kwargs", kwargs)
    if not is_list(kwargs):
        return [kwargs or {}] * count
    if len(kwargs) != count:
        raise ValueError(f"create_env_kwargs has {len(kwargs)} entries, but {counted} {count}")
    return list(kwargs)


def _difference(one: Any, other: Any) -> tuple[str, str, str] | None:
    """Returns the first difference between two environments; None if there is none.

    The difference consists of texts: what differs, and both values.
    """
    if one.batch_size != other.batch_size:
        return "batch_size", str(tuple(one.batch_size)), str(tuple(other.batch_size))
    for what in ("observation", "action", "reward", "done"):
        specs = [getattr(env, f"full_{what}_spec") for env in (one, other)]
        if specs[0] != specs[1]:
            leaves = [{as_key(key): leaf for key, leaf in spec.items(True, True)} for spec in specs]
            for key in sorted({*leaves[0], *leaves[1]}):
                mine, its = (found.get(key) for found in leaves)
                if mine != its:
                    texts = ["none" if leaf is None else repr(leaf) for leaf in (mine, its)]
                    return f"{what} {show_key(key)}:", texts[0], texts[1]
            return f"full_{what}_spec", repr(specs[0]), repr(specs[1])
    return None
