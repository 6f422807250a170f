import uuid

import pytest
from collector_parts import Buffer

from trawl.collectors import Collector, PolicyVersion
from trawl.testing import NumberedEnv


@pytest.mark.parametrize("kind", [(), (int,), ("int",)])
def test_numbers_count_up_from_zero(kind):
    version = PolicyVersion(*kind)
    assert version.version == 0
    version.increment_version()
    version.version = 7
    version.increment_version()
    assert version.version == 8
    assert version.version_history == [0, 1, 7, 8]


@pytest.mark.parametrize("kind", [str, "str", "uuid"])
def test_identifiers_are_different_each_time(kind):
    version = PolicyVersion(kind)
    for _ in range(3):
        version.increment_version()
    assert len({str(uuid.UUID(found)) for found in version.version_history}) == 4


def test_a_version_of_the_users_own_is_shared():
    version = PolicyVersion()
    version.version = 3
    with Collector(NumberedEnv(), frames_per_batch=4, track_policy_version=version) as collector:
        version.increment_version()
        assert next(iter(collector))["policy_version"].tolist() == [4] * 4
        collector.increment_version()
    assert version.version == 5


def test_frames_can_carry_an_identifier():
    for source, batch in ((NumberedEnv(), lambda one: [one] * 4), ([NumberedEnv] * 2, nested)):
        version = PolicyVersion("uuid")
        options = {"frames_per_batch": 4, "track_policy_version": version}
        with Collector(source, **options) as collector:
            assert collector.next()["policy_version"] == batch(version.version)
            assert "policy_version" not in collector.stats()
            assert isinstance(collector.policy_version, str)


def nested(one):
    return [[one] * 2] * 2


def test_single_frames_carry_the_version():
    buffer = Buffer()
    options = {"total_frames": 6, "extend_buffer": False, "track_policy_version": True}
    with Collector(NumberedEnv(), frames_per_batch=3, replay_buffer=buffer, **options) as collector:
        for _ in collector:
            collector.increment_version()
    assert buffer.content()["policy_version"].tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("kind", [int, str])
def test_a_version_of_torchrl_is_shared_too(kind):
    theirs = pytest.importorskip("torchrl.envs.llm.transforms").PolicyVersion(kind)
    with Collector(NumberedEnv(), frames_per_batch=4, track_policy_version=theirs) as collector:
        before = theirs.version
        collector.increment_version()
        assert theirs.version != before
        assert collector.policy_version == theirs.version
        batch = next(iter(collector))
    assert batch["policy_version"][0] == theirs.version
