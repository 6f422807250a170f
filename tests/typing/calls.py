"""Calls that are right and calls that are wrong, for type checkers: nothing runs this file.

``# error`` marks a line in which every checker must find an error, ``# error: pyright`` a line in
which only pyright does: tensordict declares no types, so for mypy all that it exports is ``Any``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from typing_extensions import assert_type

import trawl
from trawl import (
    AsyncCollector,
    Collector,
    Evaluator,
    ExplorationType,
    GymEnv,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
    ParallelEnv,
    PolicyVersion,
    RandomPolicy,
    SerialEnv,
    split_trajectories,
)
from trawl.collectors import AsyncBatchedCollector
from trawl.collectors.distributed import (
    DistributedCollector,
    DistributedSyncCollector,
    RayCollector,
    RPCCollector,
)
from trawl.data import MemmapSink
from trawl.weight_update import SharedMemWeightSyncScheme


class Interruptor:
    def collection_stopped(self) -> bool:
        return False


class Sub(Collector):
    def __init__(self, env: str, **options: Any) -> None:
        super().__init__(env, **options)


def make() -> GymEnv:
    return GymEnv("Pendulum-v1")


def act(observation: torch.Tensor) -> torch.Tensor:
    return observation


env = GymEnv("CartPole-v1", num_envs=2, categorical_action_encoding=True)
module = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])

# --- one process

Collector("CartPole-v1", frames_per_batch=10)
Collector(create_env_fn=env, policy=None, frames_per_batch=10)
Collector(make, module, frames_per_batch=10, total_frames=-1)
Collector(gymnasium.make("Pendulum-v1"), nn.Linear(3, 1), frames_per_batch=10)
Collector(gymnasium.make_vec("Pendulum-v1", num_envs=2), act, frames_per_batch=10)
Collector([make, "Pendulum-v1", lambda: make()], RandomPolicy(), frames_per_batch=10)
Collector(
    "Pendulum-v1",
    policy_factory=lambda: module,
    frames_per_batch=10,
    device="cpu",
    storing_device=torch.device("cpu"),
    policy_device=0,
    exploration_type=ExplorationType.MEAN,
    create_env_kwargs={"frame_skip": 2},
    compile_policy={"mode": "default"},
    cudagraph_policy=False,
    interruptor=Interruptor(),
    postproc=lambda batch: batch[:1],
    post_collect_hook=print,
    replay_buffer=[],
    sink=MemmapSink("data"),
    track_policy_version=PolicyVersion(),
    weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
    on_env_error="restart",
    traj_format="cat",
    trajs_per_batch=2,
)
Collector("CartPole-v1", frames_per_batch=10, backend="process", num_collectors=2, sync=True)
Collector("CartPole-v1", frames_per_batch=10, backend_options={"max_restarts": 2})
Sub("CartPole-v1", frames_per_batch=10)

Collector()  # error
Collector(3, frames_per_batch=10)  # error
Collector("CartPole-v1")  # error
Collector("CartPole-v1", frames_per_batch="a")  # error
Collector("CartPole-v1", frame_per_batch=3)  # error
Collector("CartPole-v1", None, 10)  # error
Collector("CartPole-v1", 3, frames_per_batch=10)  # error
Collector("CartPole-v1", frames_per_batch=10, total_frames="all")  # error
Collector("CartPole-v1", frames_per_batch=[10, 10])  # error
Collector("CartPole-v1", frames_per_batch=10, device=["cpu"])  # error
Collector("CartPole-v1", frames_per_batch=10, backend="mpi")  # error
Collector("CartPole-v1", frames_per_batch=10, num_workers=2)  # error
Collector("CartPole-v1", frames_per_batch=10, on_env_error="ignore")  # error
Collector("CartPole-v1", frames_per_batch=10, traj_format="stack")  # error
Collector("CartPole-v1", frames_per_batch=10, exploration_type="maen")  # error: pyright
Collector("CartPole-v1", frames_per_batch=10, policy_factory=3)  # error
Collector("CartPole-v1", frames_per_batch=10, sink="data")  # error
Collector("CartPole-v1", frames_per_batch=10, weight_sync_schemes={"policy": "shared"})  # error
Collector("CartPole-v1", frames_per_batch=10, create_env_kwargs="frame_skip=2")  # error

# --- what a collector gives

with Collector("CartPole-v1", frames_per_batch=10, total_frames=20) as collector:
    assert_type(collector, Collector)
    for batch in collector:
        assert_type(batch, TensorDictBase)
    assert_type(iter(collector), Iterator[TensorDictBase])
    assert_type(collector.next(), "TensorDictBase | Any")
    assert_type(collector.rollout(), TensorDictBase)
    assert_type(collector.fake_tensordict(), TensorDictBase)
    assert_type(collector.stats(), dict[str, Any])
    assert_type(collector.state_dict(), dict[str, Any])
    assert_type(collector.total_frames, float)
    assert_type(collector.requested_frames_per_batch, int)
    assert_type(collector.closed, bool)
    assert_type(collector.policy_version, "int | str | None")
    assert_type(len(collector), int)
    collector.update_policy_weights_(module)
    collector.set_seed(1)
    collector.shutdown(timeout=1.0)
    collector.shutdown(timeout="soon")  # error
    collector.set_seed("one")  # error
    collector.shut_down()  # error
    print(collector.total_frame)  # error

# --- workers

MultiSyncCollector("CartPole-v1", num_workers=2, frames_per_batch=10, cat_results="stack")
MultiSyncCollector([make, make], [module, None], frames_per_batch=[10, 20], device=["cpu", None])
MultiAsyncCollector([make, ["Pendulum-v1", make]], module, frames_per_batch=10, max_policy_lag=1)
MultiCollector([make, make], module, frames_per_batch=10, sync=False, start_method="spawn")
AsyncCollector([make, make], frames_per_batch=10, init_fn=make, worker_timeout=2.5)

MultiCollector("CartPole-v1", frames_per_batch=10)  # error
MultiCollector("CartPole-v1", frames_per_batch=10, sync="yes")  # error
MultiSyncCollector("CartPole-v1", frames_per_batch="a")  # error
MultiSyncCollector("CartPole-v1", frame_per_batch=3)  # error
MultiSyncCollector("CartPole-v1", frames_per_batch=10, num_workers="2")  # error
MultiSyncCollector("CartPole-v1", frames_per_batch=10, interruptor=Interruptor())  # error
MultiSyncCollector("CartPole-v1", frames_per_batch=10, cat_results="cat")  # error
MultiAsyncCollector("CartPole-v1", frames_per_batch="a")  # error
MultiAsyncCollector("CartPole-v1", frame_per_batch=3)  # error
MultiAsyncCollector("CartPole-v1", frames_per_batch=10, start_method="fork")  # error
MultiAsyncCollector("CartPole-v1", frames_per_batch=10, backend="ray")  # error
AsyncCollector("CartPole-v1", frames_per_batch="a")  # error
AsyncCollector("CartPole-v1", frame_per_batch=3)  # error

with MultiSyncCollector("CartPole-v1", num_workers=2, frames_per_batch=10) as several:
    assert_type(several, MultiSyncCollector)
    assert_type(several.num_workers, int)
    assert_type(several.max_restarts, int)
    for batch in several:
        assert_type(batch, TensorDictBase)
    assert_type(several.stats("both"), dict[str, Any])
    several.stats("all of them", 3)  # error

# --- clusters

RayCollector("CartPole-v1", frames_per_batch=10, num_collectors=2, remote_configs={"num_cpus": 1})
RayCollector(
    "CartPole-v1", frames_per_batch=10, collector_class="sync", num_workers_per_collector=2
)
DistributedCollector([make], module, frames_per_batch=10, launcher="mp", sync=True)
DistributedSyncCollector([make], module, frames_per_batch=10, launcher=None, update_interval=3)
RPCCollector([make], module, frames_per_batch=10, tensorpipe_options={"num_worker_threads": 4})

RayCollector("CartPole-v1", frames_per_batch="a")  # error
RayCollector("CartPole-v1", frame_per_batch=3)  # error
RayCollector("CartPole-v1", frames_per_batch=10, remote_config={"num_cpus": 1})  # error
RayCollector("CartPole-v1", frames_per_batch=10, start_method="spawn")  # error
RayCollector("CartPole-v1", frames_per_batch=10, launcher="mp")  # error
RayCollector("CartPole-v1", frames_per_batch=10, collector_class="several")  # error
DistributedCollector("CartPole-v1", frames_per_batch="a")  # error
DistributedCollector("CartPole-v1", frame_per_batch=3)  # error
DistributedCollector("CartPole-v1", frames_per_batch=10, launcher="slurm")  # error
DistributedSyncCollector("CartPole-v1", frames_per_batch="a")  # error
DistributedSyncCollector("CartPole-v1", frame_per_batch=3)  # error
DistributedSyncCollector("CartPole-v1", frames_per_batch=10, sync=True)  # error
RPCCollector("CartPole-v1", frames_per_batch="a")  # error
RPCCollector("CartPole-v1", frame_per_batch=3)  # error
RPCCollector("CartPole-v1", frames_per_batch=10, visible_devices=3)  # error

# --- environments and policies

ParallelEnv(2, "CartPole-v1", start_method="spawn")
ParallelEnv(2, [make, make], create_env_kwargs=[{}, {}], device="cpu")
SerialEnv(2, make)
assert_type(env.reset(), TensorDictBase)
assert_type(env.rollout(3), TensorDictBase)
RandomPolicy(env.action_spec, action_key=("agents", "action"))

ParallelEnv("2", "CartPole-v1")  # error
ParallelEnv(2, 3)  # error
ParallelEnv(2, "CartPole-v1", start_method="fork")  # error
ParallelEnv(2, "CartPole-v1", create_env_kwarg={})  # error
SerialEnv(2, 3)  # error
SerialEnv("2", make)  # error
GymEnv(3)  # error
GymEnv("CartPole-v1", num_envs="2")  # error
GymEnv("CartPole-v1", frame_skip=[1])  # error
RandomPolicy(env.action_spec, action_key=3)  # error
RandomPolicy(env.action_spec, key="action")  # error
print(trawl.Colector)  # error

# --- what users do with results

trained = nn.Linear(3, 1)
plain = Collector("Pendulum-v1", trained, frames_per_batch=10)
taken = plain.next()
print(taken["observation"].mean(), taken.batch_size, taken.shape[0], taken.numel())
reward: float = taken["next", "reward"].mean().item()
for taken in plain:
    loss = (taken["observation"] ** 2).mean()
    loss.backward()
    chosen = taken.to("cpu").reshape(-1).select("observation", ("next", "reward"))
    print(chosen["observation"].float() + 1, taken.get(("next", "done")).any())
    print(split_trajectories(taken)["collector", "mask"].sum())
print(trawl.__version__.split("."))
print(plain.stats()["frames_per_second"] / 2, plain.policy.state_dict())
print(plain.env.reset()["observation"], plain.env.action_spec.shape)
print(next(iter(plain))["action"].sum())
plain.load_state_dict(plain.state_dict())
print(several.next()["observation"].float())
for index, taken in enumerate(several):
    print(index, taken["action"].shape)
    several.update_policy_weights_()
evaluator = Evaluator("Pendulum-v1", trained)
print(evaluator.evaluate()["eval/reward"] > 3)
if (polled := evaluator.poll()) is not None:
    print(polled["eval/reward"])
print(ParallelEnv(2, "Pendulum-v1").rollout(3)["next", "reward"].mean().item())
waiting = AsyncBatchedCollector([make], policy=trained, frames_per_batch=10)
print(waiting.next()["env_index"].max().item())
for taken in waiting:
    print(taken["env_index"].max().item())

plain.next(3)  # error
print(trawl.__version__.major)  # error
