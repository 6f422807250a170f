"""Has to be called before torch is imported, so it imports nothing that does."""

import os
import sys


def early() -> None:
    """Notes whether torch was imported before it was called."""
    os.environ["IMPORTED_BEFORE"] = str("torch" in sys.modules)
