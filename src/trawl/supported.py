"""The table of what can't be combined: options, environments and collectors.

Each :class:`Refusal` says once what is refused, why, and what to do instead. The checks of the
library raise its error, the documentation shows it, and the tests try it. Everything that no entry
refuses is supported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

_CONDITION = re.compile(r"(\w+)(?:(!=|=|>)(.+))?")
_SIMPLE = (bool, int, float, str, type(None))


class Trait(Enum):
    """Properties of environments that rule options out; the values are for sentences."""

    ALL_AT_ONCE = "vector environments that can't restart only some of their environments"
    READY = "AsyncBatchedCollector, and pools that return the environments that are ready"
    POOL = "pools that return the environments that are ready"


class Law(Enum):
    """Reasons for refusals; the values are for the documentation.

    All but the last two are laws of nature: no implementation could do otherwise.
    """

    TOGETHER = "What happens to all environments at once can't happen to one of them alone"
    LAYOUT = (
        "What has no fixed shape and dtype can't be computed with, or lie in rows of one memory"
    )
    ABSENT = "What isn't there can't be chosen, changed or made again"
    GONE = "What has been delivered or written can't be changed afterwards"
    ELSEWHERE = "What lies in the memory of one process isn't in that of another"
    WAITING = "Workers either wait for the others, or they don't"
    ALONE = "An option that says more about another one needs it"
    TWICE = "Two options can't answer the same question"


class _Condition:
    """A condition on the value of an option.

    ``"name"`` holds for values that are true, ``"name=value"`` for this value, ``"name!=value"``
    for others, ``"name>number"`` for larger numbers, and ``"name=..."`` for all but None.

    Args:
        text: the condition.
    """

    def __init__(self, text: str) -> None:
        match = _CONDITION.fullmatch(text)
        assert match is not None, text
        self.name, self._relation, literal = match.groups()
        self._literal = None if literal is None else ast.literal_eval(literal)
        # As users write it.
        named = self._relation == "=" and self._literal is not ...
        self.shown = text if named else self.name

    def holds(self, options: Mapping[str, Any]) -> bool:
        if self.name not in options:
            return False
        value = options[self.name]
        if self._relation is None:
            return bool(value)
        if self._relation == ">":
            return value is not None and value > self._literal
        if self._literal is ...:
            return value is not None
        same = isinstance(value, _SIMPLE) and value == self._literal
        return same is (self._relation == "=")


_condition = cache(_Condition)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Options that can't be combined with something.

    Attributes:
        law: the reason in general.
        options: the options, each with the values that are refused: ``"name"`` for values that
            are true, ``"name=value"``, ``"name!=value"``, ``"name>number"``, or ``"name=..."`` for
            all but None.
        other: what they can't be combined with; None if ``others`` says it.
        needs: what they need, if they are refused without it.
        why: the reason, as a clause.
        instead: what to do instead, as an imperative.
        others: conditions on other options, all of which must hold.
        unless: condition on an option with which nothing is refused.
        traits: traits of an environment, one of which must be there.
        late: True if the arguments alone don't decide whether the combination is refused.
        kind: type of the error.
    """

    law: Law
    options: tuple[str, ...]
    why: str
    instead: str
    other: str | None = None
    needs: str | None = None
    others: tuple[str, ...] = ()
    unless: str | None = None
    traits: frozenset[Trait] = frozenset()
    late: bool = False
    kind: type[Exception] = ValueError

    @property
    def names(self) -> list[str]:
        """The names of the options."""
        return [_condition(one).name for one in self.options]

    @property
    def shown(self) -> list[str]:
        """The options, with the values that are refused."""
        return [_condition(one).shown for one in self.options]

    @property
    def against(self) -> str:
        """The other side of the refusal: options, values or properties of environments."""
        if self.other is not None:
            return self.other
        if self.traits:
            return ", or ".join(trait.value for trait in Trait if trait in self.traits)
        return " and ".join(_condition(one).shown for one in self.others)

    def found(self, options: Mapping[str, Any], traits: Collection[Trait] = ()) -> str | None:
        """Returns the name of the option that is refused, or None.

        Args:
            options: values of options, by name.
            traits: traits of the environment.
        """
        if not (self.others or self.traits) or (self.traits and self.traits.isdisjoint(traits)):
            return None
        if not all(_condition(one).holds(options) for one in self.others):
            return None
        if self.unless is not None and _condition(self.unless).holds(options):
            return None
        conditions = map(_condition, self.options)
        return next((one.name for one in conditions if one.holds(options)), None)

    def text(
        self,
        given: str | None = None,
        *,
        against: str | None = None,
        why: str | None = None,
        instead: str | None = None,
    ) -> str:
        """Returns the message of the error.

        Args:
            given: the option and its value; by default, the first option.
            against: what it can't be combined with; by default, as the table says.
            why: the reason.
            instead: what to do instead.
        """
        given = self.shown[0] if given is None else given
        relation = "can't be used with" if self.needs is None else "needs"
        other = against or self.needs or self.against
        return f"{given} {relation} {other}, because {why or self.why}: {instead or self.instead}"

    def error(self, name: str | None = None, value: Any = None, **more: str | None) -> Exception:
        """Returns the error.

        Args:
            name: name of the option that was given; by default, the first.
            value: its value; None to show the option as the table does.
            **more: arguments of :meth:`text`.

        Raises:
            KeyError: if this entry has no such option.
        """
        if name is not None and name not in self.names:
            raise KeyError(f"{name} is none of {self.names}")
        given = self.shown[0] if name is None else self.shown[self.names.index(name)]
        if name is not None and value is not None:
            short = isinstance(value, (*_SIMPLE, list, tuple, dict)) and len(repr(value)) < 50
            given = f"{name}={value!r}" if short else name
        return self.kind(self.text(given, **more))


