"""The baselines of the examples run, and what was learned is told rightly."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import nursery
import pytest

ROOT = Path(__file__).resolve().parents[2]
ONCE = ROOT / "benchmarks" / "learning" / "once.py"
SHORT: dict[str, dict[str, Any]] = {
    "ppo": {"total_frames": 2_048},
    "dqn": {"total_frames": 512, "random_frames": 256, "eval_every": 512, "eval_episodes": 2},
    "sac": {
        "total_frames": 400,
        "random_frames": 200,
        "minibatch_size": 32,
        "samples_per_insert": 32,
        "eval_every": 100,
        "eval_episodes": 2,
    },
    "offline": {"frames": 1_000, "epochs": 1, "eval_episodes": 2},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "ppo" else pytest.mark.long) for name in SHORT],
)
def test_a_baseline_runs(name: str) -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    made = nursery.run(code, ONCE, name, "TorchRL", json.dumps(SHORT[name]))
    (line,) = [line for line in made.stdout.splitlines() if line.startswith("result: ")] or [""]
    assert line, made.stderr
    result = json.loads(line.removeprefix("result: "))
    assert result["frames"] == SHORT[name].get("total_frames", 1_000)
    assert result["seconds"] > 0
    assert result["target"]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    path = ROOT / "docs" / "scripts" / "learning_page.py"
    spec = importlib.util.spec_from_file_location("learning_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(who: str, seconds: float, solved: bool = True, **more: Any) -> dict[str, Any]:
    facts = {"frames": 1_000, "target": 475.0, "curve": [(1, 2.0)]}
    return {"who": who, "seed": 0, "solved": solved, "seconds": seconds, **facts, **more}


def test_runs_that_did_not_get_there_are_counted_but_not_timed(page: ModuleType) -> None:
    runs = [
        run("Trawl", 2.0, collect_seconds=0.5),
        run("Trawl", 4.0, collect_seconds=1.0),
        run("Trawl", 90.0, solved=False, collect_seconds=1.0),
        run("TorchRL", 6.0, collect_seconds=3.0),
        {"who": "TorchRL", "seed": 1, "error": "RuntimeError"},
    ]
    cells = page.row(runs).split(" | ")
    assert cells[:3] == ["2 of 3 / 1 of 2", "3.0 (2.0 – 4.0)", "6.0 (6.0 – 6.0)"]
    assert cells[3:] == ["**2.00**", "250 / 167", "25% / 50%"]


def test_a_peer_that_never_got_there_has_no_time(page: ModuleType) -> None:
    cells = page.row([run("Trawl", 2.0), run("TorchRL", 6.0, solved=False)]).split(" | ")
    assert cells[:4] == ["1 of 1 / 0 of 1", "2.0 (2.0 – 2.0)", "–", "–"]
    results = {
        "ppo": {"about": {"cores": 2, "versions": {"torch": "1"}}, "runs": [run("Trawl", 2.0)]}
    }
    assert "| PPO, CartPole-v1 | 475 | 1 of 1 / 0 of 0 |" in page.table(results)
