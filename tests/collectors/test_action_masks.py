"""Random actions are among those that an action mask allows, and policies can read it."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, TimeLimit
from gymnasium.wrappers.vector import DictInfoToList
from tensordict.nn import TensorDictModule

from trawl.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector, RandomPolicy
from trawl.envs import GymEnv, ObserveActionMask, ParallelEnv, SerialEnv
from trawl.envs.entries.masks import masked_rand
from trawl.testing import NumberedTorchEnv


class Masked(gymnasium.Env):
    """Allows one or two of its actions, other ones at each step, and refuses the rest.

    Args:
        where: where the mask is: "obs", "info" or "method".
        action_space: the action space.
    """

    def __init__(self, where="obs", action_space=None):
        self.where = where
        self.action_space = action_space or spaces.Discrete(5)
        parts = {"position": spaces.Box(0, 100, (1,), np.float32)}
        if where == "obs":
            count = sum(np.atleast_1d(self.sizes))
            parts["action_mask"] = spaces.Box(0, 2, (count,), np.int8)
        self.observation_space = spaces.Dict(parts)
        self.steps = 0

    @property
    def sizes(self):
        space = self.action_space
        if isinstance(space, spaces.Discrete):
            return [space.n]
        return [1] * space.n if isinstance(space, spaces.MultiBinary) else space.nvec

    def mask(self):
        """One array for each choice."""
        if isinstance(self.action_space, spaces.MultiBinary):
            return [np.array([(self.steps + i) % 3], np.int8) for i in range(len(self.sizes))]
        found = [np.zeros(n, np.int8) for n in self.sizes]
        for part in found:
            part[[self.steps % len(part), (2 * self.steps) % len(part)]] = 1
        return found

    def shown(self):
        obs, mask = {"position": np.array([self.steps], np.float32)}, self.mask()
        whole = np.concatenate(mask)
        if self.where == "obs":
            return obs | {"action_mask": whole}, {}
        if self.where == "method":
            return obs, {}
        several = isinstance(self.action_space, spaces.MultiDiscrete)
        return obs, {"action_mask": tuple(mask) if several else whole}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = int(self.np_random.integers(5))
        return self.shown()

    def step(self, action):
        if isinstance(self.action_space, spaces.MultiBinary):
            allowed = all(m == 2 or a == m for a, (m,) in zip(action, self.mask(), strict=True))
        else:
            pairs = zip(np.atleast_1d(action), self.mask(), strict=True)
            allowed = all(mask[choice] for choice, mask in pairs)
        if not allowed:
            raise AssertionError(f"action {action} is not among {self.mask()}")
        self.steps += 1
        return self.shown()[0], 1.0, self.steps % 7 == 0, False, self.shown()[1]


class Maskable(Masked):
    """Returns its masks from a method, as environments for sb3-contrib do."""

    def __init__(self, action_space=None):
        super().__init__("method", action_space)

    def action_masks(self):
        if isinstance(self.action_space, spaces.MultiBinary):
            # An entry for each value of each bit.
            return [bit in (m, m - 2) or m == 2 for (m,) in self.mask() for bit in (0, 1)]
        return np.concatenate(self.mask()).astype(bool)


def masked(where, action_space=None):
    return Maskable(action_space) if where == "method" else Masked(where, action_space)


class Anything(Masked):
    """Allows all actions."""

    def mask(self):
        return [np.ones(5, np.int8)]


def collected(source, policy=None, frames=100, **options):
    """A batch: the environment refuses an action that it does not allow."""
    with Collector(source, policy, frames_per_batch=frames, **options) as collector:
        return collector.next()


SPACES = {
    "discrete": spaces.Discrete(5),
    "multi": spaces.MultiDiscrete([3, 4]),
    "bits": spaces.MultiBinary(4),
}


def env_of(where, kind, space, categorical=False):
    def make():
        env = TimeLimit(masked(where, SPACES[space]), 9)
        return GymEnv(env, categorical_action_encoding=categorical)

    return {
        "single": make,
        "list": lambda: SerialEnv(2, make),
        "parallel": lambda: ParallelEnv(2, make, backend="thread"),
        "processes": lambda: ParallelEnv(2, make),
        "vector": lambda: gymnasium.vector.SyncVectorEnv(
            [lambda: TimeLimit(masked(where, SPACES[space]), 9)] * 2
        ),
    }[kind]


# Each two values of where, kind, space and encoding; the encoding is GymEnv's.
@pytest.mark.parametrize(
    ("where", "kind", "space", "categorical"),
    [
        ("obs", "single", "discrete", False),
        ("obs", "list", "multi", True),
        ("obs", "vector", "bits", False),
        ("obs", "parallel", "multi", False),
        ("obs", "processes", "bits", False),
        ("info", "single", "multi", True),
        ("info", "list", "bits", False),
        ("info", "vector", "discrete", False),
        ("info", "parallel", "bits", True),
        ("method", "single", "bits", True),
        ("method", "list", "discrete", False),
        ("method", "vector", "multi", False),
        ("method", "parallel", "discrete", True),
    ],
)
def test_random_actions_are_allowed(where, kind, space, categorical):
    env = env_of(where, kind, space, categorical)
    with Collector(env, frames_per_batch=150, total_frames=300) as collector:
        first, _ = collector
        assert collector.stats()["env_path"] == "array"
    actions = first["action"].reshape(150, -1)
    if space != "bits" and not categorical:
        # All that is allowed comes up.
        assert (actions.sum(0) > 0).all()
    assert len(actions.unique(dim=0)) > 3


SAME_STEP = gymnasium.vector.AutoresetMode.SAME_STEP


# Processes change only how the info comes here, and are slow to start: the mode with most of it.
@pytest.mark.parametrize(
    ("vector", "mode", "where"),
    [
        ("AsyncVectorEnv", SAME_STEP, "info"),
        *[
            (vector, mode, ["info", "method"][(i + j) % 2])
            for i, vector in enumerate(["SyncVectorEnv", "DictInfoToList", "shared", "in a list"])
            for j, mode in enumerate(gymnasium.vector.AutoresetMode)
        ],
    ],
)
def test_masks_of_steps_are_followed_in_each_autoreset_mode(where, vector, mode):
    def make():
        kind = gymnasium.vector.SyncVectorEnv
        if vector == "AsyncVectorEnv":
            kind = partial(gymnasium.vector.AsyncVectorEnv, context="fork")
        made = kind([lambda: masked(where)] * 2, autoreset_mode=mode)
        return DictInfoToList(made) if vector == "DictInfoToList" else made

    several = {"shared": partial(ParallelEnv, backend="thread"), "in a list": SerialEnv}
    collected(several[vector](2, make) if vector in several else make())


def test_a_row_of_a_vector_environment_without_a_mask_may_do_anything():
    class Free(Anything):
        def shown(self):
            return super().shown()[0], {}

    env = gymnasium.vector.SyncVectorEnv([lambda: Masked("info"), lambda: Free("info")])
    actions = collected(env, frames=200)["action"]
    assert (actions[1].sum(0) > 0).all()


def test_actions_are_drawn_evenly_from_those_allowed():
    allowed = np.array([1, 0, 1, 1, 0], np.int8)
    env = Masked()
    env.mask = lambda: [allowed]
    with Collector(env, frames_per_batch=1500) as collector:
        collector.set_seed(0)
        counts = collector.next()["action"].sum(0)
    assert counts[[1, 4]].tolist() == [0, 0]
    assert (counts[[0, 2, 3]] > 400).all()


def test_the_random_policy_follows_the_mask_also_outside_of_a_collector():
    for policy in (RandomPolicy(), RandomPolicy(GymEnv(Masked()).action_spec)):
        collected(Masked(), policy, frames=300)
    env = GymEnv(Masked())
    for policy in (RandomPolicy(env.action_spec), RandomPolicy(env.full_action_spec)):
        env.rollout(50, policy)
    env.rollout(50)
    env = GymEnv(Masked("info"))
    env.rollout(50)


@pytest.mark.parametrize("where", ["obs", "info", "method"])
def test_workers_and_environments_that_are_ready_follow_it(where):
    sources = [partial(masked, where, SPACES["multi"])] * 2
    options = {"frames_per_batch": 80, "total_frames": 160}
    for make, more in (
        (MultiSyncCollector, {"start_method": "inline"}),
        (AsyncBatchedCollector, {"env_backend": "threading", "policy": RandomPolicy()}),
    ):
        with make(sources, **options, **more) as collector:
            assert len(list(collector)) == 2


def test_a_method_is_called_for_random_actions_only():
    class Counted(Maskable):
        calls = 0

        def action_masks(self):
            self.calls += 1
            return super().action_masks()

    def policy(position):
        return torch.eye(5, dtype=torch.int64)[0]

    env = Counted()
    env.mask = lambda: [np.ones(5, np.int8)]
    with Collector(env, policy, frames_per_batch=100, init_random_frames=100) as collector:
        collector.next()
        before = env.calls
        collector.next()
        assert env.calls == before > 100


def test_a_single_environment_may_have_a_number_of_environments():
    class Numbered(Maskable):
        num_envs = 4

    collected(Numbered)


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


def test_a_method_of_that_name_that_returns_no_mask_is_ignored_with_a_warning():
    class Unfit(Anything):
        def action_masks(self):
            return np.ones(4)

    with (
        Collector(Unfit("method"), frames_per_batch=20) as collector,
        pytest.warns(UserWarning, match=r"ignore action_masks\(\).*shape \(4,\).*has 5 entries"),
    ):
        assert len(collector.next()) == 20


def test_a_method_that_needs_arguments_is_none_of_this_kind():
    class Other(Anything):
        def action_masks(self, state):
            raise AssertionError("this is another method")

    assert len(collected(Other("method"))) == 100


def allowed_only(mask):
    """A policy that takes the last allowed action."""
    last = mask.shape[-1] - 1 - mask.flip(-1).long().argmax(-1)
    return torch.nn.functional.one_hot(last, mask.shape[-1])


@pytest.mark.parametrize("env", [Masked(), ObserveActionMask(Masked("info"))], ids=["obs", "info"])
def test_a_policy_reads_the_mask(env):
    policy = TensorDictModule(allowed_only, in_keys=["action_mask"], out_keys=["action"])
    batch = collected(env, policy, frames=50)
    assert (batch["action_mask"] * batch["action"]).sum() == 50


def test_a_mask_in_info_can_be_observed_by_a_vector_environment():
    env = gymnasium.vector.SyncVectorEnv([lambda: ObserveActionMask(Masked("info"))] * 2)
    assert collected(env, frames=200)["action_mask"].shape == (2, 100, 5)


def test_what_is_observed_beside_it_is_kept():
    (*_, taxi) = sorted(name for name in gymnasium.registry if name.startswith("Taxi-v"))
    env = GymEnv(ObserveActionMask(gymnasium.make(taxi)))
    assert set(env.reset().keys()) >= {"observation", "action_mask"}
    env = GymEnv(ObserveActionMask(Masked("info", SPACES["multi"])))
    assert env.reset()["action_mask"].shape == (7,)


def test_a_mask_that_allows_nothing_gives_the_first_action():
    spec = GymEnv(Masked()).action_spec
    assert masked_rand(spec, torch.zeros(5)).tolist() == [1, 0, 0, 0, 0]


def test_an_entry_of_that_name_that_is_no_mask_changes_nothing():
    class Odd(Anything):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Dict({"action_mask": spaces.Box(0, 1, (3,))})

        def shown(self):
            return {"action_mask": np.zeros(3, np.float32)}, {}

    words = r"ignore the entry 'action_mask' of shape \(3,\)"
    with (
        pytest.warns(UserWarning, match=words),
        Collector(Odd(), frames_per_batch=200) as collector,
    ):
        assert (collector.next()["action"].sum(0) > 0).all()


def test_what_is_not_zero_is_allowed_where_the_mask_is_observed_too():
    class Half(Masked):
        def shown(self):
            obs, info = super().shown()
            return obs, {"action_mask": info["action_mask"] * 0.5}

    collected(lambda: ObserveActionMask(Half("info")))


def test_observing_a_mask_needs_a_discrete_action():
    with pytest.raises(TypeError, match=r"Discrete or MultiDiscrete action space, but .* is Box"):
        ObserveActionMask(gymnasium.make("Pendulum-v1"))


def test_observing_a_mask_that_is_not_there():
    with pytest.raises(KeyError, match=r"returned no info\['action_mask'\]"):
        Collector(ObserveActionMask(gymnasium.make("CartPole-v1")), frames_per_batch=10)


class Shaped(gymnasium.Env):
    """Accepts only the actions of a mask whose shape is not flat.

    Args:
        sizes: numbers of values of the choices.
        joint: True for a dimension for each choice; False for a row for each choice.
        where: ``"obs"`` or ``"info"``.
    """

    def __init__(self, sizes, joint, where="obs"):
        self.joint, self.where = joint, where
        self.action_space = spaces.MultiDiscrete(sizes)
        shape = tuple(sizes) if joint else (len(sizes), sizes[0])
        masks = spaces.MultiBinary(shape)
        self.observation_space = spaces.Dict({"action_mask" if where == "obs" else "other": masks})

    def shown(self):
        space = next(iter(self.observation_space.values()))
        self.mask = mask = self.np_random.integers(0, 2, space.shape, np.int8)
        if self.joint:
            mask.flat[self.np_random.integers(mask.size)] = 1
        else:
            mask[np.arange(len(mask)), self.np_random.integers(0, mask.shape[1], len(mask))] = 1
        return {"action_mask" if self.where == "obs" else "other": mask}, (
            {} if self.where == "obs" else {"action_mask": mask}
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.shown()

    def step(self, action):
        rows = () if self.joint else (np.arange(len(action)),)
        allowed = self.mask[(*rows, *action)] if self.joint else self.mask[(*rows, action)]
        assert np.all(allowed), "an action that the mask does not allow"
        obs, info = self.shown()
        return obs, 0.0, False, False, info


SHAPES = [([3, 3], False), ([4, 3], True), ([2, 2], False), ([2, 3, 2], True)]


@pytest.mark.parametrize(
    ("kind", "sizes", "joint", "categorical", "where"),
    [
        (kind, *shape, bool((i + j // 2) % 2), ["obs", "info"][(i + j) % 2])
        for i, kind in enumerate(["single", "vector", "list", "parallel", "policy"])
        for j, shape in enumerate(SHAPES)
        if (i + j) % 2 or kind == "single"
    ],
)
def test_masks_of_several_choices(kind, sizes, joint, categorical, where):
    def make():
        return Shaped(sizes, joint, where)

    def adapted(env):
        return GymEnv(env, categorical_action_encoding=categorical)

    if kind == "vector":
        vector = gymnasium.vector.SyncVectorEnv([make] * 3, autoreset_mode="SameStep")
        env = adapted(vector)
    elif kind in ("list", "parallel"):
        options = {"backend": "thread"} if kind == "parallel" else {}
        env = {"list": SerialEnv, "parallel": ParallelEnv}[kind](
            2, lambda: adapted(make()), **options
        )
    else:
        env = adapted(make())
    collected(env, RandomPolicy() if kind == "policy" else None, frames=60)


@pytest.mark.parametrize("batch", [SerialEnv, partial(ParallelEnv, backend="thread")])
@pytest.mark.parametrize("joint", [False, True])
def test_an_environment_without_masks_among_others(batch, joint):
    class Free(Shaped):
        def shown(self):
            return super().shown()[0], {}

        def step(self, action):
            return self.shown()[0], 0.0, False, False, {}

    def make(kind):
        return kind([4, 3] if joint else [3, 3], joint, "info")

    env = batch(2, [partial(make, Shaped), partial(make, Free)])
    taken = collected(env, frames=200)["action"]
    # Each value of each choice is taken where there are no masks.
    assert taken[1].sum(0).all()


class Short(Masked):
    def shown(self):
        obs, info = super().shown()
        return obs, {"action_mask": info["action_mask"][:3]}


class Turned(Shaped):
    def shown(self):
        return super().shown()[0], {"action_mask": np.ones((3, 2), np.int8)}


class Flattened(Shaped):
    def step(self, action):
        obs, *outcome, _ = super().step(action)
        return obs, *outcome, {"action_mask": np.ones(7, np.int8)}


class Flat(Shaped):
    def shown(self):
        obs, info = super().shown()
        rows, columns = info["action_mask"].any(1), info["action_mask"].any(0)
        return obs, {"action_mask": np.concatenate([rows, columns])}


def of_shape(kind=Shaped, sizes=(4, 3)):
    return partial(kind, list(sizes), True, "info")


threads = partial(ParallelEnv, backend="thread")
#: What has masks of a wrong shape, and what is said of it.
WRONG_SHAPES = [
    (
        lambda: Short("info"),
        r"of shape \(3,\), but its action has 5 choices: a mask must have the shape \(5,\)\n",
    ),
    *(
        (
            partial(batch, 1, of_shape(Turned, sizes)),
            rf"of shape \(3, 2\), but its action has {sum(sizes)} .* must have the shape {allowed}",
        )
        for batch in (SerialEnv, threads)
        for sizes, allowed in [
            ([2, 3], r"\(5,\) or \(2, 3\)\n"),
            ([4, 4], r"\(8,\) or \(2, 4\) or \(4, 4\)\n"),
        ]
    ),
    (
        partial(threads, 1, of_shape(Flattened)),
        r"of shape \(7,\) in a step, but of shape \(4, 3\) before",
    ),
    (
        partial(threads, 1, of_shape(sizes=[300, 300])),
        r"90000 entries, but processes share masks of at most 65",
    ),
    *(
        (
            partial(batch, 2, [of_shape(), of_shape(Flat)]),
            r"of the shapes \(4, 3\) and \(7,\): return masks",
        )
        for batch in (SerialEnv, threads)
    ),
]


@pytest.mark.parametrize(("source", "words"), WRONG_SHAPES)
def test_masks_of_wrong_shapes_are_an_error(source, words):
    with pytest.raises(ValueError, match=words):
        collected(source, frames=20)


@pytest.mark.parametrize("kind", ["single", "text", "vector", "dicts", "parallel", "rollout"])
def test_masks_that_only_steps_return_are_ignored_with_a_warning(kind):
    class Late(gymnasium.Env):
        action_space = spaces.Discrete(3)
        observation_space = spaces.Text(3) if kind == "text" else spaces.Box(0, 1, ())

        def shown(self):
            return "abc" if kind == "text" else np.zeros((), np.float32)

        def reset(self, *, seed=None, options=None):
            return self.shown(), {}

        def step(self, action):
            return self.shown(), 0.0, False, False, {"action_mask": np.array([1, 0, 0])}

    vector = gymnasium.vector.SyncVectorEnv([Late] * 2)
    env = {
        "vector": vector,
        "dicts": DictInfoToList(vector),
        "parallel": ParallelEnv(2, Late, backend="thread") if kind == "parallel" else None,
    }.get(kind) or GymEnv(Late())
    words = r"\['action_mask'\] of .*(Late|Vector).*: a step returns it, but the reset did not"
    if kind == "rollout":
        with pytest.warns(UserWarning, match=words):
            env.rollout(3)
        return
    with Collector(env, None, frames_per_batch=20) as collector:
        with pytest.warns(UserWarning, match=words):
            collector.next()
        collector.next()  # without a warning


def test_only_discrete_actions_have_a_mask():
    class Continuous(gymnasium.Env):
        action_space = observation_space = spaces.Box(0, 1, (1,))

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            return np.zeros(1, np.float32), 0.0, False, False, {"action_mask": np.ones(3)}

    collected(Continuous())  # without a warning


def test_a_mask_with_a_dimension_too_many_is_ignored_with_a_warning():
    stacked = GymEnv(FrameStackObservation(Masked(action_space=spaces.Discrete(2)), 3))
    with pytest.warns(UserWarning, match=r"random actions ignore the entry .* of shape \(3, 2\)"):
        drawn = stacked.rand_action(stacked.reset())
    assert drawn["action"].shape == (2,)