_WHOLE = ("trajs_per_batch", "replay_write_mode='trajectory'")
_WHEN_READY = frozenset({Trait.READY})

# --- options and environments

LIMIT_ALL_AT_ONCE = Refusal(
    law=Law.TOGETHER,
    options=("max_frames_per_traj",),
    traits=frozenset({Trait.ALL_AT_ONCE}),
    why="a limit restarts one environment while the others go on",
    instead=(
        "use a list of factories, or a gymnasium.vector.SyncVectorEnv with stateful wrappers only "
        "around its sub-environments"
    ),
)
STAGE_LOOSE = Refusal(
    law=Law.LAYOUT,
    options=("frame_stack", "normalize_observations"),
    other="entries whose shape or dtype is not fixed, such as text",
    why="there is nothing to compute with",
    instead="name other entries, with FrameStack(size, keys=...) or NormalizeObservation(keys=...)",
)
RESTART_OBJECT = Refusal(
    law=Law.ABSENT,
    options=("on_env_error='restart'",),
    other="environments that are passed as objects",
    why="they can't be rebuilt",
    instead="pass a Gymnasium id, or a function that makes the environment",
)
RESET_ARGUMENTS_NONE = Refusal(
    law=Law.ABSENT,
    options=("reset_kwargs",),
    other="environments of dm_env, JAX, VMAS and EnvPool",
    why="the reset takes no arguments",
    instead="pass them where the environment is made",
)
RESET_ARGUMENTS_BEGUN = Refusal(
    law=Law.ABSENT,
    options=("reset_kwargs",),
    other="vector environments that begin their episodes themselves",
    why="the collector doesn't call their resets",
    instead="make them with autoreset_mode='Disabled', or pass a list of environments",
)
RESET_FUNCTION_BATCH = Refusal(
    law=Law.TOGETHER,
    options=("reset_kwargs",),
    other="vector environments, if it is a function",
    why="their reset takes one mapping for all sub-environments",
    instead="pass a mapping, or a list of environments",
)
INFO_WITHOUT = Refusal(
    law=Law.ABSENT,
    options=("info_keys",),
    other="environments without infos, such as those of dm_env and TorchRL",
    why="there is nothing to choose from",
    instead="put the values into the observation",
    kind=TypeError,
)
MODE_ENVPOOL = Refusal(
    law=Law.ABSENT,
    options=("autoreset_mode=...",),
    other="environments of EnvPool",
    why="they have a way of their own to begin episodes",
    instead="leave the argument out",
)
MODE_SINGLE = Refusal(
    law=Law.ABSENT,
    options=("autoreset_mode=...",),
    other="single environments",
    why="it applies only to vector environments, and the collector resets a single one",
    instead="leave the argument out",
    kind=TypeError,
)
MODE_POOL = Refusal(
    law=Law.TOGETHER,
    options=("autoreset_mode='Disabled'",),
    other=Trait.POOL.value,
    why="such a pool must reset its environments by itself",
    instead="make it with 'NextStep' or 'SameStep'",
)
MASK_AEC = Refusal(
    law=Law.ABSENT,
    options=("use_mask=False",),
    other="AEC environments of PettingZoo",
    why="only one agent acts in each step",
    instead="leave the argument out",
)
READY_STEPS = Refusal(
    law=Law.GONE,
    options=("set_truncated",),
    others=("replay_buffer!=None", "extend_buffer=False"),
    traits=_WHEN_READY,
    other=f"{Trait.READY.value}, if each frame is written alone (extend_buffer=False)",
    why="the last frames of other environments are written already",
    instead="leave extend_buffer out",
)
POOL_RESET = Refusal(
    law=Law.TOGETHER,
    options=("reset_at_each_iter",),
    other=(
        "pools that reset all environments together (ALE's), if batch_size doesn't divide num_envs"
    ),
    why="steps under way can't be finished",
    instead="choose another batch_size",
)

