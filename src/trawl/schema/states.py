"""Schema of all states: their entries, each declared once."""

from __future__ import annotations

from typing import Any

from trawl.schema.checks import (
    UNKNOWN,
    Check,
    anything,
    data_of_any_size,
    entries,
    integer,
    like_own,
    listed,
    number,
    one_of,
    optional,
    refuse,
    row,
    table,
    text,
)
from trawl.schema.encoded import WORD, Encoded, attribute_name

# --- environments that are captured (see trawl.envs.capture)

_COUNT = integer()
_SEED = optional(integer(-(2**127), 2**128))
_IDENTITY = {"identity": table(text)}
_LOG: dict[str, Check] = {
    "steps": _COUNT,
    "actions": listed(optional(entries({"dtype": text, "rows": like_own}))),
    "rewards": WORD,
    "observed": listed(like_own),
}


def _generators_by_name(value: Any, place: str, own: Any) -> None:
    table(Encoded(), attribute_name)(value, place, UNKNOWN)
    for name, one in value.items():
        if type(one) is not dict or one["kind"] not in ("generator", "random_state", "random"):
            refuse(f"{place}[{name!r}]", "the state of a generator", one)


def _arguments(value: Any, place: str, own: Any) -> None:
    Encoded()(value, place, UNKNOWN)
    if type(value) is not dict or value["kind"] != "dict":
        refuse(place, "a dictionary of arguments", value)


def _wrappers(members: int) -> Check:
    return lambda value, place, own: listed(Encoded(members).attributes)(value, place, own)


def episode(members: int) -> Check:
    """Returns a check for the log of an episode; ``members`` counts wrappers and environment."""
    origin: dict[str, Check] = {
        "arguments": _arguments,
        "generators": _generators_by_name,
        "numbers": table(number, attribute_name),
        "emulator": optional(data_of_any_size),
        "wrappers": _wrappers(members),
    }
    return entries(
        {
            "origin": entries(origin),
            **_LOG,
            "generators": _generators_by_name,
            "emulator": optional(data_of_any_size),
            "wrappers": _wrappers(members),
        }
    )


#: Log of a pool of environments since it was made.
POOL = entries(
    {
        "way": one_of("replay"),
        **_IDENTITY,
        "resets": listed(row(_COUNT, optional(data_of_any_size))),
        "ended": like_own,
        **_LOG,
    }
)

#: Entries of the state of an environment that are the same whatever the way.
CAPTURED: dict[str, Check] = {"way": text, "identity": table(text), "state": anything}


def captured(way: str, members: int) -> Check:
    """Returns a check for the state of a chain of wrappers, captured in a way.

    Args:
        way: the way.
        members: number of wrappers, and the environment.
    """
    encoded = Encoded(members)
    bases: dict[str, Check] = {
        "get_state": encoded,
        "ale": entries({"ale": data_of_any_size, "attributes": encoded.attributes}),
        "mujoco": entries(
            {
                "model": text,
                "physics": encoded,
                "derived": Encoded(),
                "attributes": encoded.attributes,
            }
        ),
        "attributes": encoded.attributes,
        # The sub-environments are checked one by one.
        "parts": entries({"envs": listed(anything), "attributes": encoded.attributes}),
    }
    if way == "pickle":
        return entries({"pickle": data_of_any_size, "signature": data_of_any_size})
    if way not in bases:
        return anything

    def wrappers(value: Any, place: str, own: Any) -> None:
        listed(encoded.attributes)(value, place, own)
        if len(value) != members - 1:
            refuse(place, f"a list of {members - 1}", value)

    return entries({"base": bases[way], "wrappers": wrappers})
