"""Parts of an environment whose states are captured one by one."""

from __future__ import annotations

from typing import Any

from trawl.envs.base import TensorDictEnv
from trawl.envs.capture.torchrl import torchrl_state


def state_parts(env: Any) -> list[Any]:
    """Returns the parts whose states together are the state of an environment.

    Each part has ``state_methods``, ``capture``, ``check_state`` and ``restore``, as in
    :class:`~trawl.envs.base.TensorDictEnv`. The list is empty if the state can't be captured.
    """
    found = env.parts if isinstance(env, TensorDictEnv) else [env]
    parts = [torchrl_state(part) or part for part in found]
    # Looked up in the class, because wrappers of other libraries pass on names they do not know.
    return parts if all(hasattr(type(part), "capture") for part in parts) else []
