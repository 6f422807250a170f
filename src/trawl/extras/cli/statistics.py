"""File in a dataset's folder with the statistics of its normalised values."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from trawl.data.sinks.files import create, sync
from trawl.extras.cli.errors import describe, print_note

#: Name of the file.
STATISTICS = "normalization.pt"
# Entry of the file with the number of frames from which the statistics were computed.
_FRAMES = "frames"


def save_statistics(collector: Any, directory: Path, frames: int, *, wait: bool = True) -> None:
    """Writes the statistics of a collector to its dataset's folder, if values are normalised.

    Args:
        collector: the collector.
        directory: path of the dataset.
        frames: number of frames in the dataset.
        wait: True to wait until the file is on the disk.

    Raises:
        OSError: if the file can't be written.
    """
    if collector.normalization is None:
        return
    # torch.save does not say why it can't write a file, so the file is written here.
    content = io.BytesIO()
    torch.save({**collector.normalization.state_dict(), _FRAMES: frames}, content)
    unfinished = directory / f".{STATISTICS}.unfinished"
    with open(create(unfinished), "wb") as file:
        file.write(content.getbuffer())
        file.flush()
        if wait:
            os.fsync(file.fileno())
    os.replace(unfinished, directory / STATISTICS)
    if wait:
        sync([directory])


def load_statistics(collector: Any, directory: Path, frames: int) -> None:
    """Loads the statistics in a dataset's folder into a collector, if values are normalised.

    If there is no file, or it can't be read, a note says so, and the statistics begin anew. Another
    note is printed if the statistics are not those of all frames.

    Args:
        collector: the collector.
        directory: path of the dataset.
        frames: number of frames in the dataset.
    """
    path = directory / STATISTICS
    if collector.normalization is None:
        return
    try:
        state = torch.load(path, weights_only=True)
        collector.normalization.load_state_dict(state)
    except FileNotFoundError:
        print_note(f"note: the statistics begin anew: there is no {path}")
        return
    except Exception as error:  # the file may come from a stranger
        print_note(f"note: the statistics begin anew: {path} can't be read: {describe(error)}")
        return
    counted = state.get(_FRAMES)
    if isinstance(counted, int) and counted != frames:
        print_note(
            f"note: the statistics in {path} are those of {counted:,} frames, but the dataset has "
            f"{frames:,}"
        )
