"""Measures collection on a GPU: simulators whose data are on the device, and networks on it.

    python benchmarks/gpu.py                       # five minutes on one card; writes the results
    python benchmarks/gpu.py --device cpu --quick  # the same in miniature, where there is no GPU

Each case races Trawl against the best loop by hand for the same work, against TorchRL's collector
over the same simulator, and against the simulator alone (it steps with constant actions, and keeps
nothing). All wait for the device after each batch, as a training loop that reads a loss does. The
waits of Trawl's loop are counted by PyTorch's profiler.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from rich.console import Console
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

import hand
import peers
import work
from harness import HAND, TRAWL, Case, Contender, Source, measure
from report import as_json, table, write_json

RESULTS = Path(__file__).resolve().parent / "results" / "cuda.json"
ALONE = "the simulator alone"
ACTIONS, LENGTH, IMAGE = 8, 50, (84, 84, 4)
# What the CUDA runtime calls when the host waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
# Host environments: pendulums, whose observations have three values and whose actions one.
HOST_COUNT, HOST_STEPS = 64, 20


@dataclass(frozen=True)
class Size:
    """How many environments make how many steps in a batch."""

    count: int
    steps: int

    @property
    def frames(self) -> int:
        """The frames of a batch."""
        return self.count * self.steps


class Vectors:
    """Environments that each move a vector of 64 floats, in mode SAME_STEP."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium
    single_action_space = Box(-1, 1, (ACTIONS,))
    single_observation_space = Box(-float("inf"), float("inf"), (64,))

    def __init__(self, count: int, device: torch.device) -> None:
        self.unwrapped, self.num_envs, self.device = self, count, device
        shape = self.single_observation_space.shape
        self._mix = torch.randn(ACTIONS, shape[0], generator=torch.Generator().manual_seed(0))
        self._mix = self._mix.to(device)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Tensor, dict[str, Any]]:
        """Begins all episodes, each with another number of steps to go."""
        self._age = torch.arange(self.num_envs, device=self.device) % LENGTH
        self._never = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self._state = self._begin()
        return self._state, {}

    def step(self, action: Tensor) -> tuple[Any, ...]:
        """Moves all environments, and begins anew where they are old."""
        final, reward = self._move(action)
        self._age += 1
        ended = self._age >= LENGTH
        self._age.masked_fill_(ended, 0)
        hidden = ended.view(-1, *[1] * (final.ndim - 1))
        self._state = final.masked_fill(hidden, 0)
        return self._state, reward, ended, self._never, {"final_obs": final}

    def close(self) -> None:
        """Nothing is open."""

    def _begin(self) -> Tensor:
        return torch.zeros(self.num_envs, 64, device=self.device)

    def _move(self, action: Tensor) -> tuple[Tensor, Tensor]:
        final = torch.addmm(self._state, action, self._mix, beta=0.9)
        return final, final[:, 0]


class Images(Vectors):
    """Environments that each show four frames of 84 x 84 bytes."""

    single_observation_space = Box(0, 255, IMAGE, dtype="uint8")  # type: ignore[arg-type]

    def _begin(self) -> Tensor:
        return torch.zeros(self.num_envs, *IMAGE, dtype=torch.uint8, device=self.device)

    def _move(self, action: Tensor) -> tuple[Tensor, Tensor]:
        return self._state + 1, action[:, 0]


class Few(nn.Module):
    """A network that reads 64 bytes of an image, so that the memory decides and not the network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = work.mlp(64, ACTIONS)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (any, 84, 84, 4) to actions (any, 8)."""
        return self.net(images[..., 40, :16, :].flatten(-2).float() / 255)  # type: ignore[no-any-return]


Simulator = Callable[[], Vectors]


def by_hand(make: Simulator, act: Callable[[Tensor], Tensor], size: Size) -> Source:
    """The best loop by hand: memory made once, time first, and no wait within a batch."""
    env = make()
    device = env.device
    sizes = size.steps, size.count
    space = env.single_observation_space
    kind = torch.uint8 if space.dtype == "uint8" else torch.float32
    shape, memory = tuple(space.shape or ()), {}
    for key in ("observation", ("next", "observation")):
        memory[key] = torch.zeros(*sizes, *shape, dtype=kind, device=device)
    memory["action"] = torch.zeros(*sizes, ACTIONS, device=device)
    memory["next", "reward"] = torch.zeros(*sizes, 1, device=device)
    for name in hand.FLAGS:
        for key in (name, ("next", name)):
            memory[key] = torch.zeros(*sizes, 1, dtype=torch.bool, device=device)
    memory["collector", "traj_ids"] = torch.zeros(*sizes, dtype=torch.int64, device=device)
    batch = TensorDict({k: v.transpose(0, 1) for k, v in memory.items()}, (size.count, size.steps))
    rows = {key: value.unbind(0) for key, value in memory.items()}
    flat = {k: v[..., 0].unbind(0) for k, v in memory.items() if v.ndim == 3 and v.shape[-1] == 1}
    ids, seen = torch.arange(size.count, device=device), env.reset()[0]
    total = torch.tensor(size.count, device=device)
    while True:
        with torch.no_grad():
            for t in range(size.steps):
                rows["observation"][t].copy_(seen)
                action = act(seen)
                rows["action"][t].copy_(action)
                seen, reward, terminated, truncated, info = env.step(action)
                rows["next", "observation"][t].copy_(info["final_obs"])
                flat["next", "reward"][t].copy_(reward)
                flat["next", "terminated"][t].copy_(terminated)
                flat["next", "truncated"][t].copy_(truncated)
                done = torch.logical_or(terminated, truncated, out=flat["next", "done"][t])
                rows["collector", "traj_ids"][t].copy_(ids)
                new = total + done.cumsum(0) - 1
                ids = torch.where(done, new, ids)
                total = new[-1] + 1
        yield size.frames, batch


