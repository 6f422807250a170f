"""Construction of the collector for ``trawl collect``."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tensordict.nn import InteractionType

from trawl.collectors import Collector, MultiCollector
from trawl.envs.batches.serial import batch_source, build_env
from trawl.extras.cli.arguments import CollectArguments
from trawl.extras.cli.environments import env_source, make_env
from trawl.extras.cli.errors import blamed
from trawl.extras.cli.policies import PolicyLoader
from trawl.extras.cli.references import search_here
from trawl.extras.cli.transforms import given_options, named_transforms

_FRAMES_PER_BATCH = 1000


def make_collector(
    args: CollectArguments, seed: int, stream: int | None = None
) -> Collector | MultiCollector:
    """Makes the collector and sets its seed.

    Args:
        args: arguments of the command.
        seed: seed for the policy's initial weights, and for the collector.
        stream: seed for the collector, if it differs from ``seed``.

    Raises:
        CliError: if the collector can't be made, or the user's environment or policy fails.
    """
    search_here()
    source = env_source(args)
    env = make_env(args, source)
    loader = PolicyLoader(args.policy, seed, args.unsafe_pickle, args.options.frame_stack)
    with ExitStack() as stack, blamed(args.env, args.policy), named_transforms():
        stack.callback(env.close, raise_if_closed=False)
        # Loads the policy even with workers, so that errors are found before the workers start.
        policy = loader(env)
        options: dict[str, Any] = {
            "frames_per_batch": args.frames_per_batch or batch_size(args),
            "total_frames": args.frames,
            "exact_frames": True,
            **given_options(args.options),
        }
        options.pop("trace", None)  # begins when all else has been checked
        if args.deterministic:
            options["exploration_type"] = InteractionType.DETERMINISTIC
        collector: Collector | MultiCollector
        if args.workers:
            env.close()
            each = batch_source(source, args.envs)
            factory = None if policy is None else PolicyFactory(each, loader)
            collector = _with_workers(args, each, factory, options)
        else:
            collector = Collector(env, policy, **options)
        stack.pop_all()
    with ExitStack() as stack, blamed(args.env):
        stack.callback(collector.shutdown, raise_on_error=False)
        collector.set_seed(seed if stream is None else stream)
        stack.pop_all()
    return collector


def _with_workers(
    args: CollectArguments, source: Any, factory: PolicyFactory | None, options: dict[str, Any]
) -> MultiCollector:
    cls: Any = MultiCollector
    if args.backend == "ray":
        from trawl.collectors.distributed import RayCollector as cls
    elif args.backend != "process":
        options = {**options, "start_method": args.backend}
    collector: MultiCollector = cls(
        [source] * args.workers,
        sync=not args.asynchronous,
        policy_factory=factory,
        **options,
    )
    return collector


@dataclass(frozen=True)
class PolicyFactory:
    """Loads the policy in each worker, for the worker's environments."""

    source: Any
    loader: PolicyLoader

    def __call__(self) -> Any:
        """Returns the policy."""
        env = build_env(self.source)
        try:
            return self.loader(env)
        finally:
            env.close(raise_if_closed=False)


def batch_size(args: CollectArguments) -> int:
    """Returns the default size of a batch: the same number of steps from each environment."""
    frames, environments = args.frames, args.envs
    if args.asynchronous:
        frames = math.ceil(frames / args.workers)
    else:
        environments *= max(1, args.workers)
    wanted = min(_FRAMES_PER_BATCH, frames)
    return max(1, wanted // environments) * environments
