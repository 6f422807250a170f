"""Options, kinds of environments, places and deliveries, and cases in which each two meet."""

from __future__ import annotations

from typing import Any

from tests.oracle.cases import DELIVERIES, KINDS, Case, arguments, can_pad
from tests.oracle.comparing import AGENTS, TORCHRL, WHOLE, Written
from tests.oracle.design import pairwise
from trawl.supported import Trait, refused
from trawl.testing.faces import FACES, POOLS
from trawl.testing.oracle import Options

# The first value of each factor can be combined with all values of the others.
FACTORS: dict[str, list[Any]] = {
    "face": list(KINDS),
    "place": ["one", "sync", "async", "sync_messages", "ready", "ready_sync"],
    "delivery": list(DELIVERIES),
    "policy": ["module", "function", "tensordict", "recurrent", "spoiling"],
    "frames_per_batch": [12, 3, 27],
    "exact": [False, True],
    "limit": [None, 2],
    "stack": [None, "reset", "zero"],
    "normalize": [None, "observations", "rewards", "both"],
    "random": [False, True],
    "reset_at_each_iter": [False, True],
    "set_truncated": [False, True],
    "is_init": [False, True],
    "policy_version": [False, True],
    "compact_obs": [False, True],
    "track_traj_ids": [True, False],
    "levels": [False, True, "late"],
    "masks": [False, True],
    "failures": [False, True],
    "memory": [
        *(None, "written", "use_buffers=False", "return_same_td"),
        *("sink", "ahead", "joined", "joined in time"),
    ],
    "watched": [False, True],
}


BUFFERS = ("buffer", "steps", "buffer_whole")


def case_of(chosen: dict[str, Any]) -> Case:
    normalize, stack = chosen["normalize"], chosen["stack"]
    options = Options(
        frames_per_batch=chosen["frames_per_batch"],
        total_frames=31 if chosen["exact"] else float("inf"),
        exact_frames=chosen["exact"],
        max_frames_per_traj=chosen["limit"],
        frame_stack=stack and 3,
        padding=stack or "reset",
        normalize_observations=normalize in ("observations", "both"),
        normalize_rewards=normalize in ("rewards", "both"),
        clip=0.9 if normalize == "both" else 10.0,
        keep_raw=normalize == "both",
        init_random_frames=13 if chosen["random"] else 0,
        restart=chosen["failures"],
        recurrent=chosen["policy"] == "recurrent",
        **{
            name: chosen[name]
            for name in (
                "reset_at_each_iter",
                "set_truncated",
                "is_init",
                "policy_version",
                "compact_obs",
                "track_traj_ids",
            )
        },
    )
    memory = {
        "use_buffers=False": {"use_buffers": False},
        "return_same_td": {"return_same_td": True},
        "ahead": {"prefetch": 1},
        "sink": {"sink": Written()},
        "joined": {"cat_results": 0},
        "joined in time": {"cat_results": -1},
    }
    return Case(
        chosen["face"],
        options,
        place=chosen["place"],
        delivery=chosen["delivery"],
        policy=chosen["policy"],
        further=memory.get(chosen["memory"], {}),
        levels=bool(chosen["levels"]),
        late=chosen["levels"] == "late",
        masks=chosen["masks"],
        failures=chosen["failures"],
        written=chosen["memory"] == "written",
        watched=chosen["watched"],
    )


def options_of(case: Case) -> dict[str, Any]:
    """Returns the values of the options by which the table says what is refused."""
    buffer = {"replay_buffer": True} if case.delivery in BUFFERS else {}
    given = {**arguments(case.options), **DELIVERIES[case.delivery], **case.further, **buffer}
    return {**given, "workers": case.place not in ("one", "ready")}


