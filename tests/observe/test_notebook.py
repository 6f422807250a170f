"""Progress in a notebook, which a kernel really runs."""

import signal

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

CODE = """
import time

from trawl import MultiSyncCollector
from trawl.observe import CollectionProgress

options = {"frames_per_batch": 100, "total_frames": 400, "start_method": "inline"}
with (
    MultiSyncCollector(["Pendulum-v1"] * 2, **options) as collector,
    CollectionProgress(collector, "Pendulum") as progress,
):
    for batch in collector:
        time.sleep(0.3)  # It is replaced four times a second at most.
        progress.update(batch)
"""


class Client(nbclient.NotebookClient):
    """Runs a notebook, and keeps what a cell replaced in its output.

    Attributes:
        replaced: the texts, in their order.
    """

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] == "update_display_data":
            self.replaced.append(msg["content"]["data"]["text/plain"])
        return super().process_message(msg, cell, cell_index)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.fixture(autouse=True)
def handler():
    """After a run, nbclient leaves SIGTERM to the system, whoever handled it before."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_it_is_one_output_that_is_replaced():
    cell = nbformat.v4.new_code_cell(CODE)
    client = Client(nbformat.v4.new_notebook(cells=[cell]), timeout=300, kernel_name="python3")
    client.replaced = []
    client.execute()
    (output,) = cell.outputs
    text, html = output["data"]["text/plain"], output["data"]["text/html"]
    assert "400/400 frames" in text
    assert "400/400 frames" in html
    assert "worker 1" in text
    # Once for each batch, and once as it ends.
    counts = [f"{frames}/400 frames" for frames in (100, 200, 300, 400, 400)]
    assert all(count in shown for count, shown in zip(counts, client.replaced, strict=True))
