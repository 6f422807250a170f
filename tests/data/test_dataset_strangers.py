"""Datasets that a stranger made: nothing is written or read outside them, and nothing is run."""

import contextlib
import json
import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sink_parts import RECORD, SINKS, change, contents, frame_files, frames, refused, write
from tensordict import TensorDict

from trawl.data import info, load
from trawl.extras.cli import main

SECRET = "a secret of the user's"


@pytest.fixture(params=SINKS)
def kind(request):
    return request.param


@pytest.fixture
def dataset(kind, tmp_path):
    """A dataset, beside something of the user's that it must not touch."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text(SECRET * 100)
    write(SINKS[kind], tmp_path / "d", [frames(0, 14)], env="X-v0")
    return tmp_path / "d"


@pytest.mark.parametrize("place", ["frames", "folder", "record"])
def test_a_link_is_not_followed(place, kind, dataset):
    file = frame_files(dataset, kind)[0]
    path = {"frames": file, "folder": file.parent, "record": dataset / RECORD}[place]
    path.rename(dataset.parent / "mine" / path.name)
    path.symlink_to(dataset.parent / "mine" / path.name)
    refused(dataset, kind, "its path contains a link")
    if place == "record":
        with pytest.raises(ValueError, match="its path contains a link"):
            info(dataset)


@pytest.mark.parametrize("place", ["record", "frames"])
def test_a_pipe_holds_nobody(place, kind, dataset):
    path = dataset / RECORD if place == "record" else frame_files(dataset, kind)[0]
    path.unlink()
    os.mkfifo(path)
    refused(dataset, kind, "is not a regular file")


@pytest.mark.parametrize(
    "name",
    ["._dataset.json", ".reserve", ".unfinished.parquet", "unfinished", "layout", "frames/link",
     "data/.metadata.json"],
)  # fmt: skip
@pytest.mark.parametrize("target", ["file", "folder"])
def test_a_sink_that_goes_on_writes_through_no_link(target, name, kind, dataset):
    place = dataset / name
    if not place.parent.is_dir():
        pytest.skip("another format has this folder")
    place.symlink_to(dataset.parent / "mine" / ("file" if target == "file" else "."))
    before = contents(dataset.parent)
    with pytest.raises(ValueError, match="its path contains a link"):
        SINKS[kind](dataset, resume=True)
    assert contents(dataset.parent) == before


def test_the_dataset_itself_may_be_reached_by_a_link(kind, dataset):
    (dataset.parent / "latest").symlink_to(dataset)
    assert len(load(dataset.parent / "latest")) == 14
    with SINKS[kind](dataset.parent / "latest", resume=True) as sink:
        sink.write(frames(0, 7))
    assert len(load(dataset)) == 21


@pytest.mark.parametrize(
    "name",
    ["../../mine/file", "/etc/passwd", "{mine}", "a/../../../mine/file", "", ".", "..", "a//b",
     "a\0b", "\ud800", "observation.memmap/", None, 3, ["observation.memmap"], {"a": "b"}],
)  # fmt: skip
def test_files_lie_in_the_dataset(name, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text(SECRET * 100)
    write(SINKS["memmap"], tmp_path / "d", [frames(0, 14)])
    if name == "{mine}":
        name = str(tmp_path / "mine" / "file")
    change(tmp_path / "d", lambda record: record["layout"]["files"].__setitem__(0, name))
    refused(tmp_path / "d", "memmap", "is not a file in its frames/")


def test_each_entry_has_a_file_of_its_own(tmp_path):
    write(SINKS["memmap"], tmp_path / "d", [frames(0, 14)])
    record = (tmp_path / "d" / RECORD).read_text()
    for files in (None, 3, {}, [], ["observation.memmap"]):
        change(tmp_path / "d", lambda record, files=files: record["layout"].update(files=files))
        refused(tmp_path / "d", "memmap", "files must be a list with one file for each entry")
    (tmp_path / "d" / RECORD).write_text(record)

    def twice(record):
        record["layout"]["files"][0] = record["layout"]["files"][1]

    change(tmp_path / "d", twice)
    refused(tmp_path / "d", "memmap", "two entries have the same file")


MINARI_FACTS = {
    "no environment is made": ({"env_spec": "{spec}", "observation_space": None}, "must be text"),
    "nor for actions": ({"env_spec": "{spec}", "action_space": None}, "must be text"),
    **{
        f"{name} {str(value)[:9]}": ({name: value}, r"metadata\.json is damaged")
        for name in ("data_format", "observation_space", "action_space")
        for value in ("parquet", "{", '"x"', '{"type": "Box"}', "[" * 100_000, 3, None)
    },
}


@pytest.mark.parametrize("name", MINARI_FACTS)
def test_what_minari_was_told_is_checked(name, tmp_path):
    pytest.importorskip("minari")
    changes, words = MINARI_FACTS[name]
    write(SINKS["minari"], tmp_path / "d", [frames(0, 14)])
    path = tmp_path / "d" / "data" / "metadata.json"
    facts = {**json.loads(path.read_text()), **changes}
    if "env_spec" in changes:
        spec = {"id": "X-v0", "entry_point": "os:system", "additional_wrappers": []}
        spec["kwargs"] = {"command": f"touch {tmp_path}/ran"}
        names = ("vector_entry_point", "reward_threshold", "nondeterministic", "max_episode_steps")
        spec |= dict.fromkeys((*names, "order_enforce", "disable_env_checker"))
        facts["env_spec"] = json.dumps(spec)
        facts = {key: value for key, value in facts.items() if value is not None}
    path.write_text(json.dumps(facts))
    refused(tmp_path / "d", "minari", words)
    assert not (tmp_path / "ran").exists()


def test_files_beside_those_of_an_episode_are_refused(tmp_path):
    pytest.importorskip("minari")
    write(SINKS["minari"], tmp_path / "d", [frames(0, 14)])
    file = frame_files(tmp_path / "d", "minari")[-1]
    shutil.copy(file, tmp_path / "d" / "data" / "1" / "part-1.arrow")
    refused(tmp_path / "d", "minari", "'part-1.arrow' does not belong there")


# --- the record, changed in any way

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 2, 13, 14, 15, 2**31, 2**53, 2**62, 2**63, 2**64, 10**400]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["\x1b[31mred\x1b]0;title\x07", "\u202e", "\ud800", "object", "float32", "str", "int64",
         "qint8", "../x", "/etc/passwd", "memmap", "parquet", "minari", "next", "reward", ""]
    ),
)  # fmt: skip
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(value, path=()):
    """The paths of all values within a JSON value, itself included."""
    yield path
    if isinstance(value, (dict, list)):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in inner:
            yield from places(each, (*path, name))


def mutated(record, draw):
    """The record, with some of its values replaced, removed, doubled or exchanged."""
    for _ in range(draw(st.integers(1, 3))):
        chosen = draw(st.sampled_from(sorted(places(record), key=repr)))
        if not chosen:
            return draw(_VALUES)
        *way, last = chosen
        place = record
        for name in way:
            place = place[name]
        how = draw(st.sampled_from(["replace", "remove", "double", "add", "deepen"]))
        if how == "remove":
            del place[last]
        elif how == "double" and isinstance(place, list):
            place.insert(last, place[last])
        elif how == "add" and isinstance(place, dict):
            place[draw(st.text(max_size=8))] = draw(_VALUES)
        elif how == "deepen":
            # Three times the deepest is what can still be written.
            for _ in range(draw(st.sampled_from([1, 3, 100, 300]))):
                place[last] = [place[last]]
        else:
            place[last] = draw(_VALUES)
    return record


COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A dataset of each format, with all that the command writes into records."""
    place = tmp_path_factory.mktemp("whole")
    facts = {
        "env": "X-v0",
        "policy": "random",
        "seed": 3,
        "date": "2026-01-01T00:00:00+00:00",
        "versions": {"trawl": "0.1"},
        "resumed": [{"frames": 7, "date": "2026-01-01", "seed": 4}],
        "workers": {"count": 2, "sync": True, "restarts": 0, "frames": [7, 7]},
        "stopped_by": None,
    }
    for kind, cls in SINKS.items():
        write(cls, place / kind, [frames(0, 7), frames(7, 7)], **facts)
    return place


