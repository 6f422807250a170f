"""A case: a script, a face, a place, options and a policy, and the collector that they make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule

from trawl.backends import InlineBackend
from trawl.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    NormalizeObservation,
    NormalizeReward,
)
from trawl.envs import FrameStack, ParallelEnv
from trawl.supported import Trait
from trawl.testing.faces import FACES, POOLS, Face
from trawl.testing.oracle import (
    Kind,
    Options,
)
from trawl.testing.script import Script

WORKERS = 2
KINDS = {**FACES, **POOLS}


@dataclass(frozen=True)
class Case:
    """What is collected, where, and how it is delivered.

    Attributes:
        face: name of the kind of environment.
        options: options that decide the frames.
        place: ``"one"`` process, workers: ``"sync"``, ``"sync_messages"`` or ``"async"``, or
            ``"ready"``, where each environment steps on its own.
        delivery: form in which frames are delivered.
        policy: kind of policy. A ``"function"`` of tensors and one of a ``"tensordict"`` spoil what
            they read, and what they returned before.
        further: further arguments of the collector, which change no frame.
        levels: True if there are entries of ``info``.
        late: True if resets don't have them.
        masks: True if there are action masks.
        failures: True if steps fail.
        lengths: lengths of the episodes; None for those of a script by default.
        written: True if the user writes into batches.
        watched: True to check figures and a timeline, too.
    """

    face: str = "one"
    options: Options = field(default_factory=Options)
    place: str = "one"
    delivery: str = "rows"
    policy: str = "module"
    further: dict[str, Any] = field(default_factory=dict)
    levels: bool = False
    late: bool = False
    masks: bool = False
    failures: bool = False
    lengths: tuple[int, ...] | None = None
    written: bool = False
    watched: bool = False

    @property
    def kind(self) -> Face:
        return KINDS[self.face]

    @property
    def of_pool(self) -> bool:
        """True if frames come from whichever environments of a pool are ready."""
        return Trait.POOL in self.kind.traits

    @property
    def on_their_own(self) -> bool:
        """True if frames come in the order in which environments become ready."""
        return self.of_pool or self.place.startswith("ready")

    @property
    def oracle_kind(self) -> Kind:
        """What the oracle has to know about the kind."""
        kind = self.kind.kind
        if self.place.startswith("ready") and kind.resets == "after":
            return replace(kind, resets="same")
        return kind

    @property
    def script(self) -> Script:
        """The script. Random actions are known, because there is only one or one is legal."""
        failing = self.failures and self.face != "jax"
        kind, options = self.kind.kind, self.options
        resets = kind.resets == "after" and not (kind.together > 1 or options.reset_at_each_iter)
        failures = [(0, 3, 2), (2, 3, 1), *([(1, 3, 0)] if resets else [])]
        return Script(
            lengths=self.lengths or Script.lengths,
            ends=self.kind.ends,
            actions=1 if self.options.init_random_frames and not self.masks else 4,
            levels=self.levels,
            late=self.late,
            masks=self.masks,
            failures=frozenset(failures if failing else []),
        )

    @property
    def envs(self) -> list[list[int]]:
        """The numbers of the environments of each worker."""
        ready = self.place.startswith("ready")
        count = 1 if self.kind.single and not ready else 3
        if self.kind.kind.together == 2 or (self.kind.kind.together > 2 and ready):
            count = 4  # two vector environments have two each
        workers = 1 if self.place in ("one", "ready") else WORKERS
        return [list(range(i * count, (i + 1) * count)) for i in range(workers)]

    @property
    def in_step(self) -> dict[str, Any]:
        """Options with which environments of a collector are ready in the same order each time."""
        if self.of_pool:
            return {}
        every = 2 if self.kind.kind.together > 1 else 3
        ready = {"min_batch_size": every, "server_timeout": math.inf}
        return ready if self.place.startswith("ready") else {}

    @property
    def seen(self) -> str:
        """The entry in which the policy says what it has seen."""
        return "output1" if self.policy == "function" else "seen"


def can_pad(face: str, delivery: str) -> bool:
    """Returns True unless text would be padded, which not every version of tensordict does."""
    return face != "loose" or delivery not in ("padded", "split")


# --- policies


class Choose(torch.nn.Module):
    """Chooses an action by the sum of an observation, or always the second one.

    Args:
        dims: number of dimensions of an observation.
        actions: number of actions.
        one_hot: True if actions are one-hot vectors.
        constant: True to choose the second action.
    """

    def __init__(self, dims: int, actions: int, one_hot: bool, constant: bool) -> None:
        super().__init__()
        self.dims, self.actions, self.one_hot, self.constant = dims, actions, one_hot, constant

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = observation.double().sum(tuple(range(-self.dims, 0)))
        chosen = torch.ones_like(total) if self.constant else total.floor()
        action = chosen.long() % self.actions
        if self.one_hot:
            action = torch.nn.functional.one_hot(action, self.actions)
        return action, observation.clone()


class Spoiling(Choose):
    """Changes its input, and keeps it: nothing else may do so."""

    kept: Any = (torch.zeros(0), torch.zeros(0))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert torch.equal(*self.kept)
        found = super().forward(observation)
        observation += 1
        self.kept = observation, observation.clone()
        return found


class Recurrent(torch.nn.Module):
    """Chooses actions in the same way, and counts its own steps."""

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self.choose = choose

    def forward(self, observation: torch.Tensor, hidden: torch.Tensor | None) -> Any:
        if hidden is None:
            hidden = torch.zeros(*observation.shape[: -self.choose.dims], 1)
        return *self.choose(observation), hidden + 1


class Careless:
    """Writes over what it has read, and returns its outputs in the same memory each time."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.memory: dict[torch.Size, tuple[torch.Tensor, ...]] = {}

    def __call__(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.choose(observation)
        observation.fill_(1)
        memory = self.memory.setdefault(observation.shape, found)
        for own, value in zip(memory, found, strict=True):
            own.copy_(value)
        return memory


class OfTensorDict:
    """Does the same with all entries of a TensorDict.

    Args:
        choose: what chooses actions.
        keys: key of the observation, and those of the outputs.
    """

    def __init__(self, choose: Choose, keys: Sequence[Any]) -> None:
        self.choose, self.keys = Careless(choose), keys

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        read, *written = self.keys
        outputs = self.choose(tensordict[read])
        for value in tensordict.values(True, True):
            if isinstance(value, torch.Tensor):
                value.fill_(1)
        for key, value in zip(written, outputs, strict=True):
            tensordict[key] = value
        return tensordict


def policy_of(case: Case) -> Any:
    face, options = case.kind, case.options
    dims = 1 if options.frame_stack is None else 2
    one_hot = face.kind.agents is None
    kind = Spoiling if case.policy == "spoiling" else Choose
    choose = kind(dims, case.script.actions, one_hot, options.normalize_observations)
    keys = [face.key(name) for name in ("observation", "action", "seen")]
    if case.policy == "function":
        return Careless(choose)
    if case.policy == "tensordict":
        return OfTensorDict(choose, keys)
    if options.recurrent:
        hidden = face.key("hidden"), face.key(("next", "hidden"))
        return TensorDictModule(Recurrent(choose), [keys[0], hidden[0]], [*keys[1:], hidden[1]])
    return TensorDictModule(choose, keys[:1], keys[1:])


# --- running


def arguments(options: Options) -> dict[str, Any]:
    """Returns the arguments of a collector."""
    given: dict[str, Any] = {
        "frames_per_batch": options.frames_per_batch,
        "total_frames": -1 if math.isinf(options.total_frames) else int(options.total_frames),
        "exact_frames": options.exact_frames,
        "max_frames_per_traj": options.max_frames_per_traj,
        "normalize_observations": options.normalize_observations
        and NormalizeObservation(clip=options.clip),
        "normalize_rewards": options.normalize_rewards
        and NormalizeReward(clip=options.clip, keep_raw=options.keep_raw),
        "init_random_frames": options.init_random_frames,
        "reset_at_each_iter": options.reset_at_each_iter,
        "set_truncated": options.set_truncated,
        "auto_register_policy_transforms": options.is_init or None,
        "track_policy_version": options.policy_version,
        "compact_obs": options.compact_obs,
        "track_traj_ids": options.track_traj_ids,
        "on_env_error": "restart" if options.restart else "raise",
    }
    if options.frame_stack is not None:
        given["frame_stack"] = FrameStack(options.frame_stack, padding=options.padding)
    return given


DELIVERIES: dict[str, dict[str, Any]] = {
    "rows": {},
    "split": {"split_trajs": True},
    "padded": {"trajs_per_batch": 3, "traj_format": "padded"},
    "cat": {"trajs_per_batch": 3, "traj_format": "cat"},
    "in_turn": {"trajs_per_batch": 3, "traj_format": "cat", "traj_sampling": "per_env"},
    "buffer": {},
    "steps": {"extend_buffer": False},
    "buffer_whole": {"replay_write_mode": "trajectory"},
}


class WithMessages(MultiSyncCollector):
    """A collector whose workers are in this process, but share no memory with it."""

    def _new_backend(self) -> InlineBackend:
        return InlineBackend(False)


#: Collector and start method of each place with workers.
PLACES: dict[str, tuple[Any, str]] = {
    "sync": (MultiSyncCollector, "inline"),
    "sync_messages": (WithMessages, "inline"),
    "async": (MultiAsyncCollector, "inline"),
    "ready_sync": (MultiSyncCollector, "inline"),
    "sync_processes": (MultiSyncCollector, "forkserver"),
    "async_processes": (MultiAsyncCollector, "forkserver"),
}


def collector_of(case: Case, policy: Any = None, **more: Any) -> Any:
    """Returns the collector of a case; ``policy`` is another policy than that of the case."""
    policy = policy_of(case) if policy is None else policy
    sources = [case.kind.make(case.script, envs) for envs in case.envs]
    given = {**arguments(case.options), **DELIVERIES.get(case.delivery, {}), **case.further, **more}
    if case.place == "one":
        return Collector(sources[0], policy, **given)
    if case.place == "ready":
        sources, given = [makers_of(case, case.envs[0])], {**threads_of(case), **given}
        return AsyncBatchedCollector(sources[0], policy=policy, **given)
    if case.place == "ready_sync":
        makers = [makers_of(case, envs) for envs in case.envs]
        sources = [partial(ParallelEnv, len(one), one, backend="thread") for one in makers]
        given["collector_class"] = AsyncBatchedCollector
    cls, method = PLACES[case.place]
    if issubclass(cls, MultiSyncCollector):
        given["frames_per_batch"] *= WORKERS
    return cls(sources, policy, start_method=method, **given)


def threads_of(case: Case) -> dict[str, Any]:
    """Returns what puts the environments of an ``AsyncBatchedCollector`` into threads."""
    return {} if case.of_pool else {"env_backend": "threading"}


def makers_of(case: Case, envs: Sequence[int]) -> Any:
    """Returns functions that make the environments of an ``AsyncBatchedCollector``, or a pool."""
    if case.of_pool:
        return case.kind.make(case.script, envs)
    size = 2 if case.kind.kind.together > 1 else 1
    parts = [envs[i : i + size] for i in range(0, len(envs), size)]
    made = [case.kind.make(case.script, part) for part in parts]
    return [one[0] if isinstance(one, list) else one for one in made]
