"""Checks of devices that users name."""

from __future__ import annotations

from typing import Any

import torch


def check_device(name: str, value: torch.device | str | int, here: bool = True) -> torch.device:
    """Returns the device that an argument names.

    A CUDA device without a number is the first one. Only the CPU has no number.

    Args:
        name: name of the argument, for error messages.
        value: the device.
        here: True if this machine must have the device; False if it may be another machine's.

    Raises:
        TypeError: if the value has the wrong type.
        ValueError: if the value is not a device, or if this machine does not have the device.
    """
    if isinstance(value, bool) or not isinstance(value, (torch.device, str, int)):
        raise TypeError(f"{name} must be a device, such as 'cpu' or 'cuda:0', but it is {value!r}")
    try:
        device = torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"{name} {value!r} is not a device: {error}") from None
    if device.type == "cpu":
        # torch treats "cpu:0" and "cpu" as different devices, but there is only one CPU.
        return torch.device("cpu")
    reason = _why_missing(device) if here else None
    if reason is not None:
        raise ValueError(f"{name} is {value!r}, but {reason}")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", 0)
    return device


def _why_missing(device: torch.device) -> str | None:
    """Returns the reason why this machine can't use a device; None if it can."""
    if device.type == "cuda":
        # Counting does not start CUDA in this process, which would take memory of the device.
        count = torch.cuda.device_count()
        if not count:
            return "torch finds no CUDA device: pass 'cpu', or leave the argument out"
        if (device.index or 0) >= count:
            last = f" to 'cuda:{count - 1}'" if count > 1 else ""
            return f"torch finds only {_counted(count)}: pass 'cuda:0'{last}"
        return None
    try:
        torch.empty(0, device=device)
    except Exception as error:
        # Some messages go on with pages about torch itself.
        return f"torch can't use it here: {str(error).partition('. ')[0]}"
    return None


def _counted(count: int) -> str:
    return "1 CUDA device" if count == 1 else f"{count} CUDA devices"


def optional_device(name: str, value: Any, here: bool = True) -> torch.device | None:
    """Returns the device that an argument names; None for None. See :func:`check_device`."""
    return None if value is None else check_device(name, value, here)
