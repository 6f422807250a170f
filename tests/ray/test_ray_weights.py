"""Weights in a Ray cluster, through the object store or process groups."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from multi_parts import Chooser, envs
from ray_parts import PATIENCE, kill

from trawl.collectors.distributed import RayCollector
from trawl.weight_update import RayWeightSyncScheme

pytestmark = pytest.mark.usefixtures("sent_by_value")
BOTH = pytest.mark.parametrize("backend", ["object_store", "gloo"])
ASKED = {"num_cpus": 0, "memory": 0}


def stamps(batch: Any) -> set[tuple[int, int]]:
    """Actions, with the versions that are said to have chosen them."""
    acted = batch["action"].argmax(-1).reshape(-1).tolist()
    return set(zip(acted, batch["policy_version"].reshape(-1).tolist(), strict=True))


class Receiver:
    """An actor with a model."""

    def __init__(self, scheme: Any, index: int) -> None:
        self.model = torch.nn.Linear(3, 1)
        self.scheme = scheme
        scheme.init_on_receiver(model=self.model, worker_idx=index)

    def connect(self) -> None:
        self.scheme.connect()

    def receive(self, timeout: float | None) -> float | None:
        try:
            found = self.scheme.receive(timeout)
        except ConnectionError:
            return float("nan")
        return None if found is None else float(self.model.bias)


@BOTH
def test_actors_of_ones_own_receive_weights(cluster, backend):
    learner = torch.nn.Linear(3, 1)
    scheme = RayWeightSyncScheme(backend=backend)
    scheme.init_on_sender(model=learner, num_workers=2)
    actor = cluster.remote(Receiver).options(num_cpus=0)
    actors = [actor.remote(scheme, index) for index in range(2)]
    get = partial(cluster.get, timeout=PATIENCE)
    try:
        connecting = [one.connect.remote() for one in actors]
        scheme.connect()
        get(connecting)
        assert get([one.receive.remote(0) for one in actors]) == [None, None]
        for number in range(1, 4):
            torch.nn.init.constant_(learner.bias, number)
            waiting = [one.receive.remote(None) for one in actors]
            scheme.send()
            assert get(waiting) == [number, number]
            scheme.wait_async(PATIENCE)
        torch.nn.init.constant_(learner.bias, 9)
        scheme.send(worker_ids=1)
        with pytest.raises(TimeoutError, match="receiver 1 did not receive the weights"):
            scheme.wait_async(0.01)
        assert get(actors[1].receive.remote(None)) == 9
        scheme.wait_async(PATIENCE)
        assert get(actors[0].receive.remote(0)) is None
        scheme.shutdown()
        ended = get([one.receive.remote(None) for one in actors])
        assert all(one != one for one in ended)
    finally:
        for one in actors:
            cluster.kill(one)


@BOTH
def test_a_collector_sends_its_weights_also_to_who_takes_a_dead_workers_place(cluster, backend):
    with RayCollector(
        envs(2),
        Chooser(1),
        sync=True,
        frames_per_batch=20,
        remote_configs=ASKED,
        track_policy_version=True,
        weight_sync_schemes={"policy": RayWeightSyncScheme(backend=backend)},
    ) as collector:
        assert stamps(collector.next()) == {(1, 0)}
        collector.update_policy_weights_(Chooser(2))
        assert stamps(collector.next()) == {(2, 1)}
        # Weights that are replaced before they are taken, and a version without weights.
        collector.update_policy_weights_(Chooser(0))
        collector.update_policy_weights_(Chooser(3))
        collector.increment_version()
        assert stamps(collector.next()) == {(3, 4)}
        collector.update_policy_weights_(Chooser(2))
        kill(collector.remote_collectors[1])
        with pytest.warns(RuntimeWarning, match="worker 1 died"):
            assert stamps(collector.next()) == {(2, 5)}
        collector.update_policy_weights_(Chooser(3))
        assert stamps(collector.next()) == {(3, 6)}
