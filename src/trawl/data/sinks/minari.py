"""Datasets of Minari: whole episodes, each a folder of its own."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import torch
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from tensordict import TensorDictBase
from typing_extensions import override

from trawl.data.sinks.base import Sink
from trawl.data.sinks.entries import IDS, Entry, bytes_of
from trawl.data.sinks.episodes import EpisodeCodec, spaces_of
from trawl.data.sinks.files import sync, sync_tree, write_json
from trawl.data.sinks.record import Record
from trawl.data.sinks.stored_episodes import (
    DATA,
    METADATA,
    TOTALS,
    StoredEpisodes,
    batches,
    import_minari,
    read,
)

__all__ = ["MinariSink", "batches", "default_id", "read"]

# Of an episode in Arrow files Minari 0.5 reads the first record batch only: so many rows, of
# which an episode has one more than steps.
LONGEST = 32_767
_SEVERAL = ("author", "author_email")
_VERSIONED = re.compile(r"-v\d+$")


class MinariSink(Sink):
    """Writes a dataset of Minari, by whole episodes.

    ``data/`` in the dataset is what ``minari.MinariDataset`` opens. If the dataset lies in
    Minari's own folder (``MINARI_DATASETS_PATH``, or ``~/.minari/datasets``) and its name ends
    with a version, as ``pendulum/random-v0``, ``minari.load_dataset`` and ``minari show`` find it
    by its name. It needs ``pip install 'trawl-rl[minari]'``.

    Episodes are committed with the batch that they end in. Those that have not ended are held in
    memory; what is left of them when the sink is closed becomes episodes that are truncated, so
    that all frames are there. So does the first part of one that gets too long: of 32,767 steps,
    as many as Minari reads of one, or more than ``open_bytes``.

    Args:
        directory: where the dataset goes. It must not exist; its parents are made.
        env: the environment's Gymnasium id, its spec or itself: for its spaces, and for Minari to
            make it again. None: spaces without bounds, of the frames' shapes and dtypes.
        info: how it is made, for ``_dataset.json``.
        resume: whether to go on with a dataset that is there.
        dataset_id: what Minari calls it, as ``"pendulum/random-v0"``. Default: its place in
            Minari's folder, or its own name.
        metadata: what else Minari is told: ``author``, ``algorithm_name``, ``description``, …
        open_bytes: bytes of episodes that have not ended; beyond it the oldest are cut.

    Raises:
        ImportError: if Minari is missing.
        gymnasium.error.Error: if the id is unknown.
        TypeError: if ``env`` is none of the above.
        ValueError: if ``dataset_id`` is none, or ``open_bytes`` not positive.
        FileExistsError: if there is something at ``directory``.
        OSError: if it can't be written there.

    Example:
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
        told = dict(metadata or {})
        name = default_id(Path(directory)) if dataset_id is None else dataset_id
        try:
            minari.dataset.minari_dataset.parse_dataset_id(name)
        except (TypeError, ValueError):
            raise ValueError(
                f"dataset_id must be a name with a version, as 'pendulum/random-v0', but it is "
                f"{name!r}"
            ) from None
        _check_env(env)
        self._given = {
            # Of these Minari wants several.
            **{k: {v} if k in _SEVERAL and isinstance(v, str) else v for k, v in told.items()},
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
        if IDS not in {entry.key for entry in entries}:
            raise ValueError(
                "episodes can't be told apart without ('collector', 'traj_ids'): collect with "
                "track_traj_ids"
            )
        spec, spaces = _spaces(self._env, entries)
        self._codec = EpisodeCodec(entries, *spaces)
        shutil.rmtree(self._data, ignore_errors=True)
        # Minari makes the description of a dataset in a folder that is not ours yet.
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
        # Minari may have been told of one commit more than the record.
        self._metadata = {**stored.metadata, **stored.totals}
        self._drop_uncommitted()

    def _drop_uncommitted(self) -> None:
        # First what Minari reads: it must not speak of what is gone.
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
        """A folder that is empty."""
        path = self._place / "unfinished"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    # --- episodes

    @property
    @override
    def waiting(self) -> int:
        return sum(len(piece) for pieces in self._open.values() for piece in pieces)

    @override
    def _append(self, rows: TensorDictBase) -> None:
        pieces, ended = dict(self._open), []
        for start, stop in _runs(rows):
            name, piece = int(rows.get(IDS)[start]), rows[start:stop]
            whole = [*pieces.pop(name, []), piece]
            if bool(piece.get(("next", "done"))[-1].any()):
                ended.append((whole, False))
            else:
                # Of its own: the user may change the batch before the episode ends. At the end
                # of the dict: what has not been seen for longest comes first.
                pieces[name] = [*whole[:-1], piece.clone()]
        ended += self._too_long(pieces)
        self._store(ended)
        self._open = pieces

    def _too_long(
        self, pieces: dict[int, list[TensorDictBase]]
    ) -> list[tuple[list[TensorDictBase], bool]]:
        """Takes out the pieces that must not wait any longer."""
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
                f"{self.directory}: trajectories that have not ended are cut, and go on as other "
                f"episodes: Minari reads {LONGEST:,} steps of one, and open_bytes is "
                f"{self._open_bytes:,}",
                RuntimeWarning,
                stacklevel=2,
            )
        return cut

    @override
    def _flush(self, everything: bool) -> None:
        # Episodes that have ended are committed as they do.
        if everything:
            self._store([(parts, True) for parts in self._open.values()])
            self._open = {}

    @override
    def _release(self) -> None:
        self._open = {}

    def _store(self, trajectories: Sequence[tuple[Sequence[TensorDictBase], bool]]) -> None:
        """Commits trajectories, each in its parts and whether it was cut."""
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
            # One of this number may be there already: of a commit that came to nothing.
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


