"""What the table of refusals says: each entry is refused, and all else runs."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule

from trawl.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    NormalizeObservation,
    RandomPolicy,
)
from trawl.collectors.distributed import DistributedCollector
from trawl.data import MemmapSink
from trawl.envs import GymEnv, PettingZooEnv
from trawl.extras.cli import main
from trawl.supported import TABLE, refused
from trawl.testing import Script
from trawl.testing.faces import FACES
from trawl.testing.scripted_envs import ScriptedEnv, ScriptedPool, agents_environment
from trawl.weight_update import MultiProcessedWeightUpdater, SharedMemWeightSyncScheme

SCRIPT = Script()
ENV = partial(ScriptedEnv, SCRIPT)


class Texts(gymnasium.Env[Any, Any]):
    """Environment whose frames have no fixed layout."""

    observation_space = spaces.Text(5)
    action_space = spaces.Discrete(2)

    def reset(self, **kwargs: Any) -> Any:
        return "text", {}


class Buffer(list[Any]):
    add = list.append


def face(name: str) -> Any:
    kind = FACES[name]
    if kind.needs is not None:
        pytest.importorskip(kind.needs)
    count = 1 if kind.single else 2 if kind.kind.together == 2 else 3
    return kind.make(SCRIPT, range(count))


def torchrl_env() -> Any:
    return face("torchrl")()


def pool(ready: int = 1, mode: str = "NextStep") -> Any:
    return ScriptedPool(SCRIPT, range(3), mode, ready)


def one(source: Any = ENV, policy: Any = None, **options: Any) -> Any:
    return Collector(source, policy, **{"frames_per_batch": 6, **options})


def pooled(**options: Any) -> Any:
    return one(pool, **options)


def many(kind: Any, **options: Any) -> Any:
    return kind([ENV] * 2, None, frames_per_batch=6, start_method="inline", **options)


def ready(source: Any = None, **options: Any) -> Any:
    source = [ENV] * 2 if source is None else source
    policy = RandomPolicy(GymEnv(ENV()).full_action_spec)
    return AsyncBatchedCollector(source, policy=policy, frames_per_batch=6, **options)


def storage(**options: Any) -> Any:
    data = pytest.importorskip("torchrl.data")
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(100, ndim=2))
    source = options.pop("source", [ENV] * 2)
    return one(source, replay_buffer=buffer, **options)


def shared_buffer(**options: Any) -> Any:
    data = pytest.importorskip("torchrl.data")
    buffer = data.ReplayBuffer(storage=data.LazyMemmapStorage(100), shared=True)
    return MultiSyncCollector([ENV] * 2, None, frames_per_batch=6, replay_buffer=buffer, **options)


def remote(**options: Any) -> Any:
    return DistributedCollector([ENV], None, frames_per_batch=6, **options)


def on_ray(**options: Any) -> Any:
    pytest.importorskip("ray")
    from trawl.collectors.distributed import RayCollector

    return RayCollector([ENV], None, frames_per_batch=6, **options)


def in_turns(**options: Any) -> Any:
    pytest.importorskip("pettingzoo")
    from pettingzoo.utils.conversions import parallel_to_aec

    return PettingZooEnv(parallel_to_aec(agents_environment(SCRIPT, 0)), **options)


def service() -> Any:
    servers = pytest.importorskip("torchrl.modules.inference_server")
    return servers.InferenceServer(linear())


def update_service(**given: Any) -> None:
    server = service()
    server.start()
    try:
        update(one("Pendulum-v1", server), **given)
    finally:
        server.shutdown()


def served(**options: Any) -> Any:
    return one("Pendulum-v1", service(), **options)


def linear() -> Any:
    return TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["action"])


def update(collector: Any, **given: Any) -> None:
    with collector:
        collector.update_policy_weights_(**given)


def command(kind: type[Exception], *arguments: str) -> None:
    """Runs the command, and raises its error as one of the type that the collector would raise."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert main(["collect", *arguments]) == 2
    _, _, text = err.getvalue().partition("--")
    raise kind(text.replace("-", "_", 1))


def each(function: Any, /, more: Any = (), **values: Any) -> list[Callable[[], Any]]:
    """Returns calls of a function, each with one of the values."""
    return [partial(function, **{name: value}, **dict(more)) for name, value in values.items()]


BUFFERED = {"replay_buffer": Buffer()}
WHOLE = {"trajs_per_batch": 2}
WRITES = {"replay_write_mode": "trajectory"}
SYNC, ASYNC = partial(many, MultiSyncCollector), partial(many, MultiAsyncCollector)
UPDATER = MultiProcessedWeightUpdater

