"""Checkpoints on disk: what they hold, which are kept, and how a run that was killed goes on."""

import os
import random
import shutil
import signal
from collections import OrderedDict
from functools import partial

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


TWO = ["CartPole-v1"] * 2
#: Collectors, their environments, and whether they continue to the bit.
KINDS = [
    (Collector, "CartPole-v1", True),
    (MultiSyncCollector, TWO, True),
    (AsyncCollector, "CartPole-v1", True),
    (MultiAsyncCollector, TWO, False),
]


def resumed(folder, kind=Collector, source="CartPole-v1"):
    return kind.resume(folder, source, policy(), **arguments(kind))


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


@pytest.mark.parametrize(
    ("kind", "source", "exact"), KINDS, ids=lambda one: getattr(one, "__name__", "")
)
def test_a_run_goes_on_from_its_checkpoint(kind, source, exact, tmp_path):
    with make(kind, source) as collector:
        collector.set_seed(1)
        for _ in range(2):
            collector.next()
        collector.checkpoint(tmp_path)
        expected = [collector.next() for _ in range(4)]
    with resumed(tmp_path, kind, source) as other:
        assert other.resumed
        assert other.stats()["frames"] == 120
        assert not exact or all(same(other.next(), batch) for batch in expected)


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
    with resumed(folder) as one:
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


def fleeting_of(collector):
    env = collector.env.env.unwrapped
    return env.enemies.shape, env.number, env.message, list(env.seen), env.count.shape


@pytest.mark.parametrize("steps", [1, 30])
def test_attributes_that_are_empty_come_back(steps, tmp_path):
    with make(Collector, Fleeting, max_frames_per_traj=steps) as collector:
        collector.set_seed(1)
        collector.next()
        assert collector.env_state_methods() == ["attributes"]
        collector.checkpoint(tmp_path)
        expected = collector.next()
        kept = fleeting_of(collector)
    with make(Collector, Fleeting, max_frames_per_traj=steps) as collector:
        assert collector.load_checkpoint(tmp_path)
        assert same(collector.next(), expected)
        assert fleeting_of(collector) == kept


