"""States of a collection in its dataset, and going back to them."""

import json
import os
import random
import shutil
import signal
import sys
import zipfile

import pytest
import torch
from crash_script import OPTIONS, forked, in_a_process, killed, numbered
from sink_parts import SINKS

from trawl.data import info, load
from trawl.data.sinks.states import load_state
from trawl.extras.cli import main

KINDS = pytest.mark.parametrize("kind", SINKS)
LEFT = {"memmap": "frames", "parquet": "frames", "minari": "data"}


def opened(kind, directory, **more):
    return SINKS[kind](directory, **{**OPTIONS[kind], **more})


def states(directory):
    return sorted(name for name in os.listdir(directory) if "state" in name)


def write_on(kind, directory, total, size=10, every=3, stop=None):
    """Writes numbered frames, from the last state on, as a collector would that loads it."""
    with opened(kind, directory, resume=True) as sink:
        at = 0
        saved = load_state(directory)
        if saved is not None:
            sink.continue_from(saved)
            at = saved.collector["at"]
        for number, start in enumerate(range(at, total, size)):
            if number % every == 0:
                sink.save_state({"at": start})
            sink.write(numbered(start, min(size, total - start)))
            if stop is not None:
                stop(start)


@KINDS
def test_a_resumed_dataset_goes_back_to_its_state(kind, tmp_path):
    place = tmp_path / "d"
    sink = opened(kind, place)
    sink.save_state({"at": 0})
    assert (load_state(place).collector, load_state(place).sink.frames) == ({"at": 0}, 0)
    for start in range(0, 60, 10):
        sink.write(numbered(start, 10))
        if start == 20:
            sink.save_state({"at": 30})
    waiting, committed = sink.waiting, load_state(place).sink.frames
    sink.close(complete=False)
    assert waiting if kind == "minari" else committed == 30
    before = load(place).clone()
    assert len(before) == 60
    again = opened(kind, place, resume=True)
    saved = load_state(place)
    assert saved.collector == {"at": 30}
    again.continue_from(saved)
    # Minari has committed whole episodes only; the frames of the others are part of the state.
    assert again.frames == committed
    assert again.frames + again.waiting == 30
    for start in range(30, 90, 10):
        again.write(numbered(start, 10))
    again.close()
    found = load(place)
    assert torch.equal(found["number"], torch.arange(90))
    # Ids go on as well, without an offset.
    assert torch.equal(found["collector", "traj_ids"], torch.arange(90) // 7)
    whole = tmp_path / "whole"
    with opened(kind, whole) as one:
        for start in range(0, 90, 10):
            one.write(numbered(start, 10))
    assert (load(whole) == found).all()
    assert set(os.listdir(place)) == {"_dataset.json", LEFT[kind], *states(place)}
    assert len(states(place)) == 1


@KINDS
def test_the_first_state_has_no_frames(kind, tmp_path):
    place = tmp_path / "d"
    with opened(kind, place) as sink:
        sink.save_state({"at": 0})
        sink.write(numbered(0, 40))
    assert info(place)["frames"] == 40
    write_on(kind, place, 20)
    assert torch.equal(load(place)["number"], torch.arange(20))


@KINDS
def test_what_waits_without_any_committed_frame_is_kept(kind, tmp_path):
    """The state is saved in the middle of the first episode, which never ends."""
    place = tmp_path / "d"

    def begin():
        sink = opened(kind, place)
        sink.write(numbered(0, 5))
        sink.save_state({"at": 5})

    # The process ends without closing the sink.
    in_a_process(begin)
    again = opened(kind, place, resume=True)
    again.continue_from(load_state(place))
    assert again.frames + again.waiting == 5
    again.close()
    assert torch.equal(load(place)["number"], torch.arange(5))


@KINDS
def test_a_sink_that_does_not_go_back_keeps_all_frames(kind, tmp_path):
    place = tmp_path / "d"
    write_on(kind, place, 50)
    with opened(kind, place, resume=True) as sink:
        assert sink.frames == 50
        sink.save_state(None)
        assert states(place) == []
        assert load_state(place) is None
    assert len(load(place)) == 50


@KINDS
def test_a_state_of_another_time_is_refused(kind, tmp_path):
    place = tmp_path / "d"
    write_on(kind, place, 50)
    saved = load_state(place)
    write_on(kind, place, 90)
    before = load(place).clone()
    sink = opened(kind, place, resume=True)
    with pytest.raises(ValueError, match="another process has changed"):
        sink.continue_from(saved)
    assert sink.closed
    assert (load(place) == before).all()


@KINDS
def test_killed_at_any_moment_it_comes_to_the_same(kind, tmp_path):
    """Commits, states and their files: whichever were last written, they belong together."""
    place, draw, total = tmp_path / "d", random.Random(1), 600
    for _ in range(4):
        killed(lambda told: write_on(kind, place, 10**6, stop=lambda _: os.write(told, b".")), draw)
        record = json.loads((place / "_dataset.json").read_text())
        assert record["layout"]["state"] in states(place)
        if record["frames"]:
            in_a_process(lambda: load(place))
    in_a_process(lambda: write_on(kind, place, total))
    in_a_process(lambda: write_on(kind, tmp_path / "whole", total))
    assert (load(place) == load(tmp_path / "whole")).all()
    assert len(load(place)) == total
    assert len(states(place)) == 1


@KINDS
def test_killed_while_it_goes_back_it_can_still_be_read(kind, tmp_path):
    """A signal comes at each operation with files in turn, in one format at every third."""
    first = tmp_path / "first"
    sink = opened(kind, first, **({"commit_bytes": 1} if kind == "parquet" else {}))
    for start in range(0, 70, 10):
        if start == 20:
            sink.save_state({"at": start})
        sink.write(numbered(start, 10))
    sink.close()
    status, at, place = signal.SIGKILL, 0, tmp_path / "d"
    while status:
        at += 3 if kind == "minari" else 1
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(first, place)
        status = os.waitpid(forked(lambda at=at: go_back(kind, place, at)), 0)[1]
        assert status in (0, signal.SIGKILL)
        found = load(place)["number"]
        assert torch.equal(found, torch.arange(len(found)))
        assert load_state(place).collector == {"at": 20}
    assert at > 5
    if kind == "parquet":  # its readers see all files in the folder
        assert len(os.listdir(first / "frames")) == 7
        assert len(os.listdir(place / "frames")) == 2


def go_back(kind, place, at):
    """Goes back to the last state; a signal comes at an operation with files."""
    count = 0

    def hook(event, args):
        nonlocal count
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    saved = load_state(place)
    sink = opened(kind, place, resume=True)
    sys.addaudithook(hook)
    sink.continue_from(saved)


# --- from strangers


@pytest.fixture
def dataset(tmp_path):
    write_on("memmap", tmp_path / "d", 50)
    return tmp_path / "d"


def rename(place, content):
    """Replaces the state by a file that has the right digest in its name."""
    import hashlib

    (old,) = states(place)
    (place / old).unlink()
    new = f"_state-{hashlib.sha256(content).hexdigest()[:16]}.pt"
    (place / new).write_bytes(content)
    record = json.loads((place / "_dataset.json").read_text())
    record["layout"]["state"] = new
    (place / "_dataset.json").write_text(json.dumps(record))
    return new


def test_a_link_is_not_followed(dataset, tmp_path):
    (name,) = states(dataset)
    (dataset / name).rename(tmp_path / "elsewhere")
    (dataset / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="links are not followed"):
        load_state(dataset)


@pytest.mark.parametrize(
    "name", ["../d/_state-0123456789abcdef.pt", "_dataset.json", 5, "_state-x.pt", ""]
)
def test_only_a_state_of_the_dataset_is_opened(name, dataset):
    record = json.loads((dataset / "_dataset.json").read_text())
    record["layout"]["state"] = name
    (dataset / "_dataset.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="is not the name of a state"):
        load_state(dataset)
    with pytest.raises(ValueError, match="is not the name of a state"):
        opened("memmap", dataset, resume=True)
    assert len(load(dataset)) == 50


def test_a_changed_state_is_refused(dataset):
    (name,) = states(dataset)
    content = bytearray((dataset / name).read_bytes())
    content[-100] ^= 1
    (dataset / name).write_bytes(content)
    with pytest.raises(ValueError, match="does not have the digest in its name"):
        load_state(dataset)


class Opened:
    """An object whose unpickling runs code."""

    def __reduce__(self):
        return os.mkdir, ("run",)


def saved_by_torch(value, path):
    torch.save(value, path)
    return path.read_bytes()


def test_a_state_runs_no_code(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rename(dataset, saved_by_torch({"collector": Opened()}, tmp_path / "x"))
    with pytest.raises(ValueError, match="can't be loaded"):
        load_state(dataset)
    assert not (tmp_path / "run").exists()


def test_a_compressed_state_is_refused(dataset, tmp_path):
    saved_by_torch({"zeros": torch.zeros(10**6)}, tmp_path / "x")
    with (
        zipfile.ZipFile(tmp_path / "x") as old,
        zipfile.ZipFile(tmp_path / "y", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for part in old.infolist():
            new.writestr(part.filename, old.read(part))
    content = (tmp_path / "y").read_bytes()
    assert len(content) < 100_000
    rename(dataset, content)
    with pytest.raises(ValueError, match="it is compressed"):
        load_state(dataset)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": 2}, "has format 2, but this version of Trawl reads format 1"),
        ({"collector": None}, "no state of a collector"),
        ({"trawl": 1}, "no state of a collector"),
        ({"sink": None}, "the numbers"),
        ({"sink": {"frames": 51, "first_id": 0, "next_id": 9}}, "counts 51 frames"),
        ({"sink": {"frames": -1, "first_id": 0, "next_id": 9}}, "the numbers"),
        ({"sink": {"frames": 9, "first_id": 0, "next_id": 9}}, "layout must be"),
        (
            {"sink": {"frames": 9, "first_id": 0, "next_id": 9, "layout": {}, "entries": []}},
            "no entry with data",
        ),
    ],
)
def test_each_part_of_a_state_is_checked(change, match, dataset, tmp_path):
    (name,) = states(dataset)
    content = torch.load(dataset / name, weights_only=True)
    rename(dataset, saved_by_torch({**content, **change}, tmp_path / "x"))
    with pytest.raises(ValueError, match=match):
        load_state(dataset)
    assert len(load(dataset)) == 50


def test_readers_do_not_see_the_state(tmp_path, capsys):
    write_on("parquet", tmp_path / "d", 50)
    assert main(["show", str(tmp_path / "d")]) == 0
    pandas = pytest.importorskip("pandas")
    assert len(pandas.read_parquet(tmp_path / "d")) == 50
    pyarrow = pytest.importorskip("pyarrow.dataset")
    assert pyarrow.dataset(tmp_path / "d").count_rows() == 50
    polars = pytest.importorskip("polars")
    assert len(polars.read_parquet(tmp_path / "d" / "frames")) == 50
    duckdb = pytest.importorskip("duckdb")
    query = f"select count(*) from '{tmp_path}/d/**/*.parquet'"
    assert duckdb.sql(query).fetchall() == [(50,)]


def test_minari_does_not_see_the_state(tmp_path):
    minari = pytest.importorskip("minari")
    write_on("minari", tmp_path / "d-v0", 49)
    assert minari.MinariDataset(tmp_path / "d-v0" / "data").total_steps == 49


def test_a_state_must_be_plain_data(tmp_path):
    with opened("memmap", tmp_path / "d") as sink:
        sink.write(numbered(0, 10))
        sink.save_state({"at": 10})
        with pytest.raises(TypeError, match=r"the state.* is a"):
            sink.save_state({"at": forked})
        assert load_state(tmp_path / "d").collector == {"at": 10}
