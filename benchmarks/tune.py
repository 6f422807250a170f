"""How close to the best of all layouts the choices of ``trawl.tune`` come.

    python benchmarks/tune.py                 # a quarter of an hour
    python benchmarks/tune.py --quick         # a glance; writes no file
    python benchmarks/tune.py --only waits

For each case, all layouts that the search can reach are measured in turn, in several rounds. Then
``tune`` searches. In the end, the best few of the first part and its choice are measured in turn,
for longer: a ratio compares rates of this part alone, because the best of many brief measurements
was also lucky.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
PROMISE = 0.9
# Number of the best layouts that are measured again.
FINALISTS = 4


@dataclass(frozen=True)
class Options:
    """How close to the best layout the choices come."""

    only: str = ""
    """Name of a case; all without it."""
    budget: float = 60.0
    """Seconds for each search."""
    seconds: float = 0.8
    """Seconds for each layout in each round, with the start of its processes."""
    rounds: int = 2
    """Rounds of the exhaustive measurement; the last part has three times as many."""
    json: Path = BENCHMARKS / "results" / "tune.json"
    """Where the numbers go."""
    quick: bool = False
    """A fifth of the budget, one round, and no file."""


@dataclass(frozen=True)
class TuneCase:
    """An environment and a policy."""

    name: str
    title: str
    source: Any
    policy: Callable[[], Any]


def waiting_env() -> Any:
    """A CartPole whose steps wait for 3 ms, as those of a simulator elsewhere do."""
    import gymnasium

    class Waiting(gymnasium.Wrapper):  # type: ignore[type-arg]
        def step(self, action: Any) -> Any:
            time.sleep(0.003)
            return self.env.step(action)

    return Waiting(gymnasium.make("CartPole-v1"))


def image_env() -> Any:
    """Four stacked images of 84 x 84 pixels, as from Atari; a step takes little time."""
    import gymnasium
    import numpy as np

    class Images(gymnasium.Env):  # type: ignore[type-arg]
        observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        action_space = gymnasium.spaces.Discrete(6)
        steps = 0

        def _image(self) -> Any:
            return np.full((4, 84, 84), self.steps % 256, np.uint8)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.steps = 0
            return self._image(), {}

        def step(self, action: Any) -> Any:
            self.steps += 1
            return self._image(), 1.0, False, self.steps >= 500, {}

    return Images()


def mlp_policy() -> Any:
    from tensordict.nn import TensorDictModule
    from torch import nn

    net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def image_policy() -> Any:
    import torch
    from tensordict.nn import TensorDictModule
    from torch import nn

    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                nn.Flatten(-3), nn.Linear(64 * 81, 256), nn.ReLU(), nn.Linear(256, 6),
            )  # fmt: skip

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            best = self.net(images.float() / 255).argmax(-1)
            return nn.functional.one_hot(best, 6)

    return TensorDictModule(Convolutions(), in_keys=["observation"], out_keys=["action"])


CASES = (
    TuneCase("cheap", "CartPole, random actions", "CartPole-v1", lambda: None),
    TuneCase("pendulum", "Pendulum, MLP 2x64", "Pendulum-v1", mlp_policy),
    TuneCase("waits", "CartPole that waits 3 ms, random actions", waiting_env, lambda: None),
    TuneCase("images", "84x84x4 images, convolutions", image_env, image_policy),
)


def in_turn(
    candidates: Sequence[Any], measure: Callable[[Any], float], rounds: int
) -> dict[Any, float]:
    """Returns the mean rate of each candidate over rounds, every second of which runs backwards.

    A candidate that fails has the rate 0.
    """
    rates: dict[Any, list[float]] = {each: [] for each in candidates}
    for turn in range(rounds):
        for each in candidates if turn % 2 == 0 else candidates[::-1]:
            try:
                rates[each].append(measure(each))
            except Exception as error:
                print(f"{each} failed: {error}", file=sys.stderr)
                rates[each].append(0.0)
    return {each: sum(found) / len(found) for each, found in rates.items()}


def best_of(rates: dict[Any, float], count: int) -> list[Any]:
    """Returns the candidates with the highest rates."""
    return sorted(rates, key=lambda each: -rates[each])[:count]


def compare(case: TuneCase, options: Options) -> dict[str, Any]:
    """Measures all layouts of a case, searches, and compares the choice with the best."""
    import trawl
    from trawl.extras.tuning.space import space_for, usable_cores
    from trawl.extras.tuning.trial import measure, probe
    from trawl.extras.tuning.tuner import default_frames

    policy = case.policy()
    seen = probe(case.source, policy, {})
    space = space_for(
        cores=usable_cores(), waits=seen.waits, batched=False, frames=default_frames(seen),
        fixed_frames=False, max_workers=None, max_envs=None, sync=None, learner=False,
    )  # fmt: skip

    def rate(candidate: Any, seconds: float = options.seconds) -> float:
        arguments = candidate.options(case.source)
        return measure(lambda: trawl.Collector(policy=policy, **arguments), seconds).rate

    layouts = space.everything()
    brief = in_turn(layouts, rate, options.rounds)
    result = trawl.tune(case.source, policy, budget=options.budget, progress=False)
    chosen = result.best.candidate
    finalists = list(dict.fromkeys([*best_of(brief, FINALISTS), chosen]))
    final = in_turn(finalists, lambda each: rate(each, 2 * options.seconds), 3 * options.rounds)
    best = best_of(final, 1)[0]
    return {
        "name": case.name,
        "title": case.title,
        "layouts": len(layouts),
        "brief": {f"{each.label}, {each.frames_per_batch}": brief[each] for each in layouts},
        "best": f"{best.label}, {best.frames_per_batch}",
        "best_rate": final[best],
        "chosen": f"{chosen.label}, {chosen.frames_per_batch}",
        "chosen_rate": final[chosen],
        "ratio": final[chosen] / final[best],
        "why": result.why,
    }


def main(options: Options) -> None:
    """Measure, and report."""
    # Read when torch, numpy and others are imported: hence the imports below this line.
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(BENCHMARKS))
    from dataclasses import replace

    from rich.console import Console
    from rich.table import Table

    from report import circumstances, write_json

    console = Console()
    if options.quick:
        options = replace(options, budget=options.budget / 5, rounds=1)
    names = [case.name for case in CASES]
    if options.only not in ("", *names):
        sys.exit(f"--only must be one of {', '.join(names)}, but it is {options.only}")
    table = Table(title="The chosen layouts, compared with the best of all")
    for heading in ("case", "layouts", "best", "chosen", "ratio"):
        table.add_column(heading)
    rows = []
    for case in CASES:
        if options.only in ("", case.name):
            row = compare(case, options)
            rows.append(row)
            table.add_row(
                row["title"], str(row["layouts"]), f"{row['best']}: {row['best_rate']:,.0f}/s",
                f"{row['chosen']}: {row['chosen_rate']:,.0f}/s", f"{row['ratio']:.2f}",
            )  # fmt: skip
            print(f"{case.name}: {row['ratio']:.2f}. {row['why']}")
    console.print(table)
    missed = [row["name"] for row in rows if row["ratio"] < PROMISE]
    if missed:
        console.print(f"Below {PROMISE}: {', '.join(missed)}")
    if not options.quick:
        settings = {"budget": options.budget, "rounds": options.rounds, "seconds": options.seconds}
        write_json(options.json, {**circumstances(settings), "cases": rows})
        console.print(f"Written: {options.json}")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
