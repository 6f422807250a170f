"""Masks of the discrete actions that an environment allows at a step.

Masks follow Gymnasium's convention for ``Space.sample(mask)``: a mask is an array of ones and
zeros, with one entry for each choice. An environment provides its mask under ``"action_mask"``, in
a Dict observation or in ``info``, or by its method ``action_masks``. Random actions respect the
mask.

An action of several choices may have a mask of one of three shapes: the masks of all choices one
after the other; a row for each choice, if all have the same number of values; or a dimension for
each choice, with an entry for each combination of their values.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.envs.outcomes import reset_results, step_results
from trawl.envs.specs import Binary, Categorical, Composite, MultiCategorical, MultiOneHot
from trawl.keys import Key, as_key
from trawl.memory import Array

MASK_KEY = "action_mask"


def choices(spec: Any) -> list[int] | None:
    """Returns the number of values of each choice in an action.

    For a binary action, the list has one entry for each bit, like the action's mask. Returns None
    if actions of this spec can't have a mask.
    """
    if isinstance(spec, MultiOneHot):
        return list(spec.nvec)
    if isinstance(spec, Categorical):
        return [spec.n]
    if isinstance(spec, MultiCategorical):
        return [int(n) for n in spec.nvec.flatten()]
    return [1] * spec.shape[-1:].numel() if isinstance(spec, Binary) else None


def mask_dims(spec: Any, shape: Sequence[int]) -> int:
    """Returns how many of the last dimensions belong to the mask of one action.

    Args:
        spec: the action's spec.
        shape: shape of the mask, which may have dimensions for a batch in front.

    Returns:
        The number of dimensions; 0 if actions of this spec have no mask of this shape.
    """
    sizes = choices(spec)
    if not sizes or not shape:
        return 0
    found = (len(one) for one in mask_shapes(sizes) if tuple(shape[-len(one) :]) == one)
    return next(found, 0)


def is_joint(spec: Any, shape: Sequence[int]) -> bool:
    """Returns True if a mask has an entry for each combination of the values of several choices.

    Args:
        spec: the action's spec.
        shape: shape of the mask, which may have dimensions for a batch in front.
    """
    dims, sizes = mask_dims(spec, shape), choices(spec) or []
    return dims > 1 and (dims > 2 or shape[-2] != len(sizes) or len({*sizes}) > 1)


def fits(spec: Any, mask_shape: Sequence[int], batch: int) -> bool:
    """Returns True if a mask of this shape can belong to an action.

    Args:
        spec: the action's spec.
        mask_shape: shape of the mask, for all environments.
        batch: number of batch dimensions.
    """
    dims = mask_dims(spec, mask_shape)
    return dims > 0 and len(mask_shape) == batch + dims


def warn_unfit(spec: Any, mask_shape: Sequence[int]) -> None:
    """Warns that random actions ignore a mask, if the action could have one.

    Args:
        spec: the action's spec.
        mask_shape: shape of the mask.
    """
    sizes = choices(spec)
    if sizes is not None:
        _warn(
            f"the entry {MASK_KEY!r} of shape {tuple(mask_shape)}: a mask of an action with "
            f"{sizes} values has {sum(sizes)} entries, a row for each choice, or a dimension for "
            "each choice. If the entry is no mask, rename it"
        )


def mask_shapes(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields the shapes that the mask of an action may have.

    Args:
        sizes: the number of values of each choice, as :func:`choices` returns it.
    """
    yield (sum(sizes),)
    # The bits of a binary action have one entry each.
    if len(sizes) > 1 and max(sizes) > 1:
        # Two choices of two values each have a row for each choice.
        rows = [(len(sizes), sizes[0])] if len({*sizes}) == 1 else []
        yield from dict.fromkeys([*rows, tuple(sizes)])


def unfit_mask(sizes: Sequence[int], shape: Sequence[int]) -> ValueError:
    """Returns the error for an action mask in the info that has another shape than masks have."""
    allowed = " or ".join(map(str, mask_shapes(sizes)))
    return ValueError(
        f"the environment returned info[{MASK_KEY!r}] of shape {tuple(shape)}, but its action has "
        f"{sum(sizes)} choices: a mask must have the shape {allowed}"
    )


