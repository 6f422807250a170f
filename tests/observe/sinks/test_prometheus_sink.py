import socket
import threading
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from monitor_parts import make

from trawl.observe import Monitor, PrometheusSink

pytest.importorskip("prometheus_client")

pytestmark = pytest.mark.usefixtures("nothing_left")


def scraped(port):
    """The value of each gauge by name and labels, as Prometheus reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    families = list(text_string_to_metric_families(text))
    assert {family.type for family in families} <= {"gauge"}
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, sample.labels.get("worker")): sample.value
        for family in families
        for sample in family.samples
    }


def test_prometheus_reads_the_numbers():
    sink = PrometheusSink(0)
    with make(2) as collector, Monitor(collector, [sink], every=0.001):
        list(collector)
        expected = {
            key_of(name): float(value)
            for name, value in collector.stats("both").items()
            if not isinstance(value, str)
        }
        assert {("trawl_frames", None), ("trawl_per_worker_frames", "1")} <= set(expected)
        # Polls that came before the last batch was let go of show other figures.
        while scraped(sink.port) != expected:
            pass
    # The port is free afterwards.
    with pytest.raises(URLError):
        urlopen(f"http://127.0.0.1:{sink.port}/metrics")
    with socket.create_server(("127.0.0.1", sink.port)):
        pass


def key_of(name):
    """The name and the label of a statistic."""
    worker, slash, rest = name.partition("/")
    if slash:
        return f"trawl_per_worker_{rest}", worker.removeprefix("worker_")
    return f"trawl_{name}", None


def test_odd_names_and_values_can_be_scraped_from_this_machine_only():
    sink = PrometheusSink(0)
    sink.open()
    sink.write({"a b/c.é": 1, "nan": float("nan"), "text": "x", "worker_12/a/b": 2}, 0)
    found = scraped(sink.port)
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    sink.close()
    assert found.pop(("trawl_nan", None)) != 0
    assert found == {("trawl_a_b_c__", None): 1.0, ("trawl_per_worker_a_b", "12"): 2.0}
    mine = [
        at for _, at, _, state, *_ in lines if state == "0A" and at.endswith(f":{sink.port:04X}")
    ]
    assert mine == [f"0100007F:{sink.port:04X}"]


def test_a_port_in_use_is_an_error_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server, make(0) as collector:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} of 127.0.0.1: .*pass another port"):
            Monitor(collector, [PrometheusSink(port)])


def test_the_end_waits_for_no_idle_client_and_leaves_no_thread():
    sink = PrometheusSink(0)
    sink.open()
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", sink.port)) for _ in range(5)]
    while threading.active_count() < before + len(idle):
        pass
    sink.close()
    assert [one.recv(1) for one in idle] == [b""] * len(idle)
    for one in idle:
        one.close()


def test_idle_clients_take_few_threads_and_no_turn_of_others():
    sink = PrometheusSink(0)
    sink.open()
    address = "127.0.0.1", sink.port
    try:
        before = threading.active_count()
        idle = [socket.create_connection(address) for _ in range(20)]
        # It takes connections in turn: once the last one is turned away, it has seen all.
        assert [one.recv(1) for one in idle[16:]] == [b""] * 4
        assert threading.active_count() - before <= 16
        for one in idle:
            one.close()
        while True:
            try:
                with urlopen(f"http://127.0.0.1:{sink.port}/metrics") as answer:
                    assert answer.status == 200
                    break
            except (OSError, HTTPException):
                continue  # the threads of clients that went are about to end
    finally:
        sink.close()
