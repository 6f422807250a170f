"""Each option of workers' collectors has its effect, or is refused by its name."""

from functools import partial
from itertools import cycle, islice

import pytest
import torch
from collector_parts import Buffer, by_step, choose_by_step
from multi_parts import LENGTHS, TRAJ_IDS, Chooser, actions, envs
from tensordict import TensorDictBase
from typing_extensions import override

from trawl import ExplorationType
from trawl.backends import InlineBackend
from trawl.collectors import CollectorConfig
from trawl.collectors.distributed import DistributedCollector, DistributedSyncCollector
from trawl.collectors.options import table
from trawl.envs import ParallelEnv
from trawl.extras.clusters.base import ClusterCollector
from trawl.extras.clusters.sharing import OF_EACH
from trawl.testing import FaultyEnv, NumberedEnv
from trawl.weights.message_schemes import MessageWeightSyncScheme


class HereCollector(ClusterCollector):
    """A collector of a cluster whose workers are objects of this process."""

    def __init__(self, create_env_fn, policy=None, **options):
        self._take_options(options)
        super().__init__(create_env_fn, policy, **options)

    @override
    def _new_backend(self):
        return InlineBackend(False)


class Here:
    """Puts the workers of a collector into this process, to which weights come as messages."""

    def _new_backend(self):
        return InlineBackend(False)

    def _new_scheme(self):
        return MessageWeightSyncScheme()


class HereDistributed(Here, DistributedCollector):
    """A collector whose workers a launcher would start."""


class HereSynchronous(Here, DistributedSyncCollector):
    """The same, whose batches are of all workers."""


class Sink:
    """Keeps what is written."""

    def __init__(self):
        self.batches = []

    def write(self, batch):
        self.batches.append(batch.clone())

    def close(self, complete):
        self.batches.append(complete)


class Call:
    """A hook that counts its calls; each worker has a copy."""

    def __init__(self):
        self.count = 0

    def __call__(self, *_):
        self.count += 1


KEEPERS = (Buffer, Sink, Call)


def by_newest(observation):
    """A policy for stacks of two frames."""
    return choose_by_step(observation[..., -1, :])


def marked(batch):
    return batch.set("mark", torch.ones(batch.shape))


# For each option that workers' collectors may be given a value, and what it needs beside.
VALUES = {
    "policy_factory": (by_step, {"policy": None}),
    "device": ("cpu", {}),
    "storing_device": ("cpu", {}),
    "env_device": ("cpu", {}),
    "policy_device": ("cpu", {"policy": Chooser(1)}),
    "create_env_kwargs": ({"lengths": [2]}, {}),
    "max_frames_per_traj": (2, {}),
    "init_random_frames": (20, {}),
    "reset_kwargs": ({"options": {}}, {}),
    "reset_at_each_iter": (True, {}),
    "reset_when_done": (True, {}),
    "postproc": (marked, {}),
    "split_trajs": (True, {}),
    "track_traj_ids": (False, {}),
    "exploration_type": (ExplorationType.MEAN, {}),
    "frame_stack": (2, {"policy": by_newest}),
    "compact_obs": (True, {}),
    "set_truncated": (True, {}),
    "use_buffers": (False, {}),
    "replay_buffer": (Buffer, {}),
    "sink": (Sink, {}),
    "extend_buffer": (False, {"replay_buffer": Buffer}),
    "replay_write_mode": ("trajectory", {"replay_buffer": Buffer}),
    "trajs_per_write": (1, {"replay_buffer": Buffer, "replay_write_mode": "trajectory"}),
    "samples_per_insert": (1.0, {"replay_buffer": Buffer}),
    "inserts_ahead": (10, {"replay_buffer": Buffer, "samples_per_insert": 1.0}),
    "trust_policy": (True, {}),
    "compile_policy": (False, {}),
    "cudagraph_policy": (False, {}),
    "no_cuda_sync": (True, {}),
    "auto_register_policy_transforms": (True, {}),
    "track_policy_version": (True, {}),
    "on_env_error": ("restart", {}),
    "pre_collect_hook": (Call, {}),
    "post_collect_hook": (Call, {}),
}
REFUSED = {
    *("frames_per_batch", "total_frames", "exact_frames", "trajs_per_batch", "traj_format"),
    *("traj_sampling", "normalize_observations", "normalize_rewards"),
    *("seed", "trace", "weight_updater", "weight_sync_schemes", "weight_recv_schemes"),
    *("interruptor", "return_same_td", "worker_idx"),
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:split_trajs=True pads", "ignore:init_random_frames=40 with sync=False"
)


def test_each_option_is_tried():
    """A new option needs a case here."""
    assert {*VALUES, *REFUSED} == set(table(CollectorConfig))


