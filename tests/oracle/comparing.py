"""Runs a collector on a script, and compares what it delivers with what the oracle says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tests.oracle.watching import check_episodes, check_fake, check_figures, check_timeline
from trawl.backends import InlineBackend
from trawl.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    Normalization,
    NormalizeObservation,
    NormalizeReward,
)
from trawl.data import StackedFrames
from trawl.envs import FrameStack, ParallelEnv
from trawl.supported import Trait
from trawl.testing.faces import FACES, POOLS, Face
from trawl.testing.oracle import (
    ENV,
    HIDDEN,
    IDS,
    MASK,
    OWN,
    Frame,
    Kind,
    Options,
    Oracle,
    Statistics,
    Team,
    in_turn,
    trajectories,
)
from trawl.testing.script import Script

FLAGS = ("done", "terminated", "truncated")
BATCHES = 4
WHOLE = ("padded", "cat", "in_turn", "buffer_whole")
WORKERS = 2
AGENTS = ("agents", "turns", "agents_list", "agents_parallel")
TORCHRL = ("torchrl", "torchrl_list")
KINDS = {**FACES, **POOLS}
#: Entries after the step that ``compact_obs`` keeps.
KEPT = ("reward", "raw_reward", "hidden")
Rows = Sequence[Sequence[Frame | None]]


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


def check(case: Case) -> None:
    """Collects some batches, and then compares all of them with the oracle."""
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "run.json.gz"
        facts, found = collected(case, **({"trace": trace} if case.watched else {}))
        if case.watched:
            check_figures(facts)
            check_timeline(facts, trace)
            if case.delivery in ("rows", "split"):
                check_episodes(facts, found, case.options)


def collected(case: Case, **more: Any) -> tuple[dict[str, Any], list[TensorDictBase]]:
    """Collects some batches, compares them, and returns them and the figures after the end."""
    if case.delivery in ("buffer", "steps", "buffer_whole"):
        more["replay_buffer"] = buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    with collector_of(case, **more) as collector:
        buffered = "replay_buffer" in more
        fake = None if buffered else collector.fake_tensordict()
        same, written = case.further.get("return_same_td"), case.written and not buffered
        objects, found = set(), []
        for batch in islice(collector, BATCHES):
            objects.add(id(batch))
            found.append(batch.clone() if same or written else batch)
            if written:
                overwrite(case, batch)
        assert not same or len(objects) == 1
        facts = collector.stats("both")
        if buffered:
            assert found.count(None) == len(found) == facts["batches"]
            found = [buffer[:]] if len(buffer) else []
        elif case.delivery == "rows" and not case.options.exact_frames:
            assert layout(fake) == layout(found[0])
            assert case.on_their_own or found[0].names[-1] == "time"
        elif found:
            check_fake(fake, found[0], case.delivery)
        if "trajs_per_batch" in DELIVERIES[case.delivery]:
            assert facts["trajectories"] == 3 * len(found)
        compare(case, found, None if buffered else collector.normalization)
        check_sums(case, found, facts)
        check_sink(case, found)
    return collector.stats("both"), found


def overwrite(case: Case, batch: TensorDictBase) -> None:
    """Writes into all memory of a batch. Whole trajectories share it with those that follow."""
    for value in batch.values(True, True):
        if not isinstance(value, StackedFrames):
            value.fill_(1)
        elif case.delivery not in WHOLE:
            value.frames.fill_(1)


class Written(list[Any]):
    """A sink that keeps what is written."""

    def write(self, batch: TensorDictBase) -> None:
        self.append(batch.clone())

    def close(self, complete: bool) -> None:
        """Does nothing."""


# --- comparing


def layout(batch: TensorDictBase) -> Any:
    """Returns the names and sizes of the dimensions, and shape and dtype of each entry."""
    return batch.names, batch.shape, {k: (v.shape, v.dtype) for k, v in batch.items(True, True)}


def real(batch: TensorDictBase) -> TensorDictBase:
    """Returns the frames of a batch without those that only fill it up."""
    # Text can't be indexed by a mask of several dimensions.
    flat = batch.reshape(-1) if batch.batch_size.numel() else batch.flatten()
    return flat[batch[MASK].reshape(-1)] if MASK in batch.keys(True) else flat


def check_sums(case: Case, found: Sequence[TensorDictBase], stats: Any) -> None:
    """Checks returns and lengths of the episodes that have ended in what the collector delivered.

    Those that failures or ``set_truncated`` end are not compared, as these are not their own ends.
    Those of an exact number of frames are compared with what is watched.
    """
    options, normalized = case.options, case.options.normalize_rewards
    if (
        case.delivery not in ("rows", "split", "buffer", "steps")
        or case.place not in ("one", "sync", "sync_messages", "ready")
        or case.further.get("prefetch")
        or options.restart
        or options.set_truncated
        or options.exact_frames
        or not options.track_traj_ids
        or (normalized and not options.keep_raw)
    ):
        return
    key = case.kind.key(("next", "raw_reward" if normalized else "reward"))
    returns: dict[int, list[float]] = {}
    ended = []
    for batch in found:
        frames = real(batch.select(IDS, MASK, ("next", "done"), key, strict=False))
        if not len(frames):
            continue
        rewards = frames[key].reshape(len(frames), -1).mean(-1).tolist()
        dones = frames["next", "done"].reshape(-1).tolist()
        for number, reward, done in zip(frames[IDS].tolist(), rewards, dones, strict=True):
            returns.setdefault(number, []).append(reward)
            if done:
                ended.append(returns.pop(number))
    assert stats["episodes"] == len(ended)
    if 0 < len(ended) <= 100:
        mean = np.mean([sum(one) for one in ended])
        np.testing.assert_allclose(stats["episode_return_mean"], mean, 1e-5)
        assert stats["episode_length_mean"] == np.mean([len(one) for one in ended])


def check_sink(case: Case, found: Sequence[TensorDictBase]) -> None:
    """Checks that a sink has got all that was delivered or put into a buffer."""
    sink = case.further.get("sink")
    if sink is None:
        return
    if case.delivery in ("buffer", "steps", "buffer_whole"):
        assert sum(map(len, map(real, sink))) == sum(map(len, map(real, found)))
        return
    for one, other in zip(sink, found, strict=True):
        assert one.shape == other.shape
        for key in other.keys(True, True):
            assert torch.equal(dense(one[key]), dense(other[key])), key


class Ids:
    """The ids of trajectories: any numbers, but one for each trajectory."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def check(self, expected: Iterable[Any], found: Iterable[int]) -> None:
        for (env, one), other in zip(expected, found, strict=True):
            assert self.known.setdefault((env, int(one)), int(other)) == other
        assert len(set(self.known.values())) == len(self.known), self.known


