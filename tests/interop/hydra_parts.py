"""TorchRL's trainers, made of TorchRL's Hydra configurations."""

import os

import torchrl.trainers.algorithms.configs  # noqa: F401  registers them with Hydra
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from tensordict import TensorDict
from trainer_parts import Followed

CONFIGS = os.path.join(os.path.dirname(__file__), "configs")
# What is found in a trainer, and what it writes: the policy's part without random numbers.
NETWORKS = {"ppo": ("actor_network", "loc"), "dqn": ("value_network", "action_value")}
NETWORKS |= {"sac": NETWORKS["ppo"]}


def trainer_of(name, *overrides):
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        return instantiate(compose(name, [*overrides]).trainer)


def collector_of(kind, **options):
    """Overrides that give a trainer a collector of Trawl, by TorchRL's configuration of it."""
    target = options.pop("target", "trawl.collectors")
    names = {
        "sync": "Collector",
        "async": "AsyncCollector",
        "multi_sync": "MultiSyncCollector",
        "multi_async": "MultiAsyncCollector",
    }
    chosen = [f"collector={kind}", f"collector._target_={target}.{names[kind]}"]
    if kind.startswith("multi") and "create_env_fn" not in options:
        options["num_workers"] = 2
    return [*chosen, *(f"collector.{name}={value}" for name, value in options.items())]


class Configured:
    """The learner's weights in a trainer that Hydra made, with models of its own for each part."""

    def __init__(self, name, trainer):
        found, self.output = NETWORKS[name]
        self.value = getattr(trainer.loss_module, found)
        if self.output == "loc":
            self.value = self.value[0]

    def weights(self):
        return TensorDict.from_module(self.value).data


def followed(name, trainer):
    agent = Configured(name, trainer)
    seen = Followed(agent, trainer)
    # The first batches are made with the weights of the collector's own policy.
    seen.sent = [TensorDict.from_module(first_part(trainer.collector)).data.clone()]
    return seen


def first_part(collector):
    return collector.policy[0]
