"""What can be asked of workers, and told to them, while they collect."""

import json
import multiprocessing
import os
import signal
import threading
from typing import Any

import pytest
import torch
from collector_parts import Buffer
from multi_parts import (
    ALL,
    BOTH,
    MASK,
    PLACES,
    TRAJ_IDS,
    Chooser,
    actions,
    drained,
    envs,
    ledger,
    make,
    together,
    until_it_fails,
    worker_of,
)
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector, RandomPolicy
from trawl.errors import WorkerError
from trawl.testing import FaultyEnv, NumberedEnv

# --- by path


@BOTH
def test_workers_and_this_side_are_reached_by_paths(cls):
    policy = TensorDictModule(Chooser(2), in_keys=["observation"], out_keys=["action"])
    buffer = Buffer()
    with make(cls, policy=policy, frames_per_batch=20, replay_buffer=buffer) as collector:
        each = 10 if together(cls) else 20
        assert collector.get_distant_attr("worker_idx") == [0, 1]
        assert collector.get_distant_attr(attr="env.batch_size") == [torch.Size([])] * 2
        choices = collector.get_distant_attr("policy.module.choice")
        assert [weight.item() for weight in choices] == [2, 2]
        assert collector.get_distant_attr("requested_frames_per_batch") == [each] * 2
        assert collector.frames_per_batch_worker() == each
        assert collector.frames_per_batch_worker(worker_idx=1) == each
        # Methods of workers.
        seeds = collector.map_fn("env.set_seed", [(3,), (4,)])
        assert len(set(seeds)) == 2
        assert seeds == collector.map_fn("env.set_seed", [(3,), ()], [{}, {"seed": 4}])
        states = collector.map_fn(method_name="policy.state_dict")
        assert [state["module.choice"] for state in states] == [2, 2]
        # This side.
        assert collector.getattr_policy("module.choice") == 2
        assert collector.getattr_env(attr="batch_size") == torch.Size([])
        assert collector.getattr_rb(attr="frames") is buffer.frames
        assert collector.get_model("policy") is policy
        assert collector.get_model("policy.in_keys[0]") == "observation"
        assert collector.cascade_execute("stats")["frames"] == 0
        assert collector.cascade_execute(attr_path="num_workers") == 2


#: A call that fails, and its error.
FAILING: list[tuple[Any, Any, str]] = [
    (lambda c: c.map_fn("env.nothing"), AttributeError, "no attribute 'nothing'"),
    (lambda c: c.map_fn("worker_idx", [(1,), (2,)]), (AttributeError, ValueError), "called"),
    (lambda c: c.map_fn("policy.eval", [(), (1, 2)]), TypeError, r"in worker \d: .*argument"),
    (lambda c: c.map_fn("stats", [()]), ValueError, "Expected 2 argument entries, got 1"),
    (lambda c: c.map_fn("stats", None, [{}] * 3), ValueError, "Expected 2 .* got 3"),
    (lambda c: c.get_distant_attr("env.nothing"), AttributeError, "no attribute 'nothing'"),
    (lambda c: c.get_distant_attr("env..x"), ValueError, "malformed"),
    (lambda c: c.get_distant_attr(3), TypeError, "a path must be text, .* but it is 3"),
    (lambda c: c.cascade_execute(None), TypeError, "a path must be text, .* it is None"),
    (lambda c: c.getattr_policy("nothing"), AttributeError, "no attribute 'nothing'"),
    (lambda c: c.getattr_env("nothing"), AttributeError, "nothing"),
    (lambda c: c.getattr_rb("nothing"), AttributeError, "no replay buffer"),
    (lambda c: c.reset([True]), ValueError, "reset_idx has 1 entries, but there are 2"),
    (
        lambda c: c.stats("some"),
        ValueError,
        "'aggregate', 'per_worker' or 'both', but it is 'some'",
    ),
    (lambda c: c.load_state_dict({}), KeyError, "state_dict has no 'frames'"),
    (lambda c: c.cascade_execute("num_workers", 3), ValueError, "can't be called with arguments"),
    (lambda c: c.rollout(), NotImplementedError, r"use next\(\)"),
    *(
        (lambda c, given=given: c.reset(given), TypeError, "reset_idx must have a bool for each")
        for given in ([0, 1], [True, 1], ["yes", "no"])
    ),
    (lambda c: c.enable_profile(), RuntimeError, "must be called before the first batch"),
    (lambda c: c.pause(), RuntimeError, r"call start\(\) first"),
    (lambda c: c.start(), RuntimeError, r"start\(\) needs a replay buffer"),
    (lambda c: c.shutdown(close_env=False), RuntimeError, "can't shut down with close_env"),
    (lambda c: c.shutdown(close_env="False"), TypeError, "close_env must be True or False"),
    (lambda c: c.async_shutdown(close_env="no"), TypeError, "close_env must be True or False"),
    (lambda c: c.worker_idx, RuntimeError, "worker_idx was not set"),
    (lambda c: c.nothing, AttributeError, "no attribute 'nothing'"),
]