@cache
def first_episodes(
    face: str,
    levels: bool,
    late: bool,
    masks: bool,
    ready: bool,
    envs: tuple[int, ...],
    lengths: tuple[int, ...] | None,
) -> list[int]:
    """Returns the number of the first episode that is collected from each environment.

    While an environment is made, it may be reset and stepped, to find out what it returns.
    """
    place = "ready" if ready else "one"
    told = {"levels": levels, "late": late, "masks": masks}
    case = Case(face, place=place, lengths=lengths, **told)
    frames = 60 if case.on_their_own else len(envs)
    if ready:
        source, policy = makers_of(case, list(envs)), policy_of(case)
        options = {**threads_of(case), "frames_per_batch": frames, **case.in_step}
        made: Any = AsyncBatchedCollector(source, policy=policy, **options)
    else:
        source = case.kind.make(case.script, list(envs))
        made = Collector(source, policy_of(case), frames_per_batch=frames)
    with made as collector:
        seen = collector.next()[case.kind.key("seen")]
    if case.on_their_own:
        seen = seen.reshape(len(seen), -1, 4)[:, 0]
        seen = torch.stack([seen[(seen[:, 0] == env).nonzero()[0, 0]] for env in envs])
    return [int(number) for number in seen.reshape(len(envs), -1, 4)[:, 0, 1]]


def oracles(case: Case) -> list[Oracle]:
    ready = case.place.startswith("ready")
    made = case.face, case.levels, case.late, case.masks
    return [
        Oracle(
            case.script,
            case.oracle_kind,
            envs,
            case.options,
            first_episodes(*made, ready, tuple(envs), case.lengths),
        )
        for envs in case.envs
    ]


