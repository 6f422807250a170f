"""The number of workers for ``num_collectors="auto"``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trawl.collectors.tuning.cache import WorkerCache, cache_folder
from trawl.collectors.tuning.candidate import Candidate
from trawl.collectors.tuning.halving import Halving
from trawl.collectors.tuning.identity import digest_of, machine
from trawl.collectors.tuning.probe import Probe, check_source, own_copy, probe
from trawl.collectors.tuning.space import most_processes, powers_of_two, usable_cores
from trawl.collectors.tuning.trial import Measurement, measure, undisturbed

#: Seconds for the measurement.
SECONDS = 10.0
# Seconds that a worker takes for a batch of a trial, if environments are slow.
_BATCH_SECONDS = 0.3
# Options that influence the speed of workers, and that may be used several times. Others belong to
# one collector (schemes, buffers, sinks), or take effect in the driver.
FOR_ANY_COLLECTOR = (
    "auto_register_policy_transforms",
    "compact_obs",
    "compile_policy",
    "create_env_kwargs",
    "cudagraph_policy",
    "device",
    "env_device",
    "exploration_type",
    "frame_stack",
    "max_frames_per_traj",
    "normalize_observations",
    "normalize_rewards",
    "on_env_error",
    "policy_device",
    "policy_factory",
    "reset_at_each_iter",
    "reset_kwargs",
    "storing_device",
    "track_traj_ids",
    "trust_policy",
)
_FOR_WORKERS = (
    "cat_results",
    "collector_class",
    "frames_per_batch",
    "init_fn",
    "num_sub_threads",
    "num_threads",
    "preemptive_threshold",
    "start_method",
)


def measured_options(options: Mapping[str, Any], workers: bool = False) -> dict[str, Any]:
    """Returns the options that a trial takes over.

    Args:
        options: options of a collector.
        workers: True to include the options that only collectors with workers have.
    """
    names = FOR_ANY_COLLECTOR + (_FOR_WORKERS if workers else ())
    return {name: options[name] for name in names if name in options}


def auto_workers(
    cls: Callable[..., Any], sync: bool, source: Any, policy: Any, options: Mapping[str, Any]
) -> int:
    """Returns the number of workers that deliver the most frames per second.

    The number is measured once, and remembered in the user's cache folder.

    Args:
        cls: class of the collector.
        sync: True if all workers together make each batch.
        source: the source of one worker's environment.
        policy: the policy, or None.
        options: options of the collector.

    Raises:
        TypeError: if the source can't be used repeatedly.
        Exception: the error of the first trial, if all trials failed.
    """
    check_source(source, "num_workers='auto'")
    kept = measured_options(options, workers=True)
    key = digest_of(source, policy, kept, sync, machine())
    cache = WorkerCache(cache_folder())
    count = None if key is None else cache.get(key)
    if count is not None and count <= most_processes(usable_cores(), waits=True):
        return count
    with undisturbed():
        count, complete = _search(cls, sync, source, policy, kept)
    if key is not None and complete:
        cache.put(key, count)
    return count


def _search(
    cls: Callable[..., Any], sync: bool, source: Any, policy: Any, kept: dict[str, Any]
) -> tuple[int, bool]:
    """Returns the best number of workers, and True if all numbers were measured."""
    seen = _look(source, policy, kept)
    counts = _counts(waits=seen is not None and seen.waits)
    if seen is not None:
        kept = {**kept, "frames_per_batch": _short_batch(kept["frames_per_batch"], seen, counts)}
    frames = kept["frames_per_batch"]
    total = int(frames if isinstance(frames, int | float) else sum(frames))
    candidates = [Candidate(workers=n, frames_per_batch=total, sync=sync) for n in counts]

    def trial(candidate: Candidate, seconds: float) -> Measurement:
        return measure(lambda: cls(source, policy, num_workers=candidate.workers, **kept), seconds)

    search = Halving(trial, SECONDS)
    try:
        best = search.run(candidates)
    except RuntimeError:
        if search.errors and not search.finalists:
            raise search.errors[0] from None
        raise
    complete = all(each.measured or each.error for each in search.trials.values())
    return best.candidate.workers, complete


def _counts(waits: bool) -> list[int]:
    """Returns the numbers of workers to measure.

    The first is always measured, so it is the number of cores, a good guess if environments start
    so slowly that there is no time for others.
    """
    cores = usable_cores()
    return list(dict.fromkeys([cores, *powers_of_two(most_processes(cores, waits))]))


def _short_batch(frames: Any, seen: Probe, counts: Sequence[int]) -> Any:
    """Returns a number of frames that a worker collects in a short time, at most ``frames``."""
    if not isinstance(frames, int | float):
        return frames
    envs = max(counts) * max(1, seen.env_batch)
    quick = max(envs, int(_BATCH_SECONDS / seen.seconds_per_frame))
    return frames if frames <= quick else quick // envs * envs


def _look(source: Any, policy: Any, kept: Mapping[str, Any]) -> Probe | None:
    """Returns a probe of the environment; None if it can't be made in this process."""
    if "init_fn" in kept:
        return None  # the environment may exist only after this call
    try:
        return probe(source, own_copy(policy), measured_options(kept))
    except Exception:
        return None  # the workers raise the error, if it is one there too
