"""Workers that differ: lists with an entry for each of them; and `Collector` as the way to them."""

import importlib
import sys
import threading
from typing import Any

import gymnasium
import pytest
import torch
from collector_parts import by_step, named
from multi_parts import BOTH, Chooser, actions, envs, make, together, worker_of
from tensordict.nn import TensorDictModule

from trawl.collectors import (
    BaseCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from trawl.testing import NumberedEnv


def by_worker(collector, batches=6):
    """The last batch of each worker."""
    found = {}
    for _ in range(batches):
        batch = collector.next()
        for row in batch if together(type(collector)) else [batch]:
            found[worker_of(row)] = row
    return [found[index] for index in sorted(found)]


# --- environments


@BOTH
def test_each_worker_may_have_an_environment_of_its_own(cls):
    one, other = kwargs = [{"number": 3, "lengths": [2]}, {"number": 8, "lengths": [4]}]
    listed = {"create_env_fn": [NumberedEnv(**one), lambda: NumberedEnv(**other)]}
    told = {"create_env_fn": NumberedEnv, "num_workers": 2, "create_env_kwargs": kwargs}
    for options in (listed, told):
        with make(cls, **options) as collector:
            found = by_worker(collector)
        assert [worker_of(row) for row in found] == [3, 8]
        for row, own in zip(found, kwargs, strict=True):
            steps = NumberedEnv.numbers(row)[:, 2]
            assert torch.equal(row["next", "done"][:, 0], steps == own["lengths"][0] - 1)
    assert collector.create_env_kwargs == tuple(kwargs)
    with make(cls, **{**told, "create_env_kwargs": {"number": 5, "lengths": [2]}}) as collector:
        assert worker_of(collector.next()) == 5


def test_environments_that_are_registered_here_are_known_to_workers():
    name = "TrawlTest/Numbered-v0"
    gymnasium.register(name, entry_point=NumberedEnv, disable_env_checker=True)
    try:
        with MultiSyncCollector(name, num_workers=2, frames_per_batch=10) as collector:
            assert worker_of(collector.next()) == 0
    finally:
        del gymnasium.registry[name]


def test_an_environment_that_workers_can_not_import_is_missed_where_it_is_used(tmp_path):
    import gymnasium

    module = tmp_path / "only_of_the_driver.py"
    module.write_text("from trawl.testing import NumberedEnv\nclass Own(NumberedEnv): ...\n")
    lock = threading.Lock()  # can't be pickled
    sys.path.insert(0, str(tmp_path))
    try:
        entry = importlib.import_module(module.stem).Own
        gymnasium.register("TrawlTest/Here-v0", entry_point=entry)
        gymnasium.register("TrawlTest/Lock-v0", entry_point=NumberedEnv, kwargs={"lock": lock})
        gymnasium.register("TrawlTest/Other-v0", NumberedEnv, disable_env_checker=True)
        sys.path.remove(str(tmp_path))
        options = {"num_workers": 1, "frames_per_batch": 10, "start_method": "forkserver"}
        with MultiSyncCollector("TrawlTest/Other-v0", **options) as collector:
            assert worker_of(collector.next()) == 0
        for name, reason in [("Here", "No module named 'only_of_the_driver'"), ("Lock", "pickle")]:
            with pytest.raises(RuntimeError, match=rf"TrawlTest/{name}-v0 is registered.*{reason}"):
                MultiSyncCollector(f"TrawlTest/{name}-v0", **options)
    finally:
        for name in ("Here", "Lock", "Other"):
            gymnasium.registry.pop(f"TrawlTest/{name}-v0", None)
        sys.modules.pop(module.stem, None)


# --- policies


@BOTH
def test_policies_may_be_the_workers_own(cls):
    with make(cls, policy_factory=[lambda: Chooser(2), lambda: Chooser(0)]) as collector:
        assert [actions(row) for row in by_worker(collector)] == [{2}, {0}]
    policies = [Chooser(1), Chooser(3)]
    with make(cls, policy=policies) as collector:
        policies[0].become(0)
        # They act as they were when they were given.
        assert [actions(row) for row in by_worker(collector)] == [{1}, {3}]
        collector.update_policy_weights_()
        assert [actions(row) for row in by_worker(collector, 12)] == [{0}, {3}]


@BOTH
def test_a_policy_may_be_made_by_the_worker(cls):
    with make(cls, policy_factory=lambda: Chooser(2)) as collector:
        assert actions(collector.next()) == {2}
        with pytest.raises(RuntimeError, match=r"no weights to send: the policy is not a module"):
            collector.update_policy_weights_()
        collector.update_policy_weights_(Chooser(1))
        assert [actions(row) for row in by_worker(collector, 12)] == [{1}, {1}]


@pytest.mark.parametrize("start_method", ["inline", "messages"])
def test_workers_may_have_their_entries_in_another_order(start_method):
    def factory(*names):
        def module(observation):
            like = torch.zeros(observation.shape[:-1])
            action = torch.nn.functional.one_hot(like.long(), 4)
            return (action, *(like + int(name) for name in names))

        return lambda: TensorDictModule(
            module, in_keys=["observation"], out_keys=["action", *names]
        )

    factories = [factory("1", "2"), factory("2", "1")]
    with make(MultiSyncCollector, policy_factory=factories, start_method=start_method) as collector:
        batch = collector.next()
    assert (batch["1"] == 1).all()
    assert (batch["2"] == 2).all()


# --- frames


def test_frames_may_be_the_workers_own():
    with make(frames_per_batch=[3, 7], cat_results=0) as collector:
        batch = collector.next()
    assert batch.shape == (10,)
    assert NumberedEnv.numbers(batch)[:, 0].tolist() == [0] * 3 + [1] * 7
    with pytest.raises(ValueError, match=r"cat_results='stack' needs batches of equal length .*-1"):
        make(frames_per_batch=[3, 7])
    # Each asynchronous worker collects the sum.
    with make(MultiAsyncCollector, frames_per_batch=[3, 7]) as collector:
        assert collector.next().shape == (10,)


# --- mistakes


POLICIES = r"policy and policy_factory can both be given only if the policy is a module"
# Those that all collectors have are checked in the same place, as a few show.
WRONG: list[tuple[dict[str, Any], Any, str]] = [
    *(
        ({name: value}, ValueError, rf"{name} has {len(value)} entries, but there are 2 workers")
        for name, value in {
            "frames_per_batch": [5, 5, 5],
            "policy": [Chooser()],
            "policy_factory": [Chooser] * 3,
            "create_env_kwargs": [{}],
            "device": ["cpu"],
            "storing_device": ["cpu"] * 3,
            "env_device": ["cpu"] * 3,
            "policy_device": ["cpu"] * 3,
        }.items()
    ),
    ({"num_workers": 3}, ValueError, r"num_workers=3 does not match create_env_fn, a list of 2"),
    ({"num_workers": 0}, ValueError, r"num_workers must be at least 1, but it is 0"),
    ({"num_workers": "two"}, TypeError, r"num_workers must be an integer.*'two'"),
    ({"create_env_fn": []}, ValueError, r"create_env_fn must not be an empty list"),
    ({"frames_per_batch": [5, 0]}, ValueError, r"frames_per_batch must be at least 1"),
    ({"frames_per_batch": [5, 1.5]}, TypeError, r"frames_per_batch must be an integer"),
    ({"total_frames": 0}, ValueError, r"total_frames must be positive, or -1"),
    ({"cat_results": 1}, ValueError, r"cat_results must be 'stack', 0 or -1, but it is 1"),
    ({"cat_results": True}, ValueError, r"cat_results must be .* but it is True"),
    ({"preemptive_threshold": 1.5}, ValueError, r"preemptive_threshold .* 0 to 1.* 1.5"),
    ({"preemptive_threshold": -0.1}, ValueError, r"preemptive_threshold .* 0 to 1.* -0.1"),
    ({"preemptive_threshold": "x"}, TypeError, r"preemptive_threshold .*'x'"),
    ({"num_threads": 0}, ValueError, r"num_threads must be at least 1, but it is 0"),
    ({"num_sub_threads": 1.5}, TypeError, r"num_sub_threads must be an integer"),
    ({"max_restarts": -1}, ValueError, r"max_restarts must be at least 0, but it is -1"),
    ({"max_total_restarts": -1}, ValueError, r"max_total_restarts must be at least 0"),
    ({"worker_timeout": 0}, ValueError, r"worker_timeout must be a number of seconds above 0"),
    ({"worker_timeout": "x"}, TypeError, r"worker_timeout .*'x'"),
    ({"prefetch": 2}, ValueError, r"prefetch must be 0 or 1, but it is 2"),
    ({"prefetch": True}, ValueError, r"prefetch must be 0 or 1, but it is True"),
    ({"prefetch": None}, ValueError, r"prefetch must be 0 or 1, but it is None"),
    ({"start_method": "fork"}, ValueError, r"start_method .*'inline', 'portable', or a"),
    ({"init_fn": 3}, TypeError, r"init_fn must be callable, but it is int: 3"),
    ({"collector_class": 3}, TypeError, r"collector_class must be callable, but it is int: 3"),
    ({"device": ["cpu", "abacus"]}, ValueError, r"device 'abacus' is not a device"),
    ({"create_env_kwargs": [{}, 3]}, TypeError, r"create_env_kwargs must be a mapping"),
    ({"num_worker": 2}, TypeError, r"unknown arguments: num_worker; did you mean num_workers"),
    (
        {"policy": [Chooser(), Chooser]},
        TypeError,
        r"it is the class Chooser: .* Chooser\(\.\.\.\)",
    ),
    ({"policy_factory": Chooser, "policy": Chooser().forward}, TypeError, POLICIES),
    ({"policy_factory": [Chooser] * 2, "policy": Chooser().forward}, TypeError, POLICIES),
]


@BOTH
def test_arguments_are_checked_before_a_worker_is_started(cls, monkeypatch):
    def started(*args):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("trawl.backends.inline.InlineBackend.launch", started)
    for options, kind, match in WRONG:
        with pytest.raises(kind, match=match):
            make(cls, **options)


@BOTH
def test_arguments_are_given_by_name(cls):
    with pytest.raises(TypeError, match=r"at most 2 positional arguments.*got 3.*by name"):
        cls(envs(2), None, 10)
    with pytest.raises(TypeError, match=rf"{cls.__name__} needs the argument frames_per_batch"):
        cls(envs(2))


# --- Collector, elsewhere


@pytest.mark.parametrize(
    ("source", "options", "cls", "workers"),
    [
        (NumberedEnv, {"num_collectors": 2}, MultiAsyncCollector, 2),
        (NumberedEnv, {"backend": "process"}, MultiAsyncCollector, 1),
        (envs(3), {"backend": "multiprocessing", "sync": True}, MultiSyncCollector, 3),
        (
            envs(2),
            {"num_collectors": 2, "sync": True, "backend_options": {"cat_results": -1}},
            MultiSyncCollector,
            2,
        ),
        # Options that say no more than the default are dropped.
        (
            NumberedEnv,
            {"num_collectors": 2, "return_same_td": False, "interruptor": None, "worker_idx": None},
            MultiAsyncCollector,
            2,
        ),
    ],
    ids=[*map(str, range(5))],
)
def test_a_collector_may_live_in_processes(source, options, cls, workers):
    more = {"start_method": "inline", **options.get("backend_options", {})}
    options = {"frames_per_batch": 12, "total_frames": 24, **options, "backend_options": more}
    with Collector(source, by_step(), **options) as collector:
        assert type(collector) is cls
        assert not isinstance(collector, Collector)
        assert isinstance(collector, BaseCollector)
        assert collector.num_workers == workers
        batches = list(collector)
    assert sum(batch.numel() for batch in batches) == 24
    assert "cat_results" not in more or batches[0].shape == (12,)


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"return_same_td": True}, TypeError, "return_same_td=True can't be used with collectors"),
        *(
            ({"backend_options": {name: value}}, ValueError, rf"'{name}', which is reserved")
            for name, value in {
                "sync": True,
                "num_workers": 2,
                "num_collectors": 2,
                "backend_options": {},
            }.items()
        ),
        (
            {"backend_options": {"frames_per_batch": 3}},
            ValueError,
            r"duplicate argument 'frames_per_batch'",
        ),
        ({"backend_options": {"policy": None}}, ValueError, r"duplicate argument 'policy'"),
        ({"backend_options": {"nonsense": 1}}, TypeError, r"unknown arguments: nonsense"),
        ({"num_collectors": 3}, ValueError, r"num_collectors=3 does not match .* list of 2"),
        ({"create_env_fn": envs(1)}, ValueError, r"create_env_fn was passed twice"),
    ],
    ids=named,
)
def test_arguments_of_the_backend_are_checked(options, kind, match):
    options = {"num_collectors": 2, "frames_per_batch": 10, **options}
    with pytest.raises(kind, match=match):
        Collector(envs(2), by_step(), **options)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((envs(2), None, 10), r"at most"),
        ((), r"needs the argument create_env_fn"),
        (([],), r"create_env_fn must not be an empty list"),
    ],
    ids=["three", "none", "empty"],
)
def test_arguments_by_position_are_checked(args, match):
    with pytest.raises((TypeError, ValueError), match=match):
        Collector(*args, backend="process", frames_per_batch=10)
