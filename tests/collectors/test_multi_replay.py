"""Batches of workers that go into a replay buffer."""

from itertools import count

import pytest
from collector_parts import Buffer
from multi_parts import BOTH, PLACES, Chooser, actions, ledger, make


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
def test_errors_in_the_background_come_with_the_next_call(cls, capfd):
    buffer = Buffer()

    def broken(batch):
        raise ArithmeticError("does not add up")

    collector = make(cls, replay_buffer=buffer, post_collect_hook=broken)
    collector.start()
    with pytest.raises(ArithmeticError, match="does not add up"):
        all(collector.stats() for _ in count())
    collector.async_shutdown()
    assert collector.closed
    assert "does not add up" in capfd.readouterr().err


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
