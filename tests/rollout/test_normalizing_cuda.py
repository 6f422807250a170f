"""Normalised batches of environments whose data are on a GPU."""

from typing import Any

import pytest
import torch
from test_tensor_batches_cuda import COUNT, Counting, expected, policy

from trawl.collectors import Collector
from trawl.rollout import tensor_normalizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OPTIONS: dict[str, Any] = {
    "frames_per_batch": COUNT * 10,
    "normalize_observations": True,
    "normalize_rewards": True,
}


@pytest.mark.parametrize("kept", [1, None])
def test_no_step_waits_for_the_device(kept: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if kept is not None:
        monkeypatch.setattr(tensor_normalizer, "_KEPT_GPU", kept)
    with Collector(Counting(), policy(), **OPTIONS) as collector:
        collector.next()
        writer = collector._rollout.writer
        with torch.no_grad():
            writer.begin()
            act, step = writer.bind(0, 10, False)
            assert act is not None
            torch.cuda.set_sync_debug_mode("error")
            try:
                for t in range(10):
                    act(t)
                    step(t)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            writer.finish(10)


def test_statistics_are_exact() -> None:
    with Collector(Counting(), policy(), **OPTIONS) as collector:
        batches = [collector.next() for _ in range(2)]
        assert collector.normalization is not None
        found = collector.normalization.observations["observation"]
    assert found.count == COUNT * 20
    numbers = torch.arange(20.0, dtype=torch.float64)
    assert found.mean[5] == pytest.approx(float(numbers.mean()), rel=1e-12)
    assert found.var[5] == pytest.approx(float(numbers.var(correction=0)), rel=1e-9)
    first = numbers[:10]
    mean, std = float(first.mean()), float(first.std(correction=0))
    # The second batch has the statistics of the first one.
    own = (expected(11, 9) - mean) / std
    torch.testing.assert_close(batches[1]["observation"][:, 1:, 5], own)
