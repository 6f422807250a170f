"""What a call means in TorchRL it means in Trawl, but for what the documentation says."""

import os
import re
from multiprocessing import spawn
from pathlib import Path

import nursery
import pytest

pytest.importorskip("torchrl")
from compare import differences, installed, is_since, signatures, statistics

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-torchrl.md"
HEAD = "| Name | TorchRL | Trawl | Why |\n|---|---|---|---|\n"


def explained():
    """The rows of the page's table that concern the installed TorchRL."""
    _, table = PAGE.read_text().split(HEAD)
    rows = {}
    for line in table.split("\n\n")[0].splitlines():
        name, theirs, ours, why = re.fullmatch(
            r"\| `(.+?)` \| (.+?) \| (.+?) \| (.*?) ?\|", line
        ).groups()
        assert name not in rows
        assert why, f"{name} is not explained"
        since = re.match(r"since TorchRL (\S+?)[:,]", why)
        if since is None or is_since(since[1]):
            rows[name] = theirs, ours
    return rows


@pytest.mark.filterwarnings("ignore")
def test_it_differs_as_the_page_explains(monkeypatch):
    # TorchRL's collectors spawn workers.
    monkeypatch.setattr(spawn, "_python_exe", os.fsencode(nursery.python(nursery.tested)))
    found, rows = differences(), explained()
    unsaid = {name: both for name, both in found.items() if rows.get(name) != both}
    past = {name: both for name, both in rows.items() if found.get(name) != both}
    assert not unsaid, f"{' '.join(installed())} has this, of which the page doesn't tell: {unsaid}"
    assert not past, f"the page tells of what is no longer so: {past}"


def test_a_name_that_is_new_in_torchrl_is_noticed(monkeypatch):
    import torchrl.collectors

    def harvest(fields, *, season="autumn"):
        """A function that Trawl doesn't have."""

    monkeypatch.setattr(torchrl.collectors, "harvest", harvest, raising=False)
    names = [*torchrl.collectors.__all__, "harvest"]
    monkeypatch.setattr(torchrl.collectors, "__all__", names)
    original = torchrl.collectors.Collector.stats

    def stats(self, *args, **kwargs):
        return original(self, *args, **kwargs) | {"weather": "fine"}

    monkeypatch.setattr(torchrl.collectors.Collector, "stats", stats)

    def next_season(self, when=None):
        """A method that Trawl doesn't have."""

    monkeypatch.setattr(torchrl.collectors.Collector, "next_season", next_season, raising=False)
    new = {*signatures(), *statistics("Collector")} - set(explained())
    assert {"harvest", "Collector.next_season", "Collector.stats()['weather']"} <= new
