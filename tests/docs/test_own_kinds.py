"""The page "Your own kind of environment", with its package installed."""

from __future__ import annotations

from pathlib import Path

import packages
from test_doc_examples import WITH_PACKAGE, blocks

RUN = f"""
from pathlib import Path
from test_doc_examples import run_page

if __name__ == "__main__":
    run_page(Path({str(WITH_PACKAGE)!r}))
"""


def test_the_page(tmp_path: Path) -> None:
    marked = [block for block in blocks(WITH_PACKAGE.read_text()) if "file" in block.marks]
    files = {block.marks["file"]: block.text for block in marked}
    assert sum(text.count("\n") for text in files.values()) < 60
    site, here = tmp_path / "site", tmp_path / "here"
    packages.install(site, files.pop("pyproject.toml"), files)
    here.mkdir()
    tests = packages.ROOT / "tests"
    packages.run(RUN, site, tests, tests / "docs", here=here)
