"""Runs the examples in README.md, docs/**/*.md and every docstring of trawl.

The ``python`` blocks of a page run from top to bottom in one namespace. A ``text`` block after a
``python`` block is the expected output (``...`` stands for anything). In a ``console`` block, lines
that begin with ``$ trawl`` are run, and the lines after each of them are its expected output. Each
page runs in its own empty folder. An HTML comment on the line above a block changes how it runs:

    <!-- example: raises ValueError -->   it raises this error; the text after it is the message
    <!-- example: warns UserWarning -->   it warns so, at least once; other warnings are errors
    <!-- example: needs envpool -->       it is left out if this package is missing
    <!-- example: file policies.py -->    it is not run, but saved under this name
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import doctest
import importlib
import importlib.util
import io
import logging
import os
import pkgutil
import random
import re
import runpy
import shlex
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trawl
from trawl.collectors.config import CollectorConfig
from trawl.collectors.multi_config import MultiConfig
from trawl.collectors.options import table
from trawl.collectors.serving_options import AsyncBatchedArguments
from trawl.extras.cli import main
from trawl.extras.cli.arguments import (
    CheckArguments,
    CollectArguments,
    EvaluateArguments,
    ShowArguments,
    TuneArguments,
)

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMPARE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Languages of blocks. Any other language is an error, because its blocks would silently not run.
LANGUAGES = {"python", "console", "text", "bash", "diff", "toml"}

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}) *(?P<language>[\w-]*)")
MARK = re.compile(r"<!-- example: (?P<kind>raises|warns|needs|file) (?P<what>[\w.]+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        line: number of its first line in the page, from 1.
        marks: the names given by the comment above it, by kind.
        shown: expected output, from the text block that follows; None without such a block.
    """

    line: int
    language: str
    text: str
    marks: dict[str, str]
    shown: str | None


