from trawl.extras.monitors.bars import (
    PART_COLORS,
    PARTS,
    divided,
    fit,
    progress_bar,
    sparkline,
    stacked_bar,
)


def test_a_sparkline_goes_from_low_to_high():
    assert sparkline([]) == ""
    assert sparkline([3.0, 3.0]) == "▁▁"
    line = sparkline([-10.0, 0.0, 10.0])
    assert (line[0], line[-1]) == ("▁", "█")
    assert sparkline([9.0, 10.0], low=0.0)[0] in "▇█"


def test_bars_have_their_width_and_parts_differ_without_color():
    assert len(set(PARTS)) == len(PARTS) == len(PART_COLORS)
    assert sum(divided([0.123, 0.456, 0.421], 17)) == 17
    for share in (0.0, 0.3, 1.0):
        assert progress_bar(share, 20).cell_len == 20
    assert progress_bar(1.0, 20).plain == 20 * "━"
    assert progress_bar(0.0, 20).plain == 20 * "─"
    assert stacked_bar([], 20).plain == ""
    bar = stacked_bar([0.5, 0.25, 0.15, 0.0, 0.1], 20).plain
    assert [bar.count(part) for part in PARTS] == [10, 5, 3, 0, 2]


def test_texts_are_cut_to_a_line():
    assert fit("short", 10) == "short"
    assert fit("a\nb\tc", 10) == "a b c"
    assert fit("x" * 30, 10) == "x" * 9 + "…"
    assert fit("x" * 30, 0) == ""
    # Each of these characters takes two cells.
    assert fit("環境環境環境", 6).rstrip("…").rstrip() == "環境"
