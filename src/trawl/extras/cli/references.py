"""Lookup of objects named ``module:name`` or ``path/to/file.py:name`` on the command line."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import operator
import os
import sys
from types import ModuleType
from typing import Any

from trawl.checks import did_you_mean
from trawl.extras.cli.errors import CliError, describe, message_of

# Beginning of the names of modules that were loaded from files.
_PREFIX = "trawl_file_"


def search_here() -> None:
    """Adds the current folder to the module search path, as ``python -m`` does."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())


def split(text: str) -> tuple[str, str]:
    """Splits ``module:name`` into the module or file, and the name.

    If the text has no colon, the module is the empty string.
    """
    module, _, name = text.rpartition(":")
    return module, name


def load_module(what: str, module: str) -> ModuleType:
    """Imports a module, or loads a file as a module, only once in a process.

    Args:
        what: beginning of error messages, such as the option that names the module.
        module: name of the module, or a path that ends with ``.py``.

    Raises:
        CliError: if the module does not exist, or its import fails.
    """
    try:
        return _from_file(module) if module.endswith(".py") else importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if _is_missing(module, error):
            reason = f"{message_of(error)} (not in this folder, and not installed)"
        else:
            reason = f"importing {module} failed: {describe(error)}"
        raise CliError(f"{what}: {reason}") from error


def _is_missing(module: str, error: BaseException) -> bool:
    """Returns True if the module itself, or a package that contains it, was not found."""
    if isinstance(error, ModuleNotFoundError):
        return f"{module}.".startswith(f"{error.name}.")
    return isinstance(error, FileNotFoundError) and error.filename == os.path.realpath(module)


def find(what: str, module: ModuleType, name: str) -> Any:
    """Returns the object with this name in a module.

    Args:
        what: beginning of the error message.
        module: the module.
        name: name of the object, which may contain dots.

    Raises:
        CliError: if the module has no such object.
    """
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as error:
        reason = message_of(error)
        if module.__name__.startswith(_PREFIX):
            # The user knows the file, but not the name of its module.
            reason = reason.replace(f"module {module.__name__!r}", str(module.__file__))
        known = [one for one in vars(module) if not one.startswith("_")]
        raise CliError(f"{what}: {reason}{did_you_mean([name], known, 1)}") from error


def _from_file(path: str) -> ModuleType:
    path = os.path.realpath(path)
    folder, file = os.path.split(path)
    # A unique name, because another module may have the name of the file.
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    name = f"{_PREFIX}{digest}_{file.removesuffix('.py')}"
    if name in sys.modules:
        return sys.modules[name]
    if folder not in sys.path:
        # The file can import the modules beside it, as if it were run as a script.
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
