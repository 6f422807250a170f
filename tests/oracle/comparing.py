"""Compares what the collector of a case delivers with what the oracle says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tests.oracle.cases import (
    DELIVERIES,
    WORKERS,
    Case,
    collector_of,
    makers_of,
    policy_of,
    threads_of,
)
from tests.oracle.watching import check_episodes, check_fake, check_figures, check_timeline
from trawl.collectors import (
    AsyncBatchedCollector,
    Collector,
    Normalization,
)
from trawl.data import StackedFrames
from trawl.testing.oracle import (
    ENV,
    HIDDEN,
    IDS,
    MASK,
    OWN,
    Frame,
    Oracle,
    Statistics,
    Team,
    in_turn,
    trajectories,
)

FLAGS = ("done", "terminated", "truncated")
BATCHES = 4
WHOLE = ("padded", "cat", "in_turn", "buffer_whole")
AGENTS = ("agents", "turns", "agents_list", "agents_parallel")
TORCHRL = ("torchrl", "torchrl_list")
#: Entries after the step that ``compact_obs`` keeps.
KEPT = ("reward", "raw_reward", "hidden")
Rows = Sequence[Sequence[Frame | None]]


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
