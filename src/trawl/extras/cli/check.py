"""The command ``trawl check``."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from gymnasium.error import UnregisteredEnv
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from trawl.envs.kinds import is_known
from trawl.extras.cli.arguments import CheckArguments
from trawl.extras.cli.environments import (
    build_unchecked,
    check_positive,
    check_seed_range,
    env_source,
)
from trawl.extras.cli.errors import CliError, explained, printable
from trawl.extras.cli.policies import load_policy
from trawl.extras.cli.references import search_here, split
from trawl.testing import CheckReport, check_env, check_policy

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def check(args: CheckArguments) -> int:
    """Checks an environment and a policy, and prints what was found.

    Returns:
        The exit code: 0, or 1 if there are errors.

    Raises:
        CliError: if the arguments are not valid, or there is no such environment or policy.
    """
    check_positive(args, "steps")
    check_seed_range(args.seed)
    search_here()
    source = env_source(args)
    report = replace(check_env(source, steps=args.steps, seed=args.seed), name=args.env)
    if any(one.topic == "construction" for one in report.findings):
        _check_id(args, source)
    console = Console(file=sys.stdout)
    _print(console, report)
    if args.policy is None or not report.ok:
        if args.policy is not None:
            _say(console, "  not checked: the policy, because the environment has errors")
        return 0 if report.ok else 1
    # Programs of torch.export are loaded in each process, rather than sent to it.
    worker = not os.path.isfile(args.policy)
    found = check_policy(_policy(args, source), source, seed=args.seed, worker=worker)
    _print(console, replace(found, name=f"policy {args.policy}"))
    return 0 if found.ok else 1


def _check_id(args: CheckArguments, source: Any) -> None:
    """Raises a ``CliError`` if there is no environment with the id that can't be made."""
    try:
        build_unchecked(args, source).close(raise_if_closed=False)
    except CliError as error:
        cause, module = error.__cause__, split(args.env)[0]
        is_missing = isinstance(cause, ImportError) and module and module not in sys.modules
        if is_missing or isinstance(cause, UnregisteredEnv) or is_known(args.env):
            raise


def _policy(args: CheckArguments, source: Any) -> Any:
    env = build_unchecked(args, source)
    try:
        with explained(f"--policy {args.policy}"):
            return load_policy(str(args.policy), env, args.seed, args.unsafe_pickle)
    finally:
        env.close(raise_if_closed=False)


def _print(console: Console, report: CheckReport) -> None:
    title = Text(printable(report.name), style="bold")
    console.print(title.append(f": {report.verdict}", style="default"))
    for finding in report.findings:
        line = Text()
        line.append(finding.level, style=_STYLES[finding.level])
        line.append(f" {finding.topic}: {printable(finding.message)}")
        if finding.place is not None:
            line.append(f" [{printable(finding.place)}]", style="dim")
        console.print(Padding(line, (0, 0, 0, 2)))
    for name, value in report.figures.items():
        _say(console, f"  {name}: {value:,.4g}")
    for what in report.not_checked:
        _say(console, f"  not checked: {what}")


def _say(console: Console, text: str) -> None:
    console.print(printable(text), markup=False, highlight=False)
