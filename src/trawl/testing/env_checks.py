"""Checks a user's environment against what collectors expect of it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from torch import Tensor

from trawl.backends.processes.payload import packed
from trawl.checks import check_number
from trawl.collectors import Collector, MultiSyncCollector
from trawl.collectors.driver.state_checks import why_uncaptured
from trawl.envs.agents.pettingzoo import PettingZooEnv
from trawl.envs.base import TensorDictEnv
from trawl.envs.batches.pool import Pool
from trawl.envs.batches.serial import batch_source, build_env, close_made, given_envs
from trawl.envs.capture.ways import chain
from trawl.envs.dm import DMEnv
from trawl.envs.generators import get_states, seed_generators, set_states
from trawl.envs.gym import GymEnv
from trawl.envs.reset_kwargs import names_taken
from trawl.envs.torch_vector import TorchVectorEnv
from trawl.envs.types import is_list
from trawl.envs.vector import is_envpool
from trawl.keys import as_key, show_key
from trawl.testing.findings import CheckReport, Findings, Level, is_of_trawl
from trawl.testing.samples import Lie, check_entries
from trawl.testing.watching import Watched, check_agents, watched

# Seeds of the global generators in traces that must not depend on them.
_ONE, _OTHER = 1, 2
# Steps of traces that are compared, at most.
_TRACED = 50
# Steps of such a trace of a slow environment, and the share of the patience that it may take.
_LEAST, _SHARE = 5, 0.2
_GENERATORS = ("torch", "NumPy (np.random)", "Python (random)")


def check_env(
    env: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    steps: int = 200,
    seed: int = 0,
    worker: bool = True,
    patience: float = 5.0,
) -> CheckReport:
    """Checks an environment of your own against what collectors expect of it.

    The environment takes random actions. An object that can be pickled is copied, and takes no
    steps itself. Otherwise, it takes the steps, its state is restored afterwards if it can be
    captured, and a note says so.

    Args:
        env: an environment, or a function that makes one, in any form that
            :class:`~trawl.collectors.Collector` accepts.
        kwargs: arguments for the function, or for ``GymEnv`` with an id.
        steps: number of steps in which the data are looked at. Ends of episodes are checked only if
            an episode ends within them.
        seed: seed of the environment and of the random actions.
        worker: False to leave out the check in a worker process.
        patience: seconds after which no further data are looked at. With a slow environment, the
            runs that are compared have fewer steps, too.

    Returns:
        A report with all findings; nothing is raised for them.

    Examples:
        >>> import gymnasium, numpy as np
        >>> from trawl.testing import check_env
        >>> class Wrong(gymnasium.Env):
        ...     observation_space = gymnasium.spaces.Box(-1, 1, (2,))
        ...     action_space = gymnasium.spaces.Discrete(2)
        ...     def reset(self, *, seed=None, options=None):
        ...         return np.zeros(2, np.float32), {}
        ...     def step(self, action):
        ...         return np.array([np.nan, 0], np.float32), 0.0, True, False, {}
        >>> report = check_env(Wrong, worker=False)
        >>> report.ok, report.findings[0].topic
        (False, 'observations')
        >>> check_env("Pendulum-v1", worker=False).raise_for_errors().verdict
        'nothing found'
    """
    steps = check_number("steps", steps, least=1)
    findings = Findings()
    subject = Subject(env, kwargs, findings)
    with findings.quietly(seed):
        try:
            _Checks(subject, findings, steps, seed, patience).run(worker)
        finally:
            subject.end()
    return findings.report(subject.name)


class Subject:
    """The environment that is checked, which is made as often as checks need it.

    Args:
        source: the environment, as the user passed it.
        kwargs: arguments for making it.
        findings: the findings about it.

    Attributes:
        name: its name; before it was built, what the user passed.
        is_copied: False if it can't be copied or made again, so that it is used itself.
    """

    def __init__(self, source: Any, kwargs: Mapping[str, Any] | None, findings: Findings) -> None:
        self.source = source
        self.kwargs = kwargs
        self.name = source if isinstance(source, str) else _name(source)
        self.is_copied = True
        self._findings = findings
        self._data: bytes | None = None
        self._restore: Callable[[], None] | None = None
        self._made: list[tuple[Any, Any]] = []
        if given_envs(source):
            try:
                self._data = packed(source)
                self.another()
            except (Exception, SystemExit) as error:
                self.is_copied, self._error = False, error

    def another(self) -> Any:
        """Returns a source of an environment of its own; the user's object if it isn't copied."""
        if self._data is None or not self.is_copied:
            return self.source
        copied = pickle.loads(self._data)
        self._made += [(env, None) for env in given_envs(copied)]
        return copied

    def build(self) -> Any:
        """Returns a new environment with the TensorDict interface."""
        source = self.another()
        env = build_env(source, self.kwargs, name="env")
        if not given_envs(source):
            self._made.append((env, source))
        elif not self.is_copied and self._restore is None:
            self._restore = self._keep(env)
        self.name = env.name if isinstance(env, TensorDictEnv) else _name(env)
        return env

    def close(self, env: Any) -> None:
        """Closes an environment that :meth:`build` returned, unless it is the user's own."""
        if any(env is made for made, _ in self._made):
            self._made = [pair for pair in self._made if pair[0] is not env]
            env.close(raise_if_closed=False)
        else:
            close_made(env, self.source)

    def end(self) -> None:
        """Closes everything that is still open, and restores the user's object."""
        for env, _ in self._made:
            with suppress(Exception):
                env.close()
        if self._restore is not None:
            self._restore()

    def _keep(self, env: Any) -> Callable[[], None]:
        told = "the checks took steps in the environment itself, because it can't be copied"
        state, why = None, ""
        if isinstance(env, TensorDictEnv):
            try:
                state = env.capture()
            except Exception:
                why = ", and its state can't be captured"

        def restore() -> None:
            if state is not None:
                with suppress(Exception):
                    # Another adapter: this one may have wrapped the environment for its masks.
                    build_env(self.source, self.kwargs).restore(state, trust=True)
                    self._findings.add("note", "copies", f"{told}; its state was restored")
                    return
            self._findings.add(
                "note",
                "copies",
                f"{told}{why}: reset it before you use it, or pass a function that makes it",
            )

        return restore


