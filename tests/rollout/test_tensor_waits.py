"""Calls in the loop that would wait for a GPU: none may be made, whatever the device.

The tests run on the CPU, with the code of a GPU. A mode of torch sees every operation and method.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import pytest
import torch
from gymnasium.spaces import Box, MultiDiscrete
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Normal
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trawl.collectors import Collector
from trawl.envs import FrameStack, TorchVectorEnv
from trawl.envs.entries import masks
from trawl.rollout.stages import staged_rows
from trawl.rollout.stages.frame_normalizer import FrameNormalizer
from trawl.rollout.stages.normalizers import TensorNormalizer

COUNT, STEPS, LENGTH, SIZE = 6, 10, 4, 3
# Operations and methods that read values on the host, or whose result has as many rows as values.
OPERATIONS = {"_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal", "masked_select"}
METHODS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
# Functions that copy values from the host.
METHODS |= {"tensor", "as_tensor"}


class Seen(TorchDispatchMode):
    """Mode that records the operations that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        by_mask = any(one is not None and one.dtype is torch.bool for one in indices)
        if name in OPERATIONS or by_mask:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Mode that records the methods of tensors that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in METHODS:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits() -> Iterator[list[str]]:
    """Yields a list that has the names of all calls that wait, when the block ends."""
    found: list[str] = []
    seen, called = Seen(), Called()
    with called, seen:
        yield found
    assert seen.count
    found += seen.names + called.names


class Simulator:
    """Environment that never waits for its device."""

    num_envs = COUNT
    device = "cpu"
    single_observation_space: Any = Box(-float("inf"), float("inf"), (3,))
    single_action_space: Any = Box(-1, 1, (2,))

    def __init__(self, mode: AutoresetMode) -> None:
        self.unwrapped, self.mode = self, mode
        self.metadata = {"autoreset_mode": mode}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = (options or {}).get("reset_mask")
        if mask is None:
            self.age = torch.arange(COUNT) % LENGTH
            self.over = torch.zeros(COUNT, dtype=torch.bool)
        else:
            self.age = self.age.masked_fill(mask, 0)
        return self.shown(), {}

    def shown(self) -> Any:
        return self.age.unsqueeze(-1).expand(COUNT, 3).float()

    def step(self, action: Tensor) -> Any:
        before, self.age = self.over, self.age + 1
        info = {}
        if self.mode is AutoresetMode.NEXT_STEP:
            self.age = self.age.masked_fill(before, 0)
        self.over = ended = self.age >= LENGTH
        if self.mode is AutoresetMode.SAME_STEP:
            info["final_obs"] = self.shown()
            self.age = self.age.masked_fill(ended, 0)
        return self.shown(), action[:, 0].float(), ended, ended & False, info

    def close(self) -> None:
        pass


class Discrete(Simulator):
    single_observation_space = MultiDiscrete([9, 9], start=[0, -1])
    single_action_space = MultiDiscrete([3, 4], start=[1, 2])

    def shown(self) -> Any:
        return self.age.unsqueeze(-1).expand(COUNT, 2)


class Informed(Simulator):
    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], self.told()

    def told(self) -> Any:
        return {"age": self.age, "_age": self.age > 1, "action_mask": torch.ones(COUNT, 3)}

    def step(self, action: Tensor) -> Any:
        *results, info = super().step(action)
        return *results, {**info, **self.told(), "final_info": self.told()}


class Gpu(TorchVectorEnv):
    """Adapter that does what it does on a GPU."""

    answers_at_once = False  # type: ignore[assignment]


class Recurrent(TensorDictModuleBase):
    in_keys = ["observation", "h", "is_init"]  # noqa: RUF012 - as tensordict
    out_keys = ["action", ("next", "h")]  # noqa: RUF012

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        h = td.get("h", torch.zeros(*td.batch_size, 2))
        td["action"] = torch.tanh(h + td["observation"][..., :2])
        td["next", "h"] = h + 1
        return td


def plain() -> Any:
    return TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])


def sampled() -> Any:
    net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    first = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
    draw = ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"],
        out_keys=["action"],
        distribution_class=Normal,
        default_interaction_type=InteractionType.RANDOM,
    )
    return TensorDictSequential(first, draw)


def two_choices() -> Any:
    sizes = torch.tensor([3, 4])

    def act(observation: Tensor) -> Tensor:
        return (observation % sizes).long()

    return TensorDictModule(act, in_keys=["observation"], out_keys=["action"])


def changing() -> Any:
    """Writes its action as float32 and as float64 in turn."""
    dtypes = cycle([torch.float32, torch.float64])

    def act(observation: Tensor) -> Tensor:
        return torch.tanh(observation[..., :2]).to(next(dtypes))

    return TensorDictModule(act, in_keys=["observation"], out_keys=["action"])


POLICIES = {"plain": plain, "recurrent": Recurrent, "sampled": sampled, "changing": changing}


