"""Control of a collector's workers: weights, seeds, state, hooks, calls."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from operator import methodcaller
from threading import Lock
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn
from typing_extensions import override

from trawl.collectors import worker
from trawl.collectors.assembly import Assembly
from trawl.collectors.base import BaseCollector
from trawl.collectors.config import Devices
from trawl.collectors.delivery import Delivery
from trawl.collectors.fleet import Fleet
from trawl.collectors.local_models import LocalModels
from trawl.collectors.multi_config import MultiConfig, PerWorker
from trawl.collectors.orders import Changed, NewWeights, Ready
from trawl.collectors.placing import tensors_of
from trawl.collectors.profile import ProfileConfig
from trawl.collectors.schedule import Schedule
from trawl.collectors.weights import POLICY, WorkerIds
from trawl.envs.seeding import check_seed, derive
from trawl.paths import get_path
from trawl.weight_update import strategy
from trawl.weight_update.board import Posted
from trawl.weight_update.mailbox import Packet
from trawl.weight_update.scheme import Receiver, WeightSyncScheme
from trawl.weight_update.shipments import Group


class FleetControl(BaseCollector):
    """The part of a collector with workers that controls them, beside collecting.

    Workers answer between two batches. Seeds, weights, versions, hooks and loaded environment
    states are kept for workers that replace dead ones.

    Attributes:
        num_workers: number of workers.
        policy: the policy as it was given; workers have copies.
    """

    config: MultiConfig
    sync: bool
    num_workers: int
    policy: Any
    devices: list[Devices]
    _fleet: Fleet
    _models: LocalModels
    _packed: list[bytes | None]
    _assembly: Assembly
    _delivery: Delivery
    _own: PerWorker
    _hooks: dict[str, Any]
    _announced: int | str | None
    _channel: WeightSyncScheme
    _schedule: Schedule
    _weights_lock: Lock
    _sends: int
    _versions: list[Any]
    _seeds: list[tuple[int, bool] | None]
    _env_states: list[Any]

    def _all(self, function: Any, *arguments: Any) -> list[Any]:
        """Calls a function with each worker's collector, and returns the results."""
        self._check_open(getattr(function, "__name__", "a call"))
        with self._held():
            results = self._fleet.call(
                dict.fromkeys(range(self.num_workers), (function, *arguments))
            )
        return [results[index] for index in range(self.num_workers)]

    def _one(self, index: int, function: Any, *arguments: Any) -> Any:
        self._check_open(getattr(function, "__name__", "a call"))
        with self._held():
            return self._fleet.call({index: (function, *arguments)})[index]

    def reset(self, reset_idx: Sequence[bool] | None = None, **kwargs: Any) -> None:
        """Begins new trajectories.

        Args:
            reset_idx: for each worker, True to reset its environments; None to reset all.
            **kwargs: arguments of the environments' reset.

        Raises:
            TypeError: if an entry is not a bool.
            ValueError: if there is not exactly one entry for each worker.
        """
        self._check_open("reset()")
        chosen = [True] * self.num_workers if reset_idx is None else list(reset_idx)
        if not all(isinstance(asked, (bool, np.bool_)) for asked in chosen):
            raise TypeError(
                f"reset_idx must hold a bool for each worker, but it is {chosen}: "
                f"{[True] * self.num_workers} resets all"
            )
        if len(chosen) != self.num_workers:
            raise ValueError(
                f"reset_idx has {len(chosen)} entries, but there are {self.num_workers} workers"
            )
        with self._held():
            self._fleet.call(
                {
                    i: (methodcaller("reset", **own),)
                    for i, own in _seeded(chosen, kwargs)
                    if chosen[i]
                }
            )

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds each worker (environments, policy, random actions), and resets the environments.

        Two collectors with the same arguments give equal batches from the same seed. With
        ``sync=False``, each worker's batches are equal, but their order depends on the workers'
        speed. Batches that workers have collected already are delivered first.

        Args:
            seed: a non-negative integer.
            static_seed: True to give all environments the same seed.

        Returns:
            A seed for a further environment (equal to ``seed`` if ``static_seed`` is True).
        """
        seed = check_seed(seed)
        self._check_open("set_seed()")
        with self._held():
            for index in range(self.num_workers):
                # Set before the call: the worker may be replaced while others are seeded.
                self._seeds[index] = seed, static_seed
                call = (methodcaller("set_seed", seed, static_seed),)
                seed = self._fleet.call({index: call})[index]
        return seed

    # --- weights

    def _weight_groups(self, model_id: str) -> list[Group]:
        """Returns groups of workers with the same weights, each with their source here."""
        if model_id != POLICY:
            return [Group.of(range(self.num_workers), None)]
        workers: dict[int, list[int]] = {}
        origins: dict[int, Any] = {}
        for index, policy in enumerate(self._own.policies):
            origin = policy if policy is not None else self._own.factory(self.config, index)
            origins[id(origin)] = policy
            workers.setdefault(id(origin), []).append(index)
        return [
            Group.of(own, origins[key] if isinstance(origins[key], nn.Module) else None)
            for key, own in workers.items()
        ]

    def _receivers_of(self, index: int) -> dict[str, Receiver]:
        """Returns the receivers from which a worker takes new weights, by model."""
        return {model_id: scheme.receiver(index) for model_id, scheme in self._channels.items()}

    @property
    def _channels(self) -> dict[str, WeightSyncScheme]:
        """The schemes that send weights to workers, by model."""
        workers = {
            model_id: scheme
            for model_id, scheme in self._weight_sync_schemes.items()
            if not (scheme.model_is_elsewhere or self._is_here(model_id))
        }
        return {**workers, POLICY: self._channel}

    def _is_here(self, model_id: str) -> bool:
        """Returns True if a model is part of a replay buffer that only this process writes."""
        return model_id.startswith("replay_buffer") and not self._workers_write

    @property
    def _workers_write(self) -> bool:
        """True if workers write into the replay buffer themselves."""
        return False

    def _know(self, index: int, ready: Ready) -> None:
        """Tells the schemes how the weights of a worker's models are packed."""
        for model_id, packing in ready.packings.items():
            self._channels[model_id].know(index, packing)

    def _send_weights(self, model_id: str, index: int, packet: Packet) -> None:
        """Sends weights to a worker by a message."""
        self._fleet.tell(index, NewWeights(model_id, packet))
        # If another thread is collecting, that thread sends the message.
        if self._background is None and self._lock.acquire(blocking=False):
            try:
                self._fleet.send_told()
            finally:
                self._lock.release()

    def _note_sent(self, workers: Collection[int]) -> None:
        """Counts an update of the policy, if its weights were sent to any worker."""
        self._sends += bool(workers)

    def _note_change(self, index: int, changed: Changed) -> None:
        """Called when a call through a worker's handle has changed the worker."""
        raise NotImplementedError(f"workers of {type(self).__name__} have no handles")

    def _chosen(self, worker_ids: WorkerIds) -> list[int]:
        """Returns the numbers of workers that are named by number, or by their policy's device.

        Raises:
            ValueError: if a worker does not exist, or none is named.
            TypeError: if an entry is neither a number nor a device.
        """
        given = list(worker_ids) if isinstance(worker_ids, Sequence) else [worker_ids]
        if not any(isinstance(one, torch.device) for one in given):
            return self._channel.chosen(worker_ids)
        numbers: list[Any] = []
        for one in given:
            named = [i for i, own in enumerate(self._acting_devices()) if own == one]
            if isinstance(one, torch.device) and not named:
                raise ValueError(f"worker_ids names {one}, but no worker's policy is there")
            numbers += named if isinstance(one, torch.device) else [one]
        return sorted(set(self._channel.chosen(numbers)))

    def _acting_devices(self) -> list[torch.device]:
        """Returns the device of each worker's policy: by default, that of the given policy."""
        return [
            one.policy or next((t.device for t in tensors_of(policy)), torch.device("cpu"))
            for one, policy in zip(self.devices, self._own.policies, strict=True)
        ]

    @override
    def _prepare_weights(
        self,
        by_model: Mapping[str, Any],
        worker_ids: WorkerIds,
        new_version: bool = True,
    ) -> Callable[[], None]:
        for model_id in by_model:
            if model_id not in self._weight_sync_schemes:
                raise KeyError(
                    f"there is no model {model_id!r} that weights can be sent to; there are "
                    f"{sorted(self._weight_sync_schemes)}. Others need a scheme in "
                    "weight_sync_schemes"
                )
            if model_id != POLICY and by_model[model_id] is None:
                raise ValueError(
                    f"the weights of {model_id!r} have to be given: only workers have that model"
                )
        chosen = self._chosen(worker_ids)
        sent, elsewhere = {}, self._models_elsewhere
        loads = [self._models.prepare(i, new) for i, new in by_model.items() if self._is_here(i)]
        for model_id, new in by_model.items():
            if self._is_here(model_id):
                continue
            if model_id == POLICY and new is not None:
                self._check_updatable(chosen)
            scheme = self._weight_sync_schemes[model_id]
            sent[model_id] = scheme.prepare(
                new, scheme.workers if model_id in elsewhere else chosen
            )

        def change() -> None:
            if loads:
                with self._held():
                    for load in loads:
                        load()
            with self._in_bounds(chosen), self._weights_lock:
                with self._next_version() if new_version else nullcontext():
                    for model_id, parcels in sent.items():
                        self._weight_sync_schemes[model_id].commit(parcels, self.policy_version)
                reached = {
                    i: {w for p in parcels for w in p.workers}
                    for i, parcels in sent.items()
                    if i not in elsewhere
                }
                acting = reached.get(POLICY, set())
                self._note_sent(acting)
                for index in acting:
                    self._versions[index] = self.policy_version
                self._announced = self.policy_version
                # Workers that were sent other models only: for them just the version is new.
                self._tell_version(set().union(*reached.values()) - acting)

        return change if loads or any(sent.values()) else lambda: None

    @contextmanager
    def _in_bounds(self, chosen: Sequence[int]) -> Iterator[None]:
        """Waits until an update keeps within ``max_policy_lag``, and holds other threads meanwhile.

        Without ``max_policy_lag`` this does nothing.

        Raises:
            RuntimeError: if the update would make a batch under way too old, and no background
                thread takes batches, so that waiting is no use.
        """
        bound = getattr(self._schedule, "bound", None)
        if bound is None:
            yield
            return
        batches = -1
        while True:
            # With background collection, each try waits until the thread has taken a batch.
            with self._held():
                if not bound.broken_by_update(chosen):
                    yield
                    return
                if self._batches == batches:
                    break
                batches = self._batches
        raise RuntimeError(
            f"after this update a batch that is under way would be {bound.most + 1} updates old, "
            f"but max_policy_lag={bound.most}. Take a batch (next()) before the next update, or "
            "allow for more. As many updates as came between two batches before are allowed for"
        )

    def _check_updatable(self, chosen: Sequence[int]) -> None:
        """Raises a ``TypeError`` if a chosen worker's policy has no weights."""
        for index in chosen:
            policy = self._own.policies[index]
            made = self._own.makes_policy(self.config, index)
            if not (isinstance(policy, nn.Module) or made):
                kind = "RandomPolicy" if policy is None else type(policy).__name__
                raise TypeError(f"policy {kind} has no weights to update")

    @override
    def _announce_version(self, worker_ids: WorkerIds = None) -> None:
        self._announced = self.policy_version
        nobody = isinstance(worker_ids, Sequence) and not worker_ids
        chosen = [] if nobody else self._chosen(worker_ids)
        late = [i for i in chosen if self._versions[i] != self.policy_version]
        if late:
            with self._in_bounds(late), self._weights_lock:
                self._tell_version(late)

    def _tell_version(self, workers: Collection[int]) -> None:
        """Tells workers that their weights have the current version."""
        if self._version is not None:
            for index in workers:
                self._versions[index] = self.policy_version
            self._channel._post_version(self.policy_version, workers)

    def increment_version(self) -> None:
        """Advances to the next version of the policy, if versions are tracked."""
        if self._version is not None:
            with self._next_version():
                self._announce_version()

    @override
    def _take(self, model_id: str, receiver: Receiver) -> Posted:
        changes: list[Callable[[], None]] = []

        def prepare(posted: Posted) -> None:
            # Weights that don't fit are not taken, so each call raises the error again.
            if posted.slot is not None:
                fresh = posted.version is None
                changes.append(self._prepare_weights({model_id: posted.copy()}, None, fresh))

        posted = receiver.take(prepare)
        known = self._version is not None and posted.version is not None
        if self._version is not None and posted.version is not None:
            self._version.version = posted.version
        for change in changes:
            change()
        if known:
            self._announce_version()
        return posted

    def state_dict(self) -> dict[str, Any]:
        """Returns the state needed to continue later: counts, and the state of each worker."""
        states = self._all(methodcaller("state_dict"))
        state: dict[str, Any] = {f"worker{i}": one for i, one in enumerate(states)}
        last = max(states, key=lambda one: int(one["traj_pool"]["traj_id"]))
        state |= {"frames": self._frames, "iter": self._batches, "traj_pool": last["traj_pool"]}
        state |= self._whole_state()
        if self._version is not None:
            state["policy_version"] = self.policy_version
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restores the state that :meth:`state_dict` returned; new trajectories begin.

        Raises:
            KeyError: if an entry is missing, for example that of a worker.
            ValueError: if the state has more workers than this collector.
        """
        self._check_open("load_state_dict()")
        names = [f"worker{index}" for index in range(self.num_workers)]
        _check_state(state_dict, names)
        version = state_dict.get("policy_version", self.policy_version)
        loaded = [
            (i, weights)
            for i, name in enumerate(names)
            if (weights := state_dict[name].get("policy_state_dict")) is not None
        ]
        parcels = {i: self._channel.prepare(weights, [i]) for i, weights in loaded}
        with self._held(), self._in_bounds(range(self.num_workers)):
            if self._whole is not None:
                # Batches that were requested before belong to old episodes. These must not be
                # mixed with new ones, which may have the same ids.
                self._fleet.settle()
            last = self._fleet.last_order
            before = self._versions, list(self._env_states)
            for index, name in enumerate(names):
                self._env_states[index] = state_dict[name].get("env_state_dict")
            if self._version is not None:
                self._versions = [state_dict[name].get("policy_version", version) for name in names]
            # Sent before the call: a worker may be replaced while others load.
            with self._weights_lock:
                for index, parcel in parcels.items():
                    self._channel.commit(parcel, self._versions[index])
                self._note_sent(parcels)
            try:
                self._fleet.call(
                    {
                        index: (methodcaller("load_state_dict", state_dict[name], strict),)
                        for index, name in enumerate(names)
                    }
                )
            except BaseException:
                self._versions, self._env_states = before
                raise
            if self._version is not None:
                self._version.version = self._announced = version
            self._frames, self._batches = int(state_dict["frames"]), int(state_dict["iter"])
            self._load_whole(state_dict, last)
            for member, name in zip(self._fleet.members, names, strict=True):
                if "traj_pool" in state_dict[name]:
                    begins = int(state_dict[name]["traj_pool"]["traj_id"])
                    member.trajectory = max(member.trajectory, begins)

    @override
    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[dict[str, Any]] | None = None,
    ) -> list[Any]:
        """Calls the method at path ``method_name`` of each worker's collector.

        Args:
            method_name: path of the method, for example ``"env.close"``.
            list_of_args: positional arguments for each worker.
            list_of_kwargs: keyword arguments for each worker.

        Returns:
            The result of each worker.

        Raises:
            ValueError: if a list does not have exactly one entry for each worker.
        """
        count = self.num_workers
        args = [()] * count if list_of_args is None else list(list_of_args)
        kwargs = [{}] * count if list_of_kwargs is None else list(list_of_kwargs)
        for given in (args, kwargs):
            if len(given) != count:
                raise ValueError(f"Expected {count} argument entries, got {len(given)}")
        self._check_open("map_fn()")
        if self._is_of_buffer(method_name):
            return super().map_fn(method_name, args, kwargs)
        with self._held():
            results = self._fleet.call(
                {i: (worker.call_path, method_name, args[i], kwargs[i]) for i in range(count)}
            )
        return [results[index] for index in range(count)]

    @override
    def get_distant_attr(self, attr: str) -> list[Any]:
        """Returns the attribute at path ``attr`` of each worker's collector."""
        if self._is_of_buffer(attr):
            return [get_path(self, attr)] * self.num_workers
        return self._all(get_path, attr)

    def _is_of_buffer(self, path: str) -> bool:
        """Returns True if a path leads to the replay buffer: the one here, which workers share."""
        buffer = self.config.replay_buffer
        return buffer is not None and path.split(".")[0].split("[")[0] == "replay_buffer"

    def getattr_policy(self, attr: str) -> Any:
        """Returns the attribute of the first worker's policy at path ``attr``."""
        return self._one(0, methodcaller("getattr_policy", attr))

    def getattr_env(self, attr: str) -> Any:
        """Returns the attribute of the first worker's environment at path ``attr``."""
        return self._one(0, methodcaller("getattr_env", attr))

    def get_model(self, model_id: str) -> Any:
        """Returns the model named ``model_id`` (``"policy"``, or a path) in this process."""
        return self.policy if model_id == "policy" else get_path(self, model_id)

    def get_cached_weights(self, model_id: str) -> TensorDictBase | None:
        """Returns the weights of a model that were last sent to the first worker.

        Returns:
            A copy. Before the first update, the weights with which the workers' policies began.
            None if this process has no weights of the model.
        """
        scheme = self._channels.get(model_id)
        sent = None if scheme is None else scheme.last_sent(0)
        if sent is not None:
            return strategy.in_form(sent, "tensordict")
        if model_id != POLICY or self._packed[0] is None:
            return None
        policy = pickle.loads(self._packed[0])
        found: TensorDictBase | None = None
        if isinstance(policy, nn.Module):
            found = strategy.WeightStrategy().extract_weights(policy)
        return found

    def fake_tensordict(self) -> Any:
        """Returns a batch of zeros with the layout of a delivered batch."""
        fakes = [fake.clear_device_() for fake in self._all(worker.fake)]
        alone = self._whole is not None or not self.sync
        batch = self._assembly.of(fakes[:1] if alone else fakes, self.policy_version)
        return self._fake(batch[0] if alone else batch)

    # --- hooks, profiles

    @property
    def pre_collect_hook(self) -> Any:
        """Function that each worker calls before it collects a batch."""
        return self._hooks["pre_collect_hook"]

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Any) -> None:
        self._set_hook("pre_collect_hook", hook)

    @property
    def post_collect_hook(self) -> Any:
        """Function that each worker calls with each batch that it has collected."""
        return self._hooks["post_collect_hook"]

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Any) -> None:
        self._set_hook("post_collect_hook", hook)

    def _set_hook(self, name: str, hook: Any) -> None:
        hooks = self.__dict__.setdefault("_hooks", {})
        first = name not in hooks
        if not first:
            self._all(setattr, name, hook)
        hooks[name] = hook

    @override
    def _begin_profile(self, config: ProfileConfig) -> None:
        options = {field.name: getattr(config, field.name) for field in fields(config)}
        self._all(methodcaller("enable_profile", **options))

    @override
    def disable_profile(self) -> None:
        self._all(methodcaller("disable_profile"))
        self._profile_config = None


def _seeded(
    chosen: Sequence[bool], kwargs: Mapping[str, Any]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the arguments of each worker's reset, with a seed of its own for each worker."""
    own = dict(kwargs)
    for index in range(len(chosen)):
        yield index, dict(own)
        if own.get("seed") is not None:
            own["seed"] = derive(own["seed"], "worker", index)


def _check_state(state_dict: Mapping[str, Any], workers: Sequence[str]) -> None:
    """Raises an error if ``state_dict`` is not the state of a collector with these workers."""
    for name in ("frames", "iter", *workers):
        if name not in state_dict:
            raise KeyError(f"state_dict has no {name!r}; it has {sorted(state_dict)}")
    made_by = sum(name.startswith("worker") for name in state_dict)
    if made_by != len(workers):
        raise ValueError(f"state_dict was made by {made_by} workers, but there are {len(workers)}")
    for name in workers:
        for entry in ("frames", "iter"):
            if entry not in state_dict[name]:
                raise KeyError(f"state_dict[{name!r}] has no {entry!r}")
