"""Real PettingZoo environments: the same entries as in TorchRL's wrapper, and its policies."""

import pettingzoo
import pytest
import torch
from mpe2 import simple_speaker_listener_v4, simple_spread_v3
from tensordict.nn import TensorDictModule
from torch.distributions import Categorical
from torchrl.envs import PettingZooWrapper
from torchrl.envs.utils import MarlGroupMapType
from torchrl.modules import MultiAgentMLP, ProbabilisticActor

from trawl import Collector
from trawl.envs import PettingZooEnv

pytestmark = pytest.mark.filterwarnings("ignore:PettingZoo in TorchRL")


def spread():
    return simple_spread_v3.parallel_env(max_cycles=6)


def spread_in_turn():
    return simple_spread_v3.env(max_cycles=3)


def speaker():
    return simple_speaker_listener_v4.parallel_env(max_cycles=6)


def tictactoe():
    pytest.importorskip("pygame")
    return pettingzoo.make("aec", "classic/tictactoe-v3")


def first_allowed(td):
    """Takes the first allowed action, or one that depends on the agent's observation."""
    for group in [key for key in td.keys() if (key, "observation") in td.keys(True)]:  # noqa: SIM118
        mask = td.get((group, "action_mask"), None)
        if mask is None:
            action = (td[group, "observation"].sum(-1).abs() * 10).long() % 3
        else:
            action = mask.int().argmax(-1)
        td.set((group, "action"), action)
    return td


def in_one_hot(td):
    """Takes the same actions, as vectors."""
    actions = first_allowed(td)["agent", "action"]
    return td.set(("agent", "action"), torch.nn.functional.one_hot(actions, 5))


@pytest.mark.parametrize(
    ("make", "kwargs"),
    [
        (spread, {}),
        (spread, {"use_mask": True, "return_state": True, "done_on_any": False}),
        (spread, {"categorical_actions": False}),
        (spread, {"group_map": MarlGroupMapType.ONE_GROUP_PER_AGENT}),
        (speaker, {}),
        (spread_in_turn, {"use_mask": True}),
        (spread_in_turn, {"use_mask": True, "done_on_any": True}),
        (tictactoe, {"use_mask": True}),
    ],
)
def test_entries_are_those_of_torchrls_wrapper(make, kwargs):
    theirs, ours = PettingZooWrapper(make(), **kwargs), PettingZooEnv(make(), **kwargs)
    assert ours.group_map == theirs.group_map
    assert set(ours.reward_keys) == set(theirs.reward_keys)
    assert set(ours.action_keys) == set(theirs.action_keys)
    for kind in ("observation", "action", "reward", "done"):
        own, other = (getattr(env, f"full_{kind}_spec") for env in (ours, theirs))
        assert {key: (leaf.shape, leaf.dtype) for key, leaf in own.items(True, True)} == {
            key: (leaf.shape, leaf.dtype) for key, leaf in other.items(True, True)
        }
    # One episode, because the second one would begin with other random numbers.
    policy = in_one_hot if "categorical_actions" in kwargs else first_allowed
    expected = theirs.rollout(40, policy, auto_reset=False, tensordict=theirs.reset(seed=5))
    batch = ours.rollout(40, policy, tensordict=ours.reset(seed=5))
    assert batch.batch_size == expected.batch_size
    assert batch["next", "done"].sum() == 1
    assert set(batch.keys(True, True)) == set(expected.keys(True, True))
    for key in batch.keys(True, True):
        assert batch.get(key).dtype == expected.get(key).dtype, key
        assert torch.equal(batch.get(key), expected.get(key)), key
    theirs.close()
    ours.close()


def actor():
    torch.manual_seed(0)
    net = MultiAgentMLP(18, 5, 3, centralized=False, share_params=True, num_cells=8, depth=1)
    module = TensorDictModule(
        net, in_keys=[("agent", "observation")], out_keys=[("agent", "logits")]
    )
    return ProbabilisticActor(
        module,
        in_keys=[("agent", "logits")],
        out_keys=[("agent", "action")],
        distribution_class=Categorical,
        return_log_prob=True,
        log_prob_key=("agent", "sample_log_prob"),
    )


def test_torchrls_policies_run_unchanged_in_a_vector():
    with Collector([spread] * 2, actor(), frames_per_batch=24, total_frames=48) as collector:
        batches = list(collector)
        stats = collector.stats()
    assert stats["env_path"] == "array"
    assert [batch.batch_size for batch in batches] == [(2, 12)] * 2
    batch = batches[0]
    assert batch["agent", "sample_log_prob"].shape == (2, 12, 3)
    assert batch["next", "agent", "reward"].shape == (2, 12, 3, 1)
    assert batch["next", "done"].sum() == 4
    logits = actor().module[0](batch.select(("agent", "observation")))["agent", "logits"]
    torch.testing.assert_close(logits, batch["agent", "logits"])
