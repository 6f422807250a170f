"""Datasets of Minari, opened by Minari itself."""

import json
import os
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from sink_parts import LENGTH, frames, write

from trawl import Collector
from trawl.data import MinariSink, load
from trawl.extras.formats.minari import LONGEST, default_id

minari = pytest.importorskip("minari")
app = pytest.importorskip("minari.cli").app
CliRunner = pytest.importorskip("typer.testing").CliRunner


def collected(env, directory, frames=300, **options):
    """The frames that were collected into a dataset, flat."""
    seen = []
    sink = MinariSink(directory, env)
    with Collector(env, frames_per_batch=50, total_frames=frames, sink=sink, **options) as c:
        c.set_seed(1)
        seen.extend(batch.clone() for batch in c)
    return torch.cat(seen)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Blackjack-v1"])
def test_minari_reads_what_was_collected(env, tmp_path):
    frames = 400 if env == "Pendulum-v1" else 300
    seen = collected(env, tmp_path / "d", frames)
    if env == "Pendulum-v1":
        # The last episode ends with the collection, so that no flag is added.
        loaded = load(tmp_path / "d")
        assert set(loaded.keys(True, True)) == set(seen.keys(True, True))
        for key in seen.keys(True, True):
            assert loaded[key].dtype == seen[key].dtype
            assert torch.equal(loaded[key], seen[key]), key
    dataset = minari.MinariDataset(tmp_path / "d" / "data")
    assert dataset.total_steps == frames
    made = gymnasium.make(env)
    assert dataset.observation_space == made.observation_space
    assert dataset.action_space == made.action_space
    assert dataset.recover_environment().spec.id == env
    for episode in dataset.iterate_episodes():
        ids = seen["collector", "traj_ids"] == int(episode.infos["collector.traj_ids"][0, 0])
        rows = seen[ids]
        assert len(episode) == len(rows)
        assert episode.rewards.tolist() == rows["next", "reward"].flatten().tolist()
        assert episode.terminations.tolist() == rows["next", "terminated"].flatten().tolist()
        assert episode.truncations[:-1].tolist() == [False] * (len(rows) - 1)
        assert episode.terminations[-1] or episode.truncations[-1], "an episode without an end"
        steps = [_at(episode.observations, t) for t in range(len(rows) + 1)]
        assert all(_contains(made.observation_space, step) for step in steps)
        assert all(made.action_space.contains(action) for action in episode.actions)


def _at(observations, t):
    return tuple(o[t] for o in observations) if isinstance(observations, tuple) else observations[t]


def _contains(space, value):
    return space.contains(tuple(map(int, value)) if isinstance(value, tuple) else value)


def test_an_episode_that_has_not_ended_is_cut_at_the_end(tmp_path):
    with MinariSink(tmp_path / "d") as sink:
        sink.write(frames(0, 14))
        batch = frames(14, 5)
        batch["next", "done"][-1] = batch["next", "truncated"][-1] = False
        sink.write(batch)
        assert (sink.frames, sink.waiting) == (14, 5)
        assert len(load(tmp_path / "d")) == 14
    loaded = load(tmp_path / "d")
    assert loaded["number"].tolist() == list(range(19))
    assert loaded["next", "truncated"].flatten().nonzero().flatten().tolist() == [6, 13, 18]


def test_entries_that_minari_does_not_know_are_infos(tmp_path):
    more = {
        "log_prob": torch.randn(14),
        "hidden": torch.randn(14, 2, 3).to(torch.bfloat16),
        "flag": torch.ones(14, dtype=torch.bool),
        "nothing": torch.empty(14, 0),
        ("next", "step"): torch.arange(14),
        "wave": torch.randn(14, 2, dtype=torch.complex64),
    }
    batch = frames(0, 14).update(more)
    write(MinariSink, tmp_path / "d", [batch])
    loaded = load(tmp_path / "d")
    for key in more:
        assert loaded[key].dtype == batch[key].dtype
        assert torch.equal(loaded[key], batch[key]), key
    episode = minari.MinariDataset(tmp_path / "d" / "data")[1]
    # One row more than there are steps: it repeats the one beside it.
    assert episode.infos["next.step"].flatten().tolist() == [7, *range(7, 14)]
    assert episode.infos["number"].flatten().tolist() == [*range(7, 14), 13]
    assert episode.infos["collector.traj_ids"].flatten().tolist() == [1] * (LENGTH + 1)
    assert episode.infos["log_prob"].shape == (LENGTH + 1, 1)


