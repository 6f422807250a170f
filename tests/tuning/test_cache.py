"""The file that remembers numbers of workers, and the identity of environments and policies."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from tuning_parts import Linear

from trawl.collectors.tuning.cache import WorkerCache, cache_folder
from trawl.collectors.tuning.identity import digest_of, machine


@pytest.fixture
def cache(tmp_path):
    return WorkerCache(tmp_path / "inner")


def test_what_was_put_in_comes_out(cache):
    assert cache.get("a") is None
    cache.put("a", 4)
    cache.put("b", 2)
    cache.put("a", 8)
    again = WorkerCache(cache.path.parent)
    assert (again.get("a"), again.get("b"), again.get("c")) == (8, 2, None)
    assert os.listdir(cache.path.parent) == ["workers.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"format": 1}', '{"format": 1, "workers": 5}', "[" * 100_000],
    ids=range(7),
)
def test_a_corrupt_file_is_ignored_with_a_warning_and_replaced(cache, text):
    cache.path.parent.mkdir()
    cache.path.write_text(text)
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert cache.get("a") is None
    with pytest.warns(RuntimeWarning, match="is ignored"):
        cache.put("a", 4)
    assert cache.get("a") == 4


def test_a_file_of_another_format_is_replaced(cache):
    cache.path.parent.mkdir()
    cache.path.write_text('{"format": 2, "workers": {"a": 3}}')
    assert cache.get("a") is None
    cache.put("a", 4)
    assert cache.get("a") == 4


@pytest.mark.parametrize("value", ["2", 2.0, True, 0, -1, None, [2]])
def test_a_number_of_workers_that_is_none_is_ignored(cache, value):
    cache.path.parent.mkdir()
    cache.path.write_text(json.dumps({"format": 1, "workers": {"a": value}}))
    assert cache.get("a") is None


def test_a_folder_that_cannot_be_written_is_only_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    cache = WorkerCache(tmp_path / "file")
    with pytest.warns(RuntimeWarning) as seen:
        cache.put("a", 4)
    assert [re.search("is ignored|could not be saved", str(one.message))[0] for one in seen] == [
        "is ignored",
        "could not be saved",
    ]


def test_an_interrupted_write_leaves_the_file_as_it_was(cache, monkeypatch):
    cache.put("a", 4)

    def fail(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        cache.put("a", 5)
    assert cache.get("a") == 4
    assert os.listdir(cache.path.parent) == ["workers.json"]


def test_old_choices_are_forgotten(cache):
    cache.path.parent.mkdir()
    full = {f"k{number}": 2 for number in range(200)}
    cache.path.write_text(json.dumps({"format": 1, "workers": full}))
    cache.put("new", 3)
    assert (cache.get("k0"), cache.get("k1"), cache.get("new")) == (None, 2, 3)


@pytest.mark.parametrize("value", ["", "relative"])
def test_the_folder_of_the_user_is_the_default(monkeypatch, tmp_path, value):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_folder() == tmp_path / ".cache" / "trawl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "trawl"


def test_a_user_without_a_home_has_no_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert cache_folder() is None
    cache = WorkerCache(None)
    cache.put("a", 4)
    assert cache.get("a") is None
    assert os.listdir() == []


# --- identity


def with_gravity(gravity):
    def make():
        return gravity

    return make


class Factory:
    def __init__(self, gravity):
        self.gravity = gravity

    def __call__(self):
        return self.gravity


def two_lambdas():
    return (lambda: 1), (lambda: 2)


SAME = [
    ("CartPole-v1", "CartPole-v1"),
    (with_gravity(1), with_gravity(1)),
    (Factory(1), Factory(1)),
    (functools.partial(Factory, 1), functools.partial(Factory, 1)),
    (two_lambdas()[0], two_lambdas()[0]),
    (Linear(), Linear()),
    ({"b": 1, "a": [torch.float32, None]}, {"a": [torch.float32, None], "b": 1}),
    (Factory(1).__call__, Factory(1).__call__),
]
DIFFERENT = [
    ("CartPole-v1", "CartPole-v0"),
    (with_gravity(1), with_gravity(2)),
    (Factory(1), Factory(2)),
    (functools.partial(Factory, 1), functools.partial(Factory, 2)),
    two_lambdas(),
    (Linear(3), Linear(4)),
    (nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
    ({"a": 1}, {"a": 2}),
    (Factory, Linear),
    (1, "1"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_things_have_equal_digests(one, other):
    assert digest_of(one) == digest_of(other) != None  # noqa: E711


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_things_have_different_digests(one, other):
    assert digest_of(one) != digest_of(other)


def test_weights_do_not_count():
    one, other = Linear(), Linear()
    assert not torch.equal(one.layer.weight, other.layer.weight)
    assert digest_of(one) == digest_of(other)


_DIGEST = """
from trawl.collectors.tuning.identity import digest_of

print(digest_of(lambda name: name in {"a", "b", "c", "d", "e"}, {"a", "b", "c"}))
"""


def test_every_run_gives_the_same_digest():
    found = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for seed in "12"
    }
    (digest,) = found
    assert len(digest.strip()) == 64


def test_some_things_have_no_identity():
    circle = Factory(1)
    circle.gravity = circle
    assert digest_of(circle) is None
    assert digest_of(object()) is None
    assert digest_of("CartPole-v1", object()) is None


def test_a_machine_is_described_in_plain_data():
    facts = machine()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["processor"]
    assert facts["torch"] == torch.__version__
