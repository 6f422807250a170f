"""Access to a collector's parts by path, with the methods of TorchRL's collectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from trawl.collectors.driver.background import BackgroundCollection
from trawl.paths import call_each, call_path, get_path


class Access:
    """Gets and calls what paths lead to.

    Args:
        collector: the collector, from which paths lead; the object has no strong reference to it.
        background: the thread of the collector.
    """

    def __init__(self, collector: Any, background: BackgroundCollection) -> None:
        self._background = background
        self.belong_to(collector)

    def belong_to(self, collector: Any) -> None:
        """Sets the collector, whose weak references are lost when it is about to be deleted."""
        self._owner: Callable[[], Any] = ref(collector)

    @property
    def collector(self) -> Any:
        """The collector."""
        return self._owner()

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[dict[str, Any]] | None = None,
    ) -> list[Any]:
        """Calls the method at path ``method_name``, once for each entry of the lists.

        If both lists are None, the method is called once, without arguments. With workers, the
        method of each worker's collector is called, and a list has an entry for each worker.

        Args:
            method_name: path of the method, for example ``"env.close"``.
            list_of_args: list with the positional arguments of each call; None to pass none.
            list_of_kwargs: list with the keyword arguments of each call; None to pass none.

        Returns:
            The results of the calls, in order.

        Raises:
            ValueError: if the lists differ in length, or in the number of workers.
            AttributeError: if there is no method at that path.
        """
        given = list_of_kwargs if list_of_args is None else list_of_args
        count = 1 if given is None else len(given)
        args = [()] * count if list_of_args is None else list_of_args
        kwargs = [{}] * count if list_of_kwargs is None else list_of_kwargs
        if len(args) != len(kwargs):
            raise ValueError(
                f"list_of_args and list_of_kwargs must have the same length, but they have "
                f"{len(args)} and {len(kwargs)} entries"
            )
        with self._background.held():
            return call_each(self.collector, method_name, list(zip(args, kwargs, strict=True)))

    def get_distant_attr(self, attr: str) -> Any:
        """Returns the attribute at a path; if it is in another process, a copy.

        With workers, it is a list with the attribute of each worker's collector.

        Args:
            attr: path of the attribute, for example ``"env.batch_size"``,
                ``"env.envs[0].unwrapped.level"`` or ``"policy.module[0].weight"``.
        """
        with self._background.held():
            return get_path(self.collector, attr)

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the method at ``attr_path``, or returns the attribute if it is not callable.

        With workers, only the workers have environments: a path that begins with ``env`` leads to
        those of all workers, and the result is a list with that of each. For other parts of the
        workers, such as their copies of the policy, use ``map_fn()``.

        Raises:
            ValueError: if arguments are given for an attribute that is not callable.
        """
        with self._background.held():
            return call_path(self.collector, attr_path, args, kwargs)

    def getattr_policy(self, attr: str) -> Any:
        """Returns the attribute of the policy at path ``attr``; or of the first worker's."""
        return get_path(self.collector.policy, attr)

    def getattr_env(self, attr: str) -> Any:
        """Returns the attribute of the environment at path ``attr``.

        With workers, it is the environment of the first worker.
        """
        with self._background.held():
            return get_path(self.collector.env, attr)
