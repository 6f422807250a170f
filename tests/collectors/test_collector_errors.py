import gc
import re

import gymnasium
import numpy as np
import pytest
from collector_parts import Buffer, by_step, choose_by_step, named
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import Collector, MultiSyncCollector, PolicyVersion, RandomPolicy
from trawl.data import MemmapSink, MultiStep
from trawl.envs import GymEnv
from trawl.testing import FaultyEnv, NestedEnv, NumberedEnv, SelfResettingVectorEnv

# --- arguments


def refused(kind, match, policy=None, **options):
    options.setdefault("frames_per_batch", 4)
    env = options.pop("env") if "env" in options else NumberedEnv()
    with pytest.raises(kind, match=match):
        Collector(env, policy, **options)


INTEGER = "{name} must be an integer, but it is {type}: {value}"
COUNTS = "frames_per_batch total_frames init_random_frames trajs_per_batch max_frames_per_traj"
DEVICES = "device storing_device env_device policy_device"
CLASS = r"{name} must be an object, but it is {value}: pass an instance, {name}={class_name}\("
#: Options, wrong values of them, the error, and what it says.
WRONG = [
    (f"{COUNTS} worker_idx", [2.5, "9", True, [3]], TypeError, INTEGER),
    ("frames_per_batch", [None], TypeError, INTEGER),
    ("frames_per_batch", [0, -5], ValueError, "{name} must be at least 1, but it is {value}"),
    ("total_frames", [0], ValueError, "{name} must be positive, or -1 for no limit, .* 0"),
    ("reset_when_done", [False], ValueError, "{name}=False is not possible"),
    ("exploration_type", ["randomly"], TypeError, "{name} must be .* {value}"),
    ("policy_factory", [RandomPolicy()], TypeError, "it is a policy, RandomPolicy: pass it as p"),
    ("policy_factory", [3], TypeError, "{name} must be callable, but it is int: 3"),
    ("postproc pre_collect_hook post_collect_hook", [3], TypeError, "{name} must be callable"),
    ("interruptor", [1], TypeError, r"{name} must be .* collection_stopped\(\), .* int"),
    ("compile_policy", ["max"], TypeError, "{name} must be a bool or a mapping .* {value}"),
    ("cudagraph_policy", [1], TypeError, "{name} must be a bool or a mapping .* int"),
    ("create_env_kwargs", [3, [3]], TypeError, "{name} must be a mapping .* int: 3"),
    ("track_policy_version", ["uuid"], TypeError, "{name} must be a bool .*{value}"),
    ("num_collectors", [0], ValueError, "{name} must be a positive integer, .* 0"),
    ("num_collectors", [True, 1.0], TypeError, "{name} must be .*, .* {value}"),
    ("sync", [False], ValueError, "sync=False can't be used with backend"),
    ("backend", ["gpu"], ValueError, "unknown backend {value}"),
    (DEVICES, ["gpu"], ValueError, "{name} {value} is not a device"),
    (
        "reset_at_each_iter split_trajs trust_policy",
        ["False"],
        TypeError,
        "{name} must be True or False, but it is the string {value}",
    ),
    ("replay_buffer", [Buffer], TypeError, CLASS),
    ("sink", [MemmapSink], TypeError, CLASS),
    ("postproc", [MultiStep], TypeError, CLASS),
]


@pytest.mark.parametrize(("names", "values", "kind", "told"), WRONG, ids=named)
def test_a_wrong_value_is_named(names, values, kind, told):
    for name in names.split():
        for value in values:
            shown = {"type": type(value).__name__, "value": re.escape(repr(value))}
            if isinstance(value, type):
                shown = {"value": f"the class {value.__name__}", "class_name": value.__name__}
            refused(kind, told.format(name=name, **shown), **{name: value})


def test_only_the_class_itself_takes_a_backend():
    class Mine(Collector):
        pass

    with Collector(NumberedEnv(), frames_per_batch=4, backend="direct", num_collectors=1) as one:
        assert type(one) is Collector
    with pytest.raises(TypeError, match=r"only Collector itself takes backend"):
        Mine(NumberedEnv(), frames_per_batch=4, backend="direct")


# --- what makes no collector


class Adding:
    """A buffer that takes single frames only."""

    def add(self, frame):
        raise NotImplementedError


class Untruncated(GymEnv):
    done_keys = ("done", "terminated")


