"""The frames that a collector must deliver for a script, computed by a plain loop.

This module shares no code with the collectors. It is meant to be read, not to be quick: all values
are numpy arrays of one environment and one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from trawl.testing.script import Script

#: Entries of one frame by key. Entries after the step have keys such as ``("next", "reward")``.
Frame = dict[Any, Any]
IDS, MASK = ("collector", "traj_ids"), ("collector", "mask")
#: The environment's own observation, and its own flags: ``terminated`` and ``truncated``.
RAW, OWN = "_raw", "_own"
#: The number of the environment among those of its collector.
ENV = "_env"
#: True in the last frame before a failure, which may be of an earlier batch.
CUT = "_cut"
HIDDEN = (RAW, OWN, ENV, CUT)


@dataclass(frozen=True)
class Kind:
    """Differences of a kind of environment from others, as far as frames show them.

    Attributes:
        agents: number of agents; None if there are none.
        in_turn: True if the agents act in turn, one in each step.
        parts: number of components of a reward; None if it is a single number.
        resets: when a new episode begins: ``"after"`` the step that ends one, as a part of that
            ``"same"`` step, or in the ``"next"`` step, which is no frame.
        together: number of environments that step as one, all of which a failure rebuilds.
        grouped: True if not all environments step at once.
        blind: True if every episode is the first one of environment 0.
        extra: further observations, each a function of a script, an environment, an episode and
            a step. Those of ``never_stacked`` are not stacked.
    """

    agents: int | None = None
    in_turn: bool = False
    parts: int | None = None
    resets: str = "after"
    together: int = 1
    grouped: bool = False
    blind: bool = False
    extra: Mapping[Any, Any] = field(default_factory=dict)
    never_stacked: frozenset[Any] = frozenset()


@dataclass(frozen=True)
class Options:
    """The options of a collector that decide what its frames are, named as there.

    A ``recurrent`` policy counts its steps in an entry ``"hidden"``, from which it continues.
    """

    frames_per_batch: int = 12
    total_frames: float = math.inf
    exact_frames: bool = False
    max_frames_per_traj: int | None = None
    frame_stack: int | None = None
    padding: str = "reset"
    normalize_observations: bool = False
    normalize_rewards: bool = False
    clip: float = 10.0
    keep_raw: bool = False
    init_random_frames: int = 0
    reset_at_each_iter: bool = False
    set_truncated: bool = False
    restart: bool = False
    is_init: bool = False
    policy_version: bool = False
    compact_obs: bool = False
    track_traj_ids: bool = True
    recurrent: bool = False


def next_of(key: Any) -> Any:
    """Returns the key of an entry after the step."""
    return ("next", *key) if isinstance(key, tuple) else ("next", key)


def truncate(frames: Sequence[Frame | None]) -> None:
    """Marks frames as truncated, unless their episodes have ended."""
    for frame in frames:
        if frame is not None and not frame["next", "done"]:
            frame |= {("next", "truncated"): True, ("next", "done"): True}


class StepFailed(Exception):
    """The script says that a step or a reset fails."""


class Actor:
    """One environment, with everything that is remembered from one of its frames to the next."""

    def __init__(
        self,
        script: Script,
        kind: Kind,
        options: Options,
        env: int,
        statistics: Statistics,
        first: int = 0,
    ) -> None:
        self.script, self.kind, self.options, self.env = script, kind, options, env
        self.first = first
        self.statistics = statistics
        self.last: Frame | None = None
        self.rebuild()

    def rebuild(self) -> None:
        """Begins anew, before the first reset."""
        if self.last is not None:
            self.last[CUT] = True
        self.episode, self.step = self.first - 1, 0
        self.skipping, self.fresh = False, True
        self.id: int | None = None
        self.count, self.hidden = 0, 0.0

    def reset(self) -> None:
        """Begins the next episode."""
        self.episode, self.step, self.count, self.fresh = self.episode + 1, 0, 0, True
        self.hidden = 0.0
        self.last = None
        self.check()
        self.uses = len(self.statistics.uses) - 1
        self.begin_window(self.observe(-1))

    def begin_window(self, first: Frame) -> None:
        """Shows an episode's first observations, which begin its stacks."""
        self.shown = first
        fill = self.shown if self.options.padding == "reset" else self.nothing()
        self.window = [fill] * ((self.options.frame_stack or 1) - 1) + [self.shown]

    def show(self, found: Any) -> None:
        """Shows a first observation with the statistics by which it became ``found``.

        It may come at any time after the frame before, and statistics are renewed meanwhile.
        """
        for used in self.statistics.uses[self.uses :]:
            shown = self.statistics.scaled(self.raw, used)
            if np.allclose(shown, found, 2e-4, 2e-4):
                break
        self.begin_window({**self.shown, "observation": shown})

    def check(self) -> None:
        """Fails if the script says so."""
        if (self.env, self.episode, self.step) in self.script.failures:
            raise StepFailed

    def each(self, value: Any) -> Any:
        """Returns a value for each agent, or the value if there are none."""
        if self.kind.agents is None:
            return np.asarray(value(0))
        return np.stack([value(agent) for agent in range(self.kind.agents)])

    @property
    def place(self) -> tuple[int, int]:
        """The environment and the episode."""
        return (0, 0) if self.kind.blind else (self.env, self.episode)

    def observe(self, actions: Any) -> Frame:
        """Returns the observations after the agents' last actions, normalised."""
        taken = np.broadcast_to(actions, self.kind.agents or 1)
        values = self.each(
            lambda agent: self.script.observation(*self.place, self.step, int(taken[agent]), agent)
        )
        self.raw, values = values, self.statistics.scaled(values)
        extra: Frame = {
            k: f(self.script, *self.place, self.step) for k, f in self.kind.extra.items()
        }
        if self.script.levels:
            told = self.step or not self.script.late
            level = self.script.level(*self.place, self.step) if told else 0.0
            extra["info", "level"] = self.each(lambda _: np.float32(level))
        if self.script.masks and self.kind.agents is not None:
            over = self.step and any(self.script.flags(*self.place, self.step))
            legal = np.arange(self.script.actions) == self.script.legal(*self.place, self.step)
            turn = self.step % self.kind.agents
            extra["action_mask"] = self.each(
                lambda agent: legal | bool(agent != turn if self.kind.in_turn else over)
            )
        return {"observation": values, **extra}

    def nothing(self) -> Frame:
        """Returns observations of zeros."""
        return {key: np.zeros_like(value) for key, value in self.shown.items()}

    def stacked(self, window: Sequence[Frame]) -> Frame:
        """Returns the newest observations, stacked with those before."""
        axis = 0 if self.kind.agents is None else 1
        size = self.options.frame_stack
        return {
            key: value
            if size is None
            or key in (("info", "level"), "action_mask")
            or key in self.kind.never_stacked
            else np.stack([one[key] for one in window[-size:]], axis)
            for key, value in window[-1].items()
        }

    def legal(self) -> int:
        """Returns the action that is drawn at random."""
        return self.script.legal(*self.place, self.step) if self.script.masks else 0

    def act(self, random: bool) -> Any:
        """Returns the action, and what the policy has written as ``"seen"``."""
        seen = self.stacked(self.window)["observation"]
        if random:
            return self.each(lambda _: self.legal()), np.zeros_like(seen)
        axes = tuple(range(0 if self.kind.agents is None else 1, seen.ndim))
        normalized = self.options.normalize_observations
        chosen = np.floor(seen.sum(axes, dtype=np.float64)).astype(int) % self.script.actions
        return np.ones_like(chosen) % self.script.actions if normalized else chosen, seen

    def take(self, random: bool) -> Frame:
        """Takes a step, and returns its frame."""
        action, seen = self.act(random)
        before, raw = self.stacked(self.window), self.raw
        self.step += 1
        self.check()
        self.count += 1
        now = (*self.place, self.step)
        taken = np.broadcast_to(action, self.kind.agents or 1)
        if self.kind.in_turn:
            taken = np.full_like(taken, taken[(self.step - 1) % len(taken)])
        reward = self.each(lambda agent: self.script.reward(*now, int(taken[agent]), agent))
        if self.kind.parts is not None:
            parts = [self.script.reward(*now, int(action), i) for i in range(self.kind.parts)]
            reward = np.array([parts])
        terminated, truncated = self.script.flags(*now)
        own = terminated, truncated
        truncated |= self.count == self.options.max_frames_per_traj
        self.shown = self.observe(taken)
        self.window = [*self.window, self.shown]
        after = self.stacked(self.window)
        frame: Frame = {**before, "action": action, "seen": seen, ("next", "reward"): reward}
        frame |= {next_of(key): value for key, value in after.items()}
        frame |= {("next", "terminated"): terminated, ("next", "truncated"): truncated}
        frame |= {("next", "done"): terminated or truncated, IDS: self.id, MASK: True}
        frame |= dict.fromkeys(("done", "terminated", "truncated"), False) | {
            RAW: raw,
            OWN: own,
            ENV: self.env,
            CUT: False,
        }
        if self.options.max_frames_per_traj:
            frame |= {"step_count": self.count - 1, ("next", "step_count"): self.count}
        if self.options.is_init:
            frame |= {"is_init": self.fresh, ("next", "is_init"): False}
        if self.options.policy_version:
            frame |= {"policy_version": 0, ("next", "policy_version"): 0}
        if self.options.recurrent:
            frame["hidden"] = self.each(lambda _: np.float32(self.hidden))
            self.hidden = 0.0 if random else self.hidden + 1
            frame["next", "hidden"] = self.each(lambda _: np.float32(self.hidden))
        self.fresh = False
        self.last = frame
        return frame


