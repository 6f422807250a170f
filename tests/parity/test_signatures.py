"""What a call means in TorchRL it means in Trawl, but for what the documentation says."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torchrl")
from signatures import differences

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-torchrl.md"
HEAD = "| Name | TorchRL | Trawl | Why |\n|---|---|---|---|\n"


def explained():
    """The rows of the page's table."""
    _, table = PAGE.read_text().split(HEAD)
    rows = {}
    for line in table.split("\n\n")[0].splitlines():
        name, theirs, ours, why = re.fullmatch(
            r"\| `(.+?)` \| (.+?) \| (.+?) \| (.*?) ?\|", line
        ).groups()
        assert name not in rows
        assert why, f"{name} is not explained"
        rows[name] = theirs, ours
    return rows


@pytest.mark.filterwarnings("ignore")
def test_signatures_differ_as_the_page_explains():
    assert differences() == explained()
