"""Parts of a collector's time, what can limit its rate, and why workers are not asked for batches.

The parts are measured in ``rollout/times.py`` and ``collectors/watch/times.py``. From them,
``bottleneck.py`` finds which of the ``LIMITS`` holds. ``collectors/workers/scheduler.py`` finds the
:class:`Hold` of a worker, whose time is the span "wait" (``collectors/watch/tracer.py``).

Other waits have no name here:

- for more environments that are ready, before a policy acts in them: ``Batching.patience``
  (``rollout/ready/serving.py``);
- with ``preemptive_threshold``, for interrupted workers: ``_GRACE`` in the scheduler;
- of new weights, for a batch that was requested ahead: ``WeightSender.holding``
  (``collectors/workers/weight_sender.py``);
- for the replacement of a dead worker: "restart" in timelines (``collectors/workers/pool.py``).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

#: Parts of the time of a worker, or of a collector without workers, by their names in ``stats()``.
WORKER_PARTS = {
    "env": "steps and resets of the environments",
    "policy": "calls of the policy",
    "overhead": "preparing and finishing batches",
    "weights": "loading new weights",
    "idle": "waiting for the next request; without workers: waiting for your next call",
}
#: Parts of the time of the driver thread, which takes batches from a collector.
DRIVER_PARTS = {
    "learner": "code between batches: your own, or that of the command, which writes the dataset",
    "wait": "waiting until a batch is ready",
    "driver": "other work of the collector, such as joining the workers' parts, `postproc`, or "
    "writing into a replay buffer",
}


class Limit(NamedTuple):
    """Part that can limit the rate of a collection.

    Attributes:
        subject: beginning of a sentence about it.
        when: condition.
        remedy: sentence that says what to do, without the full stop.
        alone: the remedy for a collector without workers, if it is another one.
    """

    subject: str
    when: str
    remedy: str
    alone: str | None = None


#: What can limit the rate, by the name of the part; the first one whose condition holds does.
LIMITS = {
    "learner": Limit(
        "The learner",
        "the driver thread spends more time in your own code than in the collector's work or "
        "waiting",
        "Let workers collect while it learns (`prefetch=1`, or an asynchronous collector), or make "
        "its updates faster",
        "Let workers collect while it learns (`MultiAsyncCollector`), or make its updates faster",
    ),
    "driver": Limit(
        "The driver",
        "the driver thread spends more time in the collector's work than in your own code or "
        "waiting",
        "Use larger batches (`frames_per_batch`) or a cheaper `postproc`, or let workers write "
        "into a shared replay buffer",
    ),
    "straggler": Limit(
        "One worker",
        "one worker is busy much longer than the others, which wait for it",
        "Use an asynchronous collector or `preemptive_threshold`, or find out why its environment "
        "is slow",
    ),
    "environment": Limit(
        "The environment",
        "workers mostly step environments",
        "Use more workers if there are idle cores, or a faster environment",
        "Use workers (`MultiSyncCollector`) or a `ParallelEnv` if there are idle cores, or a "
        "faster environment",
    ),
    "policy": Limit(
        "The policy",
        "workers mostly call the policy",
        "Use more environments per worker, so that one call acts for many of them, a smaller "
        "policy, or `compile_policy=True`",
    ),
    "weights": Limit(
        "Loading new weights",
        "workers mostly load new weights",
        "Send weights less often, or send smaller weights",
    ),
    "overhead": Limit(
        "The overhead of batches",
        "workers mostly prepare batches, or wait for requests to arrive",
        "Use larger batches (`frames_per_batch`)",
    ),
}


class Hold(Enum):
    """Reason why a worker is not asked for another batch, so that it may be idle.

    Attributes:
        label: the name of the reason in timelines; that of an option, if it decides.
        why: the reason.
    """

    TOGETHER = (
        "together",
        "with `sync=True`, workers begin each batch together: other workers still make the last "
        "one, or you have not asked for the next one",
    )
    TAKEN = (
        "taken",
        "with `sync=False`, the worker is asked for its next batch but one when you take a batch",
    )
    SAMPLES = "samples_per_insert", "the learner has to draw more samples first"
    LAG = "max_policy_lag", "the batch could become too old before you get it"
    FRAMES = "total_frames", "the frames that are left are under way"
    OUTER = (
        "outer",
        "the worker belongs to a worker with workers of its own, which has not been asked for more",
    )

    def __init__(self, label: str, why: str) -> None:
        self.label, self.why = label, why
