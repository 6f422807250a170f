"""State of a collection in its dataset: when it is saved, and how ``--resume`` continues it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from trawl.collectors import CollectorConfig
from trawl.collectors.driver.state_checks import check_fits, has_episodes, why_uncaptured
from trawl.collectors.options import table
from trawl.data.sinks import FilesSink, Sink
from trawl.data.sinks.record import read_record
from trawl.data.sinks.states import SavedState, load_state, state_name
from trawl.data.state_files import check_plain_data
from trawl.errors import EnvStateError
from trawl.extras.cli.arguments import CollectArguments
from trawl.extras.cli.environments import env_kwargs
from trawl.extras.cli.errors import CliError, describe, message_of, print_note, shown
from trawl.extras.cli.flags import option_of
from trawl.extras.cli.policies import fingerprint
from trawl.extras.cli.statistics import save_statistics
from trawl.extras.cli.transforms import recorded_options
from trawl.keys import MASK
from trawl.versions import version

# Share of the collection's time that saving its state may take.
_SHARE = 0.02
# Least number of seconds between two states, if the dataset gets another file with each.
_SECONDS = 10.0
# Arguments on which the order of the frames depends. If one has changed, new episodes begin.
_SAME = ("frames_per_batch", "envs", "env_processes", "workers", "asynchronous")


class StateSaver:
    """Saves a collector's state and statistics with its dataset, from time to time.

    Args:
        collector: the collector.
        sink: sink of the dataset.
    """

    def __init__(self, collector: Any, sink: Sink) -> None:
        self._collector, self._sink = collector, sink
        self._next = -math.inf
        self._whole = True

    def save(self) -> None:
        """Saves the state now, unless the last batch was cut, and the statistics in any case.

        If the state of an environment can't be captured, no state is saved from now on.

        Raises:
            OSError: if a file can't be written.
        """
        began = time.monotonic()
        if self._whole:
            state = self._state()
            self._whole = state is not None
            self._sink.save_state(state)
        frames = self._sink.frames + self._sink.waiting
        save_statistics(self._collector, self._sink.directory, frames)
        now = time.monotonic()
        least = _SECONDS if isinstance(self._sink, FilesSink) else 0.0
        self._next = now + max((now - began) / _SHARE, least)

    def _state(self) -> dict[str, Any] | None:
        """Returns the collector's state; None if episodes could not go on from it."""
        try:
            state: dict[str, Any] = self._collector.state_dict()
            check_plain_data("the state", state)
        except Exception as error:  # a user's policy may raise anything
            print_note(f"note: --resume will begin new episodes: {describe(error)}")
            return None
        if has_episodes(state):
            return state
        print_note(f"note: --resume will begin new episodes: {why_uncaptured(state)}")
        return None

    def note(self, batch: TensorDictBase) -> None:
        """Saves the state and the statistics after a batch was written, if it is time to.

        Raises:
            OSError: if a file can't be written.
        """
        facts = self._collector.stats()
        ends = facts["frames"] >= facts["total_frames"]
        # The last batch may lack frames that the environments have already stepped past. With more
        # --frames, these frames must be collected after all, so the state before it is kept.
        if ends and _frames(batch) < facts["requested_frames_per_batch"]:
            self._whole = False
        elif time.monotonic() >= self._next:
            self.save()


def _frames(batch: TensorDictBase) -> int:
    mask = batch.get(MASK, None)
    return batch.numel() if mask is None else int(torch.count_nonzero(mask))


def state_to_continue(
    args: CollectArguments, directory: Path, facts: dict[str, Any]
) -> SavedState | None:
    """Returns the state of a dataset's collection, if it can be continued with these arguments.

    Otherwise, a note says why new episodes begin.

    Args:
        args: arguments of the command.
        directory: path of the dataset.
        facts: facts about the dataset.
    """
    try:
        saved = load_state(directory)
    except (OSError, ValueError) as error:
        note_new_episodes(message_of(error))
        return None
    why = None
    if saved is None:
        why = "the dataset has no state of its environments"
    elif saved.version != version():
        why = f"the state was saved by Trawl {saved.version}, but this is Trawl {version()}"
    else:
        why = _changed(args, facts)
    if why is not None:
        note_new_episodes(why)
        return None
    return saved


def _changed(args: CollectArguments, facts: dict[str, Any]) -> str | None:
    """Returns a text about an argument that has changed the order of frames; None if none has."""
    before = facts.get("arguments") or {}
    for name in _SAME:
        old, new = before.get(name), getattr(args, name)
        # The size of a batch is recorded, so it need not be given again.
        if old != new and not (name == "frames_per_batch" and new in (None, facts.get(name))):
            option = option_of({"asynchronous": "async"}.get(name, name))
            return f"{option} was {shown(old)}, and is {new} now"
    return None


