"""Rules for the imports and the private names of the library's modules."""

import ast
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from itertools import chain
from pkgutil import resolve_name

import nursery
import pytest
from sources import FILES, tree_of

import trawl

# From the bottom to the top: a module imports only from its own layer and from lower ones.
LAYERS = [
    {
        "checks",
        "computed_tensor",
        "devices",
        "docstrings",
        "errors",
        "exploration",
        "foreign",
        "interrupts",
        "keys",
        "lazy",
        "lean",
        "memory",
        "paths",
        "polling",
        "registry",
        "schema",
        "stacked_frames",
        "supported",
        "tensordicts",
        "threads",
        "versions",
    },
    {"backends"},
    {"envs"},
    {"data", "observe", "rollout", "weights"},
    {"compat"},
    {"weight_update"},
    {"collectors", "testing"},
    {""},
    {"extras"},
    {"__main__"},
]
# The same within a package; "*" are its other modules, which have no place otherwise.
INNER = {
    "rollout": [{"*"}, {"policy"}, {"steppers"}, {"stages"}, {"writers"}, {"loop"}, {"ready"}],
    "collectors": [{"driver", "watch"}, {"local"}, {"workers"}],
}

# Names of other libraries that are documented in spite of their names.
DOCUMENTED = {
    "_exit": "os: ends a process at once",
    "_getframe": "sys: finds the caller without reading source files",
    "_asdict": "named tuples",
    "_replace": "named tuples",
}


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules of the library that a module imports, at its beginning or later."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom) and node.module in FILES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else node.module


@functools.cache
def imports() -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {name: set(imported(tree_of(name))) - {name} for name in FILES}


def layer_of(module: str) -> int:
    package = module.split(".")[1] if "." in module else ""
    return next(number for number, layer in enumerate(LAYERS) if package in layer)


def test_no_module_imports_itself_by_a_detour():
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_imports_run_downwards():
    upward = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in sorted(others)
        if layer_of(other) > layer_of(name)
    ]
    assert not upward


@pytest.mark.parametrize("package", INNER)
def test_imports_within_a_package_run_downwards(package: str) -> None:
    places = {part: number for number, layer in enumerate(INNER[package]) for part in layer}
    inner = {name: name.split(".")[2:3] for name in FILES if name.split(".")[1:2] == [package]}
    found = {name: places.get("".join(part), places.get("*")) for name, part in inner.items()}
    found = {name: place for name, place in found.items() if place is not None}
    assert set(found.values()) == set(places.values())
    upward = [
        f"{name} imports {other}"
        for name, place in found.items()
        for other in imports()[name]
        if found.get(other, place) > place
    ]
    assert not upward


# The environments for tests are of all kinds, by the names that are public.
NEEDING_EXTRAS = ["extras"], ["testing"], ["__main__"]


def test_each_module_can_be_imported_without_extras():
    """Modules with lazy names, too."""
    others = [name for name in FILES if name.split(".")[1:2] not in NEEDING_EXTRAS]
    script = f"""
        import importlib
        import sys

        for name in {others}:
            importlib.import_module(name)
        found = [name for name in sys.modules if name.startswith("trawl.extras")]
        assert not found, found
    """
    made = nursery.run(script, within=nursery.bare())
    assert made.returncode == 0, made.stderr


PUBLIC = sorted(name for name, path in FILES.items() if path.with_suffix(".pyi").exists())


@pytest.mark.parametrize("name", PUBLIC)
def test_type_checkers_see_the_names_of_a_module(name):
    stub = ast.parse(FILES[name].with_suffix(".pyi").read_text())
    found = {
        alias.asname: f"{node.module}:{alias.name}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    module = importlib.import_module(name)
    assert found.keys() == set(module.__all__)
    assert all(getattr(module, one) is resolve_name(home) for one, home in found.items())


@pytest.mark.parametrize("name", [*PUBLIC, "trawl.backends", "trawl.testing"])
def test_completion_shows_no_helpers(name):
    module = importlib.import_module(name)
    shown = {one for one in dir(module) if not one.startswith("__")}
    assert shown >= set(module.__all__)
    # Besides, public modules that are loaded.
    for one in shown.difference(module.__all__):
        assert hasattr(sys.modules[f"{name}.{one}"], "__all__")


def test_names_of_compat_are_only_passed_on():
    """What the library does needs none of them; only public modules have them, in ``__all__``."""
    used = []
    for name in FILES:
        if ".compat" in name:
            continue
        tree = tree_of(name)
        listed = {
            constant.value
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            for constant in ast.walk(node.value)
            if isinstance(constant, ast.Constant)
        } | {"warn_of"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                used += [f"{name}: {one.name}" for one in node.names if ".compat" in one.name]
            elif isinstance(node, ast.ImportFrom) and ".compat" in (node.module or ""):
                used += [f"{name}: {one.name}" for one in node.names if one.name not in listed]
    assert not used


def is_own(node: ast.expr) -> bool:
    """Whether an expression is the object or the class that the code belongs to."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_uses(tree: ast.Module) -> Iterator[ast.Attribute]:
    """The places where a private name of another object is used."""
    for node in ast.walk(tree):
        named = isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)
        if named and not is_own(node.value):
            yield node


def defined(tree: ast.Module) -> set[str]:
    """The private attributes and functions that a module defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if is_own(node.value) else set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def strangers(name: str) -> Iterator[str]:
    """The places in a module that use or import private names of another module or library."""
    tree = tree_of(name)
    own = defined(tree)
    for use in private_uses(tree):
        if use.attr not in own and use.attr not in DOCUMENTED:
            yield f"{name}:{use.lineno}: {ast.unparse(use)}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [part for part in (node.module or "").split(".") if part.startswith("_")]
            names += [alias.name for alias in node.names if re.match("_[a-z]", alias.name)]
            yield from (f"{name}:{node.lineno}: {one}" for one in names if one != "__future__")


# Texts that are no private attributes of another library.
TEXTS = {
    "ends of names of figures": ["_share", "_seconds", "_reason"],
    "ends and beginnings of names of attributes": ["_spec", "_available", "_do_"],
    "keys of entries": ["_reset", "_extra_state", "_frames", "_raw", "_own", "_env", "_cut"],
    "masks of infos, as Gymnasium documents them": ["_final_obs", "_final_info"],
    "attributes that subclasses without __init__ have, too": ["_reached", "_registered", "_hooks"],
}


@functools.cache
def known() -> set[str]:
    """The private names that the library itself defines, and texts that are none."""
    found = {*chain.from_iterable(TEXTS.values()), *DOCUMENTED}
    return found.union(*(defined(tree_of(name)) for name in FILES))


def strings(tree: ast.Module) -> Iterator[ast.Constant]:
    """The texts in a module that may be private names, outside of formatted texts."""
    inside = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
        if isinstance(part, ast.Constant)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and node not in inside and re.fullmatch("_[a-z][a-z_0-9]+", node.value):
            yield node


# What is in `trawl.foreign` has a test in `tests/foreign`.
OURS = [name for name in FILES if not name.startswith("trawl.foreign")]


def test_private_names_stay_in_their_module():
    assert not [use for name in OURS for use in strangers(name)]


def test_no_text_names_a_private_attribute_of_another_library():
    found = [
        f"{name}:{node.lineno}: {node.value}"
        for name in OURS
        for node in strings(tree_of(name))
        if node.value not in known()
    ]
    assert not found


def test_the_version_is_that_of_the_installed_package():
    assert trawl.__version__ == metadata.version("trawl-rl")