def compare(
    case: Case,
    found: Sequence[TensorDictBase],
    normalization: Normalization | None = None,
    count: int = BATCHES,
) -> None:
    """Compares batches, in the order of delivery, with what the oracle says.

    Args:
        case: what was collected.
        found: all batches.
        normalization: the collector's statistics after these batches; None not to compare them.
        count: number of batches that were asked for.
    """
    ids = Ids()
    oracle = Team(oracles(case))
    team = oracle.batches()
    rows = case.delivery in ("rows", "split") and not case.options.exact_frames
    together = case.place.startswith(("sync", "ready_sync"))
    in_any_order = case.place != "one" and not (together and rows)
    alone = case.place in ("one", "ready") and case.delivery not in WHOLE
    if case.on_their_own and (alone or (together and rows and case.delivery == "rows")):
        compare_arrivals(case, found, ids, normalization)
    elif in_any_order or case.on_their_own:
        compare_environments(case, found, ids)
    elif case.delivery in ("buffer", "steps"):
        (batch,) = found
        steps = case.delivery == "steps"
        # Steps that only reset are no steps of a batch of single steps.
        more = steps and case.kind.kind.resets == "next"
        rounds = [mine for (mine,) in islice(team, count + more)]
        frames = [frame for rows in rounds for frame in in_order(rows, steps)]
        frames = frames[: len(batch)] if more else frames
        check_frames(case, frames, batch.reshape(-1), ids)
    elif case.delivery == "rows":
        for batch in found:
            parts = [batch] if case.place == "one" else parts_of(case, batch)
            for rows, part in zip(next(team), parts, strict=True):
                check_rows(case, rows, part, ids)
        check_statistics(case, oracle, normalization)
    elif case.delivery == "split":
        for batch in found:
            pieces = [piece for rows in next(team) for mine in rows for piece in pieces_of(mine)]
            check_padded(case, pieces, batch, ids)
        check_statistics(case, oracle, normalization)
    else:
        compare_whole(case, found, [mine for (mine,) in islice(team, 60)], ids, count)


def parts_of(case: Case, batch: TensorDictBase) -> list[TensorDictBase]:
    """Returns the batches of workers, which ``cat_results`` has put together."""
    dim = case.further.get("cat_results")
    return list(batch) if dim is None else list(batch.chunk(WORKERS, dim))


def compare_arrivals(
    case: Case, found: Sequence[TensorDictBase], ids: Ids, normalization: Normalization | None
) -> None:
    """Compares single frames, whose order says which environments were ready."""
    team = Team(oracles(case))
    for oracle in team.oracles:
        oracle.begin(oracle.actors)
    if case.delivery in ("buffer", "steps"):
        found = found[0].split(case.options.frames_per_batch)
    for batch in found:
        parts = parts_of(case, batch) if len(team.oracles) > 1 else [batch]
        frames = [one[one[MASK]] if case.delivery == "split" else one for one in parts]
        collect = [partial(arrived, case, *one) for one in zip(team.oracles, frames, strict=True)]
        for expected, part, one in zip(team.together(collect), parts, frames, strict=True):
            if case.delivery == "split":
                rows = [[one for one in expected if one[ENV] == env] for env in case.envs[0]]
                check_padded(case, [piece for row in rows for piece in pieces_of(row)], part, ids)
            else:
                check_frames(case, expected, one, ids)
    check_statistics(case, team, normalization)


def arrived(case: Case, oracle: Oracle, frames: TensorDictBase) -> list[Frame]:
    """Returns what the oracle says about frames in this order of their environments."""
    first = dense(frames[case.kind.key("observation")]).numpy()
    if case.options.frame_stack is not None:
        first = first[..., -1, :]
    # A pool doesn't say when it has reset an environment.
    late = case.of_pool or case.kind.kind.resets == "next"
    return oracle.arrivals(frames["env_index"].tolist(), first if late else ())


def check_statistics(case: Case, oracle: Team | Statistics, found: Normalization | None) -> None:
    """Checks that statistics are those of all frames, and of no others."""
    if found is None:
        return
    options = case.options
    for name, counted, moments, wanted in (
        ("observation", options.normalize_observations, found.observations, oracle.observations),
        ("reward", options.normalize_rewards, found.rewards, oracle.returns),
    ):
        assert list(moments) == [case.kind.key(name)] * counted
        for own in moments.values():
            assert own.count == len(wanted), (own.count, len(wanted))
            values = np.asarray(wanted, np.float64)
            np.testing.assert_allclose(np.ravel(own.mean), np.ravel(values.mean(0)), 1e-6, 1e-6)
            np.testing.assert_allclose(np.ravel(own.var), np.ravel(values.var(0)), 1e-6, 1e-6)


