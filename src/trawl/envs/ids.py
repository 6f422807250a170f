"""Ids of environments that Gymnasium does not make, such as ``"dm_control:cheetah/run"``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trawl.envs.dm import make_dm_control
from trawl.envs.envpool_calls import make_envpool

# Makes an environment from the rest of its id, the number of environments in a vector environment
# or None, the autoreset mode or None, and further arguments.
_Maker = Callable[[str, int | None, Any, Mapping[str, Any]], Any]
_MAKERS: dict[str, _Maker] = {"dm_control": make_dm_control, "envpool": make_envpool}


def maker_of(env_id: str) -> tuple[_Maker | None, str]:
    """Returns the function that makes an environment, and the part of the id that it takes.

    Other ids belong to Gymnasium, and the function is None. Such an id may have a colon, too, after
    the name of a module that registers the environment.

    Example:
        >>> maker_of("Pendulum-v1")
        (None, 'Pendulum-v1')
        >>> maker_of("dm_control:cheetah/run")[1]
        'cheetah/run'
    """
    prefix, _, name = env_id.partition(":")
    maker = _MAKERS.get(prefix)
    return (None, env_id) if maker is None else (maker, name)