@PLACES
def test_calls_that_fail_do_no_harm(cls, method):
    book = ledger(2)
    with make(cls, policy=Chooser(1), total_frames=40, start_method=method) as collector:
        book.add(collector.next())
        for call, kind, match in FAILING:
            with pytest.raises(kind, match=match):
                call(collector)
            assert collector.get_distant_attr("worker_idx") == [0, 1]
        for batch in collector:
            book.add(batch)
    assert book.frames == 40


CALLS = [
    lambda c: c.map_fn("stats"),
    lambda c: c.get_distant_attr("env"),
    lambda c: c.set_seed(0),
    lambda c: c.reset(),
    lambda c: c.state_dict(),
    lambda c: c.load_state_dict({"frames": 0, "iter": 0, "worker0": {}, "worker1": {}}),
    lambda c: c.update_policy_weights_(Chooser(1)),
    lambda c: setattr(c, "post_collect_hook", None),
    lambda c: c.fake_tensordict(),
]


@BOTH
def test_a_closed_collector_says_so(cls):
    collector = make(cls, policy=Chooser())
    collector.next()
    collector.shutdown()
    for call in CALLS:
        with pytest.raises(RuntimeError, match="failed because the collector was shut down"):
            call(collector)
    with pytest.raises(RuntimeError, match=r"next\(\) failed because the collector was shut down$"):
        collector.next()
    assert collector.stats()["workers_alive"] == 0
    assert collector.stats("per_worker")["workers"] == 2
    collector.shutdown()


# --- reset


@BOTH
def test_a_reset_begins_new_trajectories(cls):
    book = ledger(2, lengths=[100])
    with make(cls, create_env_fn=envs(2, lengths=[100]), total_frames=120) as collector:
        for count, batch in enumerate(collector):
            book.add(batch)
            if count % 4 == 1:
                collector.reset()
                book.reset()
    assert book.frames == 120


def test_arguments_of_a_reset_reach_the_environments():
    class Told(NumberedEnv):
        def reset(self, *, seed=None, options=None):
            found = super().reset(seed=seed)
            self.number = (options or {}).get("number", self.number)
            return self._observe(), found[1]

    with make(create_env_fn=[Told] * 2) as collector:
        collector.reset([False, True], options={"number": 9})
        assert [worker_of(row) for row in collector.next()] == [0, 9]


# --- state


