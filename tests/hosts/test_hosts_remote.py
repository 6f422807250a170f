"""Process groups and RPC on several hosts, and links between them that are cut.

What a stranger in the network can do is tested with another user of one machine.
"""

import os
import re
import signal

import pytest
from distributed_parts import CLASSES
from hosts_parts import of_local_workers
from network import network

from trawl.observe import read_trace

PATIENCE = 300
NAMES = [cls.__name__ for cls in CLASSES]
BEGIN = """
import os, warnings
from distributed_parts import *
from hosts_parts import *
from trawl.errors import WorkerDied
"""
RANK = """
import os, sys
from trawl.collectors.distributed import run_rank
"""


def place(driver, port, count, rank):
    """Returns the environment variables of a rank; ``count`` is the number of all ranks."""
    return {
        "MASTER_ADDR": driver.address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "RANK": str(rank),
        "TRAWL_KEY": "of all programs of these tests, alike",
    }


# Class, number of hosts and port of each collector; the collectors are made one after the other.
ROUNDS = [
    (name, count, 29_500 + 10 * count + k) for count in (2, 4) for k, name in enumerate(NAMES)
]

OF_ALL = f"""
for number, (name, count, port) in enumerate({ROUNDS}):
    os.environ |= {{"MASTER_PORT": str(port), "WORLD_SIZE": str(count)}}
    path = os.path.join(os.environ["TRACES"], f"{{number}}.json.gz")
    options = {{"num_workers": count - 1, "frames_per_batch": 40 * (count - 1), "trace": path}}
    with make(globals()[name], launcher="env", sync=True, cat_results=0, **options) as collector:
        if number == 0:
            say("made")
            hear()
            say("collects")
        say(name, count, digest(collector, 10), collector.stats()["frames"])
"""
OF_RANK = f"""
for _, count, port in {ROUNDS}:
    if int(os.environ["RANK"]) < count:
        os.environ |= {{"MASTER_PORT": str(port), "WORLD_SIZE": str(count)}}
        assert run_rank() == 0
"""


@pytest.mark.long
def test_two_and_four_hosts(nursery, tmp_path):
    """Batches equal those of local workers, even if a link is cut for a moment."""
    with network(nursery, 4) as (here, *others):
        driver = here.python(BEGIN + OF_ALL, **place(here, 1, 4, 0), TRACES=str(tmp_path))
        ranks = [
            host.python(RANK + OF_RANK, **place(here, 1, 4, number))
            for number, host in enumerate(others, 1)
        ]
        assert driver.hears() == "made"
        others[0].cut()
        driver.say("collect")
        assert driver.hears() == "collects"
        others[0].mend()
        for name, count, _ in ROUNDS:
            frames = 10 * 40 * (count - 1)
            assert driver.hears() == f"{name} {count} {of_local_workers(count - 1)} {frames}"
        assert [one.end(PATIENCE) for one in (driver, *ranks)] == [0] * 4
        assert not any(host.processes() for host in (here, *others))
    for number, (_, count, _) in enumerate(ROUNDS):
        timeline = read_trace(tmp_path / f"{number}.json.gz")
        lanes = [f"worker {index}" for index in range(count - 1)]
        assert set(timeline.lanes) == {"learner", "scheduler", *lanes}
        for clock in timeline.info["clocks"]:
            assert abs(clock["offset"]) <= clock["error"]
        for lane in lanes:
            assert [span.name for span in timeline.lane(lane)].count("batch") == 10


CUT = """
options = {"launcher": "env", "num_workers": 1, "link_timeout": 3}
with make(DistributedCollector, sync=True, **options) as collector:
    frames = collector.next().numel()
    say("cut")
    hear()
    try:
        for _ in range(1000):
            frames += collector.next().numel()
    except WorkerDied as error:
        say(error)
    say(frames == collector.stats()["frames"])
"""


def test_a_cut_link_to_a_rank_of_ones_own(nursery):
    """Both sides notice the cut link in time, and the driver reports the death of its worker."""
    with network(nursery, 2) as (here, other):
        driver = here.python(BEGIN + CUT, **place(here, 29_500, 2, 0))
        rank = other.python(RANK + "sys.exit(run_rank())", **place(here, 29_500, 2, 1))
        assert driver.hears() == "cut"
        other.cut()
        driver.say("it is cut")
        died = r"worker 0 \(rank 1, started from outside\) was out of reach for 3 s"
        assert re.match(died, driver.hears())
        assert driver.hears() == "True"
        assert rank.end(PATIENCE) == 0
        assert driver.end(PATIENCE) == 0
        assert not here.processes()
        assert not other.processes()


REPLACED = """
options = {{"launcher": "mp", "address": {address!r}, "link_timeout": 5}}
with make(AskingCollector, sync=True, total_frames=4000, **options) as collector:
    frames = collector.next().numel()
    say("cut")
    hear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frames += sum(batch.numel() for batch in collector)
    say(*(warning.message for warning in caught))
    say(frames, collector.stats()["frames"], collector.stats()["restarts"])
"""
START = "import pickle; pickle.loads(bytes.fromhex({run!r}))()"


@pytest.mark.long
def test_a_cut_link_to_a_worker_that_can_be_replaced(nursery):
    """A worker on another host takes its place, and the worker out of reach ends by itself."""
    with network(nursery, 4) as (here, *others):
        driver = here.python(BEGIN + REPLACED.format(address=here.address))
        for host in others[:2]:
            host.python(START.format(run=driver.hears()))
        assert driver.hears() == "cut"
        others[0].cut()
        driver.say("it is cut")
        others[2].python(START.format(run=driver.hears()))
        taken = "worker 0 was out of reach for 5 s (link_timeout); a new worker takes its place"
        assert driver.hears().startswith(taken)
        assert driver.hears() == "4000 4000 1"
        assert driver.end(PATIENCE) == 0
        for host in (here, *others):
            assert host.left(PATIENCE) == []


