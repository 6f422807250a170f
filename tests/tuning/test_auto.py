"""``num_collectors="auto"`` and ``num_workers="auto"``, and what they remember."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import gymnasium
import pytest
import torch
from torch import nn
from tuning_parts import Linear

from trawl import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from trawl.collectors import AsyncCollector
from trawl.collectors.distributed import DistributedCollector
from trawl.collectors.tuning import workers
from trawl.collectors.tuning.cache import WorkerCache, cache_folder
from trawl.collectors.tuning.halving import Halving
from trawl.collectors.tuning.identity import digest_of, machine
from trawl.collectors.tuning.probe import Probe, mostly_waits, probe
from trawl.collectors.tuning.trial import Measurement, measure, undisturbed
from trawl.testing import FaultyEnv, NumberedEnv


class Search:
    """A search on a machine of two cores, on which two workers are faster than one.

    Attributes:
        seen: number of workers and size of a batch of each measurement.
        rates: frames per second by number of workers.
        tick: seconds that pass between two looks at the clock.
        probe: what is found of the environment; None to look at it.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.seen: list[tuple[int, int]] = []
        self.rates = {1: 100.0, 2: 200.0}
        self.tick = 0.5
        self.probe: Probe | None = None
        self._now = 0.0

    def clock(self) -> float:
        self._now += self.tick
        return self._now

    def measure(self, make, seconds, *more):
        def noted():
            collector = make()
            self.seen.append((collector.num_workers, collector.config.frames_per_batch))
            return collector

        found = measure(noted, 0.0, *more)
        rate = self.rates.get(self.seen[-1][0], 1.0)
        return Measurement(100, 100 / rate, found.shares)

    def look(self, *arguments):
        return self.probe or probe(*arguments)

    @property
    def stored(self) -> list[int]:
        return list(json.loads(self.cache.read_text())["workers"].values())