@pytest.mark.parametrize("shape", [(), (1,), (2, 2)], ids=str)
def test_spaces_are_those_of_the_frames(shape, tmp_path):
    for dtype in (torch.int64, torch.float32, torch.bool):
        action = torch.randint(0, 2, (14, *shape)).to(dtype)
        place = tmp_path / str(dtype)
        write(MinariSink, place, [frames(0, 14).set("action", action)])
        loaded = load(place)["action"]
        assert loaded.dtype == dtype
        assert torch.equal(loaded, action)
        dataset = minari.MinariDataset(place / "data")
        assert dataset.action_space.shape == shape
        assert dataset.observation_space == gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)


def test_images_are_kept_exactly(tmp_path):
    images = torch.randint(0, 256, (301, 40, 40, 3)).to(torch.uint8)
    batch = frames(0, 300, pixels=images[:-1]).exclude("observation", ("next", "observation"))
    batch["next", "pixels"] = images[1:]
    write(MinariSink, tmp_path / "d", [batch])
    assert torch.equal(load(tmp_path / "d")["pixels"], images[:-1])
    episode = minari.MinariDataset(tmp_path / "d" / "data")[0]
    assert np.array_equal(episode.observations["pixels"], images[: LENGTH + 1])


def long(count):
    """One episode that does not end."""
    batch = frames(0, count)
    batch["collector", "traj_ids"].zero_()
    batch["next", "done"].zero_()
    batch["next", "truncated"].zero_()
    return batch


@pytest.mark.parametrize("size", [1000, 70_000])
def test_an_episode_is_no_longer_than_minari_reads(size, tmp_path):
    whole = long(70_000)
    with warnings.catch_warnings(record=True) as seen, MinariSink(tmp_path / "d") as sink:
        warnings.simplefilter("always")
        for start in range(0, 70_000, size):
            sink.write(whole[start : start + size])
    assert any("trajectories that have not ended are cut" in str(w.message) for w in seen)
    dataset = minari.MinariDataset(tmp_path / "d" / "data")
    lengths = [len(dataset[i]) for i in range(len(dataset))]
    assert sum(lengths) == 70_000
    assert max(lengths) <= LONGEST
    assert torch.equal(load(tmp_path / "d")["number"], whole["number"])
    numbers = [n for i in range(len(dataset)) for n in dataset[i].observations[:-1, 0].tolist()]
    assert numbers == list(range(70_000))


def test_memory_is_bounded_by_cutting_the_oldest(tmp_path):
    row = sum(v[0].numel() * v.element_size() for v in frames(0, 2).values(True, True))
    with MinariSink(tmp_path / "d", open_bytes=100 * row) as sink:
        old, young, other = long(60), long(30), long(20)
        other["collector", "traj_ids"] += 2
        young["collector", "traj_ids"] += 1
        sink.write(old)
        sink.write(young[:15])
        sink.write(young[15:])
        assert (sink.frames, sink.waiting) == (0, 90)
        with pytest.warns(RuntimeWarning, match="are cut"):
            sink.write(other)
        assert (sink.frames, sink.waiting) == (60, 50)
    found = load(tmp_path / "d")["collector", "traj_ids"].tolist()
    assert found == [0] * 60 + [1] * 30 + [2] * 20


# --- what Minari is told


def test_minari_finds_it_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    sink = MinariSink(tmp_path / "pole" / "random-v0", "CartPole-v1",
                      metadata={"author": "Ada", "description": "Falls."})  # fmt: skip
    with Collector("CartPole-v1", frames_per_batch=50, total_frames=100, sink=sink) as collector:
        for _ in collector:
            pass
    dataset = minari.load_dataset("pole/random-v0")
    assert (dataset.id, dataset.total_steps) == ("pole/random-v0", 100)
    assert dataset.env_spec.id == "CartPole-v1"
    assert list(minari.list_local_datasets()) == ["pole/random-v0"]
    done = CliRunner().invoke(app, ["show", "pole/random-v0"])
    assert done.exit_code == 0, done.output
    for words in ("Falls.", "Ada", "CartPole-v1", "Total Steps"):
        assert words in done.output


def test_the_name_is_that_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    for directory, name in (
        ("root/pole/random-v3", "pole/random-v3"),
        ("root/pole", "pole-v0"),
        ("elsewhere/my data.2", "my-data-2-v0"),
    ):
        assert default_id(tmp_path / directory) == name
        minari.dataset.minari_dataset.parse_dataset_id(name)


