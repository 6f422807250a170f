import warnings

import nursery
import pytest

import trawl
import trawl.collectors
import trawl.compat.older_names as legacy
from trawl.collectors import (
    AsyncCollector,
    BaseCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from trawl.testing import NumberedEnv

OLD = {
    "SyncDataCollector": Collector,
    "DataCollectorBase": BaseCollector,
    "MultiSyncDataCollector": MultiSyncCollector,
    "MultiaSyncDataCollector": MultiAsyncCollector,
    "aSyncDataCollector": AsyncCollector,
}


def test_each_older_name_is_the_class_and_warns_once_at_the_users_line(monkeypatch):
    # As in a process in which no older name was used yet.
    monkeypatch.setattr(legacy, "_warned", set())
    for name, cls in OLD.items():
        told = rf"{name} is an older name of {cls.__name__}"
        with pytest.warns(DeprecationWarning, match=told) as caught:
            found = getattr(trawl.collectors, name)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert getattr(trawl.collectors, name) is cls is found
            assert getattr(trawl.collectors, cls.__name__) is cls
    with found(NumberedEnv, frames_per_batch=5, total_frames=10, start_method="inline") as one:
        assert isinstance(one, BaseCollector)
        assert [len(batch) for batch in one] == [5, 5]


def test_an_import_by_an_older_name_warns_once_for_a_users_script():
    script = """
        from trawl.collectors import SyncDataCollector
        from trawl.collectors import SyncDataCollector as Again
        assert SyncDataCollector is Again
    """
    run = nursery.run(script, warn=["default"])
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("DeprecationWarning: SyncDataCollector is an older name") == 1


def test_the_list_of_public_names():
    with pytest.raises(AttributeError, match=r"'trawl.collectors' has no attribute 'DataCol"):
        _ = trawl.collectors.DataCollector
    assert not set(OLD) & set(trawl.collectors.__all__)
    assert trawl.collectors.__all__ == sorted(trawl.collectors.__all__)
    for name in ("MultiCollector", "MultiSyncCollector", "AsyncCollector"):
        assert getattr(trawl, name) is getattr(trawl.collectors, name)
