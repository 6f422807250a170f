"""Addition of workers to a collector that has some already."""

from __future__ import annotations

from typing import Any

from trawl.collectors.config import resolve_devices
from trawl.collectors.fleet_collector import FleetCollector, packed_policy
from trawl.collectors.multi_config import sources
from trawl.envs.build import distinct


def grow(collector: FleetCollector, create_env_fn: Any, count: int | None, policy: Any) -> None:
    """Starts more workers, with the options of the first; batches of all workers grow accordingly.

    Args:
        collector: the collector, between two batches.
        create_env_fn: a list with the environment of each new worker, or one environment for all.
        count: number of new workers, if ``create_env_fn`` is not a list.
        policy: their policy; None for that of the first worker.

    Raises:
        TypeError: if a weight-sync scheme has a fixed number of receivers.
    """
    collector._sender.check_growth()
    before = collector.create_env_fn
    found = distinct([*before, *sources(create_env_fn, count)])[len(before) :]
    for source in found:
        _add(collector, source, policy)
    collector._pool.add_workers(len(found))
    ready = [slot.ready for slot in collector._pool.slots if slot.ready is not None]
    for index, one in enumerate(ready):
        collector._sender.know(index, one.packings)
    collector._assembler = collector._new_assembler(ready)
    frames = [one.lanes * one.steps for one in ready]
    collector.requested_frames_per_batch = sum(frames) if collector.sync else max(frames)
    assembler = None if collector._workers_write else collector._assembler
    collector._scheduler.grow(assembler, frames)


def _add(collector: FleetCollector, source: Any, policy: Any) -> None:
    index, own = collector.num_workers, collector._own
    same = policy is None
    collector.num_workers = own.count = index + 1
    collector.create_env_fn.append(source)
    own.policies.append(own.policies[0] if same else policy)
    for values in own._own.values():
        values.append(values[0])
    if not same and "policy_factory" in own._own:
        own._own["policy_factory"][index] = None
    collector.devices.append(resolve_devices(collector.config, own.of(index)))
    collector._packed.append(collector._packed[0] if same else packed_policy(policy, index))
    collector._seeds.append(None)
    collector._env_states.append(None)
    collector._frames_asked.append(collector._frames_asked[0])
    collector._sender.grow(policy)
