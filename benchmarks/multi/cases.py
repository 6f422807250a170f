"""The cases of many processes: who does the same work, at what settings, and Trawl's goals.

TorchRL's settings are the best of those that were tried. `trust_policy=True` and
`auto_register_policy_transforms=False` spare it wrappers, and its workers run on one thread each,
as everybody's do. Beyond that its defaults are best: without its buffers (`use_buffers=False`) it
is as fast with small observations, and slower with images and in `ParallelEnv`; `cat_results`,
`num_threads`, no weight scheme, and `ParallelEnv`'s `consolidate`, `non_blocking`, `memmap` and
`share_individual_td` made no difference that was larger than the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import hand
import peers as single_peers
import work
from harness import HAND, TRAWL, Source
from multi import parallel, peers, ready
from multi.collecting import Collecting, Delivering, Looping, Several, SideBySide
from multi.overlap import CollectingAndLearning, SideBySideAndLearning
from multi.race import Contender, Goal, Measure, Race

WORKERS = 2
FRAMES = 500
ENVS, STEPS = 8, 125
IMAGE_FRAMES = 128
DELIVERED = (32, 128, 512)
# An asynchronous worker may have sent one batch, and have another ready.
AHEAD = 2 * WORKERS
# The parts of batches that each worker of Trawl writes in turn. While one is written, the user
# holds another; asynchronous workers have two of their own, and two are delivered or held.
BLOCKS: dict[peers.Kind, int] = {"sync": 2, "async": 3}

TORCHRL = "TorchRL"
TRUSTED = "trust_policy=True"
WAITING = "not ahead"
TOGETHER = "all together"
ARITHMETIC = "arithmetic"


def hand_single(make: Callable[[], Any], net: Any, frames: int, blocks: int = 1) -> Source:
    """The hand-written loop of one environment."""
    return hand.single(make(), hand.only(net), frames, blocks=blocks)


def hand_vector(net: Any, envs: int, steps: int) -> Source:
    """The hand-written loop of a vector environment."""
    env = single_peers.sync_vector(work.pendulum, envs, copy=False)
    return hand.vector(env, hand.only(net), steps)


def hand_list(net: Any, envs: int, steps: int) -> Source:
    """The hand-written loop of a list of environments."""
    return hand.several([work.pendulum() for _ in range(envs)], hand.only(net), steps)


def hand_subprocesses(net: Any, envs: int, steps: int) -> Source:
    """The hand-written loop of environments that have processes of their own."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    return hand.subprocesses(SubprocVecEnv([work.pendulum] * envs), hand.only(net), steps)


def collecting(
    prepare: Callable[..., Any],
    kind: peers.Kind,
    makes: Sequence[Callable[[], Any]],
    net: Any,
    frames: int,
    **options: Any,
) -> partial[Collecting]:
    """Makes a contestant out of `peers.trawl` or `peers.torchrl`."""
    prepared = partial(prepare, kind, makes, work.acting(net), frames, **options)
    return partial(Collecting, prepared, ahead=1 if kind == "sync" else AHEAD)


def sync2() -> Race:
    net, frames = work.mlp(3, 1), WORKERS * FRAMES
    theirs = [peers.wrapped(work.pendulum)] * WORKERS
    loop = partial(hand_single, work.pendulum, net, FRAMES)
    return Race(
        "sync2",
        "2 workers in lockstep, Pendulum, MLP 2x64",
        (
            Contender(
                TRAWL, collecting(peers.trawl, "sync", [work.pendulum] * WORKERS, net, frames)
            ),
            Contender(HAND, partial(SideBySide, loop, WORKERS), "two side by side"),
            Contender(TORCHRL, collecting(peers.torchrl, "sync", theirs, net, frames), TRUSTED),
        ),
        goals=_speed_goals({HAND: 0.90, TORCHRL: 5.0}),
    )