@pytest.mark.parametrize("name", SINKS)
@settings(max_examples=25, **COMMON)
@given(data=st.data())
def test_any_record_gives_a_dataset_or_says_what_is_wrong(name, data, whole, capsys):
    directory, path = whole / name, whole / name / RECORD
    original = path.read_text()
    try:
        path.write_text(json.dumps(mutated(json.loads(original), data.draw)))
        check_loading(directory, capsys)
    finally:
        path.write_text(original)


@pytest.mark.parametrize("name", SINKS)
@settings(max_examples=20, **COMMON)
@given(content=st.binary(max_size=60), at=st.floats(0, 1), cut=st.booleans())
@example(content=b"[" * 200_000, at=0.0, cut=True)
@example(content=b'{"a":' * 200_000, at=0.0, cut=True)
@example(content=b"1" * 10_000, at=0.0, cut=True)
@example(content=b"", at=0.0, cut=True)
def test_any_bytes_give_a_dataset_or_say_what_is_wrong(name, content, at, cut, whole, capsys):
    directory, path = whole / name, whole / name / RECORD
    original = path.read_bytes()
    place = int(at * len(original))
    rest = b"" if cut else original[place + len(content) :]
    try:
        path.write_bytes(original[:place] + content + rest)
        check_loading(directory, capsys)
    finally:
        path.write_bytes(original)


def check_loading(directory, capsys):
    """The frames come, or an error that names the dataset; the command says so in a line."""
    record, loaded, failure = None, None, None
    try:
        record = info(directory)
        loaded = load(directory)
    except (ValueError, FileNotFoundError) as error:
        failure = error
    if isinstance(failure, FileNotFoundError):
        assert record["frames"] == 0
        assert "nothing was committed" in str(failure)
    elif failure is not None:
        assert str(directory) in str(failure)
        assert str(failure).isprintable()
    else:
        assert isinstance(loaded, TensorDict)
        assert len(loaded) == record["frames"]
        assert sum(map(len, load(directory, 5))) == len(loaded)
    code = main(["show", str(directory)])
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in [*out.split("\n"), *err.split("\n")])
    if loaded is None:
        assert (code, out) == (2, "")
        assert err.startswith("trawl: ")
        assert err.count("\n") == 1
    else:
        assert code == 0, err


