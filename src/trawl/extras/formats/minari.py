"""The format ``minari``: whole episodes, each in a separate folder."""

from __future__ import annotations

import importlib
import os
import re
import reprlib
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import torch
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from tensordict import TensorDictBase
from typing_extensions import override

from trawl.data.sinks.base import Sink
from trawl.data.sinks.entries import Entry, bytes_of, from_columns, is_count, rechunk, to_columns
from trawl.data.sinks.episodes import EpisodeCodec, spaces_of
from trawl.data.sinks.files import (
    damaged,
    open_frames,
    read_json,
    reading,
    sync,
    sync_tree,
    write_json,
)
from trawl.data.sinks.record import Record
from trawl.data.trajectories import runs
from trawl.envs.making import register_atari
from trawl.keys import TRAJ_IDS

__all__ = ["MinariSink", "default_id"]

# Maximum number of steps in an episode. Minari 0.5 reads only the first record batch of an
# episode's Arrow file. This batch has at most 32,768 rows, one more than the number of steps.
LONGEST = 32_767
_SEVERAL = ("author", "author_email")
_VERSIONED = re.compile(r"-v\d+$")


class MinariSink(Sink):
    """Writes a Minari dataset, which consists of whole episodes.

    ``minari.MinariDataset`` opens the folder ``data/`` of the dataset. ``minari.load_dataset`` and
    ``minari show`` find a dataset by its name if the dataset is in Minari's own folder
    (``MINARI_DATASETS_PATH``, or ``~/.minari/datasets``) and the name ends with a version, such as
    ``pendulum/random-v0``. To install the required packages, run
    ``pip install 'trawl-rl[minari]'``.

    An episode is committed with the batch in which it ends. Until then, its frames are held in
    memory. In these cases, the frames of an unfinished episode are written as a truncated episode:

    - The sink is closed, so that no frames are lost.
    - The episode reaches 32,767 steps, the maximum that Minari reads of an episode.
    - The unfinished episodes together take more than ``open_bytes``. The episodes that have had no
      new frames for the longest time are then written.

    Args:
        directory: path of the dataset. Without ``resume``, this path must not exist. Missing
            parent directories are created.
        env: the environment, its Gymnasium id or its ``EnvSpec``. The environment defines the
            spaces, and Minari can make the environment again from its spec. With None, the spaces
            have the shapes and dtypes of the frames, and no bounds.
        info: facts about the dataset, which are stored in its ``_dataset.json``.
        resume: True to continue a dataset of this format. If no dataset exists, the sink begins a
            new one.
        dataset_id: name of the dataset in Minari, such as ``"pendulum/random-v0"``. The default is
            the path of the dataset within Minari's folder or, outside this folder, the name of its
            directory. If this path or name has no version, ``-v0`` is appended.
        metadata: more metadata for Minari, such as ``author``, ``algorithm_name`` and
            ``description``.
        open_bytes: maximum size of unfinished episodes in memory, in bytes. If this limit is
            exceeded, unfinished episodes are cut.

    Raises:
        ImportError: if Minari or pyarrow is not installed.
        gymnasium.error.Error: if the Gymnasium id is unknown.
        TypeError: if ``env`` has another type.
        ValueError: if ``dataset_id`` is not valid, ``open_bytes`` is not positive, or the spec of
            ``env`` can't be written.
        FileExistsError: if ``directory`` exists, unless ``resume`` is True and the directory is a
            dataset.
        OSError: if the directory can't be written.

    Examples:
        >>> import os, tempfile
        >>> from trawl import Collector
        >>> from trawl.data import MinariSink, load
        >>> directory = os.path.join(tempfile.mkdtemp(), "random-v0")
        >>> with (
        ...     Collector("CartPole-v1", frames_per_batch=50, total_frames=200) as collector,
        ...     MinariSink(directory, "CartPole-v1") as sink,
        ... ):
        ...     for batch in collector:
        ...         sink.write(batch)
        >>> import minari
        >>> dataset = minari.MinariDataset(os.path.join(directory, "data"))
        >>> dataset.total_steps, dataset.id, load(directory).shape
        (200, 'random-v0', torch.Size([200]))
    """

    format = "minari"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        env: Any = None,
        info: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        dataset_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        open_bytes: int = 1 << 30,
    ) -> None:
        minari = import_minari()
        if open_bytes < 1:
            raise ValueError(f"open_bytes must be positive, but it is {open_bytes!r}")
        more = dict(metadata or {})
        name = default_id(Path(directory)) if dataset_id is None else dataset_id
        try:
            minari.dataset.minari_dataset.parse_dataset_id(name)
        except (TypeError, ValueError):
            raise ValueError(
                "dataset_id must be a name with a version, such as 'pendulum/random-v0', but it "
                f"is {name!r}"
            ) from None
        _check_env(env)
        self._given = {
            # Minari expects these as sets.
            **{k: {v} if k in _SEVERAL and isinstance(v, str) else v for k, v in more.items()},
            "dataset_id": name,
            "minari_version": minari.__version__,
        }
        self._env, self._open_bytes = env, open_bytes
        self._data = Path(directory).absolute() / DATA
        self._metadata: dict[str, Any] = {}
        self._codec: EpisodeCodec | None = None
        self._open: dict[int, list[TensorDictBase]] = {}
        self._warned = False
        super().__init__(directory, info, resume=resume)

    # --- the dataset

    @override
    def _begin(self, entries: list[Entry]) -> None:
        if TRAJ_IDS not in {entry.key for entry in entries}:
            raise ValueError(
                "episodes can't be told apart without ('collector', 'traj_ids'): collect with "
                "track_traj_ids=True"
            )
        spec, spaces = _spaces(self._env, entries)
        self._codec = EpisodeCodec(entries, *spaces)
        shutil.rmtree(self._data, ignore_errors=True)
        # Minari creates the metadata in a staging folder. The sink copies it from there.
        storage = self._storage()
        made = storage.new(
            self._staging(), *spaces, env_spec=spec, data_format="arrow", jpeg_encoding=False
        )
        made.update_metadata(self._given)
        self._metadata = made.read_raw_metadata(made.data_path)
        self._data.mkdir()
        write_json(self._data / METADATA, self._metadata)
        sync([self._place])

    @override
    def _restore(self, record: Record) -> None:
        stored = StoredEpisodes(record)
        for number in range(stored.count):
            stored.check(number)
        stored.check_steps()
        self._codec = stored.codec
        # Minari's metadata may be one commit ahead of the record.
        self._metadata = {**stored.metadata, **stored.totals}
        self._drop_uncommitted()

    def _drop_uncommitted(self) -> None:
        # Writes Minari's metadata first, so that it never counts episodes that are removed.
        write_json(self._data / METADATA, self._metadata)
        shutil.rmtree(self._place / "unfinished", ignore_errors=True)
        for path in self._data.iterdir():
            if path.name.isdecimal() and int(path.name) >= self._metadata["total_episodes"]:
                shutil.rmtree(path)

    @override
    def _layout(self) -> dict[str, Any]:
        return {"totals": {name: self._metadata.get(name, 0) for name in TOTALS}}

    @staticmethod
    def _storage() -> Any:
        from minari.dataset.minari_storage import MinariStorage

        return MinariStorage

    def _staging(self) -> Path:
        """Creates an empty staging folder and returns its path."""
        path = self._place / "unfinished"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    @override
    def _waiting_state(self) -> Any:
        return {
            name: [to_columns(piece, self._entries) for piece in pieces]
            for name, pieces in self._open.items()
        }

    @override
    def _restore_waiting(self, state: Any) -> None:
        self._open = {
            int(name): [from_columns(piece, self._entries) for piece in pieces]
            for name, pieces in state.items()
        }

    # --- episodes

    @property
    @override
    def waiting(self) -> int:
        return sum(len(piece) for pieces in self._open.values() for piece in pieces)

    @override
    def _append(self, rows: TensorDictBase) -> None:
        pieces, ended = dict(self._open), []
        for start, stop in runs(rows.get(TRAJ_IDS).reshape(-1)):
            name, piece = int(rows.get(TRAJ_IDS)[start]), rows[start:stop]
            whole = [*pieces.pop(name, []), piece]
            if bool(piece.get(("next", "done"))[-1].any()):
                ended.append((whole, False))
            else:
                # A copy, because the user may change the batch before the episode ends. The
                # episode moves to the end of the dict, so episodes without new frames come first.
                pieces[name] = [*whole[:-1], piece.clone()]
        ended += self._too_long(pieces)
        self._store(ended)
        self._open = pieces

    def _too_long(
        self, pieces: dict[int, list[TensorDictBase]]
    ) -> list[tuple[list[TensorDictBase], bool]]:
        """Removes and returns the unfinished trajectories that must be cut now."""
        sizes = {
            name: sum(bytes_of(part, self._entries) for part in parts)
            for name, parts in pieces.items()
        }
        total, cut = sum(sizes.values()), []
        for name in list(pieces):
            if total <= self._open_bytes and sum(map(len, pieces[name])) < LONGEST:
                continue
            total -= sizes[name]
            cut.append((pieces.pop(name), True))
        if cut and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.directory}: trajectories that have not ended are cut, and continue as "
                f"new episodes, because Minari reads at most {LONGEST:,} steps of an episode, "
                f"and open_bytes is {self._open_bytes:,}",
                RuntimeWarning,
                stacklevel=2,
            )
        return cut

    @override
    def _flush(self, everything: bool) -> None:
        # Finished episodes are committed with the batch that they end in.
        if everything:
            self._store([(parts, True) for parts in self._open.values()])
            self._open = {}

    @override
    def _release(self) -> None:
        self._open = {}

    def _store(self, trajectories: Sequence[tuple[Sequence[TensorDictBase], bool]]) -> None:
        """Commits trajectories, each given as its parts and a flag that is True if it was cut."""
        episodes = []
        for parts, cut in trajectories:
            rows = parts[0] if len(parts) == 1 else torch.cat(list(parts))
            for start in range(0, len(rows), LONGEST):
                stop = min(start + LONGEST, len(rows))
                episodes.append((rows[start:stop], cut or stop < len(rows)))
        if episodes:
            self._commit_episodes(episodes)

    def _commit_episodes(self, episodes: Sequence[tuple[TensorDictBase, bool]]) -> None:
        from minari.data_collector import EpisodeBuffer

        assert self._codec is not None
        before = self._metadata
        number = before["total_episodes"]
        staging = self._staging()
        write_json(staging / METADATA, before)
        buffers = [
            EpisodeBuffer(id=number + i, **self._codec.encode(rows, cut))
            for i, (rows, cut) in enumerate(episodes)
        ]
        storage = self._storage().read(staging)
        storage.update_episodes(buffers)
        metadata = storage.read_raw_metadata(staging)
        size = before.get("dataset_size", 0)
        sync_tree(staging)
        for buffer in buffers:
            # A failed commit may have left an episode with this number.
            target = self._data / str(buffer.id)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(staging / str(buffer.id), target)
            size += _megabytes(target)
        metadata["dataset_size"] = round(size, 6)
        sync([self._data])
        write_json(self._data / METADATA, metadata)
        self._metadata = metadata
        try:
            self._commit(self.frames + sum(len(rows) for rows, _ in episodes))
        except BaseException:
            self._metadata = before
            raise

    @override
    def _finish(self) -> None:
        self._drop_uncommitted()

    @override
    @classmethod
    def read(cls, record: Record) -> TensorDictBase:
        result: TensorDictBase = torch.cat(list(StoredEpisodes(record).frames()))
        return result

    @override
    @classmethod
    def batches(cls, record: Record, size: int) -> Iterator[TensorDictBase]:
        return rechunk(StoredEpisodes(record).frames(), size)


