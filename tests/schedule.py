"""Which tests run in one process, where pytest-xdist runs them in several."""

from xdist.scheduler import LoadFileScheduling

# Tests whose ids begin with one of these use Ray.
_RAY = (
    "tests/ray/",
    "tests/evaluation/test_evaluation_ray.py",
    "tests/docs/test_doc_examples.py::test_page[docs/clusters.md]",
    "tests/docs/test_doc_examples.py::test_page[docs/planning-clusters.md]",
)


class ByFileAndCluster(LoadFileScheduling):
    """The tests of a file share what they start; those that use Ray share a cluster."""

    def _split_scope(self, nodeid: str) -> str:
        return "Ray" if nodeid.startswith(_RAY) else super()._split_scope(nodeid)
