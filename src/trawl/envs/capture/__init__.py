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
  environment can repeat the episode (see :mod:`trawl.envs.capture.action_log`). An environment that
  was captured by ``"pickle"`` is replayed if its pickle isn't trusted.

The attributes of wrappers are part of the state. A state is never incomplete: if an attribute can't
be captured, the next way is tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium.vector import SyncVectorEnv
from typing_extensions import override

from trawl.envs.capture import kinds  # noqa: F401 - registers how values are converted
from trawl.envs.capture.action_log import REPLAY, ActionLog
from trawl.envs.capture.codec import Decoder, Encoder, NotPlain, difference
from trawl.envs.capture.fixed import check_identity, class_name, package_of
from trawl.envs.capture.pickling import is_own
from trawl.envs.capture.rehearsal import failure, goes_on_from
from trawl.envs.capture.ways import Ale, Attributes, Mujoco, OwnMethods, Pickle, Way, chain
from trawl.errors import EnvStateError, env_errors
from trawl.schema.checks import UNKNOWN, entries, one_of, refuse
from trawl.schema.states import CAPTURED, captured, episode

__all__ = [
    "NONE",
    "REPLAY",
    "capture",
    "check_state",
    "needs_log",
    "restore",
    "way_of",
    "ways_of",
]

#: Way of an environment whose state can't be captured.
NONE = "none"


def way_of(env: Any, log: ActionLog | None = None) -> str:
    """Returns the way in which an environment's state is captured; ``"none"`` if it can't be.

    Args:
        env: the environment.
        log: log of its steps, if there is one.
    """
    way = _captured(env, log)[0]
    return REPLAY if way == NONE and log is not None and log.why_not(env) is None else way


def ways_of(env: Any, log: ActionLog | None = None) -> list[str]:
    """Returns the way in which each sub-environment of a vector environment is captured."""
    way, state, _ = _captured(env, log)
    if way == _Parts.name:
        return [one["way"] for one in state["base"]["envs"]]
    return [way if log is None else way_of(env, log)] * int(env.num_envs)


def needs_log(env: Any) -> bool:
    """Returns True if an environment may have to be replayed, because its state isn't plain data.

    This includes environments that can be pickled, because only trusted pickles are opened, but not
    those whose wrappers' attributes aren't plain data. The check is cheap: it doesn't copy arrays
    and tensors, and looks only at the first items of containers.
    """
    members = chain(env)
    try:
        plain = any(way.suits(members[-1]) and way.works(members) for way in _WAYS.values())
        return not plain and Attributes().works(members, wrappers_only=True)
    except Exception:
        # A user's object may raise anything when it is looked at, which must not end a collection.
        return False


def capture(env: Any, log: ActionLog | None = None) -> dict[str, Any]:
    """Returns the state of an environment as plain data.

    Args:
        env: the environment.
        log: log of its steps, if there is one.

    Raises:
        EnvStateError: if the state can't be captured.
    """
    way, state, whys = _captured(env, log)
    replay = None
    if log is not None and way in (NONE, Pickle.name):
        try:
            replay = log.capture(env)
        except NotPlain as error:
            whys.append(f"{REPLAY}: {error}")
    if way == NONE and replay is None:
        raise EnvStateError(f"the state of {env} can't be captured: {'; '.join(whys)}")
    if replay is not None and log is not None and log.is_state:
        return replay
    found = {"way": REPLAY if way == NONE else way, "identity": _identity(env), "state": state}
    return found if replay is None else {**found, "replay": replay}


def _captured(env: Any, log: ActionLog | None) -> tuple[str, dict[str, Any], list[str]]:
    members, whys = chain(env), list[str]()
    for name, way in _WAYS.items() if log is None or not log.is_state else ():
        if way.suits(members[-1]):
            try:
                return name, way.capture(members), whys
            except NotPlain as error:
                whys.append(f"{name}: {error}")
    return NONE, {}, whys