def loop_waits(env: TorchVectorEnv, policy: Any, **options: Any) -> tuple[list[str], Any]:
    """Returns the calls that wait in the second batch, and this batch."""
    with Collector(env, policy, frames_per_batch=COUNT * STEPS, **options) as collector:
        collector.next()
        writer = collector.parts.loop.rollout.writer
        with torch.no_grad():
            writer.begin()
            act, step = writer.bind(0, STEPS, False)
            assert act is not None
            # The first step of a binding may look at the policy's distributions.
            act(0)
            step(0)
            with waits() as found:
                for t in range(1, STEPS):
                    act(t)
                    step(t)
            return found, writer.finish(STEPS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", AutoresetMode)
def test_no_step_waits(mode: AutoresetMode, policy: str) -> None:
    found, batch = loop_waits(Gpu(Simulator(mode)), POLICIES[policy]())
    assert found == []
    done = batch["next", "done"].squeeze(-1)
    assert done.any()
    assert (batch["next", "observation"][..., 0][done] == LENGTH).all()


@pytest.mark.parametrize("options", [{}, {"normalize_observations": True}], ids=["raw", "scaled"])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_no_cut_waits(mode: AutoresetMode, options: dict[str, Any]) -> None:
    env = Gpu(Simulator(mode), partial_reset="mask")
    found, batch = loop_waits(env, Recurrent(), max_frames_per_traj=3, **options)
    assert found == []
    assert batch["next", "truncated"].any()


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("stack", [None, FrameStack(SIZE)], ids=["plain", "stacked"])
def test_no_normalisation_waits(mode: AutoresetMode, stack: FrameStack | None) -> None:
    options: dict[str, Any] = {"normalize_observations": True, "normalize_rewards": True}
    options["frame_stack"] = stack
    counted: list[int] = []

    class Noted(TensorNormalizer):
        def begin(self, *args: Any) -> Any:
            counted.clear()
            return super().begin(*args)

        def _end_rows(self, stop: int) -> None:
            counted.append(stop)
            super()._end_rows(stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(staged_rows._STAGES[FrameNormalizer], "tensors", Noted)
        policy = plain() if stack is None else of_stacks()
        found, batch = loop_waits(Gpu(Simulator(mode)), policy, **options)
    assert found == []
    assert batch["observation"].abs().max() < LENGTH
    # The statistics are brought up to date in the loop, not only when a batch ends.
    assert len(counted) > 1


def test_no_conversion_waits() -> None:
    env = Gpu(Discrete(AutoresetMode.SAME_STEP), categorical_action_encoding=True)
    found, batch = loop_waits(env, two_choices())
    assert found == []
    assert batch["observation"].max() == LENGTH


@pytest.mark.parametrize("mode", AutoresetMode)
def test_no_info_waits(mode: AutoresetMode) -> None:
    env = Gpu(Informed(mode), info_keys=["age"])
    found, batch = loop_waits(env, plain())
    assert found == []
    assert batch["next", "info", "age"].max() == LENGTH - (mode is AutoresetMode.SAME_STEP)


def of_stacks() -> Any:
    net = nn.Sequential(nn.Flatten(-2), nn.Linear(3 * SIZE, 2))
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("padding", ["reset", "zero"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_no_stack_waits(mode: AutoresetMode, padding: Any) -> None:
    stack = FrameStack(SIZE, padding)
    found, batch = loop_waits(Gpu(Simulator(mode)), of_stacks(), frame_stack=stack)
    assert found == []
    ages = batch["next", "observation"][..., 0][batch["next", "done"].squeeze(-1)]
    assert len(ages)
    assert (ages == torch.arange(LENGTH - SIZE + 1, LENGTH + 1)).all()


def test_one_look_at_the_flags_places_the_stacks_of_a_batch() -> None:
    env = Gpu(Simulator(AutoresetMode.SAME_STEP))
    with Collector(env, of_stacks(), frames_per_batch=COUNT * STEPS, frame_stack=SIZE) as collector:
        collector.next()
        writer = collector.parts.loop.rollout.writer
        with torch.no_grad():
            writer.begin()
            act, step = writer.bind(0, STEPS, False)
            for t in range(STEPS):
                act(t)
                step(t)
            with waits() as found:
                writer._staged.finish(STEPS)
    assert found == ["nonzero"]


def test_no_draw_of_a_combination_waits() -> None:
    allowed = torch.zeros(COUNT, 12).index_fill(1, torch.tensor([7]), 1.0)
    with waits() as found:
        first, second = masks._unraveled(masks._race(allowed), [3, 4])
    assert found == []
    assert (first == 1).all()
    assert (second == 3).all()


def test_the_modes_see_what_waits() -> None:
    mask = torch.tensor([True, False])
    with waits() as found:
        _ = bool(mask.any())
        _ = mask[mask]
        _ = mask.nonzero()
        _ = mask.numpy()
        _ = torch.tensor(1.0)
    names = {"_local_scalar_dense", "__bool__", "index", "nonzero", "numpy", "tensor"}
    assert set(found) >= names