@ALL
@pytest.mark.parametrize("policy", [Chooser(1), RandomPolicy()], ids=["module", "random"])
def test_any_collector_can_load_its_own_state(cls, policy):
    alone = cls is Collector
    with make(cls, policy=policy, total_frames=60) as collector:
        collector.next()
        state = collector.state_dict()
        assert (state["frames"], state["iter"]) == (10, 1)
        assert {"frames", "iter", "traj_pool"} <= set(state)
        assert alone or {"worker0", "worker1"} <= set(state)
        own = state if alone else state["worker0"]
        assert ("policy_state_dict" in own) == isinstance(policy, nn.Module)
        collector.load_state_dict(state)
        assert sum(batch.numel() for batch in collector) == 50
        assert (collector.stats()["frames"], collector.stats()["batches"]) == (60, 6)


@BOTH
def test_counts_versions_and_weights_go_on(cls, tmp_path):
    options = {"total_frames": 80, "track_policy_version": True, "init_random_frames": 20}
    with make(cls, policy=Chooser(1), **options) as collector:
        collector.update_policy_weights_(Chooser(2), worker_ids=0)
        for _ in range(4):
            collector.next()
        torch.save(collector.state_dict(), tmp_path / "state.pt")
    with make(cls, policy=Chooser(0), **options) as other:
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
        assert other.policy_version_tracker.version == 1
        assert other.policy_version is None
        assert other.stats()["frames"] == 40
        found = {}
        for batch in other:
            for row in batch if together(cls) else [batch]:
                made_by = (worker_of(row), *row["policy_version"].unique().tolist())
                found.setdefault(made_by, set()).update(actions(row))
    # There were random frames enough, and each worker has the weights that it had.
    assert found == {(0, 1): {2}, (1, 0): {1}}
    assert other.parts.weights.sender.versions == [1, 0]


@BOTH
def test_ids_are_not_used_again_after_loading(cls):
    def ids(batches):
        return {number for batch in batches for number in batch[TRAJ_IDS].reshape(-1).tolist()}

    with make(cls, workers=3, frames_per_batch=12) as collector:
        before = ids(collector.next() for _ in range(5))
        state = collector.state_dict()
    for worker in range(3):
        # As if the environments could not be captured, so that new episodes begin.
        del state[f"worker{worker}"]["resume"]
    state["finished"] = []
    with make(cls, workers=3, frames_per_batch=12) as other:
        other.load_state_dict(state)
        book = ledger(3)
        later = [other.next() for _ in range(8)]
        for batch in later:
            book.add(batch)
    assert not before & ids(later)


@ALL
def test_a_missing_entry_is_named_unless_it_may_be_missing(cls):
    alone = cls is Collector
    with make(cls, policy=Chooser(1)) as collector:
        for missing in ("frames", "iter", *(() if alone else ("worker1",))):
            state = collector.state_dict()
            del state[missing]
            with pytest.raises(KeyError, match=f"state_dict has no '{missing}'; it has .*"):
                collector.load_state_dict(state)
        state = collector.state_dict()
        if not alone:
            # What only the second worker lacks changes nothing in the first one.
            del state["worker1"]["frames"]
            state["worker0"]["policy_state_dict"]["choice"].fill_(3)
            with pytest.raises(KeyError, match=r"state_dict\['worker1'\] has no 'frames'"):
                collector.load_state_dict(state)
            state = collector.state_dict()
        for part in [state] if alone else [state["worker0"], state["worker1"]]:
            del part["policy_state_dict"]
        with pytest.raises(KeyError, match=r"state_dict has no 'policy_state_dict'; it has .*"):
            collector.load_state_dict(state)
        collector.load_state_dict({"frames": 10, "iter": 2} if alone else state, strict=False)
        assert collector.stats()["frames"] == 10 * alone
        assert actions(collector.next()) == {1}


# --- statistics


