import pytest
import torch
from collector_parts import Buffer, Scorer
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
        nn.Sequential(Scorer(1)), in_keys=["observation"], out_keys=["action"]
    )
    with Collector(Counter(), policy, frames_per_batch=4, replay_buffer=Buffer()) as collector:
        yield collector


# --- map_fn


def test_a_method_is_called_once(collector):
    assert collector.map_fn("env.env.raise_level") == [2]


def test_a_method_is_called_for_each_entry(collector):
    assert collector.map_fn("env.env.raise_level", [(2,), (3,)]) == [3, 6]
    assert collector.map_fn("env.env.raise_level", None, [{"times": 4}]) == [10]
    assert collector.map_fn("env.env.raise_level", [(1,), (1,)], [{"times": 5}, {}]) == [15, 16]


def test_a_method_is_not_called_for_no_entries(collector):
    assert collector.map_fn("env.env.raise_level", []) == []
    assert collector.env.env.level == 1


def test_lists_of_arguments_must_have_one_length(collector):
    with pytest.raises(ValueError, match=r"must have the same length, but .* 2 and 1 entries"):
        collector.map_fn("env.env.raise_level", [(1,), (2,)], [{}])


def test_what_is_no_method_cannot_be_mapped(collector):
    with pytest.raises(AttributeError, match=r"'env.env.level' is int, which can't be called"):
        collector.map_fn("env.env.level")


# --- paths


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("env.env.level", 1),
        ("policy.module[0].scores[1]", torch.tensor(1.0)),
        ("policy.in_keys[0]", "observation"),
        ("requested_frames_per_batch", 4),
        ("env.full_observation_spec['observation'].shape[0]", 5),
    ],
)
def test_an_attribute_is_found_by_its_path(collector, path, expected):
    assert collector.get_distant_attr(path) == expected


@pytest.mark.parametrize(
    ("path", "kind", "match"),
    [
        ("env.env.height", AttributeError, "no attribute 'height'"),
        ("policy.in_keys[9]", IndexError, "out of range"),
        ("env.full_observation_spec['sound']", KeyError, "sound"),
        ("env..env", ValueError, r"path 'env..env' is malformed at '..env'"),
        ("policy.in_keys[", ValueError, r"malformed at '\['"),
        (3, TypeError, "a path must be text, such as 'env.unwrapped', but it is 3"),
    ],
)
def test_a_wrong_path_is_an_error(collector, path, kind, match):
    with pytest.raises(kind, match=match):
        collector.get_distant_attr(path)


def test_a_call_cascades_to_its_path(collector):
    assert collector.cascade_execute("env.env.raise_level", 2, times=3) == 7


def test_a_cascade_to_an_attribute_gives_it(collector):
    assert collector.cascade_execute("env.env.level") == 1


def test_an_attribute_takes_no_arguments(collector):
    with pytest.raises(ValueError, match=r"'env.env.level' is int, which can't be called with"):
        collector.cascade_execute("env.env.level", 3)


# --- by name


def test_parts_are_reached_by_name(collector):
    assert collector.getattr_policy("in_keys") == ["observation"]
    assert collector.getattr_env("env.level") == 1
    assert collector.getattr_rb("frames") == []
    assert collector.get_model("policy") is collector.policy
    assert isinstance(collector.get_model("policy.module[0]"), Scorer)


def test_there_may_be_no_buffer_to_reach():
    with (
        Collector(NumberedEnv(), frames_per_batch=4) as collector,
        pytest.raises(AttributeError, match=r"no replay buffer to get 'write_count' from"),
    ):
        collector.getattr_rb("write_count")


def test_a_collector_shows_what_it_is_made_of(collector):
    shown = repr(collector)
    assert shown.startswith("Collector(env=GymEnv(")
    assert "policy=TensorDictModule" in shown
    assert "frames_per_batch=4, total_frames=inf" in shown