def _name(env: Any) -> str:
    if is_list(env):
        return f"{len(env)} environments"
    env = env.func if isinstance(env, partial) else env
    kind = env if isinstance(env, type) or hasattr(env, "__name__") else type(env)
    return str(kind.__name__)


class _Checks:
    """The checks of one environment, each of which adds its findings."""

    def __init__(
        self, subject: Subject, findings: Findings, steps: int, seed: int, patience: float
    ) -> None:
        self.subject = subject
        self.patience = patience
        self.findings = findings
        self.steps = steps
        self.seed = seed
        self._trace_steps = min(steps, _TRACED)
        self._ended = False
        # True if the same seed gave the same data.
        self._is_seeded = False
        self._can_seed = True
        # Global generators from which the last trace drew.
        self._drawn: list[str] = []

    def run(self, worker: bool) -> None:
        """Runs all checks; most are left out if the environment can't be stepped."""
        env = None
        with self.findings.catching(
            "construction", "making the environment", "make it work by itself first"
        ):
            env = self.subject.build()
        if env is None:
            return
        if _steps_by_itself(env):
            self._can_seed = False
            self.findings.not_checked.append("single steps: a pool is stepped only by a collector")
        else:
            self._check_data(env)
            if self.findings.has_errors:
                return
            self._check_seeds(env)
            self._check_late_step(env)
        self._frames = max(1, env.batch_size.numel()) * self._trace_steps
        self._close(env)
        self._check_batch()
        self._check_states()
        if _steps_by_itself(env):
            self.findings.not_checked.append("worker processes: a pool can't be stepped in one")
        elif worker:
            self._check_worker()
        else:
            self.findings.not_checked.append("worker processes: worker=False")

    # --- data

    def _check_data(self, env: Any) -> None:
        """Takes random steps, and looks at all data."""
        if isinstance(env, (GymEnv, PettingZooEnv, TorchVectorEnv)):
            self._check_signature(env.env)
        watch = watched(env, self.findings)
        step, durations, spent = -1, [], 0.0
        try:
            if isinstance(env, PettingZooEnv) and env.parallel:
                check_agents(env, self.findings, self._trace_steps, self.seed)
            root = self._begin(env)
            self._look(env, root, "the reset", watch)
            for step in range(self.steps):
                root = act_randomly(env, root, self.seed + step)
                begun = time.perf_counter()
                frame, root = env.step_and_maybe_reset(root)
                durations.append(time.perf_counter() - begun)
                spent += durations[-1] if step else 0.0  # the first step may compile
                following = frame.get("next")
                self._look(env, following, f"step {step + 1}", watch)
                self._check_rewards(env, following, step + 1)
                self._ended |= bool(following.get("done").any())
                if spent > self.patience:
                    self.findings.not_checked.append(
                        f"more than {step + 1} steps, which took {self.patience:g} s: pass patience"
                    )
                    break
        except Lie:
            return
        except (Exception, SystemExit) as error:
            what = "the first reset" if step < 0 else f"step {step + 1}, or the reset after it,"
            what = what if watch is None else watch.when
            self.findings.failed(
                "failures",
                what,
                "a collector ends with this error: mend it, or pass a function that makes the "
                "environment and on_env_error='restart'",
                error,
            )
            return
        finally:
            if watch is not None:
                watch.unwatch()
        if watch is not None:
            watch.finish()
            durations = watch.durations
        self.steps = step + 1
        median = float(np.median(durations))
        self.findings.figures["microseconds per step"] = 1e6 * median
        affordable = int(self.patience * _SHARE / max(median, 1e-9))
        self._trace_steps = min(self._trace_steps, max(affordable, _LEAST))
        if not self._ended:
            self.findings.not_checked.append(
                f"ends of episodes: no episode ended within {self.steps} steps; pass more steps"
            )

    def _begin(self, env: Any) -> TensorDictBase:
        """Resets an environment with a seed, or without one if it takes none."""
        try:
            env.set_seed(self.seed)
            root: TensorDictBase = env.reset()
        except Lie:
            raise
        except (Exception, SystemExit) as error:
            self._can_seed = False
            # The second try raises the error of a reset that fails in any case.
            if isinstance(env, GymEnv):
                env.pop_seeds()
            root = env.reset()
            remedy = "let reset take the argument seed, and seed all random numbers by it"
            level: Level = "note" if is_of_trawl(error) else "error"
            if not self.findings.has("reset"):
                self.findings.failed("seeds", "a reset with a seed", remedy, error, level)
        return root

    def _look(self, env: Any, data: TensorDictBase, when: str, watch: Watched | None) -> None:
        # What a watched environment returns was looked at before it was converted.
        if watch is None and not self.findings.has("observations"):
            check_entries(env, data, when, self.findings)

    def _check_rewards(self, env: Any, data: TensorDictBase, step: int) -> None:
        for name in env.reward_keys:
            reward = data.get(name)
            if isinstance(reward, Tensor) and not reward.isfinite().all():
                found = reward[~reward.isfinite()][0].item()
                self.findings.add(
                    "error",
                    "rewards",
                    f"the reward {show_key(as_key(name))} of step {step} is {found} as float32: "
                    "return finite numbers below 3.4e38",
                )

    def _check_signature(self, env: Any) -> None:
        names = names_taken(chain(env))
        if is_envpool(env):
            return
        missing = [name for name in ("seed", "options") if names is not None and name not in names]
        if missing:
            self.findings.add(
                "error" if "seed" in missing else "warning",
                "reset",
                f"reset doesn't take the argument{'s' * (len(missing) > 1)} "
                f"{' and '.join(missing)}, so that it fails once a collector passes them: define "
                "reset(self, *, seed=None, options=None)",
            )

    # --- seeds

    def _trace(self, env: Any, generators: int) -> list[TensorDictBase]:
        """Returns the frames of some steps after seeding the environment.

        Args:
            env: the environment.
            generators: seed of the global generators.
        """
        frames = []
        with seeded(generators):
            env.set_seed(self.seed)
            before = get_states()
            root = env.reset()
            for step in range(self._trace_steps):
                frame, root = env.step_and_maybe_reset(act_randomly(env, root, self.seed + step))
                frames.append(frame.clone())
            pairs = zip(_GENERATORS, before, get_states(), strict=False)
            self._drawn = [name for name, old, new in pairs if _differ(old, new)]
        return frames

    def _check_seeds(self, env: Any) -> None:
        remedy = "seed all random numbers in reset(seed=...)"
        if not self._can_seed:
            return
        with self.findings.catching("seeds", "seeding and stepping it again", remedy, "warning"):
            fresh = self.subject.build() if self.subject.is_copied else env
            first = self._trace(fresh, _ONE)
            again = difference(first, self._trace(fresh, _OTHER))
            if again is not None:
                self._explain(fresh, first, again)
            elif fresh is not env:
                other = difference(first, self._trace(env, _ONE))
                self._is_seeded = other is None
                if other is not None:
                    self._unseeded(
                        f"two environments that were made in the same way differ after the same "
                        f"seed ({other}): let nothing but the seed and the arguments decide what "
                        "happens"
                    )
            else:
                self._is_seeded = True
            if fresh is not env:
                self._close(fresh)

    def _explain(self, env: Any, first: list[TensorDictBase], again: str) -> None:
        repeated, fresh_is_same = difference(first, self._trace(env, _ONE)), False
        drawn = self._drawn if repeated is None else []
        if not drawn and self.subject.is_copied:
            fresh = self.subject.build()
            fresh_is_same = difference(first, self._trace(fresh, _ONE)) is None
            self._close(fresh)
        if drawn:
            self._unseeded(
                f"the environment draws from the global generator of {' and '.join(drawn)}, "
                f"so that the same seed gave other data ({again}) after other draws: draw from a "
                "generator that reset(seed=...) seeds, such as self.np_random"
            )
        elif fresh_is_same:
            self._unseeded(
                f"what follows reset(seed={self.seed}) depends on earlier episodes ({again}): let "
                "the reset set all attributes, counters and generators anew"
            )
        else:
            self._unseeded(
                f"the same seed gave other data ({again}): seed all generators in reset(seed=...), "
                "in Gymnasium by super().reset(seed=seed), and draw from these only"
            )

    def _unseeded(self, message: str) -> None:
        self.findings.add("warning", "seeds", message)

    # --- steps after the end of an episode

    def _check_late_step(self, env: Any) -> None:
        """Takes a step after an episode has ended, and looks if the next reset still works."""
        plain = isinstance(env, GymEnv) and env.vector is None
        if not plain or not self._ended or isinstance(env.env.unwrapped, DMEnv):
            return
        before = None
        remedy = "let reset set everything anew, whatever happened before"
        with self.findings.catching("late steps", "the reset after a late step", remedy, "warning"):
            if self._is_seeded:
                before = self._trace(env, _ONE)
            action = self._to_the_end(env)
            if action is None:
                return
            with suppress(Exception):
                env.step(action)
            env.reset()
            after = None if before is None else difference(before, self._trace(env, _ONE))
            if after is not None:
                self.findings.add(
                    "warning",
                    "late steps",
                    f"a step after the end of an episode changed what followed the next "
                    f"reset(seed={self.seed}) ({after}): {remedy}",
                )

    def _to_the_end(self, env: Any) -> TensorDictBase | None:
        if self._can_seed:
            env.set_seed(self.seed)
        root = env.reset()
        for step in range(self.steps):
            root = act_randomly(env, root, self.seed + step)
            following = env.step(root).get("next")
            if following.get("done").any():
                return act_randomly(env, following.exclude(*env.reward_keys), self.seed)
            root = following.exclude(*env.reward_keys)
        return None

    def _close(self, env: Any) -> None:
        remedy = "let close free what was opened, and raise nothing"
        with self.findings.catching("closing", "close", remedy, "warning"):
            self.subject.close(env)

    # --- batches, states, workers

    def _check_batch(self) -> None:
        """Makes two of the environments as one batch."""
        source = self.subject.source
        if not self.subject.is_copied:
            return
        remedy = "pass a function that makes a new environment, with the same spaces, in each call"
        with self.findings.catching("batches", "a batch of two of them", remedy):
            if given_envs(source):
                two: Any = [self.subject.another(), self.subject.another()]
            else:
                two = batch_source(source, 2, self.subject.kwargs)
            if is_list(source):
                two = source
            build_env(two, self.subject.kwargs, name="env").close(raise_if_closed=False)

    @contextmanager
    def _collector(self, make: Callable[..., Any] = Collector, **options: Any) -> Iterator[Any]:
        """Context with a collector of seeded random frames."""
        source = self.subject.another()
        source = source if make is Collector else [source]
        kwargs = self.subject.kwargs
        if make is not Collector and kwargs is not None:
            kwargs = [kwargs]  # type: ignore[assignment]
        with make(
            source, frames_per_batch=self._frames, create_env_kwargs=kwargs, **options
        ) as collector:
            if self._can_seed:
                collector.set_seed(self.seed)
            yield collector

    def _check_states(self) -> None:
        """Continues a collection from a state in another collector."""
        if not self.subject.is_copied:
            self.findings.not_checked.append("states: the environment can't be copied")
            return
        remedy = "mend the environment"
        with self.findings.catching("collection", "a collection in this process", remedy):
            with self._collector() as collector:
                self._first = collector.next().clone()
                methods = collector.env_state_methods()
                state = deepcopy(collector.state_dict())
                following = collector.next().clone()
            if "none" in methods:
                self.findings.add(
                    "note",
                    "states",
                    "the environment's state can't be captured, so that a collector that is "
                    "resumed begins new episodes: give it get_state() and set_state(state) "
                    f"({cut(why_uncaptured(state))})",
                )
                return
            self._check_resumed(state, following, methods)

    def _check_resumed(self, state: Any, following: TensorDictBase, methods: list[str]) -> None:
        ways = ", ".join(sorted(set(methods)))
        remedy = "mend get_state() and set_state(state), or give it these methods"
        with self.findings.catching("states", "loading its state", remedy):
            with self._collector() as other:
                other.load_state_dict(state, trust=True)
                found = difference([following], [other.next()])
            if found is not None:
                self.findings.add(
                    "error" if self._is_seeded else "warning",
                    "states",
                    f"an environment whose state was restored (by {ways}) continues with other "
                    f"data ({found}): give it get_state() and set_state(state) that cover "
                    "everything that the next steps depend on",
                )

    def _check_worker(self) -> None:
        """Sends the environment to a worker process, and collects a batch there."""
        remedy = "pass a function that makes the environment in the process that steps it"
        if not self.subject.is_copied:
            with self.findings.catching(
                "workers", "sending the environment to a worker process", remedy, "warning"
            ):
                packed(self.subject.source)
            return
        if self.findings.has("collection"):
            return
        with self.findings.catching("workers", "a collection in a worker process", remedy):
            with self._collector(MultiSyncCollector) as collector:
                batch = collector.next()
                # A list of workers is a dimension of the batch.
                found = difference([self._first], [batch.reshape(self._first.shape)])
            if found is not None and self._is_seeded:
                self.findings.add(
                    "warning",
                    "workers",
                    f"the same seed gives other data in a worker process ({found}): let nothing "
                    "depend on the process, such as hash(), the time, or variables of modules",
                )


