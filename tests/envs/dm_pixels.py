"""Checks of the images of dm_control's environments; run as a program, which chooses OpenGL.

dm_control chooses its way to render when it is imported, so the program has a process of its own.
It prints "done", or the reason why nothing can be rendered.
"""

import os

os.environ["MUJOCO_GL"] = "egl"

import torch
from dm_control import suite
from dm_control.suite.wrappers import pixels

from trawl import Collector
from trawl.envs import GymEnv
from trawl.envs.dm import DMEnv

SIZE = {"height": 8, "width": 12, "camera_id": 0}


def check_wrapper(pixels_only):
    env = pixels.Wrapper(suite.load("cartpole", "swingup"), pixels_only, render_kwargs=SIZE)
    with Collector(env, frames_per_batch=3) as collector:
        batch = collector.next()
        assert collector.stats()["env_path"] == "array"
        assert batch["next", "pixels"][-1].tolist() == env.physics.render(**SIZE).tolist()
    assert batch["pixels"].shape == (3, 8, 12, 3)
    assert batch["pixels"].dtype is torch.uint8
    assert batch["pixels"].float().std() > 1
    assert ("position" in set(batch.keys())) is not pixels_only
    assert torch.equal(batch["next", "pixels"][:-1], batch["pixels"][1:])


def check_option():
    env = GymEnv(DMEnv(suite.load("cartpole", "swingup"), render_options=SIZE), from_pixels=True)
    with Collector(env, frames_per_batch=3) as collector:
        batch = collector.next()
        assert batch["next", "pixels"][-1].tolist() == env.env.render().tolist()
    assert batch["pixels"].shape == (3, 8, 12, 3)
    assert batch["next", "pixels"].float().std() > 1


def main():
    try:
        suite.load("cartpole", "swingup").physics.render(**SIZE)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    check_wrapper(True)
    check_wrapper(False)
    check_option()
    return "done"


if __name__ == "__main__":
    print(main())
