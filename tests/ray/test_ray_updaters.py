"""Updaters that bring weights to the handles of a RayCollector: Trawl's, and TorchRL's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from multi_parts import Chooser, actions
from ray_parts import get, kill
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from test_ray_handles import make, stamps

from trawl.testing import NumberedEnv
from trawl.weight_update import RayTransport, RayWeightUpdater

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("cluster", "sent_by_value")


def torchrl_updaters() -> Any:
    pytest.importorskip("torchrl")
    from torchrl.collectors import weight_update

    return weight_update


def weights_of(module: torch.nn.Module) -> TensorDict:
    return TensorDict.from_module(module)


def settled(collector: Any) -> None:
    """Waits until what was sent to handles before has been taken."""
    get(*(handle.stats.remote() for handle in collector.remote_collectors))


def updater_of(kind: str, policy: Any, collector: Any) -> Any:
    if kind == "trawl":
        return RayWeightUpdater(weights_of(policy), collector.remote_collectors)
    return torchrl_updaters().RayWeightUpdater(weights_of(policy), collector.remote_collectors)


@pytest.mark.parametrize(("kind", "sync"), [("trawl", False), ("torchrl", True)])
def test_it_pushes_to_handles_and_may_be_the_updater_of_the_collector(kind, sync):
    """Each batch that begins after an update has the weights, and their version."""
    policy = Chooser(1)
    with make(policy, sync=sync) as collector:
        updater = updater_of(kind, policy, collector)

        def newest() -> list[tuple[int, int]]:
            settled(collector)
            if sync:
                return stamps(collector.next())
            # Some may be under way, of either worker.
            found: dict[int, list[Any]] = {0: [], 1: []}
            while min(map(len, found.values())) < 3:
                batch = collector.next()
                found[int(NumberedEnv.numbers(batch)[0, 0])] += stamps(batch[None])
            return [found[0][-1], found[1][-1]]

        for number in (2, 3):
            policy.become(number)
            updater.push_weights()
            assert newest() == [(number, number - 1)] * 2
        for worker, found in ((1, (3, 2)), (0, (0, 3))):
            updater.push_weights(weights_of(Chooser(0)).data, worker_ids=[worker])
            assert newest() == [found, (0, 3)]
            assert collector.policy_version_tracker.version == 3
            assert collector.policy_version == (None if worker else 3)
        collector.weight_updater = updater
        for version in range(4, 7):
            policy.become(version % 4)
            collector.update_policy_weights_()
            assert collector.policy_version_tracker.version == version
            assert newest() == [(version % 4, version)] * 2
        kill(collector.remote_collectors[1])
        with pytest.warns(RuntimeWarning, match="worker 1 died"):  # noqa: PT031
            while not collector.stats()["restarts"]:
                collector.next()
        policy.become(3)
        collector.update_policy_weights_()
        assert newest() == [(3, 7)] * 2


@pytest.mark.parametrize(("interval", "registered"), [(1, False), (3, True)])
def test_workers_are_skipped_until_they_have_delivered_enough_batches(interval, registered):
    policy = Chooser(0)
    with make(policy, workers=1) as collector:
        updater = RayWeightUpdater(
            weights_of(policy), collector.remote_collectors, max_interval=interval
        )
        if registered:
            collector.weight_updater = updater
        push = collector.update_policy_weights_ if registered else updater.push_weights
        seen = []
        for number in range(1, 8):
            policy.become(number % 4)
            push()
            settled(collector)
            seen.append(actions(collector.next()))
    expected = {1: [0, 2, 3, 0, 1, 2, 3], 3: [0, 0, 0, 0, 0, 0, 3]}
    assert seen == [{number} for number in expected[interval]]


def users_updater() -> Any:
    """A user's subclass of TorchRL's base class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)

        class Own(torchrl_updaters().WeightUpdaterBase):
            def __init__(self) -> None:
                self.sent: list[int] = []

            def _get_server_weights(self) -> Any:
                return TensorDict(choice=torch.tensor(3.0))

            def all_worker_ids(self) -> list[int]:
                return list(range(len(self.collector.remote_collectors)))

            def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Any) -> None:
                self.sent.append(worker_id)
                handle = self.collector.remote_collectors[worker_id]
                handle.update_policy_weights_.remote(server_weights)

    return Own


