"""The simulator's application, which has to run before anything else is imported."""

from typing import Any


class AppLauncher:
    """Starts nothing."""

    def __init__(self, **options: Any) -> None:
        self.app = options
