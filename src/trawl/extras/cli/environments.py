"""Construction of the environments that ENV and ``--env-kwargs`` specify."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import gymnasium
from gymnasium import spaces

from trawl.backends.places import PLACES
from trawl.envs.base import TensorDictEnv
from trawl.envs.batches.serial import batch_source, build_env, several_of_id
from trawl.envs.build import adapted, env_of_id, is_env, is_tensordict_env
from trawl.envs.gym import GymEnv
from trawl.envs.kinds import check_prefix, is_known
from trawl.envs.processes.parallel import ParallelEnv
from trawl.envs.specs import NonTensor
from trawl.extras.cli.arguments import (
    CheckArguments,
    CollectArguments,
    EvaluateArguments,
    TuneArguments,
)
from trawl.extras.cli.errors import CliError, describe, message_of
from trawl.extras.cli.flags import option_of
from trawl.extras.cli.references import find, load_module, split
from trawl.extras.cli.transforms import minari_env
from trawl.keys import Key, as_key, show_key
from trawl.supported import INFO_WITHOUT

UsesEnv = CheckArguments | CollectArguments | EvaluateArguments | TuneArguments


@dataclass(frozen=True)
class EnvFactory:
    """Makes an environment by calling a function, or from an id that a module registers.

    Args:
        text: ``module:name``, as the user passed it.
        kwargs: arguments of the function or, with an id, of ``GymEnv``.
        info_keys: names of entries of the environment's info that become observations.
    """

    text: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    info_keys: list[str] = field(default_factory=list)

    def __call__(self) -> Any:
        """Returns a new environment.

        Raises:
            CliError: if the module can't be imported, or has no such function or id.
        """
        name = split(self.text)[1]
        factory = self.find()
        if factory is None:
            return GymEnv(name, **_with_info(self.kwargs, self.info_keys))
        made = factory(**self.kwargs)
        return self._observed(made) if self.info_keys else made

    def _observed(self, made: Any) -> Any:
        """Returns the function's environment with entries of its info."""
        if isinstance(made, str):
            return env_of_id(made, info_keys=self.info_keys)
        if is_tensordict_env(made) or not is_env(made):
            raise CliError(
                INFO_WITHOUT.text(
                    "--info-keys",
                    against=self.text,
                    why=f"it returns {made!r}",
                    instead=(
                        "in the function, pass info_keys to the object that makes it, such as "
                        "GymEnv"
                    ),
                )
            )
        return adapted(made, info_keys=self.info_keys)

    def find(self) -> Any:
        """Returns the function; None for an id that the module registers.

        Raises:
            CliError: if the module can't be imported, or has no such function or id.
        """
        what = f"environment {self.text} can't be made"
        module, name = split(self.text)
        try:
            loaded = load_module(what, module)
        except CliError as error:
            if getattr(error.__cause__, "name", None) == module:
                # The module doesn't exist: perhaps the name of a kind is misspelt.
                try:
                    with suppress(ModuleNotFoundError):
                        check_prefix(self.text)
                except ValueError as hint:
                    raise CliError(f"{what}: {hint}") from error
            raise
        if name in gymnasium.registry:
            return None
        factory = find(what, loaded, name)
        if not callable(factory):
            raise CliError(f"{what}: {name} must be a function, but it is {type(factory).__name__}")
        return factory


def check_numbers(args: CollectArguments | EvaluateArguments, *positive: str) -> None:
    """Checks that some options are positive, and checks the options that both commands have.

    Args:
        args: arguments of the command.
        *positive: names of the options that must be positive.

    Raises:
        CliError: if an option's value is out of range, or the backend needs ``--workers``.
    """
    check_positive(args, *positive)
    if args.workers < 0:
        raise CliError(f"--workers must be at least 0, but it is {args.workers}")
    if args.backend != "process" and not args.workers:
        raise CliError(f"--backend {args.backend} needs workers: pass --workers")
    if args.backend not in ("process", "ray") and PLACES.get(args.backend) is None:
        known = ", ".join(("process", "ray", *PLACES))
        raise CliError(f"--backend {args.backend} is unknown: the places are {known}")
    check_seed_range(args.seed)


