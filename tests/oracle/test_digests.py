"""Bytes of batches: they stay the same for each kind of environment, from version to version.

The oracle says what the values must be. The digests here also have the order of the entries, their
dtypes and shapes, the ids of trajectories, and every bit. ``python -m tests.oracle.test_digests``
writes ``digests.json`` anew, after a change that is meant to change them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase, is_non_tensor

from tests.oracle.cases import Case, collector_of
from trawl.stacked_frames import StackedFrames
from trawl.supported import refused
from trawl.testing.faces import FACES
from trawl.testing.oracle import Options

FILE = Path(__file__).with_name("digests.json")
# No normalised values: their last bits depend on the machine's way to add numbers.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"levels": True, "masks": True},
    "options": {
        "options": Options(
            frames_per_batch=9,
            max_frames_per_traj=2,
            frame_stack=2,
            is_init=True,
            policy_version=True,
            restart=True,
        ),
        "failures": True,
    },
}


def cases() -> Iterator[tuple[str, str]]:
    for face, kind in FACES.items():
        if face == "torchrl_list":
            # In TorchRL's SerialEnv, the order of the entries depends on hashes.
            continue
        for name in VARIANTS:
            options = {"max_frames_per_traj": 2, "frame_stack": 2, "on_env_error": "restart"}
            if name == "plain" or not refused(options, kind.traits):
                yield face, name


def parts(batch: TensorDictBase, path: tuple[str, ...] = ()) -> Iterator[bytes]:
    """Yields all that a batch consists of."""
    for key in batch.keys():  # noqa: SIM118 - iterating a TensorDict gives its rows
        value: Any = batch.get(key)
        yield repr((*path, key)).encode()
        if is_non_tensor(value):
            yield repr(value.tolist()).encode()
        elif isinstance(value, TensorDictBase):
            yield from parts(value, (*path, key))
        else:
            dense = value.to_dense() if isinstance(value, StackedFrames) else value
            yield f"{dense.dtype} {tuple(dense.shape)}".encode()
            yield dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(face: str, name: str) -> str:
    found = hashlib.blake2b(digest_size=8)
    with collector_of(Case(face, **VARIANTS[name])) as collector:
        for batch in islice(collector, 3):
            if ("collector", "mask") in batch.keys(True):
                # The other rows may have any values.
                batch = batch[batch["collector", "mask"]]
            for part in parts(batch):
                found.update(part)
    return found.hexdigest()


@pytest.mark.parametrize(("face", "name"), [*cases()])
@pytest.mark.filterwarnings("ignore")
def test_the_bytes_of_batches_stay_the_same(face: str, name: str) -> None:
    if FACES[face].needs:
        pytest.importorskip(FACES[face].needs or "")
    assert digest(face, name) == json.loads(FILE.read_text())[f"{face} {name}"]


if __name__ == "__main__":
    written = {f"{face} {name}": digest(face, name) for face, name in cases()}
    FILE.write_text(json.dumps(written, indent=1) + "\n")
