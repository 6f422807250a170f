import json
import struct
from pathlib import Path

import psutil
import pytest
from monitor_parts import watch

from trawl.observe import WandbSink

wandb = pytest.importorskip("wandb")
wandb_internal_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")

_BLOCK, _FULL, _LAST = 32768, 1, 4


@pytest.fixture(autouse=True)
def _offline(tmp_path, monkeypatch, nothing_left):
    for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wandb.teardown()


def services():
    """Processes that serve runs."""
    children = psutil.Process().children(recursive=True)
    return [one.name() for one in children if one.name() == "wandb-core"]


def records(data):
    """The records of a run's file: a header of 7 bytes, then LevelDB's format of logs."""
    at, whole = 7, b""
    while at < len(data):
        left = _BLOCK - at % _BLOCK
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (_FULL, _LAST):
            yield whole
            whole = b""


def history(folder):
    """The rows of the only run below a folder."""
    (file,) = Path(folder).rglob("*.wandb")
    rows = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {"/".join([*one.nested_key]) or one.key: one.value_json for one in items}
            rows.append({name: json.loads(value) for name, value in row.items()})
    return rows


def test_wandb_reads_the_numbers(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    served = []
    sink = WandbSink("project", dir=tmp_path, mode="offline")
    last = watch(sink, 2, lambda: served.append(services()))
    assert [len(each) for each in served] == [1]
    # The service ends with the last run.
    assert services() == []
    rows = history(tmp_path)
    numbers = {name: value for name, value in last.items() if not isinstance(value, str)}
    found = {k: v for k, v in rows[-1].items() if not k.startswith("_")}
    assert found == pytest.approx({f"collector/{name}": value for name, value in numbers.items()})
    assert rows[-1]["_step"] == 60


def test_runs_of_the_program_go_on_and_can_be_used(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    (tmp_path / "mine").mkdir()
    with wandb.init(project="mine", dir=tmp_path / "mine") as run:
        watch(WandbSink("project", dir=tmp_path / "own"))
        assert wandb.run is run
        assert len(services()) == 1
        sink = WandbSink(run=run, prefix="")
        sink.open()
        # Values that are no finite numbers are left out.
        sink.write({"a": float("nan"), "b": float("-inf"), "c": "text", "frames": 2.5}, 60)
        sink.close()
        run.log({"loss": 1.0}, step=60)
    wandb.teardown()
    (row,) = history(tmp_path / "mine")
    assert {k: v for k, v in row.items() if not k.startswith("_")} == {"frames": 2.5, "loss": 1.0}
    assert row["_step"] == 60
    assert history(tmp_path / "own")[-1]["collector/frames"] == 60


def test_a_run_takes_no_arguments_of_another():
    with pytest.raises(TypeError, match="leave out project, mode, name"):
        WandbSink("project", run=object(), name="a", mode="offline")
