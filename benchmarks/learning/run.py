"""Train the examples with several seeds, by Trawl's collectors and by TorchRL's, in turn.

    python benchmarks/learning/run.py
    python benchmarks/learning/run.py --examples ppo --seeds 1 --json /tmp/learning.json

Each run has a process of its own, and nothing beside it. Counted is the time until the return that
an example aims at, without evaluations, from when the collector is made; for cloning, all of it,
with the program that collects. The results are written example by example, with the curves.
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
from once import MARK

ROOT = Path(__file__).resolve().parents[2]
ONCE = Path(__file__).parent / "once.py"
# Seconds for a run.
PATIENCE = 900.0
Name = Literal["ppo", "ppo_few_epochs", "ppo_workers", "ppo_recurrent", "dqn", "sac", "offline"]
RUNS: dict[Name, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {}),
    # Less learning for each frame, and more frames: collection takes most of the time.
    "ppo_few_epochs": ("ppo", {"num_epochs": 3, "minibatch_size": 512, "learning_rate": 2e-3}),
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
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    about = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "tensordict", "torchrl")},
    }
    for name in options.examples:
        runs = []
        for seed in range(options.seeds):
            for who in options.who:
                found = once(name, who, seed)
                runs.append({"who": who, "seed": seed, **found})
                told = found.get("error") or "{mean_return:.1f} in {seconds:.1f} s".format(**found)
                print(f"{name}, seed {seed}, {who}: {told}", flush=True)
        results[name] = {"about": about, "runs": runs}
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def once(name: Name, who: str, seed: int) -> dict[str, Any]:
    """One run, in a process of its own."""
    example, settings = RUNS[name]
    command = [sys.executable, str(ONCE), example, who, json.dumps({**settings, "seed": seed})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        made = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {PATIENCE:.0f} s"}
    for line in made.stdout.splitlines():
        if line.startswith(MARK):
            return dict(json.loads(line.removeprefix(MARK)))
    return {"error": made.stderr.strip().splitlines()[-1][:500] if made.stderr.strip() else "none"}


if __name__ == "__main__":
    main(tyro.cli(Options))
