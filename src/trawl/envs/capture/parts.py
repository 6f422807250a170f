"""State of a vector environment, captured by its sub-environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymnasium.vector import SyncVectorEnv
from typing_extensions import override

from trawl.envs.capture.attributes import Decoder, Encoder, NotPlain
from trawl.envs.capture.ways import OwnMethods, PlainWay
from trawl.errors import EnvStateError

_SKIP = frozenset({"envs"})


class Parts(PlainWay):
    """The environment is a ``SyncVectorEnv``, whose sub-environments are captured one by one.

    Args:
        capture: function that captures a sub-environment.
        restore: function that restores a sub-environment, and returns the environment that replaces
            it.
    """

    name = "parts"
    # Each sub-environment is copied by itself.
    shared = None

    def __init__(
        self, capture: Callable[[Any], dict[str, Any]], restore: Callable[[Any, Any, bool], Any]
    ) -> None:
        self._capture_one, self._restore_one = capture, restore

    @override
    def suits(self, base: Any) -> bool:
        return isinstance(base, SyncVectorEnv) and not OwnMethods().suits(base)

    @override
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        envs = []
        for index, env in enumerate(base.envs):
            try:
                envs.append(self._capture_one(env))
            except EnvStateError as error:
                raise NotPlain(f"sub-environment {index}: {error}") from error
        return {"envs": envs, "attributes": encoder.attributes(base, _SKIP)}

    @override
    def comparable(self, state: Mapping[str, Any]) -> Any:
        # Each sub-environment was compared when it was restored.
        return {**state, "base": state["base"]["attributes"]}

    @override
    def restore(self, members: Sequence[Any], state: Mapping[str, Any], trust: bool) -> Any:
        base = members[-1]
        pairs = zip(base.envs, state["base"]["envs"], strict=True)
        base.envs = [self._restore_one(env, one, trust) for env, one in pairs]
        return super().restore(members, state, trust)

    @override
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        decoder.replace(base, state["attributes"], _SKIP)
