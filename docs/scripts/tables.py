"""Writes the tables that code has already into pages: options, what can't be combined, folders.

    python docs/scripts/tables.py           # tells whether the tables are up to date
    python docs/scripts/tables.py --write

The script replaces the text between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``. The section
that explains an option says so in a comment after its heading: ``<!-- explains: device, sink -->``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

from trawl.collectors import CollectorConfig, MultiConfig
from trawl.collectors.options import meanings, table
from trawl.collectors.serving_options import AsyncBatchedArguments
from trawl.docstrings import first_sentence
from trawl.extras.cli.flags import option_of, table_flags
from trawl.observe.waits import DRIVER_PARTS, LIMITS, WORKER_PARTS, Hold
from trawl.supported import TABLE, Law, Refusal

DOCS = Path(__file__).resolve().parents[1]
PACKAGE = DOCS.parent / "src" / "trawl"
EXPLAINS = re.compile(r"^#+ (?P<title>.+)\n\n<!-- explains: (?P<names>.+) -->$", re.MULTILINE)
ROLE = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")


def explained(first: str = "") -> dict[str, str]:
    """Returns the section that explains each option, as ``"page.md#section"``.

    Args:
        first: name of the page whose own sections are preferred.
    """
    found: dict[str, str] = {}
    for page in sorted(DOCS.glob("*.md"), key=lambda one: (one.name == first, one.name)):
        for section in EXPLAINS.finditer(page.read_text(encoding="utf-8")):
            anchor = re.sub(r"[^\w -]", "", section["title"].lower()).strip().replace(" ", "-")
            found |= dict.fromkeys(section["names"].split(", "), f"{page.name}#{anchor}")
    return found


def default(value: Any) -> str:
    """Returns a default as users write it."""
    if value is MISSING:
        return "required"
    if isinstance(value, Enum):
        return value.name
    return f'`"{value}"`' if isinstance(value, str) else str(value)


def options_of(cls: Any, page: str, left_out: set[str]) -> str:
    """Returns the table of a dataclass's options.

    Args:
        cls: the dataclass.
        page: name of the page that gets the table.
        left_out: options that are in another table, or are none.
    """
    entries, said, flags = table(cls), meanings(cls), {one.name for one in table_flags()}
    rows = ["| Option | Default | Meaning |", "|---|---|---|"]
    where = explained(page)
    for one in fields(cls):
        if one.name not in entries or one.name in left_out:
            continue
        link = where.get(one.name, "").removeprefix(page)
        name = f"[`{one.name}`]({link})" if link else f"`{one.name}`"
        text = ROLE.sub(r"`\1`", first_sentence(said[one.name])).replace("``", "`")
        if one.name in flags:
            text += f" (`{option_of(one.name)}`)"
        rows.append(f"| {name} | {default(one.default)} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(["", *rows, ""])


def flags_of(command: str) -> str:
    """Returns the table of a command's arguments that set options of collectors."""
    where = explained()
    rows = ["| Option | Default | Meaning |", "|---|---|---|"]
    for one in table_flags(command):
        shown = "off" if one.default is False else one.default or "none"
        name = f"`{option_of(one.name)}`"
        linked = f"[{name}]({where[one.name]})" if one.name in where else name
        rows.append(f"| {linked} | {shown} | {one.meaning[0].lower()}{one.meaning[1:-1]} |")
    return "\n".join(["", *rows, ""])


def refusal(entry: Refusal) -> str:
    """Returns the row of an entry."""
    options = ", ".join(f"`{one}`" for one in dict.fromkeys(entry.shown))
    other = entry.against if entry.needs is None else f"without {entry.needs}"
    if entry.unless is not None:
        other += f", unless there is {entry.unless}"
    return f"| {options} | {other} | {entry.why} | {entry.instead} |"


def refusals() -> str:
    """Returns the entries of each law as a table under its sentence."""
    found = ""
    for law in Law:
        rows = ["| Option | Refused with | Because | Instead |", "|---|---|---|---|"]
        rows += [refusal(entry) for entry in TABLE.values() if entry.law is law]
        found += "\n".join(["", f"**{law.value}**", "", *rows, ""])
    return found


def folders() -> str:
    """Returns the table of the folders, with the first sentence of each package's docstring."""
    rows = ["| Folder in `src/trawl` | Contents |", "|---|---|"]
    for file in sorted(PACKAGE.rglob("__init__.py")):
        folder = file.parent.relative_to(PACKAGE)
        if folder.parts:
            said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            text = said.partition("\n\n")[0].replace("\n", " ").replace("``", "`")
            rows.append(f"| `{folder}/` | {text} |")
    return "\n".join(["", *rows, ""])


def meanings_of(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table whose first column has names."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [f"| `{name}` | {' | '.join(rest)} |" for name, *rest in rows]
    return "\n".join(["", *lines, ""])


def limits() -> str:
    """Returns the table of what can limit the rate."""
    rows = (
        (f'"{name}"', one.when, one.remedy[0].lower() + one.remedy[1:])
        for name, one in LIMITS.items()
    )
    return meanings_of(("`part`", "Condition", "Usual remedy"), rows)


def holds() -> str:
    """Returns the table of the reasons why workers are idle."""
    return meanings_of(("`reason`", "Meaning"), ((one.label, one.why) for one in Hold))


def parts(head: str, meanings: Mapping[str, str]) -> str:
    """Returns the table of the parts of a time."""
    return meanings_of((head, "What takes the time"), meanings.items())


_OF_ONE = {one.name for one in fields(CollectorConfig)}
# Each table: its name in the comments, the page, and the function that writes it.
TABLES: list[tuple[str, str, Callable[[], str]]] = [
    ("refusals", "one-process.md", refusals),
    ("options", "one-process.md", lambda: options_of(CollectorConfig, "one-process.md", set())),
    ("options", "many-processes.md", lambda: options_of(MultiConfig, "many-processes.md", _OF_ONE)),
    (
        "options",
        "env-processes.md",
        lambda: options_of(
            AsyncBatchedArguments, "env-processes.md", _OF_ONE | {"create_env_fn", "policy"}
        ),
    ),
    ("collect", "cli.md", lambda: flags_of("collect")),
    ("evaluate", "cli.md", lambda: flags_of("evaluate")),
    ("tune", "cli.md", lambda: flags_of("tune")),
    ("folders", "../CONTRIBUTING.md", folders),
    ("worker-parts", "watching.md", lambda: parts("Column", WORKER_PARTS)),
    ("driver-parts", "watching.md", lambda: parts("Part", DRIVER_PARTS)),
    ("limits", "watching.md", limits),
    ("holds", "timeline.md", holds),
]


def updated(name: str, page: str, text: str) -> str:
    """Returns the text of a page with a table in its place.

    Raises:
        ValueError: if the page has no place for it.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, found, rest = page.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"the page has no {begin} with {end} after it")
    return f"{head}{begin}\n{text}\n{end}{rest.partition(end)[2]}"


def outdated(write: bool = False) -> list[str]:
    """Returns the pages whose tables are not up to date.

    Args:
        write: True to bring them up to date.
    """
    found = []
    for name, page, make in TABLES:
        path = DOCS / page
        before = path.read_text(encoding="utf-8")
        after = updated(name, before, make())
        if before != after:
            found.append(page)
            if write:
                path.write_text(after, encoding="utf-8")
    return found


def main() -> int:
    """Writes the tables, or returns 1 if they are not up to date."""
    if "--write" in sys.argv[1:]:
        outdated(write=True)
        return 0
    return int(bool(outdated()))


if __name__ == "__main__":
    sys.exit(main())