def blocks(page: str) -> Iterator[Block]:
    """Yields the fenced blocks of a page; a block of expected output is part of its example."""
    found: list[Block] = []
    lines = page.splitlines()
    at, after, mark = 0, 0, {}
    while at < len(lines):
        fence = FENCE.match(lines[at])
        if fence is None:
            if lines[at].strip():
                given = MARK.fullmatch(lines[at].strip())
                mark = {given["kind"]: given["what"]} if given else {}
                after = at + 1 if given is None else after
            at += 1
            continue
        close = fence["indent"] + fence["ticks"]
        end = next(i for i in range(at + 1, len(lines)) if lines[i].rstrip() == close)
        text = textwrap.dedent("\n".join(lines[at + 1 : end])) + "\n"
        last = found[-1] if found else None
        if fence["language"] == "text" and last and last.language == "python" and after < last.line:
            found[-1] = Block(last.line, "python", last.text, last.marks, text)
        else:
            found.append(Block(at + 2, fence["language"], text, mark, None))
        at, mark = end + 1, {}
    yield from found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs an example in an empty folder, and undoes its changes to the process."""
    monkeypatch.chdir(tmp_path)
    mkdtemp, here = tempfile.mkdtemp, {"dir": tmp_path}
    # Redirects only calls without arguments, as in examples. Sockets need shorter paths elsewhere.
    monkeypatch.setattr(
        tempfile, "mkdtemp", lambda *to, **more: mkdtemp(*to, **(more if to or more else here))
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "100")
    modules = set(sys.modules)
    # Silences TorchRL. The variable is for the case that it is imported only later.
    monkeypatch.setenv("RL_LOGGING_LEVEL", "WARNING")
    logger = logging.getLogger("torchrl")
    level = logger.level
    logger.setLevel(logging.WARNING)
    generators = torch.get_rng_state(), np.random.get_state(), random.getstate()
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    environment = dict(os.environ)
    yield
    logger.setLevel(level)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_rng_state(generators[0])
    np.random.set_state(generators[1])
    random.setstate(generators[2])


# Their packages have to be installed before Python starts; see test_own_packages.py.
WITH_PACKAGES = sorted((ROOT / "docs").glob("own-*.md"))
# Has stand-ins for simulators, which other tests must not find; see test_simulators.py.
SIMULATORS = ROOT / "docs" / "simulators.md"
ELSEWHERE = (*WITH_PACKAGES, SIMULATORS)


@pytest.mark.parametrize("page", [one for one in PAGES if one not in ELSEWHERE], ids=name_of)
@pytest.mark.usefixtures("untouched")
def test_page(page: Path) -> None:
    run_page(page)


def run_page(page: Path) -> None:
    """Runs all examples of a page in the current folder."""
    namespace: dict[str, Any] = {"__name__": f"example_{page.stem.replace('-', '_')}"}
    for block in blocks(page.read_text(encoding="utf-8")):
        where = f"{name_of(page)}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: what is {block.language!r}?"
        if "file" in block.marks:
            Path(block.marks["file"]).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            run_python(page, block, namespace, where)
        elif block.language == "console":
            run_console(block, where)


def run_python(page: Path, block: Block, namespace: dict[str, Any], where: str) -> None:
    needed, warning = block.marks.get("needs"), block.marks.get("warns")
    if needed is not None and importlib.util.find_spec(needed) is None:
        return
    # Compiled with the line numbers of the page, so that a traceback leads there.
    tree = ast.increment_lineno(ast.parse(block.text, str(page)), block.line - 1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as seen:
        if warning is not None:
            warnings.simplefilter("always", getattr(builtins, warning))
        error = _run(compile(tree, str(page), "exec", dont_inherit=True), namespace)
    expected = block.marks.get("raises")
    if error is not None and type(error).__name__ != expected:
        raise error
    if expected is not None:
        assert error is not None, f"{where}: {expected} was expected"
        # Includes the notes of the error, which exist since Python 3.11.
        message = traceback.format_exception_only(type(error), error)[0]
        printed.write("\n".join([message.rstrip(), *getattr(error, "__notes__", [])]))
    assert warning is None or seen, f"{where}: {warning} was expected"
    if block.shown is not None:
        compare(block.shown, printed.getvalue(), where)


def _run(code: Any, namespace: dict[str, Any]) -> Exception | None:
    try:
        exec(code, namespace)
    except Exception as error:
        return error
    return None


def run_console(block: Block, where: str) -> None:
    for command, shown in commands(block.text):
        program, *arguments = shlex.split(command)
        if program != "trawl":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()) as told:
            code = main(arguments)
        assert code == 0, f"{where}: {command}\n{told.getvalue()}"
        if shown:
            compare(shown, printed.getvalue(), f"{where}: {command}")


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yields the commands of a console block, each with the lines that follow it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.replace("\\\n", " ").partition("\n")
        yield command, shown


def compare(shown: str, printed: str, where: str) -> None:
    if not doctest.OutputChecker().check_output(shown, printed, COMPARE):
        raise AssertionError(f"{where}: the page shows\n{shown}\nbut this was printed:\n{printed}")


# --- docstrings


def modules() -> list[str]:
    """Returns the names of all modules of trawl, except those that run on import."""
    found = pkgutil.walk_packages(trawl.__path__, "trawl.")
    return ["trawl", *(module.name for module in found if not module.name.endswith("__main__"))]


def docstring_examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [
        test
        for name in modules()
        for test in finder.find(importlib.import_module(name))
        if test.examples
    ]


@pytest.mark.parametrize("example", docstring_examples(), ids=lambda example: example.name)
@pytest.mark.usefixtures("untouched")
def test_docstring(example: doctest.DocTest) -> None:
    report = io.StringIO()
    result = doctest.DocTestRunner(optionflags=COMPARE).run(example, out=report.write)
    assert not result.failed, report.getvalue()


def test_wrong_docstrings_fail() -> None:
    example = doctest.DocTestParser().get_doctest(">>> 1\n2\n", {}, "wrong", None, None)
    with pytest.raises(AssertionError, match="Expected"):
        test_docstring(example)


def test_docstrings_are_found() -> None:
    names = {example.name for example in docstring_examples()}
    assert {"trawl.collectors.single.Collector", "trawl.envs.gym.GymEnv"} <= names


# --- completeness of the pages


def test_the_tables_of_options_are_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "scripts" / "tables.py"))
    assert script["outdated"]() == [], "python docs/scripts/tables.py --write"


def test_all_options_are_explained() -> None:
    explained = runpy.run_path(str(ROOT / "docs" / "scripts" / "tables.py"))["explained"]()
    names = {*table(CollectorConfig), *table(MultiConfig)}
    assert names - explained.keys() == {"worker_idx"}  # which users don't pass
    assert explained.keys() - names - set(table(AsyncBatchedArguments)) == set()


@pytest.mark.parametrize(
    "command",
    [CheckArguments, CollectArguments, EvaluateArguments, ShowArguments, TuneArguments],
)
def test_all_arguments_of_the_command_line_are_explained(command: type) -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    given = {each.name: each for each in fields(command)}
    if "options" in given:
        given |= {each.name: each for each in fields(given.pop("options").default_factory)}
    names = given.keys() - {"env", "directory"}
    # `async` is a keyword in Python, so the field has another name.
    names = {"async" if name == "asynchronous" else name for name in names}
    missing = [name for name in names if f"`--{name.replace('_', '-')}`" not in page]
    assert not missing


def test_the_first_page_names_all_pages() -> None:
    named = set(re.findall(r"\]\(([\w-]+\.md)", (ROOT / "docs/index.md").read_text()))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_links_of_the_readme_lead_somewhere() -> None:
    # MkDocs checks the links of the other pages.
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", readme)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


PUBLIC = [
    "trawl",
    "trawl.collectors",
    "trawl.collectors.distributed",
    "trawl.data",
    "trawl.envs",
    "trawl.observe",
    "trawl.testing",
    "trawl.weight_update",
]


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_in_the_reference(module: str) -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    paths = re.findall(r"^::: (\S+)$", reference, flags=re.MULTILINE)
    shown = [pkgutil.resolve_name(path) for path in paths]
    home = importlib.import_module(module)
    for name in home.__all__:
        explained = any(getattr(home, name) is value for value in shown) or f"`{name}`" in reference
        assert explained, f"{module}.{name} is not in docs/reference.md"


# --- parsing of the pages


PAGE = """\
Some words.

