import io

import pytest
from rich.console import Console

from trawl.extras.monitors.glyphs import ASCII, PART_COLORS, UNICODE, divided, glyphs_for


@pytest.fixture(autouse=True)
def _no_locale(monkeypatch):
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)


def console(encoding):
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding), force_terminal=True)


@pytest.mark.parametrize(
    ("variables", "encoding", "expected"),
    [
        ({}, "utf-8", UNICODE),
        ({}, "ascii", ASCII),
        ({}, "latin-1", ASCII),
        ({"LANG": "en_US.UTF-8"}, "utf-8", UNICODE),
        ({"LANG": "C"}, "utf-8", ASCII),
        ({"LANG": "C.UTF-8"}, "utf-8", UNICODE),
        # Python itself has set LC_CTYPE.
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, "utf-8", ASCII),
        ({"LC_CTYPE": "C.UTF-8"}, "utf-8", UNICODE),
        ({"LC_ALL": "POSIX", "LANG": "de_DE.UTF-8"}, "utf-8", ASCII),
        ({"LC_ALL": "de_DE.UTF-8", "LANG": "C"}, "utf-8", UNICODE),
    ],
)
def test_the_characters_are_those_that_the_terminal_shows(
    variables, encoding, expected, monkeypatch
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert glyphs_for(console(encoding)) is expected


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_a_sparkline_goes_from_low_to_high(glyphs):
    assert glyphs.sparkline([]) == ""
    assert glyphs.sparkline([3.0, 3.0]) == glyphs.spark[0] * 2
    line = glyphs.sparkline([-10.0, 0.0, 10.0])
    assert (line[0], line[-1]) == (glyphs.spark[0], glyphs.spark[-1])
    assert glyphs.sparkline([9.0, 10.0], low=0.0)[0] in glyphs.spark[-2:]


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_bars_have_their_width(glyphs):
    for share in (0.0, 0.3, 1.0):
        assert glyphs.progress_bar(share, 20).cell_len == 20
    assert glyphs.rest not in glyphs.progress_bar(1.0, 20).plain
    assert glyphs.done not in glyphs.progress_bar(0.0, 20).plain
    assert glyphs.stacked_bar([], 20).plain == ""
    bar = glyphs.stacked_bar([0.5, 0.25, 0.15, 0.0, 0.1], 20).plain
    counts = [bar.count(glyph) for glyph in glyphs.parts]
    assert counts == [10, 5, 3, 0, 2]


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_the_parts_differ_without_color(glyphs):
    assert len(set(glyphs.parts)) == len(glyphs.parts) == len(PART_COLORS)


def test_parts_add_up():
    assert divided([1 / 3] * 3, 10) == [4, 3, 3]
    assert divided([0.0, 0.0], 10) == [0, 0]
    assert sum(divided([0.123, 0.456, 0.421], 17)) == 17


def test_texts_are_cut_to_a_line():
    assert UNICODE.fit("short", 10) == "short"
    assert UNICODE.fit("a\nb\tc", 10) == "a b c"
    assert UNICODE.fit("x" * 30, 10) == "x" * 9 + "…"
    assert ASCII.fit("x" * 30, 10) == "x" * 7 + "..."
    assert ASCII.fit("é", 10) == "?"
    # Each of these characters takes two cells.
    assert UNICODE.fit("環境環境環境", 6) == "環境…"
