"""What type checkers find in calls that are right, and in calls that are wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS = Path(__file__).with_name("calls.py")
# The first run of mypy reads all of torch.
LIMIT = 1200


def marked(checker: str) -> set[int]:
    """The lines in which a checker must find an error."""
    lines = CALLS.read_text().splitlines()
    mark = re.compile(rf"# error(: {checker})?$")
    return {number for number, line in enumerate(lines, 1) if mark.search(line)}


def output_of(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    # 1: there are errors in the files.
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def with_pyright() -> dict[int, str]:
    out = output_of(
        *("pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(ROOT)),
        # Otherwise it asks the network for its newest version.
        PYRIGHT_PYTHON_IGNORE_WARNINGS="1",
    )
    report = json.loads(out[out.index("{") :])
    assert report["summary"]["filesAnalyzed"] == 1
    return {
        found["range"]["start"]["line"] + 1: found["message"]
        for found in report["generalDiagnostics"]
        if found["severity"] == "error"
    }


def with_mypy() -> dict[int, str]:
    path = str(CALLS.relative_to(ROOT))
    out = output_of("mypy", path, MYPYPATH="src")
    errors = re.findall(rf"^(?:.*/)?{re.escape(path)}:(\d+): error: (.*)$", out, re.MULTILINE)
    return {int(number): message for number, message in errors}


@pytest.mark.timeout(LIMIT)
# mypy reads all of torch at first.
@pytest.mark.parametrize("checker", [pytest.param(with_mypy, marks=pytest.mark.long), with_pyright])
def test_it_finds_errors_in_wrong_calls_and_none_in_right_ones(checker):
    expected = marked(checker.__name__.removeprefix("with_"))
    found = checker()
    lines = CALLS.read_text().splitlines()
    assert {number: lines[number - 1] for number in expected - found.keys()} == {}
    assert {lines[number - 1]: found[number] for number in found.keys() - expected} == {}