UNNOTICED = """
with make(DistributedCollector, launcher="env", sync=True, num_workers=1) as collector:
    collector.next()
    say("cut")
    hear()
    collector.shutdown(timeout=1)
    say("shut down")
"""


@pytest.mark.long
def test_shutdown_while_a_link_is_cut(nursery):
    """A shutdown keeps to its timeout, although the cut link would go unnoticed for an hour."""
    with network(nursery, 2) as (here, other):
        driver = here.python(BEGIN + UNNOTICED, **place(here, 29_500, 2, 0))
        other.python(RANK + "run_rank()", **place(here, 29_500, 2, 1))
        assert driver.hears() == "cut"
        other.cut()
        driver.say("it is cut")
        assert driver.hears() == "shut down"
        assert driver.end(PATIENCE) == 0


KEYLESS = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with make(DistributedCollector, launcher="env", sync=True, num_workers=1) as collector:
        collector.next()
for one in caught:
    say(one.message)
say("over")
"""


def test_ranks_without_a_key(nursery):
    """Ranks without a key work, and a warning says who can run code."""
    with network(nursery, 2) as (here, other):
        ours, theirs = (place(here, 29_500, 2, rank) for rank in (0, 1))
        assert ours.pop("TRAWL_KEY") == theirs.pop("TRAWL_KEY")
        driver = here.python(BEGIN + KEYLESS, **ours)
        rank = other.python(RANK + "sys.exit(run_rank())", **theirs)
        said = f"the ranks share no key: anyone who can reach {here.address}:29500 can run code"
        assert driver.hears().startswith(said)
        assert driver.hears() == "over"
        assert [one.end(PATIENCE) for one in (driver, rank)] == [0, 0]


COMMANDED = """
import subprocess, sys
# Gives the networks names, which no other program sees.
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
os.makedirs("/run/netns")
for index, pid in enumerate({pids}):
    subprocess.run(["ip", "netns", "attach", f"host{{index}}", str(pid)], check=True)
options = {{
    "launcher": "command", "address": {address!r}, "cat_results": 0, "num_workers": 2,
    "launcher_command": "ip netns exec host{{index}} {{worker}}".format(
        index="{{index}}", worker="{{worker}}"),
}}
with make(DistributedCollector, sync=True, frames_per_batch=80, **options) as collector:
    say(digest(collector, 10), collector.stats()["frames"])
    say("made")
    hear()
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_: say(str(message).splitlines()[0])
    while not collector.stats()["restarts"]:
        collector.next()
    collector.next()
    say("again")
    hear()
"""


def test_workers_started_by_a_command_in_other_networks(nursery):
    """Each worker runs where its command starts it, and is replaced there if it is killed."""
    with network(nursery, 3) as (here, *others):
        if here.kinds[0] == "user":
            pytest.skip("only root can give names to networks")
        pids = [host.pid for host in others]
        driver = here.python(BEGIN + COMMANDED.format(address=here.address, pids=pids))
        assert driver.hears() == f"{of_local_workers(2)} 800"
        assert driver.hears() == "made"
        workers = [host.processes() for host in others]
        assert all(any("launching.command" in line for line in own.values()) for own in workers)
        for pid in workers[0]:
            os.kill(pid, signal.SIGKILL)
        driver.say("it is killed")
        died = (
            r"worker 0 (was killed by SIGKILL|exited with status 137) "
            r"\(launcher_command: 'ip netns exec host0 "
        )
        assert re.match(died, driver.hears())
        assert driver.hears() == "again"
        assert any("launching.command" in line for line in others[0].processes().values())
        driver.say("it is there")
        assert driver.end(PATIENCE) == 0
        for host in others:
            assert host.left(PATIENCE) == []


@pytest.mark.long
def test_a_cut_link_to_a_worker_that_a_command_started(nursery):
    """The cut is the reason that is reported, and not the end of the command that follows it."""
    with network(nursery, 3) as (here, *others):
        if here.kinds[0] == "user":
            pytest.skip("only root can give names to networks")
        program = COMMANDED.replace('"cat_results": 0,', '"cat_results": 0, "link_timeout": 2,')
        pids = [host.pid for host in others]
        driver = here.python(BEGIN + program.format(address=here.address, pids=pids))
        driver.hears()
        assert driver.hears() == "made"
        others[0].cut()
        driver.say("it is cut")
        # The worker's end may notice it first, and ends the worker.
        assert re.match(LOST, driver.hears())
        others[0].mend()
        assert driver.hears() == "again"
        driver.say("it is there")
        assert driver.end(PATIENCE) == 0


LOST = (
    r"worker 0 (was out of reach for 2 s \(link_timeout\)|"
    r"ended by itself, as workers do that lose their connection: exited with status 0)"
)
LOOPBACK = """
import subprocess
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
options = {"launcher": "mp", "address": "127.0.0.1", "link_timeout": 2}
with make(DistributedCollector, sync=True, num_workers=1, max_restarts=0, **options) as collector:
    collector.next()
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    try:
        while True:
            collector.next()
    except WorkerDied as error:
        say(str(error).splitlines()[0])
"""


def test_the_network_of_one_machine_goes_down(nursery):
    with network(nursery, 1) as (here,):
        driver = here.python(BEGIN + LOOPBACK)
        # Both ends notice it at the same time, and the worker ends by itself.
        assert re.match(LOST, driver.hears())
        assert driver.end(PATIENCE) == 0
