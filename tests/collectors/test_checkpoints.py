"""Checkpoints on disk: what they hold, which are kept, and how a run that was killed goes on."""

import errno
import os
import random
import shutil
import signal
from collections import OrderedDict

import killing
import numpy as np
import nursery
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from multi_parts import same
from small_disk import small_disk
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import (
    AsyncBatchedCollector,
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from trawl.collectors.driver.checkpoints import CheckpointFolder
from trawl.errors import EnvStateError, StateError

ARGUMENTS = {"frames_per_batch": 60}


class Noisy(nn.Module):
    """A policy that draws its actions."""

    def __init__(self, *sizes):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*map(nn.Linear, sizes[:-1], sizes[1:]))

    def forward(self, observation):
        scores = self.layers(observation)
        scores = scores + torch.randn_like(scores)
        return nn.functional.one_hot(scores.argmax(-1), 2)


def policy(*sizes):
    return TensorDictModule(Noisy(*(sizes or (4, 2))), ["observation"], ["action"])


def make(cls, source="CartPole-v1", **options):
    return cls(source, policy(), **arguments(cls), **options)


def arguments(cls):
    return ARGUMENTS if cls is Collector else {**ARGUMENTS, "start_method": "inline"}


def marked(value):
    tensor = torch.zeros(2)
    tensor.mark = value
    return tensor


def nested(levels):
    found = []
    for _ in range(levels):
        found = [found]
    return found


def endless():
    found = {}
    found["itself"] = [found]
    return found


KINDS = [
    (Collector, "CartPole-v1"),
    (MultiSyncCollector, ["CartPole-v1"] * 2),
    (AsyncCollector, "CartPole-v1"),
]


@pytest.fixture
def saved(tmp_path):
    """A folder with two checkpoints, and the batches that followed each of them."""
    with make(Collector) as collector:
        collector.set_seed(1)
        batches = []
        for number in range(2):
            collector.next()
            collector.checkpoint(tmp_path, {"number": number})
        batches = [collector.next() for _ in range(3)]
    return tmp_path, batches


def names(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("checkpoint"))


@pytest.mark.parametrize(("kind", "source"), KINDS, ids=lambda one: getattr(one, "__name__", ""))
def test_a_run_goes_on_from_its_checkpoint(kind, source, tmp_path):
    with make(kind, source) as collector:
        collector.set_seed(1)
        for _ in range(2):
            collector.next()
        collector.checkpoint(tmp_path)
        expected = [collector.next() for _ in range(4)]
    with kind.resume(tmp_path, source, policy(), **arguments(kind)) as other:
        assert all(same(other.next(), batch) for batch in expected)


def test_asynchronous_workers_go_on_from_a_checkpoint(tmp_path):
    with make(MultiAsyncCollector, ["CartPole-v1"] * 2) as collector:
        collector.set_seed(1)
        collector.next()
        collector.checkpoint(tmp_path)
    with MultiAsyncCollector.resume(
        tmp_path, ["CartPole-v1"] * 2, policy(), **arguments(MultiAsyncCollector)
    ) as collector:
        assert collector.resumed
        assert collector.stats()["frames"] == 60


