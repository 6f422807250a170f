"""DQN on CartPole-v1, in one file, with a Trawl collector that fills a prioritised replay buffer.

A ``Collector`` steps a few environments with an epsilon-greedy policy, and puts the frames into a
TorchRL buffer. Frames with large prediction errors are drawn more often, and their losses get
smaller weights in return. The sampler that does this is written out below, and so are the other
parts of DQN, such as the targets of double DQN and the target network.

With ``--checkpoint DIR``, the run saves its state in a folder now and then. If it is killed, the
same command continues it, to the same results.

At intervals, the network plays a few whole episodes without random actions. Training stops as soon
as their mean return reaches the target (475, at which CartPole-v1 counts as solved), or when the
frame budget is spent.

Run it from the root of the repository::

    python examples/dqn.py
    python examples/dqn.py --seed 3
    python examples/dqn.py --checkpoint runs/dqn
    python examples/dqn.py --help
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import tyro
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler

from trawl.collectors import Collector
from trawl.envs import GymEnv


@dataclass
class Config:
    """Settings of the example; each one is a command-line option."""

    env_id: str = "CartPole-v1"
    """Gymnasium environment (vector observations, discrete actions)."""
    seed: int = 0
    """Seed of the network, the random actions, the replay sampling and the environments."""
    target_return: float = 475.0
    """Mean return of an evaluation at which training stops."""
    total_frames: int = 50_000
    """Frame budget."""
    num_envs: int = 8
    """Number of environments, which are stepped as one batch."""
    frames_per_batch: int = 256
    """Frames collected between two rounds of learning."""
    steps_per_batch: int = 128
    """Gradient steps in a round of learning."""
    random_frames: int = 1_024
    """Frames collected with random actions at the start."""
    epsilon: float = 0.04
    """Final share of random actions; the share falls linearly from one to this value."""
    epsilon_frames: int = 8_000
    """Frames after which the share would be zero, if it did not stop at epsilon."""
    buffer_size: int = 50_000
    """Frames that the replay buffer holds."""
    alpha: float = 0.6
    """Exponent of the errors in the sampling probabilities; with 0, sampling is uniform."""
    beta: float = 0.4
    """Initial exponent of the importance weights; it rises linearly to one over the budget."""
    minibatch_size: int = 64
    """Frames per gradient step."""
    hidden_size: int = 256
    """Width of the two hidden layers."""
    learning_rate: float = 2.3e-3
    """Learning rate of Adam."""
    gamma: float = 0.99
    """Discount factor."""
    tau: float = 0.1
    """Share of the network's weights mixed into the target network at each gradient step."""
    eval_every: int = 2_048
    """Frames between evaluations."""
    eval_episodes: int = 20
    """Episodes in an evaluation."""
    num_threads: int = 1
    """Number of threads that PyTorch may use; such small networks run fastest with one."""
    checkpoint: str | None = None
    """Folder for checkpoints; if it has one, the run continues from it."""
    checkpoint_every: int = 5_000
    """Frames between two checkpoints."""


@dataclass
class Result:
    """Result of a run."""

    solved: bool
    """True if the target was reached."""
    mean_return: float
    """Mean return of the last evaluation."""
    frames: int
    """Frames collected for training."""
    seconds: float
    """Seconds of collection and training, without the evaluations."""
    curve: list[tuple[int, float]]
    """Frames and mean return at each evaluation."""


