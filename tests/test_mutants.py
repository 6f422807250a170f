"""What ``mutants.py`` changes, and that tests which look closely kill all of it."""

import subprocess
import sys
from pathlib import Path

import mutants
import pytest

MODULE = '''
"""Keeps the largest values, up to ``limit``."""

def add(table: dict[str, list], value, *, limit=3, scale=None):
    """Returns whether the value is among the largest."""
    if value < 0:
        raise ValueError("negative, or worse")
    values = table["values"].copy()
    values.append(value if scale is None else value + scale)
    table["values"] = sorted(values)[-limit:]
    return value in table["values"] and value > min(values)
'''
CLOSE = """
import pytest
from toy import add

def test_values():
    table = {"values": [1, 2]}
    first = table["values"]
    assert add(table, 0) is False and table == {"values": [0, 1, 2]} and first == [1, 2]
    assert add(table, 3) is True and table == {"values": [1, 2, 3]}
    assert add(table, 1) is False and table == {"values": [1, 2, 3]}
    add(table, 5, limit=1, scale=2)
    assert table == {"values": [7]}
    with pytest.raises(ValueError):
        add(table, -1)
"""
LOOSE = """
from toy import add

def test_values():
    add({"values": []}, 1)
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    Path("src").mkdir()
    Path("src/toy.py").write_text(MODULE)
    Path("test_toy.py").write_text(CLOSE)
    return Path("src/toy.py")


def survey(*options):
    command = [sys.executable, mutants.__file__, "src/toy.py", "--count", "0", *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_what_is_changed(toy):
    found = [mutant.what for mutant in mutants.mutants(toy)]
    for change in (
        "`None` -> `True`",
        "`3` -> `4`",
        "`value < 0` -> `value <= 0`",
        "`value < 0` -> `(not (value < 0))`",
        "drops `raise ValueError(",
        "`\"values\"` -> `'values_'`",
        "`table[\"values\"].copy()` -> `table['values']`",
        "drops `values.append(",
        "`value + scale` -> `(value - scale)`",
        "`scale is None` -> `scale is not None`",
        'drops `table["values"] = ',
        "and value > min(values)` -> `return None`",
        " or value > min(values))`",
        "`min` -> `max`",
    ):
        assert any(change in what for what in found), (change, found)
    assert not any("worse" in what and "drops" not in what for what in found)
    assert len(found) == len(set(found))


def test_close_tests_kill_what_loose_ones_let_live(toy):
    Path("test_loose.py").write_text(LOOSE)
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m tests"):
        subprocess.run(["git", *command.split()], check=True)
    Path("test_toy.py").unlink()
    old = ["--old", "HEAD", "--old-tests", "test_toy.py"]
    finished = survey("--lines", "9-10", "--tests", "test_loose.py", *old)
    assert finished.stdout.endswith(
        "5 mutants: 1 killed, 4 survived; the old tests killed 5, and 4 of them alone\n"
    ), finished.stdout + finished.stderr
    assert finished.returncode == 1
    assert "    SURVIVED\n    old: killed by test_toy.py::test_values\n" in finished.stdout


def test_tests_that_fail_without_a_mutant_are_refused(toy):
    Path("test_toy.py").write_text("def test_nothing(): assert False")
    finished = survey("--tests", "test_toy.py")
    assert finished.returncode == 2
    assert "test_toy.py::test_nothing fails without a mutant" in finished.stdout
