"""Behaviour cloning on CartPole-v1, in one file, from a dataset that ``trawl collect`` writes.

First, the command line collects frames with a hand-written controller, and writes them to a Minari
dataset. Then a small network learns to imitate the controller from the episodes on disk alone.
After each pass over the dataset, the network is evaluated on a few whole episodes. Training stops
as soon as their mean return reaches the target.

Run it from the root of the repository::

    python examples/offline.py
    python examples/offline.py --seed 3 --data runs/mine-v0
    python examples/offline.py --help
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import minari
import torch
import tyro
from torch import Tensor, nn

from trawl.collectors import Collector
from trawl.envs import GymEnv


@dataclass
class Config:
    """Settings of the example; each one is a command-line option."""

    env_id: str = "CartPole-v1"
    """Gymnasium environment; the controller works only for CartPole."""
    seed: int = 0
    """Seed of the collection, the network, the shuffling and the evaluation."""
    data: Path | None = None
    """Folder of the dataset, which is collected if there is none; None: a temporary folder."""
    frames: int = 5_000
    """Frames to collect."""
    epochs: int = 10
    """Passes over the dataset."""
    minibatch_size: int = 64
    """Frames per gradient step."""
    hidden_size: int = 64
    """Width of the two hidden layers."""
    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    target_return: float = 450.0
    """Mean return of an evaluation at which training stops."""
    eval_episodes: int = 20
    """Episodes in the evaluation after each pass."""
    num_threads: int = 1
    """Number of threads that PyTorch may use; such small networks run fastest with one."""


@dataclass
class Result:
    """Result of a run."""

    solved: bool
    """True if the target was reached."""
    mean_return: float
    """Mean return of the network in the last evaluation."""
    data_return: float
    """Mean return of the episodes in the dataset."""
    frames: int
    """Frames in the dataset."""
    seconds: float
    """Seconds for collection and training, without the evaluations."""
    curve: list[tuple[int, float]]
    """Pairs of the number of passes over the dataset, and the mean return after them."""


def controller(observation: Tensor) -> Tensor:
    """Returns one-hot actions, as ``trawl collect`` expects, that push the cart under the pole."""
    position, velocity, angle, turning = observation.unbind(-1)
    right = 0.05 * position + 0.1 * velocity + angle + 0.5 * turning > 0
    return nn.functional.one_hot(right.long(), 2)


def expert() -> Any:
    """Returns the policy for ``--policy offline:expert``."""
    return controller


def collect(config: Config, directory: Path) -> None:
    """Writes the dataset with the ``trawl collect`` command."""
    command = [
        *(sys.executable, "-m", "trawl", "collect", config.env_id),
        *("--policy", "offline:expert", "--frames", str(config.frames)),
        *("--seed", str(config.seed), "--format", "minari", "--out", str(directory)),
    ]
    examples = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": examples})


def evaluate(make_env: partial[GymEnv], network: nn.Module, episodes: int, seed: int) -> float:
    """Returns the mean return of whole episodes."""

    def policy(observation: Tensor) -> Tensor:
        return network(observation).argmax(-1)

    with Collector(
        [make_env] * episodes,
        policy,
        frames_per_batch=episodes * 100,
        trajs_per_batch=episodes,
        traj_format="padded",
    ) as collector:
        collector.set_seed(seed)
        batch = collector.next()
    reward = batch["next", "reward"].squeeze(-1)
    return float((reward * batch["collector", "mask"]).sum(-1).mean())


def main(config: Config, collect: Callable[[Config, Path], None] = collect) -> Result:
    """Collects the dataset if there is none yet, and trains and evaluates the network."""
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)
    began = time.perf_counter()

    directory = config.data or Path(tempfile.mkdtemp()) / "cartpole-expert-v0"
    if not directory.exists():
        collect(config, directory)
    dataset = minari.MinariDataset(directory / "data")
    episodes = list(dataset.iterate_episodes())
    # The last observation of an episode has no action.
    observation = torch.cat([torch.tensor(e.observations[:-1]) for e in episodes]).float()
    action = torch.cat([torch.tensor(e.actions) for e in episodes]).long()
    data_return = sum(float(e.rewards.sum()) for e in episodes) / len(episodes)
    print(f"{len(episodes)} episodes, {len(action):,} frames, mean return {data_return:.1f}")
    print(f"the dataset: {directory}")

    network = nn.Sequential(
        nn.Linear(observation.shape[-1], config.hidden_size),
        nn.Tanh(),
        nn.Linear(config.hidden_size, config.hidden_size),
        nn.Tanh(),
        nn.Linear(config.hidden_size, int(dataset.action_space.n)),
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=config.learning_rate, fused=True)
    make_env = partial(GymEnv, config.env_id, categorical_action_encoding=True)
    mean_return, solved, curve = float("nan"), False, []
    for epoch in range(1, config.epochs + 1):
        right = 0
        for index in torch.randperm(len(action)).split(config.minibatch_size):
            logits = network(observation[index])
            loss = nn.functional.cross_entropy(logits, action[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += int((logits.argmax(-1) == action[index]).sum())
        paused = time.perf_counter()
        mean_return = evaluate(make_env, network, config.eval_episodes, config.seed)
        curve.append((epoch, mean_return))
        print(
            f"epoch {epoch:>3} | {right / len(action):6.1%} as the controller"
            f" | mean return {mean_return:6.1f}",
            flush=True,
        )
        began += time.perf_counter() - paused
        solved = mean_return >= config.target_return
        if solved:
            break

    seconds = time.perf_counter() - began
    return Result(solved, mean_return, data_return, len(action), seconds, curve)


if __name__ == "__main__":
    print(main(tyro.cli(Config)))