# --- whole trajectories

FORMAT_ALONE = Refusal(
    law=Law.ALONE,
    options=("traj_format=...",),
    needs="trajs_per_batch",
    others=("trajs_per_batch=None",),
    why="it applies only to whole trajectories that are delivered",
    instead="pass trajs_per_batch too, the number of trajectories in a batch",
)
WHOLE_ALONE = Refusal(
    law=Law.ALONE,
    options=("traj_sampling=...", "trajs_per_write=..."),
    needs="trajs_per_batch or replay_write_mode='trajectory'",
    others=("trajs_per_batch=None", "replay_write_mode!='trajectory'"),
    why="it applies only to whole trajectories",
    instead="pass one of them too",
)
WRITE_MODE_ALONE = Refusal(
    law=Law.ALONE,
    options=("replay_write_mode=...",),
    needs="replay_buffer",
    others=("replay_buffer=None",),
    why="it says what a replay buffer gets",
    instead="pass replay_buffer too",
)
WRITE_SIZE_ALONE = Refusal(
    law=Law.ALONE,
    options=("trajs_per_write=...",),
    needs="replay_buffer",
    others=("replay_buffer=None",),
    why="it says how much is written at once",
    instead="pass replay_buffer too",
)
WRITE_MODE_TWICE = Refusal(
    law=Law.TWICE,
    options=("replay_write_mode=...",),
    others=("trajs_per_batch=...",),
    why="both say what the replay buffer gets",
    instead="leave trajs_per_batch out",
)
WRITE_MODE_YIELD = Refusal(
    law=Law.TWICE,
    options=("replay_write_mode=...",),
    others=("yield_completed_trajectories=True",),
    why="both say what the replay buffer gets",
    instead="leave yield_completed_trajectories out",
)
YIELD_TWICE = Refusal(
    law=Law.TWICE,
    options=("trajs_per_batch=...",),
    others=("yield_completed_trajectories=True",),
    why="both say how whole trajectories are delivered",
    instead="leave yield_completed_trajectories out",
)
WHOLE_WITHOUT_IDS = Refusal(
    law=Law.ABSENT,
    options=_WHOLE,
    others=("track_traj_ids=False",),
    why="whole trajectories are found by their ids",
    instead="leave track_traj_ids out",
)
WHOLE_SPLIT = Refusal(
    law=Law.TWICE,
    options=_WHOLE,
    others=("split_trajs=True",),
    why="split_trajs cuts whole trajectories at the end of each batch",
    instead="leave split_trajs out",
)
WHOLE_TRUNCATED = Refusal(
    law=Law.GONE,
    options=_WHOLE,
    others=("set_truncated=True",),
    unless="reset_at_each_iter",
    why="set_truncated marks trajectories as ended that continue in the next batch",
    instead="leave set_truncated out, or pass reset_at_each_iter=True, with which they do end",
)
SPLIT_WITHOUT_IDS = Refusal(
    law=Law.ABSENT,
    options=("split_trajs",),
    others=("track_traj_ids=False",),
    why="trajectories are split by their ids",
    instead="leave track_traj_ids out",
)

# --- replay buffers and sinks

