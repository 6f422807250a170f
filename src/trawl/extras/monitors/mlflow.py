"""Statistics for MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from trawl.extras.monitors.sinks import (
    PREFIX,
    StatsSink,
    environment,
    finite_numbers,
    load_library,
    make_folder,
)

# Most metrics that a tracking server takes in one request.
_MOST = 1000
# While MLflow is imported and opens a store: no thread that reports on its use, folders as stores,
# which recent versions refuse otherwise, and an end to the wait for a server that is silent.
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}


class MLflowSink(StatsSink):
    """Logs the statistics that are finite numbers as metrics of an MLflow run.

    Needs ``pip install 'trawl-rl[mlflow]'``, which can log to a folder and to a server. For a
    database, such as ``sqlite:///mlflow.db``, install the package ``mlflow`` as well. A server that
    doesn't answer is an error after half a minute, unless ``MLFLOW_HTTP_REQUEST_TIMEOUT`` and
    ``MLFLOW_HTTP_REQUEST_MAX_RETRIES`` are set.

    Args:
        uri: a folder, or the URI of a tracking server or a database.
        experiment: name of the experiment. The sink creates it if it doesn't exist.
        run_name: name of the run; by default, MLflow invents one.
        prefix: prefix of the names.

    Attributes:
        run_id: id of the run; None before the first monitor.

    Raises:
        ModuleNotFoundError: if MLflow is not installed.
        OSError: when the monitor is made, if the folder can't be written.
        Exception: any other error of MLflow, when the monitor is made.

    Examples:
        >>> import tempfile
        >>> from trawl import Collector
        >>> from trawl.observe import MLflowSink, Monitor
        >>> sink = MLflowSink(tempfile.mkdtemp())
        >>> with (
        ...     Collector("CartPole-v1", frames_per_batch=10, total_frames=30) as collector,
        ...     Monitor(collector, [sink]),
        ... ):
        ...     for batch in collector:
        ...         pass
    """

    target = "DIR or mlflow:URI"

    def __init__(
        self,
        uri: str | os.PathLike[str],
        experiment: str = "trawl",
        run_name: str | None = None,
        prefix: str = PREFIX,
    ) -> None:
        self.uri, self.experiment = os.fspath(uri), experiment
        self.run_name, self.prefix = run_name, prefix
        self.run_id: str | None = None
        with environment(_SETTINGS):
            self._library = load_library("mlflow", "mlflow")
        self._client: Any = None

    def open(self) -> None:
        """Starts a run."""
        uri = self.uri
        if ":" not in uri and not uri.startswith("databricks"):
            make_folder(uri, "pass another folder, or the URI of a tracking server")
            # MLflow keeps the stores of a program by their URI, even if the working folder changes.
            uri = os.path.abspath(uri)
        with environment(_SETTINGS):
            client = self._library.MlflowClient(uri)
            found = client.get_experiment_by_name(self.experiment)
            experiment = client.create_experiment(self.experiment) if found is None else None
            run = client.create_run(experiment or found.experiment_id, run_name=self.run_name)
        self._client, self.run_id = client, run.info.run_id

    def write(self, stats: Mapping[str, Any], step: int) -> None:
        """Logs the numbers."""
        now = time.time_ns() // 1_000_000
        metrics = [
            self._library.entities.Metric(name, float(value), now, step)
            for name, value in finite_numbers(stats, self.prefix).items()
        ]
        for first in range(0, len(metrics), _MOST):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + _MOST])

    def close(self) -> None:
        """Marks the run as finished."""
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self.run_id)
