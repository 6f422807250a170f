"""Environments whose data are torch tensors: a synthetic one, and VMAS."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

import hand
import peers
import work
from harness import HAND, TRAWL, Case, Contender, Source

COUNT, WIDTH, ACTIONS, STEPS = 4096, 64, 8, 32
LENGTH = 50
VMAS_COUNT, VMAS_STEPS, VMAS_LENGTH = 1024, 32, 100
AGENTS, SEEN, ACTED = 3, 16, 2


class Drift:
    """4,096 environments that each move a vector of 64 floats, in mode SAME_STEP."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium
    num_envs = COUNT
    device = torch.device("cpu")
    single_observation_space = Box(-float("inf"), float("inf"), (WIDTH,))
    single_action_space = Box(-1, 1, (ACTIONS,))

    def __init__(self) -> None:
        self.unwrapped = self
        self._mix = torch.randn(ACTIONS, WIDTH, generator=torch.Generator().manual_seed(0))

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Tensor, dict[str, Any]]:
        """Begins all episodes, each with another number of steps to go."""
        self._age = torch.arange(COUNT) % LENGTH
        self._state = torch.zeros(COUNT, WIDTH)
        self._never = torch.zeros(COUNT, dtype=torch.bool)
        return self._state, {}

    def step(self, action: Tensor) -> tuple[Any, ...]:
        """Moves all vectors, and begins anew where they are old."""
        final = torch.addmm(self._state, action, self._mix, beta=0.9)
        self._age += 1
        ended = self._age >= LENGTH
        reward = final[:, 0]
        self._age.masked_fill_(ended, 0)
        self._state = final.masked_fill(ended.unsqueeze(-1), 0)
        return self._state, reward, ended, self._never, {"final_obs": final}

    def close(self) -> None:
        """Nothing is open."""


def empty(sizes: tuple[int, int], shapes: dict[Any, tuple[int, ...]]) -> dict[Any, Tensor]:
    flags = dict.fromkeys(hand.FLAGS, (1,))
    flags |= {("next", name): (1,) for name in hand.FLAGS}
    memory = {key: torch.zeros(*sizes, *shape) for key, shape in shapes.items()}
    memory |= {key: torch.zeros(*sizes, *shape, dtype=torch.bool) for key, shape in flags.items()}
    memory["collector", "traj_ids"] = torch.zeros(*sizes, dtype=torch.int64)
    return memory


def deliver(memory: dict[Any, Tensor], batch: tuple[int, int]) -> TensorDict:
    return TensorDict({key: value.transpose(0, 1) for key, value in memory.items()}, batch)


def hand_drift(act: Callable[[Tensor], Tensor]) -> Source:
    """The best loop by hand: preallocated memory, time first, written with `out` or copied once."""
    env = Drift()
    shapes = {"observation": (WIDTH,), ("next", "observation"): (WIDTH,), "action": (ACTIONS,)}
    memory = empty((STEPS, COUNT), {**shapes, ("next", "reward"): (1,)})
    batch = deliver(memory, (COUNT, STEPS))
    rows = {key: value.unbind(0) for key, value in memory.items()}
    flat = {k: v[..., 0].unbind(0) for k, v in memory.items() if v.ndim == 3 and v.shape[-1] == 1}
    ids, seen = torch.arange(COUNT), env.reset()[0]
    total = COUNT
    while True:
        with torch.no_grad():
            for t in range(STEPS):
                rows["observation"][t].copy_(seen)
                action = act(seen)
                rows["action"][t].copy_(action)
                seen, reward, terminated, truncated, info = env.step(action)
                rows["next", "observation"][t].copy_(info["final_obs"])
                flat["next", "reward"][t].copy_(reward)
                flat["next", "terminated"][t].copy_(terminated)
                flat["next", "truncated"][t].copy_(truncated)
                done = torch.logical_or(terminated, truncated, out=flat["next", "done"][t])
                rows["collector", "traj_ids"][t].copy_(ids)
                ended = done.nonzero().squeeze(-1)
                ids[ended] = torch.arange(total, total + len(ended))
                total += len(ended)
        yield COUNT * STEPS, batch


