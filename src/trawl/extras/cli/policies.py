"""Loading of the policy that ``--policy`` names."""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import random
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from torch.nn import functional

from trawl.envs.specs import MultiOneHot
from trawl.extras.cli.errors import CliError, describe, explained
from trawl.extras.cli.references import find, load_module, split
from trawl.extras.cli.transforms import stacked_env
from trawl.foreign.torch import tree_unflatten
from trawl.keys import as_key, show_key


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
        from trawl.extras.cli.policies import load_file

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


# Maps observations to the program's outputs, both with the environment's batch size.
Call = Callable[..., tuple[Tensor, ...]]


def export_call(path: str, program: Any, env: Any) -> Call:
    """Returns a function that calls a ``torch.export`` program with observations.

    The observations are passed in the shapes for which the program was exported.

    Args:
        path: path of the program's file, for error messages.
        program: the program, as ``torch.export.load`` returns it.
        env: the environment.

    Raises:
        CliError: if the program's inputs do not fit the environment's observations.
    """
    specs = _observations(env)
    inputs = _inputs(path, program)
    if len(inputs) != len(specs):
        raise CliError(
            f"{path} takes {len(inputs)} inputs, but the environment has {len(specs)} "
            f"observations: {', '.join(show_key(key) for key in specs)}"
        )
    batch = env.batch_size
    leads = set()
    for (name, shape), (key, spec) in zip(
        [(name, value.shape) for name, value in inputs], specs.items(), strict=True
    ):
        single = spec.shape[len(batch) :]
        lead, tail = shape[: max(0, len(shape) - len(single))], shape[len(shape) - len(single) :]
        fits = len(lead) <= 1 and len(shape) >= len(single)
        if not fits or any(_fixed(a) and a != b for a, b in zip(tail, single, strict=True)):
            raise CliError(
                f"{path} takes {name} of shape {_show(shape)}, but the environment's observation "
                f"{show_key(key)} has shape {tuple(single)}"
            )
        leads.add(None if not lead else int(lead[0]) if _fixed(lead[0]) else -1)
    if len(leads) > 1:
        raise CliError(
            f"{path} takes some inputs in batches and others as single observations: export it "
            "with all inputs in batches, or none"
        )
    call = _called(program.module(), [value.dtype for _, value in inputs])
    return _arranged(path, call, leads.pop(), batch)


def _arranged(path: str, call: Call, lead: int | None, batch: torch.Size) -> Call:
    """Adapts a call to observations of the environment's batch size.

    Args:
        path: path of the program's file, for error messages.
        call: function that calls the program with inputs in the program's own shapes.
        lead: size of the batches that the program takes; None for single observations, -1 for
            batches of any size.
        batch: the batch size of the environment.
    """
    count = max(1, batch.numel())
    if lead is None:
        return _by_row(call) if batch else call
    if lead in (-1, count):
        return call if batch else _as_batch(call)
    if lead == 1:
        return _by_row(_as_batch(call))
    raise CliError(
        f"{path} was exported for batches of exactly {lead} observations, but there "
        f"{'is 1 environment' if count == 1 else f'are {count} environments'}: export it with a "
        f"dynamic first dimension (dynamic_shapes=), or pass --envs {lead}"
    )


def plain_call(path: str, module: nn.Module, env: Any) -> Call:
    """Returns a function that calls a module whose input shapes are not known.

    The function calls the module with batches if this works, or else with single observations.

    Args:
        path: path of the module's file, for error messages.
        module: the module.
        env: the environment.

    Raises:
        CliError: if the module takes neither a batch of observations nor a single one.
    """
    dtypes = [p.dtype for p in module.parameters() if p.is_floating_point()]
    dtype = dtypes[0] if dtypes else None
    floats = [dtype if s.dtype.is_floating_point else None for s in _observations(env).values()]
    call, batch = _called(module, floats), env.batch_size
    first: Exception | None = None
    for lead in (-1, None):
        arranged = _arranged(path, call, lead, batch)
        try:
            ProgramModule(path, arranged, env)
            return arranged
        except CliError as error:
            first = first or error
    assert first is not None
    raise first


