"""The pages about what packages add, each with its package installed."""

from __future__ import annotations

from pathlib import Path

import packages
import pytest
from test_doc_examples import WITH_PACKAGES, blocks, name_of

RUN = """
from pathlib import Path
from test_doc_examples import run_page

if __name__ == "__main__":
    run_page(Path({!r}))
"""


@pytest.mark.parametrize("page", WITH_PACKAGES, ids=name_of)
def test_the_page(page: Path, tmp_path: Path) -> None:
    marked = [block for block in blocks(page.read_text()) if "file" in block.marks]
    files = {block.marks["file"]: block.text for block in marked}
    assert sum(text.count("\n") for text in files.values()) < 60
    site, here = tmp_path / "site", tmp_path / "here"
    packages.install(site, files.pop("pyproject.toml"), files)
    here.mkdir()
    tests = packages.ROOT / "tests"
    packages.run(RUN.format(str(page)), site, tests, tests / "docs", here=here)
