"""Batches of environments of JAX, compiled together, and the ids of those libraries."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from trawl.checks import check_bool, check_number
from trawl.envs.arguments import argument_names, lists_arguments, named_arguments
from trawl.envs.entries.info_keys import InfoKeys
from trawl.envs.entries.spaces import SpaceCodec, check_keys
from trawl.envs.kinds import EnvKind
from trawl.envs.seeding import check_seed, derive
from trawl.envs.tensor_env import TensorEnv, TensorStep
from trawl.errors import EnvStateError, env_errors
from trawl.extras.jax.arrays import (
    as_jax,
    as_plain,
    as_saved,
    devices_of,
    giver,
    jax_ops,
    load_jax,
    observation_space,
    viewer,
)
from trawl.extras.jax.functions import functions_of, is_jax
from trawl.extras.jax.steps import (
    JaxCalls,
    Progress,
    ShownLeaves,
    SingleCalls,
    batch_calls,
    check_outlines,
    info_layout,
)
from trawl.foreign.environments import brax_environments
from trawl.schema.checks import UNKNOWN
from trawl.schema.states import JAX


class _KeepsArguments:
    """Base class of objects that keep the arguments of their constructor.

    The class of an object may have another constructor than its base classes.
    """

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    # Not in the class of the objects, whose signature would be that of this method.
    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self._arguments = args, kwargs
        return self


class JaxEnv(_KeepsArguments, TensorEnv):
    """Batch of environments that are pure functions of JAX.

    The environments are batched by ``jax.vmap``. A step of all of them, with the resets of those
    whose episodes end, is one function that ``jax.jit`` compiles. Observations, rewards and flags
    become tensors in the memory of JAX's arrays.

    The keys are those of :class:`~trawl.envs.GymEnv`. Observations keep the shape and the dtype
    that the environment gives them, but a scalar becomes a vector with one element. The entries of
    a dict, a dataclass or a named tuple keep their names.

    Args:
        env: a single environment of gymnax, Brax (or MuJoCo Playground) or Jumanji, or an object
            with the members of :class:`~trawl.envs.JaxFunctionalEnv`. It must neither be a batch
            nor begin new episodes by itself. ``gymnax.make`` returns an environment and its
            parameters; this pair works too.
        num_envs: number of environments in the batch.
        params: parameters of an environment of gymnax; by default, its ``default_params``.
        seed: seed of the random keys until ``set_seed`` is called; by default, a random one.
        categorical_action_encoding: True to encode discrete actions as indices instead of one-hot
            vectors.
        info_keys: names of entries of the info that become observations: a list of names, or a
            mapping from names to spaces, as in :class:`GymEnv`. The info is gymnax's ``info``,
            Jumanji's ``extras``, or Brax's ``info`` with its metrics under ``"metrics"``.
        device: device of the data; by default, the default device of JAX.
        jit: False to call the functions without compiling them, which is slow. Print statements and
            breakpoints in the environment then work.

    Raises:
        ImportError: if JAX is not installed.
        TypeError: if ``env`` is an object of another kind.
        ValueError: if an argument is invalid, if ``env`` is a batch or begins new episodes by
            itself, if the layouts of the data of a step and of a reset differ, or if ``info_keys``
            has a name that the info lacks.

    Examples:
        >>> import gymnax
        >>> from trawl.envs import JaxEnv
        >>> env = JaxEnv(gymnax.make("CartPole-v1"), num_envs=64)
        >>> env.rollout(5)["observation"].shape
        torch.Size([64, 5, 4])
    """

    can_restart = True

    @lists_arguments
    def __init__(
        self,
        env: Any,
        num_envs: int,
        *,
        params: Any = None,
        seed: int | None = None,
        categorical_action_encoding: bool = False,
        info_keys: InfoKeys = (),
        device: torch.device | str | None = None,
        jit: bool = True,
    ) -> None:
        num_envs = check_number("num_envs", num_envs, least=1)
        check_bool("categorical_action_encoding", categorical_action_encoding)
        check_bool("jit", jit)
        if isinstance(env, str):
            raise TypeError(
                f"env must be an environment, but it is {env!r}: pass an id to the collector, such "
                "as 'gymnax:CartPole-v1'"
            )
        if isinstance(env, type):
            raise TypeError(
                f"env must be an environment, but it is the class {env.__name__}: pass an object, "
                f"such as {env.__name__}()"
            )
        jax = load_jax()
        if isinstance(env, tuple) and len(env) == 2 and params is None:
            # As gymnax.make returns it.
            env, params = env
        self.env = env
        self._place, self.home = devices_of(device)
        # On the CPU, TensorDicts have no device, as those of other environments.
        self.device = None if self.home.type == "cpu" else self.home
        self.batch_size = torch.Size([num_envs])
        self._functions = functions_of(env, params)
        self._compiled = jit
        self._calls, self._mask = self._make(categorical_action_encoding, info_keys)
        self._give, self._view = giver(self.home), viewer(self.home)
        self._shown: list[Tensor] = []
        self._leaves: tuple[Any, ...] = ()
        with jax.default_device(self._place):
            self._set_keys(int.from_bytes(os.urandom(4), "little") if seed is None else seed)

    def _make(self, categorical: bool, info_keys: InfoKeys) -> tuple[JaxCalls, int | None]:
        """Sets the specs.

        Returns:
            The functions of the batch, and the index of the info's action mask among the leaves
            that they return; None if the info has no mask.
        """
        jax = load_jax()
        acted = SpaceCodec(self._functions.action_space, "action", categorical, jax_ops())
        if acted.loose:
            raise ValueError(
                f"the action space of {self.name} must have a fixed shape and dtype, but it is "
                f"{acted.space}"
            )
        single = SingleCalls(self._functions, acted.decode, self._compiled)
        key = jax.eval_shape(jax.random.PRNGKey, 0)
        to_dtype = jax.dtypes.canonicalize_dtype
        shapes = [(leaf.spec.shape, to_dtype(leaf.dtype)) for leaf in acted.leaves]
        actions = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
        begun, stepped = single.outlines(key, actions)
        space = observation_space(as_plain(begun.obs))
        check_outlines(begun, stepped, self.name)
        layout = info_layout(info_keys, begun.info, stepped.info, self.name)
        show = ShownLeaves(space, layout, categorical, (begun.info, stepped.info))
        for outline in (begun, stepped):
            # Raises errors before the first batch.
            jax.eval_shape(show, outline.obs, outline.info)
        check_keys(show, acted)
        self.observation_keys = [leaf.key for leaf in show.leaves]
        self.full_observation_spec = show.composite(self.batch_size).to(self.home)
        self.full_action_spec = acted.composite(self.batch_size).to(self.home)
        count, on_cpu = self.batch_size[0], self.home.type == "cpu"
        return batch_calls(single, show, count, self._compiled, on_cpu), show.mask

    def _set_keys(self, seed: int) -> None:
        jax = load_jax()
        count, seed = self.batch_size[0], check_seed(seed)
        # JAX would drop the upper half of a larger seed.
        key = jax.random.PRNGKey(seed if seed < 2**32 else derive(seed, "jax"))
        keys = jax.random.split(key, (2, count))
        steps, episodes = jax.numpy.uint32(0), jax.numpy.zeros(count, jax.numpy.uint32)
        # None of these follows the default device, once they are placed.
        self._keys, *counts = jax.device_put((keys, steps, episodes), self._place)
        self._progress = Progress(counts[0], counts[1], None)

    @property
    @override
    def name(self) -> str:
        return self._functions.name

    # --- what the loop calls

    @override
    def begin(self, mask: Tensor | None, **kwargs: Any) -> list[Tensor]:
        self._refuse_options("JAX", kwargs)
        whole = mask is None or bool(mask.all())
        seed = kwargs.get("seed", self._seed)
        if whole:
            # A seed waits for a reset of all environments.
            self._seed = None
        if whole and seed is not None:
            with load_jax().default_device(self._place):
                self._set_keys(seed)
        if mask is not None and self._leaves and not whole:
            return self._renew(mask)
        return self._begin_all()

    def _begin_all(self) -> list[Tensor]:
        if self.home.type == "cuda":
            # No argument comes from PyTorch, so JAX would not wait until PyTorch has read the
            # memory that is freed here.
            torch.cuda.current_stream(self.home).synchronize()
        progress = self._progress._replace(state=None)
        self._progress, self._leaves = self._calls.begin(self._keys, progress)
        return self._show()

    def _show(self) -> list[Tensor]:
        """Returns the observations, and keeps the action mask of the info."""
        shown = [*map(self._view, self._leaves)]
        if self._mask is not None:
            self.shown_mask = shown[self._mask]
        self._shown = shown[: len(self.observation_keys)]
        return self._shown

    def _renew(self, mask: Tensor) -> list[Tensor]:
        chosen = self._give(mask)
        self._progress, self._leaves = self._calls.renew(
            self._keys, self._progress, self._leaves, chosen
        )
        return self._show()

    @override
    def advance(self, actions: Iterable[Tensor]) -> TensorStep:
        given = tuple(map(self._give, actions))
        found = self._calls.step(self._keys, self._progress, given)
        self._progress, self._leaves = found.progress, found.shown
        view = self._view
        last = [*map(view, found.last)]
        self._show()
        flags = view(found.terminated), view(found.truncated)
        return TensorStep(last, None, [view(found.reward)], *flags, None)

    @override
    def begin_next(self, ended: Tensor, cut: Tensor | None = None) -> list[Tensor]:
        # Where an episode ended, the step has begun a new one.
        return self._shown if cut is None else self._renew(cut)

    @override
    def _close(self) -> None:
        close = getattr(self.env, "close", None)
        if callable(close):
            close()

    # --- the state of the environments

    @property
    @override
    def state_methods(self) -> list[str]:
        return ["get_state"] * self.batch_size[0]

    @override
    def capture(self) -> dict[str, Any]:
        identity, arrays = self._outline(), load_jax().tree.leaves(self._all())
        return {
            "identity": identity,
            "arrays": [*map(as_saved, arrays)],
            "seed": self._seed,
        }

    def _all(self) -> tuple[Any, ...]:
        """Returns everything that the next steps depend on."""
        return self._keys, self._progress, self._leaves

    def _outline(self) -> dict[str, Any]:
        """Returns a description that is equal for all batches of the same environment."""
        if not self._leaves:
            self._begin_all()
        arrays = load_jax().tree.leaves(self._all())
        return {
            "name": self.name,
            "number of environments": self.batch_size[0],
            "layout": [f"{array.dtype} {list(array.shape)}" for array in arrays],
        }

    @override
    def check_state(self, state: Mapping[str, Any]) -> None:
        mine = self._outline()
        with env_errors():
            JAX(state, "state", UNKNOWN)
        other = state["identity"]
        for what, value in mine.items():
            if other.get(what) != value:
                raise EnvStateError(
                    f"the state belongs to another environment: its {what} is {other.get(what)}, "
                    f"but the {what} of {self!r} is {value}"
                )
        with env_errors():
            JAX(state, "state", self.capture())

    @override
    def restore(self, state: Mapping[str, Any], trust: bool = False) -> None:
        self.check_state(state)
        jax = load_jax()
        old, structure = jax.tree.flatten(self._all())
        new = [as_jax(array, like) for array, like in zip(state["arrays"], old, strict=True)]
        found = jax.device_put(jax.tree.unflatten(structure, new), self._place)
        self._keys, self._progress, self._leaves = found
        self._show()
        # A seed waits for the next reset.
        self._seed, self._last = state["seed"], None

    # --- copies, for other processes

    @override
    def __reduce__(self) -> Any:
        # Compiled functions can't be pickled. A copy begins with episodes of its own.
        arguments, options = self._arguments
        return partial(type(self), *arguments, **options), ()


# --- ids


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
    registered = brax_environments(brax)
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
