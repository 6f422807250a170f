"""What the tests of weights need: modules of all sorts, and other processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import reduction, spawn
from typing import Any

import nursery
import pytest
import torch
from torch import Tensor, nn

# Nothing that is waited for takes longer, unless it never comes.
PATIENCE = 300

multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["trawl.weight_update", "trawl.collectors", "trawl.testing.envs", "tensordict.nn"]
)


class Uniform(nn.Module):
    """A model all of whose numbers are one."""

    def __init__(self, number: float = 0.0, sizes: tuple[int, ...] = (3, 70, 1)) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.become(number)

    def become(self, number: float) -> Uniform:
        """Takes another number, in place, as an optimiser's step does."""
        with torch.no_grad():
            for tensor in (*self.parts, self.count):
                tensor.fill_(number)
        return self

    @property
    def numbers(self) -> set[float]:
        """The numbers in it: more than one if it is torn."""
        return numbers(dict(self.named_parameters()) | dict(self.named_buffers()))


def numbers(weights: Any) -> set[float]:
    """The numbers in a dict of tensors, or a TensorDict."""
    leaves = weights.values(True, True) if hasattr(weights, "batch_size") else weights.values()
    return {float(number) for leaf in leaves for number in leaf.detach().unique()}


class WithState(Uniform):
    """The same, with something beside its tensors."""

    def __init__(self, number: float = 0.0, said: Any = None) -> None:
        super().__init__(number)
        self.said = said

    def get_extra_state(self) -> Any:
        return {"said": self.said}

    def set_extra_state(self, state: Any) -> None:
        self.said = state["said"]


class Whole(nn.Module):
    """A model whose part has something beside its tensors."""

    def __init__(self, number: float = 0.0, said: Any = None) -> None:
        super().__init__()
        self.part = WithState(number, said)


def tied() -> nn.Module:
    """Two layers with one weight."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    return module


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether tensors are equal, bit by bit, and of the same names and dtypes."""
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def as_sent(thing: Any) -> Any:
    """What another process would get."""
    return reduction.ForkingPickler.loads(reduction.ForkingPickler.dumps(thing))


# --- other processes


class Other:
    """Another process, and the connection to it."""

    def __init__(self, process: Any, connection: Any) -> None:
        self._process = process
        self._connection = connection

    @property
    def pid(self) -> int:
        """Its number."""
        number: int = self._process.pid
        return number

    def tell(self, message: Any) -> None:
        """Sends it something."""
        self._connection.send(message)

    def hear(self) -> Any:
        """What it says next."""
        assert self._connection.poll(PATIENCE), "the other process says nothing"
        return self._connection.recv()

    def ask(self, message: Any) -> Any:
        """Sends it something, and gives its answer."""
        self.tell(message)
        return self.hear()

    def kill(self) -> None:
        """Kills it, and waits until it is gone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.join(PATIENCE)
        assert self._process.exitcode is not None


@contextmanager
def other(
    target: Callable[..., None], *args: Any, method: str = "forkserver", parent: bool = False
) -> Iterator[Other]:
    """A process that runs a function; its first argument is the connection.

    Args:
        target: the function.
        *args: its other arguments.
        method: how the process is started.
        parent: whether it starts processes of its own.
    """
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=not parent)
    with pytest.MonkeyPatch.context() as patch:
        if method == "spawn":
            patch.setattr(spawn, "_python_exe", os.fsencode(nursery.python()))
        process.start()
    theirs.close()
    found = Other(process, ours)
    try:
        yield found
    finally:
        found.kill()
        process.close()
        ours.close()


def answering(connection: Any, function: Callable[[Any], Any], first: Any = ...) -> None:
    """Answers what it is asked with what a function gives, or the error, until there is no more."""
    if first is not ...:
        connection.send(first)
    with suppress(EOFError):
        while True:
            question = connection.recv()
            try:
                answer = function(question)
            except Exception as error:
                answer = type(error), str(error)
            connection.send(answer)


# --- policies


class Chosen(nn.Module):
    """A policy for ``NumberedEnv`` with one weight: the number of the action."""

    def __init__(self, choice: int = 0) -> None:
        super().__init__()
        self.choice = nn.Parameter(torch.tensor(float(choice)))

    def forward(self, observation: Tensor) -> Tensor:
        action = nn.functional.one_hot(self.choice.long(), 4)
        return action.expand(*observation.shape[:-1], 4)
