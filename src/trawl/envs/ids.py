"""Ids of environments that Gymnasium does not make, such as ``"dm_control:cheetah/run"``."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from trawl.checks import check_number, did_you_mean
from trawl.devices import optional_device
from trawl.envs.arguments import (
    argument_names,
    named_arguments,
    nearest_first,
    unknown_argument,
)
from trawl.envs.dm import make_dm_control
from trawl.envs.envpool_calls import make_envpool
from trawl.envs.jax_env import JaxEnv
from trawl.envs.jax_ids import make_brax, make_gymnax, make_jumanji
from trawl.envs.pettingzoo import PettingZooEnv
from trawl.envs.seeding import check_seed
from trawl.envs.vmas_env import VmasEnv
from trawl.supported import INFO_WITHOUT

# Makes an environment for GymEnv from the rest of its id, the number of environments in a vector
# environment or None, the autoreset mode or None, and further arguments.
_Maker = Callable[[str, int | None, Any, Mapping[str, Any]], Any]
_MAKERS: dict[str, _Maker] = {"dm_control": make_dm_control, "envpool": make_envpool}


def maker_of(env_id: str) -> tuple[_Maker | None, str]:
    """Returns the function that makes an environment, and the part of the id that it takes.

    Other ids belong to Gymnasium, and the function is None. Such an id may have a colon, too, after
    the name of a module that registers the environment.

    Raises:
        ValueError: if the environment of the id has an interface of its own.

    Examples:
        >>> maker_of("Pendulum-v1")
        (None, 'Pendulum-v1')
        >>> maker_of("dm_control:cheetah/run")[1]
        'cheetah/run'
    """
    prefix, _, name = env_id.partition(":")
    if name and prefix in _CLASSES:
        # Gymnasium would import the module, and might have an environment with the same name.
        own = _CLASSES[prefix].__name__
        raise ValueError(
            f"GymEnv can't make {env_id!r}, which is an environment of {prefix}: pass the id to "
            f"the collector, or the environment to {own}"
        )
    maker = _MAKERS.get(prefix)
    return (None, env_id) if maker is None else (maker, name)


def make_pettingzoo(name: str, options: Mapping[str, Any]) -> PettingZooEnv:
    """Makes a PettingZoo environment: the parallel one, if there is one.

    Args:
        name: id in PettingZoo's registry, such as ``"classic/rps-v2"``; or a module of another
            package, such as ``"mpe2/simple_spread_v3"``.
        options: arguments of :class:`PettingZooEnv` and of the environment; ``parallel=False``
            makes the AEC environment.

    Raises:
        ImportError: if PettingZoo is not installed.
        TypeError: if an argument is unknown.
        ValueError: if there is no such environment.
    """
    try:
        import_module("pettingzoo")
    except ImportError as error:
        raise ImportError(
            f"pettingzoo:{name} needs PettingZoo: pip install 'trawl-rl[pettingzoo]'"
        ) from error
    own = set(argument_names(PettingZooEnv)) & options.keys()
    rest = {key: value for key, value in options.items() if key not in own}
    kinds = ("parallel", "aec") if rest.pop("parallel", True) else ("aec",)
    module = _module_of(name)
    for kind in kinds:
        own_make = getattr(module, _FACTORIES[kind], None)
        make = _registered(kind, name) if module is None else own_make
        if make is not None:
            known = partial(_arguments_of, kind, name)
            with named_arguments(f"pettingzoo:{name}", rest, known):
                made = make(**rest)
            env = PettingZooEnv(made, **{key: options[key] for key in own})
            env.remake = partial(make_pettingzoo, name, options)
            return env
    raise ValueError(f"there is no PettingZoo environment {name!r}{_hint(name)}")


def _hint(name: str) -> str:
    """Returns a hint for a name that PettingZoo doesn't know."""
    package, _, module = name.partition("/")
    if module.isidentifier() and package.isidentifier() and find_spec(package) is None:
        return f", and no package {package!r} is installed: pip install {package}"
    near = did_you_mean([name], _names_near(name), 3) or "."
    return (
        f"{near} Use an id such as classic/rps-v2, or a module of an installed package, such as "
        "mpe2/simple_spread_v3"
    )


# Ending of the name of a module that defines an environment.
_VERSIONED = re.compile(r"_v\d+$")

# The functions in an environment's module.
_FACTORIES = {"parallel": "parallel_env", "aec": "env"}


def _registered(kind: str, name: str) -> Callable[..., Any] | None:
    """Returns a function that makes an environment of PettingZoo's registry, or None."""
    import pettingzoo

    errors = pettingzoo.env_registry.exceptions
    try:
        pettingzoo.spec(kind, name)
    except errors.FailedToImport:
        raise
    except errors.PettingZooRegistryError:
        return None
    return partial(pettingzoo.make, kind, name)


def _arguments_of(kind: str, name: str) -> list[str]:
    """Returns the arguments of a PettingZoo environment and of its adapter."""
    module = _module_of(name)
    if module is None:
        entry = import_module("pettingzoo").spec(kind, name).entry_point
        module = import_module(entry.partition(":")[0])
    # The other functions of the module pass their arguments on to this one.
    make = getattr(module, "raw_env", None)
    own = [one for one in argument_names(PettingZooEnv) if one != "env"]
    return ["num_envs", "parallel", *own, *(() if make is None else argument_names(make))]