@BOTH
def test_statistics_tell_of_all_workers_and_of_each(cls):
    with make(cls, total_frames=100, policy=Chooser(1), track_policy_version=True) as collector:
        for _ in range(4):
            collector.next()
        whole = collector.stats()
        assert (
            whole.items()
            >= {
                "frames": 40,
                "batches": 4,
                "total_frames": 100,
                "completed": False,
                "requested_frames_per_batch": 10,
                "policy_version": 0,
                "workers": 2,
                "workers_alive": 2,
                "restarts": 0,
                "env_path": "array",
            }.items()
        )
        assert 0 < whole["env_time_share"] < 1
        assert whole == collector.stats("aggregate")
        each = collector.stats(workers="per_worker")
        # What is known of all workers is told with each view.
        assert (each["workers"], each["workers_alive"]) == (2, 2)
        assert "total_frames" not in each
        assert each["worker_0/requested_frames_per_batch"] == (5 if together(cls) else 10)
        assert each["worker_0/frames"] + each["worker_1/frames"] == 40
        assert each["worker_0/policy_version"] == 0
        assert each["worker_0/alive"]
        both = collector.stats("both")
        assert both.keys() == whole.keys() | each.keys()
        json.dumps(both)


# --- profiles


@PLACES
def test_the_first_batches_of_a_worker_can_be_profiled(cls, method, tmp_path):
    with make(cls, total_frames=80, start_method=method) as collector:
        assert collector.profile_config is None
        with pytest.raises(ValueError, match="nothing would be profiled"):
            collector.enable_profile(num_rollouts=1)
        collector.enable_profile([1], 2, 1, tmp_path / "trace_{worker_idx}.json", with_stack=False)
        assert collector.profile_config.workers == [1]
        assert collector.profile_config.num_rollouts == 2
        list(collector)
        collector.disable_profile()
        assert collector.profile_config is None
    assert [path.name for path in tmp_path.iterdir()] == ["trace_1.json"]


# --- the end


class Jammed(NumberedEnv):
    def close(self):
        raise OSError("the door is jammed")


@pytest.mark.parametrize(
    ("cls", "method"),
    [
        (Collector, None),
        (MultiSyncCollector, "inline"),
        (MultiSyncCollector, "forkserver"),
        (MultiAsyncCollector, "forkserver"),
    ],
)
def test_an_environment_that_fails_to_close_leaves_nothing_else_open(cls, method):
    options = {"total_frames": -1, "replay_buffer": Buffer()}
    options |= {"start_method": method} if method else {}
    sources = [lambda i=i: Jammed(i) for i in range(2)]
    collector = make(cls, create_env_fn=sources, **options)
    collector.start()
    with pytest.raises(OSError, match="jammed"):
        collector.shutdown()
    assert collector.closed
    assert not collector.is_running()
    quiet = make(cls, create_env_fn=sources, **options)
    quiet.shutdown(raise_on_error=False)
    assert quiet.closed

    def use():
        with make(cls, create_env_fn=sources, **options) as collector:
            collector.start()
            raise KeyError("of the user")

    # It hides no other error.
    with pytest.raises(KeyError, match="of the user"):
        use()


# --- errors


def failing(number, at=3):
    return lambda: FaultyEnv(at, ValueError("no fuel"), number=number, lengths=[2])


@pytest.mark.parametrize(
    ("cls", "method", "lanes", "at"),
    [
        (MultiSyncCollector, "messages", 1, 7),
        (MultiAsyncCollector, "forkserver", 3, 5),
        (MultiSyncCollector, "inline", 3, 0),
    ],
)
def test_an_error_keeps_its_type_and_names_worker_environment_and_step(cls, method, lanes, at):
    fine, worse = envs(1, lanes)[0], envs(1, lanes)[0]
    worse[-1] = lambda: FaultyEnv(at, KeyError("no fuel"), number=1, lengths=[3])
    options = {"frames_per_batch": 12 * lanes, "start_method": method}
    collector = make(cls, create_env_fn=[fine, worse], **options)
    with pytest.raises(KeyError, match="no fuel") as caught:
        until_it_fails(collector)
    error, text = caught.value, str(caught.value)
    assert isinstance(error, WorkerError)
    assert type(error.original) is KeyError
    assert text.startswith("in worker 1: KeyError: 'no fuel'")
    assert "raise self.fault" in text
    assert f"at its step {at} (from 0)" in text
    assert f"environment {lanes - 1}" in text or lanes == 1
    assert collector.closed


