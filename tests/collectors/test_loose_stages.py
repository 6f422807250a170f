"""Stacks and normalised values of environments whose steps are TensorDicts."""

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from tests.envs.agents import Walkers
from trawl import Collector
from trawl.collectors import NormalizeReward
from trawl.data import StackedFrames
from trawl.envs import FrameStack, ParallelEnv, PettingZooEnv, TorchVectorEnv
from trawl.testing import NumberedTorchEnv

BOTH = {"normalize_observations": True, "normalize_rewards": NormalizeReward(keep_raw=True)}


def dense(batch):
    """Returns the tensors of a batch, with stacks of frames expanded."""
    return {
        key: value.to_dense() if isinstance(value, StackedFrames) else value
        for key, value in batch.items(True, True)
    }


def walkers(**options):
    return PettingZooEnv(Walkers(), done_on_any=False, use_mask=True, **options)


def test_absent_agents_are_as_in_a_list():
    """Arrays are in a list and in processes; with text, they exchange TensorDicts."""
    told = partial(walkers, info_keys={"walker": ["text"]})
    sources = (
        [walkers, walkers],
        *(partial(ParallelEnv, 2, make, backend="thread") for make in (walkers, told)),
    )
    options = {**BOTH, "frame_stack": FrameStack(3, padding="zero")}
    options |= {"frames_per_batch": 26, "max_frames_per_traj": 5}
    found, statistics = [], []
    for path, source in zip(("array", "array", "tensordict"), sources, strict=True):
        with Collector(source, None, **options) as collector:
            assert collector.stats()["env_path"] == path
            collector.set_seed(1)
            found.append([dense(collector.next()) for _ in range(3)])
            one = collector.normalization
            statistics.append({**one.observations, **one.rewards})
    for mine, *rest in zip(*found, strict=True):
        for others in rest:
            keys = {key for key in mine if "info" not in key}
            assert keys == {key for key in others if "info" not in key}
            for key in keys - {("collector", "traj_ids")}:
                if key[-1] != "action":  # they are drawn, and change nothing
                    torch.testing.assert_close(mine[key], others[key], msg=str(key))
    for key, one in statistics[0].items():
        for other in (own[key] for own in statistics[1:]):
            assert (one.counts == other.counts).all(), key
            torch.testing.assert_close(torch.tensor(one.mean), torch.tensor(other.mean))


def native():
    """Returns an environment of TorchRL that reads its state from the TensorDict of the step."""
    pytest.importorskip("torchrl")
    from torchrl.envs import Compose, StepCounter, TransformedEnv
    from torchrl.envs.custom.pendulum import PendulumEnv

    return TransformedEnv(PendulumEnv(), Compose(StepCounter(7)))


def push(tensordict: TensorDict) -> TensorDict:
    tensordict["seen"] = tensordict["th"].clone()
    return tensordict.set("action", torch.full((1,), 0.5))


def test_an_environment_goes_on_with_its_own_values():
    batches = []
    for options in ({}, {"frame_stack": FrameStack(2, keys=["th", "thdot"]), **BOTH}):
        with Collector(native, push, frames_per_batch=20, trust_policy=True, **options) as one:
            one.set_seed(3)
            batches.append([one.next() for _ in range(3)])
    for plain, changed in zip(*batches, strict=True):
        for key in ("done", "reward"):
            raw = "raw_reward" if key == "reward" else key
            assert torch.equal(plain["next", key], changed["next", raw])
        assert torch.equal(plain["step_count"], changed["step_count"])
        assert torch.equal(changed["seen"], changed["th"].to_dense())
        assert changed["th"].shape == (20, 2)


def test_what_the_policy_overwrites_is_delivered():
    def overwrite(tensordict: TensorDict) -> TensorDict:
        push(tensordict)["thdot"] = torch.tensor(5.0)
        return tensordict

    with Collector(
        native, overwrite, frames_per_batch=10, trust_policy=True, normalize_observations=True
    ) as collector:
        assert (collector.next()["thdot"] == 5.0).all()


def test_what_is_stacked_can_not_be_overwritten():
    def overwrite(tensordict: TensorDict) -> TensorDict:
        push(tensordict)["thdot"] = torch.zeros(2)
        return tensordict

    with pytest.raises(
        ValueError, match=r"the policy writes .*'thdot'.*, which frame_stack stacks"
    ):
        Collector(native, overwrite, frames_per_batch=10, trust_policy=True, frame_stack=2)


def tensors():
    return TorchVectorEnv(NumberedTorchEnv(2, lengths=[3, 5]))


def test_a_state_without_stages_is_refused():
    with Collector([tensors] * 2, None, frames_per_batch=16) as plain:
        plain.next()
        state = plain.state_dict()
    with Collector([tensors] * 2, None, frames_per_batch=16, frame_stack=2) as collector:
        collector.next()
        with pytest.raises(ValueError, match="made with the same"):
            collector.load_state_dict(state)