def test_extra_data_comes_back(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    plain = {
        "curve": [(1, 2.5), (2, float("inf"))],
        "name": "é",
        "lone": "\ud800",
        "bytes": b"\0",
        b"": [b"", (b"", b"x"), []],
        "nothing": None,
        "ordered": OrderedDict(a=torch.Size([1, 2]), b=b""),
        "number": 2**2039 - 1,
    }
    tensors = {"generator": torch.get_rng_state(), "empty": torch.zeros(0, 3)}
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    folder = tmp_path / "new" / "folder"
    with make(Collector) as collector:
        assert collector.extra == {}
        path = collector.checkpoint(folder, {**plain, **tensors, **states})
    with Collector.resume(folder, "CartPole-v1", policy(), **ARGUMENTS) as one:
        read = torch.load(path, weights_only=True)["extra"]
        for found in (one.extra, read):
            assert {name: found[name] for name in plain} == plain
            for name, value in tensors.items():
                assert torch.equal(found[name], value)
            assert torch.equal(found["model"]["weight"], model.weight)
            optimizer.load_state_dict(found["optimizer"])


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"a": [1, np.float64(2)]}, r"extra\['a'\]\[1\] must .* is a numpy.float64"),
        ({"a": np.zeros(2)}, "numpy.ndarray"),
        ({"a": TensorDict()}, "TensorDict"),
        ({"a": {np.int64(1): 2}}, "the keys of extra"),
        ({"a": {1, 2}}, "builtins.set"),
        ({"a": [2**5000]}, r"extra\['a'\]\[0\] is an integer of 5,001 bits"),
        ({"a": -(2**2039)}, "integer of 2,040 bits"),
        ({"a": marked(object())}, r"extra\['a'\].mark must .* is a builtins.object"),
        ({"a": nested(500)}, "extra is nested more than 200 levels deep"),
        ({"a": endless()}, "extra is nested more than 200 levels deep"),
        ({"a": [0, torch.empty(0, dtype=torch.uint4)]}, r"extra\['a'\]\[1\] can't be saved"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(value, match, tmp_path):
    with make(Collector) as collector:
        saved = collector.checkpoint(tmp_path, {"number": 1})
        with pytest.raises((TypeError, ValueError), match=match):
            collector.checkpoint(tmp_path, value)
        assert names(tmp_path) == [saved.name]
        assert collector.load_checkpoint(tmp_path)
        assert collector.extra == {"number": 1}


class Fleeting(CartPoleEnv):
    """A CartPole with attributes that are empty at times."""

    def __init__(self):
        super().__init__()
        self.enemies, self.seen = np.zeros((0, 2)), {}
        self.number, self.message = 2**5000, b""
        self.count = torch.zeros(0)

    def reset(self, **kwargs):
        self.enemies, self.number = self.enemies[:0].copy(), -(2**5000)
        return super().reset(**kwargs)

    def step(self, action):
        self.enemies = np.concatenate([self.enemies, np.ones((1, 2))])
        self.seen[b""] = self.enemies[:0]
        return super().step(action)


@pytest.mark.parametrize("steps", [1, 30])
def test_attributes_that_are_empty_come_back(steps, tmp_path):
    with make(Collector, Fleeting, max_frames_per_traj=steps) as collector:
        collector.set_seed(1)
        collector.next()
        assert collector.env_state_methods() == ["attributes"]
        path = collector.checkpoint(tmp_path)
        expected = collector.next()
        own = collector.env.env.unwrapped
        kept = own.enemies.shape, own.number, own.message, list(own.seen), own.count.shape
    torch.save(torch.load(path, weights_only=True)["state"], tmp_path / "state")
    with make(Collector, Fleeting, max_frames_per_traj=steps) as collector:
        assert collector.load_checkpoint(tmp_path)
        assert same(collector.next(), expected)
        own = collector.env.env.unwrapped
        assert (own.enemies.shape, own.number, own.message, list(own.seen), own.count.shape) == kept


def test_the_last_two_are_kept_and_other_files_are_left_alone(tmp_path):
    (tmp_path / "checkpoint-mine.pt").touch()
    with make(Collector) as collector:
        paths = [collector.checkpoint(tmp_path, {"number": i}) for i in range(4)]
    assert sorted(path.name for path in paths[2:]) == names(tmp_path)[:2]
    assert (tmp_path / "checkpoint-mine.pt").exists()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert torch.load(paths[3], weights_only=True)["extra"] == {"number": 3}


def damage_by_cutting(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def damage_by_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_by_emptying(path):
    path.write_bytes(b"")


DAMAGE = [damage_by_cutting, damage_by_a_bit, damage_by_emptying]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(saved, damage):
    folder, batches = saved
    damage(folder / names(folder)[1])
    with pytest.warns(RuntimeWarning, match=r"is damaged: .* the checkpoint before it is loaded"):
        collector = Collector.resume(folder, "CartPole-v1", policy(), **ARGUMENTS)
    with collector:
        assert collector.extra == {"number": 0}
        collector.next()
        assert same(collector.next(), batches[0])
        # The damaged one is not counted as one of the last two.
        collector.checkpoint(folder, {"number": 2})
    before, last = names(folder)
    for name in (before, last):
        assert torch.load(folder / name, weights_only=True)["extra"]["number"] in (0, 2)


def test_without_a_whole_checkpoint_there_is_an_error(saved):
    folder, _ = saved
    for name in names(folder):
        damage_by_cutting(folder / name)
    with pytest.raises(StateError, match=rf"{names(folder)[1]} is damaged"):
        Collector.resume(folder, "CartPole-v1", policy(), **ARGUMENTS)


def test_without_any_checkpoint_there_is_an_error_too(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="has no checkpoint to resume"):
            Collector.resume(folder, "CartPole-v1", policy(), **ARGUMENTS)
        with make(Collector) as collector:
            assert not collector.load_checkpoint(folder)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (
            lambda: make(Collector, "CartPole-v0"),
            "'id' of environment 0 is CartPole-v1 there, and CartPole-v0",
        ),
        (lambda: make(Collector, ["CartPole-v1"] * 2), "1 environments, but this collector has 2"),
        (
            lambda: Collector("CartPole-v1", **ARGUMENTS),
            "weights of a policy, unlike this collector",
        ),
        (
            lambda: Collector("CartPole-v1", policy(4, 8, 2), **ARGUMENTS),
            r"layers.0.bias' is float32 of shape \(2,\) there, and float32 of shape \(8,\)",
        ),
        (
            lambda: make(MultiSyncCollector, ["CartPole-v1"] * 2),
            "a collector with 0 workers, but this one has 2",
        ),
    ],
    ids=["environment", "environments", "no policy", "policy", "workers"],
)
@pytest.mark.filterwarnings("ignore:.*CartPole-v0.*out of date")
def test_the_checkpoint_of_another_collector_changes_nothing(saved, other, match):
    folder, _ = saved
    with other() as one:
        one.set_seed(5)
        first = one.next()
        with pytest.raises(ValueError, match=match):
            one.load_checkpoint(folder)
        assert one.extra == {}
        second = one.next()
    with other() as two:
        two.set_seed(5)
        assert same(two.next(), first)
        assert same(two.next(), second)


