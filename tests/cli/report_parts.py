"""What the tests of HTML reports share: a strict parser of pages, traces, and datasets."""

import gzip
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import torch
from cli_parts import trawl
from tensordict import TensorDict

from trawl.data import MemmapSink

_VOID = {"meta", "link", "hr", "br"}


class Page(HTMLParser):
    """The elements of a page; raises an AssertionError if they are not nested properly.

    Attributes:
        elements: tag, attributes and ancestors of each element, in order.
        texts: text in each element that has some, with its tag.
    """

    def __init__(self, path="report.html"):
        super().__init__()
        self.source = Path(path).read_text(encoding="utf-8")
        self.elements, self.texts, self._open = [], [], []
        self.feed(self.source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        assert len(attributes) == len(attrs), (tag, attrs)
        self.elements.append((tag, attributes, tuple(self._open)))
        if tag not in _VOID:
            self._open.append((tag, id(attributes), attributes))

    def handle_endtag(self, tag):
        assert self._open, tag
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self._open[-1][0] if self._open else "", data))

    @property
    def text(self):
        """All that a reader sees."""
        return " ".join(text for tag, text in self.texts if tag not in ("style", "script"))

    def all(self, tag):
        """Attributes of all elements with a tag."""
        return [attributes for name, attributes, _ in self.elements if name == tag]


def check_structure(page):
    """Checks what every report must have, for readers that see it and readers that don't."""
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes, above in page.elements:
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in ids
        if tag == "a":
            assert attributes["href"].removeprefix("#") in ids
        if tag == "svg":
            described = attributes.get("role") == "img" and attributes.get("aria-label")
            hidden = "true" in [each.get("aria-hidden") for each in (attributes, *_of(above))]
            assert described or hidden, attributes
        if tag == "table":
            region = above[-1][2]
            assert (region["role"], region["tabindex"]) == ("region", "0")
            assert region["aria-labelledby"]
        if tag in ("th", "td"):
            assert tag == "td" or attributes["scope"] in ("row", "col")
        if tag == "button":
            assert attributes["aria-label"]
    headings = [int(tag[1]) for tag, _, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(headings))
    assert len(page.all("caption")) == len(page.all("table"))
    assert len(page.all("figcaption")) == len(page.all("figure"))
    for landmark in ("header", "nav", "main", "footer"):
        assert len(page.all(landmark)) == 1
    assert page.all("html")[0]["lang"] == "en"
    first = next(attributes for tag, attributes, _ in page.elements if tag == "a")
    assert (first["class"], first["href"]) == ("skip", "#report")
    assert page.all("main")[0]["id"] == "report"
    check_loads_nothing(page)


def check_loads_nothing(page):
    """Checks that nothing on the page is fetched, and that only its own script may run."""
    for tag, attributes, _ in page.elements:
        assert not {"src", "srcset", "data", "background"} & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert tag not in ("iframe", "img", "object", "embed", "base", "form"), tag
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert "url(" not in page.source
    assert "@import" not in page.source
    assert len(page.all("script")) == 1
    [policy] = [m["content"] for m in page.all("meta") if "http-equiv" in m]
    assert "default-src 'none'" in policy


def _of(above):
    return [attributes for _, _, attributes in above]


def report(directory="d"):
    """Writes a report on a dataset; gives the page, and what was printed on stderr."""
    code, out, err = trawl("show", directory, "--html", "report.html")
    assert code == 0, err
    assert out.endswith("the report is written to report.html\n")
    page = Page()
    check_structure(page)
    return page, err


def frames(count=12, length=4, **entries):
    """Frames of episodes of a length, with rewards of 1; further entries replace these."""
    number = torch.arange(count)
    batch = TensorDict(batch_size=[count])
    batch["observation"] = torch.linspace(-1, 1, count * 3).reshape(count, 3)
    batch["collector", "traj_ids"] = number // length
    batch["next", "reward"] = torch.ones(count, 1)
    batch["next", "done"] = (number % length == length - 1).unsqueeze(-1)
    for name, value in entries.items():
        batch[tuple(name.split("__"))] = value
    return batch


def write(batch, directory="d", **info):
    """Writes a dataset, whose record has some facts."""
    with MemmapSink(directory, info) as sink:
        sink.write(batch)


def span(name, start, length, pid=1, tid=0):
    return {"ph": "X", "name": name, "ts": start, "dur": length, "pid": pid, "tid": tid}


def counter(name, time, value):
    return {"ph": "C", "name": name, "ts": time, "pid": 0, "tid": 0, "args": {"value": value}}


def label(kind, name, pid, tid=0):
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def events(workers=2, batches=5, per_batch=10):
    """The events of a run: each batch begins with new weights, and ends with a wait."""
    yield from (label("process", "driver", 0), label("thread", "learner", 0, 1))
    yield label("thread", "scheduler", 0, 2)
    step = 100.0 * per_batch + 500
    for number in range(batches):
        start = 1000 + number * step
        yield span("wait", start, step - 300, pid=0, tid=1)
        yield span("learn", start + step - 300, 200, pid=0, tid=1)
        yield span("update", start + step - 100, 100, pid=0, tid=1)
        yield {"ph": "i", "name": "request", "ts": start, "pid": 0, "tid": 2, "s": "t"}
        yield {"ph": "i", "name": "deliver", "ts": start + step, "pid": 0, "tid": 2, "s": "t"}
        yield counter("policy version", start, number)
        yield counter("frames/s", start, 1000.0 + number)
    for worker in range(workers):
        pid = worker + 1
        yield label("process", f"worker {worker}", pid)
        for number in range(batches):
            start = 1000 + number * step
            yield span("weights", start, 50, pid)
            yield span("batch", start + 50, 100 * per_batch, pid)
            for row in range(per_batch):
                yield span("env", start + 50 + 100 * row, 70, pid)
                yield span("policy", start + 120 + 100 * row, 30, pid)
            yield span("wait", start + 50 + 100 * per_batch, 450, pid)
    yield span("restart", 1000 + batches * step, 900, pid=1)


def write_trace(found, path):
    """Writes a trace file, as a collector does."""
    content = {"traceEvents": list(found), "displayTimeUnit": "ms", "otherData": {"a": "b"}}
    with gzip.open(path, "wt", compresslevel=1) as file:
        json.dump(content, file)


STATS = {
    "frames": 6000,
    "frames_per_second": 10_412.3,
    "env_path": "arrays",
    "policy_lag_mean": None,
    "env_share": 0.625,
    "policy_share": 0.2,
    "overhead_share": 0.05,
    "weights_share": 0.025,
    "idle_share": 0.1,
    "learner_share": 0.35,
    "wait_share": 0.55,
    "driver_share": 0.1,
    "worker_10/env_share": 0.75,
    "worker_2/env_share": 0.5,
    "worker_2/policy_share": 0.25,
}
FACTS = {
    "stats": STATS,
    "throughput": [[1.0, 500], [2.0, 1500], [3.0, 4500]],
    "bottleneck": {"part": "environment", "share": 0.6, "sentence": "Add workers.", "worker": None},
}
