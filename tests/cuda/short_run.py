"""Collect a few batches in every way that uses the device: what a sanitizer watches."""

from __future__ import annotations

from functools import partial
from typing import Any

from test_batches_on_device import COUNT, SIZE, Counting, policy

from tests.collectors.collector_parts import Chooses
from tests.cuda.device import CPU, DEVICE
from trawl.collectors import AsyncBatchedCollector, Collector
from trawl.testing import NumberedEnv

WAYS: list[dict[str, Any]] = [
    {},
    {"storing_device": CPU},
    {"policy_device": CPU},
    {"frame_stack": SIZE},
    {"normalize_observations": True, "normalize_rewards": True},
    {"exact_frames": True, "total_frames": COUNT * 12},
]


def main() -> None:
    """Collects, and keeps batches while others are filled."""
    for options in WAYS:
        acting = policy(options.get("frame_stack"))
        with Collector(Counting(), acting, frames_per_batch=COUNT * 5, **options) as collector:
            held = [batch for batch, _ in zip(collector, range(4), strict=False)]
        total = sum(batch["observation"].double().sum().item() for batch in held)
        print(f"{options or 'plain'}: {len(held)} batches, sum {total:.0f}")
    makers = [partial(NumberedEnv, number) for number in range(4)]
    with AsyncBatchedCollector(
        makers, policy=Chooses(), frames_per_batch=40, total_frames=120, device=DEVICE
    ) as ready:
        print(f"as they are ready: {sum(batch.numel() for batch in ready)} frames")


if __name__ == "__main__":
    main()
