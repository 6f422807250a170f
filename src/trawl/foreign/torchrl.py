"""Private names of TorchRL, which is imported only if the user has it.

Trawl reads them in TorchRL's objects: its environments' state is in private attributes, and what
its buffers and transforms do with Trawl's objects depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trawl.foreign.torch import TENSORS

# Attributes of environments and transforms that follow from other attributes, or that refer to
# objects outside the environment.
_PARENT, _SIMULATOR, _PARTS, _INPUTS = "_parent", "_env", "_envs", "_input_spec"
_KEYS = ("_in_keys", "_out_keys")
DERIVED = frozenset(
    {
        "_cache",
        "_collector",
        "_compiled_step_and_maybe_reset",
        "_constructor_kwargs",
        "_container",
        "_output_spec",
        "_read_obs",
        "_read_reward",
        "_sync_device_val",
        "_sync_orig_device_val",
        _INPUTS,
        _PARENT,
        _SIMULATOR,
    }
)
#: Attribute of an environment that is the environment of another library in it.
SIMULATOR = _SIMULATOR
_STORAGE, _SPEC, _RESET = "_storage", "_spec", "_reset"
_ACTOR, _INIT, _RECEIVE = "_actor", "_init_weight_sync_scheme", "_receive_weights_scheme"
_MODULES = "_modules"


def storage_of(buffer: Any) -> Any:
    """Returns the storage of a replay buffer in this process; None if there is none yet.

    The public ``storage`` makes it, or asks another process.
    """
    return getattr(buffer, _STORAGE, None)


def lacks_spec(module: Any) -> bool:
    """Returns True if a module still needs the ``spec`` that it can be given.

    Some of TorchRL's modules raise an error when an unset ``spec`` is read.
    """
    slot = getattr(type(module), "spec", None)
    can_be_set = isinstance(slot, property) and slot.fset is not None
    return can_be_set and getattr(module, _SPEC, module) is None


def reset_of(env: Any) -> Callable[..., Any]:
    """Returns the method that an environment's author writes, with the arguments that it takes.

    The public ``reset`` takes any arguments, and passes them on.
    """
    found: Callable[..., Any] = getattr(env, _RESET)
    return found


def wrapped_env(env: Any) -> Any:
    """Returns the environment of another library in a wrapper, or None.

    Only some wrappers have a public name for it.
    """
    return getattr(env, _SIMULATOR, None)


def simulator_of(part: Any) -> Any:
    """Returns :func:`wrapped_env`, read in the object itself, as wrappers pass names on."""
    return vars(part).get(_SIMULATOR)


def set_simulator(part: Any, env: Any) -> None:
    """Replaces the environment of another library in a wrapper."""
    vars(part)[_SIMULATOR] = env


def parts_of_batch(batch: Any) -> Any:
    """Returns the environments of a ``SerialEnv`` in this process, or none before its start."""
    return vars(batch).get(_PARTS, ())


def modules_in(part: Any) -> Mapping[str, Any]:
    """Returns the modules in an object, if it is a module: specs and readers have none."""
    found: Mapping[str, Any] = vars(part).get(_MODULES, {})
    return found


def tensors_in(part: Any) -> dict[str, Any]:
    """Returns the own parameters and buffers of an object, by kind and name."""
    return {
        f"{kind}/{name}": value
        for kind in TENSORS
        for name, value in vars(part).get(kind, {}).items()
        if value is not None
    }


def cached_parent(transform: Any) -> Any:
    """Returns the environment that a transform has built and keeps, or None.

    The public ``parent`` builds it.
    """
    return vars(transform).get(_PARENT)


def forget_parent(transform: Any) -> None:
    """Makes a transform build its environment anew when it next needs it."""
    vars(transform)[_PARENT] = None


def own_keys(transform: Any) -> list[Any]:
    """Returns a transform's keys of inputs and of outputs as it was given them, or None.

    The public properties may derive them from an environment.
    """
    return [vars(transform).get(name) for name in _KEYS]


def input_spec(env: Any) -> Any:
    """Returns the spec that an environment itself has; the public property returns a copy."""
    return vars(env).get(_INPUTS)


def actor_of(transform: Any) -> Any:
    """Returns the actor of a ``RayModuleTransform``, which has no public name."""
    return getattr(transform, _ACTOR)


def connect_scheme(actor: Any, scheme: Any, model_id: Any) -> Any:
    """Makes the actor of a ``RayModuleTransform`` the receiver of a weight-sync scheme."""
    return getattr(actor, _INIT).remote(scheme, model_id)


def receive_weights(actor: Any) -> Any:
    """Makes the actor of a ``RayModuleTransform`` load the weights that its scheme has received."""
    return getattr(actor, _RECEIVE).remote()