def test_an_updater_of_torchrls_kind_is_an_option():
    """Its class or a function that makes one, too."""
    kind = users_updater()
    with make(Chooser(1), weight_updater=kind()) as collector:
        for updater in (collector.weight_updater, kind, lambda: kind()):
            collector.weight_updater = updater
            assert type(collector.weight_updater) is kind
        updater = collector.weight_updater
        assert updater.sent == []
        assert updater.collector is collector
        collector.update_policy_weights_()
        assert stamps(collector.next()) == [(3, 1)] * 2
        collector.update_policy_weights_(weights_of(Chooser(2)).data, worker_ids=1)
        assert stamps(collector.next()) == [(3, 1), (2, 2)]
        assert updater.sent == [0, 1, 1]
        collector.weight_updater = None
        collector.update_policy_weights_(Chooser(0))
        assert stamps(collector.next()) == [(0, 3)] * 2


def test_updaters_that_reach_no_worker_or_serve_another_are_refused():
    updaters = torchrl_updaters()
    policy = Chooser(1)
    with make(policy, workers=1) as collector, make(policy, workers=1) as another:
        vanilla = updaters.VanillaWeightUpdater(policy_weights=weights_of(policy))
        with pytest.raises(
            TypeError, match="TorchRL's VanillaWeightUpdater can't reach the workers"
        ):
            collector.weight_updater = vanilla
        with pytest.raises(TypeError, match=r"weight_updater must be a WeightUpdaterBase.*int"):
            collector.weight_updater = 3
        assert collector.weight_updater is None
        updater = RayWeightUpdater(weights_of(policy), another.remote_collectors)
        for _ in range(2):
            another.weight_updater = updater
        with pytest.raises(ValueError, match="already serves another"):
            collector.weight_updater = updater
        # A transport leads to a handle as well.
        RayTransport(remote_actor=another.remote_collectors[0]).send_weights(Chooser(3))
        assert actions(another.next()) == {3}


def test_errors_come_with_the_next_push_and_at_the_end():
    with make() as collector, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        updater = RayWeightUpdater(weights_of(Chooser(2)), collector.remote_collectors)
        updater.push_weights({"weight": torch.ones(2)}, worker_ids=1)
        settled(collector)
        with pytest.raises(KeyError, match=r"unknown \['weight'\]"):
            updater.push_weights()
        updater.push_weights()
        settled(collector)
        assert actions(collector.next()) == {2}
        # The end of the collector is that of its updater.
        collector.weight_updater = updater
        updater.push_weights({"weight": torch.ones(2)}, worker_ids=0)
        settled(collector)
        with pytest.raises(KeyError, match=r"unknown \['weight'\]"):
            collector.shutdown()
        assert collector.closed
        updater.close()


def test_an_actor_that_dies_before_it_takes_weights_is_told_of():
    with make() as collector:
        updater = RayWeightUpdater(weights_of(Chooser(2)), collector.remote_collectors)
        handle = collector.remote_collectors[0]
        kill(handle)
        updater.push_weights()
        # The call before it has failed when this one has.
        with pytest.raises(ray.exceptions.RayActorError):
            get(handle.stats.remote())
        with pytest.warns(RuntimeWarning, match="actor 0 died before it received the weights that"):
            updater.push_weights()
        with pytest.warns(RuntimeWarning, match="worker 0 died"):
            collector.next()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            updater.push_weights()
        settled(collector)
        assert actions(collector.next()) == {2}


def served(choice: int = 1) -> Any:
    return TensorDictModule(Chooser(choice), ["observation"], ["action"])


def test_an_inference_service_acts_for_all_workers():
    servers = pytest.importorskip("torchrl.modules.inference_server")
    server = servers.InferenceServer(
        policy_factory=served,
        service_backend="ray",
        service_backend_options={"remote_config": {"num_cpus": 0}},
        num_clients=4,
    )
    try:
        server.start()
        for name in ("policy_factory", "weight_updater"):
            option = {name: served if name == "policy_factory" else RayWeightUpdater}
            with pytest.raises(ValueError, match=f"{name} can't be used with an inference service"):
                make(server, **option)
        with make(server) as collector:
            assert actions(collector.next()) == {1}
            with pytest.raises(ValueError, match="needs weights"):
                collector.update_policy_weights_()
            collector.update_policy_weights_(weights_of(served(3)).data)
            assert actions(collector.next()) == {3}
        assert server.is_alive
    finally:
        server.shutdown()
