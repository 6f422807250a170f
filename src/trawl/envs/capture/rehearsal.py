"""Trial steps after a restore, in a copy of the environment.

A state may be whole, but not make sense: a text in the place of a number, or a position beyond a
table. Such a state must fail when it is loaded, and not in a later batch. The environment itself
takes no step: a copy with copies of its attributes does, without code of the user being called to
make the copy.
"""

from __future__ import annotations

import dis
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from time import thread_time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.wrappers import RecordVideo

from trawl.envs.capture.fixed import constant_names, is_simple
from trawl.envs.generators import get_states, set_states

_unrehearsed: ContextVar[bool] = ContextVar("unrehearsed", default=False)
# Errors of a step that no illegal action explains.
_BROKEN = (AttributeError, OverflowError, TypeError)
# Errors about a state that makes no sense, whoever raises them.
_DAMAGE = (*_BROKEN, AssertionError, gymnasium.error.Error)
_RAISE = dis.opmap["RAISE_VARARGS"]
# Number of actions that are tried. Of a discrete space with few actions, all are tried.
_MOST_ACTIONS, _ACTIONS = 32, 4
# Number of steps with each action, and of steps that are taken even if they take long.
_MOST_STEPS, _STEPS = 40, 2
# Seconds of computation in all, after which no further steps are taken. On a machine that stands
# still, a state must not pass that others refuse.
_PATIENCE = 0.1
# Methods and attributes of environments in which not all actions are legal.
_MASKS = ("action_mask", "action_masks", "valid_action_mask", "get_action_mask", "legal_actions")


@contextmanager
def unrehearsed() -> Iterator[None]:
    """Context for restoring a state of the same object, in which no trial steps are taken."""
    token = _unrehearsed.set(True)
    try:
        yield
    finally:
        _unrehearsed.reset(token)


def failure(members: Sequence[Any], shared: frozenset[str]) -> Exception | None:
    """Returns the error with which an environment fails in its next steps; None if it goes on.

    Args:
        members: the wrapper chain, outermost first, which is not changed.
        shared: names of attributes that are not copied.
    """
    if _unrehearsed.get() or not _can_rehearse(members):
        return None
    errors, tried, until = [], 0, thread_time() + _PATIENCE
    with _silent():
        for action in _actions(members[0]):
            copies = _copied(members, shared)
            if copies is None:
                return None
            tried += 1
            try:
                _play(copies[0], action, until)
            except Exception as error:
                if isinstance(error, _DAMAGE) or not is_deliberate(error):
                    errors.append(error)
    broken = [error for error in errors if isinstance(error, _BROKEN)]
    return (broken or errors)[0] if broken or len(errors) == tried else None


def goes_on_from(
    members: Sequence[Any], shared: frozenset[str], restore: Callable[[Sequence[Any]], None]
) -> bool:
    """Returns True if a copy of an environment goes on after another state is restored in it.

    Args:
        members: see :func:`failure`.
        shared: see :func:`failure`.
        restore: function that restores the other state in a wrapper chain.
    """
    with _silent():
        copies = _copied(members, shared)
        try:
            if copies is None:
                return False
            restore(copies)
        except Exception:
            return False
    return failure(copies, shared) is None


def _can_rehearse(members: Sequence[Any]) -> bool:
    base = members[-1]
    if not isinstance(base, gymnasium.Env) or getattr(base, "render_mode", None) == "human":
        return False
    return not any(
        isinstance(one, RecordVideo)
        or not is_simple(type(one))
        or hasattr(type(one), "__del__")
        or any(name in vars(one) or hasattr(type(one), name) for name in _MASKS)
        for one in members
    )


def _copied(members: Sequence[Any], shared: frozenset[str]) -> list[Any] | None:
    """Returns a copy of a wrapper chain; None if an attribute can't be copied."""
    memo: dict[int, Any] = {id(one): object.__new__(type(one)) for one in members}
    copies = [memo[id(one)] for one in members]
    for one in members:
        for name, value in vars(one).items():
            if name in shared or name in constant_names(one) or type(value) is types.ModuleType:
                memo[id(value)] = value
    try:
        for one, copied in zip(members, copies, strict=True):
            vars(copied).update({name: deepcopy(v, memo) for name, v in vars(one).items()})
    except Exception:
        return None
    return copies


def _actions(env: Any) -> Iterator[Any]:
    space = deepcopy(env.action_space)
    if type(space) is Discrete and space.n <= _MOST_ACTIONS:
        yield from range(int(space.start), int(space.start + space.n))
        return
    space.seed(0)
    yield from (space.sample() for _ in range(_ACTIONS))


def _play(env: Any, action: Any, until: float) -> None:
    """Repeats an action until the episode ends, and begins the next one."""
    # More steps of Gymnasium's own environments touch nothing but the copy; others may do anything.
    known = type(env.unwrapped).__module__.startswith("gymnasium.")
    for step in range(_MOST_STEPS if known else _STEPS):
        if step >= _STEPS and thread_time() > until:
            break
        obs, reward, terminated, truncated, _ = env.step(action)
        _check_results(env.observation_space, obs, reward)
        if bool(terminated) or bool(truncated):
            break
    obs, _ = env.reset()
    _check_results(env.observation_space, obs, 0.0)
    env.step(action)


def _check_results(space: Any, obs: Any, reward: Any) -> None:
    """Checks that the results of a step can be written to a batch."""
    np.empty((), np.float32)[...] = reward
    if space.shape is not None and space.dtype is not None and space.dtype.kind in "biuf":
        if np.shape(obs) != space.shape:
            raise TypeError(f"the observation has shape {np.shape(obs)} instead of {space.shape}")
        np.empty(space.shape, space.dtype)[...] = obs


def is_deliberate(error: BaseException) -> bool:
    """Returns True if code raised an error by ``raise``, and no operation on wrong data failed.

    Such an error may be about an action that is not legal now, or an environment that is meant to
    fail at times, such as one with a connection to a robot.
    """
    if type(error).__module__ != "builtins":
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


@contextmanager
def _silent() -> Iterator[None]:
    """Keeps warnings, and draws from global generators, within a ``with`` block."""
    states = get_states()
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            yield
    finally:
        set_states(states)
