"""The script that writes the measured speeds into the pages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = "above\n\n<!-- speed:begin -->\nold\n<!-- speed:end -->\n\nbelow\n"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "speed_table", ROOT / "docs" / "scripts" / "speed_table.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contender(name: str, speeds: list[float], ratio: float | None, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "note": "",
        "missing": None,
        "frames_per_second": speeds,
        "goal": None,
        "trawl_times_as_fast": ratio,
        "speed_to_hand": None,
        **more,
    }


@pytest.fixture
def results() -> dict[str, Any]:
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"processor": "a processor", "cores": 4, "python": "3.11.7", "load": [0, 0, 0]},
        "versions": {"torch": "2.9", "envpool": None},
        "settings": {"rounds": 3, "seconds": 0.7, "clock": "wall"},
        "cases": {
            "pendulum": {
                "title": "1 Pendulum",
                "contenders": [
                    contender("Trawl", [20_000.0, 10_000.0, 30_000.0], 1.0),
                    contender("hand-written loop", [20_000.0, 20_000.0, 20_000.0], 1.0),
                    contender("TorchRL", [4_000.0, 4_000.0, 4_000.0], 5.0, note="as it comes"),
                    contender("TorchRL, faster", [8_000.0, 8_000.0, 8_000.0], 2.5),
                    contender("Tianshou", [], None, missing="not installed"),
                ],
            },
            "images": {
                "title": "images",
                "contenders": [
                    contender("Trawl", [1000.0, 1000.0, 1000.0], 1.0),
                    contender("hand-written loop", [2000.0, 2000.0, 2000.0], 0.5),
                ],
            },
        },
        "import": [
            {"statement": "import trawl", "median_ms": 12.3},
            {"statement": "import gone", "median_ms": None},
        ],
    }


@pytest.fixture
def multi(results: dict[str, Any]) -> dict[str, Any]:
    def case(title: str, measures: dict[str, Any], **rounds: dict[str, list[float]]) -> Any:
        return {
            "title": title,
            "measures": measures,
            "contenders": [
                {"name": name, "note": f"note of {name}", "missing": None, "rounds": values}
                for name, values in rounds.items()
            ],
        }

    speed = {"speed": {"unit": "frames/s", "less": False, "digits": 0}}
    cost = {"cpu": {"unit": "ms", "less": True, "digits": 2}}
    counted = speed | {"first_batch": {"unit": "s", "less": True, "digits": 2}}
    return {
        **{key: results[key] for key in ("date", "machine", "versions")},
        "settings": {"rounds": 3, "seconds": 0.7},
        "cases": {
            "sync2": case(
                "2 workers",
                speed,
                Trawl={"speed": [2000.0, 1000.0, 3000.0]},
                TorchRL={"speed": [400.0, 400.0, 400.0]},
                Tianshou={},
            ),
            "delivery": case(
                "a batch",
                cost | {"late": cost["cpu"]},
                Trawl={"cpu": [0.5, 0.25, 1.0], "late": [1.0]},
                TorchRL={"cpu": [1.0, 1.0, 1.0], "late": [8.0]},
            ),
            "workers_16": case(
                "16", counted, Trawl={"speed": [5000.0], "first_batch": [2.25]}, TorchRL={}
            ),
            "workers_2": case(
                "2",
                counted,
                Trawl={"speed": [4000.0], "first_batch": [0.75]},
                TorchRL={"speed": [900.0], "first_batch": [4.0]},
            ),
        },
        "per_further_worker": {
            "Trawl": {
                "fewest": 2,
                "most": 16,
                "start_ms": 107.1,
                "rss_mib": 0.123,
                "pss_mib": 0.1,
                "batch_mib": 0.02,
            }
        },
    }


def test_multi_table(script: ModuleType, multi: dict[str, Any]) -> None:
    lines = script.multi_table(multi).splitlines()
    assert "| 2 workers | Trawl | 2,000 frames/s |  |  | note of Trawl |" in lines
    assert "|  | TorchRL | 400 frames/s | 5.00 | 2.50 – 7.50 | note of TorchRL |" in lines
    # Lower times are better, so the ratio is the other library's time divided by Trawl's.
    assert "|  | TorchRL | 1.00 ms | 2.00 | 1.00 – 4.00 | note of TorchRL |" in lines
    assert "|  |  | 8.00 ms | 8.00 | 8.00 – 8.00 |  |" in lines
    assert not any("Tianshou" in line for line in lines)
    by_count = lines.index("| 2 | 4,000 | 900 | 0.75 | 4.00 |")
    assert lines[by_count + 1] == "| 16 | 5,000 |  | 2.25 |  |"
    assert any("takes 107 ms to start, and 0.12 MiB" in line for line in lines)
    assert lines[-1].endswith("](assets/growth.png)")


def test_short_table(script: ModuleType, results: dict[str, Any]) -> None:
    lines = script.short_table(results).splitlines()
    assert lines[:4] == [
        "| Work | Trawl, frames/s | hand-written loop | TorchRL |",
        "| --- | ---: | ---: | ---: |",
        "| 1 Pendulum | 20,000 | 1.00 | 2.50 |",
        "| images | 1,000 | 0.50 |  |",
    ]
    assert "2026-01-02" in lines[-3]
    assert lines[-1].endswith("](docs/assets/speed.png)")


def test_full_table(script: ModuleType, results: dict[str, Any]) -> None:
    lines = script.full_table(results).splitlines()
    assert "| 1 Pendulum | Trawl | 50.0 | 20,000 |  |  |  |" in lines
    assert "|  | TorchRL | 250.0 | 4,000 | 5.00 | 2.50 – 7.50 | as it comes |" in lines
    assert "| images | Trawl | 1000.0 | 1,000 |  |  |  |" in lines
    assert "| `import trawl` | 12 |" in lines
    assert any(line.endswith("](assets/speed.png)") for line in lines)
    assert any(line.endswith("torch 2.9.") for line in lines)
    assert not any("Tianshou" in line or "gone" in line for line in lines)


def test_pages_are_rewritten(script: ModuleType, results: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    pages = [tmp_path / "README.md", tmp_path / "docs" / "performance.md"]
    for page in pages:
        page.write_text(PAGE, encoding="utf-8")
    script.write(results, tmp_path)
    once = [page.read_text(encoding="utf-8") for page in pages]
    for text in once:
        assert text.startswith("above\n\n<!-- speed:begin -->\n\n| Work |")
        assert text.endswith("<!-- speed:end -->\n\nbelow\n")
        assert "old" not in text
    script.write(results, tmp_path)
    assert [page.read_text(encoding="utf-8") for page in pages] == once


def test_many_processes_have_a_place_of_their_own(
    script: ModuleType, results: dict[str, Any], multi: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(PAGE, encoding="utf-8")
    page = tmp_path / "docs" / "performance.md"
    page.write_text(PAGE + "<!-- multi:begin -->\nold\n<!-- multi:end -->\nend\n", encoding="utf-8")
    script.write(results, tmp_path, multi)
    text = page.read_text(encoding="utf-8")
    speed, _, many = text.partition("<!-- multi:begin -->")
    assert "| 1 Pendulum |" in speed
    assert "| 2 workers |" in many
    assert many.endswith("<!-- multi:end -->\nend\n")
    assert "old" not in text


def test_protocols_are_written_into_their_page(
    script: ModuleType, results: dict[str, Any], tmp_path: Path
) -> None:
    def measured(name: str, step: float) -> dict[str, Any]:
        return {"protocol": name, "step_us": [step, 9.0, 900.0], "owner_us": [2.0, 4.0, step]}

    names = {"pipes": 20.0, "futexes": 30.0}
    wakeups = {
        **{key: results[key] for key in ("date", "machine", "versions", "settings")},
        "loads": {
            load: [measured(name, step * times) for name, step in names.items()]
            for load, times in {"2 processes": 1.0, "4 processes": 10.0}.items()
        },
    }
    (tmp_path / "docs").mkdir()
    marked = "<!-- wakeups:begin -->\nold wakeups\n<!-- wakeups:end -->\nb\n"
    (tmp_path / "README.md").write_text(PAGE, encoding="utf-8")
    page = tmp_path / "docs" / "performance.md"
    page.write_text(PAGE + marked, encoding="utf-8")
    script.write(results, tmp_path, wakeups=wakeups)
    lines = page.read_text(encoding="utf-8").splitlines()
    assert "| pipes | 20 | 4 | 200 | 4 |" in lines
    assert "| futexes | 30 | 4 | 300 | 4 |" in lines
    assert lines[-2:] == ["<!-- wakeups:end -->", "b"]
    assert "old wakeups" not in lines


@pytest.mark.parametrize(
    "page",
    [
        "nothing",
        "<!-- speed:begin -->",
        "<!-- speed:end --> <!-- speed:begin -->",
        "<!-- speed:begin --> <!-- speed:end --> <!-- speed:end -->",
    ],
)
def test_pages_without_their_markers_are_refused(script: ModuleType, page: str) -> None:
    with pytest.raises(ValueError, match="must have"):
        script.replaced(page, "new")


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        ("README.md", "speed"),
        ("docs/performance.md", "speed"),
        ("docs/performance.md", "multi"),
        ("docs/performance.md", "wakeups"),
    ],
)
def test_our_pages_have_the_markers(script: ModuleType, name: str, mark: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert "| Work |" in script.replaced(page, "| Work |", mark)


def test_results_of_a_gpu_name_the_device_and_its_waits(
    script: ModuleType, results: dict[str, Any]
) -> None:
    results["machine"]["gpu"] = "GPU X"
    results["device"] = {
        "a": {"waits_per_batch": 3, "mib_after_11_batches": 10.4, "mib_after_50_batches": 10.4},
        "b": {"waits_per_batch": 3},
    }
    text = script.gpu_table(results)
    assert "| 1 Pendulum | Trawl | 50.0 | 20,000 |" in text
    assert "The GPU is GPU X." in text
    assert "the host waits 3 times" in text
    assert "10 MiB (after 11 batches), 10 MiB (after 50 batches)" in text
