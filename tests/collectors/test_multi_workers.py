"""Workers that differ: lists with an entry for each of them; and `Collector` as the way to them."""

from typing import Any

import pytest
import torch
from collector_parts import by_step, named
from multi_parts import BOTH, Chooser, actions, envs, make, together, worker_of
from tensordict.nn import TensorDictModule

import trawl.collectors
from trawl.collectors import (
    BaseCollector,
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
    RandomPolicy,
)
from trawl.testing import NumberedEnv

INLINE = {"start_method": "inline"}


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


@BOTH
def test_arguments_of_environments_may_be_the_same(cls):
    with make(
        cls,
        create_env_fn=NumberedEnv,
        num_workers=2,
        create_env_kwargs={"number": 5, "lengths": [2]},
    ) as collector:
        assert worker_of(collector.next()) == 5


@pytest.mark.parametrize("method", ["inline", "forkserver"])
def test_environments_that_are_registered_here_are_known_to_workers(method):
    import gymnasium

    name = "TrawlTest/Numbered-v0"
    gymnasium.register(name, entry_point=NumberedEnv, disable_env_checker=True)
    try:
        with MultiSyncCollector(
            name, num_workers=2, frames_per_batch=10, start_method=method
        ) as collector:
            assert worker_of(collector.next()) == 0
    finally:
        del gymnasium.registry[name]


# --- policies


@BOTH
def test_policies_may_be_the_workers_own(cls):
    with make(cls, policy_factory=[lambda: Chooser(2), lambda: Chooser(0)]) as collector:
        assert [actions(row) for row in by_worker(collector)] == [{2}, {0}]
    policies = [Chooser(1), Chooser(3)]
    with make(cls, policy=policies) as collector:
        assert [actions(row) for row in by_worker(collector)] == [{1}, {3}]
        policies[0].become(0)
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


@BOTH
def test_workers_have_the_policy_as_it_was_when_it_was_given(cls):
    policy = Chooser(1)
    with make(cls, policy=policy) as collector:
        policy.become(2)
        assert collector.get_model("policy") is policy
        assert actions(collector.next()) == {1}


# --- frames


def test_frames_may_be_the_workers_own():
    with make(frames_per_batch=[3, 7], cat_results=0) as collector:
        batch = collector.next()
    assert batch.shape == (10,)
    assert NumberedEnv.numbers(batch)[:, 0].tolist() == [0] * 3 + [1] * 7


def test_rows_of_different_lengths_do_not_stack():
    with pytest.raises(ValueError, match=r"cat_results='stack' needs batches of equal length .*-1"):
        make(frames_per_batch=[3, 7])


def test_each_async_worker_collects_the_sum_of_a_list():
    with make(MultiAsyncCollector, frames_per_batch=[3, 7]) as collector:
        assert collector.next().shape == (10,)


# --- mistakes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frames_per_batch", [5, 5, 5]),
        ("policy", [Chooser()]),
        ("policy_factory", [Chooser] * 3),
        ("create_env_kwargs", [{}]),
        ("device", ["cpu"]),
        ("storing_device", ["cpu"] * 3),
        ("env_device", ["cpu"] * 3),
        ("policy_device", ["cpu"] * 3),
    ],
    ids=named,
)
def test_a_list_has_an_entry_for_each_worker(name, value):
    count = len(value)
    with pytest.raises(ValueError, match=rf"{name} has {count} entries, but there are 2 workers"):
        make(**{name: value})


