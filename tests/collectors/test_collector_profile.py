"""Profiles of collection."""

import json

import pytest
from collector_parts import by_step

from trawl.collectors import Collector, ProfileConfig
from trawl.testing import NumberedEnv


def collector() -> Collector:
    return Collector(lambda: NumberedEnv(), by_step(), frames_per_batch=10, total_frames=60)


def test_a_trace_is_written_after_the_batches_asked_for(tmp_path) -> None:
    path = tmp_path / "deep" / "trace_{worker_idx}.json"
    with collector() as source:
        source.enable_profile(num_rollouts=3, save_path=path, with_stack=False)
        batches = iter(source)
        next(batches), next(batches)
        assert not path.parent.exists()
        next(batches)
    events = json.loads((tmp_path / "deep" / "trace_0.json").read_text())["traceEvents"]
    assert any(str(event.get("name")).startswith("aten::") for event in events)


@pytest.mark.parametrize(("workers", "count"), [(None, 1), ([1], 0)])
def test_the_trace_of_these_workers_goes_to_the_function_given(workers, count) -> None:
    profiles = []
    options = {"num_rollouts": 1, "warmup_rollouts": 0, "on_trace_ready": profiles.append}
    with collector() as source:
        source.enable_profile(workers=workers, **options)
        source.next()
    assert len(profiles) == count
    assert all(one.key_averages() for one in profiles)


def test_disabling_ends_the_profile() -> None:
    profiles = []
    options = {"num_rollouts": 9, "warmup_rollouts": 0, "on_trace_ready": profiles.append}
    with collector() as source:
        source.enable_profile(**options)
        assert source.profile_config == ProfileConfig(**options)
        source.next()
        source.disable_profile()
        assert len(profiles) == 1
        assert source.profile_config is None


def test_mistakes_are_refused() -> None:
    with collector() as source:
        source.next()
        with pytest.raises(RuntimeError, match=r"before the first batch"):
            source.enable_profile()
    for options, message in [
        ({"num_rollouts": 1, "warmup_rollouts": 1}, "nothing would be profiled"),
        ({"warmup_rollouts": -1}, "must not be negative"),
        ({"activities": ["gpu"]}, "'cpu' or 'cuda'"),
    ]:
        with pytest.raises(ValueError, match=message):
            ProfileConfig(**options)
