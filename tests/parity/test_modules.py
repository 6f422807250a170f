"""Names can be imported by the module paths of TorchRL."""

import importlib
import warnings

import pytest

NAMES = {
    "collectors.collectors": [
        *("AsyncCollector", "BaseCollector", "Collector", "MultiAsyncCollector"),
        *("MultiCollector", "MultiSyncCollector", "DEFAULT_EXPLORATION_TYPE"),
        *("SyncDataCollector", "MultiSyncDataCollector", "MultiaSyncDataCollector"),
    ],
    "collectors.weight_update": [
        *("WeightUpdaterBase", "VanillaWeightUpdater", "MultiProcessedWeightUpdater"),
        *("RemoteModuleWeightUpdater", "RayWeightUpdater"),
    ],
    "collectors.utils": ["split_trajectories"],
    "envs.transforms": ["PolicyVersion"],
    "collectors.distributed.default_configs": ["DEFAULT_SLURM_CONF", "DEFAULT_SLURM_CONF_MAIN"],
    "collectors.distributed.generic": ["DistributedCollector", "DistributedWeightUpdater"],
    "collectors.distributed.ray": [
        *("RayCollector", "DEFAULT_RAY_INIT_CONFIG", "DEFAULT_REMOTE_CLASS_CONFIG"),
    ],
    "collectors.distributed.rpc": ["RPCCollector", "RPCWeightUpdater"],
    "collectors.distributed.sync": ["DistributedSyncCollector"],
    "collectors.distributed.utils": ["submitit_delayed_launcher"],
    "weight_update.weight_sync_schemes": [
        *("TransportBackend", "InitialSyncTransport", "WeightSyncBackend", "WeightStrategy"),
        *("WeightSyncScheme", "SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"),
        *("NoWeightSyncScheme", "DistributedWeightSyncScheme", "RPCWeightSyncScheme"),
        *("RayWeightSyncScheme", "MPTransport", "SharedMemTransport"),
    ],
}


@pytest.mark.parametrize("path", NAMES)
def test_names_are_where_they_were(path):
    module = importlib.import_module(f"trawl.{path}")
    with warnings.catch_warnings():
        # Some are older names.
        warnings.simplefilter("ignore", DeprecationWarning)
        for name in NAMES[path]:
            assert hasattr(module, name), name


@pytest.mark.parametrize("path", NAMES)
def test_what_a_module_lists_is_there(path):
    module = importlib.import_module(f"trawl.{path}")
    for name in getattr(module, "__all__", ()):
        assert hasattr(module, name), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NAMES)
def test_torchrl_has_these_paths(path):
    pytest.importorskip("torchrl")
    assert importlib.import_module(f"torchrl.{path}")
