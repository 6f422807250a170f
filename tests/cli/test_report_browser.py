"""Reports in a real browser: a headless Chromium."""

from pathlib import Path

import browser
import pytest
import torch
from cli_parts import working_in
from report_parts import FACTS, events, frames, write, write_trace
from report_parts import report as write_report

PATH = browser.find()
pytestmark = pytest.mark.skipif(PATH is None, reason=f"none of {browser.NAMES} is on the PATH")


@pytest.fixture(scope="module")
def chromium():
    found = browser.Browser(PATH)
    yield found
    found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The path of a report with all sections, and with values that could break its layout."""
    with working_in(tmp_path_factory.mktemp("report")):
        pixels = torch.randint(0, 255, (2000, 4, 4), dtype=torch.uint8)
        name = "a_very_long_name_of_an_entry" * 5
        write(
            frames(2000, 20, pixels=pixels, **{name: torch.randn(2000)}),
            env="<img src=http://192.0.2.1/x.png onerror=alert(1)>",
            policy="a" * 300,
            trace="trace.json.gz",
            arguments={"env": "x", "policy": "b" * 400, "workers": 2},
            **FACTS,
        )
        write_trace(events(3, 20, 100), "d/trace.json.gz")
        write_report()
        return Path("report.html").resolve()


def troubles(events):
    """What the console shows."""
    names = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    return [facts for name, facts in events if name in names]


def requests(events):
    """The addresses that the page asks for."""
    found = [facts["request"]["url"] for name, facts in events if name.startswith("Network.requ")]
    return [url for url in found if not url.startswith("data:")]


# The contrast of a text with what is behind it, as WCAG defines it.
CONTRAST = """
(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => {
    const [r, g, b] = rgb(text).map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (rgb(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const ratio = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  let text = 21;
  let shape = 21;
  for (const element of document.querySelectorAll("body *")) {
    const style = getComputedStyle(element);
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (own && !element.closest("svg, script")) {
      text = Math.min(text, ratio(style.color, back(element)));
    }
    if (element.matches(".span, .bars")) shape = Math.min(shape, ratio(style.fill, back(element)));
    if (element.matches(".line")) shape = Math.min(shape, ratio(style.stroke, back(element)));
    if (element.matches(".bar, .box")) {
      shape = Math.min(shape, ratio(style.backgroundColor, back(element.parentElement)));
    }
  }
  return [text, shape];
})()
"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1400])
def test_a_page_fits_and_loads_nothing(chromium, report, width, dark):
    chromium.open(report, width, dark=dark)
    # With all tables open, as they are when somebody looks for a number.
    chromium.run("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    assert chromium.run("innerWidth") == width
    # Without the scroll bar.
    inner = chromium.run("document.documentElement.clientWidth")
    assert chromium.run("document.documentElement.scrollWidth") <= inner <= width
    assert requests(chromium.events) == [report.as_uri()]
    assert troubles(chromium.events) == []
    back = chromium.run("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
    text, shape = chromium.run(CONTRAST)
    assert 4.5 <= text < 21
    assert 3 <= shape < 21


def test_the_accessibility_tree_has_landmarks_names_and_texts(chromium, report):
    chromium.open(report)
    nodes = chromium.call("Accessibility.getFullAXTree")["nodes"]
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"]
    ]
    roles = [role for role, _ in found]
    for landmark in ("banner", "navigation", "main", "contentinfo"):
        assert roles.count(landmark) == 1
    regions = [name for role, name in found if role == "region"]
    assert {"Settings", "Episodes", "Timeline", "Entries"} <= set(regions)
    # Chromium calls figures so, and drawings images.
    assert all(name for role, name in found if role in ("image", "img", "figure", "button"))
    drawings = [name for role, name in found if role in ("image", "img")]
    assert any(name.startswith("Return of 100 episodes over 2,000 frames") for name in drawings)
    assert any(name.startswith("worker 0: batch") for name in drawings)
    # Ticks and bars repeat what the descriptions and tables say, and are left out.
    assert not any("policy 20%" in name for _, name in found)


def test_the_first_tab_skips_to_the_report(chromium, report):
    chromium.open(report)
    chromium.press("Tab")
    assert chromium.run("document.activeElement.className") == "skip"
    assert chromium.run("document.activeElement.getBoundingClientRect().left") >= 0
    outline = chromium.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    chromium.press("Enter")
    assert chromium.run("location.hash") == "#report"


VIEW = "document.querySelector('.lane svg').viewBox.baseVal"


def test_the_timeline_is_zoomed_and_moved_by_keys_and_buttons(chromium, report):
    chromium.open(report)
    whole = chromium.run(f"{VIEW}.width")
    dense = "getComputedStyle(document.querySelector('.dense .near')).display"
    assert chromium.run(dense) == "none"
    chromium.run("document.querySelector('.timeline').focus()")
    for _ in range(5):
        chromium.press("+")
    assert chromium.run(f"{VIEW}.width") == whole / 32
    assert chromium.run(dense) != "none"
    before = chromium.run(f"{VIEW}.x")
    chromium.press("ArrowRight")
    assert chromium.run(f"{VIEW}.x") == before + whole / 128
    assert chromium.run("document.querySelector('.range').textContent") != ""
    chromium.press("0")
    assert chromium.run(f"[{VIEW}.x, {VIEW}.width]") == [0, whole]
    for button, view in (
        ("in", [whole / 4, whole / 2]), ("left", [whole / 8, whole / 2]), ("all", [0, whole])
    ):  # fmt: skip
        chromium.run(f"document.querySelector('button[data-do={button}]').click()")
        assert chromium.run(f"[{VIEW}.x, {VIEW}.width]") == view
    assert troubles(chromium.events) == []


def test_a_page_can_be_printed(chromium, report):
    chromium.open(report, dark=True)
    chromium.call("Emulation.setEmulatedMedia", media="print")
    assert chromium.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert chromium.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert chromium.call("Page.printToPDF")["data"]
    chromium.call("Emulation.setEmulatedMedia", media="")
