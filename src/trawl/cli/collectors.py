"""Construction of the collector for ``trawl collect``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tensordict.nn import InteractionType

from trawl.cli.arguments import Collect
from trawl.cli.environments import env_source, make_env
from trawl.cli.errors import CliError, blame
from trawl.cli.policies import load_policy
from trawl.cli.references import search_here
from trawl.collectors import Collector, MultiCollector
from trawl.envs.serial import build_env

_FRAMES_PER_BATCH = 1000


def make_collector(
    args: Collect, seed: int, stream: int | None = None
) -> Collector | MultiCollector:
    """Makes the collector and sets its seed.

    Args:
        args: arguments of the command.
        seed: seed for making the policy, and for the collector.
        stream: seed of the collector, if it is another than ``seed``.

    Raises:
        CliError: if the collector can't be made, or the user's environment or policy fails.
    """
    search_here()
    source = env_source(args)
    env = make_env(args, source)
    try:
        # Also with workers, so that an error is found before they start.
        policy = load_policy(args.policy, env, seed, args.unsafe_pickle)
        options: dict[str, Any] = {
            "frames_per_batch": args.frames_per_batch or batch_size(args),
            "total_frames": args.frames,
            "max_frames_per_traj": args.max_frames_per_traj,
        }
        if args.deterministic:
            options["exploration_type"] = InteractionType.DETERMINISTIC
        collector: Collector | MultiCollector
        if args.workers:
            env.close(raise_if_closed=False)
            each = [source] * args.envs if args.envs > 1 else source
            collector = _with_workers(args, each, seed, options, acts=policy is not None)
        else:
            collector = Collector(env, policy, **options)
    except CliError:
        env.close(raise_if_closed=False)
        raise
    except Exception as error:
        env.close(raise_if_closed=False)
        raise blame(error, args.env, args.policy) from error
    try:
        collector.set_seed(seed if stream is None else stream)
    except Exception as error:
        collector.shutdown(raise_on_error=False)
        raise blame(error, args.env) from error
    return collector


def _with_workers(
    args: Collect, source: Any, seed: int, options: dict[str, Any], acts: bool
) -> MultiCollector:
    factory = PolicyFactory(args.policy, source, seed, args.unsafe_pickle)
    cls: Any = MultiCollector
    if args.backend == "ray":
        from trawl.collectors.distributed import RayCollector as cls
    collector: MultiCollector = cls(
        [source] * args.workers,
        sync=not args.asynchronous,
        policy_factory=factory if acts else None,
        **options,
    )
    return collector


@dataclass(frozen=True)
class PolicyFactory:
    """Loads the policy anew in each worker, because not every policy can be sent there."""

    policy: str
    source: Any
    seed: int
    unsafe_pickle: bool

    def __call__(self) -> Any:
        """Returns the policy."""
        env = build_env(self.source)
        try:
            return load_policy(self.policy, env, self.seed, self.unsafe_pickle)
        finally:
            env.close(raise_if_closed=False)


def batch_size(args: Collect) -> int:
    """Returns the default size of a batch: a whole number of steps of its environments."""
    frames, environments = args.frames, args.envs
    if args.asynchronous:
        frames = math.ceil(frames / args.workers)
    else:
        environments *= max(1, args.workers)
    wanted = min(_FRAMES_PER_BATCH, frames)
    return max(1, wanted // environments) * environments