def compare_whole(case: Case, found: Any, rounds: Sequence[Rows], ids: Ids, count: int) -> None:
    """Compares whole trajectories of one process."""
    if case.delivery == "buffer_whole":
        whole = trajectories(rounds[:count])
        frames = [frame for one in whole for frame in one]
        assert sum(map(len, found)) == len(frames)
        for batch in found:
            check_frames(case, frames, batch, ids)
        return
    whole = trajectories(rounds)
    if case.delivery == "in_turn":
        whole = in_turn(whole, len(case.envs[0]))
    expected = [whole[i : i + 3] for i in range(0, len(whole) - 2, 3)]
    if case.options.exact_frames:
        assert len(found) == min(len(expected), count), (len(whole), len(found))
    for pieces, batch in zip(expected, found, strict=False):
        if case.delivery == "padded":
            check_padded(case, pieces, batch, ids)
        else:
            frames = [frame for one in pieces for frame in one]
            assert batch.shape == (len(frames),), (batch.shape, len(frames))
            check_frames(case, frames, batch, ids)


def compare_environments(case: Case, found: Sequence[TensorDictBase], ids: Ids) -> None:
    """Compares the frames of each environment with the first ones that the oracle says.

    In which order the batches of several workers come, nothing says.
    """
    delivered: dict[int, list[TensorDictBase]] = {}
    for batch in found:
        frames = real(batch)
        leaves = frames.keys(True, True, is_leaf=is_leaf_nontensor)
        frames = frames.select(*(key for key in leaves if key != MASK))
        if not len(frames):
            continue
        numbers = dense(frames[case.kind.key("observation")])
        for env in range(sum(map(len, case.envs))):
            mine = numbers.reshape(len(frames), -1, 4)[:, -1, 0].floor() == env
            if mine.any():
                delivered.setdefault(env, []).append(frames[mine])
    endless = replace(case.options, exact_frames=False, total_frames=math.inf)
    for worker in oracles(replace(case, options=endless)):
        rounds: list[Rows] = []
        batches = islice(worker.batches(), 40)
        expected: dict[int, list[Frame]] = {}
        found_of = {actor.env: delivered.get(actor.env, []) for actor in worker.actors}
        counts = {env: sum(map(len, parts)) for env, parts in found_of.items()}
        while part := list(islice(batches, 5)):
            rounds += part
            for row, env in enumerate(counts):
                expected[env] = frames_of(case, rounds, row, env)
            if all(len(expected[env]) >= count for env, count in counts.items()):
                break
        for env, count in counts.items():
            if count:
                check_frames(case, expected[env][:count], torch.cat(found_of[env]), ids)
    if case.options.exact_frames and case.delivery not in WHOLE:
        count = sum(len(part) for parts in delivered.values() for part in parts)
        assert count == min(case.options.total_frames, count)


def frames_of(case: Case, rounds: Sequence[Rows], row: int, env: int) -> list[Frame]:
    """Returns the frames of an environment, which is in a row, in the order of delivery."""
    if case.delivery not in WHOLE:
        return [frame for rows in rounds for frame in rows[row] if frame is not None]
    return [frame for one in trajectories(rounds) if one[0][ENV] == env for frame in one]


def in_order(rows: Rows, by_step: bool) -> list[Frame]:
    """Returns the frames of a batch environment by environment, or step by step."""
    ordered = zip(*rows, strict=True) if by_step else rows
    return [frame for part in ordered for frame in part if frame is not None]


def pieces_of(row: Sequence[Frame | None]) -> list[list[Frame]]:
    """Returns the pieces of trajectories in a row."""
    pieces: list[list[Frame]] = []
    for frame in row:
        if frame is not None:
            if not pieces or pieces[-1][-1][IDS] != frame[IDS]:
                pieces.append([])
            pieces[-1].append(frame)
    return pieces