#: Calls that are refused, by the name of the entry: at least one for each of its options.
CASES: dict[str, list[Callable[[], Any]]] = {
    "LIMIT_ALL_AT_ONCE": [lambda: one(face("vector_next_step"), max_frames_per_traj=2)],
    "STAGE_LOOSE": [
        lambda: one(Texts, frame_stack=2),
        lambda: one(face("loose"), normalize_observations=NormalizeObservation(keys=["text"])),
    ],
    "RESTART_OBJECT": [lambda: one(ENV(), on_env_error="restart")],
    "RESET_ARGUMENTS_NONE": [
        lambda: one(face("dm_env"), reset_kwargs={"options": {}}),
        lambda: one("envpool:CartPole-v1", reset_kwargs={"options": {}}),
    ],
    "RESET_ARGUMENTS_BEGUN": [
        lambda: one(face("vector_next_step"), reset_kwargs={"options": {}}),
        lambda: one(face("tensors_same_step"), reset_kwargs={"options": {}}),
    ],
    "RESET_FUNCTION_BATCH": [
        lambda: one(face("vector_disabled"), reset_kwargs=lambda env, episode: {}),
        lambda: one(face("tensors_disabled"), reset_kwargs=lambda env, episode: {}),
    ],
    "INFO_WITHOUT": [lambda: command(TypeError, f"{__name__}:torchrl_env", "--info-keys", "level")],
    "MODE_ENVPOOL": [lambda: GymEnv("envpool:CartPole-v1", autoreset_mode="NextStep")],
    "MODE_SINGLE": [lambda: GymEnv(ENV(), autoreset_mode="NextStep")],
    "MODE_POOL": [lambda: GymEnv(pool(mode="Disabled"))],
    "MASK_AEC": [lambda: in_turns(use_mask=False)],
    "READY_STEPS": [
        lambda: pooled(set_truncated=True, extend_buffer=False, replay_buffer=Buffer()),
        lambda: ready(set_truncated=True, extend_buffer=False, replay_buffer=Buffer()),
    ],
    "POOL_RESET": [
        lambda: one(partial(pool, 2), reset_at_each_iter=True),
        lambda: ready(partial(pool, 2), reset_at_each_iter=True),
    ],
    "FORMAT_ALONE": each(one, traj_format="cat"),
    "WHOLE_ALONE": each(one, traj_sampling="per_env", trajs_per_write=2),
    "WRITE_MODE_ALONE": [
        lambda: one(replay_write_mode="rollout"),
        lambda: one(replay_write_mode="trajectory"),
    ],
    "WRITE_SIZE_ALONE": [lambda: one(trajs_per_write=2, **WHOLE)],
    "WRITE_MODE_TWICE": [
        lambda: one(replay_write_mode="rollout", **WHOLE, **BUFFERED),
        lambda: one(**WRITES, **WHOLE, **BUFFERED),
    ],
    "WRITE_MODE_YIELD": [lambda: ready(yield_completed_trajectories=True, **WRITES, **BUFFERED)],
    "YIELD_TWICE": [lambda: ready(yield_completed_trajectories=True, trajs_per_batch=2)],
    "WHOLE_WITHOUT_IDS": each(one, {"track_traj_ids": False, **BUFFERED}, **WHOLE, **WRITES),
    "WHOLE_SPLIT": each(one, {"split_trajs": True, **BUFFERED}, **WHOLE, **WRITES),
    "WHOLE_TRUNCATED": each(one, {"set_truncated": True, **BUFFERED}, **WHOLE, **WRITES),
    "SPLIT_WITHOUT_IDS": [lambda: one(split_trajs=True, track_traj_ids=False)],
    "BUFFER_MEMORY": each(one, BUFFERED, return_same_td=True, use_buffers=True),
    "BUFFER_STEPS": each(
        one,
        {"extend_buffer": False, **BUFFERED},
        postproc=print,
        split_trajs=True,
        **WHOLE,
        **WRITES,
    ),
    "STORAGE_ROWS": each(
        storage, exact_frames=True, split_trajs=True, on_env_error="restart", **WHOLE, **WRITES
    ),
    "STORAGE_FRAMES": [
        lambda: storage(source=ENV),
        lambda: storage(source=face("vector_next_step")),
    ],
    "RATIO_ALONE": [lambda: one(samples_per_insert=2.0)],
    "AHEAD_ALONE": [lambda: one(inserts_ahead=2, **BUFFERED)],
    "SINK_SHARED": [lambda: shared_buffer(sink=MemmapSink("unused"))],
    "SINGLE_ONLY": each(SYNC, return_same_td=True, interruptor=print),
    "JOINED_ASYNC": [lambda: ASYNC(cat_results=0), lambda: ASYNC(cat_results=-1)],
    "LAG_SYNC": [lambda: SYNC(max_policy_lag=0), lambda: SYNC(max_policy_lag=1)],
    "PREFETCH_ASYNC": [lambda: ASYNC(prefetch=1)],
    "PREFETCH_UPDATER": [lambda: SYNC(prefetch=1, weight_updater=UPDATER)],
    "JOINED_UNBUFFERED": [
        lambda: SYNC(cat_results=0, use_buffers=False),
        lambda: SYNC(cat_results=-1, use_buffers=False),
    ],
    "UPDATE_WITHOUT_MODULE": [
        lambda: SYNC(update_at_each_batch=True),
        *each(remote, update_after_each_batch=True, max_weight_update_interval=2),
    ],
    "SNAPSHOTS_NESTED": [
        lambda: remote(worker_snapshots=1, collector_class="sync", num_workers_per_collector=2)
    ],
    "LAG_PREEMPTION": [
        lambda: remote(
            max_policy_lag=1,
            collector_class="sync",
            collector_kwargs={"preemptive_threshold": 0.5},
        )
    ],
    "DIRECT_BACKEND": each(one, {"backend": "direct"}, sync=True, backend_options={}),
    "RAY_START": [lambda: on_ray(start_method="spawn")],
    "LAUNCHER_START": [lambda: remote(start_method="spawn")],
    "READY_LAG": [lambda: ready(max_policy_lag=0, envs_per_worker=2)],
    "READY_POOL": each(
        partial(ready, pool),
        max_batch_size=2,
        min_batch_size=2,
        server_timeout=1.0,
        server_config={"max_batch_size": 2},
        backend="threading",
        env_backend="threading",
        envs_per_worker=2,
        worker_affinity=[[0]],
        worker_timeout=5.0,
        max_policy_lag=1,
        policy_backend="threading",
    ),
    "READY_LAYOUT": [lambda: ready([Texts] * 2, env_backend="threading")],
    "UPDATER_SCHEMES": [
        lambda: one(
            weight_updater=UPDATER,
            weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
        )
    ],
    "UPDATER_MODELS": [
        lambda: update(SYNC(weight_updater=UPDATER), weights_dict={"policy": linear()}),
        lambda: update(SYNC(weight_updater=UPDATER), policy=linear(), model_id="policy"),
    ],
    "CHOSEN_WORKERS_NONE": [
        lambda: update(one("Pendulum-v1", linear()), policy_or_weights=linear(), worker_ids=0)
    ],
    "CHOSEN_WORKERS_SERVICE": [lambda: update_service(policy_or_weights=linear(), worker_ids=0)],
    "SERVICE_WEIGHTS": each(
        served, policy_factory=linear, weight_sync_schemes={}, weight_updater=UPDATER
    ),
    "COMMAND_PROCESSES": [
        lambda: command(
            ValueError, "CartPole-v1", "--envs", "2", "--env-processes", "2", "--workers", "2"
        )
    ],
}