def rewrite(folder, **changes):
    """Changes the newest checkpoint, as another version of Trawl might have written it."""
    content = torch.load(folder / names(folder)[-1], weights_only=True)
    writing = CheckpointFolder(folder)
    writing.save({**content, **changes})
    writing.close()


@pytest.mark.parametrize("value", [torch.zeros(3), [], 3, None])
def test_a_description_of_an_environment_that_is_no_text_is_named(saved, value):
    folder, _ = saved
    state = torch.load(folder / names(folder)[-1], weights_only=True)["state"]
    state["resume"]["envs"][0]["env"]["identity"]["package"] = value
    rewrite(folder, state=state)
    with (
        make(Collector) as collector,
        pytest.warns(RuntimeWarning, match="environment 0 .* 'package' is .* is loaded instead"),
    ):
        assert collector.load_checkpoint(folder)


def test_the_checkpoint_of_another_version_is_refused(saved):
    folder, batches = saved
    rewrite(folder, trawl="0.0.1")
    with make(Collector) as collector:
        with pytest.raises(ValueError, match=r"was saved by Trawl 0\.0\.1, but this is Trawl"):
            collector.load_checkpoint(folder)
        with pytest.warns(RuntimeWarning, match=r"was saved by Trawl 0\.0\.1"):
            assert collector.load_checkpoint(folder, on_state_mismatch="new_episodes")
        assert same(collector.next(), batches[0])
    rewrite(folder, format=2)
    with (
        make(Collector) as collector,
        pytest.raises(ValueError, match="has format 2, but this version of Trawl reads format 1"),
    ):
        collector.load_checkpoint(folder, on_state_mismatch="new_episodes")


