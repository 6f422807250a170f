"""A Ray cluster of several hosts, and a link between them that is cut."""

import shutil
import tempfile
from contextlib import contextmanager

import pytest
from hosts_parts import of_local_workers
from network import network
from nursery import Nursery

pytest.importorskip("ray")
# That a node which dies is replaced is tested on one host as well.
pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
PORT = 6379
# With these settings, Ray notices failures in seconds instead of minutes, and needs no token.
SETTINGS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "2",
    "RAY_grpc_client_keepalive_time_ms": "1000",
    "RAY_grpc_client_keepalive_timeout_ms": "1000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.fixture(scope="module")
def nursery():
    # Without Ray's scripts: if FastAPI is installed, their import draws random numbers, and nodes
    # that are forked afterwards would have the same id.
    found = Nursery("hosts_parts", "trawl.extras.clusters.ray.backend", **SETTINGS)
    yield found
    found.close()


@contextmanager
def cluster(hosts):
    """Starts a Ray cluster whose head is the first host; yields the address of the cluster."""
    head, *others = hosts
    # Ray makes sockets in this folder, whose paths must be short.
    folder = tempfile.mkdtemp(prefix="ray")
    try:
        for host in hosts:
            host.own(folder)
        first = ["--head", f"--port={PORT}", "--include-dashboard=false", "--no-monitor"]
        assert start(head, *first, f"--temp-dir={folder}").end(300) == 0
        for host in others:
            # Starts one node at a time, because each has to start within 30 s.
            assert start(host, f"--address={head.address}:{PORT}").end(300) == 0
        yield f"{head.address}:{PORT}"
    finally:
        for host in hosts:
            host.close()
        shutil.rmtree(folder, ignore_errors=True)


def start(host, *options):
    """Makes a host a node of the cluster, as the command ``ray start`` does."""
    own = [f"--node-ip-address={host.address}", "--num-cpus=1"]
    command = ["ray", "start", *own, f"--object-store-memory={100 << 20}", *options]
    return host.python(
        f"import sys; sys.argv = {command}; from ray.scripts.scripts import main; main()"
    )


PROGRAM = """
import sys, warnings
from distributed_parts import policy
from hosts_parts import *
sys.stdout = sys.stderr
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from trawl.collectors.distributed import RayCollector

ray.init(address={address!r}, log_to_driver=False)
found = {{}}
while not found.keys() >= {{*{others}}}:
    # Ray may list a node only a little after the node has started.
    found = {{node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes()}}
nodes = [found[address] for address in {others}]

def made(count, **options):
    # Places one actor on each host, as long as the host can be reached.
    places = [NodeAffinitySchedulingStrategy(node, soft=True) for node in nodes[:count]]
    return RayCollector(
        ["Pendulum-v1"] * count, policy(), sync=True, cat_results=0, frames_per_batch=40 * count,
        remote_configs=[{{"memory": 0, "scheduling_strategy": place}} for place in places])

def where(collector):
    return [member.worker.node for member in collector._pool.slots]

with made(1) as collector:
    say(where(collector) == nodes[:1], digest(collector, 10))
with made(3) as collector:
    say(where(collector) == nodes, digest(collector, 10))
    say(collector._pool.slots[2].worker.pid)
    hear()
    frames = 10 * 120
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while not collector.stats()["restarts"]:
            frames += collector.next().numel()
    frames += collector.next().numel()
    say(*[str(one.message) for one in caught if "a new worker takes its place" in str(one.message)])
    say(frames == collector.stats()["frames"], where(collector)[2] != nodes[2])
say("over")
"""


def test_two_and_four_hosts_and_a_cut_link(nursery):
    """Batches equal those of local workers; a lost actor is replaced, and ends by itself."""
    with network(nursery, 4) as hosts, cluster(hosts) as address:
        here, *others = hosts
        code = PROGRAM.format(address=address, others=[host.address for host in others])
        driver = here.python(code)
        assert driver.hears() == f"True {of_local_workers(1)}"
        assert driver.hears() == f"True {of_local_workers(3)}"
        actor = int(driver.hears())
        others[-1].cut()
        driver.say("it is cut")
        assert driver.hears().startswith("worker 2 died: ")
        assert driver.hears() == "True True"
        assert driver.hears() == "over"
        assert driver.end(300) == 0
        # Waits only for the actor, because some of Ray's own processes stay for longer.
        assert others[-1].left(60, [actor]) == []
