"""Replay: the state of an environment as its generator at the start of the episode, and actions."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Wrapper

from trawl.envs.capture.attributes import Decoder, Encoder
from trawl.errors import EnvStateError


class ReplayableEnv(Wrapper[Any, Any, Any, Any]):
    """Notes what is needed to repeat the current episode of an environment.

    Args:
        env: the environment itself, without wrappers.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._generator: Any = None
        self._arguments: dict[str, Any] = {}
        self._actions: list[Any] = []
        self._last: Any = None
        # Attributes of wrappers are found here more quickly than in the environment.
        self._step = env.step

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Resets the environment, and forgets the last episode."""
        self._generator = copy.deepcopy(self.env.unwrapped.np_random.bit_generator.state)
        self._arguments, self._actions = kwargs, []
        found = self.env.reset(**kwargs)
        self._last = found[0]
        return found

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the environment, and keeps the action."""
        # Collectors write each action into an array of its own, but wrappers may reuse memory.
        self._actions.append(action.copy() if action.__class__ is np.ndarray else action)
        found = self._step(action)
        self._last = found[0]
        return found

    def capture(self, encoder: Encoder) -> dict[str, Any]:
        """Returns the state as plain data."""
        return {
            "generator": encoder.encode(self._generator),
            "arguments": encoder.encode(self._arguments),
            "actions": encoder.encode(self._actions),
            "last": encoder.encode(copy.deepcopy(self._last)),
            "now": encoder.encode(copy.deepcopy(self.env.unwrapped.np_random.bit_generator.state)),
        }

    def replay(self, state: dict[str, Any], decoder: Decoder) -> None:
        """Repeats the episode.

        Raises:
            EnvStateError: if its last observation is another one than before.
        """
        generator, arguments, actions, last, now = (
            decoder.decode(state[name])
            for name in ("generator", "arguments", "actions", "last", "now")
        )
        if generator is None:
            return
        self.env.unwrapped.np_random.bit_generator.state = generator
        self.reset(**arguments)
        for action in actions:
            self.step(action)
        if Encoder([]).encode(self._last) != Encoder([]).encode(last):
            raise EnvStateError(
                f"replay of {len(actions)} steps of {self.env} ended with another observation than "
                "before, so its episodes don't depend on its generator and actions alone: give it "
                "the methods get_state() and set_state()"
            )
        self.env.unwrapped.np_random.bit_generator.state = now
