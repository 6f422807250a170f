"""``num_collectors="auto"`` and ``num_workers="auto"``."""

from __future__ import annotations

import itertools
import json
import time
from functools import partial
from pathlib import Path

import gymnasium
import pytest
import torch
from tuning_parts import Linear

from trawl import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from trawl.collectors import AsyncCollector
from trawl.collectors.distributed import DistributedCollector
from trawl.collectors.tuning import workers
from trawl.collectors.tuning.halving import Halving
from trawl.collectors.tuning.probe import Probe, mostly_waits, probe
from trawl.collectors.tuning.trial import measure, undisturbed
from trawl.testing import FaultyEnv, NumberedEnv


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The cache is in an empty folder, and only the smallest search is made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(workers, "SECONDS", 1.0)
    return tmp_path / "trawl" / "workers.json"


@pytest.fixture
def searches(monkeypatch):
    """The numbers of workers that were measured; the measurements are real."""
    seen = []

    def counted(make, seconds, *more):
        def noted():
            collector = make()
            seen.append(collector.num_workers)
            return collector

        return measure(noted, 0.0, *more)

    monkeypatch.setattr(workers, "measure", counted)
    # The search has a clock of its own, so that each number is measured on every machine.
    ticks = itertools.count(0.0, 0.05)
    monkeypatch.setattr(workers, "Halving", partial(Halving, clock=lambda: next(ticks)))
    monkeypatch.setattr(workers, "_counts", lambda waits: [2, 1])
    return seen


def one_number():
    return gymnasium.make("MountainCarContinuous-v0")


def auto(cls=MultiSyncCollector, source=NumberedEnv, policy=None, **options):
    options = {"num_workers": "auto", "frames_per_batch": 20, **options}
    return cls(source, policy, **options)


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_the_number_is_measured_once(cls, searches, cache):
    with auto(cls, total_frames=40) as collector:
        count = collector.num_workers
        assert sum(batch.numel() for batch in collector) == 40
    assert set(searches) == {1, 2}
    assert count in (1, 2)
    (stored,) = json.loads(cache.read_text())["workers"].values()
    assert stored == count
    searches.clear()
    with auto(cls) as collector:
        assert collector.num_workers == count
    assert not searches


def test_collector_takes_it_too(searches):
    with Collector(NumberedEnv, num_collectors="auto", frames_per_batch=20) as collector:
        assert type(collector) is MultiAsyncCollector
    with Collector(
        NumberedEnv, num_collectors="auto", sync=True, frames_per_batch=20, backend="process"
    ) as collector:
        assert type(collector) is MultiSyncCollector
    with MultiCollector(NumberedEnv, num_workers="auto", sync=False, frames_per_batch=20) as same:
        assert type(same) is MultiAsyncCollector


