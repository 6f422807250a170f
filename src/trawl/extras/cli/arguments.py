"""Arguments of the command line: one dataclass per command, whose docstrings are the help text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from trawl.extras.cli.flags import arguments_of, table_flags

# An option --name without a matching --no-name.
Flag = tyro.conf.FlagCreatePairsOff[bool]
_ORDER = tyro.conf.create_mutex_group(required=False, title="with --workers")
_TUNE_ORDER = tyro.conf.create_mutex_group(required=False, title="workers")


def _number(default: str = "", help: str | None = None) -> Any:
    """Returns the settings of a numeric option; the help shows ``default`` as its default."""
    return tyro.conf.arg(metavar="N", help_behavior_hint=default or None, help=help)


# Options that several commands have.
EnvName = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="ENV",
        help="id, such as Pendulum-v1 or dm_control:cheetah/run;\n"
        "module:id, to import the module that registers the id; or\n"
        "module:function, for a function that makes an environment.\n"
        "A module may also be a file: path/to/file.py.",
    ),
]
EnvKwargs = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="JSON",
        help_behavior_hint="",
        help="Arguments of the environment, as a JSON object such as '{\"g\": 9.8}'.\n"
        "They are passed to the function; with an id, to trawl.envs.GymEnv and gymnasium.make.",
    ),
]
InfoNames = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="NAME ...",
        help_behavior_hint="",
        help="Entries of the environment's info that become entries of each frame, such as\n"
        'action_mask, or episode/r for an element of info["episode"].\n'
        'The policy can read them under ("info", NAME).',
    ),
]
PolicyName = Annotated[
    str,
    tyro.conf.arg(
        metavar="random|FILE|MODULE:FACTORY",
        help="Policy to act with.\n"
        "random: random actions;\n"
        "FILE: a program of torch.export or TorchScript, called with the observations in the order "
        "of the environment's keys; or\n"
        "MODULE:FACTORY: a function that returns a policy, from a module or path/to/file.py. If it "
        "takes an argument, it gets the environment.\n"
        "Programs run unchecked: load only files that you trust.",
    ),
]
NumEnvs = Annotated[
    int,
    _number(help="Number of environments to step as one batch; with --workers, in each worker."),
]
UnsafePickle = Annotated[
    Flag,
    tyro.conf.arg(
        help="Allow a policy file that is a pickle and, with --resume, pickled environments.\n"
        "Loading a pickle can run any code."
    ),
]
Traceback = Annotated[
    Flag, tyro.conf.arg(help="Show the traceback of an error, in addition to its message.")
]


if TYPE_CHECKING:

    class CollectOptions:
        """Arguments whose names and types the table of options has."""

        def __getattr__(self, name: str) -> Any: ...

    class EvaluateOptions(CollectOptions):
        """Arguments whose names and types the table of options has."""

    class TuneOptions(CollectOptions):
        """Arguments whose names and types the table of options has."""

else:
    CollectOptions = arguments_of("CollectOptions", table_flags("collect"))
    EvaluateOptions = arguments_of("EvaluateOptions", table_flags("evaluate"))
    TuneOptions = arguments_of("TuneOptions", table_flags("tune"))


@dataclass(frozen=True)
class CollectArguments:
    """Collects frames from an environment into a dataset on disk.

    trawl.data.load(DIR) loads the dataset as a TensorDict. Ctrl-C finishes the current batch and
    keeps all frames. A second Ctrl-C stops at once and keeps only the earlier batches. After an
    interruption or a crash, run the same command with --resume to continue.
    """

    env: EnvName
    env_kwargs: EnvKwargs = None
    info_keys: InfoNames = ()
    policy: PolicyName = "random"

    deterministic: Flag = False
    """Take a probabilistic policy's most likely action, or the mean, instead of sampling."""

    frames: Annotated[int, _number()] = 10_000
    """Number of frames to collect."""

    frames_per_batch: Annotated[int | None, _number("(default: 1000, or --frames if less)")] = None
    """Number of frames in a batch."""

    seed: Annotated[int | None, _number("(default: random, and recorded in the dataset)")] = None
    """Seed of environments, policy and random actions."""

    out: Annotated[
        str | None,
        tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/ENV-DATE-TIME)"),
    ] = None
    """Folder for the dataset. It must not exist, except with --resume."""

    format: Annotated[
        str,
        tyro.conf.arg(
            metavar="memmap|minari|parquet|NAME",
            help_behavior_hint="(default: memmap, a memory-mapped TensorDict)",
        ),
    ] = "memmap"
    """Format of the dataset on disk, one of these or one that another package adds.
    minari: whole episodes, for Minari (needs trawl-rl[minari]);
    parquet: tables, for pandas and other tools (needs trawl-rl[parquet]).
    memmap can't hold text."""

    resume: Flag = False
    """Continue the dataset in --out until it has --frames frames; if there is none, begin one.
    The frames are the same as without a break, unless a note says why new episodes begin."""

    options: Annotated[
        CollectOptions, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="collector")
    ] = field(default_factory=CollectOptions)

    envs: NumEnvs = 1

    env_processes: Annotated[int, _number("(default: 0, in this process)")] = 0
    """Number of processes that the environments of --envs are divided among.
    The policy acts for all of them in this process."""

    workers: Annotated[int, _number("(default: 0, in this process)")] = 0
    """Number of worker processes to collect in."""

    backend: Annotated[
        str,
        tyro.conf.arg(
            metavar="process|ray|NAME", help_behavior_hint="(default: process, on this machine)"
        ),
    ] = "process"
    """Where workers run: in processes on this machine, as actors in a Ray cluster, or in a place
    that another package adds. For Ray, the command uses the cluster at RAY_ADDRESS, or else a
    cluster that runs on this machine. If there is none, it starts one."""

    sync: Annotated[Flag, _ORDER] = False
    """Collect each batch from all workers together, as the command does without this option."""

    asynchronous: Annotated[Flag, _ORDER, tyro.conf.arg(name="async")] = False
    """Collect each batch from one worker, and write batches in the order in which they finish."""

    # The table of sinks would be imported for every help; a test compares.
    log: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(metavar="TO", help_behavior_hint="(default: none; repeatable)"),
    ] = ()
    """Destination for statistics during collection; can be passed several times.
    tensorboard:DIR; wandb:PROJECT; mlflow:DIR or mlflow:URI; prometheus:PORT, on this machine, or
    prometheus:HOST:PORT; csv:FILE. All but csv need the extra with their name. Other packages can
    add more."""

    log_every: Annotated[
        float, tyro.conf.arg(metavar="SECONDS", help_behavior_hint="(default: 10)")
    ] = 10.0
    """Seconds between two polls of the statistics for --log."""

    unsafe_pickle: UnsafePickle = False

    traceback: Traceback = False


