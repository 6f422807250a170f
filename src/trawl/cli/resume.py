"""Checks for ``trawl collect --resume``, which continues a dataset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trawl.cli.arguments import CollectArguments
from trawl.cli.environments import env_kwargs
from trawl.cli.errors import CliError, shown
from trawl.cli.policies import fingerprint
from trawl.data.sinks.record import read_record
from trawl.data.sinks.states import state_name


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
    limit = "max_frames_per_traj"
    _same_option(directory, "--max-frames-per-traj", made.get(limit), args.max_frames_per_traj)
    _same_option(directory, "--env-kwargs", facts.get("env_kwargs"), env_kwargs(args))
    _same_option(directory, "--info-keys", facts.get("info_keys"), list(args.info_keys))
    for name in ("frame_stack", "normalize_observations", "normalize_rewards", "deterministic"):
        option = f"--{name.replace('_', '-')}"
        _same_option(directory, option, facts.get(name), getattr(args, name))
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