def test_the_environment_may_be_given_in_any_form(tmp_path):
    made = gymnasium.make("CartPole-v1")
    for number, env in enumerate(["CartPole-v1", made, made.spec]):
        with MinariSink(tmp_path / str(number), env) as sink:
            batch = Collector("CartPole-v1", frames_per_batch=30).next()
            sink.write(batch)
        dataset = minari.MinariDataset(tmp_path / str(number) / "data")
        assert dataset.env_spec.id == "CartPole-v1"
        assert dataset.action_space == made.action_space


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"env": 3}, TypeError, "env must be a Gymnasium id, .* but it is int"),
        ({"env": "Nothing-v9"}, gymnasium.error.Error, "Nothing"),
        ({"dataset_id": "no version"}, ValueError, "dataset_id must be a name with a version"),
        ({"open_bytes": 0}, ValueError, "open_bytes must be positive, but it is 0"),
    ],
)
def test_bad_arguments_are_told_at_once(options, error, words, tmp_path):
    with pytest.raises(error, match=words):
        MinariSink(tmp_path / "d", **options)
    assert os.listdir(tmp_path) == []


def drop(*keys):
    return lambda batch: batch.exclude(*keys)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop(("collector", "traj_ids")), "without .*traj_ids"),
        (drop(("next", "observation")), "collect without compact_obs"),
        (drop(("next", "reward")), "one reward per step, but .* is missing"),
        (drop(("next", "done")), r"the frames need \('next', 'done'\)"),
        (drop("action"), "action space needs"),
        (lambda b: b.set(("next", "reward"), torch.ones(7, 2)), r"has shape \(2,\)"),
        (lambda b: b.set("observation", b["observation"].double()), "can't hold it exactly"),
        (
            lambda b: b.set("observation", b["observation"] + 1),
            "differs from the observation after the previous",
        ),
    ],
)
def test_what_is_no_episode_is_refused(change, words, tmp_path):
    space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    env = gymnasium.Env()
    env.observation_space, env.action_space = space, gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    with pytest.raises(ValueError, match=words), MinariSink(tmp_path / "d", env) as sink:
        sink.write(change(frames(0, 7)))
    with (
        pytest.raises(ValueError, match="the environment's observation space needs"),
        MinariSink(tmp_path / "d", "CartPole-v1") as sink,
    ):
        sink.write(frames(0, 7))
    assert os.listdir(tmp_path) == []


# --- commits


def test_a_commit_that_came_to_nothing_is_undone(tmp_path):
    write(MinariSink, tmp_path / "d", [frames(0, 14)])
    record = tmp_path / "d" / "_dataset.json"
    before = record.read_text()
    with MinariSink(tmp_path / "d", resume=True) as sink:
        sink.write(frames(14, 14))
    # As if the process had been killed between what Minari reads and the record.
    record.write_text(before)
    assert minari.MinariDataset(tmp_path / "d" / "data").total_steps == 28
    assert len(load(tmp_path / "d")) == 14
    with MinariSink(tmp_path / "d", resume=True) as sink:
        sink.write(frames(14, 7))
    dataset = minari.MinariDataset(tmp_path / "d" / "data")
    assert (dataset.total_steps, dataset.total_episodes) == (21, 3)
    assert load(tmp_path / "d")["number"].tolist() == list(range(21))
    folders = [name for name in os.listdir(tmp_path / "d" / "data") if name.isdecimal()]
    assert sorted(folders) == ["0", "1", "2"]


def test_the_size_told_is_that_on_disk(tmp_path):
    write(MinariSink, tmp_path / "d", [frames(0, 70), frames(70, 70)])
    told = json.loads((tmp_path / "d" / "data" / "metadata.json").read_text())["dataset_size"]
    # Minari counts in tenths of a megabyte.
    found = minari.MinariDataset(tmp_path / "d" / "data").storage.get_size()
    assert told == pytest.approx(found, abs=0.051)
    assert told > 0.1


def test_an_environment_is_found_by_the_name_of_its_module(tmp_path, monkeypatch):
    (tmp_path / "rockets.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Rocket-v0', 'gymnasium.envs.classic_control:PendulumEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    gymnasium.register("Nameless-v0", lambda: None)
    try:
        with MinariSink(tmp_path / "rocket-v0", "rockets:Rocket-v0"):
            pass
        with pytest.raises(ValueError, match="'module:Class', or pass env=None"):
            MinariSink(tmp_path / "nameless-v0", "Nameless-v0")
    finally:
        for name in ("Rocket-v0", "Nameless-v0"):
            gymnasium.registry.pop(name, None)