def restore(
    env: Any, state: Mapping[str, Any], trust: bool = False, log: ActionLog | None = None
) -> Any:
    """Makes an environment continue from a state that :func:`capture` returned.

    Args:
        env: an environment that was made in the same way.
        state: the state.
        trust: True to open a pickle that another process made.
        log: log of the environment's steps, if there is one.

    Returns:
        The environment to continue with, which may be another object.

    Raises:
        EnvStateError: if the state belongs to another environment, or can't be restored.
    """
    check_state(env, state, log=log)
    if log is not None and log.is_state:
        log.replay(env, state)
        return log.owner.env
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
    if state["way"] == Pickle.name and "replay" in state:
        return not (trust or is_own(state["state"]))
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
    if difference(way.comparable(again), way.comparable(state["state"])):
        raise EnvStateError(
            f"{env} has another state than before after it was restored by {state['way']}"
        )
    _check_goes_on(made, way, before)
    return made


def _check_goes_on(env: Any, way: Any, before: Any) -> None:
    """Checks that an environment can take its next steps after it was restored.

    An environment that could not in the state ``before``, either, is not checked.
    """
    if way.shared is None:
        return
    members = chain(env)
    error = failure(members, way.shared)
    if error is not None and goes_on_from(
        members, way.shared, lambda copies: way.restore(copies, before, False)
    ):
        raise EnvStateError(
            f"{env} can't go on from the state: {type(error).__name__}: {error}"
        ) from error


class _Parts(Way):
    """The environment is a ``SyncVectorEnv``, whose sub-environments are captured one by one."""

    name = "parts"
    # Each sub-environment is copied by itself.
    shared = None
    _skip = frozenset({"envs"})

    @override
    def suits(self, base: Any) -> bool:
        return isinstance(base, SyncVectorEnv) and not OwnMethods().suits(base)

    @override
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        envs = []
        for index, env in enumerate(base.envs):
            try:
                envs.append(capture(env))
            except EnvStateError as error:
                raise NotPlain(f"sub-environment {index}: {error}") from error
        return {"envs": envs, "attributes": encoder.attributes(base, self._skip)}

    @override
    def comparable(self, state: Mapping[str, Any]) -> Any:
        # Each sub-environment was compared when it was restored.
        return {**state, "base": state["base"]["attributes"]}

    @override
    def restore(self, members: Sequence[Any], state: Mapping[str, Any], trust: bool) -> Any:
        base = members[-1]
        pairs = zip(base.envs, state["base"]["envs"], strict=True)
        base.envs = [restore(env, one, trust) for env, one in pairs]
        return super().restore(members, state, trust)

    @override
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        decoder.replace(base, state["attributes"], self._skip)


_WAYS: dict[str, Way] = {
    way.name: way for way in (_Parts(), OwnMethods(), Ale(), Mujoco(), Attributes(), Pickle())
}


def check_state(
    env: Any, state: Any, place: str = "the state", log: ActionLog | None = None
) -> None:
    """Checks all entries of a state, and that an environment was made as that of the state.

    Args:
        env: the environment, which is not changed.
        state: the state.
        place: place of the state, for error messages.
        log: log of the environment's steps, if there is one.

    Raises:
        EnvStateError: if an entry is damaged, or the state belongs to another environment; the
            message says what differs.
    """
    if log is not None and log.is_state:
        log.check_state(env, state, place)
        return
    members = chain(env)
    with env_errors():
        entries(CAPTURED)(state, place, UNKNOWN)
        way = state["way"]
        one_of(*_WAYS, REPLAY)(way, f"{place}['way']", UNKNOWN)
        check_identity(_identity(env), state["identity"], env)
        if way == REPLAY or "replay" in state:
            replayed = {"replay": episode(len(members))}
            entries(replayed)(state, place, UNKNOWN)
        if way == REPLAY:
            return
        if not _WAYS[way].suits(members[-1]):
            raise EnvStateError(f"the state was captured by {way}, in which {env} can't be")
        inner, at = state["state"], f"{place}['state']"
        captured(way, len(members))(inner, at, _own(way, members))
        if way == _Parts.name:
            envs, at = members[-1].envs, f"{at}['base']['envs']"
            if len(inner["base"]["envs"]) != len(envs):
                refuse(at, f"a list of {len(envs)}", inner["base"]["envs"])
            for index, one in enumerate(envs):
                check_state(one, inner["base"]["envs"][index], f"{at}[{index}]")


def _own(way: str, members: list[Any]) -> Any:
    """Returns the present state of an environment in a way, if it is plain data."""
    try:
        return UNKNOWN if way == Pickle.name else _WAYS[way].capture(members)
    except (NotPlain, EnvStateError):
        return UNKNOWN


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
        "package": package_of(chain(env)[-1]),
    }