class ProgramModule(nn.Module):
    """Module that maps observations to actions with a program.

    The constructor checks the program by calling it with zeros.

    Args:
        path: path of the program's file, for error messages.
        call: function that calls the program with the environment's observations.
        env: the environment.

    Attributes:
        extra: number of outputs besides the actions.

    Raises:
        CliError: if the call fails, or the outputs are not actions of the environment.
    """

    def __init__(self, path: str, call: Call, env: Any) -> None:
        super().__init__()
        self._call = call
        zeros = [spec.zero() for spec in _observations(env).values()]
        try:
            with torch.no_grad():
                outputs = call(*zeros)
        except Exception as error:
            shapes = ", ".join(str(tuple(zero.shape)) for zero in zeros)
            raise CliError(
                f"{path} can't be called with observations of shape {shapes}: {describe(error)}"
            ) from error
        keys = env.action_keys
        if len(outputs) < len(keys):
            raise CliError(
                f"{path} returns {len(outputs)} outputs, but the environment takes {len(keys)} "
                f"actions: {', '.join(show_key(as_key(key)) for key in keys)}"
            )
        self.extra = len(outputs) - len(keys)
        self._adapt = [
            _action(path, show_key(as_key(key)), output, env.full_action_spec[key], env.batch_size)
            for key, output in zip(keys, outputs, strict=False)
        ]

    def forward(self, *observations: Tensor) -> Any:
        """Returns the actions, and any other outputs of the program."""
        outputs = list(self._call(*observations))
        for index, adapt in enumerate(self._adapt):
            if adapt is not None:
                outputs[index] = adapt(outputs[index])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _action(
    path: str, name: str, output: Tensor, spec: Any, batch: torch.Size
) -> Callable[[Tensor], Tensor] | None:
    """Returns a function that converts an output to an action.

    Returns None if no conversion is needed.
    """
    shape, dtype = output.shape, output.dtype
    whole = not dtype.is_floating_point and not dtype.is_complex
    if isinstance(spec, MultiOneHot):
        sizes = spec.nvec
        indices = torch.Size((*batch, len(sizes)))
        if whole and (shape == indices or (shape == batch and len(sizes) == 1)):
            return lambda value: _one_hot(value.reshape(indices), sizes).to(spec.dtype)
        if not whole:
            raise CliError(
                f"{path} returns {dtype} for {name}, which is a choice among {sizes}: return its "
                "index (for example by argmax), or a one-hot vector of integers"
            )
    alike = dtype.is_floating_point == spec.dtype.is_floating_point
    if shape != spec.shape or not alike:
        raise CliError(
            f"{path} returns {dtype} of shape {tuple(shape)} for {name}, but the environment "
            f"takes {spec.dtype} of shape {tuple(spec.shape)}"
        )
    return None if dtype == spec.dtype else lambda value: value.to(spec.dtype)


def _one_hot(indices: Tensor, sizes: Sequence[int]) -> Tensor:
    parts = [functional.one_hot(indices[..., i].long(), n) for i, n in enumerate(sizes)]
    return torch.cat(parts, -1)


def _observations(env: Any) -> dict[tuple[str, ...], Any]:
    """Returns the specs of the observations, in the order in which a program takes them."""
    return {as_key(key): spec for key, spec in env.observation_spec.items(True, True)}


def _called(function: Callable[..., Any], dtypes: Sequence[torch.dtype | None]) -> Call:
    """Returns a function that casts its inputs, and returns the outputs as a tuple of tensors.

    Each input is cast to its dtype in ``dtypes``, or is not cast if this dtype is None.
    """

    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = (x if d is None else x.to(d) for x, d in zip(inputs, dtypes, strict=True))
        outputs = function(*given)
        outputs = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
        for output in outputs:
            if not isinstance(output, Tensor):
                raise TypeError(f"it returned {type(output).__name__} instead of a tensor")
        return outputs

    return call


def _as_batch(call: Call) -> Call:
    def batched(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(output.squeeze(0) for output in call(*(x.unsqueeze(0) for x in inputs)))

    return batched


def _by_row(call: Call) -> Call:
    def rows(*inputs: Tensor) -> tuple[Tensor, ...]:
        each = [call(*row) for row in zip(*inputs, strict=True)]
        return tuple(torch.stack(parts) for parts in zip(*each, strict=True))

    return rows


def _inputs(path: str, program: Any) -> list[tuple[str, Any]]:
    """Returns the name of each input of the program, and a tensor of its shape and dtype."""
    by_name = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    found = [by_name.get(name) for name in program.graph_signature.user_inputs]
    values = [None if node is None else node.meta.get("val") for node in found]
    positional, keywords = tree_unflatten(values, program.call_spec.in_spec)
    if keywords or not all(isinstance(value, Tensor) for value in positional):
        raise CliError(
            f"{path} must take its observations as positional tensors: export it with "
            "torch.export.export(module, (observation, ...))"
        )
    return [(str(node.name), value) for node, value in zip(found, values, strict=True) if node]


def _fixed(size: Any) -> bool:
    return isinstance(size, int)


def _show(shape: Sequence[Any]) -> str:
    parts = [str(n) if _fixed(n) else "any" for n in shape]
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