def warn_late(action: Any, info: Any, env: object) -> None:
    """Warns that random actions ignore the masks of the steps, as the reset returned no mask.

    Args:
        action: space of an action.
        info: info of a step: a dict, a list of dicts from ``DictInfoToList``, or None.
        env: the environment, for the message.
    """
    infos = info if isinstance(info, list) else [info or {}]
    if _is_maskable(action) and any(MASK_KEY in one for one in infos):
        _warn(
            f"info[{MASK_KEY!r}] of {env!r}: a step returns it, but the reset did not. Return a "
            "mask from both"
        )


def _warn(what: str) -> None:
    warnings.warn(f"random actions ignore {what}", UserWarning, stacklevel=3)


def masked_rand(spec: Any, mask: Tensor) -> Tensor:
    """Draws an action that a mask allows.

    Args:
        spec: the action's spec.
        mask: mask of a shape that :func:`fits`; values with a non-zero entry are allowed. If no
            value is allowed, the first one is drawn, as in Gymnasium. For a bit of a binary action,
            an entry of 0 or 1 allows only that value, and 2 allows both values.

    Returns:
        A tensor of the spec's shape and dtype.
    """
    sizes, dims = choices(spec) or [], mask_dims(spec, mask.shape)
    rows = mask.reshape(-1, mask.shape[-dims:].numel())
    if isinstance(spec, Binary):
        bits = torch.randint(0, 2, rows.shape, device=rows.device)
        drawn = torch.where(rows == 2, bits, rows)
        return drawn.reshape(spec.shape).to(spec.dtype).to(spec.device)
    indices = (
        _unraveled(_choose(rows), sizes)
        if is_joint(spec, mask.shape)
        else [_choose(part) for part in rows.split(sizes, -1)]
    )
    if isinstance(spec, MultiOneHot):
        pairs = zip(indices, sizes, strict=True)
        indices = [torch.nn.functional.one_hot(index[:, 0], n) for index, n in pairs]
    return torch.cat(indices, -1).reshape(spec.shape).to(spec.dtype).to(spec.device)


