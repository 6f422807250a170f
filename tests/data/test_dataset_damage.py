"""Damaged datasets are refused, by readers and by sinks that go on; commits are durable."""

import os

import nursery
import pytest
from open_files import wait_until_closed
from sink_parts import RECORD, SINKS, change, frame_files, frames, refused, write

from trawl.data import MemmapSink, ParquetSink, info, load


@pytest.fixture(params=SINKS)
def kind(request):
    return request.param


@pytest.fixture
def dataset(kind, tmp_path):
    options = {"commit_seconds": 0} if kind == "parquet" else {}
    with SINKS[kind](tmp_path / "d", **options) as sink:
        for start in (0, 7, 14):
            sink.write(frames(start, 7))
    return tmp_path / "d"


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_file_that_was_cut_is_refused(share, kind, dataset):
    path = frame_files(dataset, kind)[-1]
    os.truncate(path, int(share * path.stat().st_size))
    refused(dataset, kind, f"{path.name} is damaged")


@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_file_that_is_missing_is_refused(number, kind, dataset):
    path = frame_files(dataset, kind)[number]
    path.unlink()
    refused(dataset, kind, f"is damaged: it lacks .*{path.name}")


def test_a_file_that_the_disk_never_had_is_refused(kind, dataset):
    if kind == "memmap":
        pytest.skip("its files have no checksums: they are on the disk before the record is")
    path = frame_files(dataset, kind)[1]
    path.write_bytes(bytes(path.stat().st_size))
    refused(dataset, kind, f"{path.name} is damaged")


def test_a_damaged_page_is_found(tmp_path):
    write(ParquetSink, tmp_path / "d", [frames(0, 700)])
    (path,) = frame_files(tmp_path / "d", "parquet")
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"00000000\.parquet is damaged"):
        load(tmp_path / "d")


@pytest.mark.parametrize("frames_told", [20, 22])
def test_a_record_of_other_frames_is_refused(frames_told, kind, dataset):
    if kind == "memmap" and frames_told < 21:
        pytest.skip("what lies after the last commit does not count")
    change(dataset, lambda record: record.update(frames=frames_told))
    refused(dataset, kind, "is damaged")


# --- a reader changes nothing


@pytest.mark.parametrize("size", [None, 9])
def test_what_is_changed_in_memory_is_not_changed_on_disk(size, kind, dataset):
    before = {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file()}
    found = load(dataset) if size is None else next(load(dataset, size))
    found["next", "reward"].mul_(0.1).add_(7)
    found["observation"].zero_()
    assert not found["observation"].any()
    del found
    assert {path: path.read_bytes() for path in before} == before
    assert load(dataset)["next", "reward"].flatten().tolist() == list(range(21))


def test_a_dataset_that_may_not_be_written_is_read(dataset):
    for path in [*dataset.rglob("*"), dataset]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    found = load(dataset)
    found["observation"].add_(1)
    assert len(found) == 21
    for path in [dataset, *dataset.rglob("*")]:
        path.chmod(0o755)


def test_many_datasets_take_no_descriptors(tmp_path):
    write(MemmapSink, tmp_path / "d", [frames(0, 7)])
    code = """if True:
        import resource, sys
        from trawl.data import load
        load(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        held = [load(sys.argv[1]) for _ in range(100)]
        assert all(len(each) == 7 and each["next", "reward"].sum() == 21 for each in held)
    """
    done = nursery.run(code, tmp_path / "d")
    assert done.returncode == 0, done.stderr


def test_memory_is_given_back(tmp_path):
    write(MemmapSink, tmp_path / "d", [frames(0, 7)])

    def mapped():
        with open("/proc/self/maps") as maps:
            return sum(str(tmp_path) in line and "observation" in line for line in maps)

    found = load(tmp_path / "d")
    view = found["observation"][2:]
    assert mapped() == 2
    del found
    assert view[0].tolist() == [2, -2], "it was unmapped while it was used"
    assert mapped() == 1
    del view
    assert mapped() == 0