BUFFER_MEMORY = Refusal(
    law=Law.GONE,
    options=("return_same_td", "use_buffers"),
    others=("replay_buffer!=None",),
    why="it concerns batches that are delivered, and these are written to the buffer",
    instead="leave the argument out",
    kind=TypeError,
)
BUFFER_STEPS = Refusal(
    law=Law.GONE,
    options=("postproc", "split_trajs", *_WHOLE),
    others=("replay_buffer!=None", "extend_buffer=False"),
    why="each step is then written alone",
    instead="leave extend_buffer out",
    kind=TypeError,
)
STORAGE_ROWS = Refusal(
    law=Law.LAYOUT,
    options=("exact_frames", *_WHOLE, "split_trajs", "on_env_error='restart'"),
    others=("storage_ndim>1",),
    other="a replay buffer whose storage has several dimensions (ndim)",
    why="what is written doesn't fill the rows of a batch, so it has one dimension",
    instead="make the storage without ndim",
)
STORAGE_FRAMES = Refusal(
    law=Law.LAYOUT,
    options=("replay_buffer",),
    other=(
        "a storage of several dimensions, if environments spend steps on resets or there is only "
        "one environment"
    ),
    why="frames are then written one after the other, in one dimension",
    instead="make the storage without ndim",
)
RATIO_ALONE = Refusal(
    law=Law.ALONE,
    options=("samples_per_insert=...",),
    needs="replay_buffer",
    others=("replay_buffer=None",),
    why="it counts what is drawn from a replay buffer",
    instead="pass replay_buffer too",
)
AHEAD_ALONE = Refusal(
    law=Law.ALONE,
    options=("inserts_ahead=...",),
    needs="samples_per_insert",
    others=("samples_per_insert=None",),
    why="it is how far the collector may be ahead of that ratio",
    instead="pass samples_per_insert too",
)
SINK_SHARED = Refusal(
    law=Law.ELSEWHERE,
    options=("sink",),
    other="a replay buffer that workers write into themselves (shared=True)",
    why="their batches don't come to this process",
    instead="use a replay buffer that is not shared",
    kind=TypeError,
)

# --- workers, and the collectors that have them

SINGLE_ONLY = Refusal(
    law=Law.ELSEWHERE,
    options=("return_same_td", "interruptor=..."),
    others=("workers",),
    other="collectors with workers",
    why="only a collector in this process has the memory of a batch while it is filled",
    instead="leave the argument out, or use a Collector",
    kind=TypeError,
)
JOINED_ASYNC = Refusal(
    law=Law.WAITING,
    options=("cat_results=0", "cat_results=-1"),
    needs="sync=True",
    others=("sync=False",),
    why="with sync=False each batch comes from one worker",
    instead="leave cat_results out",
)
LAG_SYNC = Refusal(
    law=Law.WAITING,
    options=("max_policy_lag=...",),
    needs="sync=False",
    others=("sync=True",),
    why=(
        "with sync=True all workers wait for the next request, which comes after the newest weights"
    ),
    instead="leave max_policy_lag out",
)
PREFETCH_ASYNC = Refusal(
    law=Law.WAITING,
    options=("prefetch",),
    needs="sync=True",
    others=("sync=False",),
    why="with sync=False workers always collect ahead",
    instead="leave prefetch out",
)
PREFETCH_UPDATER = Refusal(
    law=Law.WAITING,
    options=("prefetch",),
    others=("weight_updater!=None",),
    why="its updates may reach workers in the middle of a batch",
    instead="leave weight_updater out",
)
JOINED_UNBUFFERED = Refusal(
    law=Law.ELSEWHERE,
    options=("cat_results=0", "cat_results=-1"),
    others=("use_buffers=False",),
    why="workers write into one batch of shared memory",
    instead="leave use_buffers out",
    kind=RuntimeError,
)
UPDATE_WITHOUT_MODULE = Refusal(
    law=Law.ABSENT,
    options=(
        "update_at_each_batch=True",
        "update_after_each_batch=True",
        "max_weight_update_interval",
    ),
    needs="a policy that is a module of this process",
    why="it sends the weights of a module, but the policy is none, or policy_factory makes it",
    instead="call update_policy_weights_(weights) instead",
)
SNAPSHOTS_NESTED = Refusal(
    law=Law.ELSEWHERE,
    options=("worker_snapshots",),
    other="workers that have workers of their own",
    why="a snapshot holds the environments of one process",
    instead="use collector_class='single'",
)
LAG_PREEMPTION = Refusal(
    law=Law.WAITING,
    options=("max_policy_lag=...",),
    other="preemptive_threshold in collector_kwargs",
    why="slow workers of a node would deliver older frames with a later batch",
    instead="leave one of them out",
)
DIRECT_BACKEND = Refusal(
    law=Law.ABSENT,
    options=("sync=...", "backend_options=..."),
    other="backend 'direct'",
    why="it has no workers",
    instead="leave the argument out, or choose another backend",
)
RAY_START = Refusal(
    law=Law.ABSENT,
    options=("start_method=...",),
    other="actors in a Ray cluster",
    why="Ray starts them",
    instead="leave the argument out",
    kind=TypeError,
)
LAUNCHER_START = Refusal(
    law=Law.ABSENT,
    options=("start_method=...",),
    other="a launcher",
    why="the launcher determines what starts the workers",
    instead="leave the argument out, and choose a launcher",
    kind=TypeError,
)