def alone(make: Simulator, size: Size) -> Source:
    """The simulator with constant actions, whose results nobody keeps."""
    env = make()
    env.reset()
    action = torch.zeros(size.count, ACTIONS, device=env.device)
    while True:
        for _ in range(size.steps):
            env.step(action)
        yield size.frames, None


def torchrl_env(make: Simulator) -> Any:
    """The simulator as an environment of TorchRL."""
    from torchrl.data import Binary, Bounded, Composite, Unbounded
    from torchrl.envs import EnvBase

    class Wrapped(EnvBase):  # type: ignore[misc]
        def __init__(self) -> None:
            self.env = make()
            count, device = self.env.num_envs, self.env.device
            super().__init__(device=device, batch_size=(count,))
            space = self.env.single_observation_space
            shape = (count, *(space.shape or ()))
            dtype = torch.uint8 if space.dtype == "uint8" else torch.float32
            seen = Unbounded(shape, device=device, dtype=dtype)
            self.observation_spec = Composite(observation=seen, shape=(count,))
            self.action_spec = Bounded(-1, 1, (count, ACTIONS), device=device)
            self.reward_spec = Unbounded((count, 1), device=device)
            flags = {name: Binary(1, (count, 1), device=device, dtype=torch.bool) for name in FLAGS}
            self.done_spec = Composite(flags, shape=(count,))

        def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
            if tensordict is None or tensordict.get("_reset", None) is None:
                self._seen = self.env.reset()[0]
            # Where an episode has ended, the simulator has begun the next one by itself.
            return self._results({"observation": self._seen}, self.env._never, self.env._never)

        def _step(self, tensordict: Any) -> TensorDict:
            self._seen, reward, ended, never, info = self.env.step(tensordict["action"])
            found = {"observation": info["final_obs"], "reward": reward.unsqueeze(-1)}
            return self._results(found, ended, never)

        def _results(self, found: dict[str, Tensor], ended: Tensor, never: Tensor) -> TensorDict:
            flags = dict(zip(FLAGS, (ended, ended, never), strict=True))
            flags = {name: value.unsqueeze(-1) for name, value in flags.items()}
            return TensorDict({**found, **flags}, self.batch_size, device=self.device)

        def _set_seed(self, seed: int | None) -> None:
            pass

    return Wrapped()


FLAGS = ("done", "terminated", "truncated")


