"""Random mutations of states, which a collector must either refuse as a whole or go on from.

Run as a program with ``--seconds 600``, it tries mutations for a while and prints figures.
"""

import argparse
import copy
import random
import sys
import time
import warnings
from collections import Counter

import torch
from tensordict import TensorDictBase

from trawl.collectors import Collector
from trawl.envs import ParallelEnv
from trawl.errors import StateError

STEPS = 12
TEXTS = ["test", "os.system", "__class__", "O", "|O8", "O,O", "f8,O", "<f8", "<i4", "float64"]
TEXTS += ["step", "..", "PCG64", "MT19937"]
TEXTS += ["", "a" * 300, "\ud800", "cuda:99", "meta", "pickle", "replay"]
NUMBERS = [0, 1, -1, 2, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 2**2000, 1e300, -0.0, 0.5]
NUMBERS += [float("nan"), float("inf"), True, False, 1j]
KINDS = ["array", "scalar", "view", "tensor", "list", "tuple", "dict", "deque", "object", "space"]
KINDS += ["member", "same", "generator", "random_state", "random", "fixed", "enum", "graph", "leaf"]
KINDS += ["dtype", "device", "torch_generator", "tensordict", "stacked", "lazy", "set", "whole"]
BYTES = {"number": 6, "kind": "array", "dtype": "|u1", "shape": [64], "data": bytes(64)}
VIEW = {"number": 5, "kind": "view", "of": BYTES, "dtype": "O", "shape": [8], "strides": [8]}
VALUES = [None, [], {}, (), b"", b"\xff" * 16, [None], {"kind": "same"}, VIEW | {"offset": 0}]
VALUES += [*NUMBERS, *TEXTS, torch.zeros(2), torch.zeros(0), [[0]] * 3]


def cart_pole():
    return Collector("CartPole-v1", frames_per_batch=STEPS)


def physics():
    return Collector("InvertedPendulum-v5", frames_per_batch=STEPS)


def replay():
    return Collector("LunarLander-v3", frames_per_batch=STEPS)


def vector():
    import gymnasium

    def make():
        return gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")

    return Collector(make, frames_per_batch=2 * STEPS, trajs_per_batch=2, traj_format="cat")


def processes():
    env = ParallelEnv(2, ["CartPole-v1"] * 2)
    return Collector(env, frames_per_batch=2 * STEPS)


def torchrl():
    from torchrl.envs import GymEnv, RewardSum, StepCounter, TransformedEnv

    env = TransformedEnv(GymEnv("Pendulum-v1", device="cpu"), StepCounter())
    return Collector(env.append_transform(RewardSum()), frames_per_batch=STEPS)


MAKERS = {one.__name__: one for one in (cart_pole, physics, replay, vector, processes, torchrl)}


class Mutator:
    """Makes random changes in copies of a state."""

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def mutated(self, state, path=()):
        """Returns a copy of a state with one to three changes, and the places of the changes.

        The changes are in the part that a path leads to.
        """
        part = state = copy.deepcopy(state)
        for key in path:
            part = part[key]
        return state, [self.change(part) for _ in range(self.draw.choice([1, 1, 1, 2, 3]))]

    def change(self, state):
        """Changes one place, and returns it."""
        draw, path, at = self.draw, [], state
        if not state:
            return "nothing"  # because an earlier change has left nothing
        if draw.random() < 0.5:
            at, key, path = draw.choice(list(nodes(state, [])))
            inner = at[key]
        while not path:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                return "nothing"
            key = draw.choice(keys)
            path.append(key)
            inner = at[key]
            while isinstance(inner, (dict, list)) and inner and draw.random() < 0.92:
                at = inner
                key = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
                path.append(key)
                inner = at[key]
        what = draw.choice(["replace"] * 5 + ["drop", "rename", "add", "swap", "repeat"])
        if what == "drop":
            del at[key]
        elif what == "rename" and isinstance(at, dict):
            at[draw.choice([f"{key}_", *TEXTS, 5, None])] = at.pop(key)
        elif what == "add" and isinstance(at, dict):
            at[draw.choice(TEXTS)] = self.value(inner)
        elif what in ("add", "repeat") and isinstance(at, list):
            at.insert(draw.randrange(len(at) + 1), copy.deepcopy(inner))
        elif what == "swap" and isinstance(at, dict):
            at[key] = copy.deepcopy(at[draw.choice(list(at))])
        else:
            at[key] = self.value(inner)
        return f"{what} {path}"

    def value(self, old):
        """Returns a value to put in the place of another one."""
        draw = self.draw
        if draw.random() < 0.6:
            if isinstance(old, torch.Tensor):
                return self.tensor(old)
            if isinstance(old, bytes):
                cut = draw.randrange(len(old) + 1)
                noise = bytes(draw.randrange(256) for _ in range(4))
                return draw.choice(
                    [old[:cut], old + noise, old[:cut] + noise + old[cut + 4 :], b""]
                )
            if isinstance(old, str):
                return draw.choice(TEXTS + KINDS)
            if isinstance(old, (int, float)):
                return draw.choice([*NUMBERS, old + 1, -old, str(old), int(draw.random() * 1000)])
            if isinstance(old, list) and old:
                return draw.choice([old[::-1], old + old, old[:1], old[1:]])
        odd = {"kind": draw.choice(KINDS), "number": 0, "items": [], "state": {}}
        return draw.choice([*copy.deepcopy(VALUES), odd])

    def tensor(self, old):
        """Returns a tensor of another dtype, shape or content."""
        pick = self.draw.randrange(7)
        if pick == 0:
            return old.to(self.draw.choice([torch.bool, torch.int8, torch.float64, torch.int64]))
        if pick == 1:
            return old[None]
        if pick == 2:
            return old.reshape(-1)[:-1]
        if pick == 3:
            return old.clone().fill_(float("nan") if old.dtype.is_floating_point else 1)
        if pick == 4:
            return old.clone().fill_(1e30 if old.dtype.is_floating_point else 127)
        if pick == 5:
            return old.to_sparse() if old.ndim else old.to("meta")
        return torch.zeros(0, dtype=old.dtype)


