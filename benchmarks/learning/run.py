"""Train the examples with several seeds, by Trawl's collectors and by TorchRL's, in turn.

    python benchmarks/learning/run.py
    python benchmarks/learning/run.py --examples ppo --seeds 1 --json /tmp/learning.json

Each run has a process of its own, and nothing beside it. Counted is the time until the return that
an example aims at, from the call of its `main`, without evaluations; imports are not in it. After
each run the results are written, with the learning curves.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import tyro

ROOT = Path(__file__).resolve().parents[2]
ONCE = Path(__file__).parent / "once.py"
MARK = "result: "
Name = Literal["ppo", "ppo_workers", "ppo_recurrent", "dqn", "sac", "offline"]
RUNS: dict[Name, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {}),
    "ppo_workers": ("ppo", {"workers": 2}),
    "ppo_recurrent": ("ppo", {"recurrent": True}),
    "dqn": ("dqn", {}),
    "sac": ("sac", {}),
    "offline": ("offline", {}),
}


@dataclass(frozen=True)
class Options:
    """Train the examples with several seeds."""

    examples: tuple[Name, ...] = tuple(RUNS)
    """Which."""
    seeds: int = 5
    """Seeds, from 0."""
    who: tuple[Literal["Trawl", "TorchRL"], ...] = ("Trawl", "TorchRL")
    """Whose collectors."""
    json: Path = ROOT / "benchmarks" / "results" / "learning.json"
    """Where the results go; those of other examples stay."""


def main(options: Options) -> None:
    """Train, and write."""
    results = json.loads(options.json.read_text()) if options.json.exists() else {"examples": {}}
    results["about"] = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "tensordict", "torchrl")},
    }
    for name in options.examples:
        runs = results["examples"][name] = []
        for seed in range(options.seeds):
            for who in options.who:
                found = once(name, who, seed)
                runs.append({"who": who, "seed": seed, **found})
                options.json.write_text(json.dumps(results, indent=1) + "\n")
                print(
                    f"{name}, seed {seed}, {who}: "
                    + (
                        found.get("error")
                        or f"{found['mean_return']:.1f} in {seconds(found):.1f} s"
                    ),
                    flush=True,
                )


def once(name: Name, who: str, seed: int) -> dict[str, Any]:
    """One run, in a process of its own."""
    example, settings = RUNS[name]
    command = [sys.executable, str(ONCE), example, who, json.dumps({**settings, "seed": seed})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    made = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    for line in made.stdout.splitlines():
        if line.startswith(MARK):
            return dict(json.loads(line.removeprefix(MARK)))
    return {"error": made.stderr[-2000:]}


def seconds(found: dict[str, Any]) -> float:
    """What a run took."""
    if "seconds" in found:
        return float(found["seconds"])
    return float(found["collect_seconds"] + found["learn_seconds"])


if __name__ == "__main__":
    main(tyro.cli(Options))
