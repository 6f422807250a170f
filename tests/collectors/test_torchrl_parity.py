"""The same arguments to TorchRL's collector and to Trawl's: the same batches come out.

Where TorchRL fails, or does something that nobody wants, the test says what Trawl does instead.
"""

import itertools

import gymnasium
import numpy as np
import pytest
import torch
from collector_parts import keys, layout, named
from gymnasium import spaces
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

import trawl.collectors
from trawl.envs import SerialEnv as TrawlSerialEnv

torchrl_collectors = pytest.importorskip("torchrl.collectors")

from torchrl.data import Bounded, OneHot  # noqa: E402
from torchrl.envs import (  # noqa: E402
    GymEnv,
    GymWrapper,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules import (  # noqa: E402
    MLP,
    ActorValueOperator,
    AdditiveGaussianModule,
    EGreedyModule,
    GRUModule,
    LSTMModule,
    OneHotCategorical,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueActor,
    RandomPolicy,
    TanhNormal,
    ValueOperator,
)
from torchrl_parts import Different, quiet  # noqa: E402

try:
    from torchrl.envs.transforms import PolicyVersion
except ImportError:  # TorchRL before 0.15
    from torchrl.envs.llm.transforms import PolicyVersion

TRAJ_IDS = ("collector", "traj_ids")
SIZE = {"frames_per_batch": 24, "total_frames": 48}


class Dicts(gymnasium.Env):
    """Observes a nested dict of several dtypes."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "body": spaces.Dict(
                {
                    "joints": spaces.Box(-np.inf, np.inf, (3,), np.float32),
                    "mode": spaces.Discrete(3),
                    "digits": spaces.MultiDiscrete([2, 3]),
                    "bits": spaces.MultiBinary(4),
                }
            ),
        }
    )
    action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps >= 5, False, {}


def cart():
    return GymEnv("CartPole-v1")


def pendulum():
    return GymEnv("Pendulum-v1")


def lake():
    return GymEnv("FrozenLake-v1")


def dicts():
    return GymWrapper(Dicts())


def theirs(env, policy=None, **options):
    with quiet():
        collector = torchrl_collectors.Collector(env, policy, **SIZE | options)
        found = list(collector)
        collector.shutdown()
    return found


def ours(env, policy=None, **options):
    with trawl.collectors.Collector(env, policy, **SIZE | options) as collector:
        fake, found = collector.fake_tensordict(), list(collector)
    if not {"split_trajs", "interruptor"} & options.keys():
        assert layout(fake) == layout(found[0])
        assert (fake.names, fake.device) == (found[0].names, found[0].device)
    return found


def made(maker):
    """What ``maker`` makes, the same each time."""
    torch.manual_seed(0)
    with quiet():
        return maker()


def compare(env, own_env=None, policy=lambda: None, **options):
    """Layouts of all batches; returns the batches of both."""
    expected = theirs(env, made(policy), **options)
    found = ours(env if own_env is None else own_env, made(policy), **options)
    assert len(found) == len(expected)
    # Of several trajectories, whose lengths are random, TorchRL 0.15 names the dimension of time.
    split = options.get("split_trajs")
    for one, other in zip(found, expected, strict=True):
        if not split:
            assert layout(one) == layout(other)
            assert one.batch_size == other.batch_size
        assert {k: v[1] for k, v in layout(one).items()} == {
            k: v[1] for k, v in layout(other).items()
        }
        assert list(one.names) == ([None, None] if split else list(other.names))
        assert one.device == other.device
    return found, expected


# --- environments


def transformed():
    env = TransformedEnv(cart(), RewardSum())
    env.append_transform(StepCounter(max_steps=7))
    env.append_transform(InitTracker())
    return env


ENVS = {
    "FrozenLake": (lake, "FrozenLake-v1"),
    "dicts": (dicts, Dicts),
    "three": (lambda: SerialEnv(3, cart), ["CartPole-v1"] * 3),
    "three dicts": (lambda: SerialEnv(3, dicts), lambda: TrawlSerialEnv(3, Dicts)),
    "batch in a batch": (
        lambda: SerialEnv(2, lambda: SerialEnv(3, cart)),
        lambda: TrawlSerialEnv(2, lambda: TrawlSerialEnv(3, "CartPole-v1")),
    ),
    "transformed": (transformed, None),
    "transformed three": (lambda: TransformedEnv(SerialEnv(3, pendulum), RewardSum()), None),
    "three transformed": (lambda: SerialEnv(3, transformed), None),
    "a list": (lambda: SerialEnv(2, cart), lambda: [cart, cart]),
    "a list of transformed": (
        lambda: SerialEnv(2, transformed),
        lambda: [transformed(), transformed()],
    ),
}


@pytest.mark.parametrize("name", ENVS)
def test_environments_give_the_same_layout(name):
    env, own = ENVS[name]
    compare(env, own() if name.startswith("a list") else own)


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize(
    ("nested", "options"),
    [(True, {}), (False, {"set_truncated": True}), (True, {"compact_obs": True})],
    ids=str,
)
def test_agents_give_the_same_batches(several, nested, options):
    make = lambda: Different(sizes=(3, 3), nested=nested)  # noqa: E731
    found, expected = compare(SerialEnv(2, make) if several else make, **options)
    for one, other in zip(found, expected, strict=True):
        assert keys(one) == keys(other)
        for key in keys(one) - {("agents", "action")}:
            assert torch.equal(one[key], other[key]), key


# --- options

OPTIONS = [
    {"max_frames_per_traj": 5},
    {"set_truncated": True},
    {"compact_obs": True},
    {"compact_obs": True, "max_frames_per_traj": 5},
    {"track_traj_ids": False},
    {"reset_at_each_iter": True},
    {"return_same_td": True},
    {"use_buffers": False},
    {"track_policy_version": True},
    {"track_policy_version": True, "compact_obs": True},
    {"device": "cpu"},
    {"storing_device": "cpu"},
    {"env_device": "cpu"},
    {"policy_device": "cpu"},
    {"init_random_frames": 24},
    {"postproc": lambda batch: batch.set("twice", 2 * batch["next", "reward"])},
    {"exploration_type": InteractionType.DETERMINISTIC},
    {"auto_register_policy_transforms": True},
    {"auto_register_policy_transforms": False},
    {"no_cuda_sync": True},
]
OWN = pytest.mark.parametrize("own", [None, "Pendulum-v1"], ids=["their environment", "own"])


def quarters(cases):
    """Gives each case their environment or own ones, one or several, in turn."""
    for number, case in enumerate(cases):
        yield case, number % 2 == 0, number // 2 % 2 == 1


@pytest.mark.parametrize(("options", "own", "several"), list(quarters(OPTIONS)), ids=named)
def test_options_have_the_same_effect(options, own, several):
    # A policy without modules gets no transforms from TorchRL, whatever is asked for.
    policy = {"policy": actor} if "auto_register_policy_transforms" in options else {}
    # TorchRL tracks no versions in a batch.
    several &= "track_policy_version" not in options
    env = (lambda: SerialEnv(3, cart)) if several else cart
    mine = ["CartPole-v1"] * 3 if several else "CartPole-v1"
    compare(env, mine if own else None, **policy, **options)


@OWN
def test_split_trajectories_are_the_same(own):
    with pytest.warns(UserWarning, match=r"split_trajs"):
        (one, *_), (other, *_) = compare(pendulum, own, split_trajs=True, max_frames_per_traj=5)
    assert layout(one) == layout(other)
    for key in (("collector", "mask"), TRAJ_IDS):
        assert torch.equal(one[key], other[key])


class Third:
    """Interrupts a collector when it asks for the third time."""

    asked = 0

    def collection_stopped(self):
        self.asked += 1
        return self.asked == 3


@OWN
def test_an_interrupted_batch_is_the_same(own):
    expected = theirs(pendulum, interruptor=Third())[0]
    found = ours(own or pendulum, interruptor=Third())[0]
    assert layout(found) == layout(expected)
    assert found[TRAJ_IDS].tolist() == expected[TRAJ_IDS].tolist() == [0] * 3 + [-1] * 21
    # Rows without a step are a trajectory for TorchRL.
    with pytest.warns(UserWarning, match=r"split_trajs"):
        (batch, *_) = ours(own or pendulum, interruptor=Third(), split_trajs=True)
    assert batch.batch_size == (1, 3)


def test_environment_kwargs_reach_a_batch_of_torchrl():
    seen = []

    def make(**kwargs):
        seen.append(kwargs)
        return cart()

    ours(SerialEnv(2, make), create_env_kwargs={"frame_skip": 2})
    assert seen[-2:] == [{"frame_skip": 2}] * 2


# --- policies


def linear(in_features, out_features):
    return TensorDictModule(
        nn.Linear(in_features, out_features), in_keys=["observation"], out_keys=["action"]
    )


def actor():
    """A categorical policy for CartPole."""
    return ProbabilisticActor(
        TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def tanh_normal():
    """A Gaussian policy for Pendulum."""
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2, "high": 2},
        return_log_prob=True,
    )


def q_values():
    spec = OneHot(2)
    net = MLP(in_features=4, out_features=2, num_cells=[8])
    return TensorDictSequential(
        QValueActor(net, in_keys=["observation"], spec=spec),
        EGreedyModule(spec=spec, eps_init=0.5, annealing_num_steps=100),
    )


def actor_value():
    hidden = TensorDictModule(nn.Linear(4, 8), in_keys=["observation"], out_keys=["hidden"])
    policy = ProbabilisticActor(
        TensorDictModule(nn.Linear(8, 2), in_keys=["hidden"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )
    return ActorValueOperator(hidden, policy, ValueOperator(nn.Linear(8, 1), in_keys=["hidden"]))


def additive(spec):
    return lambda: TensorDictSequential(
        linear(3, 1), AdditiveGaussianModule(spec=spec, annealing_num_steps=100)
    )


def first_choice(observation):
    return nn.functional.one_hot(torch.zeros(observation.shape[:-1], dtype=torch.int64), 2)


class Plain(nn.Module):
    """A module that is no TensorDict module, with weights."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, observation):
        return self.net(observation)


def of_tensordict(tensordict):
    return tensordict.set("action", tensordict["observation"][..., :1])


def counting(td):
    """Writes what it reads at the next step."""
    td["count"] = td.get("count", torch.zeros(*td.shape, 1)) + 1
    return td.set("action", td["observation"][..., :1])


POLICIES = {
    "random": (lambda: None, pendulum, "Pendulum-v1"),
    "TorchRL's random": (RandomPolicy, pendulum, "Pendulum-v1"),
    "TorchRL's random with spec": (
        lambda: RandomPolicy(pendulum().action_spec),
        pendulum,
        "Pendulum-v1",
    ),
    "module": (lambda: linear(3, 1), pendulum, "Pendulum-v1"),
    "categorical": (actor, cart, "CartPole-v1"),
    "tanh normal": (tanh_normal, pendulum, "Pendulum-v1"),
    "q values": (q_values, cart, "CartPole-v1"),
    "actor and value": (actor_value, cart, "CartPole-v1"),
    "policy of actor and value": (lambda: actor_value().get_policy_operator(), cart, "CartPole-v1"),
    "additive noise": (additive(Bounded(-2, 2, (1,))), pendulum, "Pendulum-v1"),
    "additive noise without spec": (additive(None), pendulum, "Pendulum-v1"),
    "function": (lambda: first_choice, cart, "CartPole-v1"),
    "plain module": (Plain, pendulum, "Pendulum-v1"),
    "function of a TensorDict": (lambda: of_tensordict, pendulum, "Pendulum-v1"),
    "function with a memory": (lambda: counting, pendulum, "Pendulum-v1"),
}


@pytest.mark.parametrize(("policy", "own", "several"), list(quarters(POLICIES)))
def test_policies_give_the_same_layout(policy, own, several):
    make, env, env_id = POLICIES[policy]
    if several and "spec" not in policy:
        compare(lambda: SerialEnv(3, env), [env_id] * 3 if own else None, policy=make)
    else:
        compare(env, env_id if own else None, policy=make)


@pytest.mark.parametrize(
    ("policy", "own", "options"),
    [
        ("tanh normal", False, {"init_random_frames": 24}),
        ("q values", True, {"init_random_frames": 24}),
        ("actor and value", True, {"init_random_frames": 24}),
        ("tanh normal", True, {"init_random_frames": 24}),
        ("categorical", False, {"exploration_type": InteractionType.MODE}),
        ("categorical", True, {"exploration_type": InteractionType.DETERMINISTIC}),
    ],
    ids=named,
)
def test_other_actions_have_the_layout_of_the_policys(policy, own, options):
    make, env, env_id = POLICIES[policy]
    compare(env, env_id if own else None, policy=make, **options)


def test_a_policy_for_torchrl_environments_is_compiled():
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    policy = TensorDictModule(first_choice, in_keys=["observation"], out_keys=["action"])
    (batch, *_) = ours(cart, policy, compile_policy={"backend": backend})
    assert graphs
    assert batch["action"].argmax(-1).tolist() == [0] * 24


# --- recurrent policies


def recurrent(cls):
    """A policy with memory for CartPole."""

    def make():
        return TensorDictSequential(
            cls(4, 8, in_key="observation", out_key="embedding"),
            TensorDictModule(nn.Linear(8, 2), in_keys=["embedding"], out_keys=["logits"]),
            TensorDictModule(
                lambda logits: nn.functional.one_hot(logits.argmax(-1), 2),
                in_keys=["logits"],
                out_keys=["action"],
            ),
        )

    return make


def primed(cls, env=cart):
    """CartPole with all that TorchRL needs for a policy with memory."""

    def make():
        prepared = TransformedEnv(env(), InitTracker())
        prepared.append_transform(made(recurrent(cls))[0].make_tensordict_primer())
        return prepared

    return make


ADDED = {"auto_register_policy_transforms": True}


@pytest.mark.parametrize(
    ("cls", "env", "own", "options"),
    [
        # TorchRL's environment needs its transforms; Trawl adds them, or does without.
        (GRUModule, primed(GRUModule), cart, {}),
        (LSTMModule, primed(LSTMModule), None, {"max_frames_per_traj": 5}),
        (LSTMModule, primed(LSTMModule), "CartPole-v1", {"init_random_frames": 24}),
        (GRUModule, lambda: SerialEnv(3, primed(GRUModule)), ["CartPole-v1"] * 3, {}),
        (LSTMModule, cart, None, ADDED),
        (GRUModule, cart, "CartPole-v1", ADDED),
    ],
    ids=[*map(str, range(6))],
)
def test_recurrent_policies_give_the_same_layout(cls, env, own, options):
    compare(env, own, policy=recurrent(cls), **options)


def test_added_transforms_are_not_added_twice():
    policy = made(recurrent(LSTMModule))
    env = primed(LSTMModule)()
    before = len(env.transform)
    with trawl.collectors.Collector(
        env, policy, frames_per_batch=8, auto_register_policy_transforms=True
    ) as collector:
        assert collector.env is env
        assert len(env.transform) == before


def test_ornstein_uhlenbeck_noise_is_the_same():
    def noisy():
        noise = OrnsteinUhlenbeckProcessModule(spec=Bounded(-2, 2, (1,)), annealing_num_steps=100)
        return TensorDictSequential(linear(3, 1), noise)

    found, _ = compare(
        lambda: TransformedEnv(pendulum(), InitTracker()),
        "Pendulum-v1",
        policy=noisy,
        max_frames_per_traj=5,
    )
    assert found[0]["is_init"][:, 0].nonzero().flatten().tolist() == [0, 5, 10, 15, 20]


# --- values


def choose(observation):
    return nn.functional.one_hot((observation[..., 2:].sum(-1) > 0).long(), 2)


def deterministic():
    return TensorDictModule(choose, in_keys=["observation"], out_keys=["action"])


def three_carts():
    return SerialEnv(3, cart)


@pytest.mark.parametrize(
    ("policy", "env", "own", "options"),
    [
        (deterministic, cart, cart, {"max_frames_per_traj": 7}),
        (deterministic, cart, "CartPole-v1", {"set_truncated": True}),
        (deterministic, three_carts, three_carts, {"frames_per_batch": 60}),
        (recurrent(LSTMModule), primed(LSTMModule), primed(LSTMModule), {}),
        (recurrent(GRUModule), primed(GRUModule), "CartPole-v1", {}),
    ],
    ids=[*map(str, range(5))],
)
def test_after_a_seed_the_frames_are_the_same(policy, env, own, options):
    def values(cls, source):
        with quiet():
            collector = cls(source, made(policy), **{"frames_per_batch": 50, **options})
            collector.reset(seed=5)
            found = list(itertools.islice(collector, 3))
            collector.shutdown()
        return found

    expected = values(torchrl_collectors.Collector, env)
    found = values(trawl.collectors.Collector, own)
    for one, other in zip(found, expected, strict=True):
        assert keys(one) >= keys(other)
        for key in keys(other) - {TRAJ_IDS}:
            torch.testing.assert_close(one[key], other[key])
        # Ids differ by what the reset before used up, and nothing else.
        first, their_first = (batch[TRAJ_IDS].flatten()[0] for batch in (one, other))
        assert torch.equal(one[TRAJ_IDS] - first, other[TRAJ_IDS] - their_first)


# --- where TorchRL fails


def test_after_a_seed_the_first_frame_is_the_environments_own():
    env = pendulum()
    expected_seed = env.set_seed(9)
    expected = env.reset()
    action = torch.tensor([0.5])
    after = env.step(expected.clone().set("action", action))
    env.close()
    policy = TensorDictModule(
        lambda o: action.expand(*o.shape[:-1], 1), in_keys=["observation"], out_keys=["action"]
    )
    with trawl.collectors.Collector(pendulum, policy, frames_per_batch=4) as collector:
        next(iter(collector))
        assert collector.set_seed(9, static_seed=True) == 9
        assert collector.set_seed(9) == expected_seed
        batch = next(iter(collector))
    assert torch.equal(batch["observation"][0], expected["observation"])
    assert torch.equal(batch["next", "observation"][0], after["next", "observation"])


def test_one_seed_gives_equal_batches_of_torchrl_environments():
    found = []
    for _ in range(2):
        with trawl.collectors.Collector(
            TransformedEnv(SerialEnv(2, pendulum), RewardSum()), made(tanh_normal), **SIZE
        ) as collector:
            collector.set_seed(4)
            found.append(list(collector))
    assert all((one == other).all() for one, other in zip(*found, strict=True))


def test_recurrent_policies_need_no_preparation():
    (batch, *_) = ours(cart, made(recurrent(LSTMModule)))
    assert {"is_init", "recurrent_state_h", "recurrent_state_c"} <= keys(batch)
    begins = batch["is_init"][:, 0]
    assert not batch["recurrent_state_h"][begins].any()
    goes_on = ~batch["next", "done"][:-1, 0]
    assert torch.equal(
        batch["recurrent_state_h"][1:][goes_on], batch["next", "recurrent_state_h"][:-1][goes_on]
    )
    # A compact batch has no stale memory.
    (batch, *_) = ours(primed(LSTMModule), made(recurrent(LSTMModule)), compact_obs=True)
    assert ("next", "recurrent_state_h") not in keys(batch)
    assert batch["recurrent_state_h"].any()


def test_a_version_that_the_environment_writes_itself_may_be_passed():
    version = PolicyVersion()
    env = TransformedEnv(SerialEnv(2, cart), version)
    with trawl.collectors.Collector(env, **SIZE, track_policy_version=version) as collector:
        collector.increment_version()
        assert next(iter(collector))["policy_version"].tolist() == [[1] * 12] * 2


def test_steps_are_not_counted_twice():
    with pytest.raises(
        ValueError, match=r"max_frames_per_traj=3 counts steps in the entry 'step_count'"
    ):
        ours(transformed, max_frames_per_traj=3)


def test_statistics_say_why_the_fast_path_is_not_taken():
    with trawl.collectors.Collector(cart, frames_per_batch=4) as collector:
        next(iter(collector))
        stats = collector.stats()
    assert stats["env_path"] == "tensordict"
    assert "GymEnv is not a Gymnasium environment" in stats["env_path_reason"]
