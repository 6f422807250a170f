"""Checkpoints of a collector on disk, from which a killed run continues."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from trawl.collectors.config import warn
from trawl.collectors.driver.lifetime import Lifetime
from trawl.collectors.driver.state_checks import check_fits, has_episodes, why_uncaptured
from trawl.data.sinks.files import explaining_full_disks, lock
from trawl.data.state_files import DIGITS, SUFFIX, check_plain_data, read_state, write_state
from trawl.errors import EnvStateError, StateError, named_state_errors
from trawl.schema.checks import UNKNOWN
from trawl.schema.states import CHECKPOINT
from trawl.versions import version

# A number of more digits is not one of ours, and its successor might be no name of a file.
_NAME = re.compile(rf"checkpoint-([0-9]{{8,18}})-[0-9a-f]{{{DIGITS}}}{re.escape(SUFFIX)}")
_LARGEST = 10**18 - 1
_FORMAT = 1
Mismatch = Literal["raise", "new_episodes"]
# Any class of collectors.
Collecting = TypeVar("Collecting", bound=Any)


class CheckpointFolder:
    """A folder of checkpoints. Other files in the folder are left alone.

    Args:
        path: path of the folder, which is created when the first checkpoint is saved.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        # Absolute, because the process may change its working directory.
        self._place = self.path.absolute()
        self._lock: int | None = None
        # Process that has locked the folder: the lock of a forked child is that of its parent.
        self._owner = 0
        # Name of the last checkpoint that is known to be whole.
        self._last: str | None = None

    def names(self) -> list[str]:
        """Returns the names of the checkpoints, newest first."""
        try:
            found = filter(_NAME.fullmatch, os.listdir(self._place))
        except FileNotFoundError:
            return []
        return sorted(found, key=_number, reverse=True)

    def save(self, content: Mapping[str, Any]) -> Path:
        """Saves a checkpoint, and removes all but the last two.

        The folder is locked from the first call until :meth:`close`.

        Returns:
            The path of the file.

        Raises:
            TypeError: if the content is not plain data.
            BlockingIOError: if another process or collector saves checkpoints in the folder.
            OSError: if the checkpoint can't be written. Earlier checkpoints are kept.
        """
        for name, value in content.items():
            check_plain_data(name, value)
        with explaining_full_disks(self._place, self.path):
            self._ensure_lock()
            before = self.names()
            number = _number(before[0]) + 1 if before else 1
            if number > _LARGEST:
                raise ValueError(
                    f"{self.path / before[0]} has the largest number that a checkpoint can have: "
                    "remove it, or save in another folder"
                )
            name = write_state(self._place, f"checkpoint-{number:08d}", content)
        kept = {name, self._last or (before[0] if before else name)}
        self._last = name
        for old in before:
            if old not in kept:
                # A folder with such a name is not one of ours.
                with suppress(IsADirectoryError):
                    (self._place / old).unlink(missing_ok=True)
        return self.path / name

    def _ensure_lock(self) -> None:
        """Locks the folder, unless this process has locked the folder that is there now."""
        self._place.mkdir(parents=True, exist_ok=True)
        if self._lock is not None:
            mine, there = os.fstat(self._lock), os.stat(self._place)
            same = (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
            if same and self._owner == os.getpid():
                return
            self.close()
        self._lock = lock(self._place, "another collector saves its checkpoints here")
        self._owner = os.getpid()

    def files(self) -> list[Path]:
        """Returns the paths of the checkpoints, newest first."""
        return [self.path / name for name in self.names()]

    def read(self, file: Path) -> dict[str, Any]:
        """Returns the content of a checkpoint.

        Raises:
            FileNotFoundError: if another process has removed it.
            StateError: if it is damaged, or can't be read.
        """
        try:
            return read_state(self._place, file.name)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            raise StateError(str(error)) from error

    def loaded(self, file: Path) -> None:
        """Notes that a checkpoint is known to be whole, so that it is kept."""
        self._last = file.name

    def close(self) -> None:
        """Unlocks the folder. Further calls do nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_folder(path: Any) -> None:
    """Checks that a path may be that of a folder of checkpoints.

    Raises:
        TypeError: if it is no path.
        NotADirectoryError: if it is the path of a file.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be the path of a folder, but it is {path!r}")
    if os.path.isfile(path):
        raise NotADirectoryError(
            errno.ENOTDIR, "path must be the folder of the checkpoints, but it is a file", str(path)
        )


def _number(name: str) -> int:
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1])


