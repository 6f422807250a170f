"""Policies from files, and from functions that the command line names."""

import hashlib
import logging
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import gymnasium
import pytest
import torch
from cli_parts import INLINE, trawl
from cli_parts import collected as collected_by_command
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn
from torch.export import Dim

from trawl import Collector, GymEnv, SerialEnv
from trawl.data import info
from trawl.extras.cli.errors import CliError
from trawl.extras.cli.policies import load_file

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Net(nn.Module):
    """Acts as a fixed function of a Pendulum's observation."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, observation):
        return torch.tanh(self.layer(observation))


class Index(nn.Module):
    """Chooses by the pole's angle, as an index."""

    def forward(self, observation):
        return (observation[..., 2] > 0).long()


class OneHot(Index):
    def forward(self, observation):
        return nn.functional.one_hot(super().forward(observation), 2)


class Function(nn.Module):
    """A module that is a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *observations):
        return self.function(*observations)


class Ran:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def export(module, *shapes, dynamic=False, dtype=torch.float32):
    """Exports a module for inputs of some shapes."""
    given = tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)
    sizes = {"dynamic_shapes": ({0: Dim("batch")},)} if dynamic else {}
    torch.export.save(torch.export.export(module, given, **sizes), "p.pt2")
    return "p.pt2"


def script(module):
    torch.jit.script(module).save("p.pt")
    return "p.pt"


def pickled(value):
    torch.save(value, "p.pkl")
    return "p.pkl"


def envs(env_id, count):
    env = GymEnv(env_id) if count == 1 else SerialEnv(count, lambda: GymEnv(env_id))
    env.set_seed(0)
    return env


def collected(policy, env_id="Pendulum-v1", count=1):
    """Frames by a policy, always from the same starts."""
    with Collector(envs(env_id, count), policy, frames_per_batch=30 * count) as collector:
        collector.set_seed(1)
        return next(collector.iterator())


def loaded(path, env_id="Pendulum-v1", count=1, unsafe=False):
    """Loads a file for so many environments, and collects with it."""
    env = envs(env_id, count)
    try:
        policy = load_file(path, env, unsafe)
    finally:
        env.close()
    return collected(policy, env_id, count)


@pytest.mark.parametrize(
    ("form", "counts"),
    [("single", (1, 4)), ("batch of one", (1, 4)), ("whole batch", (4,)), ("any batch", (1, 4)),
     ("script", (1, 4)), ("pickle", (1, 4)), ("tensordict module", (1,))],
)  # fmt: skip
def test_a_file_acts_as_the_module_that_it_holds(form, counts):
    net = Net()
    write = {
        "single": lambda: export(net, (3,)),
        "batch of one": lambda: export(net, (1, 3)),
        "whole batch": lambda: export(net, (4, 3)),
        "any batch": lambda: export(net, (5, 3), dynamic=True),
        "script": lambda: script(net),
        "pickle": lambda: pickled(net),
        "tensordict module": lambda: pickled(TensorDictModule(net, ["observation"], ["action"])),
    }
    path = write[form]()
    for count in counts:
        found = loaded(path, count=count, unsafe=path == "p.pkl")
        expected = collected(net, count=count)
        torch.testing.assert_close(found["action"], expected["action"])
        torch.testing.assert_close(found["observation"], expected["observation"])


def test_programs_take_the_fast_path():
    policy = load_file(export(Net(), (1, 3)), envs("Pendulum-v1", 1), False)
    with Collector(envs("Pendulum-v1", 1), policy, frames_per_batch=10) as collector:
        next(collector.iterator())
        assert collector.stats()["policy_path"] == "direct"


@pytest.mark.parametrize("module", [Index(), OneHot()], ids=["index", "one-hot"])
def test_a_choice_is_an_index_or_one_hot(module):
    path = export(module, (4,))
    for count in (1, 3):
        found = loaded(path, "CartPole-v1", count)
        assert found["action"].dtype == torch.int64
        assert torch.equal(found["action"].argmax(-1), (found["observation"][..., 2] > 0).long())


def test_more_outputs_are_recorded_and_observations_cast():
    net = Net().double()
    both = Function(lambda seen: (net(seen), seen.sum(-1, keepdim=True)))
    found = loaded(export(both, (1, 3), dtype=torch.float64))
    assert found["action"].dtype == torch.float32
    total = found["observation"].double().sum(-1, keepdim=True)
    torch.testing.assert_close(found["output1"], total)
    # A script is cast to what it computes in.
    assert loaded(script(net))["action"].dtype == torch.float32


def two(first, second):
    return first + 0 * second


def exported_by_name():
    program = torch.export.export(Net(), (), {"observation": torch.zeros(3)})
    torch.export.save(program, "p.pt2")
    return "p.pt2"


def content(data):
    def make():
        Path("p.pt2").write_bytes(data)
        return "p.pt2"

    return make


def replaced(ending, data):
    """A program with one of its records replaced (or added, if there is none such)."""
    with zipfile.ZipFile(export(Net(), (3,))) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(records)).split("/")[0]
    name = next((name for name in records if name.endswith(ending)), f"{root}/{ending}")
    records[name] = data
    with zipfile.ZipFile("changed.pt2", "w") as archive:
        for name, record in records.items():
            archive.writestr(name, record)
    return "changed.pt2"


def evil_record():
    return replaced("sample_inputs/model.pt", Path(pickled(Ran())).read_bytes())


def evil_object(name):
    return lambda: replaced(f"data/constants/{name}", pickle.dumps(Ran()))


def evil_pickle(protocol):
    return content(pickle.dumps(Ran(), protocol))


def old_pickle():
    torch.save(Ran(), "p", _use_new_zipfile_serialization=False)
    return "p"


REFUSALS = {
    "input": (lambda: export(nn.Linear(4, 1), (4,)), r"input of shape \(4,\), but .* shape \(3,\)"),
    "rank": (lambda: export(nn.Linear(3, 1), (2, 2, 3)), r"takes input of shape \(2, 2, 3\)"),
    "output": (lambda: export(nn.Linear(3, 2), (3,)), r"shape \(2,\) for 'action', but .*\(1,\)"),
    "dtype": (lambda: export(Index(), (3,)), r"returns torch.int64 of shape \(\)"),
    "inputs": (lambda: export(Function(two), (3,), (3,)), "takes 2 inputs, but the .* has 1 obs"),
    "by name": (exported_by_name, "must take its observations as positional tensors"),
    "script": (lambda: script(nn.Linear(4, 1)), r"can't be called .* mat1 and mat2"),
    "batch": (lambda: export(Net(), (4, 3)), "exactly 4 obs.* there is 1 environment: .* --envs 4"),
    "protocol 0": (evil_pickle(0), "not a policy"),
    "protocol 2": (evil_pickle(2), "is a pickle"),
    "protocol 5": (evil_pickle(5), "is a pickle"),
    "torch": (lambda: pickled(Ran()), "is a pickle"),
    "torch before zip": (old_pickle, "is a pickle"),
    "pickle within": (evil_record, "can't be loaded"),
    "custom object": (evil_object("custom_obj_0"), "contains pickled objects .*custom_obj_0"),
    "opaque object": (evil_object("opaque_obj_0"), "contains pickled objects .*opaque_obj_0"),
    "capitals": (evil_object("OPAQUE_OBJ_0"), "contains pickled objects .*OPAQUE_OBJ_0"),
    "damaged": (lambda: replaced("models/model.json", b"{"), "can't be loaded"),
    "empty": (content(b""), "is not a policy"),
    "text": (content(b"print('hello')"), "is not a policy"),
    "empty zip": (content(b"PK\x05\x06" + bytes(18)), "zip"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_file_that_is_no_policy_for_the_environment_is_refused_in_one_line(name, caplog):
    make, words = REFUSALS[name]
    path, before = make(), dict(os.environ)
    caplog.clear()
    with pytest.raises(CliError, match=words) as error:
        loaded(path)
    assert "\n" not in str(error.value)
    assert not os.path.exists("ran")
    # The process is as it was.
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert dict(os.environ) == before
    assert logging.root.manager.disable == logging.NOTSET


def test_for_several_environments_too():
    with pytest.raises(CliError, match=r"there are 3 environments: .* pass --envs 4"):
        loaded(export(Net(), (4, 3)), count=3)
    with pytest.raises(CliError, match=r"a choice among \[2\]: return its index"):
        loaded(export(Function(lambda seen: seen[..., :2]), (4,)), "CartPole-v1")


def test_a_pickle_is_loaded_if_asked_for():
    with pytest.raises(CliError, match="of type NoneType, not a policy"):
        loaded(pickled(Ran()), unsafe=True)
    assert os.path.exists("ran")
    with pytest.raises(CliError, match="OrderedDict, not a policy: save the whole module"):
        loaded(pickled(Net().state_dict()), unsafe=True)
    # A module is put into evaluation.
    path = pickled(nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5)))
    assert (loaded(path, unsafe=True)["action"] != 0).all()


class Parts(gymnasium.Env):
    """Observations and actions of several parts."""

    observation_space = spaces.Dict({"b": spaces.Box(-1, 1, (2,)), "a": spaces.Box(-1, 1, (3,))})
    action_space = spaces.Dict({"y": spaces.Box(-9, 9, (1,)), "x": spaces.MultiDiscrete([2, 3])})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


def parts_policy(first, second):
    choice = torch.stack([first[..., 0] > 0, second[..., 0] > 0], -1).long()
    return choice, first.sum(-1, keepdim=True) + second.sum(-1, keepdim=True)


def test_several_inputs_and_outputs_go_by_the_order_of_keys():
    env = GymEnv(Parts())
    sizes = [spec.shape for spec in env.observation_spec.values()]
    assert [list(env.observation_spec.keys()), env.action_keys] == [["a", "b"], ["x", "y"]]
    policy = load_file(export(Function(parts_policy), *sizes), env, False)
    with Collector(env, policy, frames_per_batch=20) as collector:
        batch = next(collector.iterator())
    a, b = batch["a"], batch["b"]
    torch.testing.assert_close(batch["y"], a.sum(-1, keepdim=True) + b.sum(-1, keepdim=True))
    first, second = batch["x"].split([2, 3], -1)
    assert torch.equal(first.argmax(-1), (a[:, 0] > 0).long())
    assert torch.equal(second.argmax(-1), (b[:, 0] > 0).long())


# --- by the command


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_is_loaded_by_each_worker(workers):
    path = script(Net()) if workers else export(Net(), (3,))
    more = INLINE if workers else []
    frames = collected_by_command("Pendulum-v1", "--policy", path, "--frames", 40,
                                  *more)  # fmt: skip
    assert len(frames["action"].unique()) == 40
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    assert info("d")["policy_sha256"] == digest
    os.rename("p.pt2" if path == "p.pt2" else "p.pt", "old")
    export(Net(), (3,)) if path == "p.pt2" else script(Net())
    code, _, err = trawl("collect", "Pendulum-v1", "--policy", path, "--frames", 80, "--out", "d",
                         "--resume", *more)  # fmt: skip
    assert code == 2
    assert f"{path} has changed since d was collected with it" in err


@pytest.mark.parametrize("factory", ["Net", "net", "slow", "with_hidden"])
def test_a_factory_in_a_module_gives_the_policy(factory):
    policy = f"cli_policies:{factory}"
    assert len(collected_by_command("Pendulum-v1", "--policy", policy, "--frames", 20)) == 20


def test_modules_and_files_of_the_current_folder_are_found():
    Path("only_here.py").write_text("from cli_policies import Net as make")
    collected_by_command("Pendulum-v1", "--policy", "only_here:make", "--frames", 20)
    shutil.copy(Path(__file__).with_name("cli_envs.py"), "mine.py")
    policy = ["--policy", "mine.py:gaussian"]
    for workers in (0, 1):
        frames = collected_by_command("Pendulum-v1", *policy, "--frames", 40, "--workers", workers,
                                      out=f"d{workers}")  # fmt: skip
        assert frames["action"].std() > 0.5
