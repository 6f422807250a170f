"""Statistics for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trawl.extras.monitors.sinks import (
    PREFIX,
    StatsSink,
    finite_numbers,
    load_library,
    make_folder,
)


class TensorBoardSink(StatsSink):
    """Writes the statistics that are finite numbers into an event file of TensorBoard.

    Needs ``pip install 'trawl-rl[tensorboard]'``. Events are written to disk with each poll.

    Args:
        directory: folder for the event file. If it already contains event files, TensorBoard shows
            all of them together.
        prefix: prefix of the names.

    Raises:
        ModuleNotFoundError: if TensorBoard is not installed.
        OSError: when the monitor is made, if the folder can't be written.

    Examples:
        >>> import os, tempfile
        >>> from trawl import Collector
        >>> from trawl.observe import Monitor, TensorBoardSink
        >>> folder = tempfile.mkdtemp()
        >>> with (
        ...     Collector("CartPole-v1", frames_per_batch=10, total_frames=30) as collector,
        ...     Monitor(collector, [TensorBoardSink(folder)]),
        ... ):
        ...     for batch in collector:
        ...         pass
        >>> len(os.listdir(folder))
        1
    """

    target = "DIR"

    def __init__(self, directory: str | os.PathLike[str], prefix: str = PREFIX) -> None:
        self.directory, self.prefix = os.fspath(directory), prefix
        load_library("tensorboard", "tensorboard")
        self._writer: Any = None

    def open(self) -> None:
        """Makes the event file."""
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard itself opens folders in the cloud, such as gs://bucket/runs.
        if "://" not in self.directory:
            make_folder(self.directory, "pass another folder")
        self._writer = SummaryWriter(self.directory)

    def write(self, stats: Mapping[str, Any], step: int) -> None:
        """Writes the numbers, and flushes them to disk."""
        for name, value in finite_numbers(stats, self.prefix).items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