class Counting(NumberedEnv):
    """Counts its steps in an entry that has the name of Trawl's."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict({"step_count": self.observation_space})

    def _observe(self):
        return {"step_count": super()._observe()}


class Keyed(nn.Module):
    def __init__(self, **keys):
        super().__init__()
        vars(self).update(keys)

    def forward(self, observation):
        return choose_by_step(observation)


def acting(function, key="action"):
    return TensorDictModule(function, in_keys=["observation"], out_keys=[key])


def strange(data):
    return choose_by_step(data["observation"])


NO_ENV = "create_env_fn: expected an id.* but got (int|NoneType|dict|object)"
KEYS = "policy Keyed must have both in_keys and out_keys, or neither"
#: For each error, what is refused, and what it says.
REFUSED = {
    TypeError: [
        ({"policy": by_step(), "policy_factory": by_step}, "policy and policy_factory can't"),
        ({"replay_buffer": 3}, r"must have a method extend\(\), but int has none"),
        (
            {"replay_buffer": 3, "extend_buffer": False},
            r"replay_buffer must have a method add\(\), but int has none",
        ),
        *(
            (
                {"env": [NumberedEnv()] * count, "replay_buffer": Adding(), "extend_buffer": False},
                r"must have a method extend\(\) to take the steps of a batch of .* Adding",
            )
            for count in (1, 2)
        ),
        *(({"env": thing}, NO_ENV) for thing in (3, None, {}, object())),
        (
            {"env": lambda: 3},
            "create_env_fn made an object that is not an environment.* but got int: 3",
        ),
        (
            {"policy": nn.Linear(5, 4)},
            r"Failed to wrap the policy Linear: its parameters \['input'\] must be observation "
            r"keys of the environment, which are \['observation'\].*TensorDictModule.*trust_policy",
        ),
        ({"policy": lambda: None}, r"Failed to wrap .*parameters \[\] must be"),
        ({"policy": 3}, "policy must be callable, but it is int: 3"),
        ({"policy_factory": lambda: None}, r"must return a policy, .* None"),
        ({"policy": Keyed(in_keys=["observation"])}, KEYS),
        ({"policy": Keyed(out_keys=["observation"])}, KEYS),
        (
            {"policy": strange, "trust_policy": True},
            "policy must return a TensorDict, but strange returned Tensor",
        ),
        (
            {"env": NestedEnv(), "policy": lambda env: env},
            r"returned 1 value\(s\), but the environment takes 3 actions: .*'push'",
        ),
        (
            {"env": "CartPole-v1", "num_collectors": 2, "sync": "False"},
            "sync must be True or False, but it is the string 'False'",
        ),
    ],
    ValueError: [
        ({"env": []}, "create_env_fn must not be an empty list"),
        (
            {"env": Counting(), "max_frames_per_traj": 9},
            "max_frames_per_traj=9 counts steps in the entry 'step_count', .* already has",
        ),
        (
            {"policy": acting(lambda o: o[..., :3])},
            r"policy wrote 'action' with shape \(3,\), but .* says \(4,\): OneHot\(n=4",
        ),
        (
            {"policy": acting(lambda o: o[..., 0].long())},
            "returns an index, .* categorical_action_encoding=True",
        ),
        ({"backend": "direct", "num_collectors": 2}, "'direct' takes at most one"),
    ],
    gymnasium.error.NameNotFound: [
        ({"env": "Nowhere-v0"}, "Nowhere"),
    ],
    RuntimeError: [
        (
            {"create_env_kwargs": {"number": 3}},
            r"create_env_kwargs \['number'\] .* existing environment \(NumberedEnv\): pass a func",
        ),
        (
            {"env": Untruncated(NumberedEnv()), "set_truncated": True},
            "set_truncated=True needs a 'truncated' flag, but the environment has only",
        ),
        (
            {"policy": Keyed(in_keys=["observation"], out_keys=["action"])},
            "policy Keyed has in_keys and out_keys, but is not a TensorDictModuleBase: derive",
        ),
    ],
    KeyError: [
        (
            {"policy": acting(choose_by_step, "choice")},
            r"wrote no action: .* takes 'action', but the policy wrote \['choice'\]",
        ),
    ],
}


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [(options, kind, match) for kind, rows in REFUSED.items() for options, match in rows],
    ids=named,
)
def test_what_makes_no_collector_is_named(options, kind, match):
    refused(kind, match, **options)


def test_only_environments_that_were_made_are_closed_when_construction_fails():
    class Env(NumberedEnv):
        closed = 0

        def close(self):
            self.closed += 1

    made, given = Env(), Env()
    refused(TypeError, "Failed to wrap", env=lambda: made, policy=nn.Linear(5, 4))
    refused(TypeError, "Failed to wrap", env=given, policy=nn.Linear(5, 4))
    refused(TypeError, "Failed to wrap", env=[given, lambda: made], policy=nn.Linear(5, 4))
    assert (made.closed, given.closed) == (2, 0)


# --- while collecting


@pytest.mark.parametrize("fault", [OSError("disk"), KeyboardInterrupt()], ids=named)
def test_an_error_of_the_environment_says_where_and_closes_the_collector(fault):
    class Env(FaultyEnv):
        closed = 0

        def close(self):
            self.closed += 1
            # This doesn't hide the first error.
            raise RuntimeError("can't close")

    env = Env(at=6, fault=fault)
    collector = Collector(env, frames_per_batch=4)
    iterator = iter(collector)
    next(iterator)
    with pytest.raises(type(fault)) as caught:
        next(iterator)
    assert caught.value is fault
    if isinstance(fault, OSError):
        (note,) = fault.__notes__
        assert "Env" in note
        assert "at its step 6" in note
    assert collector.closed
    assert env.closed == 1
    text = f"{type(fault).__name__}: {fault}" if str(fault) else f"{type(fault).__name__}$"
    why = f"failed because the collector was shut down after {text}"
    with pytest.raises(RuntimeError, match=rf"iteration {why}"):
        iter(collector)
    with pytest.raises(RuntimeError, match=rf"next\(\) {why}"):
        collector.next()
    collector.shutdown()
    collector.shutdown()


class Full(Buffer):
    def extend(self, batch):
        raise LookupError("no room")


def broken(*_):
    raise LookupError("no room")


@pytest.mark.parametrize(
    "options",
    [
        *({name: broken} for name in ("pre_collect_hook", "postproc", "post_collect_hook")),
        {"replay_buffer": Full()},
        {"interruptor": broken},
    ],
    ids=named,
)
def test_an_error_of_what_the_user_gave_closes_too(options):
    collector = Collector(NumberedEnv(), frames_per_batch=4, **options)
    with pytest.raises(LookupError, match="no room"):
        next(iter(collector))
    assert collector.closed
    # A batch counts once it was delivered, which is before the last hook.
    assert collector.stats()["frames"] == 4 * ("post_collect_hook" in options)


# --- the end


class Closing(NumberedEnv):
    closed = 0

    def close(self):
        self.closed += 1


def test_shutdown_closes_the_environment_once_or_leaves_it_open():
    env = Closing()
    with Collector(env, frames_per_batch=4, total_frames=8) as collector:
        list(collector)
        for method in ("shutdown", "async_shutdown"):
            with pytest.raises(TypeError, match=r"close_env must be True or .* string 'False'"):
                getattr(collector, method)(close_env="False")
        with pytest.raises(TypeError, match="raise_on_error must be True or False"):
            collector.shutdown(raise_on_error="False")
        assert (collector.closed, env.closed) == (False, 0)
    assert (collector.closed, env.closed) == (True, 1)
    for call, arguments in (("reset", ()), ("set_seed", (0,)), ("rollout", ())):
        why = rf"{call}\(\) failed because the collector was shut down"
        with pytest.raises(RuntimeError, match=why):
            getattr(collector, call)(*arguments)
    collector.shutdown()
    assert (env.closed, collector.stats()["frames"]) == (1, 8)
    Collector(env, frames_per_batch=4).shutdown(close_env=False)
    assert env.closed == 1
    Collector(env, frames_per_batch=4)
    gc.collect()
    assert env.closed == 2


class Stuck(NumberedEnv):
    def close(self):
        raise RuntimeError("can't close")


def test_an_error_of_closing_is_raised_and_hides_no_other():
    collector = Collector(Stuck(), frames_per_batch=4)
    with pytest.raises(RuntimeError, match=r"can't close"):
        collector.shutdown()
    collector.shutdown()
    Collector(Stuck(), frames_per_batch=4).shutdown(raise_on_error=False)
    with pytest.raises(LookupError, match=r"mine"), Collector(Stuck(), frames_per_batch=4):
        raise LookupError("mine")


def test_calls_with_wrong_values_are_refused():
    with Collector(NumberedEnv(), frames_per_batch=4) as collector:
        why = r"worker_idx was not set: this collector does not belong to a worker"
        with pytest.raises(RuntimeError, match=why):
            _ = collector.worker_idx
        for seed in (1.5, "1", None, True):
            with pytest.raises(TypeError, match=r"seed must be an integer, but it is"):
                collector.set_seed(seed)
        with pytest.raises(ValueError, match=r"seed must not be negative, but it is -1"):
            collector.set_seed(-1)
        assert collector.set_seed(np.int64(3), static_seed=True) == 3
    why = r"version_type must be int, 'int', str or 'uuid', .* 'date'"
    with pytest.raises(ValueError, match=why):
        PolicyVersion("date")


def resets_take_steps():
    return SelfResettingVectorEnv([NumberedEnv] * 2)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"source": NumberedEnv}, "frames without a dimension of environments"),
        ({"source": resets_take_steps}, "frames of environments that spend steps on resets"),
    ],
    ids=["one", "resets"],
)
def test_frames_that_dont_fill_rows_need_a_storage_of_one_dimension(options, what):
    data = pytest.importorskip("torchrl.data")
    options = {"source": [NumberedEnv] * 2, "frames_per_batch": 8, **options}
    source = options.pop("source")
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(100, ndim=2))
    with pytest.raises(ValueError, match=rf"storage of ndim=2 and {what}.*: make the storage"):
        MultiSyncCollector([source] * 2, start_method="inline", replay_buffer=buffer, **options)
