"""Python code that makes the collector of a layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from trawl.collectors.tuning.candidate import Candidate
from trawl.envs.frame_stack import FrameStack
from trawl.rollout.normalization import NormalizeObservation, NormalizeReward

# Values whose repr can be used as code.
_PLAIN = (bool, int, float, str, type(None))
# Code for an infinite number, whose repr is not code.
_INFINITY = "float('inf')"
# Public modules of the objects that are shown as calls of their classes.
_MODULES: dict[type, str] = {
    FrameStack: "trawl.envs",
    NormalizeObservation: "trawl.collectors",
    NormalizeReward: "trawl.collectors",
}


def code_of(
    candidate: Candidate,
    source: Any,
    policy: Any,
    options: Mapping[str, Any],
) -> str:
    """Returns Python code that makes a collector, and collects a batch.

    Args:
        candidate: the layout.
        source: the source of one environment. An id is shown as it is, other sources as
            ``make_env``.
        policy: the policy; shown as ``policy``, unless it is None.
        options: further options. Plain values, stacks and normalisation are shown; a policy
            factory is shown as ``make_policy``, and other values by the option's name.

    Examples:
        >>> one = Candidate(workers=2, envs=4, frames_per_batch=800, sync=False)
        >>> print(code_of(one, "CartPole-v1", None, {}))
        from trawl import MultiAsyncCollector
        collector = MultiAsyncCollector([['CartPole-v1'] * 4] * 2, frames_per_batch=800)
        batch = collector.next()
    """
    name = "Collector"
    if candidate.workers:
        name = "MultiSyncCollector" if candidate.sync else "MultiAsyncCollector"
    env = repr(source) if isinstance(source, str) else "make_env"
    rest = dict(options)
    names = [name]
    if candidate.env_processes:
        names.append("ParallelEnv")
        env = _parallel(candidate, env, rest.pop("create_env_kwargs", None))
    elif candidate.envs > 1:
        env = f"[{env}] * {candidate.envs}"
    if candidate.workers:
        env = f"[{env}] * {candidate.workers}"
    arguments = [env, *([] if policy is None else ["policy"])]
    arguments.append(f"frames_per_batch={candidate.frames_per_batch}")
    if candidate.prefetch:
        arguments.append(f"prefetch={candidate.prefetch}")
    arguments += (f"{option}={_text(option, value)}" for option, value in rest.items())
    kinds = {type(one) for one in rest.values()} & _MODULES.keys()
    imports = sorted(f"from {_MODULES[kind]} import {kind.__name__}" for kind in kinds)
    return "\n".join(
        [
            *imports,
            f"from trawl import {', '.join(names)}",
            f"collector = {name}({', '.join(arguments)})",
            "batch = collector.next()",
        ]
    )


def _parallel(candidate: Candidate, env: str, kwargs: Any) -> str:
    each = candidate.envs // candidate.env_processes
    more = f", envs_per_worker={each}" if each > 1 else ""
    if kwargs:
        more += f", create_env_kwargs={_text('create_env_kwargs', kwargs)}"
    return f"ParallelEnv({candidate.envs}, {env}{more})"


def _text(option: str, value: Any) -> str:
    if option == "policy_factory":
        return "make_policy"
    if type(value) in _MODULES:
        return _call(value)
    return repr(value) if _is_plain(value) else option


def _call(value: Any) -> str:
    """Returns the call that makes an object of options, without arguments that are defaults."""
    given = [(field, getattr(value, field.name)) for field in fields(value)]
    arguments = [
        f"{field.name}={_INFINITY if each == math.inf else repr(each)}"
        for field, each in given
        if field.default is MISSING or each != field.default
    ]
    return f"{type(value).__name__}({', '.join(arguments)})"


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
