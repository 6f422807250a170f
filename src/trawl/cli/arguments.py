"""What the command line takes: a dataclass for each command, whose texts are the help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

# --name, without the --no-name beside it.
Flag = tyro.conf.FlagCreatePairsOff[bool]
_ORDER = tyro.conf.create_mutex_group(required=False, title="with --workers")
_POLICY = (
    "What acts: random actions; a file with a program of torch.export or TorchScript, called with "
    "the observations in the order of the environment's keys; or a function in a module (or "
    "path/to/file.py), called with the environment if it takes an argument, that gives a policy. "
    "Programs run as they are: load none that you don't trust."
)


def _number(default: str = "") -> Any:
    """A number; ``default`` says what it is when it is not given."""
    return tyro.conf.arg(metavar="N", help_behavior_hint=default or None)


@dataclass(frozen=True)
class Collect:
    """Collect frames of an environment into a dataset on disk.

    trawl.data.load(DIR) gives the dataset as a TensorDict. Ctrl-C finishes the batch and keeps what
    there is; a second Ctrl-C stops at once, and keeps the batches before. After that, and after a
    crash, the same command with --resume goes on.
    """

    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
    """Gymnasium id, as Pendulum-v1; module:id to import a module that registers it; or
    module:function, or path/to/file.py:function, that makes an environment."""

    env_kwargs: Annotated[str | None, tyro.conf.arg(metavar="JSON", help_behavior_hint="")] = None
    """Arguments of the environment, as '{"g": 9.8}': for the function, or with an id for
    gymnasium.make and trawl.envs.GymEnv."""

    policy: Annotated[str, tyro.conf.arg(metavar="random|FILE|MODULE:FACTORY", help=_POLICY)] = (
        "random"
    )

    deterministic: Flag = False
    """Take a probabilistic policy's most likely action, or the mean, and draw none."""

    frames: Annotated[int, _number()] = 10_000
    """How many frames to collect; whole batches are, so up to one more may come."""

    frames_per_batch: Annotated[int | None, _number("(default: 1000, or --frames if less)")] = None
    """Frames in a batch."""

    seed: Annotated[int | None, _number("(default: one drawn, and recorded)")] = None
    """Seed of environments, policy and random actions."""

    out: Annotated[
        str | None,
        tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/ENV-DATE-TIME)"),
    ] = None
    """Where the dataset goes; nothing may be there, but for --resume."""

    format: Annotated[
        Literal["memmap", "minari", "parquet"],
        tyro.conf.arg(help_behavior_hint="(default: memmap, a memory-mapped TensorDict)"),
    ] = "memmap"
    """What the dataset is on disk. minari: whole episodes, for Minari (needs trawl-rl[minari]);
    parquet: tables, for pandas and others (needs trawl-rl[parquet]). Text: not memmap."""

    resume: Flag = False
    """Go on with the dataset in --out up to --frames, if there is one; else begin it."""

    max_frames_per_traj: Annotated[int | None, _number("(default: no limit of ours)")] = None
    """Steps after which an episode is truncated."""

    envs: Annotated[int, _number()] = 1
    """How many environments to step as one batch (each worker, if there are some)."""

    workers: Annotated[int, _number("(default: 0, in this process)")] = 0
    """How many processes to collect in."""

    backend: Annotated[
        Literal["process", "ray"],
        tyro.conf.arg(help_behavior_hint="(default: process, of this machine)"),
    ] = "process"
    """Where workers are: processes of this machine, or actors of a Ray cluster (that of
    RAY_ADDRESS, or that runs here, or else one that is started for it)."""

    sync: Annotated[Flag, _ORDER] = False
    """Batches are made by all workers together, as they are anyway."""

    asynchronous: Annotated[Flag, _ORDER, tyro.conf.arg(name="async")] = False
    """Batches are made by one worker each, and come as they are finished."""

    unsafe_pickle: Flag = False
    """Load a policy file that is a pickle, which can run any code."""

    traceback: Flag = False
    """Show where an error comes from, beside the line that tells it."""


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a policy: whole episodes, their mean return, and how sure that is.

    The same seed gives the same episodes, so that two policies can be compared. Results are written
    as JSON.
    """

    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
    """Gymnasium id, as Pendulum-v1; module:id to import a module that registers it; or
    module:function, or path/to/file.py:function, that makes an environment."""

    env_kwargs: Annotated[str | None, tyro.conf.arg(metavar="JSON", help_behavior_hint="")] = None
    """Arguments of the environment, as '{"g": 9.8}': for the function, or with an id for
    gymnasium.make and trawl.envs.GymEnv."""

    policy: Annotated[str, tyro.conf.arg(metavar="random|FILE|MODULE:FACTORY", help=_POLICY)] = (
        "random"
    )

    episodes: Annotated[int, _number()] = 20
    """How many episodes to run."""

    seed: Annotated[int, _number()] = 0
    """Seed of the episodes, and of a policy that is made."""

    out: Annotated[
        str | None,
        tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: runs/ENV-DATE-TIME.json)"),
    ] = None
    """Where the results go, as JSON; nothing may be there."""

    stochastic: Flag = False
    """Draw the actions of a probabilistic policy, instead of taking the most likely, or the
    mean."""

    max_steps: Annotated[int | None, _number("(default: no limit of ours)")] = None
    """Steps after which an episode is truncated."""

    envs: Annotated[int, _number()] = 1
    """How many environments to step as one batch (each worker, if there are some)."""

    workers: Annotated[int, _number("(default: 0, in this process)")] = 0
    """How many processes to evaluate in."""

    backend: Annotated[
        Literal["process", "ray"],
        tyro.conf.arg(help_behavior_hint="(default: process, of this machine)"),
    ] = "process"
    """Where workers are: processes of this machine, or actors of a Ray cluster."""

    unsafe_pickle: Flag = False
    """Load a policy file that is a pickle, which can run any code."""

    traceback: Flag = False
    """Show where an error comes from, beside the line that tells it."""


@dataclass(frozen=True)
class Show:
    """Show what a dataset holds: its entries, episodes, returns and how it was made."""

    directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """The dataset."""

    plot: Annotated[
        str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")
    ] = None
    """Draw the returns into this file (PNG, PDF or SVG, by its ending); needs trawl-rl[plot]."""

    traceback: Flag = False
    """Show where an error comes from, beside the line that tells it."""


_Command = (
    Annotated[Collect, tyro.conf.subcommand("collect")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Show, tyro.conf.subcommand("show")]
)

_DESCRIPTION = """Collects experience for reinforcement learning.

  trawl collect Pendulum-v1 --frames 10000 --out runs/demo

  trawl show runs/demo --plot returns.png

  trawl evaluate Pendulum-v1 --policy policy.pt2 --episodes 50

  trawl --version

Exit codes: 0, done; 2, an error, told in one line; 130, interrupted by Ctrl-C (143 by SIGTERM).
"""


def parse(argv: Sequence[str]) -> Collect | Evaluate | Show:
    """The command that the arguments give.

    Raises:
        SystemExit: after printing help (code 0), or what is wrong with the arguments (code 2).
    """
    command: Collect | Evaluate | Show = tyro.cli(
        _Command,
        prog="trawl",
        description=_DESCRIPTION,
        args=list(argv),
    )
    return command
