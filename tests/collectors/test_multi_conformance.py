"""Behaviour of a collector with workers wherever these live."""

import gc

import cloudpickle
import pytest
from collector_parts import Buffer, by_step
from multi_parts import (
    CLASSES,
    LENGTHS,
    Chooser,
    actions,
    drained,
    envs,
    ledger,
    make,
    same,
    together,
    until_it_fails,
    worker_of,
)
from whole_parts import Episodes, Writes, cycling

from trawl.errors import WorkerError
from trawl.testing import FaultyEnv, NumberedEnv, RaggedEnv

# Each class and each place; other tests of collectors with workers are inline.
PLACES = [("sync", "messages"), ("async", "forkserver")]


@pytest.fixture(params=PLACES, ids="-".join)
def place(request):
    return request.param


@pytest.fixture
def cls(place):
    return CLASSES[place[0] == "async"]


@pytest.fixture
def method(place):
    return place[1]


# --- frames


def test_a_batch_that_is_kept_stays_as_it_was(cls, method):
    collector = make(
        cls,
        create_env_fn=envs(2, kind=RaggedEnv),
        policy=None,
        total_frames=60,
        start_method=method,
    )
    with collector:
        kept = [(batch, batch.clone()) for batch in collector]
    del collector
    gc.collect()
    for batch, as_it_was in kept:
        assert (batch == as_it_was).all()
    book = ledger(2, kind=RaggedEnv)
    for batch, _ in kept:
        book.add(batch)
    assert book.frames == 60


@pytest.mark.parametrize("method", ["inline", "forkserver"])
def test_workers_write_where_the_batch_is_delivered(method):
    with make(start_method=method, total_frames=40) as collector:
        addresses = [batch["observation"].data_ptr() for batch in collector]
    # One block is filled while the user has the other.
    assert len(set(addresses)) == 2


def test_factories_may_be_closures_and_local_classes(cls, method):
    class Local(NumberedEnv):
        pass

    lengths = [2, 4]

    def policy(observation):
        return by_step().module(observation)

    book = ledger(2, lengths=lengths)
    collector = make(
        cls,
        create_env_fn=[lambda i=i: Local(i, lengths=lengths) for i in range(2)],
        policy=policy,
        total_frames=40,
        start_method=method,
    )
    drained(collector, book)
    assert book.frames == 40


# --- seeds


def seeded(method):
    """Returns the following seed, and batches of random actions."""
    with make(
        create_env_fn=["CartPole-v1"] * 2,
        policy=None,
        frames_per_batch=60,
        total_frames=180,
        start_method=method,
    ) as collector:
        return [collector.set_seed(7), *collector]


@pytest.mark.parametrize("method", ["messages", pytest.param("spawn", marks=pytest.mark.long)])
def test_one_seed_gives_the_same_bits_wherever_workers_live(method):
    one, other = seeded("inline"), seeded(method)
    assert one[0] == other[0]
    assert all(same(*pair) for pair in zip(one[1:], other[1:], strict=True))
    assert len(one) == 4


# --- weights


def test_a_step_of_the_optimiser_reaches_workers_with_an_update_only(cls, method):
    policy = Chooser(1)
    with make(cls, policy=policy, start_method=method) as collector:
        assert actions(collector.next()) == {1}
        policy.become(2)
        assert all(actions(collector.next()) == {1} for _ in range(6))
        collector.update_policy_weights_()
        batches = [collector.next() for _ in range(12)]
    later = [actions(batch) for batch in batches]
    # What a worker began, or had finished, before the update is of the weights before.
    for worker in range(1 if together(cls) else 2):
        own = [
            found
            for batch, found in zip(batches, later, strict=True)
            if together(cls) or worker_of(batch) == worker
        ]
        assert own == sorted(own, key=lambda found: found == {2})
    assert later[-1] == {2}
    if together(cls):
        assert later[0] == {2}


@pytest.mark.parametrize("method", ["messages", "forkserver"])
def test_weights_reach_the_workers_they_are_for(method):
    policy = Chooser(0)
    with make(policy=policy, start_method=method) as collector:
        collector.update_policy_weights_(Chooser(3), worker_ids=[1])
        batch = collector.next()
        assert (actions(batch[0]), actions(batch[1])) == ({0}, {3})
        assert policy.choice == 0
        collector.update_policy_weights_(worker_ids=1)
        assert actions(collector.next()) == {0}


# --- control


def test_control_calls_lose_no_batch(cls, method):
    book = ledger(2)
    with make(cls, total_frames=80, start_method=method) as collector:
        for count, batch in enumerate(collector):
            book.add(batch)
            if count % 3 == 0:
                assert collector.get_distant_attr("worker_idx") == [0, 1]
                assert collector.stats("both")["workers_alive"] == 2
                assert set(collector.state_dict()) >= {"worker0", "worker1", "frames"}
                collector.update_policy_weights_()
                assert collector.map_fn("env.batch_size.numel") == [1, 1]
    assert book.frames == 80