def fresh(value):
    """An object of its own for each collector, where one keeps what it is given."""
    return value() if value in KEEPERS else value


def made(sync, options, **more):
    """A collector, of an environment that takes arguments."""
    given = {"policy": by_step(), **options}
    given = {
        name: value() if value in (Buffer, Sink, Call) else value for name, value in given.items()
    }
    return HereCollector(
        envs(2), given.pop("policy"), sync=sync, frames_per_batch=20, **given, **more
    )


def seen(collector):
    """All that a user has of a collector: batches, and what went elsewhere."""
    with collector:
        collector.set_seed(1)
        found = [collector.next() for _ in range(4)]
        config = collector.config
        written = [] if config.replay_buffer is None else config.replay_buffer.frames
        stored = [] if config.sink is None else config.sink.batches
        calls = [collector.get_distant_attr(f"{name}_collect_hook") for name in ("pre", "post")]
        called = [[getattr(hook, "count", None) for hook in hooks] for hooks in calls]
        stats = collector.stats()
    plain = {name: stats.get(name) for name in ("frames", "batches", "policy_version")}
    return [*map(described, [*found, *written, *stored]), called, plain]


def described(batch):
    """What is compared of a batch."""
    if not isinstance(batch, TensorDictBase):
        return batch
    return (
        batch.shape,
        batch.device,
        {key: value.tolist() for key, value in sorted(batch.items(True, True), key=str)},
    )


@pytest.mark.parametrize(
    ("name", "sync"), [(name, index % 2 == 0) for index, name in enumerate(sorted(VALUES))]
)
def test_it_is_as_if_given_to_the_collector_itself(name, sync):
    value, needed = VALUES[name]
    value = fresh(value)
    total = value * 2 if name == "init_random_frames" else value
    here = made(sync, {**needed, name: total})
    # Not shared between the two, as workers' hooks are copies.
    other = fresh(type(value)) if isinstance(value, KEEPERS) else value
    there = made(sync, needed, collector_kwargs={name: other})
    if name in OF_EACH - {"pre_collect_hook", "post_collect_hook"}:
        assert there.get_distant_attr(f"config.{name}") == [other, other]
    expected, found = seen(here), seen(there)
    assert found == expected
    visible = {
        *("device", "storing_device", "create_env_kwargs", "max_frames_per_traj"),
        *("init_random_frames", "reset_at_each_iter", "postproc", "split_trajs"),
        *("track_traj_ids", "compact_obs", "set_truncated", "replay_buffer", "sink"),
        *("auto_register_policy_transforms", "track_policy_version"),
        *("pre_collect_hook", "post_collect_hook"),
    }
    if name in visible:
        assert found != seen(made(sync, needed))


@pytest.mark.parametrize(
    # The values of the others are what there is without them.
    "name",
    sorted(VALUES.keys() - {"reset_when_done", "compile_policy", "cudagraph_policy"}),
)
def test_it_may_differ_if_it_is_of_each(name):
    value, needed = VALUES[name]
    value = fresh(value)
    if name == "init_random_frames":
        with made(True, needed, collector_kwargs=[{name: value}, {}]) as collector:
            assert collector.init_random_frames == value
    elif name in OF_EACH:
        with made(True, needed, collector_kwargs=[{name: value}, {}]) as collector:
            hook = name.endswith("_hook")
            first, second = collector.get_distant_attr(name if hook else f"config.{name}")
            assert type(first) is type(value)
            assert second != first
    else:
        with pytest.raises(ValueError, match=f"collector_kwargs has '{name}', which can't differ"):
            made(True, {**needed, "policy": None}, collector_kwargs=[{name: value}, {}])


def test_they_are_refused_by_their_names():
    for name in REFUSED:
        with pytest.raises(ValueError, match=f"collector_kwargs has '{name}'"):
            made(True, {}, collector_kwargs={name: None})


def test_it_is_given_once():
    with pytest.raises(ValueError, match="postproc was passed twice"):
        made(True, {"postproc": marked}, collector_kwargs={"postproc": marked})


def test_batches_are_stored_where_the_collector_says():
    kwargs = [{"storing_device": "meta"}, {"storing_device": "cpu"}]
    with made(True, {"storing_device": "cpu"}, collector_kwargs=kwargs) as collector:
        assert collector.next().device == torch.device("cpu")


@pytest.mark.parametrize("kind", ["single", "sync"])
def test_a_name_that_no_collector_knows_is_refused_there(kind):
    with pytest.raises(TypeError, match="unknown arguments: frame_skip"):
        made(True, {}, collector_class=kind, collector_kwargs={"frame_skip": 4})


