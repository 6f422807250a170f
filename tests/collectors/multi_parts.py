"""What several tests of collectors with workers need."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from collector_parts import by_step
from tensordict import TensorDictBase
from torch import Tensor, nn

from trawl.backends import InlineBackend
from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from trawl.testing import Ledger, NumberedEnv

TRAJ_IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")
LENGTHS = (3, 5, 1)
CLASSES = [MultiSyncCollector, MultiAsyncCollector]
ALL = pytest.mark.parametrize("cls", [Collector, *CLASSES], ids=["one", "sync", "async"])
BOTH = pytest.mark.parametrize("cls", CLASSES, ids=["sync", "async"])
#: One class in this process, the other one in processes.
PLACES = pytest.mark.parametrize(
    ("cls", "method"),
    [(MultiSyncCollector, "inline"), (MultiAsyncCollector, "forkserver")],
    ids=["sync", "async"],
)


def envs(workers: int, lanes: int | None = None, kind: Any = NumberedEnv, **kwargs: Any) -> list:
    """A factory for each worker, or ``lanes`` of them; the environments are numbered."""
    kwargs.setdefault("lengths", LENGTHS)
    if lanes is None:
        return [partial(kind, number, **kwargs) for number in range(workers)]
    flat = [partial(kind, number, **kwargs) for number in range(workers * lanes)]
    return [flat[i * lanes : (i + 1) * lanes] for i in range(workers)]


def ledger(
    workers: int,
    lanes: int | None = None,
    kind: Any = NumberedEnv,
    limit: int | None = None,
    **kwargs: Any,
) -> Ledger:
    """Checks the frames of :func:`envs` of the same arguments."""
    kwargs.setdefault("lengths", LENGTHS)
    return Ledger([kind(n, **kwargs) for n in range(workers * (lanes or 1))], limit)


def make(cls: Any = MultiSyncCollector, workers: int = 2, lanes: int | None = None, **options: Any):
    """A collector of numbered environments, whose policy acts by the step.

    With ``start_method="messages"`` workers are inline, and share no memory with their parent.
    ``Collector`` has the environments of the first worker.
    """
    if cls is Collector:
        (first, *_) = options.pop("create_env_fn", envs(1, lanes))
        return Collector(first, options.pop("policy", by_step()), **_sized(options))
    options.setdefault("start_method", "inline")
    options = _sized(options)
    given = "policy_factory" in options
    policy = options.pop("policy", None if given else by_step())
    if options["start_method"] == "messages":
        options["start_method"] = "inline"
        cls = type(cls.__name__, (cls,), {"_new_backend": lambda self: InlineBackend(False)})
    own = "create_env_fn" in options
    sources = options.pop("create_env_fn") if own else envs(workers, lanes)
    return cls(sources, policy, **options)


def _sized(options: dict[str, Any]) -> dict[str, Any]:
    return {"frames_per_batch": 10, **options}


def rows_of_workers(batch: TensorDictBase) -> list[TensorDictBase]:
    """The part of each worker in a batch of single environments, which may be of one."""
    return list(batch) if batch.ndim > 1 else [batch]


def together(cls: Any) -> bool:
    """Whether batches are made by all workers together."""
    return cls is MultiSyncCollector


def worker_of(batch: TensorDictBase) -> int:
    """The number of the environment that a batch of one worker is of."""
    (number,) = set(NumberedEnv.numbers(batch)[..., 0].reshape(-1).tolist())
    return number


def drained(collector: Any, book: Ledger) -> list[TensorDictBase]:
    """All batches, checked; the collector is closed after."""
    found = []
    with collector:
        for batch in collector:
            book.add(batch)
            found.append(batch)
    return found


def until_it_fails(collector: Any) -> NoReturn:
    """Collects without an end: some workers may be much quicker than the one that fails."""
    with collector:
        while True:
            collector.next()


class Chooser(nn.Module):
    """A policy for ``NumberedEnv`` with one weight: the number of the action."""

    def __init__(self, choice: int = 0) -> None:
        super().__init__()
        self.choice = nn.Parameter(torch.tensor(float(choice)))

    def forward(self, observation: Tensor) -> Tensor:
        action = nn.functional.one_hot(self.choice.long(), 4)
        return action.expand(*observation.shape[:-1], 4)

    def become(self, choice: int) -> None:
        """Takes another weight, in place, as an optimiser's step does."""
        with torch.no_grad():
            self.choice.fill_(float(choice))


def actions(batch: TensorDictBase) -> set[int]:
    """The actions in a batch."""
    return set(NumberedEnv.action_numbers(batch).reshape(-1).tolist())


def same(one: TensorDictBase, other: TensorDictBase, but: tuple = ()) -> bool:
    """Whether two batches are equal, bit by bit, in all entries but some."""
    one, other = one.exclude(*but), other.exclude(*but)
    return (
        one.shape == other.shape
        and set(one.keys(True, True)) == set(other.keys(True, True))
        and all(torch.equal(value, other.get(key)) for key, value in one.items(True, True))
    )


class Counter(Chooser):
    """A policy with a count and a mask beside its weight."""

    def __init__(self, choice: float = 0, count: int = 0, mask: tuple[bool, bool] = (True, False)):
        super().__init__(choice)
        self.register_buffer("count", torch.tensor(count))
        self.register_buffer("mask", torch.tensor(mask))


# A floating-point number of 64 bits can't hold it.
LARGE_COUNT = 2**60 + 1
