"""The distribution of tests over processes."""

import textwrap
from pathlib import Path

import pytest
import schedule

pytest_plugins = ["pytester"]


def test_long_units_come_first_and_only_files_that_share_nothing_are_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = """
    31.0 parts tests/a.py
    16.0 parts tests/a.py::slow
    30.0 whole tests/b.py
    """
    (tmp_path / "durations.txt").write_text(textwrap.dedent(known).lstrip())
    monkeypatch.setattr(schedule, "DURATIONS", tmp_path / "durations.txt")
    files = {"tests/c.py": "1", "tests/ray/d.py": "1", "tests/b.py": "12", "tests/a.py": "12345"}
    tests = [f"{path}::{name}" for path, names in files.items() for name in names]
    tests += ["tests/a.py::slow", "tests/ray/e.py::1"]

    assert list(schedule.plan(tests).items()) == [
        ("Ray", ["tests/ray/d.py::1", "tests/ray/e.py::1"]),
        ("tests/b.py", ["tests/b.py::1", "tests/b.py::2"]),
        ("tests/a.py#1", ["tests/a.py::5", "tests/a.py::slow"]),
        ("tests/a.py#0", [f"tests/a.py::{name}" for name in "1234"]),
        ("tests/c.py#0", ["tests/c.py::1"]),
    ]


def test_a_run_ends_if_a_process_dies_after_all_tests_of_another_file(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(schedule.__file__).rsplit("/", 1)[0])
    pytester.makeconftest(
        """
        from schedule import ByDuration

        def pytest_xdist_make_scheduler(config, log):
            return ByDuration(config, log)
        """
    )
    dies = textwrap.dedent(
        """
        import os

        def test_before():
            pass

        def test_dies():
            os._exit(1)

        def test_after():
            pass
        """
    )
    names = ["test_a", "test_b", "test_c", "test_d"]
    pytester.makepyfile(**dict.fromkeys(names, "def test_passes():\n    pass\n"))
    pytester.makepyfile(test_e=dies)

    result = pytester.runpytest_subprocess(
        "-n1", "--no-loadscope-reorder", "-p", "no:cacheprovider", timeout=300
    )

    result.assert_outcomes(passed=6, failed=1)
    result.stdout.fnmatch_lines(["*crashed while running*test_e.py::test_dies*"])
