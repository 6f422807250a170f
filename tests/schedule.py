"""Which tests come first, and which run in one process where pytest-xdist runs them in several."""

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


def turn(test: str) -> int:
    """The turn of a test, given by its id: what takes long comes first, and the others fill up."""
    return 0 if uses_ray(test) else 1 if test.startswith(_LONG) else 2


def uses_ray(test: str) -> bool:
    """Whether a test, given by its id, needs the process in which a cluster may run."""
    return test.startswith(_RAY)


class ByFileAndCluster(LoadFileScheduling):
    """The tests of a file share what they start; those that use Ray share a cluster."""

    def _split_scope(self, nodeid: str) -> str:
        return "Ray" if uses_ray(nodeid) else super()._split_scope(nodeid)
