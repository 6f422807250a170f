"""Objects that the command line names as ``module:name`` or ``path/to/file.py:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import operator
import os
import sys
from types import ModuleType
from typing import Any

from trawl.cli.errors import CliError, describe, message_of


def search_here() -> None:
    """Adds the current folder to the module search path, as ``python -m`` does."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())


def split(text: str) -> tuple[str, str]:
    """Returns the module (or file) and the name in it; without a colon the module is empty."""
    module, _, name = text.rpartition(":")
    return module, name


def load_module(what: str, module: str) -> ModuleType:
    """Imports a module, or runs a file as one, once in a process.

    Args:
        what: beginning of error messages, such as the option that names the module.
        module: name of the module, or a path that ends with ``.py``.

    Raises:
        CliError: if the module does not exist, or its import fails.
    """
    try:
        return _from_file(module) if module.endswith(".py") else importlib.import_module(module)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise CliError(f"{what}: {message_of(error)} (here, or installed)") from error
    except (Exception, SystemExit) as error:
        raise CliError(f"{what}: importing {module} failed: {describe(error)}") from error


def find(what: str, module: ModuleType, name: str) -> Any:
    """Returns the object of this name in a module; ``what`` begins the error message.

    Raises:
        CliError: if there is no such object.
    """
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as error:
        raise CliError(f"{what}: {message_of(error)}") from error


def _from_file(path: str) -> ModuleType:
    path = os.path.realpath(path)
    folder, file = os.path.split(path)
    # A unique name, because the file may have the name of another module.
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    name = f"trawl_file_{digest}_{file.removesuffix('.py')}"
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
