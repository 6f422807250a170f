"""Random actions are among those that an action mask allows, and policies can read it.

The tests of the oracle follow masks in info through environments of all kinds.
"""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FrameStackObservation, TimeLimit
from gymnasium.wrappers.vector import DictInfoToList
from tensordict.nn import TensorDictModule

from trawl.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector, RandomPolicy
from trawl.envs import GymEnv, ObserveActionMask, ParallelEnv, SerialEnv
from trawl.envs.entries.masks import masked_rand
from trawl.testing import NumberedTorchEnv

SPACES = {
    "discrete": spaces.Discrete(5),
    "multi": spaces.MultiDiscrete([3, 4]),
    "square": spaces.MultiDiscrete([3, 3]),
    "three": spaces.MultiDiscrete([2, 3, 2]),
    "large": spaces.MultiDiscrete([300, 300]),
    "two": spaces.Discrete(2),
    "bits": spaces.MultiBinary(4),
}


class Masked(gymnasium.Env):
    """Allows some of its actions, other ones at each step, and refuses the rest.

    Args:
        where: where the mask is: "obs", "info" or "method".
        space: name of the action space.
        form: form of the mask: "flat", with the masks of all choices one after the other; "rows",
            with a row for each choice; or "joint", with a dimension for each choice.
    """

    def __init__(self, where="obs", space="discrete", form="flat"):
        self.where, self.form, self.action_space = where, form, SPACES[space]
        space = self.action_space
        self.binary = isinstance(space, spaces.MultiBinary)
        if isinstance(space, spaces.MultiDiscrete):
            self.sizes = space.nvec
        else:
            self.sizes = [1] * space.n if self.binary else [space.n]
        parts = {"position": spaces.Box(0, 100, (1,), np.float32)}
        if where == "obs":
            parts["action_mask"] = spaces.Box(0, 2, self.shaped(self.parts(0)).shape, np.int8)
        self.observation_space = spaces.Dict(parts)
        self.steps = 0

    def parts(self, steps):
        """One array for each choice, or one for all combinations."""
        if self.binary:
            return [np.array([(steps + i) % 3], np.int8) for i in range(len(self.sizes))]
        found = [np.zeros(n, np.int8) for n in self.sizes]
        if self.form == "joint":
            found = [np.zeros(np.prod(self.sizes), np.int8)]
        for part in found:
            part[[steps % len(part), (2 * steps) % len(part)]] = 1
        return found

    def shaped(self, parts):
        if self.form == "rows":
            return np.stack(parts)
        return parts[0].reshape(self.sizes) if self.form == "joint" else np.concatenate(parts)

    def allows(self, action):
        if self.form == "joint":
            return self.shaped(self.parts(self.steps))[tuple(action)]
        choices = zip(np.atleast_1d(action), self.parts(self.steps), strict=True)
        if self.binary:
            return all(m == 2 or choice == m for choice, (m,) in choices)
        return all(mask[choice] for choice, mask in choices)

    def shown(self):
        obs, parts = {"position": np.array([self.steps], np.float32)}, self.parts(self.steps)
        mask = self.shaped(parts)
        if self.where == "obs":
            return obs | {"action_mask": mask}, {}
        if self.where == "method":
            return obs, {}
        several = len(parts) > 1 and self.form == "flat" and not self.binary
        return obs, {"action_mask": tuple(parts) if several else mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = int(self.np_random.integers(5))
        return self.shown()

    def step(self, action):
        if not self.allows(action):
            raise AssertionError(f"action {action} is not among {self.parts(self.steps)}")
        self.steps += 1
        return self.shown()[0], 1.0, self.steps % 7 == 0, False, self.shown()[1]


class Maskable(Masked):
    """Returns its masks from a method, as environments for sb3-contrib do."""

    def __init__(self, space="discrete"):
        super().__init__("method", space)

    def action_masks(self):
        parts = self.parts(self.steps)
        if self.binary:
            # An entry for each value of each bit.
            return [bit in (m, m - 2) or m == 2 for (m,) in parts for bit in (0, 1)]
        return np.concatenate(parts).astype(bool)


class Anything(Masked):
    """Allows all actions, and shows no mask."""

    def allows(self, action):
        return True

    def shown(self):
        return {"position": np.array([self.steps], np.float32)}, {}


def masked(where, space="discrete", form="flat"):
    return Maskable(space) if where == "method" else Masked(where, space, form)


def collected(source, policy=None, frames=100, **options):
    """A batch: the environment refuses an action that it does not allow."""
    with Collector(source, policy, frames_per_batch=frames, **options) as collector:
        return collector.next()


threads = partial(ParallelEnv, backend="thread")


def env_of(kind, where, space, form="flat", categorical=False):
    def plain():
        return TimeLimit(masked(where, space, form), 9)

    def one():
        return GymEnv(plain(), categorical_action_encoding=categorical)

    def vector(kind=gymnasium.vector.SyncVectorEnv, mode="SameStep", **options):
        return kind([plain] * 2, autoreset_mode=AutoresetMode(mode), **options)

    return {
        "single": one,
        "list": lambda: SerialEnv(2, one),
        "threads": lambda: threads(2, one),
        "processes": lambda: ParallelEnv(2, one),
        "vector": lambda: GymEnv(vector(), categorical_action_encoding=categorical),
        "vector of processes": lambda: vector(gymnasium.vector.AsyncVectorEnv, context="fork"),
        "dicts": lambda: DictInfoToList(vector(mode="NextStep")),
        "dicts, disabled": lambda: DictInfoToList(vector(mode="Disabled")),
        "vectors in threads": lambda: threads(2, vector),
        "vectors in threads, next": lambda: threads(2, partial(vector, mode="NextStep")),
        "vectors in a list": lambda: SerialEnv(2, partial(vector, mode="NextStep")),
    }[kind]


# Each two values of kind, place, space, form and encoding; the encoding is GymEnv's.
@pytest.mark.parametrize(
    ("kind", "where", "space", "form", "categorical"),
    [
        ("single", "obs", "discrete", "flat", False),
        ("single", "info", "multi", "flat", True),
        ("single", "method", "bits", "flat", True),
        ("single", "info", "square", "rows", False),
        ("single", "obs", "three", "joint", False),
        ("list", "obs", "multi", "flat", True),
        ("list", "info", "bits", "flat", False),
        ("list", "method", "discrete", "flat", False),
        ("list", "obs", "square", "rows", True),
        ("list", "info", "multi", "joint", True),
        ("threads", "obs", "multi", "flat", False),
        ("threads", "info", "bits", "flat", True),
        ("threads", "method", "discrete", "flat", True),
        ("threads", "info", "square", "rows", False),
        ("threads", "info", "three", "joint", True),
        ("processes", "obs", "bits", "flat", False),
        ("vector", "obs", "bits", "flat", False),
        ("vector", "info", "discrete", "flat", True),
        ("vector", "method", "multi", "flat", False),
        ("vector", "obs", "square", "rows", False),
        ("vector", "info", "multi", "joint", True),
        ("vector of processes", "info", "discrete", "flat", False),
        ("dicts", "info", "discrete", "flat", False),
        ("dicts, disabled", "method", "discrete", "flat", False),
        ("vectors in threads", "info", "discrete", "flat", False),
        ("vectors in threads, next", "method", "discrete", "flat", False),
        ("vectors in a list", "info", "discrete", "flat", False),
    ],
)
def test_random_actions_are_allowed(kind, where, space, form, categorical):
    source = env_of(kind, where, space, form, categorical)
    with Collector(source, frames_per_batch=160, total_frames=320) as collector:
        first, _ = collector
        assert collector.stats()["env_path"] == "array"
    actions = first["action"].flatten(0, first.ndim - 1).reshape(first.numel(), -1)
    if space in ("discrete", "multi") and form == "flat" and not categorical:
        # All that is allowed comes up.
        assert (actions.sum(0) > 0).all()
    assert len(actions.unique(dim=0)) > 3


@pytest.mark.parametrize(
    ("batch", "space", "form"),
    [
        (gymnasium.vector.SyncVectorEnv, "discrete", "flat"),
        (partial(SerialEnv, 2), "multi", "joint"),
        (partial(threads, 2), "square", "rows"),
    ],
)
def test_one_environment_among_others_may_have_no_masks(batch, space, form):
    env = batch([partial(one, "info", space, form) for one in (Masked, Anything)])
    # Each value of each choice is taken where there are no masks.
    assert (collected(env, frames=200)["action"][1].sum(0) > 0).all()


def test_actions_are_drawn_evenly_from_those_allowed():
    env = Masked()
    env.parts = lambda steps: [np.array([1, 0, 1, 1, 0], np.int8)]
    with Collector(env, frames_per_batch=1500) as collector:
        collector.set_seed(0)
        counts = collector.next()["action"].sum(0)
    assert counts[[1, 4]].tolist() == [0, 0]
    assert (counts[[0, 2, 3]] > 400).all()
    # If nothing is allowed, it is the first action.
    spec = GymEnv(Masked()).action_spec
    assert masked_rand(spec, torch.zeros(5)).tolist() == [1, 0, 0, 0, 0]


def test_the_random_policy_follows_the_mask_also_outside_of_a_collector():
    env = GymEnv(Masked())
    for policy in (RandomPolicy(), RandomPolicy(env.action_spec)):
        collected(Masked("obs", "square", "rows"), RandomPolicy())
        collected(Masked(), policy, frames=300)
    for policy in (RandomPolicy(env.action_spec), RandomPolicy(env.full_action_spec), None):
        env.rollout(50, policy)
    GymEnv(Masked("info")).rollout(50)


@pytest.mark.parametrize("where", ["obs", "info", "method"])
def test_workers_and_environments_that_are_ready_follow_it(where):
    sources = [partial(masked, where, "multi")] * 2
    options = {"frames_per_batch": 80, "total_frames": 160}
    for make, more in (
        (MultiSyncCollector, {"start_method": "inline"}),
        (AsyncBatchedCollector, {"env_backend": "threading", "policy": RandomPolicy()}),
    ):
        with make(sources, **options, **more) as collector:
            assert len(list(collector)) == 2


# --- the method


def test_a_method_is_called_for_random_actions_only():
    class Counted(Maskable):
        calls = 0
        num_envs = 4  # This is still one environment.

        def action_masks(self):
            self.calls += 1
            return np.ones(5, np.int8)

        def allows(self, action):
            return True

    def policy(position):
        return torch.eye(5, dtype=torch.int64)[0]

    env = Counted()
    with Collector(env, policy, frames_per_batch=100, init_random_frames=100) as collector:
        collector.next()
        before = env.calls
        collector.next()
        assert env.calls == before > 100


def test_environments_of_tensors_follow_a_method():
    class Tensors(NumberedTorchEnv):
        steps = 0

        def action_masks(self):
            return torch.arange(4).expand(3, 4) == self.steps % 4

        def step(self, actions):
            assert actions.tolist() == [self.steps % 4] * 3
            self.steps += 1
            return super().step(actions)

    with Collector(Tensors(3, lengths=[5]), frames_per_batch=60) as collector:
        collector.next()
        assert collector.stats()["env_path"] == "tensor"


def test_a_method_that_needs_arguments_is_none_of_this_kind():
    class Other(Anything):
        def action_masks(self, state):
            raise AssertionError("this is another method")

    assert len(collected(Other("method"))) == 100


# --- masks that are observed


def allowed_only(mask):
    """A policy that takes the last allowed action."""
    last = mask.shape[-1] - 1 - mask.flip(-1).long().argmax(-1)
    return torch.nn.functional.one_hot(last, mask.shape[-1])


@pytest.mark.parametrize("env", [Masked(), ObserveActionMask(Masked("info"))], ids=["obs", "info"])
def test_a_policy_reads_the_mask(env):
    policy = TensorDictModule(allowed_only, in_keys=["action_mask"], out_keys=["action"])
    batch = collected(env, policy, frames=50)
    assert (batch["action_mask"] * batch["action"]).sum() == 50


def test_a_mask_in_info_can_be_observed():
    class Half(Masked):
        """What is not zero is allowed."""

        def shown(self):
            obs, info = super().shown()
            return obs, {"action_mask": info["action_mask"] * 0.5}

    collected(lambda: ObserveActionMask(Half("info")))
    vector = gymnasium.vector.SyncVectorEnv([lambda: ObserveActionMask(Masked("info"))] * 2)
    assert collected(vector, frames=200)["action_mask"].shape == (2, 100, 5)
    (*_, taxi) = sorted(name for name in gymnasium.registry if name.startswith("Taxi-v"))
    env = GymEnv(ObserveActionMask(gymnasium.make(taxi)))
    assert set(env.reset().keys()) >= {"observation", "action_mask"}
    env = GymEnv(ObserveActionMask(Masked("info", "multi")))
    assert env.reset()["action_mask"].shape == (7,)
    with pytest.raises(TypeError, match=r"Discrete or MultiDiscrete action space, but .* is Box"):
        ObserveActionMask(gymnasium.make("Pendulum-v1"))
    with pytest.raises(KeyError, match=r"returned no info\['action_mask'\]"):
        Collector(ObserveActionMask(gymnasium.make("CartPole-v1")), frames_per_batch=10)


# --- what is no mask


class Odd(Anything):
    """Has an entry of the name of a mask, which is none."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict({"action_mask": spaces.Box(0, 1, (3,))})

    def shown(self):
        return {"action_mask": np.zeros(3, np.float32)}, {}


class Unfit(Anything):
    def action_masks(self):
        return np.ones(4)


class Late(gymnasium.Env):
    """Only its steps return masks; it may show text."""

    action_space = spaces.Discrete(3)

    def __init__(self, text=False):
        self.observation_space = spaces.Text(3) if text else spaces.Box(0, 1, ())
        self.first = "abc" if text else np.zeros((), np.float32)

    def reset(self, *, seed=None, options=None):
        return self.first, {}

    def step(self, action):
        return self.first, 0.0, False, False, {"action_mask": np.array([1, 0, 0])}


LATE = r"\['action_mask'\] of .*(Late|Vector).*: a step returns it, but the reset did not"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (lambda: Unfit("method"), r"ignore action_masks\(\).*shape \(4,\).*has 5 entries"),
        (Late, LATE),
        (lambda: Late(text=True), LATE),
        (lambda: gymnasium.vector.SyncVectorEnv([Late] * 2), LATE),
        (lambda: DictInfoToList(gymnasium.vector.SyncVectorEnv([Late] * 2)), LATE),
        (lambda: threads(2, Late), LATE),
    ],
)
def test_what_is_no_mask_is_ignored_with_one_warning(source, words):
    def begun():
        collector = Collector(source, frames_per_batch=60)
        assert (collector.next()["action"].reshape(60, -1).sum(0) > 0).all()
        return collector

    with pytest.warns(UserWarning, match=words):
        collector = begun()
    with collector:
        collector.next()  # without a warning


def test_entries_of_the_name_and_rollouts_warn_too():
    with pytest.warns(UserWarning, match=LATE):
        GymEnv(Late()).rollout(3)
    with pytest.warns(UserWarning, match=r"ignore the entry 'action_mask' of shape \(3,\)"):
        assert (collected(Odd)["action"].sum(0) > 0).all()
    stacked = GymEnv(FrameStackObservation(Masked(space="two"), 3))
    with pytest.warns(UserWarning, match=r"random actions ignore the entry .* of shape \(3, 2\)"):
        drawn = stacked.rand_action(stacked.reset())
    assert drawn["action"].shape == (2,)


def test_only_discrete_actions_have_a_mask():
    class Continuous(Late):
        action_space = spaces.Box(0, 1, (1,))

    collected(Continuous())  # without a warning


class Short(Masked):
    def shown(self):
        return super().shown()[0], {"action_mask": np.ones(3, np.int8)}


class Turned(Masked):
    def shown(self):
        return super().shown()[0], {"action_mask": np.ones((3, 2), np.int8)}


class Flattened(Masked):
    def step(self, action):
        obs, *outcome, _ = super().step(action)
        return obs, *outcome, {"action_mask": np.ones(7, np.int8)}


def joint(kind=Masked, space="multi"):
    return partial(kind, "info", space, "joint")


#: What has masks of a wrong shape, and what is said of it.
WRONG_SHAPES = [
    (
        lambda: Short("info"),
        r"of shape \(3,\), but its action has 5 choices: a mask must have the shape \(5,\)\n",
    ),
    *(
        (
            partial(batch, 1, joint(Turned, space)),
            rf"of shape \(3, 2\), but its action has {count} .* must have the shape {allowed}",
        )
        for batch in (SerialEnv, threads)
        for space, count, allowed in [
            ("multi", 7, r"\(7,\) or \(3, 4\)\n"),
            ("square", 6, r"\(6,\) or \(2, 3\) or \(3, 3\)\n"),
        ]
    ),
    (
        partial(threads, 1, joint(Flattened)),
        r"of shape \(7,\) in a step, but of shape \(3, 4\) before",
    ),
    (
        partial(threads, 1, joint(space="large")),
        r"90000 entries, but processes share masks of at most 65",
    ),
    *(
        (
            partial(batch, 2, [joint(), partial(Masked, "info", "multi")]),
            r"of the shapes \(3, 4\) and \(7,\): return masks",
        )
        for batch in (SerialEnv, threads)
    ),
]


@pytest.mark.parametrize(("source", "words"), WRONG_SHAPES)
def test_masks_of_wrong_shapes_are_an_error(source, words):
    with pytest.raises(ValueError, match=words):
        collected(source, frames=20)
