"""What can be asked of a collector with workers, and told to it, beside collecting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any

import cloudpickle
import numpy as np
from torch import nn
from typing_extensions import override

from trawl.collectors import worker
from trawl.collectors.assembly import Assembly
from trawl.collectors.base import BaseCollector
from trawl.collectors.delivery import Delivery
from trawl.collectors.fleet import Fleet
from trawl.collectors.multi_config import MultiConfig, PerWorker
from trawl.collectors.paths import get_path
from trawl.collectors.profile import ProfileConfig
from trawl.collectors.weights import check_weights, chosen_weights, plain_weights
from trawl.envs.seeding import check_seed, derive


class FleetControl(BaseCollector):
    """The part of a collector with workers that talks to them.

    Workers answer between two batches. What they are told is kept for those that take their
    places later.

    Attributes:
        num_workers: number of workers.
        policy: the policy as it was given; workers have copies.
    """

    config: MultiConfig
    sync: bool
    num_workers: int
    policy: Any
    _fleet: Fleet
    _assembly: Assembly
    _delivery: Delivery
    _own: PerWorker
    _hooks: dict[str, Any]
    _weights: list[bytes | None]
    _versions: list[Any]
    _seeds: list[tuple[int, bool] | None]
    _env_states: list[Any]

    def _all(self, function: Any, *arguments: Any) -> list[Any]:
        """What a function gives with each worker's collector."""
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
            reset_idx: for each worker, whether its environments are reset; None: all are.
            **kwargs: arguments of the environments' reset.

        Raises:
            TypeError: if the entries are no bools.
            ValueError: if there is not an entry for each worker.
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
                {i: (worker.reset, own) for i, own in _seeded(chosen, kwargs) if chosen[i]}
            )

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds each worker (environments, policy, random actions), and resets.

        Two collectors with the same arguments give equal batches from the same seed (with
        ``sync=False`` each worker's batches are equal, while their order depends on who is
        faster). What workers had collected before is delivered first.

        Args:
            seed: not negative.
            static_seed: gives all environments the same seed.

        Returns:
            A seed for another environment (the same, if static).
        """
        seed = check_seed(seed)
        self._check_open("set_seed()")
        with self._held():
            for index in range(self.num_workers):
                # Now, and not after: it may be replaced while others are seeded.
                self._seeds[index] = seed, static_seed
                call = (methodcaller("set_seed", seed, static_seed),)
                seed = self._fleet.call({index: call})[index]
        return seed

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        policy: Any = None,
        weights: Any = None,
        weights_dict: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        worker_ids: int | Sequence[int] | None = None,
        policy_weights: Any = None,
    ) -> None:
        """Gives workers new weights; each uses them from its next batch on.

        Args:
            policy_or_weights: a module, a TensorDict or a dict of weights. Without it, those
                that the policy has now which the collector was made with.
            policy: the same, as a module.
            weights: the same, as weights.
            weights_dict: weights by model; ``"policy"`` is the only one here.
            model_id: the model that the weights are for: ``"policy"``.
            worker_ids: the workers that get them; None: all.
            policy_weights: an older name of ``policy_or_weights``.

        Raises:
            ValueError: if the arguments contradict each other, shapes don't fit, or there is no
                such worker.
            TypeError: if the policy has no weights.
            KeyError: if names of the weights don't fit, or a model is unknown.
            RuntimeError: if there are no weights to take.
        """
        forms = {
            "policy_or_weights": policy_or_weights,
            "policy": policy,
            "weights": weights,
            "weights_dict": weights_dict,
            "policy_weights": policy_weights,
        }
        new = chosen_weights(forms, model_id)
        self._check_open("update_policy_weights_()")
        chosen = self._chosen_workers(worker_ids)
        if not chosen:
            return
        packed = {index: self._packed_weights(new, index) for index in chosen}
        with self._held():
            if self._version is not None:
                self._version.increment_version()
            for index, data in packed.items():
                self._weights[index] = data
                self._versions[index] = self.policy_version
            self._fleet.cast(
                {
                    index: (worker.set_weights, data, self._versions[index])
                    for index, data in packed.items()
                }
            )

    def _chosen_workers(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        if worker_ids is None:
            return list(range(self.num_workers))
        chosen = [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
        if any(isinstance(i, bool) or not isinstance(i, int) for i in chosen):
            raise TypeError(
                "worker_ids must be the number of a worker, or several of them, but it is "
                f"{worker_ids!r}"
            )
        for index in chosen:
            if not 0 <= index < self.num_workers:
                raise ValueError(
                    f"worker_ids names worker {index}, but there are workers 0 to "
                    f"{self.num_workers - 1}"
                )
        return chosen

    def _packed_weights(self, new: Any, index: int) -> bytes:
        own = self._own.policies[index]
        if new is None:
            if not isinstance(own, nn.Module):
                raise RuntimeError(
                    "update_policy_weights_() has no weights to take: the policy is no module, "
                    "or was made by a policy_factory; give the weights"
                )
            new = own
        elif isinstance(own, nn.Module):
            check_weights(own, new)
        elif own is not None or not self._own.makes_policy(self.config, index):
            kind = "RandomPolicy" if own is None else type(own).__name__
            raise TypeError(f"policy {kind} has no weights to update")
        data: bytes = cloudpickle.dumps(plain_weights(new))
        return data

    def increment_version(self) -> None:
        """Goes on to the next version of the policy, if it is tracked."""
        if self._version is None:
            return
        with self._held():
            self._version.increment_version()
            self._versions = [self.policy_version] * self.num_workers
            self._fleet.cast(
                dict.fromkeys(range(self.num_workers), (worker.set_version, self.policy_version))
            )

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on later: counts, and the state of each worker."""
        states = self._all(methodcaller("state_dict"))
        state: dict[str, Any] = {f"worker{i}": one for i, one in enumerate(states)}
        last = max(states, key=lambda one: int(one["traj_pool"]["traj_id"]))
        state |= {"frames": self._frames, "iter": self._batches, "traj_pool": last["traj_pool"]}
        if self._version is not None:
            state["policy_version"] = self.policy_version
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Goes on from what :meth:`state_dict` gave; new trajectories begin.

        Raises:
            KeyError: if an entry is missing, as that of a worker.
            ValueError: if it was made by more workers.
        """
        names = [f"worker{index}" for index in range(self.num_workers)]
        for name in ("frames", "iter", *names):
            if name not in state_dict:
                raise KeyError(f"state_dict has no {name!r}; it has {sorted(state_dict)}")
        made_by = sum(name.startswith("worker") for name in state_dict)
        if made_by != self.num_workers:
            raise ValueError(
                f"state_dict was made by {made_by} workers, but there are {self.num_workers}"
            )
        self._check_open("load_state_dict()")
        version = state_dict.get("policy_version", self.policy_version)
        with self._held():
            before = list(self._weights), self._versions, list(self._env_states)
            # Now, and not after: a worker may be replaced while others load.
            for index, name in enumerate(names):
                loaded = state_dict[name].get("policy_state_dict")
                if loaded is not None:
                    self._weights[index] = cloudpickle.dumps(plain_weights(loaded))
                self._env_states[index] = state_dict[name].get("env_state_dict")
            if self._version is not None:
                self._versions = [state_dict[name].get("policy_version", version) for name in names]
            try:
                self._fleet.call(
                    {
                        index: (methodcaller("load_state_dict", state_dict[name], strict),)
                        for index, name in enumerate(names)
                    }
                )
            except BaseException:
                self._weights, self._versions, self._env_states = before
                raise
            if self._version is not None:
                self._version.version = version
            self._frames, self._batches = int(state_dict["frames"]), int(state_dict["iter"])
            for member, name in zip(self._fleet.members, names, strict=True):
                if "traj_pool" in state_dict[name]:
                    begins = int(state_dict[name]["traj_pool"]["traj_id"])
                    member.trajectory = max(member.trajectory, begins)

    @override
    def map_fn(
        self,
        name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[dict[str, Any]] | None = None,
    ) -> list[Any]:
        """Calls the method at path ``name`` of each worker's collector.

        Args:
            name: path of the method, as ``"env.close"``.
            list_of_args: positional arguments for each worker.
            list_of_kwargs: keyword arguments for each worker.

        Returns:
            What it gave, for each worker.

        Raises:
            ValueError: if there is not an entry for each worker.
        """
        count = self.num_workers
        args = [()] * count if list_of_args is None else list(list_of_args)
        kwargs = [{}] * count if list_of_kwargs is None else list(list_of_kwargs)
        for given in (args, kwargs):
            if len(given) != count:
                raise ValueError(f"Expected {count} argument entries, got {len(given)}")
        self._check_open("map_fn()")
        with self._held():
            results = self._fleet.call(
                {i: (worker.call_path, name, args[i], kwargs[i]) for i in range(count)}
            )
        return [results[index] for index in range(count)]

    @override
    def get_distant_attr(self, path: str) -> list[Any]:
        """The attribute at ``path`` of each worker's collector."""
        return self._all(get_path, path)

    def getattr_policy(self, path: str) -> Any:
        """The attribute of the first worker's policy at ``path``."""
        return self._one(0, methodcaller("getattr_policy", path))

    def getattr_env(self, path: str) -> Any:
        """The attribute of the first worker's environment at ``path``."""
        return self._one(0, methodcaller("getattr_env", path))

    def get_model(self, model_id: str) -> Any:
        """The model named ``model_id`` in this process: ``"policy"``, or by its path."""
        return self.policy if model_id == "policy" else get_path(self, model_id)

    def fake_tensordict(self) -> Any:
        """A batch of zeros with the layout of one that is delivered."""
        fakes = [fake.clear_device_() for fake in self._all(worker.fake)]
        batch = self._assembly.of(fakes if self.sync else fakes[:1], self.policy_version)
        if not self.sync:
            batch = batch[0]
        return self._delivery.process(batch, batch.shape[-1])

    # --- hooks, profiles

    @property
    def pre_collect_hook(self) -> Any:
        """What each worker calls before it collects a batch."""
        return self._hooks["pre_collect_hook"]

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Any) -> None:
        self._set_hook("pre_collect_hook", hook)

    @property
    def post_collect_hook(self) -> Any:
        """What each worker calls with each batch that it has collected."""
        return self._hooks["post_collect_hook"]

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Any) -> None:
        self._set_hook("post_collect_hook", hook)

    def _set_hook(self, name: str, hook: Any) -> None:
        hooks = self.__dict__.setdefault("_hooks", {})
        first = name not in hooks
        if not first:
            self._all(worker.set_attribute, name, hook)
        hooks[name] = hook

    @override
    def enable_profile(self, **options: Any) -> None:
        config = ProfileConfig(**options)
        if self._batches or self.is_running():
            raise RuntimeError("enable_profile() must be called before the first batch")
        self._all(worker.enable_profile, options)
        self._profile_config = config

    @override
    def disable_profile(self) -> None:
        self._all(methodcaller("disable_profile"))
        self._profile_config = None


def _seeded(
    chosen: Sequence[bool], kwargs: Mapping[str, Any]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The arguments of each worker's reset: one seed for all would make them alike."""
    own = dict(kwargs)
    for index in range(len(chosen)):
        yield index, dict(own)
        if own.get("seed") is not None:
            own["seed"] = derive(own["seed"], "worker", index)