@dataclass(frozen=True)
class EvaluateArguments:
    """Evaluates a policy over whole episodes, and reports the mean return and its uncertainty.

    The same seed gives the same episodes, so that you can compare two policies. The results are
    written to a JSON file.
    """

    env: EnvName
    env_kwargs: EnvKwargs = None
    info_keys: InfoNames = ()
    policy: PolicyName = "random"

    episodes: Annotated[int, _number()] = 20
    """Number of episodes to run."""

    seed: Annotated[int, _number()] = 0
    """Seed of the episodes, and of the function that makes the policy."""

    out: Annotated[
        str | None,
        tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: runs/ENV-DATE-TIME.json)"),
    ] = None
    """File for the results, as JSON. It must not exist."""

    stochastic: Flag = False
    """Sample the actions of a probabilistic policy.
    Without this option, the policy takes the most likely action, or the mean."""

    normalization: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """Statistics with which observations are normalised: a file that torch.save wrote of
    collector.normalization.state_dict(), or the folder of a dataset."""

    options: Annotated[
        EvaluateOptions, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="collector")
    ] = field(default_factory=EvaluateOptions)

    max_steps: Annotated[int | None, _number("(default: only the environment's own limit)")] = None
    """Number of steps after which an episode is truncated."""

    envs: NumEnvs = 1

    workers: Annotated[int, _number("(default: 0, in this process)")] = 0
    """Number of worker processes to evaluate in."""

    backend: Annotated[
        Literal["process", "ray"],
        tyro.conf.arg(help_behavior_hint="(default: process, on this machine)"),
    ] = "process"
    """Where workers run: in processes on this machine, or as actors in a Ray cluster."""

    unsafe_pickle: UnsafePickle = False

    traceback: Traceback = False


@dataclass(frozen=True)
class TuneArguments:
    """Measures which layout of environments and processes collects fastest on this machine.

    The command compares one process, environments in processes, and workers, with different numbers
    of each. It prints a table, and the best layout as lines of Python and as a command.
    """

    env: EnvName
    env_kwargs: EnvKwargs = None
    info_keys: InfoNames = ()
    policy: PolicyName = "random"

    budget: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 60.0
    """Seconds for the search."""

    frames_per_batch: Annotated[
        int | None, _number("(default: about 1000 and 4000 are compared)")
    ] = None
    """Number of frames in a batch."""

    sync: Annotated[Flag, _TUNE_ORDER] = False
    """Compare only synchronous workers: each batch comes from all of them together."""

    asynchronous: Annotated[Flag, _TUNE_ORDER, tyro.conf.arg(name="async")] = False
    """Compare only asynchronous workers: each batch comes from one of them."""

    max_workers: Annotated[int | None, _number("(default: by the number of CPU cores)")] = None
    """Largest number of processes."""

    max_envs: Annotated[int | None, _number("(default: no limit)")] = None
    """Largest number of environments in all processes together."""

    options: Annotated[TuneOptions, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="collector")] = (
        field(default_factory=TuneOptions)
    )

    seed: Annotated[int, _number()] = 0
    """Seed for the function that makes the policy."""

    unsafe_pickle: UnsafePickle = False

    traceback: Traceback = False


