"""Makes the picture of the panel of `trawl collect`, with four workers, in docs/assets.

python docs/scripts/draw_panel.py
"""

from __future__ import annotations

import io
import time
from pathlib import Path

import torch
from record_terminal import ASSETS, MONOKAI, without_fonts
from rich.console import Console
from rich.text import Text
from tensordict.nn import TensorDictModule
from torch import nn

from trawl import MultiSyncCollector
from trawl.extras.cli.arguments import CollectArguments
from trawl.extras.cli.collect import bottleneck_finder
from trawl.observe import CollectionProgress

ENV, WORKERS, FRAMES, SECONDS = "CartPole-v1", 4, 500_000, 25.0
COMMAND = f"trawl collect {ENV} --policy policies:actor --workers {WORKERS} --frames {FRAMES}"


class Actor(nn.Module):
    """Pushes the cart in the direction in which the pole falls, more and more often."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.calls = 0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        falls = observation[..., 2] + observation[..., 3] > 0
        random = torch.rand(()) > min(1.0, self.calls / 20_000)
        return (torch.rand(()) > 0.5).long() if random else falls.long()


def actor() -> TensorDictModule:
    """Returns the policy."""
    return TensorDictModule(Actor(), in_keys=["observation"], out_keys=["action"])


def main() -> None:
    """Collects for some seconds, and writes what the panel shows then."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    args = CollectArguments(env=ENV, workers=WORKERS)
    with MultiSyncCollector(
        [ENV] * WORKERS,
        policy_factory=actor,
        create_env_kwargs={"categorical_action_encoding": True},
        frames_per_batch=1000,
        total_frames=FRAMES,
    ) as collector:
        # Its own output is not part of the picture.
        elsewhere = Console(file=io.StringIO())
        progress = CollectionProgress(
            collector, ENV, elsewhere, find_bottleneck=bottleneck_finder(args), learner="writing"
        )
        started = time.monotonic()
        for batch in collector:
            progress.update(batch)
            if time.monotonic() - started > SECONDS:
                break
            progress.render()
        console.print(Text.assemble(("$ ", "bold green"), (COMMAND, "bold")))
        console.print(progress.render())
    svg = console.export_svg(title="trawl", theme=MONOKAI)
    Path(ASSETS, "panel.svg").write_text(without_fonts(svg), encoding="utf-8")


if __name__ == "__main__":
    main()
