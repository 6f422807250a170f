import logging
import os
import pickle
import zipfile

import gymnasium
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn
from torch.export import Dim

from trawl import Collector, GymEnv, SerialEnv
from trawl.cli.errors import CliError
from trawl.cli.programs import load_file
from trawl.data import load


class Net(nn.Module):
    """Acts as a fixed function of a Pendulum's observation."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, observation):
        return torch.tanh(self.layer(observation))


class Two(nn.Module):
    def forward(self, first, second):
        return first + 0 * second


class Index(nn.Module):
    """Chooses by the pole's angle, as an index."""

    def forward(self, observation):
        return (observation[..., 2] > 0).long()


class OneHot(nn.Module):
    def forward(self, observation):
        index = (observation[..., 2] > 0).long()
        return nn.functional.one_hot(index, 2)


class Scores(nn.Module):
    def forward(self, observation):
        return observation[..., :2]


class WithValue(Net):
    def forward(self, observation):
        return super().forward(observation), observation.sum(-1, keepdim=True)


class Ran:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def export(module, *shape, dynamic=False, path="p.pt2", dtype=torch.float32):
    shapes = ({0: Dim("batch")},) if dynamic else None
    program = torch.export.export(module, (torch.zeros(shape, dtype=dtype),), dynamic_shapes=shapes)
    torch.export.save(program, path)
    return path


def script(module, path="p.pt"):
    torch.jit.script(module).save(path)
    return path


def envs(env_id, count):
    env = GymEnv(env_id) if count == 1 else SerialEnv(count, lambda: GymEnv(env_id))
    env.set_seed(0)
    return env


def collected(policy, env_id, count):
    """Frames by a policy, always from the same starts."""
    with Collector(envs(env_id, count), policy, frames_per_batch=30 * count) as collector:
        collector.set_seed(1)
        return next(collector.iterator())


@pytest.fixture
def loaded():
    """Loads a file for so many environments, and collects with it."""

    def call(path, env_id="Pendulum-v1", count=1, unsafe=False):
        env = envs(env_id, count)
        try:
            policy = load_file(path, env, unsafe)
        finally:
            env.close()
        return collected(policy, env_id, count)

    return call


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("form", ["single", "batch of one", "any batch", "script", "pickle"])
def test_a_file_acts_as_the_module_that_it_holds(form, count, loaded, tmp_path):
    net = Net()
    write = {
        "single": lambda: export(net, 3),
        "batch of one": lambda: export(net, 1, 3),
        "any batch": lambda: export(net, 5, 3, dynamic=True),
        "script": lambda: script(net),
        "pickle": lambda: torch.save(net, "p.pkl") or "p.pkl",
    }
    found = loaded(write[form](), count=count, unsafe=form == "pickle")
    expected = collected(net, "Pendulum-v1", count)
    torch.testing.assert_close(found["action"], expected["action"])
    torch.testing.assert_close(found["observation"], expected["observation"])


def test_a_batch_that_is_that_of_the_environments_is_taken_whole(loaded):
    net = Net()
    found = loaded(export(net, 4, 3), count=4)
    torch.testing.assert_close(found["action"], collected(net, "Pendulum-v1", 4)["action"])


@pytest.mark.parametrize(
    ("count", "words"), [(1, "there is 1 environment:"), (3, "there are 3 environments:")]
)
def test_a_batch_of_another_size_is_refused(count, words, loaded):
    with pytest.raises(CliError, match="batches of exactly 4 observations") as error:
        loaded(export(Net(), 4, 3), count=count)
    assert words in str(error.value)
    assert "--envs 4" in str(error.value)


def test_programs_take_the_fast_path():
    env = envs("Pendulum-v1", 1)
    policy = load_file(export(Net(), 1, 3), env, False)
    with Collector(env, policy, frames_per_batch=10) as collector:
        next(collector.iterator())
        assert collector.stats()["policy_path"] == "direct"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("module", [Index(), OneHot()], ids=["index", "one-hot"])
def test_a_choice_is_an_index_or_one_hot(module, count, loaded):
    found = loaded(export(module, 4), "CartPole-v1", count)
    assert found["action"].dtype == torch.int64
    assert torch.equal(found["action"].argmax(-1), (found["observation"][..., 2] > 0).long())


def test_scores_are_no_choice(loaded):
    with pytest.raises(CliError, match=r"a choice among \[2\]: return its index"):
        loaded(export(Scores(), 4), "CartPole-v1")


def test_more_outputs_are_recorded(loaded):
    found = loaded(export(WithValue(), 3))
    torch.testing.assert_close(found["output1"], found["observation"].sum(-1, keepdim=True))