class Checkpoints:
    """The checkpoints of a collector.

    Args:
        lifetime: the time in which the collector is open.
        held: function that returns the context in which no other thread collects.
        state_dict: the collector's method.
        load_state_dict: the collector's method.

    Attributes:
        extra: user data from the checkpoint that was loaded last; empty before the first one.
    """

    def __init__(
        self,
        lifetime: Lifetime,
        held: Callable[[], AbstractContextManager[Any]],
        state_dict: Callable[[], dict[str, Any]],
        load_state_dict: Callable[..., None],
    ) -> None:
        self.extra: dict[str, Any] = {}
        self._lifetime, self._held = lifetime, held
        self._state_dict, self._load_state_dict = state_dict, load_state_dict
        self._used: CheckpointFolder | None = None
        self._warned = False

    def checkpoint(
        self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None
    ) -> Path:
        """Saves the state of this collector, together with your own data, in a folder.

        Call this method between two batches. The checkpoint is complete when the method returns,
        and survives a power cut. If the process is killed during the call, earlier checkpoints are
        still there. The folder keeps the last two checkpoints, and is locked until the collector is
        shut down.

        Args:
            path: path of the folder, which is created if it does not exist.
            extra: your own data: tensors, numbers, strings, bytes, and lists, tuples and
                dictionaries of these, such as the ``state_dict()`` of a model and of an optimizer.
                After loading, the data is in :attr:`extra`.

        Returns:
            The path of the checkpoint's file, which ``torch.load`` reads.

        Raises:
            TypeError: if ``path`` is no path, or ``extra`` contains other objects.
            NotADirectoryError: if ``path`` is a file.
            BlockingIOError: if another process or collector saves its checkpoints in the folder.
            OSError: if the checkpoint can't be written, for example because the disk is full.
                Earlier checkpoints are kept.
        """
        self._lifetime.check_open("checkpoint()")
        if extra is not None and not isinstance(extra, Mapping):
            raise TypeError(
                f"extra must be a mapping of names to data, but it is {type(extra).__name__}"
            )
        with self._folder(path) as folder, self._held():
            state = self._state_dict()
            saved = folder.save(
                {"format": _FORMAT, "trawl": version(), "state": state, "extra": dict(extra or {})}
            )
        if not (has_episodes(state) or self._warned):
            self._warned = True
            warn(
                "new episodes will begin after a checkpoint of this collector is loaded: "
                f"{why_uncaptured(state)}",
                RuntimeWarning,
            )
        return saved

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        trust: bool = False,
        on_state_mismatch: Mismatch = "raise",
    ) -> bool:
        """Continues from the newest checkpoint in a folder, if there is one.

        Afterwards, :attr:`extra` has the user data of the checkpoint. If the newest checkpoint is
        damaged, or can't be loaded for another reason than the version of Trawl, the previous one
        is loaded, with a warning.

        Args:
            path: path of the folder.
            trust: True to open pickled environments, which can run any code. Nothing else in a
                checkpoint can run code.
            on_state_mismatch: reaction to the state of an environment that can't be restored.
                ``"raise"`` raises an error. ``"new_episodes"`` begins new episodes in all
                environments, and warns. It also allows a checkpoint of another version of Trawl.

        Returns:
            True if there was a checkpoint; False if the folder has none, or does not exist.

        Raises:
            StateError: if all checkpoints are damaged, or the checkpoint was saved by another
                version of Trawl, or by a collector with other environments, another policy or
                another number of workers. The error names the file and the entry, and the collector
                is as it was before.
            EnvStateError: if the state of an environment could not be captured, or can't be
                restored; a subclass of ``StateError``.
            NotADirectoryError: if ``path`` is a file.
        """
        self._lifetime.check_open("load_checkpoint()")
        with self._folder(path) as folder:
            newest: StateError | None = None
            for file in folder.files():
                try:
                    content = folder.read(file)
                    _check_versions(file, content, on_state_mismatch)
                    with named_state_errors(file):
                        self._load_content(content, trust, on_state_mismatch)
                except FileNotFoundError:
                    # Another process has removed it since the folder was listed.
                    continue
                except VersionError:
                    raise
                except StateError as error:
                    newest = newest or error
                    continue
                if newest is not None:
                    warn(f"{newest}; the checkpoint before it is loaded instead", RuntimeWarning)
                folder.loaded(file)
                self.extra = content["extra"]
                return True
        if newest is not None:
            raise newest
        return False

    def _load_content(self, content: Mapping[str, Any], trust: bool, mismatch: Mismatch) -> None:
        state = content["state"]
        if mismatch == "raise" and not has_episodes(state):
            raise EnvStateError(
                f"it can't continue the episodes: {why_uncaptured(state)}. To begin new episodes, "
                "pass on_state_mismatch='new_episodes'"
            )
        with self._held():
            check_fits(state, self._state_dict())
            self._load_state_dict(state, trust=trust, on_state_mismatch=mismatch)

    @contextmanager
    def _folder(self, path: str | os.PathLike[str]) -> Iterator[CheckpointFolder]:
        """Context for the use of a folder; afterwards, a folder that was used before is unlocked.

        If an exception leaves the context, the folder that was used before stays locked.
        """
        check_folder(path)
        before = self._used
        folder = before if before and before.path == Path(path) else CheckpointFolder(path)
        try:
            yield folder
        except BaseException:
            if folder is not before:
                folder.close()
            raise
        if before is not None and folder is not before:
            before.close()
        self._used = folder

    def close(self) -> None:
        """Unlocks the folder."""
        if self._used is not None:
            self._used.close()


