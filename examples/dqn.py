"""DQN on CartPole-v1, in one file, with a Trawl collector that fills a prioritised replay buffer.

A ``Collector`` steps a few environments, greedily but for a share of random actions, and puts the
frames into a TorchRL buffer. Frames whose value was predicted badly are drawn more often, and their
losses weigh less in return: the sampler that does this is written out below, as are the double
estimate of the targets, the slow copy of the network and the rest of what makes it DQN.

Now and then the network plays a few whole episodes without random actions. Training stops as soon
as their mean return reaches the target (475, at which CartPole-v1 counts as solved), or when the
frame budget is spent.

Run it from the root of the repository::

    python examples/dqn.py
    python examples/dqn.py --seed 3
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
    """What can be set from the command line."""

    env_id: str = "CartPole-v1"
    """Gymnasium environment (vector observations, discrete actions)."""
    seed: int = 0
    """Seeds the network, the random actions, the replay and the environments."""
    target_return: float = 475.0
    """Stop once the mean return of an evaluation gets here."""
    total_frames: int = 50_000
    """Frame budget."""
    num_envs: int = 8
    """Environments stepped as one batch."""
    frames_per_batch: int = 256
    """Frames between two rounds of learning."""
    steps_per_batch: int = 128
    """Gradient steps of a round."""
    random_frames: int = 1_024
    """Frames of random actions at the start."""
    epsilon: float = 0.04
    """Share of random actions in the end; it falls linearly from one."""
    epsilon_frames: int = 8_000
    """Frames until then."""
    buffer_size: int = 50_000
    """Frames that the replay buffer holds."""
    alpha: float = 0.6
    """How much errors matter for the choice of frames: 0 draws them all alike."""
    beta: float = 0.4
    """How much the losses make up for that choice; it rises linearly to one over the budget."""
    minibatch_size: int = 64
    """Frames per gradient step."""
    hidden_size: int = 256
    """Width of the two hidden layers."""
    learning_rate: float = 2.3e-3
    """Step size of Adam."""
    gamma: float = 0.99
    """Discount."""
    tau: float = 0.1
    """Share of the network that its slow copy takes over with each step."""
    eval_every: int = 2_048
    """Frames between evaluations."""
    eval_episodes: int = 20
    """Episodes of an evaluation."""
    num_threads: int = 1
    """Threads PyTorch may use; networks this small run fastest on one."""


@dataclass
class Result:
    """What a run came to."""

    solved: bool
    """Whether the target was reached."""
    mean_return: float
    """Mean return of the last evaluation."""
    frames: int
    """Frames collected to learn from."""
    seconds: float
    """Time until then, without the evaluations."""
    curve: list[tuple[int, float]]
    """Frames and mean return at each evaluation."""


class Prioritized(Sampler):
    """Draws frames in proportion to their last error, to the power ``alpha``.

    New frames count as much as the worst so far, so that each is soon seen. Written out, as the
    compiled sampler of TorchRL does not load with every PyTorch.
    """

    def __init__(self, size: int, alpha: float, beta: float) -> None:
        super().__init__()
        self.alpha, self.beta = alpha, beta
        self.priority = torch.zeros(size)
        self.highest = 1.0

    def extend(self, index: Tensor) -> None:
        """Frames were put at these places."""
        self.priority[index] = self.highest

    def sample(self, storage: Any, batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Places to read, and what their losses weigh."""
        ladder = self.priority[: len(storage)].cumsum(0)
        index = torch.searchsorted(ladder, torch.rand(batch_size) * ladder[-1])
        index.clamp_(max=len(storage) - 1)  # rounding may reach the very end
        weight = (self.priority[index] / ladder[-1]) ** -self.beta
        return index, {"weight": weight / weight.max()}

    def update_priority(self, index: Tensor, error: Tensor, **_: Any) -> None:
        """The errors with which these frames were just predicted."""
        priority = (error + 1e-6) ** self.alpha
        self.priority[index] = priority
        self.highest = max(self.highest, float(priority.max()))

    def _empty(self) -> None:
        self.priority.zero_()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"priority": self.priority, "highest": self.highest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As it was."""
        self.priority.copy_(state["priority"])
        self.highest = state["highest"]

    def dumps(self, path: Any) -> None:
        """To disk."""
        torch.save(self.state_dict(), path)

    def loads(self, path: Any) -> None:
        """From disk."""
        self.load_state_dict(torch.load(path))


class EpsilonGreedy(nn.Module):
    """The action of the highest value, but for a share of random ones."""

    def __init__(self, network: nn.Module, num_actions: int) -> None:
        super().__init__()
        self.network, self.num_actions = network, num_actions
        self.epsilon = 1.0

    def forward(self, observation: Tensor) -> Tensor:
        """An action for each environment."""
        best = self.network(observation).argmax(-1)
        chance = torch.rand(best.shape) < self.epsilon
        return torch.where(chance, torch.randint(self.num_actions, best.shape), best)


def make_network(num_observations: int, hidden_size: int, num_actions: int) -> nn.Sequential:
    """Values of all actions."""
    return nn.Sequential(
        nn.Linear(num_observations, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, num_actions),
    )


def evaluate(make_env: partial[GymEnv], network: nn.Module, episodes: int, seed: int) -> float:
    """Mean return of whole episodes without random actions."""

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
    """Loss of each frame, and by how much its value was missed.

    The quick network chooses the next action and the slow one says what it is worth, as one network
    for both would pick what it overestimates. An episode that was only cut off has a future.
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
    """What fills the buffer, with the learner's very network: nothing has to be sent to it."""
    return Collector(
        [make_env] * config.num_envs,
        policy,
        frames_per_batch=config.frames_per_batch,
        total_frames=config.total_frames,
        init_random_frames=config.random_frames,
        replay_buffer=replay,
        postproc=TensorDict.flatten,  # the buffer keeps single frames, whose ever they are
    )


def main(config: Config, make_collector: Callable[..., Any] = make_collector) -> Result:
    """Train until the target is reached or the frames are spent."""
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
                f" | {frames / (paused - began):>7,.0f} frames/s",
                flush=True,
            )
            began += time.perf_counter() - paused
        if solved:
            break

    collector.shutdown()
    return Result(solved, mean_return, frames, time.perf_counter() - began, curve)


if __name__ == "__main__":
    print(main(tyro.cli(Config)))
