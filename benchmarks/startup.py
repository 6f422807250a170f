"""What `import trawl` costs on top of the libraries that it needs anyway."""

from __future__ import annotations

import statistics
import subprocess
import sys
from dataclasses import dataclass, field

GOAL_MS = 50.0
# Timed inside a fresh interpreter, once the needed libraries are in: the difference between two
# whole starts would drown in the seconds, and their scatter, that importing torch takes.
PROGRAM = """
import time, torch, tensordict, gymnasium
start = time.perf_counter()
{statement}
print(time.perf_counter() - start)
"""
STATEMENTS = {
    "import trawl": GOAL_MS,
    "from trawl.collectors import Collector": None,
    "from torchrl.collectors import Collector": None,
}


@dataclass
class Startup:
    """Milliseconds that a statement took, one number per round; or why it failed."""

    statement: str
    goal: float | None
    milliseconds: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.milliseconds) if self.milliseconds else None


def measure_startup(rounds: int) -> list[Startup]:
    """Time the statements in turns, each time in a fresh interpreter."""
    startups = [Startup(statement, goal) for statement, goal in STATEMENTS.items()]
    for _ in range(rounds):
        for startup in startups:
            _time(startup)
    return startups


def _time(startup: Startup) -> None:
    if startup.error is not None:
        return
    program = PROGRAM.format(statement=startup.statement)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode == 0:
        startup.milliseconds.append(float(done.stdout.split()[-1]) * 1e3)
    else:
        startup.error = done.stderr.strip().rpartition("\n")[2]
