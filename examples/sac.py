"""SAC on Pendulum-v1, in one file, with a Trawl collector that runs in parallel with the learner.

After ``collector.start()``, a worker process steps the environment and writes its frames into a
replay buffer that it shares with this process, while this process learns. With
``samples_per_insert``, the worker waits when the learner falls behind. With ``--workers 0``, this
process collects and learns in turn, so the same seed gives the same results. The parts of SAC (two
critics, the squashed Gaussian actor, the temperature) are written out below.

With ``--checkpoint DIR``, the run saves its state in a folder now and then. If it is killed, the
same command continues it; with ``--workers 0``, to the same results.

At intervals, the actor plays a few whole episodes without noise. Training stops as soon as their
mean return reaches the target (-200: the pendulum is swung up and held), or when the frame budget
is spent.

Run it from the root of the repository::

    python examples/sac.py
    python examples/sac.py --seed 3
    python examples/sac.py --workers 0
    python examples/sac.py --checkpoint runs/sac
    python examples/sac.py --help
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import tyro
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from trawl.collectors import Collector, MultiAsyncCollector
from trawl.envs import GymEnv


@dataclass
class Config:
    """Settings of the example; each one is a command-line option."""

    env_id: str = "Pendulum-v1"
    """Gymnasium environment (vector observations, bounded continuous actions)."""
    seed: int = 0
    """Seed of the networks, the noise, the replay sampling and the environments."""
    target_return: float = -200.0
    """Mean return of an evaluation at which training stops."""
    total_frames: int = 30_000
    """Frame budget."""
    workers: int = 1
    """Number of processes that collect; 0: this process collects and learns in turn."""
    frames_per_batch: int = 50
    """Frames that a worker writes into the buffer at a time."""
    random_frames: int = 1_000
    """Frames collected with random actions at the start."""
    samples_per_insert: float = 256.0
    """Samples drawn for each frame: with minibatches of 256, one gradient step per frame."""
    minibatch_size: int = 256
    """Frames per gradient step."""
    hidden_size: int = 128
    """Width of the two hidden layers of the actor and of each critic."""
    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    gamma: float = 0.99
    """Discount factor."""
    tau: float = 0.005
    """Share of the critics' weights mixed into the target critics at each gradient step."""
    send_every: int = 50
    """Gradient steps after which the actor's weights are sent to the workers."""
    eval_every: int = 1_000
    """Gradient steps between evaluations."""
    eval_episodes: int = 10
    """Episodes in an evaluation."""
    num_threads: int = 1
    """Number of threads that PyTorch may use."""
    checkpoint: str | None = None
    """Folder for checkpoints; if it has one, the run continues from it."""
    checkpoint_every: int = 2_000
    """Gradient steps between two checkpoints."""


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
    """Gradient steps and mean return at each evaluation."""


def mlp(num_inputs: int, hidden_size: int, num_outputs: int) -> nn.Sequential:
    """Returns a network with two hidden ReLU layers."""
    return nn.Sequential(
        nn.Linear(num_inputs, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, num_outputs),
    )