@pytest.fixture
def search(tmp_path, monkeypatch):
    found = Search(tmp_path / "trawl" / "workers.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(workers, "measure", found.measure)
    monkeypatch.setattr(workers, "probe", found.look)
    monkeypatch.setattr(workers, "Halving", partial(Halving, clock=found.clock))
    monkeypatch.setattr(workers, "most_processes", lambda cores, waits: 4 if waits else 2)
    monkeypatch.setattr(workers, "usable_cores", lambda: 2)
    found.probe = Probe(1e-6, 0, False)
    return found


def auto(cls=MultiSyncCollector, source=NumberedEnv, policy=None, **options):
    options = {"num_workers": "auto", "frames_per_batch": 20, "start_method": "inline", **options}
    return cls(source, policy, **options)


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_the_number_is_measured_once(cls, search):
    for best in (2, 1):
        search.rates = {3 - best: 100.0, best: 200.0}
        with auto(cls, total_frames=40) as collector:
            assert collector.num_workers == best
            assert sum(batch.numel() for batch in collector) == 40
        assert {count for count, _ in search.seen} == {1, 2}
        assert search.stored == [best]
        search.seen.clear()
        # What only the driver does changes nothing.
        with auto(cls, total_frames=100, postproc=lambda batch: batch) as collector:
            assert collector.num_workers == best
        assert not search.seen
        # A number that no machine like this has is measured anew.
        text = json.loads(search.cache.read_text())
        text["workers"] = dict.fromkeys(text["workers"], 5)
        search.cache.write_text(json.dumps(text))


def test_collector_takes_it_too(search):
    options = {"num_collectors": "auto", "frames_per_batch": 20, "start_method": "inline"}
    with Collector(NumberedEnv, **options) as collector:
        assert type(collector) is MultiAsyncCollector
    with Collector(NumberedEnv, sync=True, backend="process", **options) as collector:
        assert type(collector) is MultiSyncCollector
    with auto(MultiCollector, sync=False) as same:
        assert type(same) is MultiAsyncCollector


@pytest.mark.parametrize(
    "change",
    [
        {"source": partial(NumberedEnv, 1)},
        {"policy_factory": partial(lambda width: lambda observation: torch.eye(4)[0], 3)},
        {"frames_per_batch": 30},
        {"create_env_kwargs": {"lengths": [5]}},
        {"cls": MultiAsyncCollector},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_arguments_are_measured_anew(change, search):
    for more in ({}, change):
        search.seen.clear()
        with auto(**more):
            assert search.seen
    assert search.stored == [2, 2]


def test_without_identity_or_time_for_all_nothing_is_stored(search):
    class Odd:
        __slots__ = ()

        def __call__(self):
            return NumberedEnv()

    search.tick = 8.0
    with auto() as collector:
        assert collector.num_workers == 2
    assert {count for count, _ in search.seen} == {2}
    search.tick = 0.5
    for _ in range(2):
        search.seen.clear()
        with auto(source=Odd()):
            assert search.seen
    assert not search.cache.exists()


def test_a_cache_that_cannot_be_used_is_only_a_warning(search):
    search.cache.parent.write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="workers.json"), auto() as collector:
        assert collector.num_workers == 2


@pytest.mark.parametrize(
    ("found", "frames", "measured"),
    [
        (Probe(1e-6, 0, False), 1000, {(2, 1000), (1, 1000)}),
        (Probe(0.01, 0, False), 1000, {(2, 30), (1, 30)}),
        (Probe(0.01, 0, True), 1000, {(2, 28), (1, 28), (4, 28)}),
        (Probe(1.0, 8, False), 1000, {(2, 16), (1, 16)}),
        (Probe(0.01, 0, False), [3, 4], {(2, 7)}),
    ],
    ids=["quick", "slow", "waits", "batched", "list"],
)
def test_batches_of_slow_environments_are_short_and_those_that_wait_get_more_workers(
    found, frames, measured, search
):
    search.probe = found
    with auto(frames_per_batch=frames, cat_results=-1):
        pass
    seen = {(count, size if isinstance(size, int) else sum(size)) for count, size in search.seen}
    assert seen == measured


def test_the_search_leaves_no_trace(search):
    threads, buffer, hooks, policy = torch.get_num_threads(), [], [], Linear(3, draws=True)
    search.probe = None
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)

    class Buffer:
        def extend(self, batch):
            buffer.append(batch)

    options = {"replay_buffer": Buffer(), "pre_collect_hook": partial(hooks.append, 1)}
    options |= {"frames_per_batch": 4, "start_method": "inline"}
    source = partial(gymnasium.make, "Pendulum-v1")
    workers.auto_workers(MultiSyncCollector, True, source, policy, options)
    assert search.seen
    assert (buffer, hooks, policy.calls, torch.get_num_threads()) == ([], [], 0, threads)
    assert torch.equal(torch.rand(2), expected)


def test_errors_of_workers_are_raised_as_they_are(search):
    with pytest.raises(ZeroDivisionError, match=r"in worker \d"):
        auto(source=lambda: FaultyEnv(at=0, fault=ZeroDivisionError("no")))
    assert not search.cache.exists()


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: auto(totl_frames=3), TypeError, "unknown arguments: totl_frames"),
        (
            lambda: MultiSyncCollector(NumberedEnv, num_workers="auto"),
            TypeError,
            "needs the argument frames_per_batch",
        ),
        (lambda: auto(source=[NumberedEnv, NumberedEnv]), TypeError, "is a list of 2"),
        (lambda: auto(source=NumberedEnv()), TypeError, "is an existing environment"),
        (lambda: auto(num_workers="all"), TypeError, "or 'auto', but it is 'all'"),
        (
            lambda: Collector(NumberedEnv, num_collectors="2", frames_per_batch=20),
            TypeError,
            "or 'auto', but it is '2'",
        ),
        (
            lambda: DistributedCollector(NumberedEnv, num_workers="auto", frames_per_batch=20),
            TypeError,
            "num_workers must be an integer",
        ),
        (lambda: auto(AsyncCollector), ValueError, "num_workers=auto"),
    ],
)
def test_wrong_arguments_are_reported_before_the_search(make, error, match, search):
    with pytest.raises(error, match=match):
        make()
    assert not search.seen


@pytest.mark.parametrize("backend", ["direct", "ray", "rpc", "distributed", "submitit"])
def test_other_backends_need_a_number(backend):
    with pytest.raises(ValueError, match=f"backend '{backend}', .*: pass a number"):
        Collector(NumberedEnv, num_collectors="auto", backend=backend, frames_per_batch=20)


# --- the look at an environment


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(),
    reason="the system doesn't tell how long a process waits for a processor",
)
def test_an_environment_that_computes_does_not_wait():
    # A virtual machine may stand still for a while, which looks like waiting.
    assert any(not probe("Pendulum-v1", None, {}).waits for _ in range(50))


def test_waiting_for_a_processor_does_not_count():
    times = [(0.1, 0.0, True), (0.1, 0.85, False), (0.6, 0.0, False), (0.2, 0.3, True)]
    for ran, queued, waits in times:
        assert mostly_waits(1.0, ran, queued) is waits


def test_an_environment_that_waits_is_recognised_and_the_size_of_a_batch_is_found():
    class Waiting(gymnasium.Wrapper):
        def step(self, action):
            time.sleep(0.02)
            return self.env.step(action)

    # On a busy machine, a process may run or queue for longer than it waits.
    seen = (probe(lambda: Waiting(gymnasium.make("CartPole-v1")), None, {}) for _ in range(50))
    found = next(one for one in seen if one.waits)
    assert found.env_batch == 0
    assert found.seconds_per_frame >= 0.02
    with undisturbed():
        assert probe(lambda: gymnasium.make_vec("CartPole-v1", 3), None, {}).env_batch == 3


