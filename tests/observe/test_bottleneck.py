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


@pytest.mark.parametrize(
    ("name", "part", "text"),
    [
        ("env", "environment", "The environment limits the rate: it takes 80%"),
        ("policy", "policy", "The policy limits the rate: it takes 80%"),
        ("weights", "weights", "Loading new weights limits the rate: it takes 80%"),
        ("overhead", "overhead", "The overhead of batches limits the rate: it takes 80%"),
    ],
)
def test_the_largest_part_of_the_work_limits(name, part, text):
    shares = dict.fromkeys(("env", "policy", "overhead", "weights"), 0.06) | {name: 0.72}
    for workers in (0, 3):
        found = bottleneck_of(stats(workers, idle=0.1, **shares))
        assert (found.part, found.worker) == (part, None)
        assert found.share == pytest.approx(0.8)
        assert str(found).startswith(text)
        assert "at most 5.0 times as fast" in str(found)
    assert "100 times or more as fast" in str(bottleneck_of(stats(**{name: 1.0})))


SLOW_LEARNER = stats(2, (0.7, 0.25, 0.05), env=0.3, idle=0.7)
STRAGGLER = stats(3, busy=(0.3, 0.95, 0.35), env=0.5, idle=0.5)
FASTER = "Make its updates faster, or save cores with fewer workers."


@pytest.mark.parametrize(
    ("facts", "part", "words"),
    [
        (SLOW_LEARNER, "learner", "70% of the time is spent outside"),
        (SLOW_LEARNER, "learner", "prefetch=1"),
        (SLOW_LEARNER | {"schedule": "prefetch"}, "learner", FASTER),
        (SLOW_LEARNER | {"schedule": "asynchronous"}, "learner", FASTER),
        (stats(0, (0.7, 0.25, 0.05), env=0.3, idle=0.7), "learner",
         "Let workers collect while it learns (MultiAsyncCollector)"),
        # One that never waits.
        (stats(4, (0.95, 0.03, 0.02), env=0.2, idle=0.8), "learner", "fewer workers"),
        (stats(2, (0.1, 0.2, 0.7), env=0.3, idle=0.7), "driver", "frames_per_batch"),
        (STRAGGLER, "straggler",
         "Worker 1 limits the rate: its batches take 2.9 times as long"),
        (STRAGGLER | {"schedule": "prefetch"}, "straggler", "Worker 1 limits"),
        (STRAGGLER | {"schedule": "asynchronous"}, "environment", "The environment limits"),
        # Workers that are never idle have no straggler.
        (stats(2, busy=(1.0, 0.95), env=0.9, idle=0.02), "environment", "The environment limits"),
        # Requests are on their way.
        (stats(2, (0.02, 0.95, 0.03), env=0.3, policy=0.1, idle=0.6), "overhead", ""),
        # One that is mostly idle itself is no straggler.
        (stats(2, (0.0, 0.93, 0.07), busy=(0.19, 0.12), env=0.06, policy=0.05, overhead=0.04,
               idle=0.85), "overhead", "mostly waiting for requests to arrive"),
    ],
)  # fmt: skip
def test_the_sentence_says_what_to_do(facts, part, words):
    found = bottleneck_of(facts)
    assert found.part == part
    assert words in found.sentence
    assert (found.worker == 1) == (part == "straggler")
    assert part not in ("learner", "driver") or found.share in (0.7, 0.95)
    if words == "fewer workers":
        assert "prefetch" not in found.sentence


def test_before_the_first_batch_nothing_is_known():
    found = bottleneck_of({"frames": 0})
    assert (found.part, found.share) == ("unknown", 0)
    assert str(found) == "No batch has been collected yet."