def test_observations_are_cast_to_what_a_program_takes(loaded):
    found = loaded(export(Net().double(), 1, 3, dtype=torch.float64))
    assert found["action"].dtype == torch.float32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_observations_are_cast_to_what_a_script_computes_in(loaded):
    assert loaded(script(Net().double()))["action"].dtype == torch.float32


def test_a_tensordict_module_is_used_as_it_is(loaded):
    net = Net()
    torch.save(TensorDictModule(net, ["observation"], ["action"]), "p.pkl")
    found = loaded("p.pkl", unsafe=True)
    torch.testing.assert_close(found["action"], collected(net, "Pendulum-v1", 1)["action"])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: export(nn.Linear(4, 1), 4), r"takes input of shape \(4,\), but .* shape \(3,\)"),
        (lambda: export(nn.Linear(3, 1), 2, 2, 3), r"takes input of shape \(2, 2, 3\)"),
        (lambda: export(nn.Linear(3, 2), 3), r"float32 of shape \(2,\) for 'action', but .*\(1,\)"),
        (lambda: export(Index(), 3), r"returns torch.int64 of shape \(\)"),
    ],
    ids=["input", "rank", "output", "dtype"],
)
def test_a_program_for_another_environment_is_refused(make, words, loaded):
    with pytest.raises(CliError, match=words):
        loaded(make())


def test_a_program_with_other_inputs_is_refused(loaded):
    program = torch.export.export(Two(), (torch.zeros(3), torch.zeros(3)))
    torch.export.save(program, "p.pt2")
    with pytest.raises(CliError, match="takes 2 inputs, but the environment has 1 obs"):
        loaded("p.pt2")


class Parts(gymnasium.Env):
    """Observations and actions of several parts."""

    observation_space = spaces.Dict({"b": spaces.Box(-1, 1, (2,)), "a": spaces.Box(-1, 1, (3,))})
    action_space = spaces.Dict({"y": spaces.Box(-9, 9, (1,)), "x": spaces.MultiDiscrete([2, 3])})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.taken = action
        return self.observation_space.sample(), 0.0, False, False, {}


class PartsPolicy(nn.Module):
    def forward(self, first, second):
        choice = torch.stack([first[..., 0] > 0, second[..., 0] > 0], -1).long()
        return choice, first.sum(-1, keepdim=True) + second.sum(-1, keepdim=True)


def test_several_inputs_and_outputs_go_by_the_order_of_keys():
    env = GymEnv(Parts())
    sizes = [spec.shape for spec in env.observation_spec.values()]
    assert [list(env.observation_spec.keys()), env.action_keys] == [["a", "b"], ["x", "y"]]
    program = torch.export.export(PartsPolicy(), tuple(torch.zeros(size) for size in sizes))
    torch.export.save(program, "p.pt2")
    policy = load_file("p.pt2", env, False)
    with Collector(env, policy, frames_per_batch=20) as collector:
        batch = next(collector.iterator())
    a, b = batch["a"], batch["b"]
    torch.testing.assert_close(batch["y"], a.sum(-1, keepdim=True) + b.sum(-1, keepdim=True))
    first, second = batch["x"].split([2, 3], -1)
    assert torch.equal(first.argmax(-1), (a[:, 0] > 0).long())
    assert torch.equal(second.argmax(-1), (b[:, 0] > 0).long())


