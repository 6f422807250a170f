"""Compiled functions that reset and step a batch of environments of JAX.

Environment ``i`` has two keys: ``keys[0][i]`` for its steps and ``keys[1][i]`` for its episodes.
The number of the step is folded into the first one, and the number of the episode into the second
one. A key that the environment does not use is never computed.

The functions of a reset and of a step also merge the entries of infos into the observations, so no
step needs another call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from typing_extensions import override

from trawl.envs.entries.info_keys import (
    InfoKeys,
    given_entries,
    kept_values,
    names_of,
    placed_entries,
    seen_values,
)
from trawl.envs.entries.infos import InfoCodec, InfoLayout, InfoLeaf, InfoMerger, value_at
from trawl.envs.entries.masks import MASK_KEY
from trawl.envs.entries.spaces import SpaceLeaf
from trawl.extras.jax.arrays import as_plain, flat, is_number, jax_ops, load_jax, name_of
from trawl.extras.jax.functions import JaxFunctions
from trawl.keys import show_key


class Progress(NamedTuple):
    """Everything that changes from one step to the next.

    Attributes:
        steps: number of steps of the batch.
        episodes: number of resets of each environment.
        state: state of each environment.
    """

    steps: Any
    episodes: Any
    state: Any


class StepResult(NamedTuple):
    """Results of a step; new episodes have begun where one ended.

    Attributes:
        progress: the progress after the step.
        last: leaves of the observations and infos that the step returned.
        shown: leaves that the next step begins with, as :class:`ShownLeaves` returns them.
        reward: float32, ``(num_envs, 1)``.
        terminated: bool, ``(num_envs,)``.
        truncated: bool, ``(num_envs,)``.
    """

    progress: Progress
    last: tuple[Any, ...]
    shown: tuple[Any, ...]
    reward: Any
    terminated: Any
    truncated: Any


class JaxCalls(NamedTuple):
    """Functions of a batch of environments.

    Attributes:
        begin: takes the keys and a progress without state; begins an episode in each environment,
            and returns the progress and the leaves of the observations.
        renew: takes the keys, the progress, the leaves and a mask; begins episodes where the mask
            is True, and returns the progress and the leaves.
        step: takes the keys, the progress and the leaves of the action.
    """

    begin: Callable[[Any, Progress], tuple[Progress, tuple[Any, ...]]]
    renew: Callable[[Any, Progress, tuple[Any, ...], Any], tuple[Progress, tuple[Any, ...]]]
    step: Callable[[Any, Progress, tuple[Any, ...]], StepResult]


class Outline(NamedTuple):
    """Shapes and dtypes of results.

    Attributes:
        state: state of the environment.
        obs: observation.
        info: info, as :func:`plain_info` returns it.
    """

    state: Any
    obs: Any
    info: Any


class SingleCalls:
    """Functions of a single environment.

    Args:
        functions: the functions of the environment.
        decode: function that makes an action of its leaves.
        compiled: True to compile the functions.

    Attributes:
        reset: takes a key, and returns a state, an observation and an info.
        step: takes a key, a state and the leaves of an action, and returns a state, an observation,
            an info, a reward and the two flags.
    """

    def __init__(
        self, functions: JaxFunctions, decode: Callable[[Sequence[Any]], Any], compiled: bool
    ) -> None:
        jax = load_jax()
        jnp = jax.numpy

        def step(key: Any, state: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
            state, obs, *rest, info = functions.step(key, state, decode(leaves))
            for name, value in zip(("reward", "terminated", "truncated"), rest, strict=True):
                if jnp.shape(value) != ():
                    raise ValueError(
                        f"step of {functions.name} returned {name} of shape {jnp.shape(value)}, "
                        "but it must be a scalar: one environment is stepped at a time"
                    )
            reward, terminated, truncated = map(jnp.asarray, rest)
            flags = terminated != 0, truncated != 0
            return state, obs, plain_info(info), reward.astype(jnp.float32), *flags

        def reset(key: Any) -> tuple[Any, Any, Any]:
            state, obs, info = functions.reset(key)
            return state, obs, plain_info(info)

        # Compiled here, so that they are traced once for all their uses.
        self.reset: Callable[..., Any] = jax.jit(reset) if compiled else reset
        self.step: Callable[..., Any] = jax.jit(step) if compiled else step
        self.name = functions.name

    def outlines(self, key: Any, actions: tuple[Any, ...]) -> tuple[Outline, Outline]:
        """Returns the shapes and dtypes of the results of a reset and of a step.

        Args:
            key: shape of a key.
            actions: shapes of the leaves of an action.
        """
        jax = load_jax()
        begun = Outline(*jax.eval_shape(self.reset, key))
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), begun.state)
        return begun, Outline(*jax.eval_shape(self.step, key, state, actions)[:3])


def check_outlines(begun: Outline, stepped: Outline, name: str) -> None:
    """Checks that a step returns a state and an observation of the same layout as a reset.

    Args:
        begun: results of a reset.
        stepped: results of a step.
        name: name of the environment.

    Raises:
        ValueError: if a shape, a dtype or the structure differs; the message names the entry.
    """
    jax = load_jax()
    one, other = dict(flat(as_plain(begun.obs))), dict(flat(as_plain(stepped.obs)))
    for path in sorted({*one, *other}):
        _compare(f"observation {name_of(path)}", one.get(path), other.get(path))
    states = begun.state, stepped.state
    old, new = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in states)
    named = [{jax.tree_util.keystr(path): leaf for path, leaf in part} for part in (old, new)]
    for entry in sorted({*named[0], *named[1]}):
        _compare(f"the entry {entry or '()'} of the state", *(part.get(entry) for part in named))
    if jax.tree.structure(begun.state) != jax.tree.structure(stepped.state):
        raise ValueError(
            f"step of {name} returns a state of another structure than reset: "
            f"{jax.tree.structure(stepped.state)} instead of {jax.tree.structure(begun.state)}"
        )


def _compare(what: str, one: Any, other: Any) -> None:
    texts = ["missing" if x is None else f"{x.dtype} of shape {x.shape}" for x in (one, other)]
    if texts[0] != texts[1]:
        raise ValueError(
            f"{what} must be the same after a reset and after a step, but it is {texts[0]} after a "
            f"reset, and {texts[1]} after a step"
        )


def _check_layout(leaf: SpaceLeaf, value: Any) -> None:
    # The space that a user states for an entry of the info may have a dtype that JAX lacks.
    dtype, shape = load_jax().dtypes.canonicalize_dtype(leaf.dtype), tuple(leaf.spec.shape)
    if (value.shape, value.dtype) != (shape, dtype):
        raise ValueError(
            f"observation {show_key(leaf.key)} of a step is {value.dtype} of shape {value.shape}, "
            f"but before it was {dtype} of shape {shape}: the layout must not change"
        )


def _shown_calls(
    single: SingleCalls, show: ShownLeaves
) -> tuple[Callable[..., tuple[Any, ...]], Callable[..., tuple[Any, ...]]]:
    """Returns a reset and a step of one environment that return leaves of a frame."""

    def begin(key: Any) -> tuple[Any, ...]:
        state, obs, info = single.reset(key)
        return state, show(obs, info)

    def step(key: Any, state: Any, actions: Any) -> tuple[Any, ...]:
        state, obs, info, *outcome = single.step(key, state, actions)
        shown = show(obs, info)
        for leaf, value in zip(show.leaves, shown, strict=False):
            # Runs during compilation, or in every step of a function that is not compiled.
            _check_layout(leaf, value)
        return state, shown, *outcome

    return begin, step


def batch_calls(
    single: SingleCalls, show: ShownLeaves, num_envs: int, compiled: bool, branch: bool
) -> JaxCalls:
    """Returns the functions of a batch of environments.

    Args:
        single: the functions of one environment.
        show: function that returns the leaves of an observation and an info.
        num_envs: number of environments.
        compiled: True to compile the functions.
        branch: True to ask in each step whether any episode ended, and to leave out the resets if
            not. A GPU would wait for the answer.
    """
    jax = load_jax()
    jnp = jax.numpy
    fold, count = jax.random.fold_in, len(show.leaves)
    begin_one, step_one = _shown_calls(single, show)

    def strong(state: Any) -> Any:
        # A state that begins as a Python number would else be compiled for twice.
        return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), state)

    def begin(keys: Any, progress: Progress) -> tuple[Progress, tuple[Any, ...]]:
        state, shown = jax.vmap(begin_one)(jax.vmap(fold)(keys[1], progress.episodes))
        return Progress(progress.steps, progress.episodes + 1, strong(state)), strong(shown)

    def renew(
        keys: Any, progress: Progress, shown: tuple[Any, ...], mask: Any
    ) -> tuple[Progress, tuple[Any, ...]]:
        def choose(fresh: Any, old: Any) -> Any:
            return jnp.where(mask.reshape(num_envs, *[1] * (old.ndim - 1)), fresh, old)

        def renewed() -> Any:
            begun, first = begin(keys, progress)
            return jax.tree.map(choose, (begun.state, first), (progress.state, shown))

        def kept() -> Any:
            return progress.state, shown

        state, shown = jax.lax.cond(mask.any(), renewed, kept) if branch else renewed()
        episodes = progress.episodes + mask.astype(progress.episodes.dtype)
        return Progress(progress.steps, episodes, state), shown

    def step(keys: Any, progress: Progress, actions: tuple[Any, ...]) -> StepResult:
        own = jax.vmap(fold, (0, None))(keys[0], progress.steps)
        state, last, reward, *flags = jax.vmap(step_one)(own, progress.state, actions)
        terminated, truncated = flags
        last = strong(last)
        progress = Progress(progress.steps + 1, progress.episodes, strong(state))
        progress, shown = renew(keys, progress, last, terminated | truncated)
        return StepResult(progress, last[:count], shown, reward[:, None], terminated, truncated)

    if not compiled:
        return JaxCalls(begin, renew, step)
    return JaxCalls(jax.jit(begin), jax.jit(renew), jax.jit(step))


# --- the leaves of frames: observations, and entries of infos


def plain_info(info: Any) -> dict[str, Any]:
    """Returns only the numbers and arrays of an info, nested in dicts; arrays have any dtype.

    The action masks of several choices, in a tuple, are joined.

    Raises:
        TypeError: if the info has no named entries.
    """
    plain = as_plain({} if info is None else info)
    if not isinstance(plain, dict):
        raise TypeError(f"an info must be a dict of arrays, but it is {type(info).__name__}")
    mask = plain.get(MASK_KEY)
    if isinstance(mask, tuple) and mask:
        jnp = load_jax().numpy
        plain[MASK_KEY] = jnp.concatenate([jnp.atleast_1d(jnp.asarray(part)) for part in mask])
    return kept_values(plain, _array)


def _array(value: Any) -> Any:
    """Returns a number or an array as an array of JAX; None for other values."""
    jax = load_jax()
    if is_number(value):
        return jax.numpy.asarray(value)
    return value if isinstance(value, jax.Array) else None


def _example(value: Any) -> Any:
    """Returns an array of numpy with a shape and dtype of JAX; None if numpy lacks the dtype."""
    if not is_number(value):
        return None
    return np.broadcast_to(np.zeros((), value.dtype), value.shape)


def info_layout(info_keys: InfoKeys, begun: Any, stepped: Any, name: str) -> InfoLayout:
    """Returns the layout of the entries that ``info_keys`` names.

    Args:
        info_keys: the argument of :class:`~trawl.envs.JaxEnv`.
        begun: shapes and dtypes of the info of a reset.
        stepped: shapes and dtypes of the info of a step.
        name: name of the environment.

    Raises:
        TypeError: if ``info_keys`` has the wrong type.
        ValueError: if an info lacks a name, if keys clash, or if an entry has no fixed layout or a
            dtype that PyTorch and numpy lack.
    """
    given = given_entries(info_keys)
    # The layout is that of the step, with a dtype that also holds the values of the reset.
    shown = [("", kept_values(info, _example)) for info in (stepped, begun)]
    promote = load_jax().numpy.promote_types
    found = seen_values((one for one in [shown]), {"": given}, 0, promote)[""]
    only = f"the info of {name} has only {names_of(found)}"
    for entry in given:
        # A compiled function always returns the same entries, so none appears later.
        if all(value_at(found, path) is None for path in entry.paths()):
            wanted = f"info_keys has {show_key(entry.path)}"
            for info, path in product((begun, stepped), entry.paths()):
                value = value_at(info, path)
                if value is not None and not isinstance(value, dict) and not is_number(value):
                    raise ValueError(
                        f"{wanted}, whose dtype {value.dtype} is not supported: return it as "
                        "another dtype, such as float32"
                    )
            raise ValueError(f"{wanted}, but {only}")
    layout = InfoLayout(placed_entries(given, found, lambda: only))
    layout.check_fixed("JAX has only numbers and arrays")
    return layout


class ShownLeaves(InfoCodec):
    """Codec of the leaves of a frame, which are encoded in compiled functions.

    If the info has an action mask that is not among the leaves, the mask follows after them.

    Args:
        observed: space of an observation.
        layout: layout of the entries of the info that become leaves.
        categorical: True to encode discrete values as indices instead of one-hot vectors.
        infos: shapes and dtypes of the infos of a reset and of a step.

    Attributes:
        mask: index of the action mask of the info in the result; None if there is none.

    Raises:
        ValueError: if an observation has the name of an entry, or if only resets have a mask.
    """

    def __init__(
        self, observed: Space[Any], layout: InfoLayout, categorical: bool, infos: tuple[Any, Any]
    ) -> None:
        super().__init__(InfoMerger(observed, layout), categorical, jax_ops())
        self._readers = [_reader(leaf) for leaf in layout.leaves]
        self.mask: int | None = None
        self._free: Callable[[], Any] | None = None
        shown = [info.get(MASK_KEY) for info in infos]
        masks = [mask if mask is not None and is_number(mask) else None for mask in shown]
        # An observed mask is preferred to one of the info.
        if masks != [None, None] and (MASK_KEY,) not in [leaf.key for leaf in self.leaves]:
            self._find_mask(*masks)

    def _find_mask(self, begun: Any, stepped: Any) -> None:
        if stepped is None:
            raise ValueError(
                f"reset returns info[{MASK_KEY!r}], but step does not: return a mask in both"
            )
        named = [leaf.key for leaf in self.merge.layout.leaves if leaf.path == (MASK_KEY,)]
        places = [i for i, leaf in enumerate(self.leaves) if leaf.key in named]
        # A reset without a mask allows everything. The entry can't be the mask, because it is zero.
        if places and begun is not None and self._encoders[places[0]] is None:
            self.mask = places[0]
            return
        jnp = load_jax().numpy
        self.mask = len(self.leaves)
        # A value of 2 allows both values of a bit.
        self._free = lambda: jnp.full(stepped.shape, 2).astype(stepped.dtype)

    def __call__(self, obs: Any, info: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the leaves, as a step of a single environment shows them.

        Raises:
            TypeError: if a value of the info has another dtype than its layout.
            ValueError: if a value of the info has another shape than its layout.
        """
        leaves = self.encode(obs, info)
        return tuple(leaves) if self._free is None else (*leaves, self._read_mask(info))

    @override
    def encode(self, sample: Any, info: Any = None) -> list[Any]:
        merged = self.merge(as_plain(sample), [read(info) for read in self._readers])
        return [*map(load_jax().numpy.asarray, self.encode_merged(merged))]

    def _read_mask(self, info: Mapping[str, Any]) -> Any:
        assert self._free is not None
        free, shown = self._free(), info.get(MASK_KEY)
        if shown is None:
            return free
        if shown.shape != free.shape:
            raise ValueError(
                f"info[{MASK_KEY!r}] has shape {shown.shape} after a reset, but {free.shape} after "
                "a step: the shape must not change"
            )
        return shown.astype(free.dtype)


def _reader(leaf: InfoLeaf) -> Callable[[Mapping[str, Any]], Any]:
    """Returns a function that returns the value of a leaf, or a blank one, in the leaf's layout."""
    jax = load_jax()
    jnp, dtype = jax.numpy, jax.dtypes.canonicalize_dtype(leaf.dtype)

    def read(info: Mapping[str, Any]) -> Any:
        found = leaf.find(info)
        if isinstance(found, dict):
            raise TypeError(
                f"{leaf.name} has the entries {sorted(found)}, but its layout, as first seen or as "
                "stated in info_keys, has none: name one of the entries"
            )
        return leaf.fitted(jnp.asarray(found)).astype(dtype)

    return read
