"""PPO on CartPole-v1, in one file, with a Trawl collector that gathers the data.

The agent is a small actor and a small critic in plain PyTorch. A ``Collector`` steps a batch of
environments with the actor, and delivers batches of shape ``(num_envs, num_steps)``. With
``--workers N``, the environments are divided among N processes, and batches have the same shape.
The parts of PPO (generalised advantage estimation, the clipped objective, the update loop) are
written out below, to be read from top to bottom.

With ``--prefetch``, the workers collect the next batch while the agent learns from the last one.
Each batch is then collected with the weights of one batch earlier.

With ``--recurrent``, the agent does not see the velocities of the cart and the pole. Instead, it
has a GRU, whose state the collector carries from step to step.

With ``--evaluate``, a thread evaluates copies of the agent while training continues. Each
evaluation uses the same episodes and the most likely actions, and does not change the training.

With ``--checkpoint DIR``, the run saves its state in a folder now and then. If it is killed, the
same command continues it, to the same results.

Training stops as soon as the mean return of the last 100 finished episodes reaches the target
(475, at which CartPole-v1 counts as solved), or when the frame budget is spent.

Run it from the root of the repository::

    python examples/ppo.py
    python examples/ppo.py --seed 3 --num-envs 32
    python examples/ppo.py --workers 2
    python examples/ppo.py --workers 2 --prefetch
    python examples/ppo.py --recurrent
    python examples/ppo.py --evaluate
    python examples/ppo.py --checkpoint runs/ppo
    python examples/ppo.py --help

If the folder ``examples`` is on Python's path, you can also call it::

    from ppo import Config, main
    result = main(Config(seed=3))
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Categorical

from trawl.collectors import Collector, Evaluator, MultiSyncCollector, split_trajectories
from trawl.envs import GymEnv

MASK = ("collector", "mask")
LEARNED_FROM = ("observation", "action", "action_log_prob", "advantage", "target")


@dataclass
class Config:
    """Settings of the example; each one is a command-line option."""

    env_id: str = "CartPole-v1"
    """Gymnasium environment (vector observations, discrete actions)."""
    seed: int = 0
    """Seed of the networks, the action sampling, the shuffling and the environments."""
    target_return: float = 475.0
    """Mean return of the last 100 episodes at which training stops."""
    total_frames: int = 400_000
    """Frame budget; the learning rate falls linearly to zero over it."""
    num_envs: int = 16
    """Number of environments, in all workers together; each worker steps its share as one batch."""
    workers: int = 0
    """Number of processes that share the environments; 0: this process steps all of them."""
    prefetch: bool = False
    """True to collect the next batch while the agent learns; needs workers."""
    recurrent: bool = False
    """True to hide the velocities from the agent, and to give it a memory."""
    evaluate: bool = False
    """True to evaluate copies of the agent during training."""
    num_steps: int = 64
    """Steps of each environment in a batch."""
    num_epochs: int = 10
    """Passes over each batch."""
    minibatch_size: int = 256
    """Frames per gradient step."""
    hidden_size: int = 64
    """Width of the two hidden layers of the actor and of the critic."""
    learning_rate: float = 1.5e-3
    """Initial learning rate of Adam."""
    gamma: float = 0.98
    """Discount factor."""
    gae_lambda: float = 0.9
    """Decay of the advantage estimator: 0 trusts the critic, 1 trusts the sampled returns."""
    clip: float = 0.2
    """Distance of the probability ratio from one beyond which its gradient is cut off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the critic's loss."""
    max_grad_norm: float = 0.5
    """Maximum norm of the gradient; a larger gradient is scaled down."""
    num_threads: int = 1
    """Number of threads that PyTorch may use; such small networks run fastest with one."""
    log_every: int = 10_000
    """Frames between two lines of progress."""
    checkpoint: str | None = None
    """Folder for checkpoints; if it has one, the run continues from it."""
    checkpoint_every: int = 10_000
    """Frames between two checkpoints."""


@dataclass
class Result:
    """Result of a run."""

    solved: bool
    """True if the target was reached."""
    mean_return: float
    """Mean return of the last 100 episodes, or of all episodes if there were fewer."""
    frames: int
    """Frames collected."""
    episodes: int
    """Episodes finished."""
    collect_seconds: float
    """Seconds that this process spent waiting for the collector."""
    learn_seconds: float
    """Seconds that this process spent on everything else."""
    curve: list[tuple[int, float]]
    """Frames and mean return of the last 100 episodes, at each line of progress."""
    evaluations: list[tuple[int, float]]
    """Frames and mean return at each evaluation; empty without ``--evaluate``."""


