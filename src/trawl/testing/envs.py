"""Deterministic environments that number their own steps.

Each observation holds the numbers of its environment and its step. With these numbers,
:class:`~trawl.testing.Ledger` detects frames that are lost, duplicated or mixed up, or that have
wrong flags. :class:`~trawl.testing.NumberedEnv` is the basic environment. Its subclasses have the
same numbers in other observation and action spaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

#: Names of the numbers in an observation, in order.
FIELDS = ("env", "episode", "step", "total", "action")

_ENDS = ("terminated", "truncated", "both")


class NumberedEnv(gymnasium.Env[Any, Any]):
    """Environment that returns five numbers as its observation, with episodes of given lengths.

    The observation is a float32 vector: the environment's number, the number of the episode
    (from 0), steps taken in the episode, steps taken in total, and the last action (-1 after a
    reset). The reward of a step is the number of steps taken in total, including this step.

    Args:
        number: number of this environment.
        lengths: number of steps of each episode. After the last length, the list starts again.
        ends: flags at the end of each episode: ``"terminated"``, ``"truncated"`` or ``"both"``.
            After the last value, the list starts again.
        render_mode: ``"rgb_array"`` for images that show the numbers (see :class:`ImageEnv`).

    Attributes:
        actions: the actions taken, as numbers.

    Raises:
        ValueError: if ``lengths`` or ``ends`` is empty, or has an invalid value.

    Examples:
        >>> from trawl.collectors import Collector
        >>> from trawl.testing import NumberedEnv
        >>> with Collector(NumberedEnv(lengths=[2]), frames_per_batch=3) as collector:
        ...     numbers = NumberedEnv.numbers(next(iter(collector)))
        >>> numbers[:, 1:4].tolist()  # episode, step in it, steps in all
        [[0, 0, 0], [0, 1, 1], [1, 0, 2]]
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 - as Gymnasium

    def __init__(
        self,
        number: int = 0,
        lengths: Sequence[int] = (5,),
        ends: Sequence[str] = ("terminated",),
        render_mode: str | None = None,
    ) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths must be positive numbers, but they are {lengths!r}")
        if not ends or set(ends) - set(_ENDS):
            raise ValueError(f"ends must be among {_ENDS}, but they are {ends!r}")
        self.number = number
        self.lengths = tuple(lengths)
        self.ends = tuple(ends)
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-np.inf, np.inf, (len(FIELDS),), np.float32)
        self.action_space = spaces.Discrete(4)
        self.actions: list[int] = []
        self._episode = -1
        self._step = 0

    def ending(self, episode: int, step: int) -> tuple[bool, bool]:
        """Returns the flags ``terminated`` and ``truncated`` of a step of an episode.

        Args:
            episode: number of the episode, from 0.
            step: number of the step in the episode, from 1.
        """
        if step < self.lengths[episode % len(self.lengths)]:
            return False, False
        end = self.ends[episode % len(self.ends)]
        return end != "truncated", end != "terminated"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins the next episode."""
        super().reset(seed=seed)
        self._episode += 1
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes a step."""
        self.actions.append(self._as_number(action))
        self._step += 1
        terminated, truncated = self.ending(self._episode, self._step)
        return self._observe(), float(len(self.actions)), terminated, truncated, {}

    def render(self) -> NDArray[np.uint8]:
        """Returns an image that shows the numbers of the last observation."""
        return _image(self._now())

    @classmethod
    def numbers(cls, frames: TensorDictBase) -> Tensor:
        """Returns the numbers in the observations.

        Returns:
            An int64 tensor of shape ``(*frames.batch_size, 5)``.
        """
        found: Tensor = frames.get("observation").long()
        return found

    @classmethod
    def action_numbers(cls, frames: TensorDictBase) -> Tensor:
        """Returns the actions in the frames as an int64 tensor of shape ``frames.batch_size``."""
        found: Tensor = frames.get("action").argmax(-1)
        return found

    def _now(self) -> list[int]:
        last = self.actions[-1] if self._step else -1
        return [self.number, self._episode, self._step, len(self.actions), last]

    def _observe(self) -> Any:
        return np.array(self._now(), dtype=np.float32)

    def _as_number(self, action: Any) -> int:
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is not in {self.action_space}")
        return int(action)


