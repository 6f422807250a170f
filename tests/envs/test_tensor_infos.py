"""Entries of the info of environments of tensors, compared with those of arrays."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from scripted_infos import KEYS, Scripted, check
from tensordict.nn import TensorDictModule

from trawl.collectors import Collector
from trawl.envs import TorchVectorEnv
from trawl.testing import NumberedTorchEnv

COUNT = 3


def tensors(value: Any) -> Any:
    """Returns numbers in nested dicts as tensors; the last observations get a row for each."""
    if isinstance(value, dict):
        return {name: tensors(one) for name, one in value.items()}
    if value.dtype == object:
        like = next(one for one in value if one is not None)
        value = np.stack([np.zeros_like(like) if one is None else one for one in value])
    return torch.from_numpy(np.array(value))


class Torched:
    """Vector environment of tensors, made of one of arrays.

    Args:
        mode: its autoreset mode.
        hides: names that no info has.
    """

    num_envs = COUNT
    device = "cpu"

    def __init__(self, mode: AutoresetMode, hides: tuple[str, ...] = ()) -> None:
        self.unwrapped, self.hides = self, hides
        self.metadata = {"autoreset_mode": mode}
        self._inner = vector(mode)
        self.single_observation_space = self._inner.single_observation_space
        self.single_action_space = self._inner.single_action_space
        self.resets = 0

    def shown(self, info: Any) -> Any:
        return {name: one for name, one in tensors(info).items() if name not in self.hides}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.resets += 1
        options = {name: one.numpy() for name, one in (options or {}).items()}
        if "env_idx" in options:
            options = {"reset_mask": np.isin(np.arange(COUNT), options["env_idx"])}
        obs, info = self._inner.reset(seed=seed, options=options or None)
        return tensors(obs), self.shown(info)

    def step(self, action: Any) -> Any:
        *results, info = self._inner.step(action.numpy())
        return (*map(tensors, results), self.shown(info))

    def close(self) -> None:
        self._inner.close()


def vector(mode: AutoresetMode) -> Any:
    return SyncVectorEnv([partial(Scripted, length) for length in (3, 4, 6)], autoreset_mode=mode)


def allowed() -> Any:
    """Returns a policy that takes the last action that the mask allows."""

    def act(mask: Any) -> Any:
        return torch.nn.functional.one_hot((mask * torch.arange(3)).argmax(-1), 3)

    return TensorDictModule(act, in_keys=[("info", "action_mask")], out_keys=["action"])


def collected(env: Any, policy: Any, count: int = 3) -> list[Any]:
    with Collector(env, policy, frames_per_batch=7 * COUNT) as collector:
        assert collector.stats()["env_path"] in ("array", "tensor")
        return [collector.next().clone() for _ in range(count)]


NUMBER = Box(-(2**63), 2**63 - 1, (1,), np.int64)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_layouts_are_found_in_steps(mode: AutoresetMode) -> None:
    for batch in collected(TorchVectorEnv(Torched(mode), info_keys=KEYS), allowed()):
        mask = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
        check(batch[mask])
        check(batch["next"][mask])


def test_a_reset_is_not_repeated_if_it_has_all_names() -> None:
    inner = Torched(AutoresetMode.DISABLED)
    env = TorchVectorEnv(inner, info_keys=["count", "action_mask"])
    batch = collected(env, allowed(), 1)[0]
    assert batch["info", "count"][:, 0, 0].tolist() == [100] * COUNT
    inner = Torched(AutoresetMode.DISABLED)
    TorchVectorEnv(inner, info_keys={"count": NUMBER})
    assert inner.resets == 0


def test_the_last_step_without_final_info() -> None:
    env = TorchVectorEnv(
        Torched(AutoresetMode.SAME_STEP, hides=("final_info", "_final_info")), info_keys=["count"]
    )
    batch = collected(env, None, 1)[0]
    done = batch["next", "done"][:, :-1, 0]
    after = batch["info", "count"][:, 1:, 0]
    # Both the last observation and the first one of the next episode have the values.
    assert torch.equal(batch["next", "info", "count"][:, :-1, 0][done], after[done])


class Wrong(NumberedTorchEnv):
    """Environment with an entry in the info that changes in the second step."""

    def __init__(self, value: Any) -> None:
        super().__init__(COUNT)
        self.values = [torch.zeros(COUNT, 2), torch.zeros(COUNT, 2), value]

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], {"x": self.values.pop(0)}

    def step(self, actions: Any) -> Any:
        *results, info = super().step(actions)
        return *results, {**info, "x": self.values.pop(0)}


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (np.zeros((COUNT, 2)), TypeError, r"info\['x'\] must be a torch tensor, .* ndarray"),
        (torch.zeros(COUNT), ValueError, r"info\['x'\] has shape \(3,\), .* \(3, 2\)"),
        (torch.zeros(COUNT, 2).to("meta"), ValueError, r"info\['x'\] is on meta"),
        (torch.zeros(COUNT, 2, dtype=torch.complex64), TypeError, r"info\['x'\] is torch.complex"),
    ],
)
def test_values_that_dont_fit_are_errors(value: Any, error: Any, text: str) -> None:
    env = TorchVectorEnv(Wrong(value), info_keys=["x"])
    with (
        Collector(env, frames_per_batch=12) as collector,
        pytest.raises(error, match=text),
    ):
        collector.next()


def test_names_that_dont_exist_are_errors() -> None:
    with pytest.raises(ValueError, match=r"info_keys has 'none', but the info of Torched has"):
        TorchVectorEnv(Torched(AutoresetMode.DISABLED), info_keys=["none", "count"])
    with pytest.raises(ValueError, match="no fixed layout"):
        TorchVectorEnv(Torched(AutoresetMode.DISABLED), info_keys={"count": object})
    with pytest.raises(TypeError, match="must be a list of names"):
        TorchVectorEnv(Torched(AutoresetMode.DISABLED), info_keys="count")
    assert isinstance(Scripted(), gymnasium.Env)