def nodes(value, path):
    """Yields all places in a state: the container, the key in it, and the path."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key, [*path, key]
        if isinstance(value[key], (dict, list)):
            yield from nodes(value[key], [*path, key])


def comparable(state):
    """Returns a dictionary without what counts the loads, and what a load sets to 0."""
    varying = ("place", "trajectory_pending_frames")
    found = {key: value for key, value in state.items() if key not in varying}
    if "unfinished" in found:
        found["unfinished"] = [one for one in found["unfinished"] if one["frames"] is not None]
    return found


def same(one, other):
    """Returns True if two states, or two batches, are equal."""
    if isinstance(one, TensorDictBase):
        return same(dict(one.items(True, True)), dict(other.items(True, True)))
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        one, other = map(comparable, (one, other))
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other or (one != one and other != other))


class Trial:
    """Loads mutations of the state of a kind of collectors.

    Attributes:
        counts: numbers of mutations, of those that were refused, and of those that were loaded.
        faults: descriptions of what must not happen.
    """

    def __init__(self, name, seed):
        self.name, self.mutator = name, Mutator(f"{name} {seed}")
        self.counts, self.faults = Counter(), []
        with warnings.catch_warnings():
            # Box2D can't be imported if warnings are errors.
            warnings.simplefilter("ignore")
            first = MAKERS[name]()
        first.set_seed(3)
        first.next()
        first.next()
        self.state = first.state_dict()
        self.following = first.next()
        first.shutdown()
        self.begin()

    def begin(self):
        """Makes the collector that loads the mutations."""
        self.collector = MAKERS[self.name]()
        self.collector.set_seed(4)
        self.collector.next()
        self.own = self.collector.state_dict()
        self.next = None

    def close(self):
        self.collector.shutdown(raise_on_error=False)

    def step(self, thorough=False):
        """Loads one mutation.

        Args:
            thorough: True to compare the next batch, too, after a state was refused.
        """
        # What is not of the environments is the same in all kinds.
        own = self.name != "cart_pole" and self.mutator.draw.random() < 0.9
        state, where = self.mutator.mutated(self.state, ("resume", "envs") if own else ())
        self.counts["mutations"] += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.collector.load_state_dict(state)
        except StateError as error:
            self.counts["refused"] += 1
            if not str(error):
                self.faults.append((where, "the error has no text"))
            self._check_unchanged(where, thorough)
        except Exception as error:
            self.faults.append((where, f"load: {type(error).__name__}: {error}"))
            self._again()
        else:
            self.counts["loaded"] += 1
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.collector.next()
            except Exception as error:
                self.faults.append((where, f"next: {type(error).__name__}: {error}"))
                # The error has shut the collector down.
                self.close()
                self.begin()
            else:
                self._again()

    def _check_unchanged(self, where, thorough):
        if not same(self.collector.state_dict(), self.own):
            self.faults.append((where, "the collector has changed"))
            self._again()
        elif thorough:
            batch = self.collector.next()
            if self.next is not None and not same(batch, self.next):
                self.faults.append((where, "the next batch differs"))
            self.next = batch
            self._again()

    def _again(self):
        """Returns the collector to its own state."""
        try:
            self.collector.load_state_dict(self.own)
            if not same(self.collector.state_dict(), self.own):
                raise AssertionError("the collector's own state differs")
        except Exception as error:
            if not isinstance(error, StateError):
                self.faults.append(("own state", f"{type(error).__name__}: {error}"))
            self.close()
            self.begin()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=list(MAKERS))
    args = parser.parse_args()
    faults = 0
    for name in args.kinds:
        began = time.perf_counter()
        trial = Trial(name, args.seed)
        while time.perf_counter() - began < args.seconds / len(args.kinds):
            trial.step(thorough=trial.counts["mutations"] % 20 == 0)
        trial.close()
        print(f"{name}: {dict(trial.counts)} in {time.perf_counter() - began:.1f} s")
        for where, what in trial.faults:
            print("  FAULT", where, str(what)[:300])
        faults += len(trial.faults)
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
