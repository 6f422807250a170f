"""Policies from files: programs of torch.export, TorchScript and, if allowed, pickles."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from trawl.cli.calls import Call, ProgramModule, export_call, plain_call
from trawl.cli.errors import CliError, explained

# In a program of torch.export, only records with one of these texts in their names hold pickled
# objects.
_PICKLED_RECORDS = ("custom_obj", "opaque_obj")


def load_file(path: str, env: Any, unsafe_pickle: bool) -> Any:
    """Loads the policy in a file.

    Args:
        path: path of the file.
        env: the environment that the policy is for.
        unsafe_pickle: True to load a pickle, which can run any code.

    Returns:
        A TensorDict module that reads the environment's observations and writes its actions.

    Raises:
        CliError: if the file can't be loaded, or contains no policy that fits the environment.
    """
    kind = _kind(path)
    if kind == "pickle" and not unsafe_pickle:
        raise CliError(
            f"{path} is a pickle, which can run any code when it is loaded: save the policy with "
            "torch.export.save, or pass --unsafe-pickle if you trust the file"
        )
    loaders: dict[str, Callable[[], Any]] = {
        "export": lambda: _load_program(path, unsafe_pickle),
        "script": lambda: torch.jit.load(path, map_location="cpu").eval(),
        "pickle": lambda: torch.load(path, map_location="cpu", weights_only=False),
    }
    with explained(f"{path} can't be loaded"):
        loaded = loaders[kind]()
    return _as_policy(path, loaded, env)


def _as_policy(path: str, loaded: Any, env: Any) -> Any:
    if isinstance(loaded, torch.export.ExportedProgram):
        return _wrapped(path, export_call(path, loaded, env), env)
    if not isinstance(loaded, nn.Module):
        raise CliError(
            f"{path} contains an object of type {type(loaded).__name__}, not a policy: save the "
            "whole module, not its state_dict"
        )
    loaded.eval()
    if isinstance(loaded, TensorDictModuleBase):
        return loaded
    return _wrapped(path, plain_call(path, loaded, env), env)


def _wrapped(path: str, call: Call, env: Any) -> TensorDictModule:
    program = ProgramModule(path, call, env)
    extra = [f"output{i + 1}" for i in range(program.extra)]
    in_keys = list(env.observation_spec.keys(True, True))
    return TensorDictModule(program, in_keys=in_keys, out_keys=[*env.action_keys, *extra])


def _kind(path: str) -> str:
    """Returns the kind of a file: ``"export"``, ``"script"`` or ``"pickle"``.

    The content of the file decides, because its name may be misleading.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = {Path(name).name for name in archive.namelist()}
            parts = {part for name in archive.namelist() for part in Path(name).parts[:-1]}
    except zipfile.BadZipFile:
        with open(path, "rb") as file:
            # Pickles of protocol 2 and later begin with this byte.
            if file.read(1) == b"\x80":
                return "pickle"
        code = f"; to name a function in it, pass {path}:NAME" if path.endswith(".py") else ""
        raise CliError(
            f"{path} is not a policy: it is neither a program of torch.export nor a TorchScript "
            f"archive{code}"
        ) from None
    if "archive_format" in names or "serialized_exported_program.json" in names:
        return "export"
    if "constants.pkl" in names and "code" in parts:
        return "script"
    if "data.pkl" in names:
        return "pickle"
    raise CliError(
        f"{path} is not a policy: it is a zip archive, but neither a program of torch.export nor "
        "TorchScript"
    )


def _load_program(path: str, unsafe_pickle: bool) -> Any:
    if unsafe_pickle:
        with open(path, "rb") as file, _quiet():
            return torch.export.load(file)
    with zipfile.ZipFile(path) as archive:
        pickled = [n for n in archive.namelist() if any(p in n.lower() for p in _PICKLED_RECORDS)]
    if pickled:
        raise CliError(
            f"{path} contains pickled objects ({pickled[0]}), which can run any code when they "
            "are loaded: pass --unsafe-pickle if you trust the file"
        )
    with open(path, "rb") as file, _quiet(), _weights_only():
        return torch.export.load(file)


@contextmanager
def _weights_only() -> Iterator[None]:
    """Makes torch load only tensors in the context, without falling back on pickle."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides log messages of level WARNING and below in the context.

    Failures still raise exceptions.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
