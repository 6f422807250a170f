"""PPO on CartPole-v1, in one file, with a Trawl collector gathering the data.

The agent is a small actor and a small critic in plain PyTorch. A ``Collector`` steps a batch of
environments with the actor and hands over batches of shape ``(num_envs, steps)``; with
``--workers N`` the environments are shared out among N processes, and the batches are the same.
Everything that makes it PPO (generalised advantage estimation, the clipped objective, the update
loop) is written out below and meant to be read from top to bottom.

With ``--recurrent`` the agent is not shown how fast the cart and the pole move, and remembers what
it saw instead, in a GRU whose state the collector hands on from step to step.

With ``--evaluate`` a thread evaluates copies of the agent beside training, on the same episodes
each time and with its likeliest actions. Training goes on meanwhile, and comes to the same.

Training stops as soon as the mean return of the last 100 finished episodes reaches the target
(475, at which CartPole-v1 counts as solved), or when the frame budget is spent.

Run it from the root of the repository::

    python examples/ppo.py
    python examples/ppo.py --seed 3 --num-envs 32
    python examples/ppo.py --workers 2
    python examples/ppo.py --recurrent
    python examples/ppo.py --evaluate
    python examples/ppo.py --help

or, with ``examples`` on the path, call it::

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
    """What can be set from the command line."""

    env_id: str = "CartPole-v1"
    """Gymnasium environment (vector observations, discrete actions)."""
    seed: int = 0
    """Seeds the networks, the action sampling, the shuffling and the environments."""
    target_return: float = 475.0
    """Stop once the mean return of the last 100 episodes gets here."""
    total_frames: int = 400_000
    """Frame budget; the learning rate falls linearly to zero over it."""
    num_envs: int = 16
    """Environments stepped as one batch; with workers, by all of them together."""
    workers: int = 0
    """Processes that the environments are shared out among; 0: they are stepped in this one."""
    recurrent: bool = False
    """Whether velocities are hidden from the agent, and it has a memory."""
    evaluate: bool = False
    """Whether copies of the agent are evaluated beside training."""
    num_steps: int = 64
    """Steps each environment makes per batch."""
    num_epochs: int = 10
    """Passes over each batch."""
    minibatch_size: int = 256
    """Frames per gradient step."""
    hidden_size: int = 64
    """Width of the two hidden layers, of the actor and of the critic alike."""
    learning_rate: float = 1.5e-3
    """Initial step size of Adam."""
    gamma: float = 0.98
    """Discount."""
    gae_lambda: float = 0.9
    """Decay of the advantage estimator: 0 trusts the critic, 1 trusts the sampled returns."""
    clip: float = 0.2
    """How far the probability ratio may move from one before its gradient is cut."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the critic's loss."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    num_threads: int = 1
    """Threads PyTorch may use; networks this small run fastest on one."""
    log_every: int = 10_000
    """Frames between progress lines."""


@dataclass
class Result:
    """What a run came to."""

    solved: bool
    """Whether the target was reached."""
    mean_return: float
    """Mean return of the last 100 episodes, or of all if there were fewer."""
    frames: int
    """Frames collected."""
    episodes: int
    """Episodes finished."""
    collect_seconds: float
    """Time spent waiting for the collector."""
    learn_seconds: float
    """Time spent in everything else."""
    curve: list[tuple[int, float]]
    """Frames and mean return of the last 100 episodes, now and then."""
    evaluations: list[tuple[int, float]]
    """Frames and mean return of evaluations; empty without them."""


