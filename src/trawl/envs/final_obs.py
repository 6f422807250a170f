"""Values of single sub-environments in the info of a vector environment."""

from __future__ import annotations

from typing import Any

#: Keys of the last observation in the info: since Gymnasium 1.1, and in earlier versions.
FINAL_OBS = ("final_obs", "final_observation")


def final_sample(info: Any, row: int) -> Any:
    """Returns the last observation of sub-environment ``row`` in ``info``, or None."""
    if isinstance(info, (list, tuple)):
        # DictInfoToList returns one info for each sub-environment.
        return next((info[row][name] for name in FINAL_OBS if name in info[row]), None)
    for name in FINAL_OBS:
        if name in info:
            present = info.get(f"_{name}")
            return row_of(info[name], row) if present is None or present[row] else None
    return None


def row_of(sample: Any, row: int) -> Any:
    """Returns the value of sub-environment ``row`` from an info entry that ``VectorEnv`` merged."""
    if isinstance(sample, dict):
        # For each entry, "_entry" is a mask of the sub-environments that have the entry.
        return {k: row_of(v, row) for k, v in sample.items() if not marks_presence(k, sample)}
    return sample[row]


def marks_presence(key: Any, sample: dict[Any, Any]) -> bool:
    """Returns True if ``key`` is the mask of another entry of ``sample``."""
    return str(key).startswith("_") and str(key)[1:] in sample