@dataclass(frozen=True)
class CheckArguments:
    """Checks an environment, and optionally a policy, against what collectors expect of them.

    The command takes random steps, looks at all data, compares runs with the same seed, continues
    from a saved state, and collects in a worker process. Each finding says what to do.
    """

    env: EnvName
    env_kwargs: EnvKwargs = None
    info_keys: InfoNames = ()

    policy: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="FILE|MODULE:FACTORY",
            help_behavior_hint="(default: only the environment is checked)",
        ),
    ] = None
    """Policy to check in the environment, as in trawl collect.
    It is checked only if the environment has no errors."""

    steps: Annotated[int, _number()] = 200
    """Number of steps in which the data are looked at.
    Ends of episodes are checked only if an episode ends within them."""

    seed: Annotated[int, _number()] = 0
    """Seed of the environment, the random actions and the policy."""

    unsafe_pickle: UnsafePickle = False

    traceback: Traceback = False


@dataclass(frozen=True)
class ShowArguments:
    """Shows a dataset: its entries, episodes and returns, and how it was made."""

    directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder of the dataset."""

    plot: Annotated[
        str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")
    ] = None
    """File for a plot of the returns: PNG, PDF or SVG, by its suffix (needs trawl-rl[plot])."""

    html: Annotated[
        str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")
    ] = None
    """File for an HTML report on the run: one page that needs no other file and no network."""

    traceback: Traceback = False


Arguments = CheckArguments | CollectArguments | EvaluateArguments | ShowArguments | TuneArguments
_Command = (
    Annotated[CheckArguments, tyro.conf.subcommand("check")]
    | Annotated[CollectArguments, tyro.conf.subcommand("collect")]
    | Annotated[EvaluateArguments, tyro.conf.subcommand("evaluate")]
    | Annotated[ShowArguments, tyro.conf.subcommand("show")]
    | Annotated[TuneArguments, tyro.conf.subcommand("tune")]
)


def flat(arguments: Arguments) -> dict[str, Any]:
    """Returns the values of all arguments of a command, by name."""
    found = asdict(arguments)
    found.update(found.pop("options", {}))
    return found


_DESCRIPTION = """Collects experience for reinforcement learning.

  trawl collect Pendulum-v1 --frames 10000 --out runs/demo

  trawl show runs/demo --plot returns.png --html report.html

  trawl evaluate Pendulum-v1 --policy policy.pt2 --episodes 50

  trawl tune Pendulum-v1 --budget 60

  trawl check my_envs.py:make_env --policy policy.pt2

  trawl --version

Exit codes: 0, success; 1, trawl check found errors; 2, an error, reported in one line; 130, stopped
by Ctrl-C; 143, by SIGTERM.
"""


_NUMBERS = tyro.constructors.ConstructorRegistry()


@_NUMBERS.primitive_rule
def _parsed_number(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Parses numbers, with errors that say what a value must be."""
    all_kinds = get_args(info.type) or (info.type,)
    kinds = [kind for kind in all_kinds if kind is not NoneType]
    if kinds not in ([int], [float]):
        return None
    (kind,) = kinds
    what = "an integer" if kind is int else "a number"

    def parsed(texts: list[str]) -> Any:
        if texts == ["None"] and NoneType in all_kinds:
            return None
        try:
            return kind(texts[0])
        except ValueError:
            raise ValueError(f"it must be {what}, but it is {texts[0]!r}") from None

    return tyro.constructors.PrimitiveConstructorSpec(
        1, "N", parsed, lambda value: value is None or isinstance(value, kind), lambda x: [str(x)]
    )


def parse(argv: Sequence[str]) -> Arguments:
    """Parses the arguments of the command line.

    Raises:
        SystemExit: after printing help (code 0), or an error in the arguments (code 2).
    """
    command: Arguments = tyro.cli(
        _Command,
        prog="trawl",
        description=_DESCRIPTION,
        args=list(argv),
        registry=_NUMBERS,
    )
    return command