def cut(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def rewrite(path, **changes):
    """Changes the newest checkpoint, as another version of Trawl might have written it."""
    writing = CheckpointFolder(path.parent)
    writing.save({**torch.load(path, weights_only=True), **changes})
    writing.close()


def describe_by(value):
    """Damages the description of an environment, which is to be text."""

    def damage(path):
        state = torch.load(path, weights_only=True)["state"]
        state["resume"]["envs"][0]["env"]["identity"]["package"] = value
        rewrite(path, state=state)

    return damage


#: What is done to the newest checkpoint, what is said of it, and the number of the one before.
DAMAGE = [
    *((damage, "is damaged: .*", 0) for damage in (cut, flip, empty)),
    (partial(rewrite, format="x"), r"\['format'\] must be an integer.*", 1),
    *(
        (describe_by(value), "environment 0 .* 'package' is .*", 1)
        for value in (torch.zeros(3), [], 3, None)
    ),
]


@pytest.mark.parametrize(("damage", "match", "before"), DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(saved, damage, match, before):
    folder, batches = saved
    damage(folder / names(folder)[1])
    with pytest.warns(RuntimeWarning, match=match + r"the checkpoint before it is loaded"):
        collector = resumed(folder)
    with collector:
        assert collector.extra == {"number": before}
        if not before:
            collector.next()
        assert same(collector.next(), batches[0])
        # The damaged one is not counted as one of the last two.
        collector.checkpoint(folder, {"number": 2})
    numbers = [torch.load(folder / name, weights_only=True)["extra"] for name in names(folder)]
    assert numbers == [{"number": before}, {"number": 2}]


def test_without_a_whole_checkpoint_there_is_an_error(saved):
    folder, _ = saved
    for name in names(folder):
        cut(folder / name)
    with pytest.raises(StateError, match=rf"{names(folder)[1]} is damaged"):
        resumed(folder)
    for empty_one in (folder / "none", folder / "new"):
        with pytest.raises(FileNotFoundError, match="has no checkpoint to resume"):
            resumed(empty_one)
        with make(Collector) as collector:
            assert not collector.load_checkpoint(empty_one)
        assert not (folder / "none").exists()
        (folder / "new").mkdir(exist_ok=True)


LIMITED = {"create_env_kwargs": {"max_episode_steps": 50}}
#: Collectors that can't load it, and what is said.
OTHERS = {
    "environment": (
        lambda: make(Collector, "CartPole-v0"),
        "'id' of environment 0 is CartPole-v1 there, and CartPole-v0",
    ),
    "limit": (
        lambda: make(Collector, **LIMITED),
        "'max_episode_steps' of environment 0 is 500 there, and 50",
    ),
    "environments": (lambda: make(Collector, TWO), "1 environments, but this collector has 2"),
    "no policy": (
        lambda: Collector("CartPole-v1", **ARGUMENTS),
        "weights of a policy, unlike this collector",
    ),
    "policy": (
        lambda: Collector("CartPole-v1", policy(4, 8, 2), **ARGUMENTS),
        r"layers.0.bias' is float32 of shape \(2,\) there, and float32 of shape \(8,\)",
    ),
    "workers": (
        lambda: make(MultiSyncCollector, TWO),
        "a collector with 0 workers, but this one has 2",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.filterwarnings("ignore:.*CartPole-v0.*out of date")
def test_the_checkpoint_of_another_collector_changes_nothing(saved, other):
    make_other, match = OTHERS[other]
    with make_other() as one, make_other() as two:
        one.set_seed(5)
        two.set_seed(5)
        assert same(one.next(), two.next())
        with pytest.raises(ValueError, match=match):
            one.load_checkpoint(saved[0])
        assert one.extra == {}
        assert same(one.next(), two.next())


def test_the_checkpoint_of_another_version_is_refused(saved):
    folder, batches = saved
    rewrite(folder / names(folder)[1], trawl="0.0.1")
    with make(Collector) as collector:
        with pytest.raises(ValueError, match=r"was saved by Trawl 0\.0\.1, but this is Trawl"):
            collector.load_checkpoint(folder)
        with pytest.warns(RuntimeWarning, match=r"was saved by Trawl 0\.0\.1"):
            assert collector.load_checkpoint(folder, on_state_mismatch="new_episodes")
        assert same(collector.next(), batches[0])
    rewrite(folder / names(folder)[1], format=2)
    with (
        make(Collector) as collector,
        pytest.raises(ValueError, match="has format 2, but this version of Trawl reads format 1"),
    ):
        collector.load_checkpoint(folder, on_state_mismatch="new_episodes")


def test_a_lock_is_of_one_process_and_of_the_folder_that_is_there(tmp_path):
    place, content = tmp_path / "runs", {"number": 1}
    first, second = CheckpointFolder(place), CheckpointFolder(place)
    first.save(content)
    child = os.fork()
    if not child:
        refused = 0
        for _ in range(2):
            try:
                first.save(content)
            except BlockingIOError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    first.save(content)
    with pytest.raises(BlockingIOError):
        second.save(content)
    shutil.rmtree(place)
    second.save(content)
    with pytest.raises(BlockingIOError):
        first.save(content)
    second.close()
    assert first.save(content).exists()
    first.close()


def test_the_last_two_are_kept_and_other_names_are_left_alone(saved):
    folder, batches = saved
    numbers = ("9" * 224, "\u0663" * 8, "1" * 30)
    others = ["checkpoint-mine.pt", *(f"checkpoint-{one}-{'0' * 16}.pt" for one in numbers)]
    made = names(folder)[-1].replace("00000002", "00000003")
    (folder / made).mkdir()
    for name in others:
        (folder / name).touch()
    with make(Collector) as collector:
        with pytest.warns(RuntimeWarning, match=r"not a regular file.* before it is loaded"):
            assert collector.load_checkpoint(folder)
        assert collector.extra == {"number": 1}
        assert same(collector.next(), batches[0])
        _, before, last = (collector.checkpoint(folder, {"number": i}) for i in range(3))
        assert last.name.startswith("checkpoint-00000006-")
        assert {*os.listdir(folder)} == {*others, made, before.name, last.name}
        assert torch.load(last, weights_only=True)["extra"] == {"number": 2}
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


@pytest.mark.parametrize(
    "maker",
    [
        partial(Collector, Uncaptured, **ARGUMENTS),
        partial(MultiSyncCollector, [Uncaptured] * 2, **arguments(MultiSyncCollector)),
    ],
)
def test_environments_that_cannot_be_captured_are_told(maker, tmp_path):
    with maker() as collector:
        collector.next()
        assert set(collector.env_state_methods()) == {"none"}
        with pytest.warns(RuntimeWarning, match=r"new episodes will begin .* can't be captured"):
            collector.checkpoint(tmp_path)
        collector.checkpoint(tmp_path)  # warns only once
    with maker() as other:
        with pytest.raises(
            EnvStateError, match=r"can't continue the episodes: .* can't be captured"
        ):
            other.load_checkpoint(tmp_path)
        assert other.load_checkpoint(tmp_path, on_state_mismatch="new_episodes")
        assert not other.resumed
        assert other.stats()["frames"] == 60


def test_wrong_arguments_are_named(tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    with make(Collector) as collector, make(Collector) as other:
        collector.checkpoint(folder)
        for call in (collector.checkpoint, collector.load_checkpoint):
            for path in (file, str(file)):
                with pytest.raises(NotADirectoryError, match="path must be the folder"):
                    call(path)
        with pytest.raises(OSError, match="file"):
            collector.checkpoint(file / "in it")
        with pytest.raises(TypeError, match="path must be the path of a folder, but it is None"):
            collector.checkpoint(None)
        with pytest.raises(TypeError, match=r"extra must be a mapping .* but it is list"):
            collector.checkpoint(folder, extra=[1])
        with pytest.raises(TypeError, match="state_dict must be a mapping"):
            collector.load_state_dict("folder")
        # What failed elsewhere has not unlocked the folder.
        before = names(folder)
        with pytest.raises(BlockingIOError, match="another collector saves its checkpoints here"):
            other.checkpoint(folder)
        assert names(folder) == before
        collector.shutdown()
        other.checkpoint(folder)
    with pytest.raises(RuntimeError, match="was shut down"):
        collector.checkpoint(folder)
    with pytest.raises(FileNotFoundError, match="the first argument is the folder"):
        Collector.resume("CartPole-v1", str(folder), frames_per_batch=20)


def test_a_state_does_not_change_with_the_policy():
    class Fading(Noisy):
        def __init__(self):
            super().__init__(4, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, observation):
            self.calls += 1
            return super().forward(observation)

    module = TensorDictModule(Fading(), ["observation"], ["action"])
    with Collector("CartPole-v1", module, **ARGUMENTS) as collector:
        collector.next()
        calls = collector.state_dict()["policy_state_dict"]["module.calls"]
        before = float(calls)
        collector.next()
        assert float(calls) == before


@pytest.mark.parametrize(
    ("cls", "source"),
    [
        (Collector, "CartPole-v1"),
        (MultiAsyncCollector, TWO),
        (AsyncBatchedCollector, TWO),
    ],
)
def test_an_option_that_has_changed_is_named_once(cls, source, tmp_path):
    def limited(limit):
        if cls is AsyncBatchedCollector:
            return cls(source, policy=policy(), max_frames_per_traj=limit, **ARGUMENTS)
        return make(cls, source, max_frames_per_traj=limit)

    with limited(7) as collector, limited(7) as twin:
        collector.next()
        state = collector.state_dict()
        collector.checkpoint(tmp_path)
        twin.load_state_dict(state)
    told = "saved with max_frames_per_traj=7, but this collector has max_frames_per_traj=5: "
    with limited(5) as other:
        with pytest.warns(UserWarning, match=told) as caught:
            other.load_state_dict(state)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert other.next()["next", "truncated"].any()
        # A state that was saved before states had options.
        del state["options"]
        other.load_state_dict(state)
    if cls is Collector:
        with pytest.warns(UserWarning, match="this collector has max_frames_per_traj=None"):
            other = resumed(tmp_path)
        with other:
            assert other.resumed
            assert not other.next()["next", "truncated"].any()


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
    with make(Collector, max_frames_per_traj=7) as collector:
        state = collector.state_dict() | {"options": options}
        with pytest.raises(StateError, match=named):
            collector.load_state_dict(state)
