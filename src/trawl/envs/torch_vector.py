"""Vector environments with Gymnasium's API that return torch tensors."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any

import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor
from typing_extensions import override

from trawl.checks import check_bool
from trawl.devices import check_device
from trawl.envs.arguments import lists_arguments
from trawl.envs.base import TensorDictEnv
from trawl.envs.batches.autoreset import as_mode, autoreset_mode, declared_mode, is_restartable
from trawl.envs.capture.ways import chain
from trawl.envs.entries.info_keys import (
    InfoKeys,
    given_entries,
    kept_values,
    names_of,
    placed_entries,
    seen_values,
)
from trawl.envs.entries.infos import BatchReader, InfoLayout, InfoMerger, TensorInfoReader, rows_of
from trawl.envs.entries.masks import MASK_KEY, masking_method, rand_actions
from trawl.envs.entries.spaces import TensorCodec, check_keys
from trawl.envs.gym import GymEnv
from trawl.envs.kinds import EnvKind
from trawl.envs.outcomes import FINAL_OBS, reset_results, step_results
from trawl.envs.reset_kwargs import arguments_of_all, copied
from trawl.envs.source import Source, check_source
from trawl.envs.tensor_env import TensorEnv, TensorStep
from trawl.envs.vector import is_envpool

_API = ("num_envs", "single_observation_space", "single_action_space", "reset", "step")
# Objects that an environment of torch tensors is likely to have.
_TORCH = (Tensor, torch.device, torch.Generator, torch.nn.Module)
#: Option of ``reset`` that selects the environments of a partial reset.
_PARTIAL = {"mask": "reset_mask", "ids": "env_idx"}


class TorchVectorEnv(TensorEnv):
    """Vector environment with Gymnasium's API whose data are torch tensors, on any device.

    Collectors step it without numpy, and keep batches on the device of its data. The keys and
    encodings are those of :class:`~trawl.envs.GymEnv`.

    Args:
        env: object with ``num_envs``, ``single_observation_space``, ``single_action_space``,
            ``reset`` and ``step`` of a Gymnasium ``VectorEnv``. The observations, the reward and
            the flags are tensors with a row for each environment.
        autoreset_mode: mode in which ``env`` begins new episodes, as a
            ``gymnasium.vector.AutoresetMode`` or its value; required if its metadata has no
            ``"autoreset_mode"``. In mode ``"SameStep"``, a step that ends an episode must return
            ``info["final_obs"]`` or ``info["final_observation"]``, with a row for each environment.
        partial_reset: form in which ``reset`` takes the environments to reset: ``"mask"`` for
            ``options={"reset_mask": mask}``, ``"ids"`` for ``options={"env_idx": ids}``, None if
            ``reset`` always resets all of them. By default, ``"mask"`` in mode ``"Disabled"`` and
            for a :class:`Source` with ``can_restart``, otherwise None. With ids, each partial reset
            waits for the device.
        categorical_action_encoding: True to encode discrete values as indices instead of one-hot
            vectors.
        device: device of the data; by default, the environment's ``device`` or, if it has none,
            the device of the first observations.
        info_keys: entries of ``info`` to add to the observations under ``("info", name)``: a list
            of names, or a mapping from names to spaces or specs. Each entry is a tensor with a row
            for each environment. To find a layout that isn't given, the constructor resets the
            environment and, if the info of the reset lacks the entry, takes random steps.

    Raises:
        TypeError: if ``env`` lacks a part of the API, or doesn't return tensors.
        ValueError: if an argument is invalid, or the autoreset mode is unknown.

    Examples:
        >>> from trawl.envs import TorchVectorEnv
        >>> from trawl.testing import NumberedTorchEnv
        >>> env = TorchVectorEnv(NumberedTorchEnv(3, lengths=[2]))
        >>> env.rollout(2)["next", "done"].squeeze(-1).tolist()
        [[False, True], [False, True], [False, True]]
    """

    state_names = ("_shown", "_ended", "shown_mask")

    @lists_arguments
    def __init__(
        self,
        env: Any,
        *,
        autoreset_mode: AutoresetMode | str | None = None,
        partial_reset: str | None = None,
        categorical_action_encoding: bool = False,
        device: torch.device | str | None = None,
        info_keys: InfoKeys = (),
    ) -> None:
        _check_api(env)
        check_bool("categorical_action_encoding", categorical_action_encoding)
        self.env = env
        self._first: Any = None
        self._reset_kwargs: Mapping[str, Any] = {}
        place = declared_device(env) if device is None else check_device("device", device)
        if place is None:
            # The first batch begins with this reset.
            self._first = reset_results(env.reset(), env)
            place = _device_of(self._first[0])
            if place is None:
                raise _NoTensors(env, self._first[0])
        self.mode = _mode_of(env, autoreset_mode)
        if partial_reset is None and (self.mode is AutoresetMode.DISABLED or is_restartable(env)):
            partial_reset = "mask"
        if partial_reset not in (None, *_PARTIAL):
            raise ValueError(
                f"partial_reset must be one of {[*_PARTIAL]} or None, but it is {partial_reset!r}"
            )
        self._partial = partial_reset
        self._verifies = isinstance(_unwrapped(env), Source)
        self.can_restart = partial_reset is not None
        self.skips = self.mode is AutoresetMode.NEXT_STEP
        count = int(env.num_envs)
        self.batch_size = torch.Size([count])
        self.home = _indexed(place)
        # On the CPU, TensorDicts have no device, as those of other environments.
        self.device = None if self.home.type == "cpu" else self.home
        one_hot = categorical_action_encoding
        acted = env.single_action_space
        self.action_codec = TensorCodec(acted, "action", self.home, count, one_hot)
        self.full_action_spec = self.action_codec.composite(self.batch_size).to(self.home)
        self._mask_method = masking_method(env, acted)
        merge = self._find_infos(info_keys)
        observed = env.single_observation_space if merge is None else merge.space
        self.observation_codec = TensorCodec(observed, "observation", self.home, count, one_hot)
        self._reader = BatchReader(self.observation_codec)
        if merge is not None:
            self._reader = TensorInfoReader(self.observation_codec, merge, count, self.home)
        check_keys(self.observation_codec, self.action_codec)
        self.observation_keys = [leaf.key for leaf in self.observation_codec.leaves]
        spec = self.observation_codec.composite(self.batch_size)
        self.full_observation_spec = spec.to(self.home)
        self._shown: list[Tensor] = []
        self._ended = torch.zeros(count, dtype=torch.bool, device=self.home)
        # True where an episode ended without a last observation, or None.
        self._lost: Tensor | None = None

    @override
    def set_reset_kwargs(self, given: Any, first: int, counts: Any) -> None:
        begun = self.mode is not AutoresetMode.DISABLED
        why = f"it has autoreset_mode={self.mode.value!r}" if begun else None
        self._reset_kwargs = arguments_of_all(given, first, chain(self.env), counts, why)

    def _find_infos(self, info_keys: InfoKeys) -> InfoMerger | None:
        """Returns what adds entries of the info to observations; None if there are none."""
        given = given_entries(info_keys)
        if not given:
            return None
        missing = [entry for entry in given if entry.space is None]
        seen = seen_values(self._takes(), {"": missing}, 0)[""] if missing else {}
        name = type(self.env).__name__
        layout = InfoLayout(
            placed_entries(given, seen, lambda: f"the info of {name} has only {names_of(seen)}")
        )
        layout.check_fixed("the info of an environment whose data are tensors must have tensors")
        return InfoMerger(self.env.single_observation_space, layout)

    def _takes(self) -> Generator[list[tuple[str, Any]]]:
        """Yields the tensors in the infos of a reset and of random steps."""
        if self._first is None:
            self._first = reset_results(self.env.reset(), self.env)
        infos = [self._first[1]]
        while True:
            yield [("", kept_values(one, _first_row, merged=True)) for one in infos]
            # The environment is reset again before the first batch.
            self._first = None
            self._note_mask(infos[-1])
            actions = rand_actions(self.full_action_spec, None, self.action_mask())
            values = [actions.get(leaf.key) for leaf in self.action_codec.leaves]
            found = self.env.step(self.action_codec.decode(values))
            _, _, terminated, truncated, info = step_results(found, self.env)
            infos = [info.get("final_info") or {}, info]
            ended = bool(torch.logical_or(terminated, truncated).any())
            if ended and self.mode is AutoresetMode.DISABLED:
                infos.append(self.env.reset()[1])

    @property
    @override
    def name(self) -> str:
        spec = getattr(self.env, "spec", None)
        return str(getattr(spec, "id", None) or type(_unwrapped(self.env)).__name__)

    # --- what the loop calls

    @override
    def begin(self, mask: Tensor | None, **kwargs: Any) -> list[Tensor]:
        if mask is not None and not (self._seed is not None and mask.all()):
            return self._begin_some(mask, **kwargs)
        kwargs = copied(self._reset_kwargs) | kwargs
        first, self._first = self._first, None
        seed, self._seed = self._seed, None
        if seed is not None:
            kwargs.setdefault("seed", seed)
        found = self.env.reset(**kwargs) if first is None or kwargs else first
        obs, info = reset_results(found, self.env)
        self._ended = torch.zeros_like(self._ended)
        self.shown_mask = None
        self._note_mask(info)
        self._shown = self._reader.read(obs, info)
        return self._shown

    def _begin_some(self, mask: Tensor, **kwargs: Any) -> list[Tensor]:
        if self._partial is not None:
            return self._reset_rows(mask, **kwargs)
        # An environment that is about to reset by itself needs nothing.
        if (mask & ~self._ended).any():
            if not mask.all():
                raise _cant_restart(self.env)
            return self.begin(None, **kwargs)
        return self._shown

    def _reset_rows(self, mask: Tensor, **kwargs: Any) -> list[Tensor]:
        assert self._partial is not None
        # A copy, because the environment may keep or change it.
        rows = mask.clone() if self._partial == "mask" else mask.nonzero().squeeze(-1)
        kwargs = copied(self._reset_kwargs) | kwargs
        options = {**(kwargs.pop("options", None) or {}), _PARTIAL[self._partial]: rows}
        # A copy: the environment may write the new observations into the same memory.
        before = [leaf.clone() for leaf in self._shown] if self._verifies else []
        obs, info = reset_results(self.env.reset(options=options, **kwargs), self.env)
        self._note_mask(info, mask)
        self._ended = self._ended & ~mask
        self._shown = self._reader.read_reset(obs, info, mask, self._shown)
        if before:
            self._check_others(before, mask)
        return self._shown

    def _check_others(self, before: list[Tensor], mask: Tensor) -> None:
        """Rejects a source whose first partial reset also affects other environments."""
        # Only once, because the check waits for the device.
        self._verifies = False
        for old, new in zip(before, self._shown, strict=True):
            changed = (old != new) & (old == old)
            others = changed.reshape(len(mask), -1).any(1) & ~mask
            if others.any():
                raise ValueError(
                    f"begin({mask.tolist()}, None) of {self.env!r} also changed environment "
                    f"{int(others.nonzero()[0])}: it must begin episodes only where the mask is "
                    "True, and return the observations of the others unchanged"
                )

    @override
    def advance(self, actions: Iterable[Tensor]) -> TensorStep:
        action = self.action_codec.decode(actions)
        found = step_results(self.env.step(action), self.env)
        obs, reward, terminated, truncated, info = found
        if self.shown_mask is not None:
            self._note_mask(info)
        reward = self._row(reward, "reward").unsqueeze(-1)
        terminated = self._row(terminated, "terminated")
        truncated = self._row(truncated, "truncated")
        last = self._shown = self._reader.read_step(obs, info)
        skipped = self._ended if self.skips else None
        if self.mode is AutoresetMode.DISABLED:
            return TensorStep(last, None, [reward], terminated, truncated, None)
        ended = self._ended = torch.logical_or(terminated, truncated)
        final = None
        if self.mode is AutoresetMode.SAME_STEP:
            final = self._final(ended, info)
        return TensorStep(last, final, [reward], terminated, truncated, skipped)

    def _note_mask(self, info: Any, rows: Tensor | None = None) -> None:
        """Keeps the newest action masks in an info, which may have them for some rows only."""
        shown = info.get(MASK_KEY) if isinstance(info, Mapping) else None
        if not isinstance(shown, Tensor):
            return
        marked, old = info.get(f"_{MASK_KEY}"), self.shown_mask
        for mark in (marked, rows):
            if mark is not None and old is not None:
                shown = rows_of(mark, shown, old)
        # A copy, because the environment may change it before the next action is drawn.
        self.shown_mask = shown.clone()

    @override
    def newest_mask(self) -> Tensor | None:
        if self.shown_mask is not None or self._mask_method is None:
            return self.shown_mask
        return torch.as_tensor(self._mask_method(), device=self.home)

    def _row(self, value: Any, name: str) -> Tensor:
        """Returns the reward or a flag with one value for each environment."""
        count = self.batch_size[0]
        if not isinstance(value, Tensor):
            raise TypeError(
                f"step of {self!r} returned {name} as {type(value).__name__}, but it must be a "
                "torch tensor, like the observations"
            )
        if value.shape not in ((count,), (count, 1)):
            raise ValueError(
                f"step of {self!r} returned {name} of shape {tuple(value.shape)}, but the shape "
                f"must be ({count},), with one value for each environment"
            )
        if value.device != self.home:
            raise ValueError(
                f"step of {self!r} returned {name} on {value.device}, but the observations are on "
                f"{self.home}"
            )
        if name != "reward" and value.dtype is not torch.bool:
            value = value != 0
        row: Tensor = value if value.ndim == 1 else value.squeeze(-1)
        return row

    def _final(self, ended: Tensor, info: Any) -> list[Tensor] | None:
        """Returns the leaves of the last observations in ``info``, or None if it has none."""
        final: Any = None
        if isinstance(info, Mapping):
            final = next((info[name] for name in FINAL_OBS if info.get(name) is not None), None)
        if final is None:
            self._lost = ended if self._lost is None else self._lost | ended
            return None
        return self._reader.read_last(final)

    @override
    def begin_next(self, ended: Tensor, cut: Tensor | None = None) -> list[Tensor]:
        if self.mode is AutoresetMode.DISABLED:
            ended = ended if cut is None else ended | cut
        elif cut is None:
            return self._shown
        else:
            ended = cut
        if self.answers_at_once and not ended.any():
            return self._shown
        return self.begin(ended)

    @override
    def check(self) -> None:
        """Raises an error if an episode ended and its last observation is missing.

        Raises:
            ValueError: if so. The message says what the environment must return.
        """
        lost, self._lost = self._lost, None
        if lost is not None and lost.any():
            raise ValueError(
                f"{self!r} ended an episode in autoreset mode 'SameStep', but its info has no "
                "'final_obs' (or 'final_observation'), so the last observation of the episode is "
                "lost. Make it return the last observation, or state another mode with "
                "TorchVectorEnv(env, autoreset_mode=...)"
            )

    @override
    def _close(self) -> None:
        self.env.close()


class _NoTensors(TypeError):
    """Raised if the reset of an environment returns no tensor."""

    def __init__(self, env: Any, found: Any) -> None:
        super().__init__(
            f"the reset of {type(env).__name__} must return torch tensors, but it returned "
            f"{type(found).__name__}: use GymEnv for an environment that returns numpy arrays"
        )


def _first_row(value: Any) -> Tensor | None:
    """Returns the value of the first environment; None if there are no rows."""
    return value[0] if isinstance(value, Tensor) and value.ndim else None


def may_return_tensors(env: Any) -> bool:
    """Returns True if ``env`` is a vector environment whose data may be tensors.

    That is the case if it states a torch device, if it isn't a ``VectorEnv`` of Gymnasium, or if it
    has an object of torch among its attributes. Only a reset tells for certain.
    """
    if isinstance(env, (type, SyncVectorEnv, AsyncVectorEnv)) or is_envpool(env):
        return False
    if not all(hasattr(env, name) for name in _API):
        return False
    if declared_device(env) is not None or not isinstance(env, VectorEnv):
        return True
    if isinstance(env, Source):
        return False
    values = [value for layer in chain(env) for value in getattr(layer, "__dict__", {}).values()]
    return any(isinstance(value, _TORCH) for value in values)


def adapt_tensors(
    env: Any, *, categorical_action_encoding: bool = False, info_keys: InfoKeys = ()
) -> TensorDictEnv:
    """Returns the adapter of a vector environment whose data may be tensors."""
    options: Any = {"categorical_action_encoding": categorical_action_encoding}
    try:
        return TorchVectorEnv(env, info_keys=info_keys, **options)
    except _NoTensors:
        if not isinstance(env, VectorEnv):
            raise
    return GymEnv(env, info_keys=info_keys or None, **options)


def declared_device(env: Any) -> torch.device | None:
    """Returns the device that an environment states for its data, or None."""
    for one in (env, _unwrapped(env)):
        place = getattr(one, "device", None)
        if isinstance(place, torch.device):
            return place
        if isinstance(place, str):
            try:
                return torch.device(place)
            except RuntimeError:
                continue
    return None


def _unwrapped(env: Any) -> Any:
    return getattr(env, "unwrapped", env)


def _indexed(place: torch.device) -> torch.device:
    """Returns the device with its index, so that it equals that of a tensor."""
    if place.type == "cpu":
        return torch.device("cpu")
    return torch.empty(0, device=place).device


def _device_of(obs: Any) -> torch.device | None:
    """Returns the device of the first tensor in an observation; None if there is none."""
    if isinstance(obs, Tensor):
        return obs.device
    parts: Iterable[Any] = obs.values() if isinstance(obs, Mapping) else ()
    if isinstance(obs, tuple):
        parts = obs
    return next((place for place in map(_device_of, parts) if place is not None), None)


def _check_api(env: Any) -> None:
    check_source(env)
    if isinstance(env, (str, type)):
        kind = "an id" if isinstance(env, str) else f"the class {env.__name__}"
        raise TypeError(
            f"env must be an environment with Gymnasium's vector API, but it is {kind}: "
            f"{env!r}. Pass the environment itself"
        )
    missing = [name for name in _API if not hasattr(env, name)]
    if missing:
        raise TypeError(
            f"TorchVectorEnv needs an environment with Gymnasium's vector API, but "
            f"{type(env).__name__} has no {', '.join(missing)}"
        )


def _mode_of(env: Any, given: AutoresetMode | str | None) -> AutoresetMode:
    if given is not None:
        return as_mode(given)
    if declared_mode(env) is not None:
        return autoreset_mode(env)
    raise ValueError(
        f"{env!r} doesn't state when it resets its environments: pass autoreset_mode, one of "
        f"{[mode.value for mode in AutoresetMode]}, to TorchVectorEnv"
    )


def _cant_restart(env: Any) -> ValueError:
    return ValueError(
        f"{type(env).__name__} resets its environments by itself, and can't restart some of them. "
        "If its reset takes a mask or ids, state it: TorchVectorEnv(env, partial_reset='mask')"
    )


TENSORS = EnvKind(adapt_tensors, may_return_tensors)
