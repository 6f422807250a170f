import os
import warnings

import nursery
import pytest
from libraries import require
from monitor_parts import make, watch

from trawl.observe import MLflowSink, Monitor

require("mlflow")

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True, scope="module")
def _imported():
    """Imports MLflow as a sink does, before a test looks at what it leaves."""
    MLflowSink("unused")


def client(folder):
    from mlflow import MlflowClient

    return MlflowClient(str(folder))


def runs(folder, experiment="trawl"):
    found = client(folder).get_experiment_by_name(experiment)
    return client(folder).search_runs([found.experiment_id])


def points(folder, run, name):
    return [(one.step, one.value) for one in client(folder).get_metric_history(run, name)]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store" / "runs"


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


def test_mlflow_is_used_without_a_thread_that_stays(folder):
    done = nursery.run(_FIRST_USE, folder)
    assert done.stdout == "['MainThread']\n", done.stderr


@pytest.mark.parametrize("workers", [0, 2])
def test_mlflow_reads_the_numbers(workers, folder, monkeypatch):
    before = dict(os.environ)
    sink = MLflowSink(folder, "experiments", run_name="mine")
    last = watch(sink, workers)
    assert dict(os.environ) == before
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (run,) = runs(folder, "experiments")
    assert (run.info.run_id, run.info.run_name) == (sink.run_id, "mine")
    assert run.info.status == "FINISHED"
    numbers = {name: value for name, value in last.items() if not isinstance(value, str)}
    expected = {f"collector/{name}": float(value) for name, value in numbers.items()}
    assert run.data.metrics == pytest.approx(expected)
    steps = points(folder, sink.run_id, "collector/frames")
    assert (steps[0], steps[-1]) == ((0, 0.0), (60, 60.0))
    assert ("collector/worker_1/frames" in run.data.metrics) == (workers > 0)


def test_each_monitor_has_a_run_of_the_same_experiment(folder, monkeypatch):
    sink = MLflowSink(folder)
    for _ in range(2):
        watch(sink)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert len(runs(folder)) == 2


def test_more_metrics_than_a_request_takes(folder, monkeypatch):
    sink = MLflowSink(folder, prefix="")
    sink.open()
    sink.write({f"m{i}": i for i in range(1001)} | {"nan": float("nan"), "text": "x"}, 7)
    sink.close()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (run,) = runs(folder)
    assert run.data.metrics == {f"m{i}": float(i) for i in range(1001)}


def test_a_folder_that_can_not_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with make(0) as collector, pytest.raises(NotADirectoryError, match="pass another folder"):
        Monitor(collector, [MLflowSink(tmp_path / "file" / "runs")])


def test_wrong_uris_are_errors_at_once():
    from mlflow.exceptions import MlflowException

    with make(0) as collector, pytest.raises(MlflowException), warnings.catch_warnings():
        Monitor(collector, [MLflowSink("nothing://known")])


def test_a_relative_folder_is_that_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("one", "other"):
        monkeypatch.chdir(tmp_path)
        (tmp_path / name).mkdir()
        monkeypatch.chdir(name)
        watch(MLflowSink("same-name"))
        assert len(runs(tmp_path / name / "same-name")) == 1