def continues(collector: Any, saved: SavedState, trust: bool) -> bool:
    """Loads a state into a new collector.

    If the state can't be loaded, the collector is closed, and a note says why.

    Args:
        collector: the collector.
        saved: the state.
        trust: True to open pickled environments.
    """
    with ExitStack() as stack:
        stack.callback(collector.shutdown, raise_on_error=False)
        try:
            check_fits(saved.collector, collector.state_dict())
            collector.load_state_dict(saved.collector, trust=trust)
        except EnvStateError as error:
            note_new_episodes(message_of(error))
            return False
        except Exception as error:  # the state may come from a stranger
            note_new_episodes(f"the state can't be loaded: {describe(error)}")
            return False
        stack.pop_all()
    return True


def note_new_episodes(why: str) -> None:
    """Prints a note that the collection is resumed with new episodes."""
    print_note(f"note: new episodes begin: {why}")


def previous_facts(args: CollectArguments, directory: Path) -> dict[str, Any]:
    """Reads the facts about the dataset to resume, and checks them against the arguments.

    Returns:
        The facts that :func:`trawl.data.info` returns. If the dataset does not exist, or has
        neither frames nor a state, only ``frames``, which is 0.

    Raises:
        CliError: if the dataset can't be resumed at all, or not with these arguments.
    """
    if args.out is None:
        raise CliError("--resume continues the dataset in --out: pass --out too")
    try:
        record = read_record(directory)
        facts = record.facts()
        if not facts["frames"] and state_name(record) is None:
            return {"frames": 0}
    except FileNotFoundError:
        return {"frames": 0}
    except ValueError as error:
        raise CliError(str(error)) from error
    _check(directory, facts)
    made = facts.get("arguments") or {}
    _same(directory, "ENV", facts.get("env"), args.env)
    _same(directory, "--policy", facts.get("policy"), args.policy)
    _same(directory, "--format", facts["format"], args.format)
    _same_option(directory, "--env-kwargs", facts.get("env_kwargs"), env_kwargs(args))
    _same_option(directory, "--info-keys", facts.get("info_keys"), list(args.info_keys))
    _same_option(directory, "--deterministic", facts.get("deterministic"), args.deterministic)
    now = recorded_options(args.options)
    for name in (name for name, one in table(CollectorConfig).items() if one.record):
        before = facts.get(name, made.get(name))
        _same_option(directory, option_of(name), before, now.get(name))
    if args.seed is not None:
        _same(directory, "--seed", facts.get("seed"), args.seed)
    if facts.get("policy_sha256") != fingerprint(args.policy):
        raise CliError(
            f"{args.policy} has changed since {directory} was collected with it: collect into "
            "another --out, without --resume"
        )
    return facts


def is_resumed(facts: dict[str, Any]) -> bool:
    """Returns True if the facts from :func:`previous_facts` are those of a dataset to resume."""
    return set(facts) != {"frames"}


def _check(directory: Path, facts: dict[str, Any]) -> None:
    """Checks the facts that resuming uses, because a script may have written the dataset."""
    for name, fits in _FITS.items():
        value = facts.get(name)
        if value is not None and not fits(value):
            raise CliError(
                f"{directory} has {name} {shown(value)}, which trawl collect did not write: "
                "collect into another --out, without --resume"
            )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


_FITS: dict[str, Callable[[Any], bool]] = {
    "seed": _is_count,
    "date": lambda value: isinstance(value, str),
    "frames_per_batch": lambda value: _is_count(value) and value > 0,
    "arguments": lambda value: isinstance(value, dict) and _is_count(value.get("frames", 0)),
    "resumed": lambda value: (
        isinstance(value, list)
        and all(isinstance(each, dict) and _is_count(each.get("frames")) for each in value)
    ),
}


def _same(directory: Path, name: str, before: Any, now: Any) -> None:
    if before != now:
        raise CliError(
            f"{directory} was collected with {name} {shown(before)}, and can't be resumed with "
            f"{name} {now}: pass the same value, or another --out without --resume"
        )


def _same_option(directory: Path, name: str, before: Any, now: Any) -> None:
    """Checks an option that may be left out, in which case its value counts as False."""
    if bool(before) == bool(now):
        _same(directory, name, before or None, now or None)
    elif before:
        given = name if before is True else f"{name} {shown(before)}"
        raise CliError(
            f"{directory} was collected with {given}, and can't be resumed without it: pass it "
            "again, or another --out without --resume"
        )
    else:
        raise CliError(
            f"{directory} was collected without {name}, and can't be resumed with it: leave it "
            "out, or pass another --out without --resume"
        )
