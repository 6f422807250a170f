"""Makes the environments of gymnax, Brax and Jumanji that ids name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from trawl.envs.jax_arrays import load_jax
from trawl.envs.jax_env import JaxEnv


def make_gymnax(name: str, options: Mapping[str, Any]) -> JaxEnv:
    """Makes a batch of environments of gymnax.

    Args:
        name: name in gymnax's registry, such as ``"CartPole-v1"``.
        options: arguments of :class:`JaxEnv`, parameters of the environment by their names, and
            arguments of ``gymnax.make``; ``num_envs`` is 1 if it is left out.

    Raises:
        ImportError: if gymnax or JAX is not installed.
        ValueError: if there is no such environment.
    """
    gymnax = _load("gymnax", name)
    _check_known("gymnax", name, gymnax.registered_envs)
    own, rest = _divided(options)
    found = {field.name for field in fields(gymnax.make(name)[1])}
    given = {key: rest.pop(key) for key in found & rest.keys()}
    env, params = gymnax.make(name, **rest)
    return JaxEnv(env, **{"params": replace(params, **given), **own})


def make_brax(name: str, options: Mapping[str, Any]) -> JaxEnv:
    """Makes a batch of environments of Brax.

    Args:
        name: name in Brax's registry, such as ``"ant"``.
        options: arguments of :class:`JaxEnv` and of ``brax.envs.create``, such as
            ``episode_length`` and ``backend``; ``num_envs`` is 1 if it is left out.

    Raises:
        ImportError: if Brax or JAX is not installed.
        ValueError: if there is no such environment.
    """
    brax = _load("brax.envs", name)
    _check_known("brax", name, brax._envs)
    own, rest = _divided(options)
    return JaxEnv(brax.create(name, **rest, auto_reset=False), **own)


def make_jumanji(name: str, options: Mapping[str, Any]) -> JaxEnv:
    """Makes a batch of environments of Jumanji.

    Args:
        name: name in Jumanji's registry, such as ``"Snake-v1"``.
        options: arguments of :class:`JaxEnv` and of ``jumanji.make``; ``num_envs`` is 1 if it is
            left out.

    Raises:
        ImportError: if Jumanji or JAX is not installed.
        ValueError: if there is no such environment.
    """
    jumanji = _load("jumanji", name)
    _check_known("jumanji", name, jumanji.registered_environments())
    own, rest = _divided(options)
    return JaxEnv(jumanji.make(name, **rest), **own)


def _load(module: str, name: str) -> Any:
    package = module.partition(".")[0]
    load_jax()
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{package}:{name} needs another package: pip install {package}"
        ) from error


def _divided(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of :class:`JaxEnv`, and the rest."""
    names = inspect.signature(JaxEnv).parameters.keys() - {"env"}
    own = {"num_envs": 1, **{key: options[key] for key in names & options.keys()}}
    return own, {key: value for key, value in options.items() if key not in names}


def _check_known(library: str, name: str, known: Iterable[str]) -> None:
    """Raises an error that names the nearest names, if a registry does not have a name."""
    names = sorted(known)
    if name not in names:
        near = get_close_matches(name, names, 3, 0.4) or names
        raise ValueError(f"{library} has no environment {name!r}: did you mean {', '.join(near)}?")
