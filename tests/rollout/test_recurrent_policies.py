"""What a policy hands to itself from step to step."""

from functools import partial

import gymnasium
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict import LazyStackedTensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn

from trawl.collectors import AsyncBatchedCollector, Collector
from trawl.envs import GymEnv, ParallelEnv, TorchVectorEnv
from trawl.keys import as_key
from trawl.testing import NumberedEnv, NumberedTorchEnv, RaggedEnv

STEP = 2  # the place of the step within the episode among the numbers


class Counter(nn.Module):
    """Counts its own steps in its hidden state, of any shape and dtype."""

    def __init__(self, shape=(1,), dtype=torch.float32):
        super().__init__()
        self.shape = shape
        self.dtype = dtype

    def forward(self, observation, hidden):
        batch = observation.shape[:-1]
        action = torch.eye(4, dtype=torch.int64)[0].expand(*batch, 4)
        if hidden is None:
            hidden = torch.zeros(*batch, *self.shape, dtype=self.dtype)
        return action, hidden + 1


def stateful(**options):
    """Writes its state under ``next``, to read it one step later."""
    keys = ["action", ("next", "hidden")]
    return TensorDictModule(Counter(**options), ["observation", "hidden"], keys)


def remembering(**options):
    """Writes its state under the key where it reads it."""
    return TensorDictModule(Counter(**options), ["observation", "hidden"], ["action", "hidden"])


KINDS = pytest.mark.parametrize("kind", [NumberedEnv, RaggedEnv])


def three(kind):
    return [kind(number, lengths=[3 + number, 1]) for number in range(3)]


def check(kind, batch):
    """The state is the number of steps in the episode, before and after."""
    step = kind.numbers(batch)[..., STEP].reshape(*batch.shape, 1)
    mask = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
    if ("next", "hidden") in batch.keys(True):
        assert torch.equal(batch["hidden"][mask].long(), step[mask])
        assert torch.equal(batch["next", "hidden"][mask].long(), step[mask] + 1)
    else:
        assert torch.equal(batch["hidden"][mask].long(), step[mask] + 1)
    return batch


@pytest.mark.parametrize(
    ("kind", "make", "shape", "dtype"),
    [
        (NumberedEnv, stateful, (2, 3), torch.float32),
        (NumberedEnv, remembering, (1,), torch.bfloat16),
        (RaggedEnv, stateful, (1,), torch.float64),
        (RaggedEnv, remembering, (2, 3), torch.int32),
    ],
)
def test_state_may_have_any_shape_and_dtype(make, kind, shape, dtype):
    policy = make(shape=shape, dtype=dtype)
    with Collector(three(kind), policy, frames_per_batch=12) as collector:
        for _ in range(3):
            batch = collector.next()
            assert batch["hidden"].dtype == dtype
            step = kind.numbers(batch)[..., STEP].reshape(3, 4, *[1] * len(shape))
            expected = (step + (make is remembering)).expand(3, 4, *shape)
            assert torch.equal(batch["hidden"].long(), expected)


@pytest.mark.parametrize("batched", [False, True])
def test_torchrls_lstm_gives_what_it_gives_for_whole_episodes(batched):
    modules = pytest.importorskip("torchrl.modules")
    torch.manual_seed(0)
    lstm = modules.LSTMModule(5, 8, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(8, 4), ["features"], ["logits"])
    choose = TensorDictModule(
        lambda logits: nn.functional.one_hot(logits.argmax(-1), 4), ["logits"], ["action"]
    )
    policy = TensorDictSequential(lstm, head, choose)
    source = three(NumberedEnv) if batched else NumberedEnv(lengths=[4, 1, 3])
    with Collector(source, policy, frames_per_batch=12) as collector:
        collected = torch.cat([collector.next() for _ in range(3)], -1)
    frames = collected if batched else collected.unsqueeze(0)
    for row in frames:
        for trajectory in row["collector", "traj_ids"].unique():
            episode = row[row["collector", "traj_ids"] == trajectory]
            with torch.no_grad():
                features, _ = lstm.lstm(episode["observation"].unsqueeze(0))
            torch.testing.assert_close(episode["features"], features.squeeze(0))


def test_text_of_the_environment_is_no_output_of_the_policy():
    def make():
        return GymEnv(WithText(NumberedEnv()), info_keys=["stage"])

    for policy in (stateful(), remembering()):
        with Collector([make, make], policy, frames_per_batch=12) as collector:
            batch = collector.next()
            stats = collector.stats()
        assert (stats["env_path"], stats["policy_path"]) == ("tensordict", "direct")
        assert batch["next", "info", "stage"] == [["later"] * 6] * 2


class WithText(gymnasium.Wrapper):
    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return obs, {**info, "stage": "first"}

    def step(self, action):
        *results, info = super().step(action)
        return *results, {**info, "stage": "later"}


# --- only what the policy reads is handed on


