"""Each option of a collector does with workers what it does without."""

import multiprocessing
import os
import threading
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from collector_parts import Buffer, by_step, keys
from multi_parts import (
    ALL,
    BOTH,
    LENGTHS,
    PLACES,
    Chooser,
    actions,
    envs,
    ledger,
    make,
    together,
    worker_of,
)
from tensordict.nn import (
    InteractionType,
    TensorDictModule,
)

from trawl import ExplorationType, exploration_type
from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector, PolicyVersion
from trawl.testing import NumberedEnv

# --- keys


@ALL
def test_private_entries_are_not_delivered(cls):
    """But postprocessing sees them, which workers don't send."""
    policy = TensorDictModule(
        lambda observation: (by_step().module(observation), *[observation] * 3),
        in_keys=["observation"],
        out_keys=["action", "_seen", ("inner", "_deep"), ("inner", "kept")],
    )
    with make(cls, policy=policy) as collector:
        batch, fake = collector.next(), collector.fake_tensordict()
    assert not {"_seen", ("inner", "_deep")} & keys(batch)
    assert ("inner", "kept") in keys(batch)
    assert keys(fake) == keys(batch)
    options = {"postproc": lambda batch: batch.set("shown", batch["_seen"] + 1)}
    if cls is Collector:
        with make(cls, policy=policy, **options) as collector:
            batch = collector.next()
        assert torch.equal(batch["shown"], batch["observation"] + 1)
        assert "_seen" not in keys(batch)


@ALL
def test_postprocessing_is_done_here_with_whole_batches(cls):
    seen = []

    def process(batch):
        seen.append(batch.shape)
        if len(seen) < 3:
            return batch.select("observation").set("more", torch.ones(batch.shape))
        return None

    with make(cls, postproc=process, total_frames=30) as collector:
        for _ in range(2):
            assert keys(collector.next()) == {"observation", "more"}
        with pytest.raises(TypeError, match="postproc returned None"):
            collector.next()
        assert collector.closed
    assert [tuple(shape) for shape in seen] == [((2, 5) if together(cls) else (10,))] * 3


# --- how the policy acts


def chosen(observation):
    """Takes action 2 if it should do what is likely, and action 1 if it should explore."""
    number = 2 if exploration_type() is ExplorationType.MODE else 1
    return torch.nn.functional.one_hot(torch.full(observation.shape[:-1], number), 4)


@ALL
def test_exploration_can_be_turned_off(cls):
    for options, action in (
        ({}, 1),
        ({"exploration_type": None}, 1),
        ({"exploration_type": InteractionType.MODE}, 2),
    ):
        with make(cls, policy=chosen, **options) as collector:
            assert actions(collector.next()) == {action}


@ALL
def test_a_trusted_policy_is_called_as_it_is(cls):
    def policy(whatever):
        return whatever.set("action", torch.tensor([0, 0, 1, 0]))

    with make(cls, policy=policy, trust_policy=True) as collector:
        assert actions(collector.next()) == {2}


@ALL
def test_a_policy_can_be_compiled(cls):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    with make(cls, policy=Chooser(2), compile_policy={"backend": backend}) as collector:
        assert actions(collector.next()) == {2}
        assert graphs
        collector.update_policy_weights_(Chooser(1))
        for _ in range(6):
            batch = collector.next()
        assert actions(batch) == {1}


# --- versions


@BOTH
def test_batches_tell_the_version_that_made_them(cls):
    with make(cls, policy=Chooser(0), track_policy_version=True) as collector:
        assert (collector.policy_version, collector.stats()["policy_version"]) == (0, 0)
        for version in range(1, 4):
            collector.update_policy_weights_(Chooser(version))
            assert collector.policy_version_tracker.version == version
            for _ in range(6):
                batch = collector.next()
            assert collector.policy_version == collector.get_policy_version() == version
            assert collector.worker_policy_versions() == dict.fromkeys(range(2), version)
            assert batch["policy_version"].unique().tolist() == [version]
            assert actions(batch) == {version}
            assert torch.equal(batch["next", "policy_version"], batch["policy_version"])
            assert batch["policy_version"].dtype is torch.int64
        assert collector.get_distant_attr("policy_version") == [3, 3]


