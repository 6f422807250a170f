"""Data without a fixed layout: it stays what it was, frame by frame."""

import itertools

import pytest
import torch
from tensordict import LazyStackedTensorDict
from tensordict.nn import TensorDictModule

from trawl.collectors import Collector
from trawl.testing import Ledger, RaggedEnv

STEP = 2


def envs(count=3):
    return [RaggedEnv(number, lengths=[3, 1 + number]) for number in range(count)]


def frames(batch):
    """The frames of a batch one by one, before and after their steps."""
    for index in itertools.product(*map(range, batch.shape)):
        yield batch[index]
        yield batch["next"][index]


def check(batch):
    """Text, sequence and graph belong to the numbers beside them."""
    for frame in frames(batch):
        number, episode, step, *_ = RaggedEnv.numbers(frame).tolist()
        assert frame["text"] == f"{number}.{episode}.{step}"
        assert list(frame["taken"]) == list(range(step))
        assert frame["graph"].nodes[:, 0].tolist() == list(range(step + 1))


def growing(observation):
    """Writes something of another shape at each step."""
    action = torch.eye(4, dtype=torch.int64)[0].expand(*observation.shape[:-1], 4)
    length = int(observation.reshape(-1, 5)[0, STEP])
    return action, torch.ones(*observation.shape[:-1], length + 1)


def policy():
    return TensorDictModule(growing, ["observation"], ["action", "grown"])


@pytest.mark.parametrize("count", [1, 2])
def test_entries_of_different_shapes_make_a_lazy_stack(count):
    made = envs(count)
    ledger = Ledger(made)
    with Collector(made[0] if count == 1 else made, policy(), frames_per_batch=8) as collector:
        for _ in range(3):
            batch = collector.next()
            assert isinstance(batch, LazyStackedTensorDict)
            assert batch.names[-1] == "time"
            check(batch)
            ledger.add(batch)
            lengths = [len(batch[..., t].reshape(-1)[0]["grown"]) for t in range(batch.shape[-1])]
            assert lengths == [
                int(batch[..., t].reshape(-1)[0]["observation"][STEP]) + 1
                for t in range(batch.shape[-1])
            ]


@pytest.mark.parametrize("act", [None, policy()], ids=["dense", "lazy"])
def test_a_frame_that_is_changed_in_place_changes_not_the_one_after_it(act):
    with Collector(RaggedEnv(lengths=[100]), act, frames_per_batch=4) as collector:
        batch = collector.next()
        batch[0]["next"].get("observation").fill_(7)
        assert RaggedEnv.numbers(batch[1])[STEP] == 1