@pytest.mark.parametrize("name", SINKS)
@settings(max_examples=20, **COMMON)
@given(data=st.data())
def test_frames_with_any_bytes_are_loaded_or_refused(name, data, whole):
    path = frame_files(whole / name, name)[0]
    original = path.read_bytes()
    changed = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        changed = changed[: data.draw(st.integers(0, len(changed)))]
    try:
        path.write_bytes(changed)
        with contextlib.suppress(ValueError):
            assert len(load(whole / name)) == 14
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"dtype": "object"}, "an entry has the invalid dtype 'object'"),
        ({"dtype": "nn"}, "an entry has the invalid dtype 'nn'"),
        ({"dtype": "qint8"}, "an entry has the invalid dtype 'qint8'"),
        ({"shape": [2**40, 2**40]}, "are too large for any disk"),
        ({"shape": [0, 2**62, 2**62]}, "are too large for any disk"),
        ({"shape": [-1]}, r"an entry has the invalid shape \[-1\]"),
        ({"shape": [1] * 1000}, "an entry has the invalid shape"),
        ({"shape": [True]}, "an entry has the invalid shape"),
        ({"key": ["a"] * 1000}, "an entry has the invalid key"),
        ({"key": "observation"}, "an entry has the invalid key 'observation'"),
        ({"key": ["next"]}, "is nested in another entry"),
        ({"key": ["number"]}, "two entries have the same key"),
    ],
)
def test_entries_that_there_can_not_be_are_refused(facts, words, kind, dataset):
    change(dataset, lambda record: record["layout"]["entries"][0].update(facts))
    refused(dataset, kind, words)


def test_a_dataset_can_not_be_larger_than_it_is(kind, dataset):
    change(dataset, lambda record: record.update(frames=2**40))
    refused(dataset, kind, "damaged")


def test_frames_of_nothing_are_not_endless(tmp_path):
    write(SINKS["memmap"], tmp_path / "d", [frames(0, 7)])

    def empty(record):
        record["frames"] = 2**50
        record["layout"].update(
            entries=[{"key": ["a"], "dtype": "int8", "shape": [0]}], files=[None]
        )

    change(tmp_path / "d", empty)
    refused(tmp_path / "d", "memmap", "no entry with data")


# --- the command


def test_what_a_stranger_wrote_reaches_no_terminal(tmp_path, capsys):
    evil = "\x1b[31mred\x1b]0;title\x07\u202e\nnext line"
    facts = dict.fromkeys(("env", "policy", "seed", "date", "stopped_by"), evil)
    facts |= {
        "versions": {evil: evil},
        "workers": evil,
        "resumed": [evil],
        "env_kwargs": {"a": evil},
    }
    batch = frames(0, 7).set(evil, torch.ones(7))
    write(SINKS["memmap"], tmp_path / "d", [batch], **facts)
    assert main(["show", str(tmp_path / "d"), "--plot", str(tmp_path / "p.png")]) == 0
    out, err = capsys.readouterr()
    assert not [line for line in out.splitlines() if not line.isprintable()]
    assert r"\x1b[31mred" in out
    (tmp_path / "d" / RECORD).write_text(json.dumps({"format": evil}))
    for more in ([], ["--traceback"]):
        assert main(["show", str(tmp_path / "d"), *more]) == 2
        out, err = capsys.readouterr()
        assert all(line.isprintable() for line in err.splitlines())
    assert "Traceback" in err


def test_any_environment_has_a_plot(tmp_path):
    titles = ("a $ b $ c", r"$\frac{", "\x1b[31m", "\ud800", "x" * 100_000)
    for number, title in enumerate(titles):
        write(SINKS["memmap"], tmp_path / str(number), [frames(0, 7)], env=title)
        assert main(["show", str(tmp_path / str(number)), "--plot", str(tmp_path / "p.png")]) == 0


STRANGE = [
    {"arguments": 3}, {"arguments": {"frames": "x"}}, {"seed": "x"}, {"seed": -5}, {"resumed": 3},
    {"resumed": [3]}, {"frames_per_batch": "x"}, {"frames_per_batch": 0}, {"date": 3},
]  # fmt: skip


def test_the_command_does_not_go_on_with_what_it_did_not_make(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    collect = ["collect", "CartPole-v1", "--out", "d"]
    assert main([*collect, "--seed", "3", "--frames", "20"]) == 0
    record = (tmp_path / "d" / RECORD).read_text()
    for facts in STRANGE:
        (tmp_path / "d" / RECORD).write_text(record)
        change(tmp_path / "d", lambda record, facts=facts: record.update(facts))
        capsys.readouterr()
        assert main([*collect, "--resume"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("trawl: d "), facts
        assert "trawl collect did not write" in err
        assert len(load(tmp_path / "d")) == 20
