"""The device on which the tests of this folder run.

It is ``DEVICE`` of the environment, or else the first GPU, or else the CPU, on which the same tests
run in miniature.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device(
    os.environ.get("DEVICE") or ("cuda:0" if torch.cuda.is_available() else "cpu")
)
ON_GPU = DEVICE.type == "cuda"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
CPU = torch.device("cpu")


def few(many: int, in_miniature: int) -> int:
    """Returns a number for the device: `many` on a GPU."""
    return many if ON_GPU else in_miniature