class Statistics:
    """The statistics of normalised observations and rewards."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.observations: list[Any] = []
        self.returns: list[Any] = []
        # The numbers of samples in the statistics, each time that they were renewed.
        self.uses = [0]
        # The samples that were looked at last and their number, their mean and their deviation.
        self.moments: tuple[Any, ...] = (None, 0)

    def renew(self) -> None:
        """Uses all samples from now on."""
        self.uses.append(len(self.observations))

    def scaled(self, values: Any, used: int | None = None) -> Any:
        """Returns a normalised observation, by the statistics that are in use, or were."""
        if not self.options.normalize_observations:
            return values
        if used := self.uses[-1] if used is None else used:
            if self.moments[0] is not self.observations or self.moments[1] != used:
                samples = np.asarray(self.observations[:used], np.float64)
                deviation = np.sqrt(samples.var(0) + 1e-8)
                self.moments = self.observations, used, samples.mean(0), deviation
            values = (values - self.moments[2]) / self.moments[3]
        return np.clip(values, -self.options.clip, self.options.clip)

    def scale_rewards(self, rows: list[list[Frame | None]], carry: list[Any]) -> None:
        """Divides the rewards of a batch by the deviation of the returns until its end."""
        for index, mine in enumerate(rows):
            for frame in mine:
                if frame is not None:
                    carry[index] = frame["next", "reward"] + 0.99 * carry[index]
                    self.returns.extend(np.atleast_1d(carry[index]))
                if frame is None or frame["next", "done"]:
                    carry[index] = 0.0
        scale = np.sqrt(np.var(self.returns, 0) + 1e-8) if self.returns else 1.0
        for frame in (frame for mine in rows for frame in mine if frame is not None):
            if self.options.keep_raw:
                frame["next", "raw_reward"] = frame["next", "reward"]
            scaled = frame["next", "reward"] / scale
            frame["next", "reward"] = np.clip(scaled, -self.options.clip, self.options.clip)


class Oracle:
    """Computes what one collector delivers, batch by batch.

    Args:
        script: what the environments do.
        kind: the kind of environments.
        envs: numbers of the environments.
        options: options of the collector.
        first: number of the first episode of each environment; by default 0. Episodes before it
            were begun while the environment was made.

    Attributes:
        most: number of steps after which the next batch is broken off.

    Examples:
        >>> from trawl.testing.oracle import Kind, Options, Oracle
        >>> from trawl.testing import Script
        >>> oracle = Oracle(Script(lengths=[2]), Kind(), [0], Options(frames_per_batch=3))
        >>> (first,) = next(oracle.batches())
        >>> [int(frame["collector", "traj_ids"]) for frame in first]
        [0, 0, 1]
    """

    def __init__(
        self,
        script: Script,
        kind: Kind,
        envs: Sequence[int],
        options: Options,
        first: Sequence[int] | None = None,
    ) -> None:
        self.kind, self.options = kind, options
        self.statistics = Statistics(options)
        self.actors = [
            Actor(script, kind, options, env, self.statistics, begun)
            for env, begun in zip(envs, first or [0] * len(envs), strict=True)
        ]
        self.carry: list[Any] = [0.0 for _ in envs]
        self.frames, self.ids = 0, 0
        self.random: bool | None = None
        self.most: float = math.inf

    def batches(self) -> Iterator[list[list[Frame | None]]]:
        """Yields, for each batch, the rows of each environment; None is a row without a frame."""
        self.begin(self.actors)
        first = True
        while self.frames < self.options.total_frames:
            self.statistics.renew()
            if self.options.reset_at_each_iter and not first:
                self.begin(self.actors)
                self.carry = [0.0 for _ in self.actors]
            first = False
            yield self.batch()

    def reset(self, rows: Sequence[int]) -> None:
        """Begins episodes in some environments, as a reset between two batches does."""
        self.statistics.renew()
        self.begin([self.actors[row] for row in rows])
        for row in rows:
            self.carry[row] = 0.0

    def begin(self, actors: Sequence[Actor]) -> None:
        """Begins episodes."""
        for actor in actors:
            actor.reset()
            actor.skipping = False
            self.number(actor)

    def number(self, actor: Actor) -> None:
        """Gives an episode its number."""
        actor.id, self.ids = self.ids, self.ids + 1

    def batch(self) -> list[list[Frame | None]]:
        """Collects one batch."""
        size, options = len(self.actors), self.options
        left = options.total_frames - self.frames if options.exact_frames else math.inf
        random = (
            self.random if self.random is not None else self.frames < options.init_random_frames
        )
        rows: list[list[Frame | None]] = [[] for _ in self.actors]
        taken, counted = 0, 0
        cut: set[int] = set()
        before = len(self.statistics.observations)
        steps = -int(-min(options.frames_per_batch, left) // size)
        for t in range(int(min(steps, self.most))):
            for mine, frame in zip(rows, self.step(random), strict=True):
                mine.append(frame)
            self.follow(rows)
            for row, mine in enumerate(rows):
                if mine[-1] is not None and taken >= left:
                    mine[-1] = None
                    cut.add(row)
                taken += mine[-1] is not None
            # Statistics are renewed after 16 frames, and whenever their number has doubled.
            due = size * (t + 1 - counted) >= max(before + size * counted, 16)
            if due and not self.kind.grouped:
                self.count([mine[counted:] for mine in rows])
                self.statistics.renew()
                counted = t + 1
        self.count([mine[counted:] for mine in rows])
        self.frames += taken
        return [mine + [None] * (steps - len(mine)) for mine in self.finished(rows, cut)]

    def arrivals(self, order: Sequence[int], first: Sequence[Any] = ()) -> list[Frame]:
        """Collects one batch of single frames.

        Args:
            order: the environment of each frame.
            first: the observation with which each frame begins, if the first observations of
                episodes come at any time.
        """
        self.statistics.renew()
        if self.options.reset_at_each_iter and self.frames:
            self.reset(range(len(self.actors)))
        before, counted = len(self.statistics.observations), 0
        frames: list[Frame] = []
        self.frames += len(order)
        for row in order:
            actor = self.actors[row]
            if actor.fresh and len(first):
                actor.show(first[len(frames)])
            frames.append(actor.take(random=False))
            if frames[-1]["next", "done"]:
                actor.reset()
                self.number(actor)
            if len(frames) - counted >= max(before + counted, 16):
                self.count([[*frames[counted:]]])
                self.statistics.renew()
                counted = len(frames)
        self.count([[*frames[counted:]]])
        self.finished([[f for f in frames if f[ENV] == a.env] for a in self.actors], set())
        return frames

    def step(self, random: bool) -> list[Frame | None]:
        """Takes a step in each environment; those that fail are left without an episode."""
        row: list[Frame | None] = []
        failed: list[Actor] = []
        before = [actor.last for actor in self.actors]
        for actor in self.actors:
            frame = None
            try:
                if actor.skipping:
                    actor.reset()
                else:
                    frame = actor.take(random)
                    if frame["next", "done"] and self.kind.resets == "same":
                        actor.reset()
            except StepFailed:
                failed.append(actor)
                frame = None
            row.append(frame)
        members = {self.member(actor) for actor in failed}
        for index, (actor, last) in enumerate(zip(self.actors, before, strict=True)):
            if self.member(actor) in members:
                row[index], actor.last = None, last
                actor.rebuild()
        return row

    def member(self, actor: Actor) -> int:
        """Returns the number of those environments that step as one with this one."""
        return (actor.env - self.actors[0].env) // self.kind.together

    def follow(self, rows: list[list[Frame | None]]) -> None:
        """Begins the episodes that follow those that have ended with the last row."""
        for actor, mine in zip(self.actors, rows, strict=True):
            frame = mine[-1]
            if actor.id is None:
                # The environment failed in this row, which truncates the episode before.
                self.fail(actor, mine[-2:-1])
            elif frame is None:
                actor.skipping = False
            elif frame["next", "done"]:
                self.after(actor, rows)

    def fail(self, actor: Actor, before: Sequence[Frame | None]) -> None:
        """Begins an episode after a failure, which truncates a frame before of the same batch."""
        truncate(before)
        self.begin([actor])

    def after(self, actor: Actor, rows: list[list[Frame | None]]) -> None:
        """Begins the episode after one that has ended."""
        if self.kind.resets == "next":
            actor.skipping = True
        elif self.kind.resets == "after":
            if actor.fresh:  # it has begun anew with another one, whose reset failed
                return
            try:
                actor.reset()
            except StepFailed:
                for other, mine in zip(self.actors, rows, strict=True):
                    if self.member(other) == self.member(actor):
                        other.rebuild()
                        self.fail(other, mine[-1:])
                return
        self.number(actor)

    def count(self, rows: list[list[Frame | None]]) -> None:
        """Adds the observations of frames to the statistics."""
        found = [frame[RAW] for mine in rows for frame in mine if frame is not None]
        self.statistics.observations.extend(found)

    def finished(self, rows: list[list[Frame | None]], cut: set[int]) -> list[list[Frame | None]]:
        """Carries out what is done to a whole batch; the last frames of some rows may be cut."""
        if self.options.normalize_rewards:
            self.statistics.scale_rewards(rows, self.carry)
        for row, mine in enumerate(rows):
            frames = [frame for frame in mine if frame is not None]
            if self.options.set_truncated and frames and (mine[-1] is not None or row in cut):
                frames[-1] |= {("next", "truncated"): True, ("next", "done"): True}
        return rows


class Team:
    """The oracles of several workers, which make batches together.

    Args:
        oracles: the oracle of each worker.

    Attributes:
        observations: the samples of the statistics of observations, in all batches until now.
        returns: those of the statistics of rewards.
    """

    def __init__(self, oracles: Sequence[Oracle]) -> None:
        self.oracles = oracles
        self.observations: list[Any] = []
        self.returns: list[Any] = []

    def batches(self) -> Iterator[list[list[list[Frame | None]]]]:
        """Yields, for each batch, the rows of each environment of each worker."""
        iterators = [oracle.batches() for oracle in self.oracles]
        while True:
            frames = sum(oracle.frames for oracle in self.oracles)
            if frames >= self.oracles[0].options.total_frames:
                return
            for oracle in self.oracles:
                oracle.random = frames < oracle.options.init_random_frames
            yield self.together([partial(next, iterator) for iterator in iterators])

    def together(self, collect: Sequence[Callable[[], Any]]) -> list[Any]:
        """Collects a batch.

        Args:
            collect: for each worker, a function by which its oracle collects its part.
        """
        parts, observations, returns = [], [], []
        for oracle, one in zip(self.oracles, collect, strict=True):
            own = oracle.statistics
            own.observations, own.returns = list(self.observations), list(self.returns)
            parts.append(one())
            observations += own.observations[len(self.observations) :]
            returns += own.returns[len(self.returns) :]
        self.observations += observations
        self.returns += returns
        return parts


def trajectories(batches: Sequence[Sequence[Sequence[Frame | None]]]) -> list[list[Frame]]:
    """Returns the whole trajectories in the rows of all batches, in the order in which they end."""
    found: list[list[Frame]] = []
    going: dict[int, list[Frame]] = {}
    for rows in batches:
        # A failure in the first row of a batch ends the trajectory before.
        ended = [index for index, mine in going.items() if mine and mine[-1][CUT]]
        for index in sorted(ended):
            truncate(going[index][-1:])
            found.append(going.pop(index))
        for row in zip(*rows, strict=True):
            for index, frame in enumerate(row):
                mine = going.setdefault(index, [])
                if frame is None:
                    continue
                if mine and frame[IDS] != mine[0][IDS]:
                    going[index] = mine = []
                mine.append(frame)
                if frame["next", "done"]:
                    found.append(going.pop(index))
    return found


def in_turn(found: Sequence[list[Frame]], envs: int) -> list[list[Frame]]:
    """Returns the same trajectories, but the next one of each environment in turn."""
    queues = [[one for one in found if one[0][ENV] == env] for env in range(envs)]
    ordered: list[list[Frame]] = []
    while len(queue := queues[len(ordered) % envs]) > len(ordered) // envs:
        ordered.append(queue[len(ordered) // envs])
    return ordered