def default_id(directory: Path) -> str:
    """What Minari calls a dataset: its path in Minari's folder, or its name, with a version."""
    place = directory.absolute()
    root = Path(
        os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets"
    ).absolute()
    name = place.relative_to(root).as_posix() if place.is_relative_to(root) else place.name
    name = re.sub(r"[^-\w/]", "-", name)
    return name if _VERSIONED.search(name) else f"{name}-v0"


def _spaces(env: Any, entries: Sequence[Entry]) -> tuple[Any, tuple[Space[Any], Space[Any]]]:
    """The spec of an environment, and the spaces of its observations and actions."""
    if env is None:
        return None, spaces_of(entries)
    made = env if isinstance(env, gymnasium.Env) else gymnasium.make(env)
    try:
        return made.spec, (made.observation_space, made.action_space)
    finally:
        if made is not env:
            made.close()


def _check_env(env: Any) -> None:
    """Checks that spaces can be had of what was given as environment, and its spec be written."""
    if isinstance(env, str):
        module, _, name = env.rpartition(":")
        if module:
            importlib.import_module(module)
        env = gymnasium.spec(name)
    elif env is not None and not isinstance(env, (gymnasium.Env, EnvSpec)):
        raise TypeError(
            "env must be a Gymnasium id, an EnvSpec, a gymnasium.Env, or None for spaces of the "
            f"frames' shapes, but it is {type(env).__name__}"
        )
    spec = env.spec if isinstance(env, gymnasium.Env) else env
    if spec is not None:
        _check_spec(spec)


def _check_spec(spec: EnvSpec) -> None:
    """Checks that an environment can be named on disk."""
    if callable(spec.entry_point):
        raise ValueError(
            f"env={spec.id!r} is registered with an object as its entry_point, which can't be "
            "written: register it with the name of that, 'module:Class', or give env=None for "
            "spaces of the frames' shapes"
        )


def _runs(rows: TensorDictBase) -> list[tuple[int, int]]:
    """Where equal trajectory ids begin and end."""
    ids = rows.get(IDS).reshape(-1)
    cuts = (ids[1:] != ids[:-1]).nonzero().flatten() + 1
    return list(pairwise([0, *cuts.tolist(), len(ids)]))


def _megabytes(directory: Path) -> float:
    """As Minari counts it: folders too."""
    return sum(path.stat().st_size for path in [directory, *directory.rglob("*")]) / 1e6
