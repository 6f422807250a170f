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
        path: path of the file; by default ``trawl/workers.json`` in the user's cache folder.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = cache_folder() / "workers.json" if path is None else path

    def get(self, key: str) -> int | None:
        """Returns the number of workers for a key; None if there is none."""
        count = self._read().get(key)
        valid = isinstance(count, int) and not isinstance(count, bool) and count > 0
        return count if valid else None

    def put(self, key: str, count: int) -> None:
        """Remembers the number of workers for a key."""
        entries = self._read()
        entries.pop(key, None)
        entries[key] = count
        kept = dict(list(entries.items())[-_MOST:])
        try:
            self._write(json.dumps({"format": _FORMAT, "workers": kept}, indent=1))
        except OSError as error:
            warn(
                f"the number of workers could not be saved in {self.path}: {error}. It will be "
                "measured again",
                RuntimeWarning,
            )

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["format"] == _FORMAT:
                return dict(data["workers"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            warn(f"{self.path} can't be read, and is ignored: {error}", RuntimeWarning)
        return {}

    def _write(self, text: str) -> None:
        """Replaces the file at once, so that no reader sees a part of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=".workers-")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, self.path)
        except BaseException:
            with suppress(OSError):
                os.remove(temporary)
            raise


def cache_folder() -> Path:
    """Returns Trawl's folder in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of the variable says that relative paths are to be ignored.
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "trawl"