@BOTH
def test_a_version_is_that_of_all_workers(cls):
    with make(cls, policy=Chooser(0), track_policy_version=True) as collector:
        collector.next()
        collector.update_policy_weights_(Chooser(1))
        # Workers that collect meanwhile don't have it yet; those that wait have nothing older.
        assert collector.policy_version == (1 if together(cls) else 0)
        assert collector.worker_policy_versions() == {0: 1, 1: 1}
        assert collector.policy_version == collector.stats()["policy_version"] == 1
        collector.update_policy_weights_(Chooser(2), worker_ids=[1])
        assert collector.policy_version is None
        assert "policy_version" not in collector.stats()
        assert collector.worker_policy_versions() == {0: 1, 1: 2}
        assert [collector.stats("per_worker")[f"worker_{i}/policy_version"] for i in (0, 1)] == [
            1,
            2,
        ]
        state = collector.state_dict()
        collector.update_policy_weights_(Chooser(3))
        assert collector.worker_policy_versions() == {0: 3, 1: 3}
        assert collector.policy_version == 3
        collector.increment_version()
        assert collector.worker_policy_versions() == {0: 4, 1: 4}
        collector.load_state_dict(state)
        assert collector.policy_version is None
        assert collector.worker_policy_versions() == {0: 1, 1: 2}


@BOTH
def test_versions_can_be_names(cls):
    version = PolicyVersion("uuid")
    with make(cls, policy=Chooser(0), track_policy_version=version) as collector:
        first = collector.policy_version
        assert first == version.version
        collector.update_policy_weights_(worker_ids=1)
        second = collector.policy_version_tracker.version
        assert collector.policy_version is None
        assert first != second
        found = set()
        for _ in range(6):
            batch = collector.next()
            for row in batch if together(cls) else [batch]:
                found.add((worker_of(row), row["policy_version"][0]))
        assert found == {(0, first), (1, second)}
        assert "policy_version" not in collector.stats()


@ALL
def test_a_version_can_be_counted_up_by_hand(cls):
    with make(cls, track_policy_version=True) as collector:
        collector.increment_version()
        if cls is not Collector:
            assert collector.get_distant_attr("policy_version") == [1, 1]
        batch = collector.next()
        for name in ("policy_version", ("next", "policy_version")):
            assert batch[name].unique().tolist() == [1]
            assert batch[name].dtype is torch.int64
    with make(cls) as collector:
        collector.increment_version()
        if cls is not Collector:
            assert collector.worker_policy_versions() == {0: None, 1: None}
        assert collector.policy_version is None
        assert collector.get_policy_version() is None
        assert "policy_version" not in keys(collector.next())
        assert "policy_version" not in collector.stats()


@BOTH
def test_weights_can_be_sent_before_each_batch(cls):
    policy = Chooser(0)
    with make(
        cls, policy=policy, update_at_each_batch=True, track_policy_version=True
    ) as collector:
        for choice in (1, 2, 3):
            policy.become(choice)
            batch = collector.next()
            if together(cls):
                assert actions(batch) == {choice}
                assert batch["policy_version"].unique().tolist() == [choice]
        for _ in range(6):
            batch = collector.next()
        assert actions(batch) == {3}


# --- processes


class Threads(NumberedEnv):
    """Its number is that of torch's threads in its process."""

    def __init__(self, **kwargs):
        super().__init__(torch.get_num_threads(), **kwargs)


def test_threads_are_shared_out_and_given_back():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        with make(start_method="forkserver", create_env_fn=[Threads] * 2) as collector:
            assert torch.get_num_threads() == 2
            assert worker_of(collector.next()) == 1
        assert torch.get_num_threads() == 4
        with make(
            start_method="forkserver", create_env_fn=[Threads] * 2, num_threads=3, num_sub_threads=2
        ) as collector:
            assert torch.get_num_threads() == 3
            assert worker_of(collector.next()) == 2
        assert torch.get_num_threads() == 4
        with pytest.raises(ZeroDivisionError):
            make(start_method="forkserver", create_env_fn=[lambda: 1 / 0] * 2)
        assert torch.get_num_threads() == 4
        with make():
            assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_something_can_be_called_first_in_each_worker():
    def begin():
        os.environ["TRAWL_TEST_NUMBER"] = "7"

    def env():
        return NumberedEnv(int(os.environ["TRAWL_TEST_NUMBER"]))

    sources = [env] * 2
    with make(create_env_fn=sources, init_fn=begin, start_method="forkserver") as collector:
        assert worker_of(collector.next()) == 7
    assert "TRAWL_TEST_NUMBER" not in os.environ


class Mine(Collector):
    """A collector with a method of its own."""

    def shout(self, text):
        return f"{self.worker_idx}: {text.upper()}"


@PLACES
def test_a_worker_may_be_a_collector_of_ones_own(cls, method):
    with make(cls, collector_class=Mine, start_method=method) as collector:
        assert collector.map_fn("shout", [("a",), ("b",)]) == ["0: A", "1: B"]
        assert collector.next().numel() == 10


# --- devices