def test_the_cases_are_those_of_the_table() -> None:
    assert list(CASES) == list(TABLE)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.filterwarnings("ignore:split_trajs=True pads", "ignore:trajs_per_batch without")
def test_each_entry_is_refused(name: str) -> None:
    entry, named = TABLE[name], set()
    for call in CASES[name]:
        with pytest.raises(entry.kind) as caught:
            call().shutdown()
        text = str(caught.value)
        assert type(caught.value) is entry.kind, caught.value
        assert entry.instead in text or name == "INFO_WITHOUT", text
        named |= {option for option in entry.names if text.split()[0].startswith(option)}
    assert named == set(entry.names), named ^ set(entry.names)


# --- options and environments

#: Options that some environments refuse, with values.
OPTIONS: dict[str, Any] = {
    "max_frames_per_traj": 2,
    "frame_stack": 2,
    "normalize_observations": True,
    "normalize_rewards": True,
    "on_env_error": "restart",
    "set_truncated": True,
    "split_trajs": True,
}
PLACES: dict[str, Any] = {**{name: partial(face, name) for name in FACES}, "pool": lambda: pool}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.filterwarnings("ignore:split_trajs=True pads")
def test_an_environment_refuses_what_the_table_says(place: str) -> None:
    source = PLACES[place]()
    with one(source) as collector:
        traits = getattr(collector.env, "traits", frozenset())
    if place in FACES:
        assert traits == FACES[place].traits
    for name, value in OPTIONS.items():
        expected = refused({name: value}, traits)
        if expected:
            with pytest.raises(ValueError, match=f"^{name}.* can't be used with") as caught:
                one(source, **{name: value})
            assert expected[0].instead in str(caught.value) or "partial_reset" in str(caught.value)
        else:
            one(source, **{name: value}).shutdown()