@pytest.mark.parametrize(
    "change",
    [
        {"source": partial(NumberedEnv, 1)},
        {"policy": Linear(5)},
        {"frames_per_batch": 30},
        {"create_env_kwargs": {"lengths": [5]}},
        {"cls": MultiAsyncCollector},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_arguments_are_measured_anew(change, cache, monkeypatch):
    counts = iter([(1, True), (2, True)])
    monkeypatch.setattr(workers, "_search", lambda *arguments: next(counts))
    if "policy" in change:
        monkeypatch.setattr(MultiSyncCollector.__base__.__base__, "__init__", lambda *a, **k: None)
        for policy in (Linear(4), change["policy"]):
            workers.auto_workers(None, True, NumberedEnv, policy, {"frames_per_batch": 20})
    else:
        for more in ({}, change):
            with auto(**more):
                pass
    assert list(json.loads(cache.read_text())["workers"].values()) == [1, 2]


def test_a_driver_s_options_change_nothing(cache, monkeypatch):
    counts = iter([(1, True)])
    monkeypatch.setattr(workers, "_search", lambda *arguments: next(counts))
    for more in ({}, {"total_frames": 100, "postproc": lambda batch: batch}):
        with auto(**more) as collector:
            assert collector.num_workers == 1
    assert len(json.loads(cache.read_text())["workers"]) == 1


def test_without_identity_nothing_is_stored(searches, cache):
    class Odd:
        __slots__ = ()

        def __call__(self):
            return NumberedEnv()

    for _ in range(2):
        searches.clear()
        with auto(source=Odd()):
            pass
        assert searches
    assert not cache.exists()


def test_an_incomplete_search_is_not_stored(cache, monkeypatch):
    monkeypatch.setattr(workers, "_search", lambda *arguments: (2, False))
    with auto() as collector:
        assert collector.num_workers == 2
    assert not cache.exists()


def test_a_number_that_no_machine_like_this_has_is_ignored(cache, monkeypatch):
    monkeypatch.setattr(workers, "_search", lambda *arguments: (1, True))
    with auto():
        pass
    text = json.loads(cache.read_text())
    text["workers"] = dict.fromkeys(text["workers"], 100_000)
    cache.write_text(json.dumps(text))
    with auto() as collector:
        assert collector.num_workers == 1


def test_a_cache_that_cannot_be_used_is_only_a_warning(cache, monkeypatch):
    monkeypatch.setattr(workers, "_search", lambda *arguments: (1, True))
    cache.parent.parent.joinpath("trawl").write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="workers.json"), auto() as collector:
        assert collector.num_workers == 1


def test_the_search_leaves_no_trace(searches):
    threads = torch.get_num_threads()
    buffer, hooks = [], []

    class Buffer:
        def extend(self, batch):
            buffer.append(batch)

    factory = partial(gymnasium.make, "Pendulum-v1")
    with auto(
        source=factory, policy_factory=partial(Linear, 3), replay_buffer=Buffer(),
        pre_collect_hook=partial(hooks.append, 1), start_method="inline",
    ):  # fmt: skip
        assert searches
        assert not buffer
        assert not hooks
    assert torch.get_num_threads() == threads


def test_the_search_draws_no_random_numbers(searches):
    policy = Linear(2, draws=True)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    options = {"frames_per_batch": 4, "start_method": "inline"}
    workers.auto_workers(MultiSyncCollector, True, one_number, policy, options)
    assert searches
    assert torch.equal(torch.rand(2), expected)
    assert policy.calls == 0


def test_errors_of_workers_are_raised_as_they_are(searches, cache):
    with pytest.raises(ZeroDivisionError, match=r"in worker \d"):
        auto(source=lambda: FaultyEnv(at=0, fault=ZeroDivisionError("no")))
    assert not cache.exists()


def test_wrong_options_are_reported_before_the_search(searches):
    with pytest.raises(TypeError, match="unknown arguments: totl_frames"):
        auto(totl_frames=3)
    with pytest.raises(TypeError, match="needs the argument frames_per_batch"):
        MultiSyncCollector(NumberedEnv, num_workers="auto")
    assert not searches


def test_one_source_is_needed():
    with pytest.raises(TypeError, match="is a list of 2"):
        auto(source=[NumberedEnv, NumberedEnv])
    with pytest.raises(TypeError, match="is an existing environment"):
        auto(source=NumberedEnv())


@pytest.mark.parametrize("value", ["all", "2"])
def test_other_texts_are_refused(value):
    with pytest.raises(TypeError, match=f"or 'auto', but it is '{value}'"):
        auto(num_workers=value)
    with pytest.raises(TypeError, match=f"or 'auto', but it is '{value}'"):
        Collector(NumberedEnv, num_collectors=value, frames_per_batch=20)


@pytest.mark.parametrize("backend", ["direct", "ray", "rpc", "distributed", "submitit"])
def test_other_backends_need_a_number(backend):
    with pytest.raises(ValueError, match=f"backend '{backend}': pass a number"):
        Collector(NumberedEnv, num_collectors="auto", backend=backend, frames_per_batch=20)


def test_clusters_need_a_number():
    with pytest.raises(TypeError, match="num_workers must be an integer"):
        DistributedCollector(NumberedEnv, num_workers="auto", frames_per_batch=20)


def test_an_async_collector_has_one_worker():
    with pytest.raises(ValueError, match="num_workers=auto"):
        AsyncCollector(NumberedEnv, num_workers="auto", frames_per_batch=20)


def test_batches_of_slow_environments_are_shortened():
    slow, quick = Probe(0.01, 0, True), Probe(1e-6, 0, False)
    assert workers._short_batch(1000, slow, [2, 4]) == 28
    assert workers._short_batch(1000, quick, [2, 4]) == 1000
    assert workers._short_batch([3, 4], slow, [2]) == [3, 4]
    assert workers._short_batch(1000, Probe(1.0, 8, False), [2]) == 16


def test_more_workers_than_cores_are_tried_for_environments_that_wait(monkeypatch):
    monkeypatch.setattr(workers, "usable_cores", lambda: 2)
    assert workers._counts(waits=False) == [2, 1]
    assert workers._counts(waits=True) == [2, 1, 4, 8, 16]


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(),
    reason="the system doesn't tell how long a process waits for a processor",
)
def test_an_environment_that_computes_does_not_wait():
    # A virtual machine may stand still for a while, which looks like waiting.
    assert any(not probe("Pendulum-v1", None, {}).waits for _ in range(50))


@pytest.mark.parametrize(
    ("ran", "queued", "waits"),
    [(0.1, 0.0, True), (0.1, 0.85, False), (0.6, 0.0, False), (0.2, 0.3, True)],
)
def test_waiting_for_a_processor_does_not_count(ran, queued, waits):
    assert mostly_waits(1.0, ran, queued) is waits


def test_an_environment_that_waits_is_recognised():
    class Waiting(gymnasium.Wrapper):
        def step(self, action):
            time.sleep(0.02)
            return self.env.step(action)

    # On a busy machine, a process may run or queue for longer than it waits.
    seen = (probe(lambda: Waiting(gymnasium.make("CartPole-v1")), None, {}) for _ in range(50))
    found = next(one for one in seen if one.waits)
    assert found.env_batch == 0
    assert found.seconds_per_frame >= 0.02


def test_the_size_of_a_batch_of_environments_is_found():
    with undisturbed():
        seen = probe(lambda: gymnasium.make_vec("CartPole-v1", 3), None, {})
    assert seen.env_batch == 3