def test_inputs_by_name_are_refused(loaded):
    program = torch.export.export(Net(), (), {"observation": torch.zeros(3)})
    torch.export.save(program, "p.pt2")
    with pytest.raises(CliError, match="must take its observations as positional tensors"):
        loaded("p.pt2")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_script_for_another_environment_is_refused(loaded):
    with pytest.raises(CliError, match=r"can't be called .* mat1 and mat2") as error:
        loaded(script(nn.Linear(4, 1)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("form", ["torch", "torch before zip", "pickle"])
def test_a_pickle_is_not_loaded(form, protocol, loaded):
    if form == "pickle":
        with open("p", "wb") as file:
            pickle.dump(Ran(), file, protocol)
    else:
        torch.save(Ran(), "p", _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(
        CliError, match="not a policy" if protocol == 0 and form == "pickle" else "is a pickle"
    ):
        loaded("p")
    assert not os.path.exists("ran")


def test_a_pickle_is_loaded_if_asked_for(loaded):
    torch.save(Ran(), "p")
    with pytest.raises(CliError, match="of type NoneType, not a policy"):
        loaded("p", unsafe=True)
    assert os.path.exists("ran")


def test_a_module_is_put_into_evaluation(loaded):
    torch.save(nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5)), "p")
    assert (loaded("p", unsafe=True)["action"] != 0).all()


def test_weights_alone_are_no_policy(loaded):
    torch.save(Net().state_dict(), "p")
    with pytest.raises(CliError, match="OrderedDict, not a policy: save the whole module"):
        loaded("p", unsafe=True)


def replaced(path, ending, content):
    """The archive, with one of its records replaced (or added, if there is none such)."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(records)).split("/")[0]
    name = next((name for name in records if name.endswith(ending)), f"{root}/{ending}")
    records[name] = content
    with zipfile.ZipFile("changed.pt2", "w") as archive:
        for name, record in records.items():
            archive.writestr(name, record)
    return "changed.pt2"


def test_pickles_within_a_program_are_not_loaded(loaded):
    torch.save(Ran(), "evil")
    with open("evil", "rb") as file:
        path = replaced(export(Net(), 3), "sample_inputs/model.pt", file.read())
    with pytest.raises(CliError, match="can't be loaded"):
        loaded(path)
    assert not os.path.exists("ran")


@pytest.mark.parametrize("name", ["custom_obj_0", "opaque_obj_0", "OPAQUE_OBJ_0"])
def test_objects_within_a_program_are_not_loaded(name, loaded):
    path = replaced(export(Net(), 3), f"data/constants/{name}", pickle.dumps(Ran()))
    with pytest.raises(CliError, match=f"contains pickled objects .*{name}"):
        loaded(path)


def test_loading_leaves_the_process_as_it_was(loaded):
    before = dict(os.environ)
    loaded(export(Net(), 3))
    assert dict(os.environ) == before
    assert logging.root.manager.disable == logging.NOTSET


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a policy"),
        (b"print('hello')", "is not a policy"),
        (b"PK\x05\x06" + bytes(18), "zip"),
    ],
    ids=["empty", "text", "empty zip"],
)
def test_other_files_are_no_policies(content, words, loaded):
    with open("p.pt2", "wb") as file:
        file.write(content)
    with pytest.raises(CliError, match=words):
        loaded("p.pt2")


def test_a_damaged_program_is_told_in_one_line(loaded, caplog):
    path = replaced(export(Net(), 3), "models/model.json", b"{")
    caplog.clear()
    with pytest.raises(CliError, match="can't be loaded") as error:
        loaded(path)
    assert "\n" not in str(error.value)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_modules_in_the_current_folder_are_found(trawl):
    with open("only_here.py", "w") as file:
        file.write("from cli_policies import Net as make")
    code, _, err = trawl("collect", "Pendulum-v1", "--policy", "only_here:make", "--frames", 20)
    assert code == 0, err


@pytest.mark.parametrize(
    ("code", "module", "words"),
    [
        (None, "absent", "No module named 'absent' (not in this folder, and not installed)"),
        (None, "absent.py", "(not in this folder, and not installed)"),
        ("import absent", "uses_it", "importing uses_it failed: ModuleNotFoundError: "),
        ("open('absent')", "uses_it.py", "importing uses_it.py failed: FileNotFoundError: "),
    ],
)
def test_what_is_missing_is_the_module_or_what_it_uses(code, module, words, trawl):
    if code is not None:
        with open("uses_it.py", "w") as file:
            file.write(code)
    code, _, err = trawl("collect", "Pendulum-v1", "--policy", f"{module}:make")
    assert code == 2
    assert words in err


@pytest.mark.parametrize("factory", ["Net", "net", "slow", "with_hidden"])
def test_a_factory_in_a_module_gives_the_policy(factory, trawl):
    code, _, err = trawl("collect", "Pendulum-v1", "--policy", f"cli_policies:{factory}",
                         "--frames", 20, "--out", "d")  # fmt: skip
    assert (code, len(load("d"))) == (0, 20), err


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("two", "must take the environment or no argument, but it takes one, other"),
        ("breaks", "failed: RuntimeError: no luck"),
        ("nothing", "returned None instead of a policy; for random actions pass --policy random"),
        ("text", "policy must be callable"),
        ("number", "must name a function, but it is int"),
        ("nowhere", "has no attribute 'nowhere'"),
    ],
)
def test_what_is_wrong_with_a_factory_is_said(factory, words, trawl):
    code, _, err = trawl("collect", "Pendulum-v1", "--policy", f"cli_policies:{factory}")
    assert code == 2
    assert err.startswith("trawl: --policy ")
    assert words in err
    assert len(err.splitlines()) == 1