WRONG: list[tuple[dict[str, Any], Any, str]] = [
    ({"num_workers": 3}, ValueError, r"num_workers=3 does not match create_env_fn, a list of 2"),
    ({"num_workers": 0}, ValueError, r"num_workers must be at least 1, but it is 0"),
    ({"num_workers": True}, TypeError, r"num_workers must be an integer"),
    ({"num_workers": "two"}, TypeError, r"num_workers must be an integer.*'two'"),
    ({"create_env_fn": []}, ValueError, r"create_env_fn must not be an empty list"),
    ({"frames_per_batch": 0}, ValueError, r"frames_per_batch must be at least 1"),
    ({"frames_per_batch": [5, 0]}, ValueError, r"frames_per_batch must be at least 1"),
    ({"frames_per_batch": [5, 1.5]}, TypeError, r"frames_per_batch must be an integer"),
    ({"total_frames": 0}, ValueError, r"total_frames must be positive, or -1"),
    ({"cat_results": 1}, ValueError, r"cat_results must be 'stack', 0 or -1, but it is 1"),
    ({"cat_results": "cat"}, ValueError, r"cat_results must be .* but it is 'cat'"),
    ({"cat_results": True}, ValueError, r"cat_results must be .* but it is True"),
    ({"preemptive_threshold": 1.5}, ValueError, r"preemptive_threshold .* 0 to 1.* 1.5"),
    ({"preemptive_threshold": -0.1}, ValueError, r"preemptive_threshold .* 0 to 1.* -0.1"),
    ({"preemptive_threshold": "x"}, TypeError, r"preemptive_threshold .*'x'"),
    ({"num_threads": 0}, ValueError, r"num_threads must be at least 1, but it is 0"),
    ({"num_sub_threads": 0}, ValueError, r"num_sub_threads must be at least 1"),
    ({"num_sub_threads": 1.5}, TypeError, r"num_sub_threads must be an integer"),
    ({"max_restarts": -1}, ValueError, r"max_restarts must be at least 0, but it is -1"),
    ({"max_total_restarts": -1}, ValueError, r"max_total_restarts must be at least 0"),
    ({"worker_timeout": 0}, ValueError, r"worker_timeout must be a number of seconds above 0"),
    ({"worker_timeout": "x"}, TypeError, r"worker_timeout .*'x'"),
    ({"start_method": "fork"}, ValueError, r"start_method .*'forkserver', 'spawn', 'inline', or a"),
    ({"init_fn": 3}, TypeError, r"init_fn must be callable, but it is int: 3"),
    ({"collector_class": 3}, TypeError, r"collector_class must be callable, but it is int: 3"),
    ({"postproc": 3}, TypeError, r"postproc must be callable"),
    ({"post_collect_hook": 3}, TypeError, r"post_collect_hook must be callable"),
    ({"reset_when_done": False}, ValueError, r"reset_when_done=False is not possible"),
    ({"exploration_type": "randomly"}, TypeError, r"exploration_type must be"),
    ({"device": "abacus"}, ValueError, r"device 'abacus' is not a device"),
    ({"device": ["cpu", "abacus"]}, ValueError, r"device 'abacus' is not a device"),
    ({"create_env_kwargs": [{}, 3]}, TypeError, r"create_env_kwargs must be a mapping"),
    ({"interruptor": print}, TypeError, "interruptor can't be used with collectors with workers"),
    (
        {"return_same_td": True},
        TypeError,
        "return_same_td=True can't be used with collectors with workers",
    ),
    ({"n_workers": 2}, TypeError, r"unknown arguments: n_workers; did you mean num_workers\?"),
    ({"policy": RandomPolicy}, TypeError, r"it is the class RandomPolicy: .* RandomPolicy\(\)$"),
    (
        {"policy": [Chooser(), Chooser]},
        TypeError,
        r"it is the class Chooser: .* Chooser\(\.\.\.\)",
    ),
    ({"num_worker": 2}, TypeError, r"unknown arguments: num_worker; .* num_workers"),
    (
        {"policy_factory": Chooser, "policy": Chooser().forward},
        TypeError,
        r"policy and policy_factory can both be given only if the policy is a module",
    ),
    (
        {"policy_factory": [Chooser] * 2, "policy": Chooser().forward},
        TypeError,
        r"policy and policy_factory can both be given only if the policy is a module",
    ),
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
    ("backend", "sync", "cls"),
    [(None, None, 0), ("process", False, 0), ("multiprocessing", True, 1)],
)
def test_a_collector_may_live_in_processes(backend, sync, cls):
    with Collector(
        NumberedEnv,
        by_step(),
        num_collectors=2,
        backend=backend,
        sync=sync,
        frames_per_batch=10,
        total_frames=20,
        backend_options=INLINE,
    ) as collector:
        assert type(collector) is (MultiAsyncCollector, MultiSyncCollector)[cls]
        assert not isinstance(collector, Collector)
        assert isinstance(collector, BaseCollector)
        assert sum(batch.numel() for batch in collector) == 20