def test_a_format_that_is_no_number_is_damage(saved):
    folder, _ = saved
    rewrite(folder, format="x")
    with (
        make(Collector) as collector,
        pytest.warns(RuntimeWarning, match=r"\['format'\] must be an integer"),
    ):
        assert collector.load_checkpoint(folder)


def test_one_folder_is_for_one_collector(saved):
    folder, _ = saved
    before = names(folder)
    with make(Collector) as collector, make(Collector) as other:
        collector.checkpoint(folder)
        now = names(folder)
        with pytest.raises(BlockingIOError, match="another collector saves its checkpoints here"):
            other.checkpoint(folder)
        assert names(folder) == now != before
        collector.shutdown()
        other.checkpoint(folder)


def test_a_forked_child_does_not_have_its_parents_lock(tmp_path):
    folder, content = CheckpointFolder(tmp_path), {"number": 1}
    folder.save(content)

    child = os.fork()
    if not child:
        refused = 0
        for _ in range(2):
            try:
                folder.save(content)
            except BlockingIOError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    folder.save(content)
    other = CheckpointFolder(tmp_path)
    with pytest.raises(BlockingIOError):
        other.save(content)
    folder.close()
    other.save(content)
    other.close()


def test_a_folder_that_was_made_again_is_locked_again(tmp_path):
    place = tmp_path / "runs"
    first, second = CheckpointFolder(place), CheckpointFolder(place)
    first.save({"number": 1})
    shutil.rmtree(place)
    second.save({"number": 2})
    with pytest.raises(BlockingIOError):
        first.save({"number": 3})
    second.close()
    shutil.rmtree(place)
    assert first.save({"number": 4}).exists()
    first.close()


def test_names_that_are_no_checkpoints_are_left_alone(saved):
    folder, batches = saved
    newest = names(folder)[-1]
    (folder / f"checkpoint-{'9' * 224}-{'0' * 16}.pt").touch()
    (folder / newest.replace("00000002", "00000003")).mkdir()
    for mode in ("\u0663" * 8, "1" * 30):
        (folder / f"checkpoint-{mode}-{'0' * 16}.pt").touch()
    with make(Collector) as collector:
        with pytest.warns(RuntimeWarning, match=r"not a regular file.* before it is loaded"):
            assert collector.load_checkpoint(folder)
        assert collector.extra == {"number": 1}
        assert same(collector.next(), batches[0])
        for _ in range(3):
            path = collector.checkpoint(folder)
        assert path.name.startswith("checkpoint-00000006-")
        (folder / f"checkpoint-{'9' * 18}-{'0' * 16}.pt").touch()
        with pytest.raises(ValueError, match="the largest number that a checkpoint can have"):
            collector.checkpoint(folder)


ON_A_SMALL_DISK = """
import errno, os
import torch
from trawl import Collector
collector = Collector("CartPole-v1", frames_per_batch=60)
first = collector.checkpoint("disk/runs", {"number": 1})
try:
    collector.checkpoint("disk/runs", {"large": torch.zeros(400_000)})
except OSError as error:
    assert error.errno == errno.ENOSPC, error
    assert error.filename == "disk/runs" and "bytes free)" in error.strerror, error
assert os.listdir("disk/runs") == [first.name], os.listdir("disk/runs")
second = collector.checkpoint("disk/runs", {"number": 2})
assert sorted(os.listdir("disk/runs")) == [first.name, second.name], os.listdir("disk/runs")
assert collector.load_checkpoint("disk/runs") and collector.extra == {"number": 2}
"""