def async2() -> Race:
    net, frames = work.mlp(3, 1), FRAMES // 2
    theirs = [peers.wrapped(work.pendulum)] * WORKERS
    loop = partial(hand_single, work.pendulum, net, frames)
    return Race(
        "async2",
        "2 workers at their own pace, Pendulum, MLP 2x64",
        (
            Contender(
                TRAWL, collecting(peers.trawl, "async", [work.pendulum] * WORKERS, net, frames)
            ),
            Contender(HAND, partial(SideBySide, loop, WORKERS, stacked=False), "two side by side"),
            Contender(TORCHRL, collecting(peers.torchrl, "async", theirs, net, frames), TRUSTED),
        ),
        goals=_speed_goals({HAND: 0.95, TORCHRL: 5.0}),
    )


def images2() -> Race:
    return _images("images2", "sync", "in lockstep")


def images_async2() -> Race:
    return _images("images_async2", "async", "at their own pace")


def _images(name: str, kind: peers.Kind, pace: str) -> Race:
    net, sync = work.Constant(), kind == "sync"
    frames = WORKERS * IMAGE_FRAMES if sync else IMAGE_FRAMES
    theirs = [peers.wrapped(work.ImageEnv)] * WORKERS
    loop = partial(hand_single, work.ImageEnv, net, IMAGE_FRAMES, BLOCKS[kind])
    return Race(
        name,
        f"2 workers {pace}, 84x84x4 uint8 frames, constant policy",
        (
            Contender(TRAWL, collecting(peers.trawl, kind, [work.ImageEnv] * WORKERS, net, frames)),
            Contender(
                HAND,
                partial(SideBySide, loop, WORKERS, stacked=sync),
                f"two side by side, {BLOCKS[kind]} blocks each",
            ),
            Contender(TORCHRL, collecting(peers.torchrl, kind, theirs, net, frames), TRUSTED),
        ),
        goals=_speed_goals({HAND: 0.75, TORCHRL: 8.0}),
    )


def delivery() -> Race:
    policy = work.acting(work.Constant())

    def sizes(prepare: Callable[..., Any], make: Callable[[], Any]) -> partial[Several]:
        def part(frames: int) -> partial[Delivering]:
            return partial(
                Delivering, partial(prepare, "sync", [make] * WORKERS, policy, WORKERS * frames)
            )

        return partial(Several, {str(frames): part(frames) for frames in DELIVERED})

    measures = {
        f"{key}_{frames}": Measure(f"ms {what}, {WORKERS} x {frames} frames", True, 3)
        for key, what in (
            ("cpu", "of the driver's time"),
            ("late", "from the last step to delivery"),
        )
        for frames in DELIVERED
    }
    theirs = peers.wrapped(work.StampedImageEnv)
    return Race(
        "delivery",
        "What a batch of 84x84x4 uint8 frames costs the driver",
        (
            Contender(TRAWL, sizes(peers.trawl, work.StampedImageEnv)),
            Contender(TORCHRL, sizes(peers.torchrl, theirs), TRUSTED),
        ),
        measures,
        tuple(Goal(f"cpu_{frames}", 1.0) for frames in DELIVERED),
        stretch=2.0,
    )


def vector2() -> Race:
    net, frames = work.mlp(3, 1), WORKERS * ENVS * STEPS
    ours = [partial(peers.serial, work.pendulum, ENVS)] * WORKERS
    theirs = [peers.wrapped_vector(work.pendulum, ENVS)] * WORKERS
    return Race(
        "vector2",
        "2 workers in lockstep, 8 Pendulums each, MLP 2x64",
        (
            Contender(TRAWL, collecting(peers.trawl, "sync", ours, net, frames)),
            Contender(
                HAND,
                partial(SideBySide, partial(hand_vector, net, ENVS, STEPS), WORKERS),
                "two side by side, gymnasium SyncVectorEnv",
            ),
            Contender(
                "hand-written list loop",
                partial(SideBySide, partial(hand_list, net, ENVS, STEPS), WORKERS),
                "two side by side, no vector environment",
            ),
            Contender(
                TORCHRL,
                collecting(peers.torchrl, "sync", theirs, net, frames),
                "gymnasium's SyncVectorEnv in a GymWrapper, trust_policy=True",
            ),
        ),
        goals=_speed_goals({HAND: 0.90}),
    )