def test_the_number_of_workers_is_one_or_that_of_the_list():
    with Collector(
        NumberedEnv, backend="process", frames_per_batch=10, backend_options=INLINE
    ) as collector:
        assert collector.num_workers == 1
    with Collector(
        envs(3), backend="process", frames_per_batch=10, backend_options=INLINE
    ) as collector:
        assert collector.num_workers == 3
    with Collector(
        create_env_fn=envs(3),
        policy=by_step(),
        num_collectors=3,
        sync=True,
        frames_per_batch=9,
        backend_options={"cat_results": -1, **INLINE},
    ) as collector:
        assert collector.next().shape == (9,)


def test_options_that_say_no_more_than_the_default_are_dropped():
    with Collector(
        NumberedEnv,
        num_collectors=2,
        frames_per_batch=10,
        return_same_td=False,
        interruptor=None,
        worker_idx=None,
        backend_options=INLINE,
    ) as collector:
        assert isinstance(collector, MultiCollector)


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        (
            {"return_same_td": True},
            TypeError,
            "return_same_td=True can't be used with collectors with workers",
        ),
        ({"backend_options": {"sync": True}}, ValueError, r"'sync', which is reserved"),
        ({"backend_options": {"num_workers": 2}}, ValueError, r"'num_workers', which is reserved"),
        ({"backend_options": {"num_collectors": 2}}, ValueError, r"reserved"),
        ({"backend_options": {"backend_options": {}}}, ValueError, r"reserved"),
        (
            {"backend_options": {"frames_per_batch": 3}},
            ValueError,
            r"duplicate argument 'frames_per_batch'",
        ),
        ({"backend_options": {"policy": None}}, ValueError, r"duplicate argument 'policy'"),
        ({"backend_options": {"nonsense": 1}}, TypeError, r"unknown arguments: nonsense"),
        ({"num_collectors": 3}, ValueError, r"num_collectors=3 does not match .* list of 2"),
    ],
    ids=named,
)
def test_arguments_of_the_backend_are_checked(options, kind, match):
    options = {"num_collectors": 2, "frames_per_batch": 10, **options}
    with pytest.raises(kind, match=match):
        Collector(envs(2), by_step(), **options)


@pytest.mark.parametrize(
    ("args", "match"),
    [((envs(2), None, 10), r"at most"), ((), r"needs the argument create_env_fn")],
    ids=["three", "none"],
)
def test_arguments_by_position_are_checked(args, match):
    with pytest.raises(TypeError, match=match):
        Collector(*args, num_collectors=2, frames_per_batch=10)


def test_an_argument_is_given_once():
    with pytest.raises(ValueError, match=r"create_env_fn was passed twice"):
        Collector(envs(2), create_env_fn=envs(1), num_collectors=2, frames_per_batch=10)


def test_an_empty_list_has_no_workers():
    with pytest.raises(ValueError, match=r"create_env_fn must not be an empty list"):
        Collector([], backend="process", frames_per_batch=10)


# --- older names


@pytest.mark.parametrize("name", ["MultiCollector", "MultiSyncCollector", "AsyncCollector"])
def test_the_classes_are_at_the_top(name):
    assert getattr(trawl, name) is getattr(trawl.collectors, name)
