"""The command ``trawl evaluate``."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from tensordict.nn import InteractionType

from trawl.extras.cli.arguments import EvaluateArguments, flat
from trawl.extras.cli.environments import (
    build_unchecked,
    check_numbers,
    env_kwargs,
    env_source,
)
from trawl.extras.cli.errors import CliError, blamed, explained
from trawl.extras.cli.policies import PolicyLoader, fingerprint
from trawl.extras.cli.references import search_here
from trawl.extras.cli.statistics import STATISTICS
from trawl.extras.cli.summary import print_facts, run_name, show_environment
from trawl.extras.cli.transforms import (
    check_options,
    given_options,
    named_transforms,
    show_transforms,
)
from trawl.extras.evaluation import EvaluationResult, Evaluator
from trawl.extras.evaluation.statistics import Summary, summarise
from trawl.observe.formats import plural, short
from trawl.rollout.normalization import Normalization
from trawl.versions import versions


def evaluate(args: EvaluateArguments) -> int:
    """Evaluates a policy, prints a table and writes the results.

    Returns:
        The exit code: 0.

    Raises:
        CliError: if the arguments are not valid, or the evaluation fails. In both cases, no
            results are written.
        OSError: if the results can't be written.
    """
    check_numbers(args, "episodes", "max_steps", "envs")
    check_options(args.options)
    started = datetime.now(timezone.utc)
    out = Path(args.out or f"{run_name(args.env, started)}.json")
    if out.exists():
        raise CliError(f"{out} already exists: pass another --out")
    search_here()
    with _evaluator(args) as evaluator, explained("the evaluation failed", (Exception, SystemExit)):
        result = evaluator.evaluate()
    facts = _facts(args, started, result)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(facts, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    _print(facts, result, out)
    return 0


def _evaluator(args: EvaluateArguments) -> Evaluator:
    source = env_source(args)
    env = build_unchecked(args, source)
    loader = PolicyLoader(args.policy, args.seed, args.unsafe_pickle, args.options.frame_stack)
    try:
        # Loads the policy even with workers, so that errors are found before the workers start.
        with explained(f"--policy {args.policy}"):
            policy = loader(env)
    finally:
        env.close(raise_if_closed=False)
    normalization = _normalization(args.normalization)
    kind = InteractionType.RANDOM if args.stochastic else InteractionType.DETERMINISTIC
    # The evaluator's thread has its own random generators, so the seeded policy is made here.
    acts: dict[str, Any] = {"policy_factory": loader}
    if policy is not None and not args.workers:
        acts = {"policy": policy}
    with blamed(args.env, args.policy), named_transforms():
        evaluator = Evaluator(
            source,
            **acts,
            num_trajectories=args.episodes,
            max_steps=args.max_steps,
            exploration_type=kind,
            backend=args.backend if args.workers else "thread",
            num_envs=args.envs,
            num_workers=max(1, args.workers),
            seed=args.seed,
            dump_video=False,
            normalization=normalization,
            collector_kwargs=given_options(args.options),
        )
        try:
            evaluator.open()
        except BaseException:
            evaluator.shutdown()
            raise
    return evaluator


def _normalization(path: str | None) -> Normalization | None:
    """Returns the statistics in a file or in a dataset's folder; None without a path.

    Raises:
        CliError: if there is no file, it can't be read, or it has no statistics of observations.
    """
    if path is None:
        return None
    given = Path(path)
    file = given / STATISTICS if given.is_dir() else given
    if not file.is_file():
        raise CliError(f"--normalization {path}: there is no such file as {file}")
    hint = ". The file must be what torch.save wrote of collector.normalization.state_dict()"
    with explained(f"--normalization {path} can't be read", Exception, hint):
        found = Normalization.from_state(torch.load(file, weights_only=True))
    if found.options.observations is None:
        raise CliError(
            f"--normalization {path} has statistics of rewards only, and the evaluation normalises "
            "only observations: leave it out, or collect with --normalize-observations"
        )
    return found


def _facts(args: EvaluateArguments, started: datetime, result: EvaluationResult) -> dict[str, Any]:
    """Returns the content of the results file: the evaluation's settings and results."""
    episodes = result.episodes
    facts: dict[str, Any] = {
        "env": args.env,
        "env_kwargs": env_kwargs(args),
        "info_keys": list(args.info_keys),
        "policy": args.policy,
        "policy_sha256": fingerprint(args.policy),
        "stochastic": args.stochastic,
        "frame_stack": args.options.frame_stack,
        "normalization": args.normalization,
        "seed": args.seed,
        "date": started.isoformat(timespec="seconds"),
        "versions": versions(),
        "arguments": flat(args),
        "episodes": len(episodes),
        "steps_per_second": round(float(result["eval/fps"]), 1),
    }
    for name, values in (("return", episodes.returns), ("length", episodes.lengths)):
        facts[name] = _summary(values)
    if episodes.groups:
        facts["groups"] = {
            name: {**_summary(values), "returns": [_finite(one) for one in values.tolist()]}
            for name, values in episodes.groups.items()
        }
    facts["returns"] = [_finite(value) for value in episodes.returns.tolist()]
    facts["lengths"] = episodes.lengths.tolist()
    return facts


def _summary(values: NDArray[Any]) -> dict[str, float | None]:
    """Returns the statistics of a sample as JSON values; None for a number that is not finite."""
    summary = asdict(summarise(values.astype(np.float64)))
    summary |= {"min": float(values.min()), "max": float(values.max())}
    return {key: _finite(value) for key, value in summary.items()}


def _finite(value: float) -> float | None:
    """Returns the number, or None if it is not finite: JSON has only finite numbers."""
    return value if math.isfinite(value) else None


def _print(facts: dict[str, Any], result: EvaluationResult, out: Path) -> None:
    console = Console(file=sys.stdout)
    steps = int(result.episodes.lengths.sum())
    transforms = show_transforms(
        {**facts, "normalize_observations": facts["normalization"] is not None}
    )
    print_facts(
        console,
        {
            "environment": show_environment(facts),
            "policy": facts["policy"] + (", stochastic" if facts["stochastic"] else ""),
            "seed": str(facts["seed"]),
            **({"transforms": transforms} if transforms else {}),
            "steps": f"{steps:,}: {facts['steps_per_second']:,.0f} a second",
            "results": str(out),
        },
    )
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column(plural(facts["episodes"], "episode"), style="cyan")
    columns = []
    groups = result.episodes.groups if len(result.episodes.groups) > 1 else {}
    for name, values in (
        ("return", result.episodes.returns),
        *groups.items(),
        ("length", result.episodes.lengths.astype(np.float64)),
    ):
        table.add_column(name, justify="right")
        columns.append(_column(summarise(values), values))
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    console.print(table)


def _column(summary: Summary, values: Any) -> dict[str, str]:
    """Returns the statistics of a sample, formatted for the table."""
    return {
        "mean": short(summary.mean),
        "standard error": short(summary.sem),
        "95 % interval": f"{short(summary.low)} to {short(summary.high)}",
        "interquartile mean": short(summary.iqm),
        "standard deviation": short(summary.std),
        "min": short(values.min()),
        "max": short(values.max()),
    }