class Prioritized(Sampler):
    """Draws frames with probabilities in proportion to their last errors to the power ``alpha``.

    New frames get the highest priority so far, so that each is soon drawn. This sampler is written
    in Python because TorchRL's compiled sampler does not load with every version of PyTorch.
    """

    def __init__(self, size: int, alpha: float, beta: float) -> None:
        super().__init__()
        self.alpha, self.beta = alpha, beta
        self.priority = torch.zeros(size)
        self.highest = 1.0

    def extend(self, index: Tensor) -> None:
        """Gives the highest priority to new frames at these indices."""
        self.priority[index] = self.highest

    def sample(self, storage: Any, batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the indices of the drawn frames, and the weights of their losses."""
        ladder = self.priority[: len(storage)].cumsum(0)
        index = torch.searchsorted(ladder, torch.rand(batch_size) * ladder[-1])
        index.clamp_(max=len(storage) - 1)  # rounding may give an index beyond the last frame
        weight = (self.priority[index] / ladder[-1]) ** -self.beta
        return index, {"weight": weight / weight.max()}

    def update_priority(self, index: Tensor, error: Tensor, **_: Any) -> None:
        """Sets the priorities of frames from their newest prediction errors."""
        priority = (error + 1e-6) ** self.alpha
        self.priority[index] = priority
        self.highest = max(self.highest, float(priority.max()))

    def _empty(self) -> None:
        self.priority.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a checkpoint keeps."""
        return {"priority": self.priority, "highest": self.highest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state that ``state_dict`` returned."""
        self.priority.copy_(state["priority"])
        self.highest = state["highest"]

    def dumps(self, path: Any) -> None:
        """Writes the state to a file."""
        torch.save(self.state_dict(), path)

    def loads(self, path: Any) -> None:
        """Reads the state from a file."""
        self.load_state_dict(torch.load(path))


class EpsilonGreedy(nn.Module):
    """Policy that takes the action with the highest value, or at times a random action."""

    def __init__(self, network: nn.Module, num_actions: int) -> None:
        super().__init__()
        self.network, self.num_actions = network, num_actions
        self.epsilon = 1.0

    def forward(self, observation: Tensor) -> Tensor:
        """Returns an action for each environment."""
        best = self.network(observation).argmax(-1)
        chance = torch.rand(best.shape) < self.epsilon
        return torch.where(chance, torch.randint(self.num_actions, best.shape), best)


def make_network(num_observations: int, hidden_size: int, num_actions: int) -> nn.Sequential:
    """Returns a network that computes the values of all actions from an observation."""
    return nn.Sequential(
        nn.Linear(num_observations, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, num_actions),
    )


def evaluate(make_env: partial[GymEnv], network: nn.Module, episodes: int, seed: int) -> float:
    """Returns the mean return of whole episodes without random actions."""

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


def errors(
    network: nn.Module, slow: nn.Module, batch: TensorDict, gamma: float
) -> tuple[Tensor, Tensor]:
    """Returns the loss of each frame, and the absolute error of its predicted value.

    As in double DQN, the network chooses the next action, and its slow copy (the target network)
    evaluates this action. A single network would choose the actions that it overestimates. The
    value of the next observation counts after a truncation, but not after a termination.
    """
    value = network(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        following = batch["next", "observation"]
        choice = network(following).argmax(-1, keepdim=True)
        future = slow(following).gather(-1, choice).squeeze(-1)
        alive = ~batch["next", "terminated"].squeeze(-1)
        goal = batch["next", "reward"].squeeze(-1) + gamma * alive * future
    loss = nn.functional.smooth_l1_loss(value, goal, reduction="none")
    return loss, (goal - value.detach()).abs()


def make_collector(
    config: Config, make_env: partial[GymEnv], policy: nn.Module, replay: TensorDictReplayBuffer
) -> Collector:
    """Returns the collector that fills the buffer.

    It acts with the learner's own network, so no weights have to be sent to it.
    """
    return Collector(
        [make_env] * config.num_envs,
        policy,
        frames_per_batch=config.frames_per_batch,
        total_frames=config.total_frames,
        init_random_frames=config.random_frames,
        replay_buffer=replay,
        postproc=TensorDict.flatten,  # the buffer stores single frames of all environments
    )


def main(config: Config, make_collector: Callable[..., Any] = make_collector) -> Result:
    """Trains until the target is reached or the frame budget is spent."""
    if config.total_frames <= config.random_frames:
        raise ValueError("--total-frames must be more than --random-frames")
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)

    make_env = partial(GymEnv, config.env_id, categorical_action_encoding=True)
    probe = make_env()
    num_observations = probe.observation_spec["observation"].shape[-1]
    num_actions = probe.action_spec.n
    probe.close()
    network = make_network(num_observations, config.hidden_size, num_actions)
    slow = copy.deepcopy(network).requires_grad_(False)
    policy = EpsilonGreedy(network, num_actions)
    optimizer = torch.optim.Adam(network.parameters(), lr=config.learning_rate, fused=True)

    sampler = Prioritized(config.buffer_size, config.alpha, config.beta)
    replay = TensorDictReplayBuffer(
        storage=LazyTensorStorage(config.buffer_size),
        sampler=sampler,
        batch_size=config.minibatch_size,
    )
    collector = make_collector(config, make_env, policy, replay)
    collector.set_seed(config.seed)

    began = time.perf_counter()
    mean_return, solved, curve, frames = float("nan"), False, [], 0
    next_eval = config.eval_every
    if config.checkpoint and collector.load_checkpoint(config.checkpoint):
        saved = collector.extra
        network.load_state_dict(saved["network"])
        slow.load_state_dict(saved["slow"])
        optimizer.load_state_dict(saved["optimizer"])
        replay.load_state_dict(saved["replay"])
        curve.extend(saved["curve"])
        frames, next_eval, mean_return, policy.epsilon, sampler.beta = saved["numbers"]
        torch.set_rng_state(saved["generator"])  # it draws frames from the buffer
    resumed = frames  # the rate below is that of this process
    next_checkpoint = frames + config.checkpoint_every
    for _ in collector:
        frames += config.frames_per_batch
        if frames < config.random_frames:
            continue

        for _ in range(config.steps_per_batch):
            batch = replay.sample()
            loss, error = errors(network, slow, batch, config.gamma)
            optimizer.zero_grad()
            (loss * batch["weight"]).mean().backward()
            optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(
                    list(slow.parameters()), list(network.parameters()), config.tau
                )
            replay.update_priority(batch["index"], error)
        policy.epsilon = max(config.epsilon, 1.0 - frames / config.epsilon_frames)
        progress = min(1.0, frames / config.total_frames)
        sampler.beta = config.beta + (1.0 - config.beta) * progress

        if frames >= next_eval:
            next_eval += config.eval_every
            paused = time.perf_counter()
            mean_return = evaluate(make_env, network, config.eval_episodes, config.seed + frames)
            curve.append((frames, mean_return))
            solved = mean_return >= config.target_return
            print(
                f"frames {frames:>7,} | mean return {mean_return:6.1f}"
                f" | {(frames - resumed) / (paused - began):>7,.0f} frames/s",
                flush=True,
            )
            began += time.perf_counter() - paused
        if solved:
            break
        if config.checkpoint and frames >= next_checkpoint:
            next_checkpoint = frames + config.checkpoint_every
            extra = {
                "network": network.state_dict(),
                "slow": slow.state_dict(),
                "optimizer": optimizer.state_dict(),
                "replay": replay.state_dict(),
                "curve": curve,
                "numbers": (frames, next_eval, mean_return, policy.epsilon, sampler.beta),
                "generator": torch.get_rng_state(),
            }
            collector.checkpoint(config.checkpoint, extra)

    collector.shutdown()
    return Result(solved, mean_return, frames, time.perf_counter() - began, curve)


if __name__ == "__main__":
    print(main(tyro.cli(Config)))
