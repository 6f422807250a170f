"""Builds one environment from any object that a user may pass as an environment."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from itertools import count
from typing import Any

import torch
from torch import nn

from trawl.backends.processes.payload import packed
from trawl.envs.arguments import argument_names, named_arguments
from trawl.envs.base import TensorDictEnv
from trawl.envs.gym import GymEnv
from trawl.envs.kinds import advice_on, kind_of, kind_of_id
from trawl.envs.logged import LoggedEnv
from trawl.envs.seeding import derive
from trawl.envs.tensor_env import TensorEnv
from trawl.envs.types import is_list
from trawl.errors import add_note
from trawl.supported import INFO_WITHOUT, RESTART_OBJECT

_PROTOCOL = ("reset", "step_and_maybe_reset", "batch_size", "full_action_spec", "done_keys")


def build_one(
    source: Any, kwargs: Mapping[str, Any] | None = None, name: str = "create_env_fn"
) -> Any:
    """Builds the environment that ``source`` describes; ``source`` is not a list.

    See :func:`trawl.envs.batches.serial.build_env` for details.
    """
    kwargs = dict(kwargs or {})
    if isinstance(source, str):
        return env_of_id(source, **kwargs)
    env = source
    if not is_env(env):
        if not callable(source):
            raise TypeError(_explain(name, source))
        refuse_policy(source, name)
        return _made_by(source, kwargs, name)
    if kwargs:
        return _with_kwargs(env, kwargs)
    return adapted(env)


def env_of_id(env_id: str, **kwargs: Any) -> Any:
    """Makes the environment with an id.

    Args:
        env_id: the id.
        **kwargs: arguments of :class:`GymEnv`, or of the library that the id names.

    Raises:
        TypeError: if an argument is unknown, or the environment can't have it.
    """
    kind, name = kind_of_id(env_id)
    if kind is None or kind.make is None or kind.adapter is GymEnv:
        return GymEnv(env_id, **kwargs)
    more, options = dict(kwargs), {}
    if not kind.is_adapter:
        # The library's environment is adapted afterwards.
        options = {key: more.pop(key) for key in _OF_ADAPTERS & more.keys()}
    elif more.get("info_keys") is not None and not kind.takes("info_keys"):
        raise INFO_WITHOUT.error(against=env_id, why=f"{kind.name} has no such argument")
    make = kind.make
    # Trawl's own kinds name unknown arguments themselves.
    own = kind.is_adapter

    def known() -> list[str]:
        return [] if own else [*_OF_ADAPTERS, *argument_names(make)[1:]]

    with named_arguments(env_id, () if own else more, known):
        env = adapted(make(name, **more), **options)
    if isinstance(env, (LoggedEnv, TensorEnv)):
        env.remake = partial(env_of_id, env_id, **kwargs)
    return env


# Arguments of all classes that adapt vector environments.
_OF_ADAPTERS = {"categorical_action_encoding", "info_keys"}


def adapted(env: Any, **options: Any) -> Any:
    """Returns an environment object with the TensorDict interface.

    Args:
        env: the environment.
        **options: arguments of the class that adapts it, such as ``info_keys``.

    Raises:
        TypeError: if there is no such argument, or the environment is of no known kind.
    """
    last = None
    while not is_tensordict_env(env):
        kind = kind_of(env)
        if kind is None or kind is last:
            what = "" if last is None else f"{last.name} made an object that is not an environment"
            raise TypeError(_explain(what or "env", env))
        given = {name: options.pop(name) for name in list(options) if kind.takes(name)}
        env, last = kind.adapter(env, **given), kind
    for name in options:
        why = f"{type(env).__name__ if last is None else last.name} has no {name}"
        raise INFO_WITHOUT.error(name, against=repr(env), why=why)
    return env


def refuse_policy(source: Any, name: str = "create_env_fn") -> None:
    """Raises a ``TypeError`` if a policy was passed instead of an environment."""
    if isinstance(source, nn.Module) and not is_env(source):
        raise TypeError(
            f"{name} must make an environment, but it is a module, "
            f"{type(source).__name__}: the environment comes first, and the policy second"
        )


def _accepts(factory: Any, kwargs: dict[str, Any]) -> bool:
    """Returns False if a function certainly can't be called with these arguments."""
    try:
        signature(factory).bind(**kwargs)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _made_by(factory: Any, kwargs: dict[str, Any], name: str) -> Any:
    """Calls ``factory`` and returns its result as an environment.

    An environment that can be built again stores the call in ``remake``.
    """
    try:
        made = factory(**kwargs)
    except TypeError as error:
        if not _accepts(factory, kwargs):
            given = f"the arguments {', '.join(kwargs)}" if kwargs else "no arguments"
            source = ": they come from create_env_kwargs" if name == "create_env_fn" else ""
            add_note(error, f"{name} was called with {given}{source}")
        raise
    if isinstance(made, str):
        env: Any = env_of_id(made)
    elif is_env(made):
        env = adapted(made)
    else:
        raise TypeError(_explain(f"{name} made an object that is not an environment", made))
    by_id = isinstance(factory, partial) and factory.func in (GymEnv, env_of_id) and not kwargs
    if isinstance(env, (LoggedEnv, TensorEnv)) and not (by_id and env.remake is not None):
        env.remake = partial(_made_by, factory, kwargs, name)
    return env


