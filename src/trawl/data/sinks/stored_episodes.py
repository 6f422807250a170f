"""Reader of Minari's episodes in a dataset, which may be damaged or untrusted."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase

from trawl.data.sinks.entries import is_count, rechunk
from trawl.data.sinks.episodes import EpisodeCodec
from trawl.data.sinks.files import damaged, open_frames, read_json, reading
from trawl.data.sinks.record import Record

DATA, METADATA = "data", "metadata.json"
# Totals in Minari's metadata that the record repeats for the committed episodes.
TOTALS = ("total_episodes", "total_steps", "dataset_size")
_EPISODE = "part-0.arrow"
_SPACES = ("observation_space", "action_space")


class StoredEpisodes:
    """The committed episodes of a dataset.

    Args:
        record: record of the dataset.

    Attributes:
        count: number of committed episodes.
        totals: the record's copy of the totals in Minari's metadata.
        metadata: Minari's metadata of the dataset.
        codec: codec that converts episodes to frames.

    Raises:
        ImportError: if Minari or pyarrow is not installed.
        ValueError: if the record's totals or Minari's metadata are missing or damaged.
    """

    def __init__(self, record: Record) -> None:
        self._minari = import_minari()
        self._record = record
        self.totals = _totals(record)
        self.count: int = self.totals["total_episodes"]
        self._path = record.directory / DATA
        path = self._path / METADATA
        self.metadata = read_json(open_frames(record.directory, f"{DATA}/{METADATA}"), path)
        # If the metadata had no spaces, Minari would make the environment, and run any code that
        # the metadata names.
        if not all(isinstance(self.metadata.get(name), str) for name in _SPACES):
            raise damaged(path, f"{' and '.join(_SPACES)} must be text")
        if self.metadata.get("data_format") != "arrow":
            found = reprlib.repr(self.metadata.get("data_format"))
            raise damaged(path, f"data_format must be 'arrow', but it is {found}")
        with reading(path, Exception):
            self._dataset = self._minari.MinariDataset(self._path)
            spaces = self._dataset.observation_space, self._dataset.action_space
            self.codec = EpisodeCodec(record.entries, *spaces)
        self._steps = 0

    def frames(self) -> Iterator[TensorDictBase]:
        """Yields the frames of each episode, of shape ``(steps,)``.

        Raises:
            ValueError: if an episode is missing or damaged.
        """
        # Reads one episode at a time: Minari mixes up several episodes if one of them is long.
        for number in range(self.count):
            self.check(number)
            with reading(self._path / str(number), Exception):
                (episode,) = self._dataset.iterate_episodes([number])
                rows = self.codec.decode(episode)
            yield rows
        self.check_steps()

    def check(self, number: int) -> None:
        """Checks the files of an episode before Minari reads them.

        Raises:
            ValueError: if a file is missing, is damaged, or does not belong to the episode.
        """
        import pyarrow as pa

        folder = f"{DATA}/{number}"
        path = self._record.directory / folder / _EPISODE
        os.close(open_frames(self._record.directory, f"{folder}/{_EPISODE}"))
        for name in os.listdir(path.parent):
            # Arrow would also read any other file in the folder.
            if name not in (_EPISODE, METADATA) and not name.startswith((".", "_")):
                raise damaged(path.parent, f"{name!r} does not belong there")
        with reading(path, Exception), pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            if reader.num_record_batches != 1:
                raise ValueError(
                    f"it holds {reader.num_record_batches} record batches, but must hold one"
                )
            batch = reader.get_batch(0)
            # Otherwise a damaged file could make Arrow read outside the batch's memory.
            batch.validate(full=True)
            self._steps += len(batch) - 1

    def check_steps(self) -> None:
        """Checks that the episodes together have the number of frames in the record.

        Raises:
            ValueError: if the number of frames differs.
        """
        steps, self._steps = self._steps, 0
        if steps != self._record.frames:
            raise self._record.damaged(
                f"it records {self._record.frames} frames, but the episodes have {steps}"
            )


def read(record: Record) -> TensorDictBase:
    """Returns a dataset's frames in memory, of shape ``(frames,)``, episode by episode."""
    result: TensorDictBase = torch.cat(list(StoredEpisodes(record).frames()))
    return result


def batches(record: Record, size: int) -> Iterator[TensorDictBase]:
    """Yields the frames of a dataset, ``size`` at a time."""
    return rechunk(StoredEpisodes(record).frames(), size)


def import_minari() -> Any:
    """Imports Minari and returns the module.

    Raises:
        ImportError: if Minari or pyarrow is not installed.
    """
    try:
        import minari
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Minari datasets need minari and pyarrow: pip install 'trawl-rl[minari]'",
            name=error.name,
        ) from error
    return minari


def _totals(record: Record) -> dict[str, Any]:
    totals = record.layout.get("totals")
    totals = totals if isinstance(totals, dict) else {}
    episodes, steps, size = (totals.get(name) for name in TOTALS)
    # Each episode has at least one frame.
    if not is_count(episodes) or not 0 < episodes <= record.frames or steps != record.frames:
        raise record.damaged(
            f"{record.frames} frames can't be {reprlib.repr(episodes)} episodes of "
            f"{reprlib.repr(steps)} steps in total"
        )
    if type(size) not in (int, float):
        raise record.damaged(f"dataset_size must be a number, but it is {reprlib.repr(size)}")
    return {name: totals[name] for name in TOTALS}
