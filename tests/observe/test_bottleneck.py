"""The sentence that says what limits a collection."""

import pytest

from trawl.observe.bottleneck import bottleneck_of

WORKING = {"env": 0.2, "policy": 0.2, "overhead": 0.1, "weights": 0.0, "idle": 0.5}


def stats(workers=0, driver=(0.1, 0.85, 0.05), busy=None, **shares):
    """Statistics with certain shares of the time."""
    shares = dict.fromkeys(WORKING, 0.0) | shares
    facts = {f"{name}_share": share for name, share in shares.items()}
    names = ("learner", "wait", "driver")
    facts |= {f"{name}_share": share for name, share in zip(names, driver, strict=True)}
    if workers:
        facts["workers"] = workers
        for index in range(workers):
            own = shares["idle"] if busy is None else 1 - busy[index]
            facts[f"worker_{index}/idle_share"] = own
    return facts


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize(
    ("name", "part", "text"),
    [
        ("env", "environment", "The environment limits the rate: it takes 80%"),
        ("policy", "policy", "The policy limits the rate: it takes 80%"),
        ("weights", "weights", "Loading new weights limits the rate: it takes 80%"),
        ("overhead", "overhead", "The overhead of batches limits the rate: it takes 80%"),
    ],
)
def test_the_largest_part_of_the_work_limits(name, part, text, workers):
    shares = dict.fromkeys(("env", "policy", "overhead", "weights"), 0.06) | {name: 0.72}
    found = bottleneck_of(stats(workers, idle=0.1, **shares))
    assert found.part == part
    assert found.share == pytest.approx(0.8)
    assert str(found).startswith(text)
    assert "at most 5.0 times as fast" in str(found)
    assert found.worker is None


def test_a_learner_that_collection_waits_for_should_overlap_with_it():
    found = bottleneck_of(stats(2, (0.7, 0.25, 0.05), env=0.3, idle=0.7))
    assert found.part == "learner"
    assert found.share == 0.7
    assert "70% of the time is spent outside" in found.sentence
    assert "prefetch=1" in found.sentence


@pytest.mark.parametrize("schedule", ["prefetch", "asynchronous"])
def test_a_learner_that_workers_collect_ahead_of_must_become_faster(schedule):
    facts = stats(2, (0.7, 0.25, 0.05), env=0.3, idle=0.7) | {"schedule": schedule}
    found = bottleneck_of(facts)
    assert found.part == "learner"
    assert found.sentence.endswith("Make its updates faster, or save cores with fewer workers.")


def test_without_workers_the_learner_needs_some():
    found = bottleneck_of(stats(0, (0.7, 0.25, 0.05), env=0.3, idle=0.7))
    assert "Let workers collect while it learns (MultiAsyncCollector)" in found.sentence


def test_an_asynchronous_collector_has_no_straggler():
    facts = stats(3, busy=(0.3, 0.95, 0.35), env=0.5, idle=0.5)
    assert bottleneck_of(facts | {"schedule": "prefetch"}).part == "straggler"
    assert bottleneck_of(facts | {"schedule": "asynchronous"}).part == "environment"


def test_a_learner_that_never_waits_must_become_faster():
    found = bottleneck_of(stats(4, (0.95, 0.03, 0.02), env=0.2, idle=0.8))
    assert found.part == "learner"
    assert "prefetch" not in found.sentence
    assert "fewer workers" in found.sentence


def test_the_driver_limits_if_its_own_work_takes_longest():
    found = bottleneck_of(stats(2, (0.1, 0.2, 0.7), env=0.3, idle=0.7))
    assert found.part == "driver"
    assert found.share == 0.7
    assert "frames_per_batch" in found.sentence


def test_a_worker_that_others_wait_for_is_named():
    found = bottleneck_of(stats(3, busy=(0.3, 0.95, 0.35), env=0.5, idle=0.5))
    assert (found.part, found.worker) == ("straggler", 1)
    assert "Worker 1 limits the rate: its batches take 2.9 times as long" in found.sentence


def test_workers_that_are_never_idle_have_no_straggler():
    found = bottleneck_of(stats(2, busy=(1.0, 0.95), env=0.9, idle=0.02))
    assert found.part == "environment"


def test_time_in_which_requests_are_on_their_way_is_overhead():
    found = bottleneck_of(stats(2, (0.02, 0.95, 0.03), env=0.3, policy=0.1, idle=0.6))
    assert found.part == "overhead"


def test_a_worker_that_is_mostly_idle_itself_is_no_straggler():
    shares = {"env": 0.06, "policy": 0.05, "overhead": 0.04, "idle": 0.85}
    found = bottleneck_of(stats(2, (0.0, 0.93, 0.07), busy=(0.19, 0.12), **shares))
    assert found.part == "overhead"
    assert "mostly waiting for requests to arrive" in found.sentence


def test_before_the_first_batch_nothing_is_known():
    found = bottleneck_of({"frames": 0})
    assert (found.part, found.share) == ("unknown", 0)
    assert str(found) == "No batch has been collected yet."


def test_a_part_that_takes_everything_has_no_bound():
    assert "100 times or more as fast" in str(bottleneck_of(stats(env=1.0)))
