"""Evaluation of a policy for a number of steps, with renderings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType
from torch import Tensor

from trawl.collectors.config import muted
from trawl.collectors.dispatch import DIRECT
from trawl.collectors.evaluation.environments import check_steps, freeze, renders
from trawl.collectors.evaluation.worker import made_policy
from trawl.collectors.single import Collector
from trawl.envs.gym import GymEnv
from trawl.envs.serial import build_env
from trawl.weight_update.tensors import Weights


class StepEvaluation:
    """Evaluates a policy in an environment, step by step.

    Args:
        env_maker: function that makes the environment.
        policy_maker: function that makes the policy; called with the environment.
    """

    def __init__(self, env_maker: Callable[[], Any], policy_maker: Callable[..., Any]) -> None:
        self.env = build_env(env_maker, name="env_maker")
        check_steps(self.env)
        freeze(self.env)
        self.policy = made_policy(policy_maker, self.env)

    def run(
        self,
        weights: Weights | None,
        max_steps: int,
        deterministic: bool,
        break_when_any_done: bool,
        reward_key: Any = ("next", "reward"),
    ) -> dict[str, Any]:
        """Takes up to ``max_steps`` steps in each environment.

        Args:
            weights: new weights of the policy, or None.
            max_steps: maximum number of steps.
            deterministic: whether a probabilistic policy acts deterministically.
            break_when_any_done: whether to stop at the first end of an episode.
            reward_key: key of the reward.

        Returns:
            A dict with two entries. ``reward`` is the mean return. ``frames`` is a uint8 tensor of
            shape ``(steps, height, width, 3)``, or None if the environment is not rendered as
            arrays.
        """
        render = _renderer(self.env)
        frames: list[Any] = []
        rewards: list[Tensor] = []
        ends: list[Tensor] = []
        collector = self._collector(deterministic)
        try:
            if weights is not None:
                collector.update_policy_weights_(weights=weights)
            freeze(self.env, before_data=True)
            collector.reset()
            for _ in range(max_steps):
                if render is not None:
                    frames.append(render())
                batch = collector.next()
                assert batch is not None  # the collector has no budget of frames
                num_envs = batch.shape[:-1].numel()
                reward = batch.get(reward_key)
                rewards.append(reward.reshape(num_envs, -1).double().mean(-1).cpu())
                ends.append(batch.get(("next", "done")).reshape(num_envs, -1).any(-1).cpu())
                if break_when_any_done and bool(ends[-1].any()):
                    break
        finally:
            collector.shutdown(close_env=False)
        shown = np.stack([np.asarray(frame, np.uint8) for frame in frames]) if frames else None
        return {
            "reward": _mean_return(torch.stack(rewards), torch.stack(ends), break_when_any_done),
            "frames": None if shown is None else torch.from_numpy(shown),
        }

    def _collector(self, deterministic: bool) -> Collector:
        kind = InteractionType.DETERMINISTIC if deterministic else InteractionType.RANDOM
        frames = max(1, self.env.batch_size.numel())
        options: dict[str, Any] = {"frames_per_batch": frames, "exploration_type": kind}
        with muted():
            return Collector(self.env, self.policy, backend=DIRECT, **options)

    def close(self) -> None:
        """Closes the environment."""
        self.env.close(raise_if_closed=False)


def _mean_return(rewards: Tensor, ends: Tensor, stopped: bool) -> float:
    """Returns the mean return of episodes.

    Args:
        rewards: rewards, of shape ``(steps, environments)``.
        ends: flags that mark the last steps of episodes, of the same shape.
        stopped: whether the evaluation stops at the first end of an episode.

    Returns:
        The mean return of the episodes that ended. If the evaluation stops at the first end, or no
        episode ended, each environment's sum of rewards counts as a return.
    """
    if stopped or not ends.any():
        return float(rewards.sum(0).mean())
    sums = rewards.cumsum(0)
    returns = []
    for env in range(rewards.shape[1]):
        at = sums[ends[:, env], env]
        returns += torch.diff(at, prepend=torch.zeros(1, dtype=at.dtype)).tolist()
    return float(np.mean(returns))


def _renderer(env: Any) -> Callable[[], Any] | None:
    """Returns the function that renders an environment as arrays, or None if there is none."""
    inner = env.env if isinstance(env, GymEnv) else env
    render = getattr(inner, "render", None)
    return render if renders(inner) and callable(render) else None
