"""Clusters of several nodes, started by the tests."""

import textwrap
from pathlib import Path

import nursery
import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(320)
FORKED = """import sys
from ray_workers import forked_workers
with forked_workers() as sys.executable:
"""


def run(code, begin):
    """Runs a program in a process of its own: each has a cluster of its own.

    Workers can be forked for one node only.
    """
    # All of it listens to this machine alone.
    env = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    # A node whose process is gone refuses each check of its health: the fifth is soon.
    env["RAY_health_check_period_ms"] = "200"
    # Workers that nobody has asked for would start as slowly as all others.
    env["RAY_prestart_worker_first_driver"] = "0"
    code = begin + textwrap.indent(textwrap.dedent(code), " " * 4)
    done = nursery.run(code, cwd=HERE, env=env, warn=["ignore"])
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("said ")]


def test_a_node_that_dies():
    """Its workers are replaced on another node, and no frame is lost."""
    said = run("""
        import warnings
        import ray
        from ray.cluster_utils import Cluster
        from trawl.collectors.distributed import RayCollector

        cluster = Cluster(initialize_head=True, head_node_args={
            "num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20})
        ray.init(address=cluster.address, log_to_driver=False)
        node = cluster.add_node(
            num_cpus=1, resources={"far": 1}, object_store_memory=100 << 20)
        with RayCollector(["CartPole-v1"] * 2, sync=True, frames_per_batch=200,
                          remote_configs={"memory": 0, "scheduling_strategy": "SPREAD"}) as there:
            frames = there.next().numel()
            nodes = {m.worker.node for m in there._pool.slots}
            cluster.remove_node(node, allow_graceful=False)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                while not there.stats()["restarts"]:
                    frames += there.next().numel()
            frames += there.next().numel()
            print("said", frames == there.stats()["frames"], len(nodes))
            print("said", {m.worker.node for m in there._pool.slots} < nodes)
            print("said", any("died" in str(w.message) for w in caught))
        ray.shutdown()
        cluster.shutdown()
    """, begin="if True:\n")  # fmt: skip
    assert said == ["said True 2", "said True", "said True"]


def test_a_cluster_that_it_started_ends_with_it():
    """It outlives the thread that started it, exports no metrics, and leaves another as it is."""
    said = run("""
        import asyncio, os, threading
        import ray
        from trawl.collectors.distributed import RayCollector

        METRICS = "RAY_enable_metrics_collection"
        os.environ.pop(METRICS)
        made = []

        def make():
            made.append(RayCollector("CartPole-v1", frames_per_batch=5000, total_frames=5000,
                                     remote_configs={"memory": 0},
                                     ray_init_config={"num_cpus": 1, "include_dashboard": False}))
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        batch = next(iter(made[0]))
        kept = batch.clone()
        print("said", os.environ.get(METRICS),
              ray.get(ray.remote(num_cpus=0)(lambda: os.environ.get(METRICS)).remote()))
        made[0].shutdown()
        print("said", ray.is_initialized())
        make()
        asyncio.run(made[0].async_shutdown(True))
        print("said", ray.is_initialized(), bool((batch == kept).all()))
        made[1].shutdown()
        print("said", made[1].closed)
    """, begin=FORKED)  # fmt: skip
    assert said == ["said None 0", "said True", "said False True", "said True"]
