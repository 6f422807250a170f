import warnings

import nursery
import pytest

import trawl.collectors
import trawl.compat.older_names as legacy
from trawl.collectors import BaseCollector, Collector
from trawl.testing import NumberedEnv

OLD = {"SyncDataCollector": Collector, "DataCollectorBase": BaseCollector}


@pytest.fixture(autouse=True)
def never_warned(monkeypatch):
    """As in a process in which no older name was used yet."""
    monkeypatch.setattr(legacy, "_warned", set())


@pytest.mark.parametrize("name", OLD)
def test_an_older_name_is_the_class_and_warns(name):
    with pytest.warns(
        DeprecationWarning, match=rf"{name} is an older name of {OLD[name].__name__}"
    ):
        found = getattr(trawl.collectors, name)
    assert found is OLD[name]


@pytest.mark.parametrize("name", OLD)
def test_an_older_name_warns_once(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            getattr(trawl.collectors, name)
    assert len(caught) == 1


def test_each_older_name_warns():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in [*OLD, *OLD]:
            getattr(trawl.collectors, name)
    assert sorted(str(warning.message).split()[0] for warning in caught) == sorted(OLD)


def test_the_warning_points_at_the_users_line():
    with pytest.warns(DeprecationWarning, match=r"SyncDataCollector") as caught:
        _ = trawl.collectors.SyncDataCollector
    assert caught[0].filename == __file__


def test_a_collector_by_its_older_name_collects():
    with pytest.warns(DeprecationWarning, match=r"SyncDataCollector"):
        cls = trawl.collectors.SyncDataCollector
    with cls(NumberedEnv(), frames_per_batch=5, total_frames=10) as collector:
        assert isinstance(collector, Collector)
        assert isinstance(collector, BaseCollector)
        assert [len(batch) for batch in collector] == [5, 5]


def test_an_import_by_an_older_name_warns_once_for_a_users_script():
    script = """
        from trawl.collectors import SyncDataCollector
        from trawl.collectors import SyncDataCollector as Again
        assert SyncDataCollector is Again
    """
    run = nursery.run(script, warn=["default"])
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("DeprecationWarning: SyncDataCollector is an older name") == 1


def test_current_names_do_not_warn():
    assert trawl.collectors.Collector is Collector


def test_another_name_is_unknown():
    with pytest.raises(
        AttributeError, match=r"'trawl.collectors' has no attribute 'DataCollector'"
    ):
        _ = trawl.collectors.DataCollector


def test_older_names_are_not_in_the_list():
    assert not set(OLD) & set(trawl.collectors.__all__)


def test_public_names_are_sorted():
    assert trawl.collectors.__all__ == sorted(trawl.collectors.__all__)
