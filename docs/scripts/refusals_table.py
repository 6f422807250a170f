"""Writes the tables of what can't be combined into docs/one-process.md.

    python docs/scripts/refusals_table.py           # tells whether the table is up to date
    python docs/scripts/refusals_table.py --write

The script replaces the text between ``<!-- refusals:begin -->`` and ``<!-- refusals:end -->``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trawl.supported import TABLE, Law, Refusal

PAGE = Path(__file__).resolve().parents[1] / "one-process.md"
BEGIN, END = "<!-- refusals:begin -->", "<!-- refusals:end -->"


def row(entry: Refusal) -> str:
    """Returns the row of an entry."""
    options = ", ".join(f"`{one}`" for one in dict.fromkeys(entry.shown))
    other = entry.against if entry.needs is None else f"without {entry.needs}"
    if entry.unless is not None:
        other += f", unless there is {entry.unless}"
    return f"| {options} | {other} | {entry.why} | {entry.instead} |"


def updated(page: str) -> str:
    """Returns the text of the page with the present tables."""
    head, _, rest = page.partition(BEGIN)
    tail = rest.partition(END)[2]
    return f"{head}{BEGIN}\n{''.join(map(section, Law))}\n{END}{tail}"


def section(law: Law) -> str:
    """Returns the entries of a law as a table under its sentence."""
    rows = ["| Option | Refused with | Because | Instead |", "|---|---|---|---|"]
    rows += [row(entry) for entry in TABLE.values() if entry.law is law]
    return "\n".join(["", f"**{law.value}**", "", *rows, ""])


def main() -> int:
    """Writes the table, or returns 1 if it is not up to date."""
    before = PAGE.read_text(encoding="utf-8")
    after = updated(before)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(after, encoding="utf-8")
        return 0
    return int(before != after)


if __name__ == "__main__":
    sys.exit(main())
