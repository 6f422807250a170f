"""Which tests come first, and which run in one process where pytest-xdist runs them in several."""

from typing import Any

from xdist.scheduler import LoadFileScheduling

# Tests whose ids begin with one of these use Ray.
_RAY = (
    "tests/ray/",
    "tests/evaluation/test_evaluation_ray.py",
    "tests/docs/test_doc_examples.py::test_page[docs/clusters.md]",
    "tests/docs/test_doc_examples.py::test_page[docs/planning-clusters.md]",
)
# Those of few tests that take long.
_LONG = (
    "tests/benchmarks/",
    "tests/distributed/test_launchers.py",
    "tests/hosts/",
    "tests/typing/",
)
# Those that start torch's RPC in the test process. They come while the process with Ray is at
# work, so that no process ever holds the native threads of both.
_RPC = (
    "tests/distributed/test_rpc.py",
    "tests/distributed/test_remote_collectors.py",
)


def turn(test: str) -> int:
    """The turn of a test, given by its id: what takes long comes first, and the others fill up."""
    return 0 if uses_ray(test) else 1 if test.startswith(_LONG + _RPC) else 2


def uses_ray(test: str) -> bool:
    """Whether a test, given by its id, needs the process in which a cluster may run."""
    return test.startswith(_RAY)


class ByFileAndCluster(LoadFileScheduling):
    """The tests of a file share what they start; those that use Ray share a cluster."""

    def _split_scope(self, nodeid: str) -> str:
        return "Ray" if uses_ray(nodeid) else super()._split_scope(nodeid)

    def remove_node(self, node: Any) -> str | None:
        """Takes a process out, and distributes what it has not begun.

        Returns the test at which the process died, which counts as run, or None. pytest-xdist also
        distributes what was run already: a process that is given nothing else never reports, and
        the run would wait for it for ever.
        """
        units = self.assigned_work[node]
        left = {name: [test for test in unit if not unit[test]] for name, unit in units.items()}
        at_work = next((tests.pop(0) for tests in left.values() if tests), None)
        self.assigned_work.pop(node)
        for name, tests in left.items():
            if tests:
                self.workqueue[name] = dict.fromkeys(tests, False)
        if at_work is not None:
            for other in self.assigned_work:
                self._reschedule(other)
        return at_work
