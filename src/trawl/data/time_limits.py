"""Rewards that include the value after a time limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor, nn

from trawl.checks import check_bool
from trawl.data.trajectories import leaves_named
from trawl.errors import add_note
from trawl.keys import MASK, Key, as_key, given_key, show_key
from trawl.tensordicts import broadcastable, of_frames

_VALUE = "state_value"
_TERMINATED, _TRUNCATED = "terminated", "truncated"
_WRAP = (
    "A module that takes tensors needs a TensorDictModule around it, such as "
    "TensorDictModule(network, ['observation'], ['state_value'])"
)


class _Reward(NamedTuple):
    """A reward, and the steps that a time limit made the last ones of their episodes.

    Attributes:
        key: key of the reward, under ``"next"``.
        terminated: key of the flag ``terminated`` that belongs to it, under ``"next"``.
        cut: True where an episode was truncated and not terminated, in the reward's shape.
    """

    key: Key
    terminated: Key
    cut: Tensor


def bootstrap_time_limits(
    batch: TensorDictBase,
    value_network: Callable[[TensorDictBase], Any],
    gamma: float = 0.99,
    *,
    value_key: Any = _VALUE,
    set_terminated: bool = False,
) -> TensorDictBase:
    """Adds the value of the last observation to the reward where a time limit ends an episode.

    If a time limit ends an episode, the state after the last step has a value, although no reward
    follows. If a step is truncated and not terminated, its reward becomes
    ``reward + gamma * value``. A learner can then treat each end of an episode (``"done"``) as
    final. The value network is called with these steps only.

    Estimators that read ``"terminated"``, such as TorchRL's ``GAE``, add the value themselves. For
    these estimators, don't use this function, or pass ``set_terminated=True``. Otherwise, they add
    the value a second time.

    Args:
        batch: frames of any batch size, with the last observations under ``"next"``; the batch is
            not modified. If agents have their own rewards, the flags and the values of a reward are
            those of its group or, if the group has none, those at the root.
        value_network: a TensorDict module, or a function of a TensorDict. It gets the entries under
            ``"next"``, of batch size ``(steps,)``, and returns a TensorDict with the values, or
            the values themselves. They must have the shape of the rewards.
        gamma: discount of the value, from 0 to 1.
        value_key: key of the values, or their name in the group of each reward.
        set_terminated: True to mark the steps as terminated as well.

    Returns:
        A batch with the new rewards; all other entries are those of ``batch``.

    Raises:
        TypeError: if ``gamma`` is not a number, or if the value network takes tensors instead of a
            TensorDict, or returns neither a TensorDict nor a tensor.
        ValueError: if ``gamma`` is out of range, or the values don't have the shape of the rewards.
        KeyError: if the batch has no reward or no flag ``"truncated"``, or an entry that the value
            network needs is missing.

    Examples:
        >>> import torch
        >>> from trawl.collectors import Collector
        >>> from trawl.data import bootstrap_time_limits
        >>> with Collector("Pendulum-v1", frames_per_batch=8, max_frames_per_traj=4) as collector:
        ...     batch = collector.next()
        >>> def value(steps):
        ...     return torch.full((len(steps), 1), 100.0)
        >>> found = bootstrap_time_limits(batch, value, gamma=0.9)
        >>> (found["next", "reward"] - batch["next", "reward"]).flatten().round()
        tensor([ 0.,  0.,  0., 90.,  0.,  0.,  0., 90.])
    """
    _check_network(value_network)
    _check_gamma(gamma)
    rewards = list(_rewards(batch))
    rows = torch.stack([one.cut.reshape(*batch.shape, -1).any(-1) for one in rewards]).any(0)
    result = batch.copy()
    if not rows.any():
        return result
    after = batch.get("next")
    values = _values(value_network, after[rows])
    following = after.copy()
    for one in rewards:
        reward = after.get(one.key)
        value = _value(values, one.key, as_key(value_key), reward[rows].shape)
        added = torch.zeros_like(reward)
        added[rows] = torch.where(one.cut[rows], gamma * value.to(reward), 0)
        following.set(one.key, reward + added)
        if set_terminated:
            _set_terminated(following, one)
    return result.set("next", following)


class BootstrapTimeLimits:
    """Adds the value of the last observation to the reward where a time limit ends an episode.

    An object of this class applies :func:`bootstrap_time_limits` as the option ``postproc`` of a
    collector. It calls the learner's own value network, so the values are those of the newest
    weights.

    Args:
        value_network: see :func:`bootstrap_time_limits`.
        gamma: discount of the value, from 0 to 1.
        value_key: see :func:`bootstrap_time_limits`.
        set_terminated: see :func:`bootstrap_time_limits`.

    Raises:
        TypeError: if ``value_network`` can't be called with a TensorDict, or another argument has
            the wrong type.
        ValueError: if ``gamma`` is out of range.

    Examples:
        >>> from tensordict.nn import TensorDictModule
        >>> from torch import nn
        >>> from trawl.collectors import Collector
        >>> from trawl.data import BootstrapTimeLimits
        >>> critic = TensorDictModule(nn.Linear(3, 1), ["observation"], ["state_value"])
        >>> with Collector(
        ...     "Pendulum-v1",
        ...     frames_per_batch=400,
        ...     postproc=BootstrapTimeLimits(critic, gamma=0.99),
        ... ) as collector:
        ...     batch = collector.next()
        >>> int(batch["next", "truncated"].sum())
        2
    """

    def __init__(
        self,
        value_network: Callable[[TensorDictBase], Any],
        gamma: float = 0.99,
        *,
        value_key: Any = _VALUE,
        set_terminated: bool = False,
    ) -> None:
        _check_network(value_network)
        _check_gamma(gamma)
        given_key("value_key", value_key)
        check_bool("set_terminated", set_terminated)
        self.value_network, self.gamma = value_network, gamma
        self.value_key, self.set_terminated = value_key, set_terminated

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns a batch with the new rewards.

        Args:
            batch: the batch, which is not modified.

        Raises:
            Exception: any error that :func:`bootstrap_time_limits` raises.
        """
        return bootstrap_time_limits(
            batch,
            self.value_network,
            self.gamma,
            value_key=self.value_key,
            set_terminated=self.set_terminated,
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({type(self.value_network).__name__}, gamma={self.gamma}, "
            f"set_terminated={self.set_terminated})"
        )


def _check_network(network: Any) -> None:
    """Raises an error if a value network can't be called with a TensorDict."""
    wanted = "value_network must be a TensorDict module, or a function of a TensorDict, but it is "
    if isinstance(network, type) or not callable(network):
        raise TypeError(f"{wanted}{network!r}")
    inner = network
    while isinstance(inner, nn.Sequential) and len(inner):
        inner = inner[0]
    if type(inner).__module__.startswith("torch.nn.modules"):
        raise TypeError(f"{wanted}a module that takes tensors, {type(network).__name__}. {_WRAP}")


def _check_gamma(gamma: Any) -> None:
    """Raises an error if a discount is not a number from 0 to 1."""
    if isinstance(gamma, bool) or not hasattr(gamma, "__float__"):
        raise TypeError(f"gamma must be a number, but it is {gamma!r}")
    if not 0 <= float(gamma) <= 1:
        raise ValueError(f"gamma must be from 0 to 1, but it is {gamma}")


def _rewards(batch: TensorDictBase) -> Iterator[_Reward]:
    """Yields the rewards of a batch."""
    after = batch.get("next")
    found = [as_key(key) for key in leaves_named(after, ("reward",))]
    if not found:
        raise KeyError("the batch has no ('next', 'reward')")
    for key in found:
        reward = after.get(key)
        truncated = _flag(after, key, _TRUNCATED)
        if truncated is None:
            raise KeyError(
                "the batch has no flag 'truncated' under 'next', which says where a time limit "
                f"ended an episode; it has {sorted(map(str, after.keys(True, True)))}"
            )
        terminated = _flag(after, key, _TERMINATED)
        cut = after.get(truncated)
        if terminated is not None:
            cut = cut & ~after.get(terminated)
        mask = of_frames(batch, MASK)
        cut = _like(cut, reward, batch.ndim)
        if mask is not None:
            cut = cut & broadcastable(mask, reward)
        yield _Reward(key, terminated or (*truncated[:-1], _TERMINATED), cut)


def _flag(after: TensorDictBase, reward: Key, name: str) -> Key | None:
    """Returns the key of a flag of the reward's group, or of an outer one; None if there is none.

    The flags of all environments apply to all groups.
    """
    for depth in range(len(reward) - 1, -1, -1):
        key = (*reward[:depth], name)
        if after.get(key, None) is not None:
            return key
    return None


def _like(flag: Tensor, reward: Tensor, batch_dims: int) -> Tensor:
    """Returns a flag in the shape of a reward, which may have a dimension of agents."""
    missing = reward.ndim - flag.ndim
    shape = (*flag.shape[:batch_dims], *[1] * missing, *flag.shape[batch_dims:])
    return flag.reshape(shape).expand(reward.shape)


def _values(network: Callable[[TensorDictBase], Any], steps: Any) -> Any:
    """Returns what a value network returns for the observations after some steps."""
    _check_inputs(network, steps)
    device = _device(network)
    given = steps if device is None else steps.to(device)
    with torch.no_grad():
        try:
            return network(given)
        except (AttributeError, TypeError) as error:
            if isinstance(network, nn.Module) and not hasattr(network, "in_keys"):
                # A module that takes tensors can fail in many ways.
                add_note(error, f"value_network is called with a TensorDict. {_WRAP}")
            raise


def _check_inputs(network: Any, steps: TensorDictBase) -> None:
    """Raises an error if a value network reads an entry that the steps lack."""
    for key in getattr(network, "in_keys", ()):
        if steps.get(key, None) is None:
            raise KeyError(
                f"the value network reads {show_key(as_key(key))}, but the batch has no such entry "
                "under 'next'. If the collector has compact_obs=True, leave it out"
            )


def _device(network: Any) -> torch.device | None:
    """Returns the device of a network's parameters; None if it has none."""
    parameters = network.parameters() if isinstance(network, nn.Module) else iter(())
    return next((one.device for one in parameters), None)


def _value(values: Any, reward: Key, value_key: Key, shape: torch.Size) -> Tensor:
    """Returns the values for a reward."""
    found = values
    if is_tensor_collection(values):
        keys = [(*reward[:-1], *value_key), value_key]
        found = next((v for key in keys if (v := values.get(key, None)) is not None), None)
        if found is None:
            raise KeyError(
                f"the value network wrote no {show_key(value_key)}; pass the key of its values as "
                f"value_key. There are {sorted(map(str, values.keys(True, True)))}"
            )
    if not isinstance(found, Tensor):
        raise TypeError(
            "value_network must return a TensorDict or a tensor of values, but it returned "
            f"{type(found).__name__}. {_WRAP}"
        )
    if found.shape != shape:
        raise ValueError(
            f"the values have shape {tuple(found.shape)}, but the rewards ({show_key(reward)}) of "
            f"these steps have shape {tuple(shape)}"
        )
    return found


def _set_terminated(following: TensorDictBase, reward: _Reward) -> None:
    """Marks the steps of a reward as terminated."""
    flag = following.get(reward.terminated, None)
    cut = reward.cut
    if flag is not None and flag.shape != cut.shape:
        # All agents share the flag, so it is True where the episode of any of them was cut.
        cut = cut.reshape(*flag.shape[:-1], -1).any(-1, keepdim=True)
    following.set(reward.terminated, cut if flag is None else flag | cut)