def test_a_full_disk_is_told_and_leaves_the_last_checkpoint(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, "1m") as namespaces:
        done = nursery.run(ON_A_SMALL_DISK, namespaces=namespaces, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with make(Collector) as collector, pytest.raises(PermissionError, match=str(tmp_path)):
        collector.checkpoint(tmp_path)
    tmp_path.chmod(0o700)


def test_a_file_is_no_folder(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with make(Collector) as collector:
        with pytest.raises(OSError, match="file") as caught:
            collector.checkpoint(file)
        assert caught.value.errno in (errno.EEXIST, errno.ENOTDIR)
        with pytest.raises(NotADirectoryError):
            collector.load_checkpoint(file)


def test_a_closed_collector_saves_nothing(tmp_path):
    with make(Collector) as collector:
        pass
    with pytest.raises(RuntimeError, match="was shut down"):
        collector.checkpoint(tmp_path)


# --- kill -9

PROGRAM = """
import torch
from trawl import Collector

folder, out = sys.argv[1:]
collector = Collector(["CartPole-v1"] * 2, frames_per_batch=40, total_frames=1200)
collector.set_seed(3)
sums = []
if collector.load_checkpoint(folder):
    sums = collector.extra["sums"]
for batch in collector:
    ids = batch["collector", "traj_ids"].sum()
    sums.append([float(batch["observation"].double().sum()), int(ids)])
    collector.checkpoint(folder, {"sums": sums})
torch.save(sums, out)
print(_count)
"""


def test_killed_at_any_moment_a_run_comes_to_the_same(tmp_path):
    def run(name, at):
        place, out = tmp_path / name, tmp_path / f"{name}.out"
        return killing.run(PROGRAM, place, out, cwd=tmp_path, place=place, at=at)

    done = run("whole", 0)
    assert done.returncode == 0, done.stderr
    draw, kills, count = random.Random(0), 0, int(done.stdout)
    while True:
        done = run("parts", draw.randint(1, count // 5) if kills < 8 else 0)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        kills += 1
    assert kills == 8
    expected, found = (torch.load(tmp_path / f"{name}.out") for name in ("whole", "parts"))
    assert len(expected) == 30
    assert found == expected


# --- environments that can't be captured, and wrong arguments


class Uncaptured(CartPoleEnv):
    """A CartPole that neither shows its state nor can be replayed."""

    def __init__(self):
        super().__init__()
        self.closed = (number for number in range(3))
        self.drawn = np.random.default_rng(0)
        self.drawn.spawn(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_environments_that_cannot_be_captured_are_told(workers, tmp_path):
    def make():
        if workers:
            return MultiSyncCollector([Uncaptured] * 2, frames_per_batch=20, start_method="inline")
        return Collector(Uncaptured, frames_per_batch=20)

    with make() as collector:
        collector.next()
        assert collector.env_state_methods() == ["none"] * max(1, workers)
        with pytest.warns(RuntimeWarning, match=r"new episodes will begin .* can't be captured"):
            collector.checkpoint(tmp_path)
        collector.checkpoint(tmp_path)  # warns only once
    with make() as other:
        with pytest.raises(
            EnvStateError, match=r"can't continue the episodes: .* can't be captured"
        ):
            other.load_checkpoint(tmp_path)
        assert other.load_checkpoint(tmp_path, on_state_mismatch="new_episodes")
        assert not other.resumed
        assert other.stats()["frames"] == 20


def test_wrong_arguments_are_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with Collector("CartPole-v1", frames_per_batch=20) as collector:
        collector.checkpoint(tmp_path / "folder")
        for path in (file, str(file)):
            with pytest.raises(NotADirectoryError, match="path must be the folder"):
                collector.checkpoint(path)
            with pytest.raises(NotADirectoryError, match="path must be the folder"):
                collector.load_checkpoint(path)
        with pytest.raises(TypeError, match="path must be the path of a folder, but it is None"):
            collector.checkpoint(None)
        with pytest.raises(TypeError, match=r"extra must be a mapping .* but it is list"):
            collector.checkpoint(tmp_path / "folder", extra=[1])
        with pytest.raises(TypeError, match="state_dict must be a mapping"):
            collector.load_state_dict("folder")
        # What failed elsewhere has not unlocked the folder.
        with Collector("CartPole-v1", frames_per_batch=20) as other, pytest.raises(BlockingIOError):
            other.checkpoint(tmp_path / "folder")
    with pytest.raises(FileNotFoundError, match="the first argument is the folder"):
        Collector.resume("CartPole-v1", str(tmp_path / "folder"), frames_per_batch=20)


def test_a_limit_of_steps_belongs_to_the_environment(tmp_path):
    with Collector("CartPole-v1", frames_per_batch=20) as collector:
        collector.checkpoint(tmp_path)
    kwargs = {"max_episode_steps": 50}
    with (
        Collector("CartPole-v1", frames_per_batch=20, create_env_kwargs=kwargs) as other,
        pytest.raises(
            ValueError, match="'max_episode_steps' of environment 0 is 500 there, and 50"
        ),
    ):
        other.load_checkpoint(tmp_path)


def test_a_state_does_not_change_with_the_policy():
    class Fading(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, observation):
            self.calls += 1
            return nn.functional.one_hot((self.calls % 2).long(), 2)

    module = TensorDictModule(Fading(), ["observation"], ["action"])
    with Collector("CartPole-v1", module, frames_per_batch=20) as collector:
        collector.next()
        state = collector.state_dict()
        before = float(state["policy_state_dict"]["module.calls"])
        collector.next()
        assert float(state["policy_state_dict"]["module.calls"]) == before


def limited(cls, limit, **options):
    if cls is AsyncBatchedCollector:
        options |= {"create_env_fn": ["CartPole-v1"] * 2, "frames_per_batch": 60}
        return cls(policy=policy(), max_frames_per_traj=limit, **options)
    source = "CartPole-v1" if cls is Collector else ["CartPole-v1"] * 2
    return make(cls, source, max_frames_per_traj=limit, **options)


@pytest.mark.parametrize(
    "cls", [Collector, MultiSyncCollector, MultiAsyncCollector, AsyncBatchedCollector]
)
def test_an_option_that_has_changed_is_named_once(cls):
    with limited(cls, 7) as collector:
        collector.next()
        state = collector.state_dict()
    with limited(cls, 7) as same:
        same.load_state_dict(state)
    told = "saved with max_frames_per_traj=7, but this collector has max_frames_per_traj=5: "
    with limited(cls, 5) as other:
        with pytest.warns(UserWarning, match=told) as caught:
            other.load_state_dict(state)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert other.next()["next", "truncated"].any()
        # A state that was saved before states had options.
        del state["options"]
        other.load_state_dict(state)


def test_a_run_is_resumed_with_another_option_on_purpose(tmp_path):
    with limited(Collector, 7) as collector:
        collector.next()
        collector.checkpoint(tmp_path)
    told = "max_frames_per_traj=7, but this collector has max_frames_per_traj=None"
    with pytest.warns(UserWarning, match=told):
        resumed = Collector.resume(tmp_path, "CartPole-v1", policy(), **ARGUMENTS)
    with resumed:
        assert resumed.resumed
        assert not resumed.next()["next", "truncated"].any()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([7], r"state_dict\['options'\]"),
        ({"max_frames_per_traj": "7"}, r"state_dict\['options'\]\['max_frames_per_traj'\]"),
        ({"max_frames_per_traj": 2**64}, r"state_dict\['options'\]\['max_frames_per_traj'\]"),
        ({7: 7}, r"state_dict\['options'\]"),
    ],
)
def test_options_of_a_stranger_are_checked(options, named):
    with limited(Collector, 7) as collector:
        state = collector.state_dict() | {"options": options}
        with pytest.raises(StateError, match=named):
            collector.load_state_dict(state)
