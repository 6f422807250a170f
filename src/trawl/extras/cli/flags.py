"""The arguments of commands that set options of collectors, from the table of options.

The table is read as text, because its import takes a second and a half, for PyTorch. Without it,
the command answers ``--help``, and reports a misspelt argument, at once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

import tyro

from trawl.docstrings import entries, first_sentence

_KINDS: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str}
# Alternatives that only a program can pass.
_PYTHON_ONLY = re.compile(r", or (a|the) :class:`[^`]+`.*")


@dataclass(frozen=True)
class TableFlag:
    """An argument, as the table declares it; see :class:`trawl.collectors.options.Flag`.

    Attributes:
        name: name of the option.
        commands: commands that have the argument.
        kind: type of the argument.
        default: default value of the argument: False for a switch.
        metavar: placeholder for its value in the help.
        least: smallest number that is accepted.
        meaning: what the help says.
    """

    name: str
    commands: tuple[str, ...]
    kind: Any
    default: Any
    metavar: str | None
    least: int | None
    meaning: str


@cache
def table_flags(command: str | None = None) -> tuple[TableFlag, ...]:
    """Returns the arguments that the table declares, in its order.

    Args:
        command: name of a command; None for the arguments of all commands.
    """
    if command is not None:
        return tuple(one for one in table_flags() if command in one.commands)
    try:
        source = (files("trawl") / "collectors" / "config.py").read_text(encoding="utf-8")
    except OSError:  # compiled, without its source
        return tuple(imported_flags())
    (config,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "CollectorConfig"
    )
    return tuple(_read(config))


def _read(config: ast.ClassDef) -> Iterator[TableFlag]:
    said = entries(ast.get_docstring(config), "Attributes")
    for node in config.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)):
            continue
        flag = next((one.value for one in node.value.keywords if one.arg == "flag"), None)
        if isinstance(flag, ast.Call) and isinstance(node.target, ast.Name):
            names = ("commands", "kind", "metavar", "least")
            given = dict(zip(names, flag.args, strict=False))
            given |= {str(one.arg): one.value for one in flag.keywords}
            values: dict[str, Any] = {
                name: one.id if isinstance(one, ast.Name) else ast.literal_eval(one)
                for name, one in given.items()
            }
            default = ast.literal_eval(node.value.args[0])
            annotation = values.pop("kind", None) or ast.unparse(node.annotation)
            yield _flag(node.target.id, annotation, default, said, **values)


def imported_flags() -> Iterator[TableFlag]:
    """Yields the same arguments from the table itself."""
    from trawl.collectors import CollectorConfig
    from trawl.collectors.options import meanings, table

    said = meanings(CollectorConfig)
    declared = {one.name: one for one in fields(CollectorConfig)}
    for name, entry in table(CollectorConfig).items():
        flag, one = entry.flag, declared[name]
        if flag is not None:
            annotation = str(one.type) if flag.kind is None else flag.kind.__name__
            values: dict[str, Any] = {
                "commands": flag.commands,
                "metavar": flag.metavar,
                "least": flag.least,
            }
            yield _flag(name, annotation, one.default, said, **values)


def _flag(
    name: str,
    annotation: str,
    default: Any,
    said: Mapping[str, Sequence[str]],
    commands: tuple[str, ...],
    metavar: str | None = None,
    least: int | None = None,
) -> TableFlag:
    choices = re.search(r"Literal\[(.*)\]", annotation)
    if choices is not None:
        kind: Any = Literal[ast.literal_eval(f"({choices[1]},)")]
    else:
        kind = next(_KINDS[word] for word in re.findall(r"\w+", annotation) if word in _KINDS)
    return TableFlag(name, commands, kind, default, metavar, least, _meaning(said[name]))


def _meaning(entry: Sequence[str]) -> str:
    """Returns an option's sentence in the words of the command line."""
    said = _PYTHON_ONLY.sub("", first_sentence(entry)).replace("``", "")
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
