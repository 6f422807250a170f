"""Policy that draws its actions from the environment's action spec."""

from __future__ import annotations

from copy import copy
from typing import Any

from tensordict import TensorDictBase

from trawl.envs.entries.masks import rand_actions
from trawl.envs.specs import Composite, Spec


class RandomPolicy:
    """Policy that draws random actions from the action spec, and respects action masks.

    Args:
        action_spec: spec of the action, or a composite of the specs of several actions. If None,
            each collector uses the spec of its own environment.
        action_key: key of the action; not used if ``action_spec`` is a composite.

    Examples:
        >>> from trawl.collectors import RandomPolicy
        >>> from trawl.envs import GymEnv
        >>> env = GymEnv("CartPole-v1")
        >>> policy = RandomPolicy(env.action_spec)
        >>> policy(env.reset())["action"].shape
        torch.Size([2])
    """

    _found: Any = None

    def __init__(
        self, action_spec: Any = None, action_key: str | tuple[str, ...] = "action"
    ) -> None:
        self.action_spec = action_spec
        self.action_key = action_key

    def set_action_spec_from_env(self, env: Any) -> None:
        """Copies the action spec of ``env`` if this policy has no action spec."""
        if self.action_spec is None:
            self.action_spec = env.full_action_spec.clone()

    def with_spec_of(self, env: Any) -> RandomPolicy:
        """Returns a policy with the action spec of ``env``; this one if it was made with a spec.

        This policy shows the last spec found in this way. Policies of other collectors keep theirs.
        """
        if self.action_spec is not self._found:
            return self
        self.action_spec = self._found = env.full_action_spec.clone()
        return copy(self)

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Writes random actions into ``td`` and returns it.

        Raises:
            RuntimeError: if there is no action spec yet.
        """
        if self.action_spec is None:
            raise RuntimeError(
                "RandomPolicy has no action spec: pass one, RandomPolicy(env.action_spec), or "
                "pass the policy to a collector"
            )
        # Composite specs have keys, and leaf specs have none. The same is true in TorchRL.
        spec = self.action_spec
        if isinstance(spec, Spec) and not isinstance(spec, Composite):
            spec, leaf = Composite(), spec
            spec[self.action_key] = leaf
        if isinstance(spec, Composite):
            return td.update(rand_actions(spec, td))
        drawn = spec.rand()
        return td.update(drawn) if hasattr(spec, "keys") else td.set(self.action_key, drawn)