def default_id(directory: Path) -> str:
    """Derives the default ``dataset_id`` from a dataset's path; the id ends with a version."""
    place = directory.absolute()
    root = Path(
        os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets"
    ).absolute()
    name = place.relative_to(root).as_posix() if place.is_relative_to(root) else place.name
    name = re.sub(r"[^-\w/]", "-", name)
    return name if _VERSIONED.search(name) else f"{name}-v0"


def _spaces(env: Any, entries: Sequence[Entry]) -> tuple[Any, tuple[Space[Any], Space[Any]]]:
    """Returns the environment's spec, and its observation and action spaces."""
    if env is None:
        return None, spaces_of(entries)
    made = env if isinstance(env, gymnasium.Env) else gymnasium.make(env)
    try:
        return made.spec, (made.observation_space, made.action_space)
    finally:
        if made is not env:
            made.close()


def _check_env(env: Any) -> None:
    """Checks that ``env`` has a supported type, and that its spec can be written."""
    if isinstance(env, str):
        module, _, name = env.rpartition(":")
        if module:
            importlib.import_module(module)
        register_atari(name)
        env = gymnasium.spec(name)
    elif env is not None and not isinstance(env, (gymnasium.Env, EnvSpec)):
        raise TypeError(
            "env must be a Gymnasium id, an EnvSpec, a gymnasium.Env, or None to derive spaces "
            f"from the frames' shapes, but it is {type(env).__name__}"
        )
    spec = env.spec if isinstance(env, gymnasium.Env) else env
    if spec is not None:
        _check_spec(spec)


def _check_spec(spec: EnvSpec) -> None:
    """Checks that an environment's entry point is a name, which can be written to a file."""
    if callable(spec.entry_point):
        raise ValueError(
            f"env={spec.id!r} is registered with an object as its entry_point, which can't be "
            "written: register it with the object's name, 'module:Class', or pass env=None to "
            "derive spaces from the frames' shapes"
        )


def _megabytes(directory: Path) -> float:
    """Returns a directory's size in MB, including its folders, as Minari counts it."""
    return sum(path.stat().st_size for path in [directory, *directory.rglob("*")]) / 1e6


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
