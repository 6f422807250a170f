"""Recipes for simulators, which run with stand-ins that have the same interface."""

from __future__ import annotations

from pathlib import Path

import packages
from test_doc_examples import SIMULATORS
from test_own_packages import RUN

TESTS = packages.ROOT / "tests"
LOOKALIKES = TESTS / "docs" / "lookalikes"

LAST_OBSERVATIONS = """
import torch
from mani_skill.envs import LENGTH, PickCube
from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

from trawl.collectors import Collector
from trawl.envs import TorchVectorEnv

for auto_reset, options in (
    (True, {"autoreset_mode": "SameStep"}),
    (False, {"autoreset_mode": "Disabled", "partial_reset": "ids"}),
):
    vector = ManiSkillVectorEnv(PickCube(num_envs=8), auto_reset)
    with Collector(TorchVectorEnv(vector, **options), frames_per_batch=8 * 20) as collector:
        collector.set_seed(0)
        batch = collector.next()
    steps, after = batch["observation"][..., 0], batch["next", "observation"]
    assert torch.equal(after[..., 0], steps + 1)
    assert torch.equal(batch["next", "truncated"].squeeze(-1), after[..., 0] == LENGTH)
    won = batch["next", "terminated"].squeeze(-1)
    assert won.any()
    assert torch.equal(won, after[..., 1] > 1)
"""


def test_the_page(tmp_path: Path) -> None:
    code = RUN.format(str(SIMULATORS))
    packages.run(code, LOOKALIKES, TESTS, TESTS / "docs", here=tmp_path)


def test_last_observations(tmp_path: Path) -> None:
    packages.run(LAST_OBSERVATIONS, LOOKALIKES, here=tmp_path)