def action_of(observation):
    return torch.eye(4, dtype=torch.int64)[0].expand(*observation.shape[:-1], 4)


def unread(td):
    """Writes an entry under ``next`` that it does not read."""
    td["action"] = action_of(td["observation"])
    td["next", "extra"] = td["observation"][..., :2] + 1
    td["next", "deep", "extra"] = td["observation"][..., 2]
    return td


def by_exception(td, zeros):
    try:
        return td["hidden"]
    except KeyError:
        return zeros


def through_a_module(td, zeros):
    module = TensorDictModule(lambda x: zeros if x is None else x, ["hidden"], ["found"])
    return module(td.copy())["found"]


READS = {
    "get": lambda td, zeros: td.get("hidden", zeros),
    "in": lambda td, zeros: td["hidden"] if "hidden" in td.keys() else zeros,  # noqa: SIM118
    "exception": by_exception,
    "copy": lambda td, zeros: td.clone().exclude("done").get("hidden", zeros),
    "module": through_a_module,
}


class Unread(TensorDictModule):
    """A chain of modules, whose last module writes an entry that none reads."""

    def __init__(self):
        super().__init__(
            lambda obs: (action_of(obs), obs[..., :2] + 1, obs[..., 2]),
            ["observation"],
            ["action", ("next", "extra"), ("next", "deep", "extra")],
        )


SOURCES = {
    "one": lambda: NumberedEnv(lengths=[3]),
    "list": lambda: three(NumberedEnv),
    "vector": lambda: SyncVectorEnv([partial(NumberedEnv, i, [3]) for i in range(3)]),
    "ragged": lambda: three(RaggedEnv),
    "tensors": lambda: TorchVectorEnv(NumberedTorchEnv(3, lengths=[3, 1])),
    "parallel": lambda: ParallelEnv(3, partial(NumberedEnv, lengths=[3]), backend="thread"),
    "ready": lambda: [NumberedEnv],
}
EXTRA = {("next", "extra"), ("next", "deep", "extra")}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("make", [lambda: unread, Unread], ids=["function", "module"])
def test_an_entry_under_next_that_the_policy_does_not_read_stays_there(make, source):
    cls, options = Collector, {"frames_per_batch": 12}
    if source == "ready":
        cls, options = AsyncBatchedCollector, {**options, "env_backend": "threading"}
    with cls(SOURCES[source](), policy=make(), **options) as collector:
        for _ in range(2):
            batch = collector.next()
            keys = {as_key(key) for key in batch.keys(True, True)}
            assert keys >= EXTRA
            assert not keys & {key[1:] for key in EXTRA}
            assert torch.equal(batch["next", "extra"], batch["observation"][..., :2] + 1)
            assert not isinstance(batch, LazyStackedTensorDict)


@KINDS
@pytest.mark.parametrize("read", READS)
def test_a_function_reads_its_state_in_any_way(kind, read):
    def policy(td):
        hidden = READS[read](td, torch.zeros(*td.batch_size, 1))
        td["action"] = action_of(td["observation"])
        td["next", "hidden"] = hidden + 1
        return td

    with Collector(three(kind), policy, frames_per_batch=12) as collector:
        for _ in range(3):
            check(kind, collector.next())


def test_a_compiled_policy_is_compiled_in_one_graph():
    def made(graph, inputs):
        graphs.append(graph)
        return graph.forward

    class Policy(TensorDictModuleBase):
        in_keys = ["observation", "hidden"]  # noqa: RUF012 - as tensordict
        out_keys = ["action", ("next", "hidden")]  # noqa: RUF012

        def forward(self, td):
            hidden = td.get("hidden", None)
            td["action"] = nn.functional.one_hot(td["observation"][..., 0].long() * 0, 4)
            hidden = torch.zeros(*td.batch_size, 1) if hidden is None else hidden
            return td.set(("next", "hidden"), hidden + 1)

    graphs = []
    compiled = torch.compile(Policy(), backend=made, fullgraph=True)
    with Collector(NumberedEnv(lengths=[3]), lambda td: compiled(td), frames_per_batch=6) as one:
        assert one.next()["hidden"].flatten().tolist() == [0, 1, 2] * 2
    assert graphs


@pytest.mark.parametrize("kind", ["trawl", "ragged", "torchrl"])
def test_a_step_of_the_environment_may_be_the_policy(kind):
    if kind == "trawl":
        env = GymEnv("Pendulum-v1")
    elif kind == "ragged":
        env = GymEnv(RaggedEnv(lengths=[100]))
    else:
        env = pytest.importorskip("torchrl.envs").GymEnv("Pendulum-v1")
    with Collector(env, env.rand_step, frames_per_batch=6) as collector:
        first, second = collector.next(), collector.next()
    assert not isinstance(first, LazyStackedTensorDict)
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    assert "reward" not in first.keys()  # noqa: SIM118
