"""States with random changes: each is refused as a whole, or a collector goes on from it."""

import pytest
import torch
from mutations import MAKERS, Mutator, Trial, same

from trawl.collectors.driver.checkpoints import CheckpointFolder

COUNTS = {
    "cart_pole": 150,
    "physics": 30,
    "replay": 50,
    "vector": 40,
    "processes": 60,
    "torchrl": 30,
}


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A folder in which an import of pytest's plug-ins, or a command, would leave a file."""
    (tmp_path / "conftest.py").write_text("open('ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    yield
    assert [path.name for path in tmp_path.iterdir()] == ["conftest.py"]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_changed_state_is_refused_or_loaded_as_a_whole(kind, trap):
    trial = Trial(kind, seed=1)
    try:
        for number in range(COUNTS[kind]):
            trial.step(thorough=number % 25 == 0)
    finally:
        trial.close()
    assert trial.faults == []
    assert trial.counts["mutations"] == COUNTS[kind]
    assert trial.counts["refused"] > trial.counts["loaded"] > 0


def test_the_checkpoint_before_a_changed_one_is_loaded(tmp_path, monkeypatch):
    trial, mutator, passed, told = Trial("cart_pole", seed=2), Mutator(7), 0, []
    warn = "trawl.collectors.driver.checkpoints.warn"
    monkeypatch.setattr(warn, lambda *args: told.append(args[0]))
    path = trial.collector.checkpoint(tmp_path / "own")
    version = torch.load(path, weights_only=True)["trawl"]
    whole = {"format": 1, "trawl": version, "state": trial.state, "extra": {"number": 1}}
    for number in range(25):
        folder = CheckpointFolder(tmp_path / str(number))
        folder.save(whole)
        state, where = mutator.mutated(trial.state)
        try:
            newest = folder.save({**whole, "state": state})
        except (TypeError, ValueError):
            continue
        finally:
            folder.close()
        told.clear()
        assert trial.collector.load_checkpoint(tmp_path / str(number)), where
        if told:
            passed += 1
            assert newest.name in told[0]
            assert "the checkpoint before it is loaded instead" in told[0]
            assert same(trial.collector.next(), trial.following), where
    trial.close()
    assert passed > 5
