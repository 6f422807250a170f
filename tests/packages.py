"""Packages that are installed for a fresh interpreter only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_TABLE = re.compile(r'^\[project\.entry-points\."(.+)"\]\n((?:.+\n)*)', re.MULTILINE)


def install(folder: Path, project: str, modules: dict[str, str]) -> None:
    """Writes what ``pip install --target`` would write.

    Args:
        folder: the folder.
        project: text of the package's ``pyproject.toml``.
        modules: texts of its modules, by the names of their files.
    """
    found = dict(re.findall(r'^(\w+) = "(.*)"$', project, re.MULTILINE))
    name, version = found["name"], found["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    tables = (f"[{group}]\n{entries}" for group, entries in _TABLE.findall(project))
    (info / "entry_points.txt").write_text("".join(tables).replace('"', ""))
    for file, text in modules.items():
        (folder / file).write_text(text)


def run(code: str, *folders: Path, here: Path) -> str:
    """Runs code in a fresh interpreter that finds packages in some folders.

    Returns:
        What it printed, and its warnings.
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=here,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT / "src"]))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