def test_an_error_of_postproc_is_no_worker_s():
    collector = make(postproc=lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero") as caught:
        until_it_fails(collector)
    assert collector.closed
    assert not isinstance(caught.value, WorkerError)


def test_batches_that_came_before_the_error_are_delivered():
    # The worker that is fine, and all batches of the other one up to its last, come through.
    book = ledger(2, lengths=[2])
    sources = [*envs(1, lengths=[2]), failing(1, at=47)]
    collector = make(MultiAsyncCollector, create_env_fn=sources, total_frames=1000)
    with pytest.raises(ValueError, match="no fuel"):
        drained(collector, book)
    assert book.steps[1] <= 40
    assert book.steps[0] >= 20


# --- preemption


@pytest.mark.parametrize("how", ["stack", -1])
def test_workers_that_are_late_are_not_waited_for(how):
    """The late one stands in its third step, from which only the test lets it go."""
    standing, gate = (multiprocessing.get_context("spawn").Event() for _ in range(2))

    class Quick(NumberedEnv):
        def step(self, action):
            if len(self.actions) == 19:
                standing.wait()
            return super().step(action)

    class Late(NumberedEnv):
        def step(self, action):
            if len(self.actions) == 2:
                standing.set()
                gate.wait()
            return super().step(action)

    book = ledger(2, lengths=[4])
    collector = make(
        create_env_fn=[lambda: Quick(0, lengths=[4]), lambda: Late(1, lengths=[4])],
        policy=Chooser(1),
        frames_per_batch=40,
        preemptive_threshold=0.5,
        cat_results=how,
        total_frames=-1,
        track_policy_version=True,
        start_method="forkserver",
    )
    with collector:
        first = collector.next()
        book.add(first)
        assert book.steps == {0: 20, 1: 0}
        assert collector.stats()["frames"] == 20
        if how == "stack":
            assert first.shape == (2, 20)
            assert first[MASK].sum(-1).tolist() == [20, 0]
            assert (first[TRAJ_IDS][1] == -1).all()
        else:
            assert first.shape == (20,)
            assert MASK not in first.keys(True)
        collector.update_policy_weights_()
        assert collector.stats()["policy_lag_max"] == 0
        gate.set()
        # The late one has answered before the next batch is asked for, which breaks off nobody.
        collector._pool.settle()
        batch = collector.next()
        book.add(batch)
        assert book.steps[0] == 40
        assert batch.names[-1] == "time"
        versions = batch["policy_version"]
        if how == "stack":
            assert batch[MASK][0].all()
            assert batch[MASK][1, 0]
            versions = versions[1]
        # Of what it was asked for before the update, it delivers the rest.
        assert versions.min() == 0
        assert collector.stats()["policy_lag_max"] == 1
        while book.frames < 200:
            book.add(collector.next())
        assert collector.stats()["frames"] == book.frames


def test_with_a_threshold_of_one_all_are_waited_for():
    book = ledger(2)
    for batch in drained(make(preemptive_threshold=1, total_frames=40), book):
        assert batch.shape == (2, 5)
        assert MASK not in batch.keys(True)
    assert book.frames == 40


def test_a_threshold_means_nothing_to_async_batches():
    with pytest.warns(UserWarning, match=r"preemptive_threshold=0\.5 has no effect with sync=F"):
        collector = make(MultiAsyncCollector, preemptive_threshold=0.5, total_frames=40)
    book = ledger(2)
    assert sum(batch.numel() for batch in drained(collector, book)) == 40


# --- the end, from elsewhere


@pytest.mark.parametrize(
    ("cls", "how"),
    [
        (MultiAsyncCollector, "thread"),
        (MultiSyncCollector, "signal"),
        (MultiAsyncCollector, "background"),
    ],
)
def test_a_batch_that_hangs_can_be_given_up_from_elsewhere(cls, how):
    context = multiprocessing.get_context("spawn")
    gate, begun = context.Event(), context.Event()

    class Stuck(NumberedEnv):
        def step(self, action):
            begun.set()
            gate.wait()
            return super().step(action)

    options = {"replay_buffer": Buffer()} if how == "background" else {}
    collector = make(cls, create_env_fn=[Stuck] * 2, start_method="forkserver", **options)

    def end(*_):
        collector.shutdown(timeout=0.1)

    def act():
        begun.wait()
        os.kill(os.getpid(), signal.SIGUSR1) if how == "signal" else end()

    if how == "background":
        collector.start()
        act()
        assert not collector.is_running()
    else:
        before = signal.signal(signal.SIGUSR1, end)
        thread = threading.Thread(target=act)
        thread.start()
        try:
            assert list(collector) == []
        finally:
            thread.join()
            signal.signal(signal.SIGUSR1, before)
    assert collector.closed


# --- what is told wrong


@ALL
def test_stop_iteration_does_not_end_the_loop_quietly(cls):
    sources = [*envs(1), lambda: FaultyEnv(2, StopIteration("over"), number=1)]
    sources = sources[::-1] if cls is Collector else sources
    with (
        pytest.raises(RuntimeError, match="raised StopIteration"),
        make(cls, create_env_fn=sources) as collector,
    ):
        list(zip(collector, range(9), strict=False))


def test_a_state_of_more_workers_is_refused():
    with make(workers=3, frames_per_batch=30) as collector:
        state = collector.state_dict()
    with make() as collector, pytest.raises(ValueError, match="with 3 workers, but this one has 2"):
        collector.load_state_dict(state)


def test_seeds_of_a_reset_are_different_in_each_worker():
    with make(create_env_fn=["Pendulum-v1"] * 2, policy=None) as collector:
        collector.reset(seed=3)
        first, second = collector.next()["observation"][:, 0]
        assert not torch.equal(first, second)
        collector.reset(seed=3)
        assert torch.equal(collector.next()["observation"][0, 0], first)


class Told(Collector):
    def set_seed(self, *args, **kwargs):
        self.told = args
        return super().set_seed(*args, **kwargs)


def test_workers_of_a_class_of_ones_own_do_what_it_says():
    with make(collector_class=Told) as collector:
        collector.set_seed(3)
        assert collector.get_distant_attr("told")[0] == (3, False)


def test_a_hook_that_can_not_be_sent_changes_nothing():
    with make(start_method="forkserver") as collector:
        lock = threading.Lock()
        with pytest.raises(TypeError, match="pickle"):
            collector.set_post_collect_hook(lambda batch: lock)
        assert collector.post_collect_hook is None


@BOTH
def test_an_interrupt_may_come_as_an_order_is_given(cls, monkeypatch):
    collector = make(cls, start_method="forkserver")
    collector.next()
    pool = collector._pool
    worker = pool.slots[1].worker
    send = worker.send

    def interrupted(content):
        send(content)
        pool.settle()
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        while True:
            collector.next()
    assert collector.closed


def test_the_environment_of_a_worker_can_be_read():
    with make(start_method="forkserver") as collector:
        env = collector.env
        with Collector(*envs(1), frames_per_batch=1) as other:
            assert env.action_spec == other.env.action_spec
            assert env.batch_size == other.env.batch_size
            assert env.fake_tensordict().keys() == other.env.fake_tensordict().keys()
            assert repr(env) == repr(other.env)
        assert getattr(env, "nothing", None) is None
        with pytest.raises(AttributeError, match="nothing"):
            _ = env.nothing
        assert collector.next() is not None
    with pytest.raises(RuntimeError, match="env failed because the collector was shut down"):
        _ = collector.env
