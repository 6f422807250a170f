"""Gymnasium environments whose packages are extras: those of ALE (Atari) and MuJoCo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import gymnasium

_EXTRAS = {"ale_py": ("ALE", "atari"), "mujoco": ("MuJoCo", "mujoco")}


def register_atari(env_id: str) -> None:
    """Registers the environments of ``ale_py``, if an id such as ``"ALE/Pong-v5"`` needs them.

    Raises:
        ImportError: if ``ale_py`` is not installed.
    """
    if env_id.startswith("ALE/") and env_id not in gymnasium.registry:
        import ale_py

        gymnasium.register_envs(ale_py)


@contextmanager
def named_extras(env_id: str) -> Iterator[None]:
    """Registers an environment if its id needs that, and names the extra if a package is missing.

    Args:
        env_id: id of the environment that is made in the context.

    Raises:
        ImportError: if a package of an extra is not installed.
    """
    try:
        register_atari(env_id)
        yield
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        # Gymnasium raises errors of its own, whose cause names the package.
        packages = {getattr(each, "name", None) for each in (error, error.__cause__)}
        for package, (title, extra) in _EXTRAS.items():
            if package in packages:
                raise ImportError(
                    f"{env_id} needs {title}: pip install 'trawl-rl[{extra}]'", name=package
                ) from error
        raise
