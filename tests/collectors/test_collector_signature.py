import inspect
import pydoc
from functools import partial

import pytest
from collector_parts import by_step

from trawl.collectors import Collector, CollectorConfig, MultiSyncCollector
from trawl.testing import NumberedEnv

# Every argument beside the first two, and what it is when it is left out.
DEFAULTS = {
    "policy_factory": None,
    "total_frames": -1,
    "device": None,
    "storing_device": None,
    "policy_device": None,
    "env_device": None,
    "create_env_kwargs": None,
    "max_frames_per_traj": None,
    "frame_stack": None,
    "init_random_frames": None,
    "reset_at_each_iter": False,
    "postproc": None,
    "split_trajs": None,
    "track_traj_ids": True,
    "trajs_per_batch": None,
    "traj_format": None,
    "trajs_per_write": None,
    "auto_register_policy_transforms": None,
    "compact_obs": False,
    "return_same_td": False,
    "reset_when_done": True,
    "interruptor": None,
    "set_truncated": False,
    "use_buffers": None,
    "replay_buffer": None,
    "extend_buffer": True,
    "trust_policy": None,
    "compile_policy": None,
    "cudagraph_policy": None,
    "no_cuda_sync": False,
    "track_policy_version": False,
    "on_env_error": "raise",
    "worker_idx": None,
    "pre_collect_hook": None,
    "post_collect_hook": None,
    "backend": None,
    "backend_options": None,
    "num_collectors": None,
    "sync": None,
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_an_argument_has_its_documented_default(name):
    parameter = inspect.signature(Collector).parameters[name]
    assert parameter.default == DEFAULTS[name]
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY


def test_the_signature_begins_with_environment_and_policy():
    parameters = list(inspect.signature(Collector).parameters.values())
    assert [p.name for p in parameters[:2]] == ["create_env_fn", "policy"]
    assert parameters[0].default is inspect.Parameter.empty
    assert parameters[1].default is None
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters[:2])


def test_frames_per_batch_must_be_given():
    assert (
        inspect.signature(Collector).parameters["frames_per_batch"].default
        is inspect.Parameter.empty
    )
    with pytest.raises(TypeError, match=r"needs the argument frames_per_batch"):
        Collector("CartPole-v1")


def test_exploration_is_random_by_default():
    default = inspect.signature(Collector).parameters["exploration_type"].default
    assert default.name == "RANDOM"


def test_help_shows_the_options():
    shown = pydoc.render_doc(Collector, renderer=pydoc.plaintext)
    assert "max_frames_per_traj" in shown


@pytest.mark.parametrize("name", inspect.signature(CollectorConfig).parameters)
def test_an_option_is_documented(name):
    assert f"        {name}: " in CollectorConfig.__doc__


def test_three_positional_arguments_are_too_many():
    with pytest.raises(TypeError, match=r"at most 2 positional arguments.*got 3.*by name"):
        Collector("CartPole-v1", None, 10)


def test_unknown_arguments_are_named():
    with pytest.raises(TypeError, match=r"unknown arguments: frame_per_batch, quick"):
        Collector("CartPole-v1", frames_per_batch=1, frame_per_batch=2, quick=True)


def test_options_can_be_read_as_attributes():
    with Collector(NumberedEnv(), frames_per_batch=10, total_frames=30) as collector:
        assert collector.total_frames == 30
        assert collector.replay_buffer is None


@pytest.mark.parametrize(
    "make", [Collector, partial(MultiSyncCollector, num_workers=1, start_method="inline")]
)
@pytest.mark.parametrize("given", [None, -1, 0])
def test_an_option_that_is_off_reads_as_a_number_or_false(make, given):
    """Trainers compare these: ``frames >= collector.init_random_frames``."""
    options = {"init_random_frames": given, "max_frames_per_traj": given}
    with make(NumberedEnv, by_step(), frames_per_batch=10, **options) as collector:
        assert (collector.init_random_frames, collector.max_frames_per_traj) == (0, 0)
        assert (collector.trust_policy, collector.split_trajs) == (False, False)


def test_random_actions_are_trusted():
    with Collector(NumberedEnv(), frames_per_batch=10) as collector:
        assert collector.trust_policy is True


def test_another_attribute_is_not_there():
    with (
        Collector(NumberedEnv(), frames_per_batch=10) as collector,
        pytest.raises(AttributeError, match=r"'Collector' object has no attribute 'total_frame'"),
    ):
        _ = collector.total_frame