#: Options, and the device of the batches.
DEVICES: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"device": "cpu"}, "cpu"),
    ({"device": ["cpu", "cpu:0"]}, "cpu"),
    ({"storing_device": "cpu"}, "cpu"),
    ({"storing_device": ["cpu", torch.device("cpu")]}, "cpu"),
    ({"policy_device": "cpu"}, None),
    ({"policy_device": ["cpu"] * 2, "env_device": ["cpu"] * 2}, "cpu"),
]


@BOTH
def test_batches_are_on_the_storing_device(cls):
    for options, device in DEVICES:
        with make(cls, policy=Chooser(1), total_frames=30, **options) as collector:
            for batch in collector:
                assert batch.device == (None if device is None else torch.device(device))
            assert collector.fake_tensordict().device == batch.device
            for name, given in options.items():
                if isinstance(given, list):
                    shown = [torch.device(device) for device in getattr(collector, name)]
                    assert [device.type for device in shown] == ["cpu", "cpu"]


def test_warnings_of_options_come_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(
            create_env_fn=envs(2, 3, lengths=LENGTHS),
            frames_per_batch=20,
            total_frames=50,
            init_random_frames=30,
        ).shutdown()
    assert len(caught) == 3


def test_what_can_not_be_sent_to_workers_is_refused_by_name():
    words = r"create_env_fn \(of worker 1\) can't be sent .* cannot pickle '_thread.lock' object"
    forked = multiprocessing.get_context("fork").Lock()
    remedy = r"set_start_method\('spawn', force=True\) before"
    for lock, text in ((threading.Lock(), words), (forked, remedy)):
        sources = [*envs(1), partial(NumberedEnv, 1, lengths=LENGTHS, lock=lock)]
        with pytest.raises(TypeError, match=text):
            make(create_env_fn=sources, start_method="forkserver")


# --- hooks, and a replay buffer


@pytest.mark.parametrize(
    ("cls", "method"), [(MultiSyncCollector, "messages"), (MultiAsyncCollector, "forkserver")]
)
def test_hooks_run_in_workers_with_their_own_batches(cls, method, tmp_path):
    def note(name, text):
        with (tmp_path / name).open("a") as file:
            file.write(text)

    with make(
        cls,
        start_method=method,
        pre_collect_hook=lambda: note("pre", "x"),
        post_collect_hook=lambda batch: note("post", f"{len(batch)} "),
    ) as collector:
        for _ in range(4):
            collector.next()
        made = (tmp_path / "pre").read_text(), (tmp_path / "post").read_text().split()
        later = lambda batch: note(f"later{worker_of(batch)}", "x")  # noqa: E731
        collector.set_post_collect_hook(later)
        assert collector.post_collect_hook is later
        while {path.name for path in tmp_path.glob("later*")} != {"later0", "later1"}:
            collector.next()
        collector.post_collect_hook = None
        assert collector.get_distant_attr("post_collect_hook") == [None, None]
    least = 8 if together(cls) else 4
    assert len(made[0]) >= least
    assert len(made[1]) >= least
    assert set(made[1]) == {"5" if together(cls) else "10"}


# --- replay buffers


@PLACES
def test_background_collection_can_be_held(cls, method):
    buffer = Buffer()
    with make(
        cls, policy=Chooser(1), replay_buffer=buffer, total_frames=400, start_method=method
    ) as collector:
        collector.start()
        collector.start()
        assert collector.is_running()
        buffer.wait_for(30)
        with collector.pause():
            before = len(buffer)
            stats = collector.stats("both")
            assert stats["frames"] == before
            assert collector.map_fn("worker_idx.bit_length") == [0, 1]
            assert set(collector.state_dict()) >= {"worker0", "worker1"}
            collector.update_policy_weights_(Chooser(2))
            assert len(buffer) == before
        buffer.wait_for(before + 60)
        with pytest.raises(KeyError), collector.pause():
            raise KeyError
        # An error within does not leave it held.
        buffer.wait_for(400)
        collector.async_shutdown()
        assert collector.closed
        assert collector.stats()["frames"] == 400
    book = ledger(2)
    for frame in buffer.frames:
        book.add(frame.unsqueeze(0))
    assert book.frames == 400
    assert actions(buffer.frames[-1].unsqueeze(0)) == {2}


@BOTH
def test_random_frames_are_counted_with_the_buffer(cls):
    buffer = Buffer()
    buffer.write_count = 20
    with make(
        cls, policy=Chooser(1), replay_buffer=buffer, init_random_frames=40, frames_per_batch=20
    ) as collector:
        for _ in range(5):
            collector.next()
    found = {actions(batch) == {1} for batch in buffer.content().split(20)[-1:]}
    assert found == {True}