def _unraveled(index: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Returns the value of each choice from the index of a combination of values."""
    found = []
    for size in reversed(sizes):
        found.append(index % size)
        index = index // size
    return found[::-1]


def _choose(allowed: Tensor) -> Tensor:
    """Draws an allowed value for each row; returns the indices, of shape ``(rows, 1)``."""
    weights = (allowed != 0).to(torch.float64)
    weights[:, 0] += weights.sum(-1) == 0
    return torch.multinomial(weights, 1) if weights.device.type == "cpu" else _race(weights)


def _race(weights: Tensor) -> Tensor:
    """Draws an index for each row, as ``multinomial``, but without waiting for a GPU."""
    # A race of clocks, each with a weight as its rate.
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1, keepdim=True)


def rand_actions(
    specs: Composite, given: TensorDictBase | None, mask: Array | None = None
) -> TensorDict:
    """Draws random actions that the action masks allow.

    Args:
        specs: the specs of the actions.
        given: the environment's observations, or None. If they include a mask, it takes
            precedence over ``mask``.
        mask: the mask from ``info``, or None. It is the mask of the only action.

    Raises:
        ValueError: if ``mask`` has another shape than masks of the action.
    """
    drawn, keys = specs.rand(), list(specs.keys(True, True))
    if given is not None:
        found = observed_masks(specs, keys, lambda key: given.get(key, None), given.ndim)
        for key, shown in found.items():
            drawn.set(key, masked_rand(specs[key], given.get(shown)))
        if found:
            return drawn
    if mask is not None and len(keys) == 1 and is_mask(specs[keys[0]], mask.shape):
        drawn.set(keys[0], masked_rand(specs[keys[0]], torch.from_numpy(mask)))
    return drawn


def observed_masks(
    specs: Any, actions: Sequence[Any], shown: Callable[[Key], Any], batch: int
) -> dict[Any, Key]:
    """Returns the keys of the masks among observations, by the keys of the actions.

    The mask of an action is next to it, as in ``(group, "action_mask")``. The mask of the only
    action may also be at the root. A warning says that an entry of this name is no mask.

    Args:
        specs: the specs of the actions.
        actions: keys of the actions.
        shown: function that returns the newest observation with a key, or None.
        batch: number of batch dimensions of the observations.
    """
    found: dict[Any, Key] = {}
    for action in actions:
        key, spec = as_key(action), specs[action]
        places = dict.fromkeys(((*key[:-1], MASK_KEY), *[(MASK_KEY,)] * (len(actions) == 1)))
        place = next((one for one in places if isinstance(shown(one), Tensor)), None)
        if place is None:
            continue
        shape = shown(place).shape
        dims = mask_dims(spec, shape)
        # The masks of agents are flat; in front, they have a dimension for the agents.
        if dims == 1 if len(key) > 1 else dims and len(shape) == batch + dims:
            found[action] = place
        else:
            warn_unfit(spec, shape[batch:])
    return found


def is_mask(spec: Any, shape: Sequence[int]) -> bool:
    """Returns True if an entry of ``info`` is the mask of an action; False if it can have none.

    Args:
        spec: the action's spec.
        shape: shape of the entry, with one dimension for the environments.

    Raises:
        ValueError: if it has another shape than masks of the action.
    """
    if fits(spec, shape, 1):
        return True
    sizes = choices(spec)
    if sizes is not None:
        raise unfit_mask(sizes, shape[1:])
    return False


def mask_in(observed: Any, info: Mapping[str, Any]) -> Any:
    """Returns the mask in an agent's observation or, if there is none, in its info."""
    shown = observed.get(MASK_KEY) if isinstance(observed, Mapping) else None
    return info.get(MASK_KEY) if shown is None else shown


def flat_mask(mask: Any) -> Array:
    """Returns a mask as one array; joins the tuple of arrays of a ``MultiDiscrete`` space."""
    if isinstance(mask, (tuple, list)):
        return np.concatenate([np.atleast_1d(np.asarray(part)) for part in mask])
    return np.array(mask)


def joined_masks(masks: Sequence[Array | None]) -> Array | None:
    """Returns the action masks of several batches of environments, one batch after the other.

    Args:
        masks: masks of each batch, with a row for each environment; None allows every action.

    Returns:
        The masks; None if no batch has masks.

    Raises:
        ValueError: if the shapes of the masks differ.
    """
    found = {mask.shape: mask for mask in masks if mask is not None}
    if not found:
        return None
    if len(found) > 1:
        raise differing_masks([shape[1:] for shape in found])
    ((shape, like),) = found.items()
    free = np.full(shape, 2, like.dtype)
    return np.concatenate([free if mask is None else mask for mask in masks])


def differing_masks(shapes: Sequence[Sequence[int]]) -> ValueError:
    """Returns the error for environments whose masks have different shapes."""
    shown = " and ".join(str(tuple(shape)) for shape in shapes)
    return ValueError(
        f"the environments returned info[{MASK_KEY!r}] of the shapes {shown}: return masks of the "
        "same shape from all environments"
    )


def newest_masks(
    masks: Array | None, info: Any, count: int | None = None, ids: Any = None
) -> Array | None:
    """Returns the newest action mask of each row of a vector environment.

    Args:
        masks: the previous masks, with a row for each environment; None if there are none yet.
        info: the info of a step or a reset: a dict, or a list of dicts from ``DictInfoToList``. In
            a dict, ``"_action_mask"`` marks the rows that have a mask; without this entry, all rows
            have one.
        count: number of environments; None if the info has a row for each.
        ids: numbers of the environments that the info is of; None for all.
    """
    if not info:
        return masks
    if isinstance(info, dict):
        shown = info.get(MASK_KEY, ())
        present = info.get(f"_{MASK_KEY}")
        rows = np.arange(len(shown)) if present is None else np.flatnonzero(present)
    else:
        shown = [one.get(MASK_KEY) for one in info]
        rows = np.array([row for row, mask in enumerate(shown) if mask is not None], int)
    if not len(rows):
        return masks
    found = np.stack([flat_mask(shown[row]) for row in rows])
    # A row without a mask allows every choice. For bits, only the value 2 allows both values.
    if masks is None:
        masks = np.full((count or len(shown), *found.shape[1:]), 2, found.dtype)
    masks[rows if ids is None else ids[rows]] = found
    return masks


def allowed_sample(space: Any, masks: Array | None) -> Any:
    """Draws a random action of a space, or of a batch of spaces, which follows masks if it can.

    Args:
        space: the space.
        masks: masks with a row for each environment, or None.
    """
    if masks is None:
        return space.sample()
    flat = np.asarray(masks != 0, np.int8).ravel()
    if isinstance(space, spaces.Discrete) and len(flat) == space.n:
        return space.sample(flat)
    if isinstance(space, spaces.MultiDiscrete) and len(flat) == space.nvec.sum():
        # The choices of one environment, or one choice of each environment.
        return space.sample(tuple(np.split(flat, np.cumsum(space.nvec.ravel())[:-1])))
    return space.sample()


class MaskKeeper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that keeps the newest action mask from ``info``.

    Attributes:
        mask: the newest mask.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], mask: Array) -> None:
        super().__init__(env)
        self.mask = mask

    @override
    def reset(self, **kwargs: Any) -> Any:
        obs, info = self.env.reset(**kwargs)
        if MASK_KEY not in info:
            raise KeyError(
                f"a reset of {self.env} returned no info[{MASK_KEY!r}], although an earlier "
                f"reset did; the info has {sorted(info)}"
            )
        self.mask = flat_mask(info[MASK_KEY])
        return obs, info

    @override
    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        # The last step of an episode may have no mask, because the next reset returns a new one.
        shown = result[4].get(MASK_KEY)
        if shown is not None:
            self.mask = flat_mask(shown)
        return result


