"""Loading of the policy that ``--policy`` names."""

from __future__ import annotations

import hashlib
import inspect
import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trawl.cli.errors import CliError, explained
from trawl.cli.references import find, load_module, split
from trawl.cli.transforms import stacked_env


def load_policy(text: str, env: Any, seed: int, unsafe_pickle: bool) -> Any:
    """Loads the policy that ``--policy`` names.

    Args:
        text: ``random``, a file, or ``module:factory``.
        env: the environment that the policy is for.
        seed: seed for the initial weights, which the factory or its module may draw at random.
        unsafe_pickle: True to load a file even if it is a pickle.

    Returns:
        A policy for a collector; None for random actions.

    Raises:
        CliError: if the policy does not exist or can't be loaded.
    """
    if text == "random":
        return None
    if os.path.isfile(text):
        from trawl.cli.programs import load_file

        return load_file(text, env, unsafe_pickle)
    what, (module, factory) = f"--policy {text}", split(text)
    if not module or (os.sep in module and not module.endswith(".py")):
        raise CliError(
            f"--policy {text}: there is no such file; pass random, a file, or module:factory"
        )
    _seed(seed)
    found = find(what, load_module(what, module), factory)
    # Seeds again, because importing the module may have drawn random numbers.
    _seed(seed)
    return _made(text, found, env)


@dataclass(frozen=True)
class PolicyLoader:
    """Loads the policy in the process that uses it, because not every policy can be pickled."""

    policy: str
    seed: int
    unsafe_pickle: bool
    frame_stack: int | None = None

    def __call__(self, env: Any) -> Any:
        """Returns the policy for an environment; None for random actions."""
        seen = stacked_env(env, self.frame_stack)
        return load_policy(self.policy, seen, self.seed, self.unsafe_pickle)


def fingerprint(text: str) -> str | None:
    """Returns the SHA-256 of a policy's file; None if the policy is not from a file."""
    if text == "random" or not os.path.isfile(text):
        return None
    with open(text, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _made(text: str, factory: Any, env: Any) -> Any:
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise CliError(f"--policy {text} must name a function, but it is {type(factory).__name__}")
    hint = (
        ". The function is called without arguments, or with the environment, and must return "
        "the policy"
    )
    with explained(f"--policy {text} failed", (Exception, SystemExit), hint):
        made = factory(env) if _takes_env(text, factory) else factory()
    if made is None:
        raise CliError(
            f"--policy {text} returned None instead of a policy; for random actions pass "
            "--policy random"
        )
    return made


def _takes_env(text: str, factory: Any) -> bool:
    """Returns True if the factory's first argument has no default, or is named ``env``."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # it has no signature to read
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in kinds]
    required = [p.name for p in positional if p.default is inspect.Parameter.empty]
    if len(required) > 1:
        raise CliError(
            f"--policy {text} must take the environment or no argument, but it takes "
            f"{', '.join(required)}"
        )
    return bool(required) or any(p.name == "env" for p in positional[:1])
