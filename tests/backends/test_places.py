"""Places by name, by a function, and those of other packages."""

from pathlib import Path
from typing import Any

import packages
import pytest

from trawl import Collector
from trawl.backends import InlineBackend
from trawl.collectors import MultiSyncCollector

PROJECT = """
[project]
name = "some-places"
version = "1.0"

[project.entry-points."trawl.places"]
{entries}
"""


def make(place: Any) -> MultiSyncCollector:
    return MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=20, start_method=place)


def test_a_function_makes_the_backend() -> None:
    made: list[InlineBackend] = []

    def place() -> InlineBackend:
        made.append(InlineBackend(shares_memory=False))
        return made[-1]

    with make(place) as one, make(place) as other:
        assert one.next().shape == other.next().shape == (2, 10)
    assert len(made) == 2


def test_places_are_backends_of_a_collector() -> None:
    options: Any = {"frames_per_batch": 20, "num_collectors": 2, "sync": True}
    with Collector("CartPole-v1", backend="inline", **options) as collector:
        assert type(collector) is MultiSyncCollector
        assert collector.next().shape == (2, 10)


@pytest.mark.parametrize(
    ("place", "error", "text"),
    [
        (
            "fork",
            ValueError,
            "start_method must be one of 'forkserver', 'spawn', 'inline', 'por",
        ),
        (3, TypeError, "start_method must be the name of a place, or a function"),
        (dict, TypeError, "a place must make a Backend, but <class 'dict'> made {}"),
    ],
)
def test_what_is_no_place(place: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        make(place)


def test_a_place_of_another_package(tmp_path: Path) -> None:
    entries = 'here = "places:Here"\nbroken = "places:missing"\nspawn = "places:Here"'
    module = "from trawl.backends import InlineBackend\n\nclass Here(InlineBackend):\n    pass\n"
    site = tmp_path / "site"
    packages.install(site, PROJECT.format(entries=entries), {"places.py": module})
    found = packages.run(
        """
from trawl import Collector
for name in ("here", "broken", "there"):
    try:
        made = Collector("CartPole-v1", frames_per_batch=20, num_collectors=1, backend=name)
    except Exception as error:
        print(type(error).__name__, error)
    else:
        with made:
            print(made.next().shape)
""",
        site,
        here=tmp_path,
    )
    assert "spawn = 'places:Here' of trawl.places, in the package some-places 1.0, is ign" in found
    assert "torch.Size([20])" in found
    assert "BrokenEntry the entry point broken = 'places:missing' of trawl.places" in found
    assert "unknown backend 'there': the backends are 'direct', " in found
    assert "'portable', 'here', 'broken'" in found