def first_batch() -> Race:
    net, frames = work.mlp(3, 1), WORKERS * 100
    theirs = [peers.wrapped(work.pendulum)] * WORKERS
    torchrl = partial(collecting, peers.torchrl, "sync", theirs, net, frames)
    return Race(
        "first_batch",
        "From the constructor's call to the first batch, 2 workers",
        (
            Contender(
                TRAWL, collecting(peers.trawl, "sync", [work.pendulum] * WORKERS, net, frames)
            ),
            Contender(TORCHRL, torchrl(), "spawn, which is its default"),
            Contender(
                "TorchRL, forked", torchrl(start="fork"), "not its default; unsafe with threads"
            ),
        ),
        {"first_batch": Measure("s", less=True, digits=2)},
        (Goal("first_batch", 1.2), Goal("first_batch", 2.5, TORCHRL)),
        fresh=True,
    )


def parallel2() -> Race:
    make = work.pendulum

    def stepping(opening: Callable[..., Any], **options: Any) -> partial[parallel.Stepping]:
        return partial(parallel.Stepping, partial(opening, make, WORKERS, **options))

    sb3 = "Stable-Baselines3"
    return Race(
        "parallel2",
        "ParallelEnv of 2 Pendulums, constant actions",
        (
            Contender(TRAWL, stepping(parallel.open_trawl)),
            Contender(
                HAND, stepping(parallel.open_hand), "shared arrays, a byte through a pipe each way"
            ),
            Contender(TORCHRL, stepping(parallel.open_torchrl), "its defaults"),
            Contender(sb3, stepping(parallel.open_stable_baselines3), "SubprocVecEnv"),
            Contender(
                "Gymnasium",
                stepping(parallel.open_gymnasium),
                "AsyncVectorEnv, SAME_STEP, shared memory, copy=False",
            ),
        ),
        {"steps": Measure("steps/s")},
        (
            Goal("steps", 0.85, HAND),
            Goal("steps", 5.0, TORCHRL),
            Goal("steps", 1.8, "Gymnasium"),
            Goal("steps", 1.5, sb3),
        ),
    )


def parallel16() -> Race:
    make, count, each = work.cartpole, 16, 8

    def stepping(opening: Callable[..., Any], **options: Any) -> partial[parallel.Stepping]:
        return partial(parallel.Stepping, partial(opening, make, count, **options))

    sb3, gym = "Stable-Baselines3", "Gymnasium"
    batched = "Stable-Baselines3, batched by hand"
    return Race(
        "parallel16",
        "ParallelEnv of 16 CartPoles in 2 processes, constant actions",
        (
            Contender(
                TRAWL, stepping(parallel.open_trawl, envs_per_worker=each), "envs_per_worker=8"
            ),
            Contender(
                HAND,
                stepping(parallel.open_hand, each=each),
                "shared arrays, a byte through a pipe each way, 8 environments in each process",
            ),
            Contender(
                sb3, stepping(parallel.open_stable_baselines3), "SubprocVecEnv, 16 processes"
            ),
            Contender(
                batched,
                stepping(parallel.open_stable_baselines3_batched, each=each),
                "DummyVecEnv of 8 environments in each of 2 processes, pipes as in SubprocVecEnv",
            ),
            Contender(
                gym,
                stepping(parallel.open_gymnasium),
                "AsyncVectorEnv, 16 processes, SAME_STEP, shared memory, copy=False",
            ),
        ),
        {"steps": Measure("steps/s")},
        (Goal("steps", 2.0, gym), Goal("steps", 0.9, batched)),
    )


def groups16() -> Race:
    count, frames = 16, 16 * 25
    makes = [partial(work.WaitingPendulum, index) for index in range(count)]

    def turns(groups: int) -> partial[Collecting]:
        policy = work.acting(work.SlowPolicy(count))
        prepared = partial(peers.trawl_parallel, makes, count, policy, frames, groups=groups)
        return partial(Collecting, prepared, ahead=0)

    return Race(
        "groups16",
        "16 environments that wait for 2 ms on average, a policy of 3 ms for all of them",
        (
            Contender(TRAWL, turns(2), "ParallelEnv(groups=2)"),
            Contender(TOGETHER, turns(1), "ParallelEnv(groups=1)"),
            Contender(
                ARITHMETIC,
                partial(parallel.Schedule, count, 2),
                "two groups in turn, if only waiting takes time",
            ),
        ),
        goals=_speed_goals({ARITHMETIC: 0.9}),
        stretch=3.0,
    )


