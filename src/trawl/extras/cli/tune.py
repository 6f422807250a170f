"""The command ``trawl tune``."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from rich.console import Console

from trawl.extras.cli.arguments import TuneArguments, TuneOptions
from trawl.extras.cli.collectors import PolicyFactory
from trawl.extras.cli.environments import (
    build_unchecked,
    check_positive,
    check_seed_range,
    env_source,
)
from trawl.extras.cli.errors import blamed, explained, printable
from trawl.extras.cli.flags import option_of
from trawl.extras.cli.policies import PolicyLoader
from trawl.extras.cli.references import search_here
from trawl.extras.cli.transforms import check_options, given_options, named_transforms
from trawl.extras.tuning import Candidate, TuneResult
from trawl.extras.tuning import tune as search


def tune(args: TuneArguments) -> int:
    """Searches for the fastest layout, and prints a table and the best layout.

    Returns:
        The exit code: 0.

    Raises:
        CliError: if the arguments are not valid, or nothing could be measured.
    """
    check_positive(args, "budget", "frames_per_batch", "max_workers", "max_envs")
    check_seed_range(args.seed)
    check_options(args.options)
    search_here()
    source = env_source(args)
    options = given_options(args.options)
    if _has_policy(args, source):
        loader = PolicyLoader(args.policy, args.seed, args.unsafe_pickle, args.options.frame_stack)
        options["policy_factory"] = PolicyFactory(source, loader)
    with blamed(args.env, args.policy), named_transforms():
        result = search(
            source,
            budget=args.budget,
            frames_per_batch=args.frames_per_batch,
            sync=True if args.sync else False if args.asynchronous else None,
            max_workers=args.max_workers,
            max_envs=args.max_envs,
            **options,
        )
    _print(args, result)
    return 0


def _has_policy(args: TuneArguments, source: Any) -> bool:
    """Makes the environment and the policy once, so that errors name the argument.

    Returns:
        False for random actions.
    """
    env = build_unchecked(args, source)
    try:
        with explained(f"--policy {args.policy}"):
            loader = PolicyLoader(
                args.policy, args.seed, args.unsafe_pickle, args.options.frame_stack
            )
            return loader(env) is not None
    finally:
        env.close(raise_if_closed=False)


def _print(args: TuneArguments, result: TuneResult) -> None:
    console = Console()
    console.print(result)
    for text in (result.why, result.code, command_of(args, result.best.candidate)):
        console.print(printable_lines(text), markup=False, highlight=False, soft_wrap=True)
        console.print()
    sys.stdout.flush()


def printable_lines(text: str) -> str:
    """Escapes unprintable characters, but keeps line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def command_of(args: TuneArguments, candidate: Candidate) -> str:
    """Returns the command that collects with a layout."""
    words = ["trawl", "collect", args.env]
    given = {"env_kwargs": args.env_kwargs, "policy": args.policy, **vars(args.options)}
    default = {"policy": "random", **vars(TuneOptions())}
    for name, value in given.items():
        if value != default.get(name):
            words += [option_of(name)] if value is True else [option_of(name), str(value)]
    if args.info_keys:
        words += ["--info-keys", *args.info_keys]
    if candidate.envs > 1:
        words += ["--envs", str(candidate.envs)]
    if candidate.env_processes:
        words += ["--env-processes", str(candidate.env_processes)]
    if candidate.workers:
        words += ["--workers", str(candidate.workers)]
        words.append("--sync" if candidate.sync else "--async")
    words += ["--frames-per-batch", str(candidate.frames_per_batch)]
    if args.unsafe_pickle:
        words.append("--unsafe-pickle")
    return shlex.join(words)