def waiting(source: Callable[[], Source], device: torch.device) -> Callable[[], Source]:
    """`source`, which waits for the device after each batch, and gives its memory back."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def build() -> Source:
        opened = source()
        try:
            for frames, batch in opened:
                wait()
                yield frames, batch
                del batch
        finally:
            opened.close()

    return build


def simulated(name: str, title: str, make: Simulator, net: nn.Module, size: Size) -> Case:
    """Trawl, the loop by hand, TorchRL and the simulator alone over one simulator."""
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    device = next(net.parameters()).device
    contenders = {
        TRAWL: (lambda: peers.trawl(make(), policy, size.frames), None),
        HAND: (lambda: by_hand(make, net, size), 0.97),
        "TorchRL": (lambda: peers.torchrl(torchrl_env(make), policy, size.frames), 3.0),
        ALONE: (lambda: alone(make, size), None),
    }
    raced = (
        Contender(key, waiting(source, device), goal) for key, (source, goal) in contenders.items()
    )
    return Case(name, title, tuple(raced))


def hosted(device: torch.device) -> Case:
    """64 environments of the host, whose policy is on the GPU, as each of them is ready."""
    net = work.mlp(3, 1).to(device)
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    frames = HOST_COUNT * HOST_STEPS

    def asynchronous() -> Source:
        from torchrl.collectors import AsyncBatchedCollector

        envs = [lambda: peers.torchrl_single(work.pendulum)] * HOST_COUNT
        collector = AsyncBatchedCollector(
            envs, policy=policy, frames_per_batch=frames, total_frames=-1, device=device,
            backend="threading", env_backend="threading",
        )  # fmt: skip
        try:
            for batch in collector:
                yield batch.numel(), None
        finally:
            collector.shutdown()

    def batched() -> Source:
        from trawl.collectors import Collector

        envs = [work.pendulum] * HOST_COUNT
        options: dict[str, Any] = {"policy_device": device, "env_device": "cpu"}
        collector = Collector(
            envs, policy, frames_per_batch=frames, storing_device="cpu", **options
        )
        try:
            for batch in collector:
                yield batch.numel(), None
        finally:
            collector.shutdown()

    def ready() -> Source:
        from trawl.collectors import AsyncBatchedCollector

        envs = [work.pendulum] * HOST_COUNT
        collector = AsyncBatchedCollector(
            envs, policy=policy, frames_per_batch=frames, device=device
        )
        try:
            for batch in collector:
                yield batch.numel(), None
        finally:
            collector.shutdown()

    def serial() -> Source:
        env = peers.torchrl_serial(work.pendulum, HOST_COUNT, use_buffers=False)
        options: dict[str, Any] = {"policy_device": device, "env_device": "cpu"}
        for count, _ in peers.torchrl(env, policy, frames, storing_device="cpu", **options):
            yield count, None

    return Case(
        "host64",
        f"{HOST_COUNT} Pendulums of the host, network on the device",
        (
            Contender(TRAWL, batched, note="Collector"),
            Contender("Trawl, first ready", ready, note="AsyncBatchedCollector"),
            Contender("TorchRL", asynchronous, 3.0, "AsyncBatchedCollector, threads"),
            Contender("TorchRL, SerialEnv", serial, 3.0, "Collector"),
        ),
    )


def waits(make: Simulator, net: nn.Module, size: Size) -> dict[str, float]:
    """Counts how often the host waits for the device in a batch, by PyTorch's profiler."""
    from trawl.collectors import Collector

    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    with Collector(make(), policy, frames_per_batch=size.frames) as collector:
        for _ in range(2):
            collector.next()
        with torch.profiler.profile() as profile:
            collector.next()
    # The profiler itself waits when it ends.
    with torch.profiler.profile() as empty:
        pass
    total = _waits(profile) - _waits(empty)
    return {"waits_per_batch": total, "waits_per_step": total / size.steps}


def _waits(profile: Any) -> int:
    return sum(event.count for event in profile.key_averages() if event.key in WAITS)


def memory(make: Simulator, net: nn.Module, size: Size, batches: int) -> dict[str, float]:
    """Measures the device's memory after a few batches, and after many."""
    from trawl.collectors import Collector

    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    found = {}
    with Collector(make(), policy, frames_per_batch=size.frames) as collector:
        for done in range(batches):
            collector.next()
            if done in (10, batches - 1):
                torch.cuda.synchronize()
                found[f"mib_after_{done + 1}_batches"] = torch.cuda.memory_allocated() / 2**20
    return found


def cases(device: torch.device, quick: bool) -> list[tuple[Simulator, nn.Module, Size, str, str]]:
    """The simulators, their networks and sizes, from small to large."""
    sizes = {"vectors": [(4096, 32), (65536, 16)], "images": [(4096, 16), (65536, 2)]}
    if quick:
        sizes = {"vectors": [(64, 8)], "images": [(8, 4)]}
    made = []
    for name, kind in (("vectors", Vectors), ("images", Images)):
        for count, steps in sizes[name]:
            net: nn.Module = work.mlp(64, ACTIONS) if name == "vectors" else Few()
            what = "64 floats" if name == "vectors" else "84x84x4 bytes"
            simulator = lambda kind=kind, count=count: kind(count, device)  # noqa: E731
            title = f"{count:,} environments of {what}, {steps} steps"
            made.append((simulator, net.to(device), Size(count, steps), f"{name}{count}", title))
    return made


def main() -> None:
    """Measures all cases, prints the table, and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true", help="in miniature; writes nothing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device: pass --device cpu --quick to try the script")
    console = Console(width=160)
    rounds, seconds = (1, 0.05) if args.quick else (args.rounds, args.seconds)
    results, more = [], {}
    for make, net, size, name, title in cases(device, args.quick):
        results.append(measure(simulated(name, title, make, net, size), rounds, seconds))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            more[name] = waits(make, net, size)
        console.print(table(results[-1:]), more.get(name, ""))
    results.append(measure(hosted(device), rounds, seconds))
    console.print(table(results[-1:]))
    if device.type == "cuda":
        make, net, size, name, _ = cases(device, args.quick)[0]
        more[name] |= memory(make, net, size, 100 if args.quick else 2000)
    content = as_json(results, [], {"rounds": rounds, "seconds": seconds, "clock": "wall"})
    if device.type == "cuda":
        content["machine"]["gpu"] = torch.cuda.get_device_name(device)
    content["device"] = more
    console.print(more)
    if not args.quick:
        write_json(args.out, content)


if __name__ == "__main__":
    main()
