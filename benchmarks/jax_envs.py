"""Environments of JAX: gymnax's CartPole, and Jumanji's Game2048."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor

import peers
import tensors
import work
from harness import HAND, TRAWL, Case, Contender, Source

COUNT, STEPS = 1024, 128
BOARDS, MOVES = 256, 64
# The seeds of untrained weights that balance a pole well and badly, as in the case `envpool`.
BALANCING, FALLING = 4, 9


def _cartpole() -> Any:
    import gymnax

    return gymnax.make("CartPole-v1")


def _trawl(policy: Any) -> Source:
    from trawl.envs import JaxEnv

    env = JaxEnv(_cartpole(), COUNT, categorical_action_encoding=True)
    return peers.trawl(env, policy, COUNT * STEPS)


def _compiled_step() -> tuple[Any, Any]:
    """A reset and a step of all environments, each compiled as one function."""
    import jax
    import jax.numpy as jnp

    env, params = _cartpole()
    one_step = jax.vmap(env.step_env, (0, 0, 0, None))
    one_reset = jax.vmap(env.reset_env, (0, None))

    @jax.jit
    def reset(key: Any) -> Any:
        return one_reset(jax.random.split(key, COUNT), params)

    @jax.jit
    def step(key: Any, state: Any, action: Any) -> Any:
        key, own, other = jax.random.split(key, 3)
        keys = jax.random.split(own, COUNT)
        last, state, reward, done, _ = one_step(keys, state, action, params)
        late = state.time >= params.max_steps_in_episode

        def choose(new: Any, old: Any) -> Any:
            return jnp.where(done.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        def begin() -> Any:
            return jax.tree.map(choose, reset(other), (last, state))

        # Steps without an end skip the resets.
        seen, state = jax.lax.cond(done.any(), begin, lambda: (last, state))
        return key, state, last, seen, reward, done & ~late, done & late

    return reset, step


def hand_gymnax(act: Callable[[Tensor], Tensor]) -> Source:
    """The best loop by hand: one compiled step, dlpack, and memory that is allocated once."""
    import jax

    reset, step = _compiled_step()
    shapes = {"observation": (4,), ("next", "observation"): (4,), ("next", "reward"): (1,)}
    memory = tensors.empty((STEPS, COUNT), shapes)
    memory["action"] = torch.zeros(STEPS, COUNT, dtype=torch.int64)
    batch = tensors.deliver(memory, (COUNT, STEPS))
    rows = {key: value.unbind(0) for key, value in memory.items()}
    flat = {k: v[..., 0].unbind(0) for k, v in memory.items() if v.ndim == 3 and v.shape[-1] == 1}
    ids, total = torch.arange(COUNT), COUNT
    key = jax.random.PRNGKey(0)
    begun, state = reset(key)
    seen = torch.from_dlpack(begun)
    while True:
        with torch.no_grad():
            for t in range(STEPS):
                rows["observation"][t].copy_(seen)
                action = act(seen)
                rows["action"][t].copy_(action)
                # Faster than dlpack on the CPU.
                key, state, *found = step(key, state, action.to(torch.int32).numpy())
                last, seen, reward, terminated, truncated = map(torch.from_dlpack, found)
                rows["next", "observation"][t].copy_(last)
                flat["next", "reward"][t].copy_(reward)
                flat["next", "terminated"][t].copy_(terminated)
                flat["next", "truncated"][t].copy_(truncated)
                done = torch.logical_or(terminated, truncated, out=flat["next", "done"][t])
                rows["collector", "traj_ids"][t].copy_(ids)
                ended = done.nonzero().squeeze(-1)
                ids[ended] = torch.arange(total, total + len(ended))
                total += len(ended)
        yield COUNT * STEPS, batch


def gymnax() -> Case:
    return _gymnax("gymnax", "long episodes", BALANCING)


def gymnax_short() -> Case:
    return _gymnax("gymnax_short", "short episodes", FALLING)


def _gymnax(name: str, episodes: str, seed: int) -> Case:
    net = work.Argmax(work.mlp(4, 2, seed))
    return Case(
        name,
        f"gymnax, {COUNT:,} CartPoles, MLP 2x64, {episodes}",
        (
            Contender(TRAWL, lambda: _trawl(work.acting(net))),
            Contender(HAND, lambda: hand_gymnax(net), 0.9, "one compiled step, dlpack"),
        ),
    )


def _boards() -> Any:
    import jumanji

    return jumanji.make("Game2048-v1")


def _trawl_boards(policy: Any) -> Source:
    from trawl.envs import JaxEnv

    env = JaxEnv(_boards(), BOARDS, categorical_action_encoding=True)
    return peers.trawl(env, policy, BOARDS * MOVES)


def _torchrl_boards(policy: Any) -> Source:
    from torchrl.envs import JumanjiWrapper

    env = JumanjiWrapper(_boards(), batch_size=[BOARDS], categorical_action_encoding=True, jit=True)
    env.set_seed(0)
    for frames, _ in peers.torchrl(env, policy, BOARDS * MOVES):
        # It has no entries for `truncated`.
        yield frames, None


def jumanji() -> Case:
    net = work.Argmax(work.mlp(16, 4))
    policy = TensorDictModule(
        lambda board: net(board.flatten(-2).float()), in_keys=["board"], out_keys=["action"]
    )
    note = "JumanjiWrapper, trust_policy=True; batches have the state of the simulator, too"
    return Case(
        "jumanji",
        f"Jumanji, {BOARDS} x Game2048, MLP 2x64",
        (
            Contender(TRAWL, lambda: _trawl_boards(policy)),
            Contender("TorchRL", lambda: _torchrl_boards(policy), note=note),
        ),
    )