def check_rebuildable(env: Any, source: Any) -> None:
    """Rejects an environment that ``on_env_error="restart"`` can't rebuild.

    Args:
        env: the environment.
        source: the argument from which the environment was built.

    Raises:
        ValueError: if a part of the environment was passed as an environment object; the message
            names that part.
    """
    if isinstance(env, TensorDictEnv):
        parts = env.parts
        fixed = [part.remake is None and not part.has_processes for part in parts]
    else:
        parts = list(source) if is_list(source) else [source]
        fixed = [is_env(part) for part in parts]
    for index, (part, is_fixed) in enumerate(zip(parts, fixed, strict=True)):
        if is_fixed:
            which = f"environment {index} of the batch" if len(parts) > 1 else "create_env_fn"
            why = f"{which} is an existing environment ({part!r}), which can't be rebuilt"
            raise RESTART_OBJECT.error(why=why)


class EnvCopy:
    """Factory that copies an environment; the copy draws its own random numbers.

    Args:
        packed: the pickled environment.
        number: number of the copy; copies with different numbers get different seeds.
    """

    def __init__(self, packed: bytes, number: int) -> None:
        self._packed = packed
        self._number = number

    def __call__(self, **kwargs: Any) -> Any:
        """Makes the copy."""
        made = build_one(pickle.loads(self._packed), kwargs or None)
        made.set_seed(derive(torch.initial_seed(), "copy", self._number))
        return made


def distinct(sources: Sequence[Any], name: str = "create_env_fn") -> list[Any]:
    """Replaces each repetition of an environment object with a factory that copies it.

    Args:
        sources: sources of environments, or lists of them.
        name: name of the argument that the sources come from, for error messages.

    Raises:
        TypeError: if a repeated environment can't be copied.
    """
    known: dict[int, bytes | None] = {}
    copies = count()

    def own(source: Any) -> Any:
        if is_list(source):
            return [own(part) for part in source]
        if not is_env(source):
            return source
        if id(source) not in known:
            known[id(source)] = None
            return source
        data = known[id(source)] = known[id(source)] or _packed(source, name)
        return EnvCopy(data, next(copies))

    return [own(source) for source in sources]


def _packed(env: Any, name: str) -> bytes:
    try:
        # TorchRL's batched environments support pickling, but not copy.deepcopy().
        data = packed(env)
    except Exception as error:
        raise TypeError(
            f"{name} contains {env!r} several times, but this environment can't be copied: "
            f"{error}. Pass an id, or a function that makes the environment"
        ) from error
    return data


def is_tensordict_env(env: object) -> bool:
    """Returns True if ``env`` has the TensorDict interface.

    Trawl's own environments have this interface, and so does any environment that implements
    TorchRL's protocol.
    """
    if isinstance(env, TensorDictEnv):
        return True
    # A class has the attributes of its instances, but counts as a factory.
    return not isinstance(env, type) and all(hasattr(type(env), name) for name in _PROTOCOL)


def is_env(env: object) -> bool:
    """Returns True if ``env`` is an environment object, rather than an id or a factory."""
    return not isinstance(env, type) and (is_tensordict_env(env) or kind_of(env) is not None)


def _with_kwargs(env: Any, kwargs: Mapping[str, Any]) -> Any:
    if hasattr(env, "update_kwargs"):
        env.update_kwargs(kwargs)
        return env
    wraps = "info_keys" in kwargs and not is_tensordict_env(env)
    wrap = ", or GymEnv(env, info_keys=...)" if wraps else ""
    raise RuntimeError(
        f"create_env_kwargs {sorted(kwargs)} can't be passed to an existing environment "
        f"({type(env).__name__}): pass a function that makes it{wrap}"
    )


def _explain(what: str, value: object) -> str:
    advice = advice_on(value)
    if advice is not None:
        return f"{what}: {advice}"
    return (
        f"{what}: expected an id, a Gymnasium, vector, EnvPool, dm_env, PettingZoo or TensorDict "
        f"environment, or a function that makes one, but got {type(value).__name__}: {value!r}"
        f"{_next_step(value)}"
    )


def _next_step(value: object) -> str:
    """Returns what to do with an environment of a library whose environments aren't accepted."""
    if hasattr(value, "step_async") and hasattr(value, "step_wait"):
        return (
            ". Vector environments of Stable-Baselines3 are not accepted: pass a list of the "
            "functions that make their environments, or a ParallelEnv of these functions"
        )
    if any(kind.__module__.partition(".")[0] == "gym" for kind in type(value).__mro__):
        return (
            ". Environments of gym, the predecessor of Gymnasium, are not accepted: convert this "
            "one with the package shimmy, by GymV21CompatibilityV0(env=env) or, since gym 0.26, "
            "GymV26CompatibilityV0(env=env)"
        )
    return ""
