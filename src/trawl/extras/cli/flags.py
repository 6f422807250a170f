"""The arguments of commands that set options of collectors, from the table of options.

The table is read as text, because its import takes a second and a half, for PyTorch. Without it,
the command answers ``--help``, and reports a misspelt argument, at once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

import tyro

from trawl.docstrings import attributes, first_sentence

_KINDS: dict[str, Any] = {"bool": bool, "int": int, "str": str}
# Alternatives that only a program can pass.
_PYTHON_ONLY = re.compile(r", or (a|the) :class:`[^`]+`.*")


@dataclass(frozen=True)
class TableFlag:
    """An argument, as the table declares it; see :class:`trawl.collectors.options.Flag`.

    Attributes:
        name: name of the option.
        tags: names of the option's tags, such as ``"TUNED"``.
        kind: type of the argument.
        default: default value of the argument: False for a switch.
        metavar: placeholder for its value in the help.
        least: smallest number that is accepted.
        recorded: True if a dataset records the value, because frames depend on it.
        meaning: what the help says.
    """

    name: str
    tags: frozenset[str]
    kind: Any
    default: Any
    metavar: str | None
    least: int | None
    recorded: bool
    meaning: str


@cache
def table_flags() -> tuple[TableFlag, ...]:
    """Returns the arguments that the table declares, in its order."""
    source = (files("trawl") / "collectors" / "config.py").read_text(encoding="utf-8")
    (config,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "CollectorConfig"
    )
    return tuple(_flags(config))


def _flags(config: ast.ClassDef) -> Iterator[TableFlag]:
    entries = attributes(ast.get_docstring(config))
    for node in config.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)):
            continue
        given = {one.arg: one.value for one in node.value.keywords}
        flag, name = given.get("flag"), node.target
        if isinstance(flag, ast.Call) and isinstance(name, ast.Name):
            kind, *metavar = flag.args
            least = [ast.literal_eval(one.value) for one in flag.keywords if one.arg == "least"]
            yield TableFlag(
                name=name.id,
                tags=frozenset(one.id for one in node.value.args[2:] if isinstance(one, ast.Name)),
                kind=_KINDS[kind.id] if isinstance(kind, ast.Name) else _choices(kind),
                default=ast.literal_eval(node.value.args[0]),
                metavar=ast.literal_eval(metavar[0]) if metavar else None,
                least=least[0] if least else None,
                recorded="record" in given,
                meaning=_meaning(entries[name.id]),
            )


def _choices(given: ast.expr) -> Any:
    return Literal[ast.literal_eval(given)]


def _meaning(entry: Sequence[str]) -> str:
    """Returns an option's sentence in the words of the command line."""
    said = _PYTHON_ONLY.sub("", first_sentence(list(entry))).replace("``", "")
    said = said.removeprefix("True to ")
    return f"{said[0].upper()}{said[1:]}."


def arguments_of(name: str, flags: Sequence[TableFlag]) -> Any:
    """Makes a dataclass of arguments.

    Args:
        name: name of the dataclass.
        flags: the arguments.
    """
    return make_dataclass(
        name,
        [(one.name, _annotation(one), field(default=one.default)) for one in flags],
        frozen=True,
    )


def _annotation(flag: TableFlag) -> Any:
    if flag.kind is bool:
        return Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help=flag.meaning)]
    if flag.default is not None:
        return Annotated[flag.kind, tyro.conf.arg(metavar=flag.metavar, help=flag.meaning)]
    settings = tyro.conf.arg(
        metavar=flag.metavar, help=flag.meaning, help_behavior_hint="(default: none)"
    )
    return Annotated[flag.kind | None, settings]


def option_of(name: str) -> str:
    """Returns an argument as users write it.

    Examples:
        >>> option_of("frame_stack")
        '--frame-stack'
    """
    return f"--{name.replace('_', '-')}"