class MaskMethod:
    """Action masks from the method ``action_masks`` that environments for sb3-contrib have.

    The method is called whenever a mask is needed, which is only the case for random actions.

    Args:
        call: function that returns the mask of each environment.
        space: space of the action of one environment.
    """

    def __init__(self, call: Callable[[], Iterable[Any]], space: gymnasium.Space[Any]) -> None:
        self._call, self._space = call, space

    @property
    def masks(self) -> Array:
        """The newest masks, with a row for each environment."""
        return np.stack([self._converted(flat_mask(one)) for one in self._call()])

    def _converted(self, mask: Array) -> Array:
        if isinstance(self._space, spaces.MultiBinary) and mask.size == 2 * math.prod(
            self._space.shape
        ):
            # There, each bit has an entry for each of its values.
            pairs = mask.reshape(-1, 2) != 0
            return np.where(pairs.all(-1), 2, pairs[:, 1]).astype(np.int8)
        return mask

    def fits(self, spec: Any) -> bool:
        """Returns True if the masks can belong to an action; warns if not.

        Args:
            spec: the action's spec.
        """
        shape = self.masks.shape
        if fits(spec, shape, 1):
            return True
        _warn(
            f"action_masks() of the environment, which returns a mask of shape {shape[1:]}: a mask "
            f"of its action has {sum(choices(spec) or [])} entries. If the method returns no "
            "masks, rename it"
        )
        return False


def mask_method(env: Any, space: gymnasium.Space[Any], spec: Any) -> MaskMethod | None:
    """Returns the masks from an environment's method ``action_masks``; None if it has none.

    Args:
        env: an environment that was reset. It may be a vector environment.
        space: space of the action of one environment.
        spec: the action's spec.
    """
    inner = getattr(env, "unwrapped", env)
    # A single environment may have an attribute of this name.
    single = isinstance(env, gymnasium.Env) or not hasattr(env, "num_envs")
    call = method = masking_method(env, space)
    several = _is_maskable(space) and isinstance(inner, (SyncVectorEnv, AsyncVectorEnv))
    if method is None and several and all(inner.call("has_wrapper_attr", _METHOD)):
        call = partial(inner.call, _METHOD)
    elif method is not None and single:
        call = lambda: [method()]  # noqa: E731
    found = None if call is None else MaskMethod(call, space)
    return found if found is not None and found.fits(spec) else None


