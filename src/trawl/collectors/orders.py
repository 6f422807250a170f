"""What a worker and its parent say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trawl.backends.failure import Failure
from trawl.keys import Key
from trawl.rollout.layout import Joint, Layout
from trawl.weight_update.mailbox import Packet
from trawl.weight_update.packing import Packing


@dataclass(frozen=True)
class Collect:
    """An order to collect a batch.

    Attributes:
        number: the order's number; those of a worker grow.
        random: whether the actions are to be random.
        memory: name of the memory to put it in, or None if it is to be sent.
        joint: name of the arrangement by which the memory is divided.
        part: the part of this worker.
        breakable: whether the order may be broken off, by an interruption of its number.
    """

    number: int
    random: bool = False
    memory: int | None = None
    joint: int = 0
    part: int = 0
    breakable: bool = False


@dataclass(frozen=True)
class Arrange:
    """How memory is divided from now on, in orders that name it."""

    name: int
    joint: Joint


@dataclass(frozen=True)
class Drop:
    """Memory, or its arrangement, that no order names any more."""

    name: int


@dataclass(frozen=True)
class NewWeights:
    """Weights for a model, where there is no memory to share them by. They bring no answer."""

    model_id: str
    packet: Packet


@dataclass(frozen=True)
class Call:
    """An order to call a function with the worker's collector.

    Attributes:
        number: the order's number.
        function: the function and its further arguments, pickled.
    """

    number: int
    function: bytes


@dataclass(frozen=True)
class Ready:
    """The first message of a worker: its collector is made.

    Attributes:
        layout: the layout of its batches, or None if they have no fixed one.
        hidden: entries of the layout that are not delivered.
        lanes: environments in a batch.
        steps: steps of each in a batch.
        batch_size: batch size of the environment.
        trajectory: the first id of a trajectory that begins later.
        packings: how the weights of models are packed.
        doubts: what may be wrong with its environment and policy, for the user to be warned of.
    """

    layout: Layout | None
    hidden: frozenset[Key]
    lanes: int
    steps: int
    batch_size: tuple[int, ...]
    trajectory: int
    packings: Mapping[str, Packing] = field(default_factory=dict)
    doubts: Sequence[str] = ()


@dataclass(frozen=True)
class Done:
    """A batch was collected.

    Attributes:
        number: the order's number.
        frames: frames of experience in it.
        filled: rows of it that were stepped.
        version: version of the policy that made it.
        weights: how many updates of its weights the worker had been sent by then.
        trajectory: the id of the next trajectory that begins.
        batch: the batch itself, if it is not in memory that the order named; pickled.
        beside: the memory of large tensors in that.
        block: the same, if it is of the worker's layout: the bytes of that.
        facts: figures for the statistics.
        random: whether its actions were random.
    """

    number: int
    frames: int
    filled: int
    version: int | str | None
    weights: int
    trajectory: int
    batch: bytes | None
    facts: Mapping[str, Any]
    random: bool = False
    beside: Sequence[Any] = ()
    block: Any = None


@dataclass(frozen=True)
class Writing:
    """The worker begins to write a batch into a replay buffer that others write into too."""


@dataclass(frozen=True)
class Written:
    """The batch is in the replay buffer: it counts even if the worker dies before it is done.

    Attributes:
        done: the answer to the order, as it is by now.
    """

    done: Done


@dataclass(frozen=True)
class Changed:
    """A call by the worker's handle changed what a worker in its place has to know.

    Attributes:
        weights: all weights of the policy, if these are new.
        count: how many updates of them the parent had sent by then.
        version: their version.
        seed: the seed, and whether it is that of all environments, if it is new.
        env_state: the state that was loaded into the environment, or None.
    """

    weights: Any = None
    count: int = 0
    version: int | str | None = None
    seed: tuple[int, bool] | None = None
    env_state: Any = None


@dataclass(frozen=True)
class Warned:
    """Something was warned of in the worker; it is the parent's to show."""

    text: str
    category: type[Warning]


@dataclass(frozen=True)
class Reply:
    """What a call gave, pickled."""

    number: int
    value: bytes


@dataclass(frozen=True)
class Broken:
    """An order could not be carried out."""

    number: int
    failure: Failure


@dataclass(frozen=True)
class NotClosed:
    """The worker ends, and its collector raised an exception when it was closed."""

    failure: Failure


#: What comes from a worker.
Answer = Ready | Done | Reply | Broken | Changed | Warned | Writing | Written | NotClosed
