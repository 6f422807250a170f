"""Ctrl-C at random moments while batches are collected: each frame must come exactly once.

    python benchmarks/interrupts.py                      # 50 interrupts for each kind of collector
    python benchmarks/interrupts.py --count 10 --kinds single sync

Where batches don't depend on the speed of workers, they must also be equal to those of a collector
that is not interrupted.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import torch
from tensordict import TensorDictBase

from trawl import Collector, MultiAsyncCollector, MultiSyncCollector
from trawl.collectors import AsyncBatchedCollector
from trawl.envs import GymEnv, ParallelEnv
from trawl.rollout.policy.random_policy import RandomPolicy
from trawl.testing import Ledger, NumberedEnv

LENGTHS = [3, 1, 4]
STEPS, BATCHES = 40, 120


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Environment whose steps take a millisecond, so that most interrupts come within a step."""

    def step(self, action: Any) -> Any:
        """Takes a step."""
        time.sleep(0.001)
        return super().step(action)


def make(number: int) -> gymnasium.Env[Any, Any]:
    """Makes an environment whose steps are numbered."""
    return Slow(NumberedEnv(number=number, lengths=LENGTHS))


def policy() -> RandomPolicy:
    """Makes a policy for two environments."""
    return RandomPolicy(GymEnv(make(0)).full_action_spec.expand(2))


def distributed(name: str, **options: Any) -> Any:
    """Makes a collector whose workers may be on other machines."""
    from trawl.collectors import distributed

    if name == "RayCollector":
        import ray

        if not ray.is_initialized():
            ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
        options["remote_configs"] = {"num_cpus": 1, "num_gpus": 0}
    else:
        options["launcher"] = "mp"
    return getattr(distributed, name)(TWO, sync=True, **options)


TWO = [partial(make, 0), partial(make, 1)]
KINDS: dict[str, Callable[..., Any]] = {
    "single": partial(Collector, TWO[0]),
    "list": partial(Collector, TWO),
    "parallel": lambda **options: Collector(ParallelEnv(2, TWO), **options),
    "ready": lambda **options: AsyncBatchedCollector(TWO, policy=policy(), **options),
    "inference": lambda **options: AsyncBatchedCollector(
        TWO, policy=policy(), policy_backend="multiprocessing", **options
    ),
    "sync": partial(MultiSyncCollector, TWO),
    "async": partial(MultiAsyncCollector, TWO),
    "distributed": partial(distributed, "DistributedCollector"),
    "rpc": partial(distributed, "RPCCollector"),
    "ray": partial(distributed, "RayCollector"),
}
ANY_ORDER = ("ready", "inference", "async")


def collected(kind: str, count: int, seed: int) -> tuple[list[TensorDictBase], int]:
    """Collects; returns the batches, and the number of interrupts, which are at most ``count``."""
    moments, batches, interrupts = random.Random(seed), [], 0
    torch.manual_seed(0)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    with KINDS[kind](frames_per_batch=STEPS, total_frames=STEPS * BATCHES) as collector:
        collector.set_seed(3)
        while True:
            batch: Any = "none yet"
            try:
                if interrupts < count:
                    signal.setitimer(signal.ITIMER_REAL, 1e-4 + 0.06 * moments.random())
                batch = collector.next()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
                # The moment may have been between the call's end and the end of the timer.
                if isinstance(batch, str):
                    continue
            if batch is None:
                return batches, interrupts
            batches.append(batch.clone())


def check(kind: str, count: int, seed: int) -> dict[str, int]:
    """Checks every frame of a collector that is interrupted; returns figures."""
    batches, interrupts = collected(kind, count, seed)
    environments = 1 if kind == "single" else 2
    ledger = Ledger([NumberedEnv(number=i, lengths=LENGTHS) for i in range(environments)])
    for batch in batches:
        ledger.add(batch)
    assert ledger.frames == STEPS * BATCHES, f"{ledger.frames} frames"
    if kind not in ANY_ORDER:
        expected, _ = collected(kind, 0, seed)
        pairs = zip(batches, expected, strict=True)
        assert all((one == other).all() for one, other in pairs), "the batches differ"
    return {"interrupts": interrupts, "batches": len(batches), "frames": ledger.frames}


def main() -> None:
    """Interrupts each kind of collector, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="interrupts for each kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        print(kind, check(kind, arguments.count, arguments.seed), flush=True)


if __name__ == "__main__":
    main()
