"""What Trawl takes from TorchRL under private names, and what breaks without it."""

import inspect
import re
from pathlib import Path

import gymnasium
import torch
from libraries import require

require("torchrl")

from torchrl.data import LazyTensorStorage, ReplayBuffer, Unbounded  # noqa: E402
from torchrl.envs import Compose, EnvBase, GymEnv, SerialEnv, TransformedEnv  # noqa: E402
from torchrl.envs.transforms import DoubleToFloat, RewardSum  # noqa: E402
from torchrl.modules import AdditiveGaussianModule  # noqa: E402

from trawl.foreign import torchrl as names  # noqa: E402


def pendulum():
    return GymEnv("Pendulum-v1", device="cpu")


def test_a_buffer_has_a_storage():
    """Without it, frames of different shapes reach a storage of tensors."""
    storage = LazyTensorStorage(10, ndim=2)
    assert names.storage_of(ReplayBuffer(storage=storage)) is storage
    assert names.storage_of(object()) is None


def test_a_module_that_lacks_a_spec_is_noticed():
    """Such a module gets the environment's."""
    module = AdditiveGaussianModule(spec=None)
    assert names.lacks_spec(module)
    module.spec = Unbounded(1)
    assert not names.lacks_spec(module)
    assert not names.lacks_spec(torch.nn.Linear(1, 1))


def test_an_environment_has_a_method_for_its_reset():
    """The arguments from ``reset_kwargs`` are checked by its signature."""

    class Own(EnvBase):
        def _reset(self, tensordict, level=0):
            return tensordict

        _step = _set_seed = None

    assert "level" in inspect.signature(names.reset_of(Own())).parameters
    assert "level" not in inspect.signature(Own().reset).parameters


def test_a_wrapper_has_the_environment_in_it():
    """Its state is captured, and the arguments of its resets are known."""
    env = pendulum()
    inner = names.wrapped_env(env)
    assert isinstance(inner, gymnasium.Env)
    assert names.simulator_of(env) is inner
    assert names.SIMULATOR in names.DERIVED
    other = gymnasium.make("Pendulum-v1")
    names.set_simulator(env, other)
    assert names.wrapped_env(env) is other
    for one in (inner, other):
        one.close()


def test_a_batch_has_its_environments():
    """The state of a batch is that of its environments."""
    batch = SerialEnv(2, pendulum)
    assert list(names.parts_of_batch(batch)) == []
    batch.reset()
    assert [type(one) for one in names.parts_of_batch(batch)] == [GymEnv, GymEnv]
    batch.close()


def test_a_transform_keeps_the_environment_before_it():
    """A captured state must say whether there is one, as it has a state, too."""
    env = TransformedEnv(pendulum(), Compose(RewardSum(), DoubleToFloat()))
    transform = env.transform[1]
    assert names.cached_parent(transform) is None
    parent = transform.parent
    assert names.cached_parent(transform) is parent
    names.forget_parent(transform)
    assert names.cached_parent(transform) is None
    assert transform.parent is not parent
    assert set(names.modules_in(env.transform)) == {"transforms"}
    assert names.modules_in(object.__new__(type("Empty", (), {}))) == {}
    env.close()


def test_a_transform_has_the_keys_that_it_was_given():
    """A state is refused if it belongs to transforms with other keys."""
    assert names.own_keys(RewardSum(["reward"], ["sum"])) == [["reward"], ["sum"]]


def test_an_environment_has_its_input_spec():
    """Masks of actions are in it: a copy of it would not be restored."""
    env = pendulum()
    assert names.input_spec(env)["full_action_spec", "action"] == env.action_spec
    assert names.input_spec(env) is names.input_spec(env)
    env.close()


def test_objects_have_their_tensors():
    module = torch.nn.BatchNorm1d(2)
    found = names.tensors_in(module)
    assert found["_parameters/weight"] is module.weight
    assert found["_buffers/running_mean"] is module.running_mean
    assert names.tensors_in(object.__new__(type("Empty", (), {}))) == {}


def test_derived_attributes_are_those_of_an_environment():
    """Others belong to its state. If a name is gone, the library keeps that elsewhere now."""
    env = TransformedEnv(pendulum(), Compose(RewardSum()))
    env.rollout(2)
    there = {name for one in (env, env.base_env, *env.transform) for name in vars(one)}
    assert len(there & names.DERIVED) > len(names.DERIVED) / 2
    env.close()
    # The others come and go.
    folder = Path(inspect.getfile(EnvBase)).parent
    source = "".join(path.read_text() for path in folder.rglob("*.py"))
    assert [name for name in names.DERIVED if not re.search(rf"\b{name}\b", source)] == []


def test_the_actor_of_a_transform_receives_weights():
    """``RayModuleTransformScheme`` calls methods of the module in the actor by these names."""
    from torchrl.envs.transforms.module import ModuleTransform, RayModuleTransform
    from torchrl.envs.transforms.ray_service import RayTransform

    class Method:
        def __init__(self, name):
            self.name = name

        def remote(self, *given):
            return self.name, given

    class Actor:
        def __getattr__(self, name):
            return Method(name)

    transform = RayModuleTransform.__new__(RayModuleTransform)
    vars(transform)["_actor"] = Actor()
    assert "_actor" in RayTransform.__init__.__code__.co_names
    actor = names.actor_of(transform)
    for name, given in (
        names.connect_scheme(actor, "scheme", "model"),
        names.receive_weights(actor),
    ):
        inspect.signature(getattr(ModuleTransform, name)).bind(None, *given)