@pytest.mark.parametrize("method", ["messages", "forkserver"])
def test_a_reset_of_one_worker_leaves_the_other(method):
    book = ledger(2, lengths=[100])
    collector = make(create_env_fn=envs(2, lengths=[100]), start_method=method)
    with collector:
        book.add(collector.next())
        collector.reset([True, False])
        batch = collector.next()
    assert NumberedEnv.numbers(batch)[:, 0, 1:3].tolist() == [[1, 0], [0, 5]]
    book.reset(0)
    book.add(batch)


def test_a_state_can_be_loaded_elsewhere(cls, method):
    policy, book = Chooser(1), ledger(2)
    with make(cls, policy=policy, total_frames=60, start_method=method) as collector:
        collector.update_policy_weights_(Chooser(2))
        for _ in range(2):
            book.add(collector.next())
        state = collector.state_dict()
    state = cloudpickle.loads(cloudpickle.dumps(state))
    with make(cls, policy=Chooser(0), total_frames=60, start_method=method) as other:
        other.load_state_dict(state)
        after = drained(other, book)
        assert other.stats()["frames"] == book.frames == 60
    assert len(after) == 4
    assert {*actions(after[-1])} == {2}


# --- hooks


def test_hooks_run_in_workers_with_their_own_batches(cls, method, tmp_path):
    def note(name, text):
        with (tmp_path / name).open("a") as file:
            file.write(text)

    with make(
        cls,
        frames_per_batch=10,
        total_frames=40,
        start_method=method,
        pre_collect_hook=lambda: note("pre", "x"),
        post_collect_hook=lambda batch: note("post", f"{len(batch)} "),
    ) as collector:
        count = len(list(collector))
    each = count * 2 if together(cls) else count
    assert (tmp_path / "pre").read_text() == "x" * each
    assert (tmp_path / "post").read_text() == ("5 " if together(cls) else "10 ") * each


def test_a_hook_can_be_set_and_taken_away(cls, method, tmp_path):
    def note(batch):
        (tmp_path / str(worker_of(batch))).touch()

    with make(cls, start_method=method, frames_per_batch=4, total_frames=80) as collector:
        assert collector.post_collect_hook is None
        collector.set_post_collect_hook(note)
        assert collector.post_collect_hook is note
        list(collector)
        assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
        collector.post_collect_hook = None
        assert collector.get_distant_attr("post_collect_hook") == [None, None]


# --- buffers


def test_batches_go_into_a_buffer(cls, method):
    buffer = Buffer()
    with make(cls, total_frames=60, replay_buffer=buffer, start_method=method) as collector:
        assert list(collector) == [None] * 6
        assert collector.stats()["frames"] == 60
    book = ledger(2)
    for frame in buffer.frames:
        book.add(frame.unsqueeze(0))
    assert book.frames == 60


def test_background_collection_keeps_the_budget(cls, method):
    buffer = Buffer()
    with make(cls, total_frames=60, replay_buffer=buffer, start_method=method) as collector:
        collector.start()
        buffer.wait_for(60)
        collector.async_shutdown()
        assert collector.closed
        assert collector.stats()["frames"] == 60
    assert len(buffer) == 60


# --- whole trajectories


@pytest.mark.parametrize(("lanes", "layout"), [(None, "padded"), (2, "cat")])
def test_whole_trajectories_come_once_and_in_order(cls, method, lanes, layout):
    episodes = Episodes(cycling(LENGTHS))
    with make(
        cls,
        lanes=lanes,
        frames_per_batch=28,
        total_frames=280,
        trajs_per_batch=3,
        traj_format=layout,
        start_method=method,
    ) as collector:
        for batch in collector:
            assert episodes.add(batch) == 3
        facts = collector.stats()
    assert facts["frames"] == 280
    assert all(found == list(range(len(found))) for found in episodes.by_env.values())
    assert facts["trajectories"] == len(episodes.found) > 80
    # What is left are less than a batch, and those that were not over.
    assert 280 - 3 * 5 - 5 * 2 * (lanes or 1) < episodes.frames <= 280


def test_whole_trajectories_go_into_a_buffer(cls, method):
    buffer, episodes = Writes(), Episodes(cycling(LENGTHS))
    with make(
        cls,
        frames_per_batch=14,
        total_frames=140,
        trajs_per_batch=3,
        trajs_per_write=1,
        replay_buffer=buffer,
        start_method=method,
    ) as collector:
        assert list(collector) == [None] * 10
    assert [episodes.add(written) for written in buffer.written] == [1] * len(buffer.written)
    assert all(found == list(range(len(found))) for found in episodes.by_env.values())
    assert 140 - 2 * 5 < episodes.frames <= 140


# --- errors


@pytest.mark.parametrize("at", [0, 7])
def test_an_error_keeps_its_type_and_says_where_it_was(cls, method, at):
    sources = [*envs(1), lambda: FaultyEnv(at, KeyError("no fuel"), number=1, lengths=[3])]
    collector = make(cls, create_env_fn=sources, start_method=method)
    with pytest.raises(KeyError, match="no fuel") as caught:
        until_it_fails(collector)
    error = caught.value
    assert isinstance(error, WorkerError)
    assert isinstance(error.original, KeyError)
    assert str(error).startswith("in worker 1: KeyError: 'no fuel'")
    assert "raise self.fault" in str(error)
    assert f"at its step {at} (from 0)" in str(error)
    assert collector.closed
