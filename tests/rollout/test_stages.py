"""A stage for all kinds of environments, which writes a column of its own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from typing_extensions import override

from trawl.collectors import AsyncBatchedCollector, Collector, RandomPolicy
from trawl.envs import ParallelEnv
from trawl.keys import Key
from trawl.rollout.batches import StepFn
from trawl.rollout.block import Block
from trawl.rollout.layout import Leaf
from trawl.rollout.stages import staged_rows
from trawl.rollout.stages.stage import Stage, StageSetup
from trawl.testing import NumberedEnv, NumberedTorchEnv, RaggedEnv

STEPS = 5
LEAVES = {("row",): Leaf((2,), torch.int64)}
SEEN = {("seen",): Leaf((1,), torch.float32)}
MEASURED = {("measured",): Leaf((1,), torch.int64)}


class RowNumbers(Stage[Any, Any]):
    """Writes the number of each row."""

    more_leaves = LEAVES

    @override
    def finish(self, block: Block, filled: int) -> None:
        rows = block.flat(("row",))
        rows[:] = torch.arange(len(rows))[:, None, None]


class Seen(Stage[Any, Any]):
    """Writes what it reads: the rewards."""

    more_leaves = SEEN

    @override
    @classmethod
    def reads(cls, setup: StageSetup[Any]) -> list[Key]:
        return list(setup.rewards)

    @override
    def finish(self, block: Block, filled: int) -> None:
        block.flat(("seen",)).copy_(block.flat(("next", "reward")))


class Measured(Stage[Any, Any]):
    """Counts steps while they are taken."""

    more_leaves = MEASURED
    steps = 0

    @override
    def begin(self, block: Block, view: Any) -> Any:
        self._column = block.flat(("measured",))
        return view

    @override
    def bind(self, step: StepFn, view: Any, part: slice, start: int, stop: int) -> StepFn:
        rows = self._column[start:stop, part]

        def step_and_note(t: int) -> None:
            step(t)
            self.steps += 1
            rows[t] = self.steps

        return step_and_note

    @override
    def record(self, envs: Any, start: int) -> None:
        self.steps += 1
        self._column[start : start + len(envs)] = self.steps


@pytest.fixture(autouse=True)
def column() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for stage in (RowNumbers, Seen, Measured):
            patch.setitem(staged_rows._STAGES, stage, {})
        yield


ENVS: dict[str, Any] = {
    "one": NumberedEnv,
    "several": [NumberedEnv, NumberedEnv],
    "processes": lambda: ParallelEnv(2, NumberedEnv),
    "tensors": lambda: NumberedTorchEnv(3),
    "ragged": RaggedEnv,
}


@pytest.mark.parametrize("name", ENVS)
def test_a_column_is_in_every_batch(name: str) -> None:
    with Collector(ENVS[name], frames_per_batch=6 * STEPS) as collector:
        for number in range(2):
            batch = collector.next()
            assert batch["row"].shape == (*batch.shape, 2)
            assert (batch["row"] == torch.arange(batch.shape[-1]).unsqueeze(-1)).all()
            assert torch.equal(batch["seen"], batch["next", "reward"])
            assert batch["seen"].any()
            first = number * batch.shape[-1] + 1
            steps = torch.arange(first, first + batch.shape[-1]).unsqueeze(-1)
            assert (batch["measured"] == steps).all()


def test_a_column_is_in_batches_in_order_of_arrival() -> None:
    envs = [NumberedEnv, NumberedEnv]
    with AsyncBatchedCollector(envs, policy=RandomPolicy(), frames_per_batch=STEPS) as collector:
        measured = 0
        for _ in range(2):
            batch = collector.next()
            assert batch["row"].tolist() == [[row, row] for row in range(STEPS)]
            # Environments that are ready at the same time are recorded together.
            for value in batch["measured"].flatten().tolist():
                assert value in (measured, measured + 1)
                measured = value
            assert measured