class Actor(nn.Module):
    """Gaussian actor whose samples are squashed by tanh to the bounds of the actions."""

    def __init__(self, num_observations: int, low: Tensor, high: Tensor, hidden: int) -> None:
        super().__init__()
        self.network = mlp(num_observations, hidden, 2 * len(low))
        self.register_buffer("centre", (low + high) / 2)
        self.register_buffer("reach", (high - low) / 2)
        self.noisy = True

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Returns an action and its log-probability."""
        mean, log_std = self.network(observation).chunk(2, -1)
        log_std = log_std.clamp(-20.0, 2.0)
        noise = torch.randn_like(mean) if self.noisy else torch.zeros_like(mean)
        raw = mean + log_std.exp() * noise
        log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        # Correct the density for tanh; the scale of the bounds is subtracted below.
        log_prob = log_prob - 2.0 * (math.log(2.0) - raw - nn.functional.softplus(-2.0 * raw))
        return self.centre + self.reach * raw.tanh(), (log_prob - self.reach.log()).sum(-1)


def as_policy(actor: Actor) -> TensorDictModule:
    """Returns the actor as a policy for collectors, which does not keep the log-probability."""
    return TensorDictModule(actor, in_keys=["observation"], out_keys=["action", "_"])


def evaluate(make_env: partial[GymEnv], actor: Actor, episodes: int, seed: int) -> float:
    """Returns the mean return of whole episodes without noise."""
    quiet = copy.deepcopy(actor)
    quiet.noisy = False
    with Collector(
        [make_env] * episodes,
        as_policy(quiet),
        frames_per_batch=episodes * 200,
        trajs_per_batch=episodes,
        traj_format="padded",
    ) as collector:
        collector.set_seed(seed)
        batch = collector.next()
    reward = batch["next", "reward"].squeeze(-1)
    return float((reward * batch["collector", "mask"]).sum(-1).mean())


class Learner:
    """Networks and optimisers, with a method that learns from a minibatch."""

    def __init__(self, actor: Actor, critics: nn.ModuleList, num_actions: int, config: Config):
        self.actor, self.critics = actor, critics
        self.slow = copy.deepcopy(critics).requires_grad_(False)
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.aim = -float(num_actions)
        self.gamma, self.tau = config.gamma, config.tau
        adam = partial(torch.optim.Adam, lr=config.learning_rate, fused=True)
        self.actor_optimizer = adam(actor.parameters())
        self.critic_optimizer = adam(critics.parameters())
        self.alpha_optimizer = adam([self.log_alpha])

    def step(self, batch: TensorDict) -> None:
        """Learns from a minibatch."""
        observation, action = batch["observation"], batch["action"]
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            following = batch["next", "observation"]
            next_action, next_log_prob = self.actor(following)
            worth = lowest(self.slow, following, next_action) - alpha * next_log_prob
            alive = ~batch["next", "terminated"].squeeze(-1)
            goal = batch["next", "reward"].squeeze(-1) + self.gamma * alive * worth
        inputs = torch.cat([observation, action], -1)
        loss = sum((critic(inputs).squeeze(-1) - goal).square().mean() for critic in self.critics)
        descend(self.critic_optimizer, loss)

        new_action, log_prob = self.actor(observation)
        self.critics.requires_grad_(False)
        descend(
            self.actor_optimizer,
            (alpha * log_prob - lowest(self.critics, observation, new_action)).mean(),
        )
        self.critics.requires_grad_(True)
        descend(self.alpha_optimizer, -(self.log_alpha * (log_prob.detach() + self.aim)).mean())
        with torch.no_grad():
            slow, quick = list(self.slow.parameters()), list(self.critics.parameters())
            torch._foreach_lerp_(slow, quick, self.tau)

    def parts(self) -> dict[str, Any]:
        """Returns the networks and optimisers, whose states a checkpoint keeps."""
        names = ("actor", "critics", "slow", "actor_optimizer", "critic_optimizer")
        return {name: getattr(self, name) for name in (*names, "alpha_optimizer")}


def lowest(critics: nn.ModuleList, observation: Tensor, action: Tensor) -> Tensor:
    """Returns the lower of the values that the two critics predict."""
    inputs = torch.cat([observation, action], -1)
    first, second = (critic(inputs).squeeze(-1) for critic in critics)
    return torch.min(first, second)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Takes a gradient step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def make_collector(
    config: Config, make_env: partial[GymEnv], policy: nn.Module, replay: TensorDictReplayBuffer
) -> Collector | MultiAsyncCollector:
    """Returns the collector that fills the buffer."""
    options: dict[str, Any] = {
        "frames_per_batch": config.frames_per_batch,
        "total_frames": config.total_frames,
        "init_random_frames": config.random_frames,
        "replay_buffer": replay,
    }
    if not config.workers:
        return Collector(make_env, policy, **options)
    return MultiAsyncCollector(
        [make_env] * config.workers,
        policy,
        samples_per_insert=config.samples_per_insert,
        **options,
    )


def main(config: Config, make_collector: Callable[..., Any] = make_collector) -> Result:
    """Trains until the target is reached or the frame budget is spent."""
    if config.total_frames <= config.random_frames:
        raise ValueError("--total-frames must be more than --random-frames")
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)

    make_env = partial(GymEnv, config.env_id)
    probe = make_env()
    num_observations = probe.observation_spec["observation"].shape[-1]
    low, high = probe.action_spec.low, probe.action_spec.high
    num_actions = len(low)
    probe.close()
    actor = Actor(num_observations, low, high, config.hidden_size)
    inputs = num_observations + num_actions
    critics = nn.ModuleList(mlp(inputs, config.hidden_size, 1) for _ in range(2))
    learner = Learner(actor, critics, num_actions, config)

    replay = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(config.total_frames),
        batch_size=config.minibatch_size,
        shared=config.workers > 0,
    )
    collector = make_collector(config, make_env, as_policy(actor), replay)
    collector.set_seed(config.seed)
    mean_return, solved, curve, steps = float("nan"), False, [], 0
    if config.checkpoint and collector.load_checkpoint(config.checkpoint):
        saved = collector.extra
        for name, part in learner.parts().items():
            part.load_state_dict(saved[name])
        learner.log_alpha.data.copy_(saved["log_alpha"])
        replay.extend(TensorDict(saved["frames"], [len(saved["frames"]["action"])]))
        curve.extend(saved["curve"])
        steps, mean_return = saved["counts"]
        torch.set_rng_state(saved["generator"])  # it draws frames and the learner's noise

    began = time.perf_counter()
    if config.workers:
        collector.start()
        while len(replay) < config.random_frames:
            collector.stats()  # raises an error if a worker has failed
            time.sleep(0.01)

    last = int(config.total_frames * config.samples_per_insert / config.minibatch_size)
    while not solved and steps < last:
        if not config.workers:
            wanted = (
                config.random_frames + steps * config.minibatch_size / config.samples_per_insert
            )
            while len(replay) < min(config.total_frames, wanted):
                collector.next()
        learner.step(collector.sample())
        steps += 1
        if steps % config.send_every == 0:
            collector.update_policy_weights_()
        if steps % config.eval_every == 0:
            paused = time.perf_counter()
            mean_return = evaluate(make_env, actor, config.eval_episodes, config.seed + steps)
            curve.append((steps, mean_return))
            solved = mean_return >= config.target_return
            print(
                f"frames {len(replay):>7,} | steps {steps:>7,} | mean return {mean_return:7.1f}"
                f" | {steps / (paused - began):>6,.0f} steps/s",
                flush=True,
            )
            began += time.perf_counter() - paused
        if config.checkpoint and steps % config.checkpoint_every == 0:
            # No frame may be added between the states of the collector and of the buffer.
            with collector.pause() if config.workers else nullcontext():
                extra = {name: part.state_dict() for name, part in learner.parts().items()}
                extra["log_alpha"] = learner.log_alpha.detach()
                extra["frames"] = replay[:].clone().to_dict()
                extra["curve"] = curve
                extra["counts"] = steps, mean_return
                extra["generator"] = torch.get_rng_state()
                collector.checkpoint(config.checkpoint, extra)

    seconds, frames = time.perf_counter() - began, len(replay)
    collector.async_shutdown()
    return Result(solved, mean_return, frames, seconds, curve)


if __name__ == "__main__":
    print(main(tyro.cli(Config)))
