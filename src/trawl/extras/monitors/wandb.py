"""Statistics for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trawl.extras.monitors.sinks import (
    PREFIX,
    StatsSink,
    environment,
    finite_numbers,
    load_library,
)

# While a run is made: no threads that report on the use of wandb, which never end.
_SETTINGS = {"WANDB_ERROR_REPORTING": "false"}


class WandbSink(StatsSink):
    """Logs the statistics that are finite numbers to a run of Weights & Biases.

    Needs ``pip install 'trawl-rl[wandb]'``. The step of the run is the number of frames. The sink
    makes a run of its own and finishes it, or logs to a run that you pass.

    Args:
        project: name of the project.
        run: an existing run to log to, which you finish yourself. Log your own values with the
            number of frames as the step, because Weights & Biases drops values whose step is lower
            than an earlier step.
        prefix: prefix of the names.
        **options: further arguments of ``wandb.init``, such as ``mode="offline"`` or ``name``.

    Raises:
        ModuleNotFoundError: if wandb is not installed.
        TypeError: if both ``run`` and arguments of ``wandb.init`` are passed.

    Examples:
        >>> import tempfile
        >>> from trawl import Collector
        >>> from trawl.observe import Monitor, WandbSink
        >>> sink = WandbSink("cartpole", mode="offline", dir=tempfile.mkdtemp())
        >>> with (
        ...     Collector("CartPole-v1", frames_per_batch=10, total_frames=30) as collector,
        ...     Monitor(collector, [sink]),
        ... ):
        ...     for batch in collector:
        ...         pass
    """

    target = "PROJECT"

    def __init__(
        self,
        project: str | None = None,
        *,
        run: Any = None,
        prefix: str = PREFIX,
        **options: Any,
    ) -> None:
        self._wandb = load_library("wandb", "wandb")
        if run is not None and (project is not None or options):
            given = ", ".join(["project"] * (project is not None) + sorted(options))
            raise TypeError(
                f"run can't be combined with arguments for a new run: leave out {given}"
            )
        self.prefix, self._given, self._run = prefix, run, None
        self._options = {"project": project, "reinit": "create_new", **options}

    def open(self) -> None:
        """Starts the run, unless there is one."""
        if self._given is None:
            # The output of the program is left alone: this run is about the collector.
            quiet = {"settings": self._wandb.Settings(console="off")}
            with environment(_SETTINGS):
                self._run = self._wandb.init(**{**quiet, **self._options})
        else:
            self._run = self._given

    def write(self, stats: Mapping[str, Any], step: int) -> None:
        """Logs the numbers."""
        assert self._run is not None
        self._run.log(finite_numbers(stats, self.prefix), step=step)

    def close(self) -> None:
        """Finishes a run of the sink's own.

        If no other run is left in this process, the process that serves them ends too.
        """
        run, self._run = self._run, None
        if run is not None and self._given is None:
            run.finish()
            if self._wandb.setup().most_recent_active_run is None:
                self._wandb.teardown()