def masking_method(env: Any, space: gymnasium.Space[Any]) -> Callable[[], Any] | None:
    """Returns the method ``action_masks`` of an environment or its wrappers; None if it has none.

    Args:
        env: an environment, single or vector.
        space: space of the action of one environment.
    """
    if not _is_maskable(space):
        return None
    single = isinstance(env, gymnasium.Env)
    try:
        method = env.get_wrapper_attr(_METHOD) if single else getattr(env, _METHOD)
    except AttributeError:
        return None
    return method if _needs_no_arguments(method) else None


def _is_maskable(space: object) -> bool:
    return isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))


_METHOD = "action_masks"


def _needs_no_arguments(method: Any) -> bool:
    try:
        inspect.signature(method).bind()
    except (TypeError, ValueError):
        return False
    return True


class ObserveActionMask(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that adds ``info["action_mask"]`` to the observation, so that a policy can read it.

    The observation becomes a Dict with ``"action_mask"`` (int8) and the entries of the
    environment's Dict observation. An observation that is not a Dict is stored under
    ``"observation"``.

    Args:
        env: an environment with a ``Discrete`` or ``MultiDiscrete`` action space. The masks of a
            ``MultiDiscrete`` space are concatenated.

    Raises:
        TypeError: if the action space is of another type.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        acted, observed = env.action_space, env.observation_space
        if isinstance(acted, spaces.Discrete):
            self._count = int(acted.n)
        elif isinstance(acted, spaces.MultiDiscrete):
            self._count = int(np.sum(acted.nvec))
        else:
            raise TypeError(
                "ObserveActionMask needs a Discrete or MultiDiscrete action space, but the "
                f"action space of {env} is {acted}"
            )
        self._nested = isinstance(observed, spaces.Dict)
        entries = (
            dict(observed.spaces)
            if isinstance(observed, spaces.Dict)
            else {"observation": observed}
        )
        entries[MASK_KEY] = spaces.MultiBinary(self._count)
        self.observation_space = spaces.Dict(entries)

    @override
    def reset(self, **kwargs: Any) -> Any:
        obs, info = reset_results(self.env.reset(**kwargs), self.env)
        return self._with_mask(obs, info), info

    @override
    def step(self, action: Any) -> Any:
        found = step_results(self.env.step(action), self.env)
        obs, reward, terminated, truncated, info = found
        if (terminated or truncated) and MASK_KEY not in info:
            # No action follows, so the value doesn't matter.
            info = {**info, MASK_KEY: np.ones(self._count, dtype=np.int8)}
        return self._with_mask(obs, info), reward, terminated, truncated, info

    def _with_mask(self, obs: Any, info: dict[str, Any]) -> dict[str, Any]:
        if MASK_KEY not in info:
            raise KeyError(
                f"{self.env} returned no info[{MASK_KEY!r}], which ObserveActionMask needs; the "
                f"info has {sorted(info)}"
            )
        mask = (flat_mask(info[MASK_KEY]) != 0).astype(np.int8)
        if mask.shape != (self._count,):
            raise ValueError(
                f"{self.env} returned info[{MASK_KEY!r}] of shape {mask.shape}, but its action "
                f"space has {self._count} choices"
            )
        return {**(obs if self._nested else {"observation": obs}), MASK_KEY: mask}


class FirstMaskCheck:
    """Check that the reset returned a mask if the first step of an environment returns one."""

    def __init__(self) -> None:
        self.done = False

    def watched(self, env: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a step function that warns if random actions will ignore the masks.

        Args:
            env: a :class:`~trawl.envs.GymEnv` of a single environment.
            step: the step function of its simulator, which is returned unchanged after the first
                step.
        """
        self.done = self.done or env.action_mask() is not None
        if self.done:
            return step

        def step_first(action: Any) -> Any:
            found = step(action)
            if not self.done:
                self.done = True
                # The caller raises an error for anything else.
                if isinstance(found, (tuple, list)) and len(found) == 5:
                    warn_late(env.action_codec.space, found[4], env.env)
            return found

        return step_first
