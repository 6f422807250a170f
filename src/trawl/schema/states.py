"""Schema of all states: their entries, each declared once.

A state may come from a stranger. It is compared with the schema before anything is changed, and the
first entry that does not fit is named in a ``StateError``. A new entry is declared as optional,
because older states lack it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trawl.foreign.environments import OBSERVATIONS
from trawl.schema.checks import (
    UNKNOWN,
    Check,
    alike,
    anything,
    check_size,
    data_of_any_size,
    either,
    entries,
    flag,
    integer,
    like_own,
    listed,
    number,
    numpy_dtype,
    one_of,
    optional,
    refuse,
    row,
    table,
    text,
)
from trawl.schema.encoded import (
    GENERATORS,
    WORD,
    Encoded,
    attribute_name,
    check_layouts,
    check_same_kind,
    check_tree,
    kind_of,
)

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


def check_log(value: Mapping[str, Any], place: str) -> None:
    """Checks that the log of steps has an action for each step."""
    for index, one in enumerate(value["actions"]):
        if one is not None and (not one["rows"].ndim or len(one["rows"]) != value["steps"]):
            refuse(f"{place}['actions'][{index}]", f"{value['steps']} rows", one["rows"])
        if one is not None:
            numpy_dtype(one["dtype"], f"{place}['actions'][{index}]['dtype']")
        elif value["steps"]:
            refuse(f"{place}['actions'][{index}]", f"{value['steps']} rows", one)


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
    check = entries(
        {
            "origin": entries(origin),
            **_LOG,
            "generators": _generators_by_name,
            "emulator": optional(data_of_any_size),
            "wrappers": _wrappers(members),
        }
    )

    def check_all(value: Any, place: str, own: Any) -> None:
        check(value, place, own)
        check_log(value, place)

    return check_all


_POOL = entries(
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

    def parts_attributes(value: Any, place: str, own: Any) -> None:
        encoded.attributes(value, place, own)
        # The observations of the sub-environments are written into this array.
        name = OBSERVATIONS
        mine = own.get(name) if isinstance(own, Mapping) else UNKNOWN
        if kind_of(mine) == "array":
            check_same_kind(value.get(name), f"{place}[{name!r}]", mine)

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
        "parts": entries({"envs": listed(anything), "attributes": parts_attributes}),
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


def check_pool_log(value: Any, place: str, own: Any) -> None:
    """Checks the log of a pool of environments since it was made."""
    _POOL(value, place, own)
    check_log(value, place)
    width = -(-own // 8) if type(own) is int else value["ended"].shape[-1]
    if value["ended"].dtype is not torch.uint8 or value["ended"].shape != (value["steps"], width):
        refuse(f"{place}['ended']", f"a tensor of uint8 of {width} columns", value["ended"])
    for index, (_, bits) in enumerate(value["resets"]):
        if bits is not None and len(bits) != width:
            refuse(f"{place}['resets'][{index}]", f"{width} bytes", bits)


# --- collectors

_ID = integer(0, 2**62)
_VERSION = either({type(None): anything, int: _COUNT, str: text}, "a version of the policy")
_TENSORS = table(lambda value, place, own: like_own(value, place, UNKNOWN))
_ROWS = listed(_COUNT)
_READY = row(_COUNT, _ROWS, _ROWS)
_EPISODES = entries(
    {
        "next_id": _ID,
        "stride": integer(1, 2**31),
        "ids": listed(_ID, same_length=True),
        "steps": listed(_ID, same_length=True),
    }
)
_SUMS = entries(
    {"returns": listed(number, same_length=True), "lengths": listed(number, same_length=True)}
)
_SOURCE: dict[str, Check] = {
    "processes": _ROWS,
    "envs": entries({"ready": listed(_READY), "broken": _ROWS}),
    "due": listed(_READY),
    "waiting": _ROWS,
    "restarted": _ROWS,
    "unread": row(_ROWS, _ROWS),
    "results": _TENSORS,
    "limit": optional(
        entries(
            {
                "seen": listed(anything),
                "now": _COUNT,
                "open": listed(flag, same_length=True),
                "chosen": listed(_COUNT, same_length=True),
            }
        )
    ),
    "failures": optional(listed(_COUNT, same_length=True)),
}


def _source(value: Any, place: str, own: Any) -> None:
    """Checks the steps of environments that do not wait for each other."""
    entries(_SOURCE)(value, place, own)
    count, rows = len(value["processes"]), sum(value["processes"])
    for one in (*value["envs"]["ready"], *value["due"]):
        integer(0, count - 1)(one[0], f"{place}: the number of a process", UNKNOWN)
    for chosen in (
        *(part for one in (*value["envs"]["ready"], *value["due"]) for part in one[1:]),
        *value["unread"],
        value["restarted"],
    ):
        for index in chosen:
            integer(0, rows - 1)(index, f"{place}: the number of a row", UNKNOWN)
    for index in value["waiting"]:
        integer(0, count - 1)(index, f"{place}: the number of a process", UNKNOWN)


def _frame_rows(value: Any, place: str, own: Any) -> None:
    """Checks the rows with which the next batch begins."""
    if isinstance(own, Mapping) and "kind" in own:
        check_tree(value, place, own)
    else:
        _TENSORS(value, place, UNKNOWN)


_WRITER = entries(
    {"rows": _frame_rows, "episodes": _EPISODES, "sums": _SUMS},
    {
        "source": _source,
        "random_actions": entries({"next": _COUNT, "left": _TENSORS}),
        # The rows of the stages of frames without a fixed layout.
        "stages": _TENSORS,
    },
)
#: Entry of a state with which the episodes go on.
EPISODES = entries(
    {
        "format": integer(1, 1),
        "rollout": entries(
            {"writer": _WRITER, "random": GENERATORS, "own_stream": flag, "steps_done": _COUNT}
        ),
        # Each environment checks its own.
        "envs": listed(anything, same_length=True),
        "at_start": flag,
        "seed": optional(row(integer(0, 2**64), flag, _COUNT)),
        "env_restarts": _COUNT,
    }
)


def _source_name(value: Any, place: str, own: Any) -> None:
    if type(value) in (list, tuple):
        listed(_source_name)(value, place, UNKNOWN)
    else:
        optional(integer())(value, place, UNKNOWN)


_PLACE = row(row(_source_name, anything), _COUNT, _COUNT)
_TREES = listed(check_tree)
_ASSEMBLER = entries(
    {},
    {
        "whole": _TREES,
        "unfinished": listed(
            entries({"place": _PLACE, "trajectory": _ID, "frames": optional(_TREES)})
        ),
        "turns": entries({}, {"waiting": listed(row(_PLACE, _TREES)), "round": listed(_PLACE)}),
    },
)


def _finite(value: Any, place: str, own: Any) -> None:
    like_own(value, place, UNKNOWN)
    if not value.dtype.is_floating_point or not bool(value.isfinite().all()):
        refuse(place, "a tensor of finite numbers", value)


def _squares(value: Any, place: str, own: Any) -> None:
    _finite(value, place, own)
    if bool((value < 0).any()):
        refuse(place, "a tensor of numbers from 0", value)


def _counts(value: Any, place: str, own: Any) -> None:
    if not isinstance(value, Tensor):
        _ID(value, place, UNKNOWN)
    elif value.dtype is not torch.int64 or bool(((value < 0) | (value > 2**62)).any()):
        refuse(place, "a tensor of numbers from 0", value)


_MOMENTS: dict[str, Check] = {"count": _counts, "mean": _finite, "deviations": _squares}
NORMALIZATION = entries(
    {
        "training": flag,
        "statistics": listed(entries({"key": listed(text), **_MOMENTS})),
    }
)


def _traj_id(value: Any, place: str, own: Any) -> None:
    if isinstance(value, Tensor):
        like_own(value, place, UNKNOWN)
        if value.numel() == 1 and value.dtype in (torch.int32, torch.int64):
            value = value.item()
    _ID(value, place, UNKNOWN)


def _trajectories(value: Any, place: str, own: Any) -> None:
    entries({}, {"assembler": _ASSEMBLER, "delivered": _COUNT})(value, place, own)
    known = own.get("template", UNKNOWN) if isinstance(own, Mapping) else UNKNOWN
    check_layouts(dict(_waiting(value.get("assembler", {}), place)), known)


def _waiting(assembler: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """Yields the place and the frames of each piece of a trajectory."""
    pieces = [*assembler.get("whole", ())]
    for one in assembler.get("unfinished", ()):
        pieces += one["frames"] or ()
    for _, trees in assembler.get("turns", {}).get("waiting", ()):
        pieces += trees
    for index, tree in enumerate(pieces):
        at = f"{place}: piece {index} of the trajectories"
        if tree["kind"] != "tensordict" or len(tree["shape"]) != 1 or not tree["shape"][0]:
            refuse(at, "frames of shape [steps]", tree.get("shape"))
        if tree["names"] not in ([None], ["time"]):
            refuse(f"{at}['names']", "['time']", tree["names"])
        yield at, tree


_OPTIONAL: dict[str, Check] = {
    "env_state_dict": table(anything),
    "policy_state_dict": table(anything),
    "policy_version": _VERSION,
    "options": table(optional(either({bool: flag, int: integer()}, "a number or a bool"))),
    "traj_pool": entries({"traj_id": _traj_id}),
    "trajectories": _trajectories,
    "normalization": NORMALIZATION,
    "uncaptured": text,
    "episodes_begun": listed(_COUNT),
    "collector_progress": table(_COUNT),
    "watched": entries(
        {
            "episodes": entries(
                {"count": _COUNT, "returns": listed(number), "lengths": listed(_ID)}
            ),
            "logged": table(listed(number)),
        }
    ),
    # Of collectors with workers.
    "seeds": listed(optional(row(integer(0, 2**64), flag))),
    "requested": flag,
    "finished": listed(
        entries(
            {
                "worker": _COUNT,
                "batch": optional(check_tree),
                "frames": _COUNT,
                "filled": _COUNT,
                "version": _VERSION,
                "lag": _COUNT,
                "trajectory": _ID,
                "random": flag,
            },
            {
                "statistics": listed(row(listed(text), entries(_MOMENTS))),
                "ended": row(_COUNT, listed(number), listed(number)),
            },
        )
    ),
}


def check_collector(
    state: Any, own: Any, needed: Sequence[str] = (), place: str = "state_dict"
) -> None:
    """Checks the state of a collector, without the entry with its episodes.

    Args:
        state: the state.
        own: the state that the collector has now; UNKNOWN if it can't be told.
        needed: names of entries that must be there, besides the counts.
        place: name of the state, for error messages.
    """
    check_size(state, place)
    counts = {"frames": _ID, "iter": _ID}
    entries({**counts, **{name: _OPTIONAL.get(name, anything) for name in needed}}, _OPTIONAL)(
        state, place, own
    )


#: State of an evaluator.
EVALUATOR = entries({"step_counter": integer()})

#: Content of a checkpoint's file.
CHECKPOINT = entries(
    {
        "format": integer(),
        "trawl": text,
        "state": table(anything),
        "extra": table(anything, anything),
    }
)

#: States of the environments of other kinds, without what they check themselves.
GYM = entries(
    {
        "env": table(anything),
        "vector": optional(table(anything)),
        "seed": optional(row(integer(0, 2**64), flag)),
        "seeds": optional(listed(integer(0, 2**64), same_length=True)),
        "rebuilds": _COUNT,
    }
)


def check_adapter(value: Any, place: str, own: Any, strict: bool) -> None:
    """Checks the state of the adapter of a vector environment.

    Args:
        value: the state.
        place: its place.
        own: the present state.
        strict: True if values must have the types and the sizes of the adapter's own.
    """
    Encoded(strict=strict)(value, place, own)
    if kind_of(value) != "dict":
        refuse(place, "a dictionary", value)
    for name, one in value["items"]:
        if name == "masks" and kind_of(one) not in ("NoneType", "array"):
            refuse(f"{place}['masks']", "an array", one)


AGENTS = entries(
    {
        "env": table(anything),
        "arrays": entries(
            {
                "observations": listed(like_own, same_length=True),
                "rewards": listed(like_own, same_length=True),
                "flags": listed(like_own, same_length=True),
                "present": listed(text),
                "acting": listed(text),
                "flagged": alike,
                "done": flag,
            }
        ),
        "seeds": row(_SEED, _SEED),
        "rebuilds": _COUNT,
    }
)
FOREIGN = entries(
    {
        "env": table(anything),
        "root": optional(check_tree),
        "seed": optional(row(integer(0, 2**64), flag)),
        "rebuilds": _COUNT,
    }
)
MEMBER = entries({"parts": listed(anything)})
PARALLEL = entries(
    {
        "envs": listed(optional(MEMBER)),
        "generators": listed(optional(GENERATORS)),
        "seed": _SEED,
        "restarts": table(_COUNT, _COUNT),
    }
)
JAX = entries(
    {"identity": table(anything), "arrays": listed(like_own, same_length=True), "seed": _SEED}
)
_GRAPH = entries({**_IDENTITY, "objects": listed(anything), "own": table(anything)})
_TORCHRL = entries(
    {
        "way": one_of("attributes", "pickle"),
        **_IDENTITY,
        "simulators": listed(table(anything)),
        "cached": listed(flag),
        "objects": anything,
    }
)


def check_graph(state: Any, place: str, own: Mapping[str, Any], names: Sequence[str]) -> None:
    """Checks the state of a graph of objects with tensors (see trawl.envs.capture.objects).

    Args:
        state: the state.
        place: its place.
        own: the present state.
        names: names of the entries in ``own["own"]``.
    """
    _GRAPH(state, place, own)
    count = len(own["objects"])
    listed(anything, same_length=True)(state["objects"], f"{place}['objects']", own["objects"])
    encoded = Encoded(count)
    for index, (one, mine) in enumerate(zip(state["objects"], own["objects"], strict=True)):
        at = f"{place}['objects'][{index}]"
        if "state" in mine:
            entries({"state": Encoded()})(one, at, mine)
        else:
            entries({"attributes": table(encoded, attribute_name)})(one, at, mine)
    entries(dict.fromkeys(names, encoded))(state["own"], f"{place}['own']", own["own"])


def check_torchrl(state: Any, place: str, own: Any, members: int) -> None:
    """Checks the state of TorchRL's environment, without the simulators in it.

    Args:
        state: the state.
        place: its place.
        own: the present state; UNKNOWN if it can't be told.
        members: number of objects that values may refer to.
    """
    _TORCHRL(state, place, own)
    at = f"{place}['objects']"
    if state["way"] == "pickle":
        entries({"pickle": data_of_any_size, "signature": data_of_any_size})(
            state["objects"], at, UNKNOWN
        )
        return
    fields = {"class": text, "masks": table(anything)}
    plain = {"tensors": table(anything), "names": listed(text), "attributes": table(anything)}
    listed(entries(fields))(state["objects"], at, UNKNOWN)
    known: Any = ()
    if isinstance(own, Mapping) and own["way"] == "attributes":
        known = own["objects"]
    encoded = Encoded(members)
    for entry in ("tensors", "masks", "own", "attributes"):
        for index, one in enumerate(state["objects"]):
            entries({} if "own" in one else plain)(one, f"{at}[{index}]", UNKNOWN)
            if entry in one:
                mine = known[index].get(entry, UNKNOWN) if index < len(known) else UNKNOWN
                # TorchRL's own lists and tensors keep their sizes.
                encoded.strict = one["class"].startswith("torchrl.")
                table(encoded)(one[entry], f"{at}[{index}][{entry!r}]", mine)
