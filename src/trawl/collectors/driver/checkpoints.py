"""Checkpoints of a collector on disk, from which a killed run continues."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from trawl.collectors.config import warn
from trawl.collectors.driver.lifetime import Lifetime
from trawl.collectors.driver.state_checks import check_fits, has_episodes, why_uncaptured
from trawl.data.checkpoints import CheckpointFolder, check_folder
from trawl.errors import EnvStateError, StateError, named_state_errors
from trawl.schema.checks import UNKNOWN
from trawl.schema.states import CHECKPOINT
from trawl.versions import version

_FORMAT = 1
Mismatch = Literal["raise", "new_episodes"]
# Any class of collectors.
Collecting = TypeVar("Collecting", bound=Any)


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