def mlp(num_inputs: int, hidden_size: int, num_outputs: int, output_gain: float) -> nn.Sequential:
    """Returns two tanh layers and a linear head, with orthogonal weights and zero biases."""
    sizes = [num_inputs, hidden_size, hidden_size, num_outputs]
    gains = [2**0.5, 2**0.5, output_gain]
    layers: list[nn.Module] = []
    for fan_in, fan_out, gain in zip(sizes[:-1], sizes[1:], gains, strict=True):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """Actor and critic that see only the current observation."""

    in_keys = ("observation",)
    out_keys = ("logits",)

    def __init__(self, num_observations: int, num_actions: int, hidden_size: int) -> None:
        super().__init__()
        self.actor = mlp(num_observations, hidden_size, num_actions, output_gain=0.01)
        self.critic = mlp(num_observations, hidden_size, 1, output_gain=1.0)

    def acting(self) -> nn.Module:
        """Returns the module that computes ``out_keys`` from ``in_keys`` at each step."""
        return self.actor

    def worths(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """Returns the values of the observations and of the next ones, in the batch's shape."""
        value = self.critic(batch["observation"]).squeeze(-1)
        return value, self.critic(batch["next", "observation"]).squeeze(-1)

    def rows(self, batch: TensorDict) -> TensorDict:
        """Returns the batch in rows that may be shuffled; here, each row is a frame."""
        return batch.select(*LEARNED_FROM).flatten()

    def forward(self, rows: TensorDict) -> tuple[TensorDict, Tensor, Tensor]:
        """Returns the frames of these rows, their logits and their values."""
        return rows, self.actor(rows["observation"]), self.critic(rows["observation"]).squeeze(-1)


class RecurrentAgent(Agent):
    """Actor and critic that see the output of a GRU over all observations of the episode so far."""

    in_keys = ("observation", "memory")
    out_keys = ("logits", ("next", "memory"))

    def __init__(self, num_observations: int, num_actions: int, hidden_size: int) -> None:
        super().__init__(hidden_size, num_actions, hidden_size)
        self.gru = nn.GRU(num_observations, hidden_size, batch_first=True)

    def acting(self) -> nn.Module:
        return Remembering(self.gru, self.actor)

    def worths(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        # The output of the GRU for an observation is also the memory for the next step.
        following = batch["next"]
        later = remember(self.gru, following["observation"], following["memory"])
        return self.critic(following["memory"]).squeeze(-1), self.critic(later).squeeze(-1)

    def rows(self, batch: TensorDict) -> TensorDict:
        # Each row is a piece of one episode, padded to the longest; the mask is False for padding.
        return split_trajectories(batch).select(*LEARNED_FROM, "memory", MASK)

    def forward(self, rows: TensorDict) -> tuple[TensorDict, Tensor, Tensor]:
        begin = rows["memory"][:, 0].unsqueeze(0).contiguous()
        mask = rows[MASK]
        made = self.gru(rows["observation"], begin)[0][mask]
        return rows[mask], self.actor(made), self.critic(made).squeeze(-1)


class Remembering(nn.Module):
    """Module that takes one step of the GRU, and passes the output to the actor."""

    def __init__(self, gru: nn.GRU, actor: nn.Module) -> None:
        super().__init__()
        self.gru, self.actor = gru, actor

    def forward(self, observation: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the logits, and the memory for the next step.

        The collector first calls the module once without a memory, to find out the memory's shape.
        Later, each episode begins with a memory of zeros.
        """
        memory = remember(self.gru, observation, memory)
        return self.actor(memory), memory


def remember(gru: nn.GRU, observation: Tensor, memory: Tensor | None) -> Tensor:
    """Takes one step of a GRU, for any batch shape; if the memory is None, it begins with zeros."""
    steps = observation.reshape(-1, 1, observation.shape[-1])
    before = None if memory is None else memory.reshape(1, len(steps), gru.hidden_size)
    made, _ = gru(steps, before)
    return made.reshape(*observation.shape[:-1], gru.hidden_size)


def make_policy(agent: Agent) -> ProbabilisticTensorDictSequential:
    """Wraps the actor in a policy that writes the logits, the action and its log-probability."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(agent.acting(), in_keys=[*agent.in_keys], out_keys=[*agent.out_keys]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=Categorical,
            distribution_kwargs={"validate_args": False},
            return_log_prob=True,
            default_interaction_type=InteractionType.RANDOM,
        ),
    )


@torch.no_grad()
def gae(batch: TensorDict, agent: Agent, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Returns advantages and value targets of a ``(num_envs, num_steps)`` batch.

    After a termination there is no future reward, so no value is bootstrapped. After a
    truncation, the episode could have continued, so the value is bootstrapped from the episode's
    true last observation, which the batch keeps in ("next", "observation"). In both cases, the sum
    over later steps ends there, because the next row belongs to another episode.
    """
    value, next_value = agent.worths(batch)
    reward = batch["next", "reward"].squeeze(-1)
    alive = ~batch["next", "terminated"].squeeze(-1)
    same_episode = ~batch["next", "done"].squeeze(-1)

    delta = reward + gamma * alive * next_value - value
    decay = gamma * gae_lambda * same_episode
    advantage = torch.empty_like(delta)
    running = torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        running = delta[:, t] + decay[:, t] * running
        advantage[:, t] = running
    return advantage, advantage + value


def finished_returns(batch: TensorDict, running: Tensor) -> list[float]:
    """Computes the returns of the episodes that end in the batch, in the order in which they end.

    ``running`` holds the return so far of each environment's current episode. The function updates
    it in place, so an episode may span any number of batches.
    """
    reward = batch["next", "reward"].squeeze(-1)
    done = batch["next", "done"].squeeze(-1)
    returns: list[float] = []
    for t in range(reward.shape[1]):
        running += reward[:, t]
        returns += running[done[:, t]].tolist()
        running[done[:, t]] = 0.0
    return returns


class Positions(gym.ObservationWrapper):
    """CartPole without velocities: observes only the position of the cart and the pole's angle."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, gym.spaces.Box)
        self.observation_space = gym.spaces.Box(space.low[::2], space.high[::2], dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Drops every second number of CartPole's observation, which is a velocity."""
        return observation[::2]


def make_env(config: Config) -> GymEnv:
    """Returns one environment."""
    env = gym.make(config.env_id)
    return GymEnv(Positions(env) if config.recurrent else env, categorical_action_encoding=True)


def make_collector(config: Config, policy: nn.Module) -> Collector | MultiSyncCollector:
    """Returns a collector whose batches have the shape ``(num_envs, num_steps)``."""
    make = partial(make_env, config)
    frames_per_batch = config.num_envs * config.num_steps
    if not config.workers:
        if config.prefetch:
            raise ValueError("--prefetch needs --workers: this process can't learn and collect")
        # This collector acts with the learner's own weights, so no weights have to be sent.
        return Collector(
            [make] * config.num_envs,
            policy,
            frames_per_batch=frames_per_batch,
            total_frames=config.total_frames,
        )
    if config.num_envs % config.workers:
        raise ValueError(f"{config.num_envs} environments can't be shared by {config.workers}")
    return MultiSyncCollector(
        [[make] * (config.num_envs // config.workers)] * config.workers,
        policy,
        frames_per_batch=frames_per_batch,
        total_frames=config.total_frames,
        cat_results=0,  # one worker's environments after another's: (num_envs, num_steps)
        update_at_each_batch=True,  # each batch is requested with the newest weights
        prefetch=1 if config.prefetch else 0,
    )


def make_evaluator(
    config: Config, policy: nn.Module, evaluations: list[tuple[int, float]]
) -> Evaluator | None:
    """Returns an evaluator that prints and records each result; None without ``--evaluate``."""
    if not config.evaluate:
        return None

    def note(metrics: TensorDict) -> None:
        step, reward, error = (metrics[f"eval/{name}"] for name in ("step", "reward", "reward_sem"))
        print(
            f"evaluated at {step:>7,} frames | mean return {reward:6.1f} ± {error:.1f}", flush=True
        )
        evaluations.append((int(step), float(reward)))

    make = partial(make_env, config)
    return Evaluator(make, policy, num_trajectories=16, num_envs=16, on_result=note)


def main(config: Config, make_collector: Callable[..., Any] = make_collector) -> Result:
    """Trains until the target is reached or the frame budget is spent."""
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)

    probe = make_env(config)
    num_observations = probe.observation_spec["observation"].shape[-1]
    num_actions = probe.action_spec.n
    probe.close()
    kind = RecurrentAgent if config.recurrent else Agent
    agent = kind(num_observations, num_actions, config.hidden_size)
    optimizer = torch.optim.Adam(agent.parameters(), lr=config.learning_rate, eps=1e-5, fused=True)

    policy = make_policy(agent)
    collector = make_collector(config, policy)
    collector.set_seed(config.seed)
    evaluations: list[tuple[int, float]] = []
    evaluator = make_evaluator(config, policy, evaluations)

    running = torch.zeros(config.num_envs)
    last_returns: deque[float] = deque(maxlen=100)
    curve: list[tuple[int, float]] = []
    frames, episodes, next_log = 0, 0, config.log_every
    mean_return, solved = float("nan"), False
    if config.checkpoint and collector.load_checkpoint(config.checkpoint):
        saved = collector.extra
        agent.load_state_dict(saved["agent"])
        optimizer.load_state_dict(saved["optimizer"])
        running.copy_(saved["running"])
        last_returns.extend(saved["last_returns"])
        curve.extend(saved["curve"])
        evaluations.extend(saved["evaluations"])
        frames, episodes, next_log, mean_return = saved["counts"]
        torch.set_rng_state(saved["generator"])  # it shuffles the rows
    next_checkpoint = frames + config.checkpoint_every
    resumed = frames  # the times below are those of this process
    collect_seconds, learn_seconds = 0.0, 0.0
    clock = time.perf_counter()

    for batch in collector:
        collect_seconds += time.perf_counter() - clock
        clock = time.perf_counter()

        # Record the returns of finished episodes.
        frames += batch.numel()
        returns = finished_returns(batch, running)
        episodes += len(returns)
        last_returns.extend(returns)
        if last_returns:
            mean_return = sum(last_returns) / len(last_returns)
        solved = len(last_returns) == 100 and mean_return >= config.target_return
        if solved or frames >= min(next_log, config.total_frames):
            seconds = collect_seconds + learn_seconds
            print(
                f"frames {frames:>7,} | episodes {episodes:>5,} | mean return {mean_return:6.1f}"
                f" | {(frames - resumed) / seconds:>7,.0f} frames/s"
                f" ({(frames - resumed) / collect_seconds:,.0f} while collecting)",
                flush=True,
            )
            curve.append((frames, mean_return))
            next_log = frames + config.log_every
            if evaluator is not None:
                # Evaluates the current weights; skipped if the previous evaluation still runs.
                evaluator.trigger_eval(step=frames)
        if solved:
            break

        # Learn from the batch: shuffle its rows, and take a clipped step on each minibatch.
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * max(0.0, 1.0 - frames / config.total_frames)
        batch["advantage"], batch["target"] = gae(batch, agent, config.gamma, config.gae_lambda)
        rows = agent.rows(batch)
        size = -(-len(rows) * config.minibatch_size // batch.numel())

        for _ in range(config.num_epochs):
            for index in torch.randperm(len(rows)).split(size):
                part, logits, value = agent(rows[index])
                log_probs = logits.log_softmax(-1)
                log_prob = log_probs.gather(-1, part["action"].unsqueeze(-1)).squeeze(-1)
                ratio = (log_prob - part["action_log_prob"]).exp()
                gain = part["advantage"]
                gain = (gain - gain.mean()) / (gain.std(correction=0) + 1e-8)

                # With the lower of the two, a ratio outside the clip range gains nothing.
                clipped = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
                policy_loss = -torch.min(ratio * gain, clipped * gain).mean()
                value_loss = (value - part["target"]).square().mean()
                entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
                loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy

                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), config.max_grad_norm)
                optimizer.step()

        if config.checkpoint and frames >= next_checkpoint:
            next_checkpoint = frames + config.checkpoint_every
            extra = {
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
                "running": running,
                "last_returns": list(last_returns),
                "curve": curve,
                "evaluations": list(evaluations),
                "counts": (frames, episodes, next_log, mean_return),
                "generator": torch.get_rng_state(),
            }
            collector.checkpoint(config.checkpoint, extra)

        learn_seconds += time.perf_counter() - clock
        clock = time.perf_counter()

    collector.shutdown()
    if evaluator is not None:
        evaluator.evaluate(step=frames)
        evaluator.shutdown()
    seconds = collect_seconds, learn_seconds
    return Result(solved, mean_return, frames, episodes, *seconds, curve, evaluations)


if __name__ == "__main__":
    print(main(tyro.cli(Config)))
