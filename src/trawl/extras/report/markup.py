"""Values as text, and text as HTML and SVG: all text is escaped, unless it is markup already.

Values come from a record, which may be a stranger's.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

from trawl.extras.cli.errors import printable, shown

# Larger integers can't be converted to floats exactly, and no figure of a collection needs them.
_LARGEST = 2**63
# Elements without content and end tag.
_VOID = {"hr", "link", "meta"}
# Number of characters, with those of tags, from which on a text in a table is broken into lines.
_LONG = 60


def is_number(value: object) -> TypeGuard[float]:
    """Returns True for a finite number of moderate size that is not a bool."""
    if type(value) is int:
        return abs(value) < _LARGEST
    return type(value) is float and math.isfinite(value)


def as_text(value: Any) -> str:
    """Returns a value as text for a table.

    Examples:
        >>> [as_text(value) for value in (None, True, 12000, 0.25, "a", [1, 2])]
        ['none', 'yes', '12,000', '0.25', 'a', '[1, 2]']
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_number(value):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
    return shown(value)


class Markup(str):
    """Text that is HTML or SVG already, and is not escaped again."""

    __slots__ = ()


def markup(content: str) -> Markup:
    """Returns a text as markup; unprintable characters are replaced by their escape codes.

    Examples:
        >>> markup("a < b")
        'a &lt; b'
    """
    return content if isinstance(content, Markup) else Markup(html.escape(printable(content)))


def joined(parts: Iterable[str]) -> Markup:
    """Returns several parts, one after the other."""
    return Markup("".join(map(markup, parts)))


def tag(name: str, *content: str, **attributes: str | float | bool | None) -> Markup:
    """Returns an element.

    Args:
        name: name of the element.
        *content: text, which is escaped, and markup.
        **attributes: attributes of the element. In their names, an underscore at the end is
            dropped, and the others stand for hyphens. True stands for an attribute without a value,
            False and None for no attribute.

    Examples:
        >>> tag("p", "1 < 2", class_="note", hidden=True)
        '<p class="note" hidden>1 &lt; 2</p>'
    """
    parts = [name]
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(attribute)
        elif value is not None and value is not False:
            parts.append(f'{attribute}="{html.escape(printable(str(value)))}"')
    opening = f"<{' '.join(parts)}>"
    return Markup(opening if name in _VOID else f"{opening}{joined(content)}</{name}>")


def section(name: str, title: str, *content: str) -> Markup:
    """Returns a section of the page with its heading.

    Args:
        name: id of the section.
        title: its heading.
        *content: its content.
    """
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, *content, id=name, aria_labelledby=f"{name}-title")


def note(*content: str) -> Markup:
    """Returns a paragraph that says why something is absent or incomplete."""
    return tag("p", *content, class_="note")


def table(
    name: str, caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1
) -> Markup:
    """Returns a table in a region of its own, which scrolls if the page is narrow.

    Args:
        name: id of the caption.
        caption: caption of the table, which names its region as well.
        heads: headings of the columns.
        rows: cells of each row; the first cell is the heading of the row.
        text: number of columns, from the left, with text; the others have numbers.
    """
    kinds = [None if index < text else "number" for index in range(len(heads))]
    head = (tag("th", h, scope="col", class_=kind) for h, kind in zip(heads, kinds, strict=True))
    body = (
        tag(
            "tr",
            tag("th", row[0], scope="row", class_=_length(row[0])),
            *(
                tag("td", cell, class_=kind or _length(cell))
                for cell, kind in zip(row[1:], kinds[1:], strict=True)
            ),
        )
        for row in rows
    )
    content = (tag("caption", caption, id=name), tag("thead", tag("tr", *head)))
    return tag(
        "div",
        tag("table", *content, tag("tbody", *body)),
        class_="scroll",
        role="region",
        tabindex=0,
        aria_labelledby=name,
    )


def _length(cell: str) -> str | None:
    """Returns the class of cells with long texts, which are broken into lines."""
    return "long" if len(cell) > _LONG else None


def details(summary: str, *content: str) -> Markup:
    """Returns content that a reader opens by its summary."""
    return tag("details", tag("summary", summary), *content)


def figure(name: str, caption: str, *content: str) -> Markup:
    """Returns a figure with its caption.

    Args:
        name: id of the caption.
        caption: text that says what the figure shows.
        *content: drawing, legend and data of the figure.
    """
    return tag("figure", tag("figcaption", caption, id=name), *content, aria_labelledby=name)