def check_positive(args: UsesEnv, *names: str) -> None:
    """Raises a ``CliError`` if one of these options is below 1."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise CliError(f"{option_of(name)} must be at least 1, but it is {value}")


def check_seed_range(seed: int | None) -> None:
    """Raises a ``CliError`` if a seed is out of range."""
    if seed is not None and not 0 <= seed < 2**63:
        raise CliError(f"--seed must be between 0 and 2**63 - 1, but it is {seed}")


def env_kwargs(args: UsesEnv) -> dict[str, Any]:
    """Returns the arguments in ``--env-kwargs``.

    Raises:
        CliError: if the option's value is not a JSON object.
    """
    if args.env_kwargs is None:
        return {}
    try:
        found = json.loads(args.env_kwargs)
    except (RecursionError, ValueError) as error:
        raise CliError(
            f"--env-kwargs must be a JSON object, but it is not valid JSON: {error}"
        ) from None
    if not isinstance(found, dict):
        raise CliError(
            "--env-kwargs must be a JSON object, such as '{\"g\": 9.8}', but it is "
            f"{args.env_kwargs}"
        )
    if "info_keys" in found and args.info_keys:
        raise CliError("--env-kwargs has info_keys, and so has --info-keys: pass one of them")
    return found


def _with_info(kwargs: dict[str, Any], info_keys: Sequence[str]) -> dict[str, Any]:
    return {**kwargs, "info_keys": list(info_keys)} if info_keys else kwargs


def env_source(args: UsesEnv) -> Any:
    """Returns a collector's ``create_env_fn``: a Gymnasium id, or a function.

    Raises:
        CliError: if ENV names a module that can't be imported, or has no such function or id.
    """
    module, name = split(args.env)
    kwargs = env_kwargs(args)
    # Most ids have a version ("-v1"), which is not allowed in a Python name. For any other name,
    # the module has to be imported to find out if the name is a function or an id.
    is_id = is_known(args.env) or not module
    is_name = all(part.isidentifier() for part in name.split("."))
    if module.endswith(".py") or (is_name and not is_id):
        factory = EnvFactory(args.env, kwargs, list(args.info_keys))
        if factory.find() is not None or module.endswith(".py"):
            return factory
    options = _with_info(kwargs, args.info_keys)
    several = several_of_id(args.env, options)
    if several is not None:
        return several
    return partial(env_of_id, args.env, **options) if options else args.env


# What to write instead of an id that is unlike all others.
_ADVICE = (
    " ENV is an id of Gymnasium such as CartPole-v1, one of another library such as "
    "dm_control:cheetah/run, or a function in a module or a file such as file.py:function"
)


def build_unchecked(args: UsesEnv, source: Any) -> Any:
    """Makes the command's environments as one environment, without checking their data.

    Raises:
        CliError: if the environments can't be made.
    """
    try:
        if isinstance(args, CollectArguments) and args.env_processes:
            each = args.envs // args.env_processes
            return ParallelEnv(args.envs, source, envs_per_worker=each)
        count = 1 if isinstance(args, (CheckArguments, TuneArguments)) else args.envs
        return build_env(batch_source(source, count), name="ENV")
    except CliError:
        raise
    except Exception as error:
        # The text of a KeyError is only the key.
        own = isinstance(source, EnvFactory) or isinstance(error, KeyError)
        cause = describe(error) if own else message_of(error)
        if isinstance(error, gymnasium.error.NameNotFound) and cause.endswith("doesn't exist."):
            cause += _ADVICE
        raise CliError(f"environment {args.env} can't be made: {cause}") from error


def make_env(args: CollectArguments, source: Any) -> Any:
    """Makes the command's environments as one environment, and checks their data.

    Args:
        args: arguments of the command.
        source: the result of :func:`env_source`.

    Raises:
        CliError: if the environments can't be made, or the dataset can't hold their data.
    """
    env = build_unchecked(args, source)
    try:
        _check_layout(args, env)
    except CliError:
        env.close(raise_if_closed=False)
        raise
    return env


def _check_layout(args: CollectArguments, env: Any) -> None:
    rewards = [as_key(key) for key in env.reward_keys]
    if args.format == "minari" and rewards != [("reward",)]:
        raise CliError(
            f"environment {args.env} has the rewards {', '.join(map(show_key, rewards))}, but the "
            "format minari holds one reward for each step: pass --format memmap or parquet"
        )
    if not isinstance(env, TensorDictEnv):
        return
    for key, spec in _loose_entries(env):
        if not isinstance(spec.space, spaces.Text):
            raise CliError(
                f"environment {args.env} has data without a fixed shape ({show_key(key)}, "
                f"{type(spec.space).__name__}), which a dataset can't hold"
            )
        if len(spec.shape) > len(env.batch_size):
            raise CliError(
                f"environment {args.env} has a text for each agent ({show_key(key)}), which a "
                "dataset can't hold: leave it out of --info-keys"
            )
        if args.format == "memmap":
            raise CliError(
                f"environment {args.env} has text ({show_key(key)}), which the format memmap "
                "can't hold: pass --format parquet"
            )


def _loose_entries(env: TensorDictEnv) -> Iterator[tuple[Key, NonTensor]]:
    """Yields the keys and specs of all observations and actions without a fixed layout."""
    for specs in (env.full_observation_spec, env.full_action_spec):
        for key, spec in specs.items(True, True):
            if isinstance(spec, NonTensor):
                yield as_key(key), spec


def env_of_minari(args: CollectArguments) -> Any:
    """Returns the argument ``env`` for a MinariSink: an id, an environment, or None."""
    # Minari has a place of its own for infos, so the environment's own spaces are used.
    source = env_source(replace(args, info_keys=()))
    changed = args.options.frame_stack or args.options.normalize_observations
    if isinstance(source, str) and not is_known(source) and not changed:
        return source
    env = build_env(source)
    # Only the environment's spaces and spec are used, which a closed environment still has.
    env.close(raise_if_closed=False)
    single = isinstance(env, GymEnv) and not env.batch_size
    return minari_env(args, env.env) if single else None
