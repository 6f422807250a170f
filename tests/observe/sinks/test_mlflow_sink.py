import os

import nursery
import pytest
from libraries import require
from monitor_parts import watch

from trawl.observe import MLflowSink

require("mlflow")

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True, scope="module")
def _imported():
    """Imports MLflow as a sink does, before a test looks at what it leaves."""
    MLflowSink("unused")


def runs(folder, experiment="trawl"):
    from mlflow import MlflowClient

    client = MlflowClient(str(folder))
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


_FIRST_USE = """
    import os, sys, threading

    # Without these, MLflow does as in a program of its own.
    for name in ("CI", "PYTEST_CURRENT_TEST"):
        os.environ.pop(name, None)
    from trawl import Collector
    from trawl.observe import MLflowSink, Monitor

    with Collector("CartPole-v1", frames_per_batch=20, total_frames=60) as collector:
        with Monitor(collector, [MLflowSink(sys.argv[1])]):
            list(collector)
    print([thread.name for thread in threading.enumerate()])
"""


def test_mlflow_is_used_without_a_thread_that_stays(tmp_path):
    done = nursery.run(_FIRST_USE, tmp_path / "store")
    assert done.stdout == "['MainThread']\n", done.stderr


def test_mlflow_reads_the_numbers(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    before, folder = dict(os.environ), tmp_path / "store" / "runs"
    sink = MLflowSink(folder, "experiments", run_name="mine")
    last = watch(sink, 2)
    assert dict(os.environ) == before
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (run,) = runs(folder, "experiments")
    assert (run.info.run_id, run.info.run_name) == (sink.run_id, "mine")
    assert run.info.status == "FINISHED"
    numbers = {name: value for name, value in last.items() if not isinstance(value, str)}
    expected = {f"collector/{name}": float(value) for name, value in numbers.items()}
    assert run.data.metrics == pytest.approx(expected)
    points = MlflowClient(str(folder)).get_metric_history(sink.run_id, "collector/frames")
    steps = [(one.step, one.value) for one in points]
    assert (steps[0], steps[-1]) == ((0, 0.0), (60, 60.0))


def test_each_use_is_a_run_of_an_experiment_in_a_folder_of_the_working_folder(
    tmp_path, monkeypatch
):
    """Also with more metrics than a request takes, and values that are no finite numbers."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name, times in (("one", 2), ("other", 1)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        sink = MLflowSink("same-name", prefix="")
        for _ in range(times):
            sink.open()
            sink.write({f"m{i}": i for i in range(1001)} | {"nan": float("nan"), "text": "x"}, 7)
            sink.close()
        found = runs(tmp_path / name / "same-name")
        assert len(found) == times
        assert found[0].data.metrics == {f"m{i}": float(i) for i in range(1001)}
