"""Ways to capture and restore the state of a Gymnasium environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium import Wrapper
from gymnasium.vector import VectorWrapper
from typing_extensions import override

from trawl.envs.capture.codec import Decoder, Encoder, NotPlain
from trawl.envs.capture.pickling import check_trust, pickled, unpickled


def chain(env: Any) -> list[Any]:
    """Returns the wrappers around an environment, outermost first, and the environment itself."""
    found = [env]
    while (inner := _wrapped(found[-1])) is not None:
        found.append(inner)
    return found


# Wrappers of PettingZoo, which are looked up by name so that it is not imported, and the attributes
# that hold what they wrap.
_AGENT_WRAPPERS = {
    "BaseWrapper": "env",
    "BaseParallelWrapper": "env",
    "aec_to_parallel_wrapper": "aec_env",
    "turn_based_aec_to_parallel_wrapper": "aec_env",
    "parallel_to_aec_wrapper": "env",
}


def _wrapped(env: Any) -> Any:
    """Returns the environment that a wrapper wraps; None if ``env`` is not a wrapper."""
    if isinstance(env, (Wrapper, VectorWrapper)):
        return env.env
    for kind in type(env).__mro__:
        if kind.__module__.startswith("pettingzoo.utils.") and kind.__name__ in _AGENT_WRAPPERS:
            return getattr(env, _AGENT_WRAPPERS[kind.__name__])
    return None


class Way:
    """A way to capture the state of an environment, by default as plain data.

    Attributes:
        name: the name of the way.
        shared: names of attributes that a copy of the environment may share with it; None if the
            environment can't be copied.
    """

    name: str
    shared: frozenset[str] | None = frozenset()

    def suits(self, base: Any) -> bool:
        """Returns True if environments of this kind may be captured in this way."""
        return True

    def works(self, members: Sequence[Any], wrappers_only: bool = False) -> bool:
        """Returns True if a wrapper chain can be captured as plain data; copies nothing.

        Args:
            members: the wrapper chain, outermost first.
            wrappers_only: True to look only at the wrappers.
        """
        encoder = Encoder(members, looks_only=True)
        try:
            if not wrappers_only:
                self.capture_base(members[-1], encoder)
            for member in members[:-1]:
                encoder.attributes(member)
        except NotPlain:
            return False
        return True

    def capture(self, members: Sequence[Any]) -> dict[str, Any]:
        """Returns the state of a wrapper chain, including the attributes of wrappers.

        Raises:
            NotPlain: if the state can't be captured.
        """
        encoder = Encoder(members)
        try:
            return self._captured(members, encoder)
        except NotPlain:
            if not encoder.needs_blocks:
                raise
        return self._captured(members, Encoder(members, in_blocks=True))

    def _captured(self, members: Sequence[Any], encoder: Encoder) -> dict[str, Any]:
        inner = self.capture_base(members[-1], encoder)
        return {"base": inner, "wrappers": [encoder.attributes(one) for one in members[:-1]]}

    def restore(self, members: Sequence[Any], state: Mapping[str, Any], trust: bool) -> Any:
        """Restores a state, and returns the environment to continue with."""
        decoder = Decoder(members)
        self.restore_base(members[-1], state["base"], decoder)
        for member, attributes in zip(members[:-1], state["wrappers"], strict=True):
            decoder.replace(member, attributes)
        return members[0]

    def comparable(self, state: Mapping[str, Any]) -> Any:
        """Returns the part of a state that is equal each time the same state is captured."""
        return state

    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        """Returns the state of the environment without its wrappers."""
        raise NotImplementedError

    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        """Restores the state of the environment without its wrappers."""
        raise NotImplementedError


class OwnMethods(Way):
    """The environment has methods ``get_state`` and ``set_state``."""

    name = "get_state"

    @override
    def suits(self, base: Any) -> bool:
        return all(callable(getattr(base, name, None)) for name in ("get_state", "set_state"))

    @override
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        return None if encoder.looks_only else encoder.encode(base.get_state())

    @override
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        base.set_state(decoder.decode(state))


class Attributes(Way):
    """Attributes of the environment: numbers, arrays, generators and collections of these."""

    name = "attributes"

    @override
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        return encoder.attributes(base)

    @override
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        decoder.replace(base, state)


class Pickle(Way):
    """The environment and its wrappers are pickled."""

    name = "pickle"
    shared = None

    @override
    def works(self, members: Sequence[Any], wrappers_only: bool = False) -> bool:
        return False

    @override
    def capture(self, members: Sequence[Any]) -> dict[str, Any]:
        return pickled(members[0])

    @override
    def comparable(self, state: Mapping[str, Any]) -> Any:
        # Two pickles of the same state may differ in the order of their content.
        return None

    @override
    def restore(self, members: Sequence[Any], state: Mapping[str, Any], trust: bool) -> Any:
        check_trust(state, trust, members[-1])
        fresh = unpickled(state)
        members[0].close()
        return fresh