def tensors() -> Case:
    net, policy = work.mlp(WIDTH, ACTIONS), work.acting(work.mlp(WIDTH, ACTIONS))
    return Case(
        "tensors",
        f"{COUNT:,} environments of {WIDTH} floats as torch tensors, MLP 2x64",
        (
            Contender(TRAWL, lambda: peers.trawl(Drift(), policy, COUNT * STEPS)),
            Contender(HAND, lambda: hand_drift(net), 0.95),
        ),
    )


def _balance() -> Any:
    import vmas

    return vmas.make_env("balance", num_envs=VMAS_COUNT, max_steps=VMAS_LENGTH, seed=0)


def _acting(net: nn.Module) -> TensorDictModule:
    keys: Any = [("agents", "observation")], [("agents", "action")]
    return TensorDictModule(net, *keys)


def hand_vmas(act: Callable[[Tensor], Tensor]) -> Source:
    """VMAS by hand, with one reset if all episodes end at once, as most do."""
    env = _balance()
    group = (AGENTS,)
    shapes: dict[Any, tuple[int, ...]] = {
        ("agents", "action"): (*group, ACTED),
        ("next", "agents", "reward"): (*group, 1),
    }
    names = [(("observation",), SEEN), (("info", "pos_rew"), 1), (("info", "ground_rew"), 1)]
    for name, width in names:
        for prefix in ("agents",), ("next", "agents"):
            shapes[(*prefix, *name)] = (*group, width)
    memory = empty((VMAS_STEPS, VMAS_COUNT), shapes)
    batch = deliver(memory, (VMAS_COUNT, VMAS_STEPS))
    rows = {key: value.unbind(0) for key, value in memory.items()}
    ids, total = torch.arange(VMAS_COUNT), VMAS_COUNT

    def write(prefix: tuple[str, ...], t: int, obs: Any, infos: Any) -> None:
        torch.stack(obs, 1, out=rows[(*prefix, "agents", "observation")][t])
        for name in ("pos_rew", "ground_rew"):
            values = [info[name].unsqueeze(-1) for info in infos]
            torch.stack(values, 1, out=rows[(*prefix, "agents", "info", name)][t])

    obs, infos = env.reset(return_info=True)
    while True:
        with torch.no_grad():
            for t in range(VMAS_STEPS):
                write((), t, obs, infos)
                action = act(rows["agents", "observation"][t])
                rows["agents", "action"][t].copy_(action)
                obs, rewards, done, infos = env.step(list(action.unbind(1)))
                write(("next",), t, obs, infos)
                reward = rows["next", "agents", "reward"][t]
                torch.stack([one.unsqueeze(-1) for one in rewards], 1, out=reward)
                for name in ("done", "terminated"):
                    rows["next", name][t][:, 0].copy_(done)
                rows["collector", "traj_ids"][t].copy_(ids)
                ended = done.nonzero().flatten()
                if len(ended):
                    ids[ended] = torch.arange(total, total + len(ended))
                    total += len(ended)
                    obs, infos = _reset(env, ended.tolist())
        yield VMAS_COUNT * VMAS_STEPS, batch


def _reset(env: Any, ended: list[int]) -> Any:
    if len(ended) == VMAS_COUNT:
        return env.reset(return_info=True)
    for index in ended:
        env.reset_at(index, return_observations=False)
    found = env.get_from_scenario(
        get_observations=True, get_rewards=False, get_infos=True, get_dones=False
    )
    return found[0], found[-1]


def _torchrl(policy: Any) -> Source:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.envs import VmasEnv

        env = VmasEnv("balance", num_envs=VMAS_COUNT, max_steps=VMAS_LENGTH, seed=0)
    for frames, _ in peers.torchrl(env, policy, VMAS_COUNT * VMAS_STEPS):
        # It has no entries for `truncated`.
        yield frames, None


def vmas() -> Case:
    net = work.mlp(SEEN, ACTED)
    policy = _acting(net)
    return Case(
        "vmas",
        f"VMAS balance, {VMAS_COUNT:,} environments, MLP 2x64",
        (
            Contender(TRAWL, lambda: peers.trawl(_balance(), policy, VMAS_COUNT * VMAS_STEPS)),
            Contender(HAND, lambda: hand_vmas(net), 0.95),
            Contender("TorchRL", lambda: _torchrl(policy), 3.0, "VmasEnv, trust_policy=True"),
        ),
    )