def test_a_dataset_may_be_larger_than_memory(tmp_path):
    write(MemmapSink, tmp_path / "d", [frames(0, 7)])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    count = 4 * memory // 8

    def only_the_number(record):
        layout = record["layout"]
        keep = [entry["key"] == ["number"] for entry in layout["entries"]].index(True)
        layout.update(entries=[layout["entries"][keep]], files=[layout["files"][keep]])
        record["frames"] = count

    change(tmp_path / "d", only_the_number)
    try:
        os.truncate(tmp_path / "d" / "frames" / "number.memmap", 8 * count)
    except OSError:
        pytest.skip("this disk has no files of that size")
    found = load(tmp_path / "d")
    assert found["number"][:7].tolist() == list(range(7))
    found["number"][-1] = 5
    assert found["number"][-2:].tolist() == [0, 5]


# --- commits


SEEN = """
import os, sys
from sink_parts import SINKS, frames
kind, directory = sys.argv[1:]
log, names = [], {}
fsync, replace, opened = os.fsync, os.replace, os.open

def syncing(file):
    log.append(("sync", os.path.realpath(f"/proc/self/fd/{file}")))
    fsync(file)

def replacing(source, target):
    log.append(("replace", os.path.realpath(source), os.path.realpath(target)))
    replace(source, target)

os.fsync, os.replace = syncing, replacing
with SINKS[kind](directory, **({"commit_seconds": 0} if kind == "parquet" else {})) as sink:
    sink.write(frames(0, 7))
    log.clear()
    sink.write(frames(7, 7))
    steps = list(log)
root = os.path.realpath(directory)
ending = {"memmap": ".memmap", "minari": ".arrow", "parquet": ".parquet"}[kind]
record = next(i for i, step in enumerate(steps) if step[-1] == root + "/_dataset.json")
assert steps[record][0] == "replace"
synced = [step[1] for step in steps[:record] if step[0] == "sync"]
frame_files = [path for path in synced if path.endswith(ending)]
count = {"memmap": 12, "minari": 1, "parquet": 1}[kind]
assert len(set(frame_files)) == count, frame_files
assert synced[-1] == steps[record][1], "the record was renamed before the disk had it"
folder = {"memmap": None, "minari": root + "/data", "parquet": root + "/frames"}[kind]
assert folder is None or folder in synced, "the new file's name may be lost"
assert ("sync", root) in steps[record:], "the record's name may be lost"
"""


def test_the_disk_has_frames_before_the_record_speaks_of_them(kind, tmp_path):
    done = nursery.run(SEEN, kind, tmp_path / "d")
    assert done.returncode == 0, done.stderr
    assert len(load(tmp_path / "d")) == 14


# --- datasets of Trawl 0.1


def as_first_written(directory):
    (directory / RECORD).rename(directory / "dataset.json")


def test_a_record_of_its_first_name_is_read(kind, dataset):
    as_first_written(dataset)
    assert len(load(dataset)) == info(dataset)["frames"] == 21


def test_a_sink_that_goes_on_gives_the_record_its_name(kind, dataset):
    as_first_written(dataset)
    # As it lay there after a kill.
    (dataset / "reserve").write_bytes(bytes(10))
    with SINKS[kind](dataset, resume=True) as sink:
        sink.write(frames(21, 7))
    assert load(dataset)["number"].tolist() == list(range(28))
    assert sorted(os.listdir(dataset)) == [RECORD, "data" if kind == "minari" else "frames"]


def test_descriptors_are_closed_after_a_refusal(kind, dataset):
    path = frame_files(dataset, kind)[-1]
    os.truncate(path, 1)
    with pytest.raises(ValueError, match="is damaged"):
        SINKS[kind](dataset, resume=True)
    with pytest.raises(ValueError, match="is damaged"):
        load(dataset)
    wait_until_closed(dataset)
