"""Multi-agent losses of TorchRL learn from batches of PettingZoo environments."""

import torch
from mpe2 import simple_spread_v3
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch.distributions import Categorical
from torchrl.modules import MultiAgentMLP, ProbabilisticActor, QMixer, QValueModule, ValueOperator
from torchrl.objectives import ClipPPOLoss, SoftUpdate, ValueEstimators
from torchrl.objectives.multiagent import QMixerLoss

from trawl import Collector
from trawl.envs import PettingZooEnv


def spread():
    return simple_spread_v3.parallel_env(max_cycles=6)


def network(outputs, centralized=False):
    return MultiAgentMLP(
        18, outputs, 3, centralized=centralized, share_params=True, num_cells=8, depth=1
    )


def gradients(losses, module):
    """Sums the losses, and returns the gradients of a module's parameters."""
    sum(value for key, value in losses.items() if key.startswith("loss")).backward()
    return [one.grad for one in module.parameters() if one.requires_grad]


def test_mappo():
    torch.manual_seed(0)
    logits = TensorDictModule(network(5), [("agent", "observation")], [("agent", "logits")])
    actor = ProbabilisticActor(
        logits,
        in_keys=[("agent", "logits")],
        out_keys=[("agent", "action")],
        distribution_class=Categorical,
        return_log_prob=True,
        log_prob_key=("agent", "sample_log_prob"),
    )
    critic = ValueOperator(
        network(1, centralized=True),
        in_keys=[("agent", "observation")],
        out_keys=[("agent", "state_value")],
    )
    with Collector([spread] * 4, actor, frames_per_batch=48) as collector:
        batch = collector.next()
    loss = ClipPPOLoss(actor, critic, normalize_advantage=False)
    agent = {
        "reward": ("agent", "reward"),
        "done": ("agent", "done"),
        "terminated": ("agent", "terminated"),
        "advantage": ("agent", "advantage"),
        "value_target": ("agent", "value_target"),
        "value": ("agent", "state_value"),
    }
    loss.set_keys(action=("agent", "action"), sample_log_prob=("agent", "sample_log_prob"), **agent)
    loss.make_value_estimator(ValueEstimators.GAE, gamma=0.99, lmbda=0.9)
    with torch.no_grad():
        loss.value_estimator(
            batch,
            params=loss.critic_network_params,
            target_params=loss.target_critic_network_params,
        )
    assert batch["agent", "advantage"].shape == (4, 12, 3, 1)
    # The last step of an episode is truncated, so the value after it counts.
    with torch.no_grad():
        following = critic(batch["next"].select(("agent", "observation")))["agent", "state_value"]
        value = critic(batch.select(("agent", "observation")))["agent", "state_value"]
    expected = batch["next", "agent", "reward"] + 0.99 * following - value
    last = batch["next", "done"].expand(4, 12, 3).unsqueeze(-1)
    assert last.sum() == 24
    torch.testing.assert_close(batch["agent", "advantage"][last], expected[last])
    found = gradients(loss(batch), loss)
    assert all(one is not None and one.isfinite().all() for one in found)
    assert any(one.abs().sum() > 0 for one in found)


def test_qmix():
    torch.manual_seed(0)
    values = TensorDictModule(network(5), [("agent", "observation")], [("agent", "action_value")])
    choose = QValueModule(
        action_value_key=("agent", "action_value"),
        out_keys=[
            ("agent", "action"),
            ("agent", "action_value"),
            ("agent", "chosen_action_value"),
        ],
        action_space="categorical",
    )
    policy = TensorDictSequential(values, choose)
    mixer = TensorDictModule(
        QMixer(state_shape=(54,), mixing_embed_dim=8, n_agents=3, device="cpu"),
        in_keys=[("agent", "chosen_action_value"), "state"],
        out_keys=["chosen_action_value"],
    )
    env = PettingZooEnv(spread(), return_state=True)
    with Collector(env, policy, frames_per_batch=12) as collector:
        batch = collector.next()
    loss = QMixerLoss(policy, mixer, delay_value=True, action_space="categorical")
    loss.set_keys(
        action=("agent", "action"),
        action_value=("agent", "action_value"),
        local_value=("agent", "chosen_action_value"),
        global_value="chosen_action_value",
    )
    # QMIX has one reward for the team.
    batch["next", "reward"] = batch["next", "agent", "reward"].mean(-2)
    loss.make_value_estimator(ValueEstimators.TD0, gamma=0.99)
    SoftUpdate(loss, tau=0.5)
    found = gradients(loss(batch), loss)
    assert any(one is not None and one.abs().sum() > 0 for one in found)