def _names_near(name: str) -> list[str]:
    """Returns the names of PettingZoo's environments, and of those in the package that is named."""
    pettingzoo = import_module("pettingzoo")
    package = name.partition("/")[0]
    modules = [one.name for one in iter_modules(_folders(package))]
    own = [f"{package}/{one}" for one in modules if _VERSIONED.search(one)]
    return [*own, *pettingzoo.aec_registry, *pettingzoo.parallel_registry]


def _module_of(name: str) -> Any:
    """Returns the module of an environment in a package of its own; None if there is none."""
    package, _, module = name.partition("/")
    path = f"{package}.{module}"
    if not module.isidentifier() or not _folders(package) or find_spec(path) is None:
        return None
    return import_module(path)


def _folders(package: str) -> Sequence[str]:
    """Returns the folders with the modules of a package; empty if it is none."""
    found = find_spec(package) if package.isidentifier() else None
    return [] if found is None else found.submodule_search_locations or []


def make_vmas(name: str, options: Mapping[str, Any]) -> VmasEnv:
    """Makes an environment of VMAS.

    Args:
        name: the scenario, such as ``"balance"``.
        options: arguments of ``vmas.make_env``; ``num_envs`` is 1 if it is left out.

    Raises:
        ImportError: if VMAS is not installed.
        TypeError: if an argument is unknown.
        ValueError: if there is no such scenario, or the device can't be used.
    """
    try:
        import vmas
    except ImportError as error:
        raise ImportError(f"vmas:{name} needs VMAS: pip install 'trawl-rl[vmas]'") from error
    count = check_number("num_envs", options.get("num_envs", 1), least=1)
    optional_device("device", options.get("device"))
    if options.get("seed") is not None:
        check_seed(options["seed"])
    with warnings.catch_warnings():
        # VMAS only warns of an unknown argument.
        warnings.filterwarnings("error", message="Scenario kwargs")
        try:
            return VmasEnv(vmas.make_env(name, **{**options, "num_envs": count}))
        except UserWarning as error:
            raise _unused_by_vmas(name, options, str(error)) from error
        except AssertionError as error:
            if "not found" not in str(error):
                raise
            known = [*vmas.scenarios, *vmas.mpe_scenarios, *vmas.debug_scenarios]
            raise ValueError(
                f"VMAS has no scenario {name!r}: it has {', '.join(nearest_first(name, known))}"
            ) from error


def _unused_by_vmas(name: str, options: Mapping[str, Any], warning: str) -> TypeError:
    """Returns the error for arguments that a scenario has not used.

    Args:
        name: the scenario.
        options: all arguments.
        warning: the warning of VMAS, which has the unused arguments as a dict.
    """
    scenario = import_module("vmas.scenarios").load(f"{name.removesuffix('.py')}.py").Scenario
    # A scenario takes its arguments from a dict, so only its source has their names.
    methods = [one for kind in scenario.__mro__ for one in vars(kind).values()]
    source = "".join(inspect.getsource(one) for one in methods if inspect.isfunction(one))
    taken = re.findall(r"kwargs\.(?:pop|get)\(\s*[\"'](\w+)", source)
    known = {*argument_names(import_module("vmas").make_env), *taken} - {"scenario"}
    unknown = next(one for one in options if f"{one!r}: " in warning)
    return unknown_argument(f"vmas:{name}", unknown, known - {unknown})


# Makes an environment that is not Gymnasium's, from the rest of its id and further arguments.
_OTHERS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "brax": make_brax,
    "gymnax": make_gymnax,
    "jumanji": make_jumanji,
    "pettingzoo": make_pettingzoo,
    "vmas": make_vmas,
}

# The class of the environment that each of them makes.
_CLASSES: dict[str, type] = {
    "brax": JaxEnv,
    "gymnax": JaxEnv,
    "jumanji": JaxEnv,
    "pettingzoo": PettingZooEnv,
    "vmas": VmasEnv,
}


def is_known(env_id: str) -> bool:
    """Returns True if an id begins with the name of a library, so that Gymnasium has no such id."""
    return env_id.partition(":")[0] in _MAKERS.keys() | _OTHERS.keys()


def check_prefix(env_id: str) -> None:
    """Raises an error if an id begins with a misspelt name of a library.

    Raises:
        ValueError: if the name resembles that of a library, which the message suggests.
    """
    prefix, colon, _ = env_id.partition(":")
    known = sorted(_MAKERS.keys() | _OTHERS.keys())
    if not colon or prefix in known or (prefix.isidentifier() and find_spec(prefix) is not None):
        return
    hint = did_you_mean([prefix], known, 1)
    if hint:
        raise ValueError(
            f"{env_id!r} names no library that Trawl knows, and {prefix!r} is not a module{hint}"
        )


def lacks_vectors(env_id: str) -> bool:
    """Returns True if an id names a library that makes only single environments."""
    return env_id.partition(":")[0] == "pettingzoo"


def steps_batches(env_id: str) -> bool:
    """Returns True if an id names a library whose environments are batches of ``num_envs``."""
    return env_id.partition(":")[0] in _OTHERS and not lacks_vectors(env_id)


def make_other(env_id: str, options: Mapping[str, Any]) -> Any:
    """Makes an environment with an interface of its own; returns None for other ids.

    Raises:
        TypeError: if there are ``info_keys`` that the environment can't have.
    """
    prefix, _, name = env_id.partition(":")
    make = _OTHERS.get(prefix)
    if make is None:
        return None
    takes_infos = "info_keys" in inspect.signature(_CLASSES[prefix]).parameters
    if options.get("info_keys") is not None and not takes_infos:
        why = f"{_CLASSES[prefix].__name__} has no such argument"
        raise INFO_WITHOUT.error(against=env_id, why=why)
    return make(name, options)
