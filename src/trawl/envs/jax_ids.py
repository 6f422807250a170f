"""Makes the environments of gymnax, Brax and Jumanji that ids name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from trawl.envs.arguments import argument_names, named_arguments
from trawl.envs.jax_arrays import load_jax
from trawl.envs.jax_env import JaxEnv
from trawl.envs.jax_functions import is_jax
from trawl.envs.kinds import EnvKind


def make_gymnax(name: str, *, num_envs: int = 1, **options: Any) -> JaxEnv:
    """Makes a batch of environments of gymnax.

    Args:
        name: name in gymnax's registry, such as ``"CartPole-v1"``.
        num_envs: number of environments.
        **options: arguments of :class:`JaxEnv`, parameters of the environment by their names, and
            arguments of ``gymnax.make``.

    Raises:
        ImportError: if gymnax or JAX is not installed.
        TypeError: if an argument is unknown, or a parameter is not a number.
        ValueError: if there is no such environment.
    """
    gymnax = _load("gymnax", name)
    _check_known("gymnax", name, gymnax.registered_envs)
    own, rest = _divided(num_envs, options)
    example, defaults = gymnax.make(name)
    found = {field.name for field in fields(defaults)}
    given = {key: rest.pop(key) for key in found & rest.keys()}
    for key, value in given.items():
        if isinstance(value, str) or value is None:
            raise TypeError(f"{key} of gymnax:{name} must be a number, but it is {value!r}")
    known = [*_OWN, *found, *argument_names(type(example))]
    with named_arguments(f"gymnax:{name}", rest, lambda: known):
        env, params = gymnax.make(name, **rest)
    return JaxEnv(env, **{"params": replace(params, **given), **own})


def make_brax(name: str, *, num_envs: int = 1, **options: Any) -> JaxEnv:
    """Makes a batch of environments of Brax.

    Args:
        name: name in Brax's registry, such as ``"ant"``.
        num_envs: number of environments.
        **options: arguments of :class:`JaxEnv` and of ``brax.envs.create``, such as
            ``episode_length`` and ``backend``.

    Raises:
        ImportError: if Brax or JAX is not installed.
        TypeError: if an argument is unknown, or is one that :class:`JaxEnv` replaces.
        ValueError: if there is no such environment.
    """
    brax = _load("brax.envs", name)
    registered = brax._envs
    _check_known("brax", name, registered)
    own, rest = _divided(num_envs, options)
    for key, why in _BY_JAX_ENV.items():
        if key in rest:
            raise TypeError(f"{key}={rest[key]!r} can't be used with brax:{name}: {why}")
    known = [*_PLAIN, *argument_names(brax.create), *argument_names(registered[name])]
    there = set(known) - {"env_name", *_BY_JAX_ENV}
    with named_arguments(f"brax:{name}", rest, lambda: there):
        env = brax.create(name, **rest, auto_reset=False)
    return JaxEnv(env, **own)


def make_jumanji(name: str, *, num_envs: int = 1, **options: Any) -> JaxEnv:
    """Makes a batch of environments of Jumanji.

    Args:
        name: name in Jumanji's registry, such as ``"Snake-v1"``.
        num_envs: number of environments.
        **options: arguments of :class:`JaxEnv` and of ``jumanji.make``.

    Raises:
        ImportError: if Jumanji or JAX is not installed.
        TypeError: if an argument is unknown.
        ValueError: if there is no such environment.
    """
    jumanji = _load("jumanji", name)
    _check_known("jumanji", name, jumanji.registered_environments())
    own, rest = _divided(num_envs, options)

    def known() -> list[str]:
        return [*_PLAIN, *argument_names(type(jumanji.make(name).unwrapped))]

    with named_arguments(f"jumanji:{name}", rest, known):
        env = jumanji.make(name, **rest)
    return JaxEnv(env, **own)


_OWN = [name for name in argument_names(JaxEnv) if name != "env"]
_PLAIN = [name for name in _OWN if name != "params"]

# Arguments of Brax that JaxEnv replaces.
_BY_JAX_ENV = {
    "auto_reset": "JaxEnv begins new episodes. Leave it out",
    "batch_size": "pass the number of environments as num_envs",
}


def _load(module: str, name: str) -> Any:
    package = module.partition(".")[0]
    load_jax()
    try:
        return import_module(module)
    except ImportError as error:
        # A package that this one needs may be missing as well.
        missing = (error.name or package).partition(".")[0]
        raise ImportError(
            f"{package}:{name} needs another package: pip install {missing}"
        ) from error


def _divided(num_envs: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of :class:`JaxEnv`, and the rest."""
    own = {"num_envs": num_envs, **{key: options[key] for key in _OWN if key in options}}
    return own, {key: value for key, value in options.items() if key not in _OWN}


def _check_known(library: str, name: str, known: Iterable[str]) -> None:
    """Raises an error that names the nearest names, if a registry does not have a name."""
    names = sorted(known)
    if name not in names:
        near = get_close_matches(name, names, 3, 0.4) or names
        raise ValueError(f"{library} has no environment {name!r}: did you mean {', '.join(near)}?")


def _advice(env: Any) -> str | None:
    if isinstance(env, tuple) and env:
        # As gymnax.make returns it.
        env = env[0]
    if not is_jax(env):
        return None
    return (
        "environments of JAX are stepped as a batch: pass JaxEnv(env, num_envs=...) instead of "
        f"{type(env).__name__}"
    )


BRAX = EnvKind(JaxEnv, make=make_brax, advice=_advice)
GYMNAX = EnvKind(JaxEnv, make=make_gymnax)
JUMANJI = EnvKind(JaxEnv, make=make_jumanji)
