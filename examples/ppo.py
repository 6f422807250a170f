"""PPO on CartPole-v1, in one file, with a Trawl collector gathering the data.

The agent is a small actor and a small critic in plain PyTorch. A ``Collector`` steps a batch of
environments with the actor and hands over batches of shape ``(num_envs, steps)``; with
``--workers N`` the environments are shared out among N processes, and the batches are the same.
Everything that makes it PPO (generalised advantage estimation, the clipped objective, the update
loop) is written out below and meant to be read from top to bottom.

Training stops as soon as the mean return of the last 100 finished episodes reaches the target
(475, at which CartPole-v1 counts as solved), or when the frame budget is spent.

Run it from the root of the repository::

    python examples/ppo.py
    python examples/ppo.py --seed 3 --num-envs 32
    python examples/ppo.py --workers 2
    python examples/ppo.py --help

or, with ``examples`` on the path, call it::

    from ppo import Config, main
    result = main(Config(seed=3))
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

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

from trawl.collectors import Collector, MultiSyncCollector
from trawl.envs import GymEnv


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


def make_policy(actor: nn.Module) -> ProbabilisticTensorDictSequential:
    """Wrap the actor: read "observation", write "logits", "action" and "action_log_prob"."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(actor, in_keys=["observation"], out_keys=["logits"]),
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
def gae(
    batch: TensorDict, critic: nn.Module, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets of a ``(num_envs, num_steps)`` batch.

    A step that terminated the episode has no future, so nothing is bootstrapped there. A step
    that was truncated has one that simply was not played: its value is taken from the episode's
    true last observation, which the batch keeps in ("next", "observation"). Either way the sum
    over later steps is cut, since the next row belongs to another episode.
    """
    value = critic(batch["observation"]).squeeze(-1)
    next_value = critic(batch["next", "observation"]).squeeze(-1)
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


def main(config: Config) -> Result:
    """Train until the target is reached or the frames are spent."""
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)

    def make_env() -> GymEnv:
        return GymEnv(config.env_id, categorical_action_encoding=True)

    probe = make_env()
    num_observations = probe.observation_spec["observation"].shape[-1]
    num_actions = probe.action_spec.n
    probe.close()

    actor = mlp(num_observations, config.hidden_size, num_actions, output_gain=0.01)
    critic = mlp(num_observations, config.hidden_size, 1, output_gain=1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=config.learning_rate, eps=1e-5, fused=True)

    frames_per_batch = config.num_envs * config.num_steps
    collector: Collector | MultiSyncCollector
    if config.workers:
        if config.num_envs % config.workers:
            raise ValueError(f"{config.num_envs} environments can't be shared by {config.workers}")
        collector = MultiSyncCollector(
            [[make_env] * (config.num_envs // config.workers)] * config.workers,
            make_policy(actor),
            frames_per_batch=frames_per_batch,
            total_frames=config.total_frames,
            cat_results=0,  # the workers' environments behind each other: (num_envs, num_steps)
            update_at_each_batch=True,  # each batch is collected with the weights of then
        )
    else:
        # It acts with these very weights, so nothing has to be sent to it after an update.
        collector = Collector(
            [make_env] * config.num_envs,
            make_policy(actor),
            frames_per_batch=frames_per_batch,
            total_frames=config.total_frames,
        )
    collector.set_seed(config.seed)

    running = torch.zeros(config.num_envs)
    last_returns: deque[float] = deque(maxlen=100)
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
            next_log = frames + config.log_every
        if solved:
            break

        # Learn from the batch: flatten it, then take clipped steps on shuffled minibatches.
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * max(0.0, 1.0 - frames / config.total_frames)
        advantage, target = gae(batch, critic, config.gamma, config.gae_lambda)
        observation = batch["observation"].flatten(0, 1)
        action = batch["action"].flatten()
        old_log_prob = batch["action_log_prob"].flatten()
        advantage, target = advantage.flatten(), target.flatten()

        for _ in range(config.num_epochs):
            for index in torch.randperm(frames_per_batch).split(config.minibatch_size):
                log_probs = actor(observation[index]).log_softmax(-1)
                log_prob = log_probs.gather(-1, action[index].unsqueeze(-1)).squeeze(-1)
                ratio = (log_prob - old_log_prob[index]).exp()
                gain = advantage[index]
                gain = (gain - gain.mean()) / (gain.std(correction=0) + 1e-8)

                # The lower of the two keeps the ratio from gaining by leaving the clip range.
                clipped = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
                policy_loss = -torch.min(ratio * gain, clipped * gain).mean()
                value = critic(observation[index]).squeeze(-1)
                value_loss = (value - target[index]).square().mean()
                entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
                loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy

                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
                optimizer.step()

        learn_seconds += time.perf_counter() - clock
        clock = time.perf_counter()

    collector.shutdown()
    return Result(solved, mean_return, frames, episodes, collect_seconds, learn_seconds)


if __name__ == "__main__":
    print(main(tyro.cli(Config)))
