"""State of a Gymnasium environment as plain data, from which another environment continues.

The state is captured in the first way that works:

- ``"get_state"``: the environment has two methods. ``get_state()`` returns everything that the next
  steps depend on, including generators, as numbers, strings, bytes, arrays, tensors, lists and
  dictionaries. ``set_state(state)`` continues from this state.
- ``"ale"`` and ``"mujoco"``: the state of the Atari emulator, or of MuJoCo's physics.
- ``"parts"``: the environment is a ``SyncVectorEnv``, whose sub-environments are captured one by
  one in the same ways.
- ``"attributes"``: all attributes of the environment are plain data, arrays or generators.
- ``"pickle"``: the environment can be pickled, and has no ``EzPickle``, which would lose its state.
  To load it in another process, the user must trust the state.
- ``"replay"``: a log has the origin of the episode and the actions since then, so that another
  environment can repeat the episode (see :mod:`trawl.envs.capture.replay`). An environment that was
  captured by ``"pickle"`` is replayed if its pickle isn't trusted.

The attributes of wrappers are part of the state. A state is never incomplete: if an attribute can't
be captured, the next way is tried.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from trawl.envs.capture.attributes import NotPlain, class_name, same_data
from trawl.envs.capture.parts import Parts
from trawl.envs.capture.rehearsal import failure, goes_on_from
from trawl.envs.capture.replay import REPLAY, EpisodeLog
from trawl.envs.capture.ways import PICKLE, WAYS, PlainWay, chain
from trawl.errors import EnvStateError, env_errors
from trawl.schema.checks import UNKNOWN, entries, one_of, refuse
from trawl.schema.states import CAPTURED, captured, episode

__all__ = [
    "NONE",
    "REPLAY",
    "capture",
    "check_state",
    "restore",
    "way_of",
    "ways_of",
]

#: Way of an environment whose state can't be captured.
NONE = "none"


def way_of(env: Any, log: EpisodeLog | None = None) -> str:
    """Returns the way in which an environment's state is captured; ``"none"`` if it can't be.

    Args:
        env: the environment.
        log: log of its episode, if there is one.
    """
    way = _captured(env)[0]
    return REPLAY if way == NONE and log is not None and log.why_not(env) is None else way


def ways_of(env: Any) -> list[str]:
    """Returns the way in which each sub-environment of a vector environment is captured."""
    way, state, _ = _captured(env)
    if way == _PARTS.name:
        return [one["way"] for one in state["base"]["envs"]]
    return [way] * int(env.num_envs)


def capture(env: Any, log: EpisodeLog | None = None) -> dict[str, Any]:
    """Returns the state of an environment as plain data.

    Args:
        env: the environment.
        log: log of its episode, if there is one.

    Raises:
        EnvStateError: if the state can't be captured.
    """
    way, state, whys = _captured(env)
    replay = None
    if log is not None and way in (NONE, PICKLE.name):
        try:
            replay = log.capture(env)
        except NotPlain as error:
            whys.append(f"{REPLAY}: {error}")
    if way == NONE and replay is None:
        raise EnvStateError(f"the state of {env} can't be captured: {'; '.join(whys)}")
    found = {"way": REPLAY if way == NONE else way, "identity": _identity(env), "state": state}
    return found if replay is None else {**found, "replay": replay}


def _captured(env: Any) -> tuple[str, dict[str, Any], list[str]]:
    members, whys = chain(env), list[str]()
    for name, way in _WAYS.items():
        if way.suits(members[-1]):
            try:
                return name, way.capture(members), whys
            except NotPlain as error:
                whys.append(f"{name}: {error}")
    return NONE, {}, whys


def restore(
    env: Any, state: Mapping[str, Any], trust: bool = False, log: EpisodeLog | None = None
) -> Any:
    """Makes an environment continue from a state that :func:`capture` returned.

    Args:
        env: an environment that was made in the same way.
        state: the state.
        trust: True to open a pickle that another process made.
        log: log of the environment's episodes, if there is one.

    Returns:
        The environment to continue with, which may be another object.

    Raises:
        EnvStateError: if the state belongs to another environment, or can't be restored.
    """
    check_state(env, state)
    replay: Any = state.get("replay")
    if _is_replayed(state, trust):
        if log is None:
            raise EnvStateError(
                f"{env} would have to be replayed, but keeps no log of its episodes"
            )
        log.replay(env, replay)
        return env
    made = _restore(env, state, trust)
    if log is not None and replay is not None:
        log.load(replay)
    elif log is not None:
        log.lose("the state that was loaded has no log of the episode")
    return made


def _is_replayed(state: Mapping[str, Any], trust: bool) -> bool:
    if state["way"] == PICKLE.name and "replay" in state:
        return not (trust or PICKLE.is_own(state["state"]))
    return bool(state["way"] == REPLAY)


def _restore(env: Any, state: Mapping[str, Any], trust: bool) -> Any:
    way, before = _WAYS[state["way"]], _own(state["way"], chain(env))
    try:
        made = way.restore(chain(env), state["state"], trust)
        again = way.capture(chain(made))
    except EnvStateError:
        raise
    except Exception as error:
        # The methods of the environment, and of its wrappers, may raise anything.
        why = str(error) if isinstance(error, NotPlain) else f"{type(error).__name__}: {error}"
        raise EnvStateError(
            f"the state of {env} can't be restored by {state['way']}: {why}"
        ) from error
    if not same_data(way.comparable(again), way.comparable(state["state"])):
        raise EnvStateError(
            f"{env} has another state than before after it was restored by {state['way']}"
        )
    _check_goes_on(made, way, before)
    return made


def _check_goes_on(env: Any, way: Any, before: Any) -> None:
    """Checks that an environment can take its next steps after it was restored.

    An environment that could not in the state ``before``, either, is not checked.
    """
    if not isinstance(way, PlainWay) or way.shared is None:
        return
    members = chain(env)
    error = failure(members, way.shared)
    if error is not None and goes_on_from(
        members, way.shared, lambda copies: way.restore(copies, before, False)
    ):
        raise EnvStateError(
            f"{env} can't go on from the state: {type(error).__name__}: {error}"
        ) from error


_PARTS = Parts(capture, restore)
_WAYS = {_PARTS.name: _PARTS, **WAYS}


def check_state(env: Any, state: Any, place: str = "the state") -> None:
    """Checks all entries of a state, and that an environment was made as that of the state.

    Args:
        env: the environment, which is not changed.
        state: the state.
        place: place of the state, for error messages.

    Raises:
        EnvStateError: if an entry is damaged, or the state belongs to another environment; the
            message says what differs.
    """
    members = chain(env)
    with env_errors():
        entries(CAPTURED)(state, place, UNKNOWN)
        way = state["way"]
        one_of(*_WAYS, REPLAY)(way, f"{place}['way']", UNKNOWN)
        _check_identity(env, state)
        if way == REPLAY or "replay" in state:
            replayed = {"replay": episode(len(members))}
            entries(replayed)(state, place, UNKNOWN)
        if way == REPLAY:
            return
        if not _WAYS[way].suits(members[-1]):
            raise EnvStateError(f"the state was captured by {way}, in which {env} can't be")
        inner, at = state["state"], f"{place}['state']"
        captured(way, len(members))(inner, at, _own(way, members))
        if way == _PARTS.name:
            envs, at = members[-1].envs, f"{at}['base']['envs']"
            if len(inner["base"]["envs"]) != len(envs):
                refuse(at, f"a list of {len(envs)}", inner["base"]["envs"])
            for index, one in enumerate(envs):
                check_state(one, inner["base"]["envs"][index], f"{at}[{index}]")


def _own(way: str, members: list[Any]) -> Any:
    """Returns the present state of an environment in a way, if it is plain data."""
    plain = _WAYS[way]
    try:
        return plain.capture(members) if isinstance(plain, PlainWay) else UNKNOWN
    except (NotPlain, EnvStateError):
        return UNKNOWN


def _check_identity(env: Any, state: Mapping[str, Any]) -> None:
    mine, other = _identity(env), state["identity"]
    for name in mine:
        if mine[name] != other.get(name):
            raise EnvStateError(
                f"the state is one of another environment: its {name} is {other.get(name)}, but "
                f"that of {env} is {mine[name]}"
            )


def _identity(env: Any) -> dict[str, str]:
    """Returns a description that is equal for all environments made in the same way."""
    spec = getattr(env, "spec", None)
    given = sorted((getattr(spec, "kwargs", None) or {}).items())
    plain = (type(None), bool, int, float, str)
    return {
        "id": str(getattr(spec, "id", None)),
        "arguments": ", ".join(f"{name}={v!r}" for name, v in given if isinstance(v, plain)),
        "number of environments": str(getattr(env, "num_envs", 1)),
        "wrapper chain": " > ".join(map(class_name, chain(env))),
        "max_episode_steps": str(getattr(spec, "max_episode_steps", None)),
        "package": _package(chain(env)[-1]),
    }


def _package(base: Any) -> str:
    """Returns the name and version of the package that an environment comes from."""
    name = type(base).__module__.partition(".")[0]
    return f"{name} {getattr(sys.modules.get(name), '__version__', '')}".strip()