def resumed(
    make: Callable[[], Collecting], path: str | os.PathLike[str], **options: Any
) -> Collecting:
    """Makes a collector that continues from the newest checkpoint in a folder.

    Args:
        make: function that makes the collector.
        path: path of the folder.
        **options: options of :meth:`Checkpoints.load_checkpoint`.

    Raises:
        FileNotFoundError: if the folder has no checkpoint, or does not exist.
        StateError, EnvStateError: see :meth:`Checkpoints.load_checkpoint`.
    """
    check_folder(path)
    missing = FileNotFoundError(
        f"{os.fspath(path)} has no checkpoint to resume: the first argument is the folder"
    )
    if not CheckpointFolder(path).names():
        raise missing
    collector = make()
    try:
        if not collector.load_checkpoint(path, **options):
            raise missing
    except BaseException:
        collector.shutdown(raise_on_error=False)
        raise
    return collector


class VersionError(StateError):
    """Raised if a checkpoint is whole, but was saved by another version of Trawl."""


def _check_versions(file: Path, content: Mapping[str, Any], mismatch: Mismatch) -> None:
    """Checks that this version of Trawl can read a checkpoint."""
    with named_state_errors(file):
        CHECKPOINT(content, "the checkpoint", UNKNOWN)
    if content["format"] != _FORMAT:
        raise VersionError(
            f"{file} has format {content['format']!r}, but this version of Trawl reads format "
            f"{_FORMAT}: use the version that saved it"
        )
    saved, own = content["trawl"], version()
    if saved == own:
        return
    message = f"{file} was saved by Trawl {saved}, but this is Trawl {own}"
    if mismatch == "raise":
        raise VersionError(
            f"{message}: use that version, or pass on_state_mismatch='new_episodes' to load what "
            "can be loaded"
        )
    warn(message, RuntimeWarning)