# --- the file


@pytest.fixture
def cache(tmp_path):
    return WorkerCache(tmp_path / "inner")


def test_what_was_put_in_comes_out_until_it_is_old(cache):
    assert cache.get("k0") is None
    cache.path.parent.mkdir()
    full = {f"k{number}": 2 for number in range(200)}
    cache.path.write_text(json.dumps({"format": 1, "workers": full}))
    cache.put("k1", 8)
    cache.put("new", 3)
    again = WorkerCache(cache.path.parent)
    found = [again.get(key) for key in ("k0", "k1", "k2", "new", "none")]
    assert found == [None, 8, 2, 3, None]
    assert os.listdir(cache.path.parent) == ["workers.json"]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "7", '{"format": 1}', '{"format": 1, "workers": 5}', "[" * 100_000,
        '{"format": 2, "workers": {"a": 3}}',
        *(f'{{"format": 1, "workers": {{"a": {value}}}}}'
          for value in ('"2"', "2.0", "true", "0", "-1", "null", "[2]")),
    ],
    ids=range(15),
)  # fmt: skip
def test_what_can_not_be_in_the_file_is_ignored_and_replaced(cache, text):
    cache.path.parent.mkdir()
    cache.path.write_text(text)
    corrupt = '{"a"' not in text
    for use in (cache.get, lambda key: cache.put(key, 4)):
        if corrupt:
            with pytest.warns(RuntimeWarning, match="is ignored"):
                assert use("a") is None
        else:
            assert use("a") is None
    assert cache.get("a") == 4


def test_a_write_that_fails_is_a_warning_and_one_that_is_interrupted_changes_nothing(
    tmp_path, monkeypatch, cache
):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning) as seen:
        WorkerCache(tmp_path / "file").put("a", 4)
    told = [re.search("is ignored|could not be saved", str(one.message))[0] for one in seen]
    assert told == ["is ignored", "could not be saved"]
    cache.put("a", 4)

    def fail(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        cache.put("a", 5)
    assert cache.get("a") == 4
    assert os.listdir(cache.path.parent) == ["workers.json"]


def test_the_file_is_in_the_users_folder_if_there_is_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == tmp_path / ".cache" / "trawl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "trawl"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert cache_folder() is None
    cache = WorkerCache(None)
    cache.put("a", 4)
    assert cache.get("a") is None
    assert os.listdir() == []


# --- identity


def with_gravity(gravity):
    def make():
        return gravity

    return make


class Factory:
    def __init__(self, gravity):
        self.gravity = gravity

    def __call__(self):
        return self.gravity


def two_lambdas():
    return (lambda: 1), (lambda: 2)


SAME = [
    ("CartPole-v1", "CartPole-v1"),
    (with_gravity(1), with_gravity(1)),
    (Factory(1), Factory(1)),
    (functools.partial(Factory, 1), functools.partial(Factory, 1)),
    (two_lambdas()[0], two_lambdas()[0]),
    (Linear(), Linear()),  # of other weights
    ({"b": 1, "a": [torch.float32, None]}, {"a": [torch.float32, None], "b": 1}),
    (Factory(1).__call__, Factory(1).__call__),
]
DIFFERENT = [
    ("CartPole-v1", "CartPole-v0"),
    (with_gravity(1), with_gravity(2)),
    (Factory(1), Factory(2)),
    (functools.partial(Factory, 1), functools.partial(Factory, 2)),
    two_lambdas(),
    (Linear(3), Linear(4)),
    (nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
    ({"a": 1}, {"a": 2}),
    (Factory, Linear),
    (1, "1"),
]


def test_equal_things_have_equal_digests_and_others_do_not():
    for one, other in SAME:
        assert digest_of(one) == digest_of(other) is not None, one
    for one, other in DIFFERENT:
        assert digest_of(one) != digest_of(other), one
    circle = Factory(1)
    circle.gravity = circle
    assert digest_of(circle) is digest_of(object()) is digest_of("CartPole-v1", object()) is None


def test_every_run_gives_the_same_digest():
    code = (
        "from trawl.collectors.tuning.identity import digest_of\n"
        "found = digest_of(lambda name: name in {'a', 'b', 'c', 'd', 'e'}, {'a', 'b', 'c'})"
    )
    names = {"__name__": "__main__"}
    exec(compile(code, "<string>", "exec"), names)
    seed = 1 if os.environ.get("PYTHONHASHSEED") == "2" else 2
    there = subprocess.run(
        # Without the compiler, it starts in half the time.
        [sys.executable, "-c", f"import trawl.lean as l; l.import_lean()\n{code}\nprint(found)"],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    assert there.stdout.strip() == names["found"]
    assert len(names["found"]) == 64


def test_a_machine_is_described_in_plain_data():
    facts = machine()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["processor"]
    assert facts["torch"] == torch.__version__