# --- environments that are ready

READY_LAG = Refusal(
    law=Law.TOGETHER,
    options=("max_policy_lag=...",),
    others=("envs_per_worker>1",),
    other="envs_per_worker above 1",
    why="the environments of a process step together",
    instead="leave envs_per_worker out",
)
READY_POOL = Refusal(
    law=Law.ABSENT,
    options=(
        "max_batch_size",
        "min_batch_size",
        "server_timeout",
        "server_config",
        "backend",
        "env_backend",
        "envs_per_worker",
        "worker_affinity",
        "worker_timeout",
        "max_policy_lag",
        "policy_backend",
    ),
    needs="a list of environments",
    why="a pool decides itself how it steps and which of its sub-environments it returns",
    instead="leave the argument out",
)
READY_LAYOUT = Refusal(
    law=Law.LAYOUT,
    options=("AsyncBatchedCollector",),
    needs=(
        "environments that have no inputs besides observations and actions, and data of fixed "
        "shapes and dtypes"
    ),
    why="their results go into rows of one memory",
    instead="use MultiAsyncCollector",
)

# --- weights

UPDATER_SCHEMES = Refusal(
    law=Law.TWICE,
    options=("weight_updater",),
    others=("weight_sync_schemes!=None",),
    why="both send the weights of the policy",
    instead="leave one of them out",
    kind=TypeError,
)
UPDATER_MODELS = Refusal(
    law=Law.ABSENT,
    options=("weights_dict", "model_id"),
    other="a weight_updater",
    why="it sends only the weights of the policy",
    instead="pass the weights alone",
)
CHOSEN_WORKERS_NONE = Refusal(
    law=Law.ABSENT,
    options=("worker_ids",),
    other="a collector without workers",
    why="there is none to choose",
    instead="leave the argument out",
    kind=TypeError,
)
CHOSEN_WORKERS_SERVICE = Refusal(
    law=Law.ABSENT,
    options=("worker_ids",),
    other="an inference service",
    why="one service acts for all workers",
    instead="leave the argument out",
)
SERVICE_WEIGHTS = Refusal(
    law=Law.ABSENT,
    options=("policy_factory", "weight_sync_schemes", "weight_updater"),
    other="an inference service as the policy",
    why="the service has the policy",
    instead="leave the argument out; update_policy_weights_(weights) sends weights to it",
)

# --- the command

COMMAND_PROCESSES = Refusal(
    law=Law.TWICE,
    options=("env_processes",),
    other="workers",
    why="workers step their environments themselves",
    instead="leave one of them out",
)

#: All entries, by name.
TABLE: dict[str, Refusal] = {
    name: value for name, value in list(globals().items()) if isinstance(value, Refusal)
}


def refused(options: Mapping[str, Any], traits: Collection[Trait] = ()) -> list[Refusal]:
    """Returns the entries that refuse options, as far as options and traits decide it.

    Args:
        options: values of options, by name. ``workers`` is True for a collector with workers.
        traits: traits of the environment.

    Examples:
        >>> (found,) = refused({"trajs_per_batch": 2, "split_trajs": True})
        >>> found.instead
        'leave split_trajs out'
        >>> refused({"max_frames_per_traj": 5})
        []
    """
    return [one for one in TABLE.values() if one.found(options, traits) is not None]


def check(
    options: Mapping[str, Any], traits: Collection[Trait] = (), against: str | None = None
) -> None:
    """Raises the error of the first entry that refuses options.

    Args:
        options: values of options, by name.
        traits: traits of the environment; if there are any, only entries about them are checked.
        against: what the options are used with, for the message; by default, as the table says.

    Raises:
        Exception: if an entry refuses an option.
    """
    for one in TABLE.values():
        if one.late or bool(traits) is not bool(one.traits):
            continue
        name = one.found(options, traits)
        if name is not None:
            raise one.error(name, options[name], against=against)
