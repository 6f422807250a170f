"""File in the user's cache folder that remembers how many workers were the fastest."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from trawl.collectors.config import warn

_FORMAT = 1
# Number of choices that are kept; the oldest are forgotten.
_MOST = 200


class WorkerCache:
    """Numbers of workers, by a digest of the environment, the policy and the machine.

    Every error that concerns the file is only a warning, because a choice can be made anew.

    Args:
        folder: folder of the file ``workers.json``; None to remember nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / "workers.json"

    def get(self, key: str) -> int | None:
        """Returns the number of workers for a key; None if there is none."""
        count = self._read().get(key)
        valid = isinstance(count, int) and not isinstance(count, bool) and count > 0
        return count if valid else None

    def put(self, key: str, count: int) -> None:
        """Remembers the number of workers for a key."""
        if self.path is None:
            return
        entries = self._read()
        entries.pop(key, None)
        entries[key] = count
        kept = dict(list(entries.items())[-_MOST:])
        try:
            _replace(self.path, json.dumps({"format": _FORMAT, "workers": kept}, indent=1))
        except OSError as error:
            warn(
                f"the number of workers could not be saved in {self.path}: {error}. It will be "
                "measured again",
                RuntimeWarning,
            )

    def _read(self) -> dict[str, Any]:
        if self.path is None:
            return {}
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["format"] == _FORMAT:
                return dict(data["workers"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            warn(f"{self.path} can't be read, and is ignored: {error}", RuntimeWarning)
        return {}


def _replace(path: Path, text: str) -> None:
    """Replaces a file at once, so that no reader sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".workers-")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.remove(temporary)
        raise


def cache_folder() -> Path | None:
    """Returns Trawl's folder in the user's cache folder; None if the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of the variable says that relative paths are to be ignored.
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    # Some containers have a user without a home.
    return Path(base) / "trawl" if os.path.isabs(base) else None