class ImageEnv(NumberedEnv):
    """Environment that returns the numbers as an image, uint8 of shape ``(8, 8, 3)``.

    Args:
        number: number of this environment.
        **kwargs: further arguments of :class:`NumberedEnv`.
    """

    def __init__(self, number: int = 0, **kwargs: Any) -> None:
        super().__init__(number, **kwargs)
        self.observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)

    @classmethod
    def numbers(cls, frames: TensorDictBase) -> Tensor:
        """Returns the numbers in the observations.

        Returns:
            An int64 tensor of shape ``(*frames.batch_size, 5)``.
        """
        return read_image(frames.get("observation"))

    def _observe(self) -> Any:
        return _image(self._now())


class NestedEnv(NumberedEnv):
    """Environment with nested Dict and Tuple spaces, which have many kinds of leaves.

    Args:
        number: number of this environment, below 8.
        **kwargs: further arguments of :class:`NumberedEnv`. Episodes must have fewer than 256
            steps.
    """

    def __init__(self, number: int = 0, **kwargs: Any) -> None:
        super().__init__(number, **kwargs)
        self.observation_space = spaces.Dict(
            {
                "env": spaces.Discrete(8, start=-2),
                "when": spaces.Dict(
                    {
                        "episode": spaces.MultiBinary(16),
                        "steps": spaces.Tuple(
                            (
                                spaces.MultiDiscrete([16, 16], start=[1, -1]),
                                spaces.Box(-np.inf, np.inf, (), np.float64),
                            )
                        ),
                    }
                ),
                "last": spaces.Box(-128, 127, (1, 2), np.int8),
            }
        )
        self.action_space = spaces.Dict(
            {
                "pick": spaces.Tuple((spaces.Discrete(2, start=1), spaces.MultiBinary(2))),
                "push": spaces.Box(-1, 1, (), np.float32),
            }
        )

    @classmethod
    def numbers(cls, frames: TensorDictBase) -> Tensor:
        """Returns the numbers in the observations.

        Returns:
            An int64 tensor of shape ``(*frames.batch_size, 5)``.
        """
        bits = frames.get(("when", "episode")).long()
        digits = frames.get(("when", "steps", "0"))
        fields = [
            frames.get("env").argmax(-1),
            (bits * 2 ** torch.arange(bits.shape[-1])).sum(-1),
            16 * digits[..., :16].argmax(-1) + digits[..., 16:].argmax(-1),
            frames.get(("when", "steps", "1"))[..., 0].long(),
            frames.get("last")[..., 0, 1],
        ]
        return torch.stack([field.long() for field in fields], -1)

    @classmethod
    def action_numbers(cls, frames: TensorDictBase) -> Tensor:
        """Returns the actions in the frames as an int64 tensor of shape ``frames.batch_size``."""
        bits = frames.get(("pick", "1")).long()
        found: Tensor = 4 * frames.get(("pick", "0")).argmax(-1) + 2 * bits[..., 0] + bits[..., 1]
        return found

    def _observe(self) -> Any:
        number, episode, step, total, last = self._now()
        return {
            "env": np.int64(number - 2),
            "when": {
                "episode": np.array([episode >> bit & 1 for bit in range(16)], dtype=np.int8),
                "steps": (
                    np.array([step // 16 + 1, step % 16 - 1]),
                    np.array(total, dtype=np.float64),
                ),
            },
            "last": np.array([[number, last]], dtype=np.int8),
        }

    def _as_number(self, action: Any) -> int:
        # Vector environments pass values of a scalar Box as numpy scalars.
        if not self.action_space.contains({**action, "push": np.asarray(action["push"])}):
            raise ValueError(f"action {action!r} is not in {self.action_space}")
        choice, bits = action["pick"]
        return int(4 * (choice - 1) + 2 * bits[0] + bits[1])


class RaggedEnv(NumberedEnv):
    """Environment that also returns a text, a sequence and a graph, which have no fixed layout.

    The text is ``"<env>.<episode>.<step>"``. The sequence holds the numbers of the steps taken in
    the episode. The graph has a node for each of these steps, and one additional node.

    Args:
        number: number of this environment.
        **kwargs: further arguments of :class:`NumberedEnv`.
    """

    def __init__(self, number: int = 0, **kwargs: Any) -> None:
        super().__init__(number, **kwargs)
        self.observation_space = spaces.Dict(
            {
                "observation": self.observation_space,
                "text": spaces.Text(64, charset="0123456789."),
                "taken": spaces.Sequence(spaces.Discrete(1 << 20)),
                "graph": spaces.Graph(spaces.Box(0, np.inf, (1,), np.float32), None),
            }
        )

    def _observe(self) -> Any:
        number, episode, step, *_ = now = self._now()
        nodes = np.arange(step + 1, dtype=np.float32)[:, None]
        return {
            "observation": np.array(now, dtype=np.float32),
            "text": f"{number}.{episode}.{step}",
            "taken": tuple(np.int64(i) for i in range(step)),
            "graph": spaces.GraphInstance(nodes, None, None),
        }


class FaultyEnv(NumberedEnv):
    """Environment that fails or returns wrong data at a certain step.

    Args:
        at: number of the step, counted from 0 over all episodes.
        fault: an exception to raise, ``"nan"`` to return NaN as the reward, or ``"shape"`` to
            return an observation of another shape.
        **kwargs: arguments of :class:`NumberedEnv`.

    Raises:
        ValueError: if ``fault`` is another string.
    """

    def __init__(self, at: int, fault: str | BaseException, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if isinstance(fault, str) and fault not in ("nan", "shape"):
            raise ValueError(f"fault must be an exception, 'nan' or 'shape', but it is {fault!r}")
        self.at = at
        self.fault = fault

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes a step. The step with the number ``at`` has the fault."""
        now = len(self.actions) == self.at
        if now and isinstance(self.fault, BaseException):
            raise self.fault
        obs, reward, *rest = super().step(action)
        if now and self.fault == "nan":
            reward = float("nan")
        if now and self.fault == "shape":
            obs = obs[:-1]
        return (obs, reward, *rest)


class SelfResettingVectorEnv(VectorEnv[Any, Any, Any]):
    """Vector environment that resets its environments itself, and can only be reset as a whole.

    The step after the end of an episode only resets the environment
    (``gymnasium.vector.AutoresetMode.NEXT_STEP``). Many simulators that step all their environments
    at once work in this way.

    Args:
        env_fns: functions that make the environments.

    Examples:
        >>> from trawl.collectors import Collector
        >>> from trawl.testing import NumberedEnv, SelfResettingVectorEnv
        >>> env = SelfResettingVectorEnv([lambda: NumberedEnv(lengths=[2])])
        >>> with Collector(env, frames_per_batch=4) as collector:
        ...     batch = next(iter(collector))
        >>> batch["collector", "mask"].tolist()
        [[True, True, False, True]]
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - as Gymnasium

    def __init__(self, env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]]) -> None:
        self._inner = SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.NEXT_STEP)
        self.num_envs = self._inner.num_envs
        self.single_observation_space = self._inner.single_observation_space
        self.single_action_space = self._inner.single_action_space
        self.observation_space = self._inner.observation_space
        self.action_space = self._inner.action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Resets all environments.

        Raises:
            ValueError: if ``options`` has a ``reset_mask``, which asks for a reset of only some
                environments.
        """
        if "reset_mask" in (options or {}):
            raise ValueError("all environments must be reset together, not only some of them")
        return self._inner.reset(seed=seed, options=options)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps all environments, or resets those whose episode ended with the last step."""
        return self._inner.step(actions)

    def close_extras(self, **kwargs: Any) -> None:
        """Closes the environments."""
        self._inner.close(**kwargs)


def read_image(images: Tensor) -> Tensor:
    """Returns the numbers in images of :class:`ImageEnv`, as an int64 tensor.

    Args:
        images: images of shape ``(*batch, 8, 8, 3)``.

    Returns:
        Numbers of shape ``(*batch, 5)``.
    """
    digits = images[..., : len(FIELDS), :4, 0].long()
    return (digits * 256 ** torch.arange(4)).sum(-1) - 1


def _image(numbers: Sequence[int]) -> NDArray[np.uint8]:
    """Returns an image with a row of pixels for each number.

    The red channel holds the bytes of the number.
    """
    image = np.zeros((8, 8, 3), dtype=np.uint8)
    for row, number in enumerate(numbers):
        # Stores each number plus 1, because the action may be -1.
        image[row, :4, 0] = list((number + 1).to_bytes(4, "little"))
        image[row, :, 1] = list(islice(cycle(range(row, row + 3)), 8))
    return image
