"""The benchmark of messages from another process, over what carries them."""

import re
import subprocess
from pathlib import Path

import nursery

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_all_carry_messages_of_all_sizes() -> None:
    command = [nursery.python(), BENCHMARKS / "messages.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    sizes = [line.partition(" bytes")[0].strip() for line in lines]
    assert sizes == ["1,024", "1,048,576", "67,108,864"]
    for line in lines:
        assert re.search(r"Trawl [\d.]+ ms, process group \(gloo\) [\d.]+ ms, torch.dist", line)