def _steps_by_itself(env: Any) -> bool:
    """Returns True for a pool that steps some of its environments at a time."""
    return isinstance(env, GymEnv) and isinstance(env.vector, Pool)


def cut(text: str) -> str:
    """Returns a text, shortened if it is long."""
    return text if len(text) <= 300 else f"{text[:300]}…"


def act_randomly(env: Any, root: TensorDictBase, seed: int) -> TensorDictBase:
    """Writes random actions that depend only on the seed, and leave the global generators alone."""
    states = get_states()
    torch.manual_seed(seed)
    try:
        acted: TensorDictBase = env.rand_action(root)
    finally:
        set_states(states)
    return acted


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context in which the global generators start from a seed; afterwards, they are restored."""
    states = get_states()
    seed_generators(seed)
    try:
        yield
    finally:
        set_states(states)


def _differ(one: Any, other: Any) -> bool:
    """Returns True if two states of a generator differ."""
    if isinstance(one, Tensor):
        return not torch.equal(one, other)
    return pickle.dumps(one) != pickle.dumps(other)


def difference(one: list[TensorDictBase], other: list[TensorDictBase]) -> str | None:
    """Describes the first difference between the frames of two runs; None if there is none."""
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        keys = list(a.keys(True, True, is_leaf=is_leaf_nontensor))
        for key in keys:
            if as_key(key)[0] == "collector":
                continue
            x, y = a.get(key), b.get(key, None)
            found = _unequal(x, y)
            if found is not None:
                where = f"step {index + 1}" if len(one) > 1 else "a batch"
                return f"{show_key(as_key(key))} of {where} was {found}"
    return None


def _unequal(x: Any, y: Any) -> str | None:
    """Returns the first two values that differ; None if all are equal."""
    if not isinstance(x, Tensor):
        x, y = (getattr(value, "tolist", lambda value=value: value)() for value in (x, y))
        with suppress(Exception):
            return None if _same_objects(x, y) else f"{cut(repr(x))}, then {cut(repr(y))}"
        return None
    if y is None or x.shape != y.shape:
        return f"of shape {tuple(x.shape)}, then {None if y is None else tuple(y.shape)}"
    wrong = (x != y) & ~((x != x) & (y != y))  # NaN equals NaN here
    if not wrong.any():
        return None
    return f"{x[wrong].flatten()[0].item()}, then {y[wrong].flatten()[0].item()}"


def _same_objects(x: Any, y: Any) -> bool:
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        return bool(np.array_equal(x, y))
    return bool(x == y)