def mlp(num_inputs: int, hidden_size: int, num_outputs: int, output_gain: float) -> nn.Sequential:
    """Two tanh layers and a linear head, with orthogonal weights and zero biases."""
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
    """An actor and a critic that see one observation."""

    in_keys = ("observation",)
    out_keys = ("logits",)

    def __init__(self, num_observations: int, num_actions: int, hidden_size: int) -> None:
        super().__init__()
        self.actor = mlp(num_observations, hidden_size, num_actions, output_gain=0.01)
        self.critic = mlp(num_observations, hidden_size, 1, output_gain=1.0)

    def acting(self) -> nn.Module:
        """What turns ``in_keys`` into ``out_keys`` at each step."""
        return self.actor

    def worths(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """Values of the observations and of the following ones, each of the batch's shape."""
        value = self.critic(batch["observation"]).squeeze(-1)
        return value, self.critic(batch["next", "observation"]).squeeze(-1)

    def rows(self, batch: TensorDict) -> TensorDict:
        """The batch in pieces that may be shuffled: here, frames."""
        return batch.select(*LEARNED_FROM).flatten()

    def forward(self, rows: TensorDict) -> tuple[TensorDict, Tensor, Tensor]:
        """The frames of these pieces, their logits and their values."""
        return rows, self.actor(rows["observation"]), self.critic(rows["observation"]).squeeze(-1)


class RecurrentAgent(Agent):
    """An actor and a critic that see what a GRU makes of all observations of the episode so far."""

    in_keys = ("observation", "memory")
    out_keys = ("logits", ("next", "memory"))

    def __init__(self, num_observations: int, num_actions: int, hidden_size: int) -> None:
        super().__init__(hidden_size, num_actions, hidden_size)
        self.gru = nn.GRU(num_observations, hidden_size, batch_first=True)

    def acting(self) -> nn.Module:
        return Remembering(self.gru, self.actor)

    def worths(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        # What the GRU made of an observation is the memory that it left to the next step.
        following = batch["next"]
        later = remember(self.gru, following["observation"], following["memory"])
        return self.critic(following["memory"]).squeeze(-1), self.critic(later).squeeze(-1)

    def rows(self, batch: TensorDict) -> TensorDict:
        # Pieces of one episode each, padded to the longest; the mask says what is no padding.
        return split_trajectories(batch).select(*LEARNED_FROM, "memory", MASK)

    def forward(self, rows: TensorDict) -> tuple[TensorDict, Tensor, Tensor]:
        begin = rows["memory"][:, 0].unsqueeze(0).contiguous()
        mask = rows[MASK]
        made = self.gru(rows["observation"], begin)[0][mask]
        return rows[mask], self.actor(made), self.critic(made).squeeze(-1)


class Remembering(nn.Module):
    """One step of the GRU, and the actor on what it made."""

    def __init__(self, gru: nn.GRU, actor: nn.Module) -> None:
        super().__init__()
        self.gru, self.actor = gru, actor

    def forward(self, observation: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits, and the memory for the next step.

        The collector calls it once without a memory, to see what one is; then it begins each
        episode with zeros.
        """
        memory = remember(self.gru, observation, memory)
        return self.actor(memory), memory


def remember(gru: nn.GRU, observation: Tensor, memory: Tensor | None) -> Tensor:
    """One step of a GRU, for any batch shape; without a memory it begins with zeros."""
    steps = observation.reshape(-1, 1, observation.shape[-1])
    before = None if memory is None else memory.reshape(1, len(steps), gru.hidden_size)
    made, _ = gru(steps, before)
    return made.reshape(*observation.shape[:-1], gru.hidden_size)


def make_policy(agent: Agent) -> ProbabilisticTensorDictSequential:
    """Wrap the actor: write "logits", "action" and "action_log_prob", and hand a memory on."""
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
    """Advantages and value targets of a ``(num_envs, num_steps)`` batch.

    A step that terminated the episode has no future, so nothing is bootstrapped there. A step
    that was truncated has one that simply was not played: its value is taken from the episode's
    true last observation, which the batch keeps in ("next", "observation"). Either way the sum
    over later steps is cut, since the next row belongs to another episode.
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
    """Returns of the episodes that end in the batch, in the order in which they end.

    ``running`` holds the return so far of each environment's current episode. It is updated in
    place, so that an episode may span any number of batches.
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
    """CartPole without its velocities: where the cart is, and the angle of the pole."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, gym.spaces.Box)
        self.observation_space = gym.spaces.Box(space.low[::2], space.high[::2], dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Every second number of CartPole's observation is a velocity."""
        return observation[::2]


def make_env(config: Config) -> GymEnv:
    """One environment."""
    env = gym.make(config.env_id)
    return GymEnv(Positions(env) if config.recurrent else env, categorical_action_encoding=True)


def make_collector(config: Config, policy: nn.Module) -> Collector | MultiSyncCollector:
    """Batches of shape ``(num_envs, num_steps)``."""
    make = partial(make_env, config)
    frames_per_batch = config.num_envs * config.num_steps
    if not config.workers:
        # It acts with the learner's very weights, so nothing has to be sent after an update.
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
        cat_results=0,  # the workers' environments behind each other: (num_envs, num_steps)
        update_at_each_batch=True,  # each batch is collected with the weights of then
    )


def make_evaluator(
    config: Config, policy: nn.Module, evaluations: list[tuple[int, float]]
) -> Evaluator | None:
    """Evaluates the policy, if that is asked for, and notes each result."""
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
    """Train until the target is reached or the frames are spent."""
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
    collect_seconds, learn_seconds = 0.0, 0.0
    clock = time.perf_counter()

    for batch in collector:
        collect_seconds += time.perf_counter() - clock
        clock = time.perf_counter()

        # Keep the score.
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
                f" | {frames / seconds:>7,.0f} frames/s"
                f" ({frames / collect_seconds:,.0f} while collecting)",
                flush=True,
            )
            curve.append((frames, mean_return))
            next_log = frames + config.log_every
            if evaluator is not None:
                # It takes the weights of now. If the last one still runs, this one is left out.
                evaluator.trigger_eval(step=frames)
        if solved:
            break

        # Learn from the batch: in pieces that may be shuffled, take clipped steps on minibatches.
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

                # The lower of the two keeps the ratio from gaining by leaving the clip range.
                clipped = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
                policy_loss = -torch.min(ratio * gain, clipped * gain).mean()
                value_loss = (value - part["target"]).square().mean()
                entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
                loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy

                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), config.max_grad_norm)
                optimizer.step()

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
