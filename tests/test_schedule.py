"""The distribution of tests over processes."""

import textwrap

import pytest

pytest_plugins = ["pytester"]


def test_a_run_ends_if_a_process_dies_after_all_tests_of_another_file(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    import schedule

    monkeypatch.setenv("PYTHONPATH", str(schedule.__file__).rsplit("/", 1)[0])
    pytester.makeconftest(
        """
        from schedule import ByFileAndCluster

        def pytest_xdist_make_scheduler(config, log):
            return ByFileAndCluster(config, log)
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
