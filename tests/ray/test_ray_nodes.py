"""Clusters of several nodes, started by the tests."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(320)


def run(code):
    """Runs a program in a process of its own: each has a cluster of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=HERE,
        # All of it listens to this machine alone.
        env={**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
    )
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
    """)
    assert said == ["said True 2", "said True", "said True"]


def test_a_cluster_that_it_started_ends_with_it():
    """And one that was there before goes on."""
    said = run("""
        import asyncio
        import ray
        from trawl.collectors.distributed import RayCollector

        def made():
            return RayCollector("CartPole-v1", frames_per_batch=5000, total_frames=5000,
                                remote_configs={"memory": 0},
                                ray_init_config={"num_cpus": 1, "include_dashboard": False})
        there = made()
        batch = next(iter(there))
        kept = batch.clone()
        there.shutdown()
        print("said", ray.is_initialized())
        other = made()
        other.shutdown(5.0, True)
        print("said", ray.is_initialized())
        late = made()
        asyncio.run(there.async_shutdown(True))
        print("said", ray.is_initialized(), bool((batch == kept).all()))
        late.shutdown()
        print("said", late.closed)
    """)
    assert said == ["said True", "said False", "said False True", "said True"]


def test_a_cluster_that_it_started_exports_no_metrics():
    said = run("""
        import os
        import ray
        from trawl.backends.ray_cluster import connect

        name = "RAY_enable_metrics_collection"
        os.environ.pop(name)
        connect({"address": "local", "num_cpus": 1, "object_store_memory": 100 << 20})
        there = ray.remote(num_cpus=0)(lambda: os.environ.get(name))
        print("said", ray.get(there.remote()), name in os.environ)
    """)
    assert said == ["said 0 False"]


def test_a_cluster_outlives_the_thread_that_started_it():
    said = run("""
        import threading
        import ray
        from trawl.collectors.distributed import RayCollector

        made = []
        def make():
            made.append(RayCollector("CartPole-v1", frames_per_batch=100, total_frames=200,
                                     remote_configs={"memory": 0},
                                     ray_init_config={"num_cpus": 1}))
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        print("said", [len(batch) for batch in made[0]])
        ray.shutdown()
    """)
    assert said == ["said [100, 100]"]
