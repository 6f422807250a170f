"""One run of an example, in this process; its result is printed as JSON.

    python benchmarks/learning/once.py ppo Trawl '{"seed": 3}'

The last argument is what of the example's settings differs.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "result: "


def main(name: str, who: str, settings: str) -> None:
    """Learns, and prints."""
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]
    example = importlib.import_module(name)
    given = (
        () if who == "Trawl" else (importlib.import_module("learning.baselines").BASELINES[name],)
    )
    with tempfile.TemporaryDirectory() as folder:
        config = example.Config(**json.loads(settings))
        if name == "offline":
            config.data = Path(folder) / "cartpole-expert-v0"
        result = dataclasses.asdict(example.main(config, *given))
    result["target"] = config.target_return
    if name == "ppo":
        result["seconds"] = result["collect_seconds"] + result["learn_seconds"]
    print(MARK + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