def check_padded(case: Case, pieces: Any, batch: TensorDictBase, ids: Ids) -> None:
    if not pieces:
        assert not batch.batch_size.numel()
        return
    longest = max(map(len, pieces))
    if batch.ndim > 2 and all(len(piece) == longest for piece in pieces):
        # If each trajectory fills a row, the batch keeps its shape.
        batch = batch.reshape(-1, longest)
    assert batch.shape == (len(pieces), longest), (batch.shape, len(pieces), longest)
    known = np.arange(longest) < np.array([[len(piece)] for piece in pieces]).reshape(-1, 1)
    np.testing.assert_array_equal(np.asarray(batch[MASK].cpu()), known)
    frames = [frame for piece in pieces for frame in piece]
    check_frames(case, frames, batch[torch.from_numpy(known)], ids)


def check_rows(case: Case, rows: Rows, batch: TensorDictBase, ids: Ids) -> None:
    """Checks a batch of frames; ``rows`` has the frames of each environment."""
    if case.kind.single:
        batch = batch[None]
    batch = batch.reshape(len(rows), -1)
    assert batch.shape == (len(rows), len(rows[0])), batch.shape
    known = np.array([[frame is not None for frame in mine] for mine in rows])
    masked = case.kind.kind.resets == "next" or case.options.restart or not known.all()
    assert (MASK in batch.keys(True)) == masked
    if masked:
        np.testing.assert_array_equal(np.asarray(batch[MASK].cpu()), known)
        if case.options.track_traj_ids:
            assert (np.asarray(batch[IDS].cpu())[~known] == -1).all()
    frames = [frame for mine in rows for frame in mine if frame is not None]
    check_frames(case, frames, batch[torch.from_numpy(known)], ids)


def check_frames(case: Case, frames: Sequence[Frame], batch: TensorDictBase, ids: Ids) -> None:
    """Checks frames one after the other."""
    if not frames:
        return
    expected = [entries(case, frame) for frame in frames]
    keys = set(batch.keys(True, True, is_leaf=is_leaf_nontensor)) - {MASK}
    assert keys == set(expected[0]), keys ^ set(expected[0])
    for key in expected[0]:
        found = plain(case, key, batch[key])
        wanted = np.stack([np.asarray(frame[key]) for frame in expected]).reshape(found.shape)
        if key == IDS:
            envs = [frame[ENV] for frame in frames]
            ids.check(zip(envs, wanted, strict=True), found)
        elif found.dtype == np.float32:
            np.testing.assert_allclose(found, wanted, 2e-4, 2e-4, err_msg=str(key))
        else:
            np.testing.assert_array_equal(found, wanted, err_msg=str(key))


def entries(case: Case, frame: Frame) -> dict[Any, Any]:
    """Returns the entries of a frame by their actual keys."""
    face, options = case.kind, case.options
    found: dict[Any, Any] = {}
    if case.on_their_own:
        found["env_index"] = frame[ENV] % len(case.envs[0])
    if case.place == "ready":
        found["policy_version"] = 0
    for key, value in frame.items():
        if key in (*HIDDEN, MASK) or (key == IDS and not options.track_traj_ids):
            continue
        last = key[-1] if isinstance(key, tuple) else key
        after = isinstance(key, tuple) and key[0] == "next"
        if options.compact_obs and after and last not in (*FLAGS, *KEPT):
            continue
        if case.on_their_own and key == ("next", "policy_version"):
            continue
        found[case.seen if key == "seen" and case.policy == "function" else face.key(key)] = value
        if face.kind.agents is not None and last in FLAGS:
            group = ("agent", last)
            if after and last == "truncated":
                # An agent whose episode has ended by itself isn't truncated.
                value = frame[OWN][1] or (value and not frame[OWN][0])
            found[("next", *group) if after else group] = np.repeat(value, face.kind.agents)
    return found


def dense(value: Any) -> torch.Tensor:
    """Returns an entry as a tensor, with stacks of frames expanded."""
    return value.to_dense() if isinstance(value, StackedFrames) else value


def plain(case: Case, key: Any, value: torch.Tensor) -> Any:
    """Returns an entry of a batch as an array, in which actions are numbers."""
    last = key[-1] if isinstance(key, tuple) else key
    if last == "text":
        return np.array(list(value))
    if last == "action" and case.kind.kind.agents is None:
        assert (value.sum(-1) == 1).all()
        value = value.long().argmax(-1)
    return np.asarray(dense(value).cpu())
