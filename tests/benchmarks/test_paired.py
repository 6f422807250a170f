"""How two versions are compared."""

import json
import subprocess
from pathlib import Path

import nursery
import pytest

pytestmark = pytest.mark.usefixtures("importable")

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def test_a_ratio_above_one_is_better_whatever_is_measured():
    import paired

    def run(speed, loop, waited):
        speeds = {"Trawl": (speed, False), "hand-written loop": (loop, False)}
        return {"a": {"speed": speeds, "wait": {"Trawl": (waited, True)}}}

    before, after = [run(10, 20, 4), run(10, 20, 4)], [run(15, 20, 2), run(20, 10, 8)]
    speed, wait = paired.compared(before, after)
    assert (speed["case"], speed["measure"], wait["measure"]) == ("a", "speed", "wait")
    assert speed["trawl"] == [1.5, 2.0]
    assert speed["loop"] == [1.0, 0.5]
    assert speed["to_loop_before"] == [0.5, 0.5]
    assert speed["to_loop"] == [0.75, 2.0]
    assert wait["trawl"] == [2.0, 0.5]
    assert wait["loop"] == wait["to_loop"] == []
    # A case that one version cannot run has no ratio.
    (row,) = paired.compared([{}], [{"a": {"speed": {"Trawl": (1.0, False)}}}])
    assert row["trawl"] == []


def test_only_trawl_and_the_loop_are_measured(tmp_path):
    # In a process of its own, because modules of the benchmarks have short names.
    out = tmp_path / "figures.json"
    program = [nursery.python(), "paired.py", str(ROOT), str(ROOT), "--once", str(out)]
    options = ["--cases", "frame1", "--rounds", "1", "--seconds", "0.01"]
    subprocess.run([*program, *options], cwd=BENCHMARKS, check=True, capture_output=True)
    ((case, measures),) = json.loads(out.read_text()).items()
    assert case == "frame1"
    assert set(measures["frames/s"]) == {"Trawl", "hand-written loop"}


def test_unknown_versions_and_cases_are_refused(tmp_path):
    import paired

    with pytest.raises(SystemExit, match="is not a checkout of Trawl"):
        paired.main(paired.Options(tmp_path, ROOT))
    with pytest.raises(SystemExit, match="no cases pendulums; there are pendulum, "):
        paired.main(paired.Options(ROOT, ROOT, cases=("pendulums",)))
