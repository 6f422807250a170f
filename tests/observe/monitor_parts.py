"""What the tests of monitors share."""

import io
import threading

from rich.console import Console

from trawl import Collector, MultiSyncCollector
from trawl.observe import Monitor, StatsSink

# Seconds after which a test counts as stuck.
PATIENCE = 300


class Recorder(StatsSink):
    """A sink that keeps what it is given, and fails where it is told to."""

    def __init__(self, *, fails=()):
        self.fails = fails
        self.calls, self.stats, self.steps = [], [], []
        self._written = threading.Condition()

    def open(self):
        self._call("open")

    def write(self, stats, step):
        self.stats.append(stats)
        self.steps.append(step)
        with self._written:
            self._written.notify_all()
        self._call("write")

    def close(self):
        self._call("close")

    def _call(self, name):
        self.calls.append(name)
        if name in self.fails:
            raise ConnectionError(f"no {name}")

    def wait_for(self, condition):
        """Waits until a condition holds, which is looked at after each poll."""
        with self._written:
            assert self._written.wait_for(condition, PATIENCE)


def make(workers, env="CartPole-v1", **options):
    """A collector with as many workers, in this process unless asked; 0 for one without."""
    # Short episodes, so that each worker has figures about some.
    options = {"max_frames_per_traj": 7, **options}
    options = {"frames_per_batch": 20, "total_frames": 60, **options}
    if workers:
        options = {"start_method": "inline", **options}
        return MultiSyncCollector([env] * workers, **options)
    return Collector(env, **options)


def ended(monitor):
    """Waits until a monitor has ended by itself."""
    thread = next((one for one in threading.enumerate() if one.name == "Monitor"), None)
    if thread is not None:
        thread.join(PATIENCE)
    return monitor.closed


def watch(sink, workers=0, during=lambda: None, **options):
    """Collects all frames with a monitor, and returns the last statistics."""
    with make(workers, **options) as collector:
        with Monitor(collector, [sink]) as monitor:
            for _ in collector:
                pass
            last = collector.stats(*["both"] * bool(workers))
            during()
        assert monitor.closed
    return last


def panel_of(progress, width=60):
    """The panel of a progress as plain text."""
    console = Console(file=io.StringIO(), width=width, height=100, color_system=None)
    console.print(progress.render())
    return console.file.getvalue()
