"""The pages of the documentation, as they are built."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import browser
import pytest

ROOT = Path(__file__).parents[2]
PATH = browser.find()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Builds the pages."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Prompts(HTMLParser):
    """Counts the prompts of examples, in code and elsewhere."""

    def __init__(self, page):
        super().__init__()
        self.open, self.code, self.elsewhere = [], 0, []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag in ("pre", "blockquote"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in ("pre", "blockquote"):
            self.open.remove(tag)

    def handle_data(self, data):
        # A prompt is at the beginning of a line; a right shift is not.
        if re.match(r">>> ?$|>>> \w", data.lstrip("\n")):
            if self.open == ["pre"]:
                self.code += 1
            else:
                self.elsewhere.append(data)


def test_examples_of_docstrings_are_shown_as_code(site):
    page = (site / "reference" / "index.html").read_text()
    found = Prompts(page)
    assert found.elsewhere == []
    assert found.code > 300
    # Titles of sections that Griffe did not take for any.
    assert re.findall(r"<summary>Example\b|<p>Examples?:</p>", page) == []


@pytest.mark.skipif(PATH is None, reason=f"none of {browser.NAMES} is on the PATH")
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_cut_off(site, width):
    chromium = browser.Browser(PATH)
    try:
        cut = {}
        for page in sorted(site.rglob("index.html")):
            chromium.open(page, width)
            if found := chromium.run(CUT_OFF):
                cut[str(page.parent.relative_to(site))] = found
        assert cut == {}
    finally:
        chromium.close()


# The page itself is no wider than the window; what is wider than its box can be scrolled to.
CUT_OFF = """
(() => {
    const found = [];
    const root = document.documentElement;
    if (root.scrollWidth > root.clientWidth) found.push(`page: ${root.scrollWidth}`);
    for (const each of document.querySelectorAll('article *')) {
        if (each.scrollWidth <= each.clientWidth + 1 || each.clientWidth === 0) continue;
        const style = getComputedStyle(each);
        if (style.overflowX === 'hidden' || style.overflowX === 'clip')
            found.push(`${each.tagName}: ${each.textContent.trim().slice(0, 40)}`);
    }
    for (const each of document.querySelectorAll('article table, article pre, article img')) {
        let box = each, right = each.getBoundingClientRect().right;
        while (box && !['auto', 'scroll'].includes(getComputedStyle(box).overflowX))
            box = box.parentElement;
        if (box === null && right > root.clientWidth + 1)
            found.push(`${each.tagName}: ${each.textContent.trim().slice(0, 40)}`);
    }
    return found.join('\\n');
})()
"""
