"""Exploration types that belong to single threads.

tensordict keeps one interaction type for the whole process. Threads that act at the same time
would see each other's type, and if they don't end in the reverse order of their beginnings, a type
would stay set for good.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tensordict.nn import InteractionType, set_interaction_type

from trawl.foreign.tensordict import replace_types_holder, types_holder


class _ThreadsOwnType:
    """Holder of the process's interaction type, and of types that belong to single threads.

    The object replaces tensordict's holder. Compiled code asks it, too, and is compiled anew for
    another type.

    Args:
        shared: tensordict's holder of the process's type.
    """

    def __init__(self, shared: Any) -> None:
        self.shared = shared
        self.own = threading.local()

    def get_mode(self) -> Any:
        """Returns this thread's own type if it has one, otherwise the process's type."""
        if hasattr(self.own, "type"):
            return self.own.type
        return self.shared.get_mode()

    def set_mode(self, type: Any) -> None:
        """Sets this thread's own type if it has one, otherwise the process's type."""
        if hasattr(self.own, "type"):
            self.own.type = type
        else:
            self.shared.set_mode(type)


_install = threading.Lock()


def _types() -> _ThreadsOwnType:
    """Returns the holder of the types, which replaces tensordict's holder on first use."""
    with _install:
        holder = types_holder()
        if not isinstance(holder, _ThreadsOwnType):
            holder = _ThreadsOwnType(holder)
            replace_types_holder(holder)
        return holder


@contextmanager
def own_type(type: InteractionType | None) -> Iterator[None]:
    """Context in which this thread has an interaction type of its own.

    Args:
        type: the type that the thread begins with.
    """
    own = _types().own
    before = vars(own).copy()
    own.type = type
    try:
        yield
    finally:
        vars(own).clear()
        vars(own).update(before)


def exploring(type: InteractionType | None) -> AbstractContextManager[None]:
    """Returns a context in which policies that this thread calls explore as asked.

    In the main thread, this sets the type of the process, as users do, so that threads which a
    policy starts see it, too.

    Args:
        type: how probabilistic policies choose actions.
    """
    if threading.current_thread() is threading.main_thread():
        context: AbstractContextManager[None] = set_interaction_type(type)
        return context
    return own_type(type)
