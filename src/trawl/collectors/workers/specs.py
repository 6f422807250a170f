"""Specifications of workers, from which they and their replacements are started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trawl.backends.base import Backend
from trawl.collectors.multi_config import MultiConfig
from trawl.collectors.options import WRITER, tagged
from trawl.collectors.workers.service import WorkerProgram, WorkerSpec
from trawl.collectors.workers.setups import WorkerSetups, packed_program
from trawl.collectors.workers.slot import WorkerSlot
from trawl.collectors.workers.weight_sender import WeightSender
from trawl.envs.processes.own_process import parent_registry
from trawl.envs.seeding import derive


class WorkerSpecs:
    """Makes the specifications of a collector's workers.

    Args:
        config: options of the collector.
        setups: setup of each worker.
        backend: where the workers run.
        sender: the object that sends weights to workers.
        kind: class of the workers' collectors.
        whole: True if whole trajectories are assembled.

    Attributes:
        buffer: the replay buffer in the form that is sent to workers; None if they write into none.
        adapt: function that changes the program of a worker, with the number of copies of its
            environment; None if it stays as it is.
        service: class of the workers' services; None for the usual one.
    """

    def __init__(
        self,
        config: MultiConfig,
        setups: WorkerSetups,
        backend: Backend,
        sender: WeightSender,
        kind: Any,
        whole: bool,
    ) -> None:
        self.buffer: Any = None
        self.adapt: Callable[[WorkerProgram, int], WorkerProgram] | None = None
        self.service: Any = None
        self._config, self._setups, self._backend = config, setups, backend
        self._sender, self._kind, self._whole = sender, kind, whole
        self._registry = parent_registry()

    def spec(self, slot: WorkerSlot) -> WorkerSpec:
        """Returns the current specification of a slot's worker."""
        index, config, setup = slot.index, self._config, self._setups[slot.index]
        program, hooks, receivers = setup.package, self._setups.hooks, None
        changed: dict[str, Any] = {}
        if program is None:
            made = self._program(index)
            program = packed_program(self._backend, made, index)
            # The learner changes its policy, but a replacement begins with the same one.
            if made.policy is not None:
                setup.package, setup.hooks = program, dict(hooks)
        else:
            changed = {name: hooks[name] for name in hooks if hooks[name] is not setup.hooks[name]}
            receivers = self._sender.receivers(index)
        begin, stride = self._setups.trajectories(index, slot.restarts, slot.trajectory)
        seed = setup.seed
        spec = WorkerSpec(
            index=index,
            program=program,
            options=changed,
            receivers=receivers,
            threads=config.num_sub_threads if self._backend.isolated else None,
            registry=self._registry,
            trajectory=begin,
            stride=stride,
            version=self._sender.versions[index],
            first_env=setup.first_env,
            begun=slot.begun,
            seed=None if seed is None else (derive(seed[0], "restart", slot.restarts), seed[1]),
            env_state=setup.env_state,
            given=self._sender.handed(index),
            whole=self._whole,
            snapshots=config.worker_snapshots,
            recovery=slot.recovery,
        )
        return spec if self.service is None else replace(spec, service=self.service)

    def _program(self, index: int) -> WorkerProgram:
        """Returns what a worker gets from the user's program."""
        setup, config = self._setups[index], self._config
        options = self._setups.options(index)
        if self.buffer is not None:
            options |= {name: getattr(config, name) for name in tagged(MultiConfig, WRITER)}
            options["replay_buffer"] = self.buffer
        source, count = setup.create_env_fn, setup.environments
        program = WorkerProgram(
            init_fn=config.init_fn,
            policy=self._setups.initial_policy(index),
            collector_class=self._kind,
            create_env_fn=source if count == 1 else [source] * count,
            options=options,
            receivers=self._sender.receivers(index),
        )
        return program if self.adapt is None else self.adapt(program, count)
