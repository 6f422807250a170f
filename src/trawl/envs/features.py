"""Observations that describe what happens in an environment."""

from __future__ import annotations

from trawl.envs.dm import DISCOUNT
from trawl.envs.info_keys import INFO_KEY
from trawl.envs.masks import MASK_KEY
from trawl.keys import Key


def is_feature(key: Key) -> bool:
    """Returns True for observations that are normalised or stacked unless keys are chosen.

    Action masks, entries of ``info`` and the discount of dm_env are none of them.
    """
    return INFO_KEY not in key and key[-1] != MASK_KEY and key != (DISCOUNT,)
