"""Packages that are installed for some programs only."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nursery

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
    """Runs code in an interpreter that finds packages in some folders.

    It has imported Trawl, but has not looked for packages yet.

    Returns:
        What it printed, and its warnings.
    """
    found = [*map(str, folders), str(ROOT / "src")]
    begin = f"import sys; sys.path[:0] = {found}; sys.executable = {nursery.python()!r}\n"
    done = nursery.run(begin + code, cwd=here, env={"PYTHONPATH": os.pathsep.join(found)})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