def collected2() -> Race:
    net = work.mlp(3, 1)

    def collector(prepare: Callable[..., Any]) -> partial[Collecting]:
        prepared = partial(prepare, work.pendulum, WORKERS, work.acting(net), WORKERS * STEPS)
        return partial(Collecting, prepared, ahead=0)

    return Race(
        "collected2",
        "Collector of a ParallelEnv of 2 Pendulums, MLP 2x64",
        (
            Contender(TRAWL, collector(peers.trawl_parallel)),
            Contender(
                HAND,
                partial(Looping, partial(hand_subprocesses, net, WORKERS, STEPS)),
                "over Stable-Baselines3's SubprocVecEnv",
            ),
            Contender(TORCHRL, collector(peers.torchrl_parallel), TRUSTED),
        ),
    )


def straggler() -> Race:
    net, slow, quick, alone = work.mlp(3, 1), 1, 15, 12
    makes = [work.slow_pendulum] * slow + [work.pendulum] * quick
    return Race(
        "straggler",
        "16 workers in lockstep, one of which takes 50 ms per step",
        (
            Contender(
                TRAWL,
                collecting(peers.trawl, "sync", makes, net, 16 * FRAMES, preemptive_threshold=0.75),
                "preemptive_threshold=0.75",
            ),
            Contender(
                "12 quick workers",
                collecting(peers.trawl, "sync", [work.pendulum] * alone, net, alone * FRAMES),
                "Trawl's collector, without the slow worker",
            ),
        ),
        goals=_speed_goals({"12 quick workers": 1.0}),
        stretch=2.0,
    )


def prefetch2() -> Race:
    net, frames, make = work.mlp(3, 1), WORKERS * 50, work.waiting_pendulum
    loop = partial(hand_single, make, net, frames // WORKERS)

    def learning(**options: Any) -> partial[CollectingAndLearning]:
        prepared = partial(
            peers.trawl, "sync", [make] * WORKERS, work.acting(net), frames, **options
        )
        return partial(CollectingAndLearning, prepared, net)

    return Race(
        "prefetch2",
        "2 workers and a PPO learner that takes as long; steps of 1 ms that wait",
        (
            Contender(TRAWL, learning(prefetch=1), "prefetch=1"),
            Contender(
                HAND,
                partial(SideBySideAndLearning, loop, WORKERS, frames),
                "two loops, beside which this process learns",
            ),
            Contender(WAITING, learning(), "Trawl's collector with prefetch=0"),
        ),
        goals=_speed_goals({WAITING: 1.7}),
        stretch=2.0,
    )


def snapshots2() -> Race:
    net, frames, make = work.mlp(3, 1), WORKERS * FRAMES, work.pendulum

    def snapping(every: int) -> partial[Collecting]:
        prepared = partial(peers.trawl, worker_snapshots=every)
        return collecting(prepared, "sync", [make] * WORKERS, net, frames)

    return Race(
        "snapshots2",
        "2 workers in lockstep that send snapshots, Pendulum, MLP 2x64",
        (
            Contender(TRAWL, snapping(1), "worker_snapshots=1"),
            Contender("every 10 batches", snapping(10), "worker_snapshots=10"),
            Contender("no snapshots", snapping(0), "worker_snapshots=0"),
        ),
    )


def _speed_goals(bounds: dict[str, float]) -> tuple[Goal, ...]:
    return tuple(Goal("speed", bound, name) for name, bound in bounds.items())


RACES = {
    race.__name__: race
    for race in (
        sync2,
        async2,
        images2,
        images_async2,
        delivery,
        vector2,
        first_batch,
        parallel2,
        parallel16,
        groups16,
        ready.ready16,
        ready.async64,
        ready.async_images,
        collected2,
        straggler,
        prefetch2,
        snapshots2,
    )
}