```python
a = 1
```

```python
print(a, "and more")
```

```text
1 and ...
```

<!-- example: raises ValueError -->
```python
raise ValueError("no")
```

```text
ValueError: no
```

Words between: the next block stands alone.

```text
2
```
"""


def test_blocks_are_read() -> None:
    found = list(blocks(PAGE))
    assert [(each.line, each.language) for each in found] == [
        (4, "python"),
        (8, "python"),
        (17, "python"),
        (27, "text"),
    ]
    assert [each.shown for each in found] == [None, "1 and ...\n", "ValueError: no\n", None]
    assert found[2].marks == {"raises": "ValueError"}


@pytest.mark.parametrize(
    "wrong",
    [
        '```python\nprint("a")\n```\n\n```text\nb\n```\n',
        "<!-- example: raises ValueError -->\n```python\nx = 1\n```\n",
        "<!-- example: warns UserWarning -->\n```python\nx = 1\n```\n",
        "```py\nx = 1\n```\n",
    ],
    ids=["output", "no error", "no warning", "language"],
)
def test_wrong_pages_fail(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(wrong, encoding="utf-8")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    with pytest.raises(AssertionError):
        test_page(page)


def test_commands_are_read() -> None:
    text = "$ trawl collect X \\\n    --frames 3\nout\n$ trawl show\n"
    assert list(commands(text)) == [
        ("trawl collect X      --frames 3", "out\n"),
        ("trawl show", ""),
    ]
