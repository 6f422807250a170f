import pytest
import torch
from collector_parts import Buffer
from multi_parts import Chooser
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import Collector
from trawl.testing import NumberedEnv


class Counter(NumberedEnv):
    """An environment with a method to call from afar."""

    def __init__(self):
        super().__init__()
        self.level = 1

    def raise_level(self, by=1, *, times=1):
        self.level += by * times
        return self.level


@pytest.fixture
def collector():
    policy = TensorDictModule(
        nn.Sequential(Chooser(1)), in_keys=["observation"], out_keys=["action"]
    )
    with Collector(Counter(), policy, frames_per_batch=4, replay_buffer=Buffer()) as collector:
        yield collector


# --- map_fn


def test_a_method_is_called_for_each_entry(collector):
    path = "env.env.raise_level"
    assert collector.map_fn(path) == [2]
    assert collector.map_fn(path, []) == []
    assert collector.env.env.level == 2
    assert collector.map_fn(path, [(2,), (3,)]) == [4, 7]
    assert collector.map_fn(path, None, [{"times": 4}]) == [11]
    assert collector.map_fn(path, [(1,), (1,)], [{"times": 5}, {}]) == [16, 17]
    with pytest.raises(ValueError, match=r"must have the same length, but .* 2 and 1 entries"):
        collector.map_fn(path, [(1,), (2,)], [{}])
    with pytest.raises(AttributeError, match=r"'env.env.level' is int, which can't be called"):
        collector.map_fn("env.env.level")
    assert collector.env.env.level == 17


# --- paths


def test_an_attribute_is_found_by_its_path(collector):
    for path, expected in [
        ("env.env.level", 1),
        ("policy.module[0].choice", torch.tensor(1.0)),
        ("policy.in_keys[0]", "observation"),
        ("requested_frames_per_batch", 4),
        ("env.full_observation_spec['observation'].shape[0]", 5),
    ]:
        assert collector.get_distant_attr(path) == expected
    for path, kind, match in [
        ("env.env.height", AttributeError, "no attribute 'height'"),
        ("policy.in_keys[9]", IndexError, "out of range"),
        ("env.full_observation_spec['sound']", KeyError, "sound"),
        ("env..env", ValueError, r"path 'env..env' is malformed at '..env'"),
        ("policy.in_keys[", ValueError, r"malformed at '\['"),
        (3, TypeError, "a path must be text, such as 'env.unwrapped', but it is 3"),
    ]:
        with pytest.raises(kind, match=match):
            collector.get_distant_attr(path)


def test_a_call_cascades_to_its_path(collector):
    assert collector.cascade_execute("env.env.raise_level", 2, times=3) == 7
    assert collector.cascade_execute("env.env.level") == 7
    with pytest.raises(ValueError, match=r"'env.env.level' is int, which can't be called with"):
        collector.cascade_execute("env.env.level", 3)


# --- by name


def test_parts_are_reached_by_name(collector):
    assert collector.getattr_policy("in_keys") == ["observation"]
    assert collector.getattr_env("env.level") == 1
    assert collector.getattr_rb("frames") == []
    assert collector.get_model("policy") is collector.policy
    assert isinstance(collector.get_model("policy.module[0]"), Chooser)
    shown = repr(collector)
    assert shown.startswith("Collector(env=GymEnv(")
    assert "policy=TensorDictModule" in shown
    assert "frames_per_batch=4, total_frames=inf" in shown
    with (
        Collector(NumberedEnv(), frames_per_batch=4) as other,
        pytest.raises(AttributeError, match=r"no replay buffer to get 'write_count' from"),
    ):
        other.getattr_rb("write_count")