def allowed(case: dict[str, Any]) -> bool:
    chosen = {name: values[0] for name, values in FACTORS.items()} | case
    face, place, delivery = chosen["face"], chosen["place"], chosen["delivery"]
    normalize, exact, few = chosen["normalize"], chosen["exact"], chosen["frames_per_batch"] == 3
    workers, whole = place not in ("one", "ready"), delivery in WHOLE
    ready = place.startswith("ready")
    own = ready or face in POOLS
    late = face in POOLS or KINDS[face].kind.resets == "next"
    rows = delivery in ("rows", "split") and not exact
    traits = KINDS[face].traits | ({Trait.READY} if ready else set())
    if refused(options_of(case_of(chosen)), traits):
        return False
    # What the tests can't do.
    unknown = [
        # Which batches of asynchronous workers have random frames, or others' statistics.
        place == "async" and (chosen["random"] or normalize),
        workers and not rows and (chosen["random"] or normalize or face == "jax"),
        # Where the last batches of workers end.
        workers
        and exact
        and (chosen["set_truncated"] or chosen["reset_at_each_iter"] or chosen["failures"]),
        # Each step is a batch of its own, for all that is done to a batch as a whole.
        delivery == "steps"
        and (normalize or chosen["random"] or chosen["set_truncated"] or chosen["failures"]),
        # Its steps that only reset are none.
        delivery == "steps" and late and chosen["reset_at_each_iter"],
        place == "async" and face == "jax",
        # No episode would ever end.
        whole and chosen["reset_at_each_iter"] and few,
        chosen["policy"] == "function" and face in ("mapping", *AGENTS),
        # What its infos are is found out in the episodes before the one that fails at once.
        face in AGENTS[2:] and chosen["failures"] and chosen["levels"],
        not can_pad(face, delivery),
        # As in TorchRL, the first frame has no entry that only a policy knows.
        chosen["policy"] == "recurrent" and face in TORCHRL,
        chosen["masks"] and face in ("dm_env", *TORCHRL),
        # Which environments are ready, and when.
        own and (chosen["random"] or chosen["failures"]),
        own and workers and chosen["reset_at_each_iter"],
        own and workers and chosen["set_truncated"] and (delivery != "rows" or place == "async"),
        own and workers and late and normalize,
        face in POOLS and place == "ready_sync",
        chosen["memory"] in FACTORS["memory"][5:] and not place.startswith("sync"),
        str(chosen["memory"]).startswith("joined") and delivery == "split",
        own and (whole or delivery == "split") and normalize,
        ((own and whole) or face in POOLS) and chosen["reset_at_each_iter"],
        ready and not has_rows(face) and face not in POOLS,
        # A batch may end with some of the results of a vector environment's step.
        ready and KINDS[face].kind.together > 1 and chosen["reset_at_each_iter"],
        chosen["levels"] and face in ("dm_env", *TORCHRL),
        # A pool can't be reset again after steps that find out what its infos are.
        chosen["levels"] == "late" and face in POOLS,
        chosen["failures"] and face == "jax",
        # What agents do at random who do not act.
        face == "turns" and chosen["random"] and chosen["masks"],
    ]
    return not any(unknown)


def has_rows(face: str) -> bool:
    """Returns True if an environment's results go into rows, as AsyncBatchedCollector needs it."""
    others = ("tensors", "late", "jax", "parallel", "groups", "pool", "loose")
    return not face.startswith((*others, "agents_parallel", *TORCHRL))


STATES = {
    **FACTORS,
    "face": [face for face in FACES if face != "jax"],
    # In the workers of "ready_sync", environments are ready in another order each time.
    "place": [place for place in FACTORS["place"] if place != "ready_sync"],
    "delivery": ["rows", "cat", "in_turn"],
    "frames_per_batch": [12, 27],
    "memory": [one for one in FACTORS["memory"] if one not in ("written", "sink")],
    "watched": [False],
    # Batches before the state, and batches of the collector that loads it.
    "at": [1, 0, 2],
    "used": [0, 2],
}

# JAX compiles each collector anew.
JAX = {name: values[0] for name, values in STATES.items()}
JAX |= {"face": "jax", "levels": True, "place": "sync", "limit": 2, "used": 2}


def possible(case: dict[str, Any]) -> bool:
    """Returns True if batches of asynchronous workers depend on no order of arrival."""
    chosen = {name: values[0] for name, values in STATES.items()} | case
    mixed = chosen["delivery"] != "rows" or chosen["exact"]
    return allowed(case) and not (chosen["place"] == "async" and mixed)


STATE_CASES = [*pairwise(STATES, possible), JAX]
# Before and after a state, whole trajectories are compared as well. Environments that are ready at
# any time are compared again: to continue to the bit, they wait for each other.
OTHERS = [one for one in STATE_CASES if one["place"] != "ready" and one["delivery"] != "rows"]
CASES = pairwise(FACTORS, allowed, OTHERS)


def named(chosen: dict[str, Any]) -> str:
    """Returns a name for a case: the values that aren't the first ones."""
    known = {**FACTORS, **STATES}
    return "-".join(
        f"{name}={value}" if name not in ("face", "place", "delivery") else str(value)
        for name, value in sorted(chosen.items(), key=lambda item: list(known).index(item[0]))
        if value != known[name][0] or name == "face"
    )
