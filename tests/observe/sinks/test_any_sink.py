"""What all sinks refuse, and what they need."""

import os
import warnings
from pathlib import Path

import nursery
import pytest
from monitor_parts import make

from trawl import observe
from trawl.observe import Monitor

LIBRARIES = {
    "MLflowSink": "mlflow",
    "PrometheusSink": "prometheus_client",
    "TensorBoardSink": "tensorboard",
    "WandbSink": "wandb",
}
REFUSED = [
    ("CSVSink", ("none/stats.csv",), FileNotFoundError, "pass another file.*none/stats.csv"),
    ("CSVSink", ("none/stats.csv", True), FileNotFoundError, "pass another file.*none/stats.csv"),
    ("CSVSink", (".",), FileExistsError, "pass another file"),
    ("CSVSink", (".", True), IsADirectoryError, "directory"),
    ("CSVSink", ("file",), FileExistsError, "pass another file"),
    ("CSVSink", ("file", True), ValueError, "not written by a CSVSink"),
    ("CSVSink", ("binary", True), ValueError, "not written by a CSVSink"),
    # The name of an error has a meaning in MLflow alone.
    ("MLflowSink", ("nothing://known",), Exception, "nothing"),
    ("MLflowSink", ("file/runs",), NotADirectoryError, "pass another folder"),
    ("PrometheusSink", (-1,), ValueError, "port must be"),
    ("PrometheusSink", (65536,), ValueError, "port must be"),
    ("PrometheusSink", ("80",), TypeError, "port must be"),
    ("PrometheusSink", (True,), TypeError, "port must be"),
    ("PrometheusSink", (0, None), TypeError, "^host "),
    ("PrometheusSink", (0, ""), ValueError, "^host "),
    ("PrometheusSink", (0, "1.2.3.4"), OSError, r"port 0 of 1\.2\.3\.4"),
    ("TensorBoardSink", ("file",), FileExistsError, "pass another folder"),
    ("TensorBoardSink", ("file/runs",), NotADirectoryError, "pass another folder"),
    ("WandbSink", ("a/b?",), Exception, "project name 'a/b\\?'"),
]
REFUSED += [
    ("CSVSink", (path, True), ValueError, f"{path} is not a regular file: pass another file")
    for path in ("/dev/full", "/dev/null", "pipe")
]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("name", "arguments", "error", "message"), REFUSED)
def test_what_can_not_be_opened_is_an_error_at_once(
    name, arguments, error, message, tmp_path, monkeypatch
):
    pytest.importorskip(LIBRARIES.get(name, "csv"))
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    Path("binary").write_bytes(b"\xff\xfe\n")
    os.mkfifo("pipe")
    with make(0) as collector, pytest.raises(error, match=message), warnings.catch_warnings():
        Monitor(collector, [getattr(observe, name)(*arguments)])
    assert Path("file").read_text() == "mine"
    assert Path("binary").read_bytes() == b"\xff\xfe\n"


_MISSING = """
    import sys
    import trawl, trawl.observe

    libraries = {"mlflow", "prometheus_client", "tensorboard", "wandb"}
    print(libraries & set(sys.modules))
    for library in libraries:
        sys.modules[library] = None
    for name in ("MLflowSink", "PrometheusSink", "TensorBoardSink", "WandbSink"):
        try:
            getattr(trawl.observe, name)(1 if name == "PrometheusSink" else "1")
        except ModuleNotFoundError as error:
            print(error)
"""


def test_libraries_are_imported_when_they_are_used_and_the_extra_is_named():
    done = nursery.run(_MISSING)
    imported, *told = done.stdout.splitlines()
    assert imported == "set()"
    extras = ("mlflow", "prometheus", "tensorboard", "wandb")
    for line, extra in zip(told, extras, strict=True):
        assert f"pip install 'trawl-rl[{extra}]'" in line