def test_workers_with_workers_act_on_theirs():
    inner = {"postproc": marked, "max_frames_per_traj": 2, "start_method": "inline"}
    options = {"collector_class": "sync", "num_workers_per_collector": 2}
    with made(True, {}, collector_kwargs=inner, **options) as collector:
        batch = collector.next()
        assert collector.get_distant_attr("start_method") == ["inline"] * 2
    assert batch["mark"].sum() == batch.numel()
    assert int(batch["next", "step_count"].max()) == 2


def weights_used(there, policy, count):
    """The actions in each batch, while the policy learns one more after each."""
    found = []
    with there:
        for number in range(1, count + 1):
            found += actions(there.next())
            policy.become(number % 4)
    return found


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"update_after_each_batch": True}, [0, 1, 2, 3, 0, 1]),
        ({"max_weight_update_interval": 2}, [0, 0, 2, 2, 0, 0]),
        ({"update_interval": 3}, [0, 0, 0, 3, 3, 3]),
        ({"update_interval": 1, "max_weight_update_interval": 3}, [0, 1, 2, 3, 0, 1]),
    ],
)
@pytest.mark.parametrize("sync", [True, False])
def test_weights_are_sent_after_a_number_of_batches(options, found, sync):
    policy = Chooser(0)
    options = {"num_workers": 2 if sync else 1, "frames_per_batch": 10, **options}
    there = HereDistributed(envs(1)[0], policy, sync=sync, **options)
    assert weights_used(there, policy, 6) == found


def test_the_synchronous_class_sends_weights_by_itself():
    policy = Chooser(0)
    there = HereSynchronous(envs(2), policy, frames_per_batch=10)
    assert weights_used(there, policy, 3) == [0, 1, 2]
    # One that will send them later doesn't warn.
    there = HereSynchronous(envs(2), policy, frames_per_batch=10, update_interval=100)
    assert len(set(weights_used(there, policy, 10))) == 1


def test_calls_reach_the_environments_of_workers_with_workers():
    def env():
        return ParallelEnv(2, "Pendulum-v1", backend="thread")

    options = {"collector_class": "sync", "num_workers_per_collector": 2, "frames_per_batch": 40}
    options["collector_kwargs"] = {"start_method": "inline"}
    with HereCollector(env, None, num_workers=1, **options) as collector:
        assert collector.map_fn("env.set_attr", [("g", [1.0, 2.0])]) == [[None] * 2]
        assert collector.cascade_execute("env.get_attr", "g") == [[(1.0, 2.0)] * 2]
        assert collector.get_distant_attr("env.envs[1].unwrapped.g") == [[2.0] * 2]
        assert collector.next().numel() == 40


@pytest.mark.filterwarnings("ignore:.*rebuilt because of on_env_error:RuntimeWarning")
@pytest.mark.parametrize("nested", [1, 2])
def test_trajectories_that_a_failure_ends_between_batches_are_delivered(nested):
    options = {"num_workers_per_collector": nested, "collector_class": "sync"} if nested > 1 else {}
    options |= {"collector_kwargs": {"start_method": "inline"}} if nested > 1 else {}
    faulty = partial(FaultyEnv, 4, ZeroDivisionError("worn out"), lengths=[3])
    whole = {"trajs_per_batch": 1, "traj_format": "cat", "on_env_error": "restart", **options}
    with HereCollector(
        faulty, None, num_workers=1, sync=True, frames_per_batch=2 * nested, **whole
    ) as there:
        found = [there.next() for _ in range(8)]
    # Each environment ends one episode, and fails in the second step of the next one.
    expected = [(3, False)] * nested + [(1, True)] * nested
    assert [(len(one), bool(one["next", "truncated"][-1])) for one in found] == [
        *islice(cycle(expected), 8)
    ]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_trajectories_of_workers_with_workers_are_whole(kind):
    options = {"collector_class": kind, "num_workers_per_collector": 2, "frames_per_batch": 28}
    options |= {"trajs_per_batch": 1, "traj_format": "cat"}
    options["collector_kwargs"] = {"start_method": "inline"}
    with HereCollector(envs(2), None, sync=kind == "sync", **options) as there:
        found = [there.next().clone() for _ in range(60)]
    ids = [int(one[TRAJ_IDS][0]) for one in found]
    assert len(set(ids)) == len(ids)
    seen = []
    for one in found:
        numbers = NumberedEnv.numbers(one)
        assert numbers[:, 2].tolist() == list(range(LENGTHS[numbers[0, 1] % 3]))
        seen.append(tuple(numbers[0, :2].tolist()))
    # Two environments of each number: each episode comes from both, but for the last ones.
    assert all(seen.count(one) <= 2 for one in seen)
    assert sum(seen.count(one) == 2 for one in seen) > 30
