"""Transforms that a collector needs on a TorchRL environment, which stays as it is.

This module is imported only if the environment is one of TorchRL.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torchrl.envs import Compose, InitTracker, StepCounter, TransformedEnv
from typing_extensions import override

from trawl.collectors.torchrl import names
from trawl.keys import STEP_COUNT


class AddedTransforms(Compose):  # type: ignore[misc]
    """Transforms around an environment that may have transforms of its own.

    Only the added transforms run here. As a sequence, and in a state dict, the transforms of the
    inner environment come first, as if the others had been appended to them.

    Args:
        inner: the environment; it is not changed.
        *added: the transforms.
    """

    def __init__(self, inner: Any, *added: Any) -> None:
        super().__init__(*added)
        # Not a submodule: the environment around this sequence has it as one.
        self.__dict__["inner"] = inner

    def _all(self) -> list[Any]:
        inner = self.inner
        if not isinstance(inner, TransformedEnv):
            return list(self.transforms)
        own = inner.transform
        return [*(own if isinstance(own, Compose) else [own]), *self.transforms]

    def __getitem__(self, item: Any) -> Any:
        return self._all()[item]

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all())

    def _joined(self) -> nn.Module:
        joined = nn.Module()
        joined.transforms = nn.ModuleList(self._all())
        return joined

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state of all transforms, including those of the inner environment."""
        return self._joined().state_dict(*args, **kwargs)

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads a state that :meth:`state_dict` returned."""
        return self._joined().load_state_dict(*args, **kwargs)


def add_transforms(env: Any, limit: int | None, marks: bool, policy: Any) -> Any:
    """Returns an environment that counts steps, marks starts, and adds recurrent states.

    The environment that is passed is not changed: the transforms belong to one around it.

    Args:
        env: an environment of TorchRL.
        limit: number of steps after which an episode is truncated, or None. If the environment
            counts steps itself, they are counted a second time, under a name of its own.
        marks: whether to mark frames that begin an episode, and to provide the initial states of
            the policy's recurrent modules. Entries that the environment already has are kept.
        policy: the policy.
    """
    present = names(env.full_observation_spec)
    transforms: list[Any] = []
    if limit is not None:
        key = STEP_COUNT[0] if STEP_COUNT[0] not in present else f"collector_{STEP_COUNT[0]}"
        transforms.append(StepCounter(max_steps=limit, step_count_key=key))
    if marks:
        transforms += [] if "is_init" in present else [InitTracker()]
        known = {*env.full_observation_spec.keys(True, True), *env.full_state_spec.keys(True, True)}
        transforms += [
            primer for primer in _primers(policy) if set(primer.primers.keys(True, True)) - known
        ]
    if not transforms:
        return env
    return TransformedEnv(env, AddedTransforms(env, *transforms), auto_unwrap=False)


def _primers(policy: Any) -> Iterator[Any]:
    """Yields transforms that provide the initial state of the policy's recurrent modules."""
    for module in policy.modules() if isinstance(policy, nn.Module) else ():
        make: Any = getattr(module, "make_tensordict_primer", None)
        if make is not None:
            yield make()
