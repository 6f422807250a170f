"""Infos and action masks of agents in batches."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.envs.agents import AGENTS, Turns, Walkers
from trawl import Collector
from trawl.collectors import MultiSyncCollector, NormalizeObservation
from trawl.envs import FrameStack, InfoKey, ParallelEnv, PettingZooEnv, TorchVectorEnv
from trawl.testing import NumberedTorchEnv


class Telling(Walkers):
    """Its infos have costs, which are integers at first, and places of walkers from step 2 on."""

    def _info(self, agent):
        info = {"cost": self.t if self.t < 2 else self.t + 0.5, "text": "no number"}
        if agent != "flyer" and self.t >= 2:
            info["place"] = {"xy": np.array([self.t, -self.t])}
        if agent == "flyer":
            info["height"] = np.float32(self.t)
        return info


def make(info_keys, **options):
    return PettingZooEnv(Telling(**options), done_on_any=False, info_keys=info_keys)


def collect(env, frames=6):
    with Collector(env, None, frames_per_batch=frames) as collector:
        batch = collector.next()
        assert collector.stats()["env_path"] == "array"
    return batch


COSTS = [0, 1, 2.5, 3.5, 4.5, 5.5]


def test_named_infos_are_found_in_steps():
    batch = collect(make(["cost"], late=False))
    assert batch["flyer", "info", "cost"].dtype is torch.float64
    assert batch["flyer", "info", "cost"].shape == (6, 1, 1)
    assert batch["flyer", "info", "cost"].flatten().tolist() == COSTS
    assert batch["next", "flyer", "info", "cost"].flatten().tolist() == [*COSTS[1:], 6.5]
    # The first walker dies in step 3, whose info is still there.
    assert batch["next", "walker", "info", "cost"][:, 0, 0].tolist() == [1, 2.5, 3.5, 0, 0, 0]
    assert set(batch["walker", "info"].keys()) == {"cost"}


def test_agents_that_are_not_there_have_blank_infos():
    class Counting(Walkers):
        def _info(self, agent):
            return {"n": 4 + self.t}

    keys = {"n": spaces.Discrete(9, start=3)}
    batch = collect(PettingZooEnv(Counting(), done_on_any=False, info_keys=keys))
    # The flyer appears in step 2, and the first walker is there until step 3.
    assert batch["flyer", "info", "n"].flatten().tolist() == [3, 3, 6, 7, 8, 9]
    assert batch["walker", "info", "n"][:, 0].flatten().tolist() == [4, 5, 6, 7, 3, 3]


def test_each_group_has_infos_of_its_own_under_the_keys_that_they_are_given():
    keys = {
        "walker": ["place", InfoKey(("place", "xy"), key="position")],
        "flyer": {"height": None, ("cost",): None},
    }
    batch = collect(make(keys, late=False))
    for key in (("info", "place", "xy"), ("position",)):
        places = batch[("next", "walker", *key)][:, 1]
        assert places.tolist() == [[0, 0], *([t, -t] for t in range(2, 7))]
        assert places.dtype is torch.int64
    heights = batch["next", "flyer", "info", "height"]
    assert heights.dtype is torch.float32
    assert heights.flatten().tolist() == list(range(1, 7))
    assert set(batch["walker", "info"].keys()) == {"place"}
    assert set(batch["flyer", "info"].keys()) == {"cost", "height"}


def test_no_infos():
    assert "info" not in collect(make([], late=False))["walker"].keys()  # noqa: SIM118
    only = collect(make({"flyer": ["cost"]}, late=False))
    assert "info" not in only["walker"].keys()  # noqa: SIM118
    # By default, numbers of the first reset are taken, as TorchRL does.
    batch = collect(PettingZooEnv(Walkers(late=False), done_on_any=False))
    assert batch["next", "flyer", "info", "cost"][:, 0].tolist() == [0.5 * t for t in range(1, 7)]
    assert set(batch["flyer", "info"].keys()) == {"cost"}


class TellingTurns(Turns):
    """Its infos have the number of the step, and a text."""

    def step(self, action):
        super().step(action)
        for agent in self.agents:
            self.infos[agent] = {"n": self.n, "text": f"{agent}:{self.n}"}


class Saying(Walkers):
    """Its infos have lists as well, which tell the agent and the step."""

    def _info(self, agent):
        info = {"list": [agent, self.t], "who": {"name": agent}}
        return {**super()._info(agent), **info, "here": self.t + 1}


SAID = {"here": None, "text": str, "list": object, "who": None, "never": str}


def saying(keys=SAID):
    return PettingZooEnv(Saying("info"), done_on_any=False, use_mask=True, info_keys=keys)


def check_texts(batch):
    """Compares the texts of each agent with the numbers in the same rows."""
    for rows in (batch, batch["next"]):
        for group, agents in (("walker", AGENTS[:2]), ("flyer", AGENTS[2:])):
            info = rows[group, "info"]
            for row, found in enumerate(info["here"][..., 0].tolist()):
                for index, agent in enumerate(agents):
                    here, step = found[index] > 0, found[index] - 1
                    assert info["text"][row][index] == (f"{agent}:{step}" if here else "")
                    assert info["list"][row][index] == ([agent, step] if here else None)
                    assert info["who", "name"][row][index] == (agent if here else "")
                    assert info["never"][row][index] == ""


@pytest.mark.parametrize("place", ["one", "processes", "workers"])
def test_text_of_each_agent(place):
    if place == "workers":
        cls, source = partial(MultiSyncCollector, start_method="inline"), [saying] * 2
    else:
        cls, source = Collector, saying if place == "one" else partial(ParallelEnv, 2, saying)
    with cls(source, policy=None, frames_per_batch=16) as collector:
        batch = collector.next().reshape(-1)
    check_texts(batch)
    assert batch["next", "done"].any()


def test_infos_in_turn_follow_masks_while_they_are_found():
    env = PettingZooEnv(TellingTurns(), info_keys=["n", "text"])
    with Collector(env, frames_per_batch=8) as collector:
        batch = collector.next()
    assert batch["next", "flyer", "info", "n"].flatten().tolist() == list(range(1, 9))
    assert batch["next", "flyer", "info", "text"] == [[f"flyer:{n}"] for n in range(1, 9)]
    # The first agent dies in step 4.
    found = [row[0] for row in batch["next", "walker_0", "info", "text"]]
    assert found == [*(f"walker_0:{n}" for n in range(1, 5)), "", "", "", ""]


def test_text_does_not_rule_out_options_for_other_entries():
    with Collector(
        partial(saying, ["text"]), frames_per_batch=8, frame_stack=2, normalize_observations=True
    ) as collector:
        batch = collector.next()
        assert list(collector.normalization.observations) == [
            ("walker", "observation"),
            ("flyer", "observation"),
        ]
    assert batch["walker", "observation"].shape[:3] == (8, 2, 2)


def test_text_is_neither_stacked_nor_normalised():
    key = ("walker", "info", "text")
    words = r"frame_stack can't be used with .*\('walker', 'info', 'text'\)"
    with pytest.raises(ValueError, match=words):
        Collector(
            partial(saying, ["text"]), frames_per_batch=4, frame_stack=FrameStack(2, keys=[key])
        )
    with pytest.raises(ValueError, match=r"normalize_observations .*\('walker', 'info', 'text'\)"):
        Collector(
            partial(saying, ["text"]),
            frames_per_batch=4,
            normalize_observations=NormalizeObservation(keys=[key]),
        )


def test_a_dataset_holds_no_text_of_agents(monkeypatch):
    from trawl.extras.cli.arguments import CollectArguments
    from trawl.extras.cli.environments import make_env
    from trawl.extras.cli.errors import CliError

    args = CollectArguments(env="module:function", out="d", frames=4, format="parquet")
    with pytest.raises(CliError, match=r"has a text for each agent \(\('walker', 'info', 'text'\)"):
        make_env(args, partial(saying, ["text"]))


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (["speed"], ValueError, r"'speed', but the infos of group 'walker' have only \['cost'"),
        ({"flyer": ["cost"], "cost": None}, ValueError, r"names of groups, and also \['cost'\]"),
        ("cost", TypeError, "info_keys must be a list of names"),
        (["height"], ValueError, r"unlike .* 'flyer': .* info_keys=\{'flyer': \['height'\]\}"),
        ({"flyre": ["cost"]}, ValueError, r"\['flyre'\], but the groups are .* mean flyer\?"),
        (["cost", "cost"], ValueError, "more than once"),
    ],
)
def test_names_that_can_not_be_taken_are_refused(keys, error, message):
    with pytest.raises(error, match=message):
        make(keys, late=False)


class Changing(Walkers):
    """The info of one agent changes in step 2."""

    def __init__(self, usual, value):
        super().__init__(late=False)
        self.usual, self.value = usual, value

    def _info(self, agent):
        wrong = agent == "walker_1" and self.t == 2
        return {"cost": self.value if wrong else self.usual}


STATED, TINY = {"cost": spaces.Box(0, 1, ())}, {"cost": spaces.Box(0, 100, (), np.int8)}


@pytest.mark.parametrize(
    ("keys", "usual", "value", "error", "message"),
    [
        (None, 0.5, np.zeros(3), ValueError, r"info\['cost'\] has shape \(3,\)"),
        (STATED, 0.5, np.zeros(3), ValueError, r"info\['cost'\] has shape \(3,\)"),
        (None, 0.5, 1j, TypeError, r"info\['cost'\] is complex"),
        (STATED, 0.5, "much", TypeError, r"info\['cost'\] is str 'much'"),
        (TINY, 7, np.int64(300), TypeError, "is 300, .* int8, which can't hold this number"),
        ({"cost": str}, "7", 3, TypeError, r"info\['cost'\] is int 3, .* write info_keys=.*object"),
    ],
)
def test_values_that_change_in_mid_run_are_refused(keys, usual, value, error, message):
    env = PettingZooEnv(Changing(usual, value), info_keys=keys)
    with (
        Collector(env, None, frames_per_batch=6) as collector,
        pytest.raises(error, match=message) as caught,
    ):
        collector.next()
    assert "in the info of agent 'walker_1'" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(("game", "count"), [("tictactoe-v3", None), ("connect_four-v3", 3)])
def test_random_players_make_only_moves_that_a_game_allows(game, count):
    pytest.importorskip("pygame")
    options = {} if count is None else {"num_envs": count}
    with Collector(
        f"pettingzoo:classic/{game}",
        frames_per_batch=60 * (count or 1),
        create_env_kwargs=options,
    ) as collector:
        seen = set()
        # Until an episode has ended, and the player whose turn it is may not make some moves.
        while seen != {"end", "limit"}:
            batch = collector.next()
            names = set(batch.keys())
            players = [name for name in ("player_1", "player_2", "player_0") if name in names]
            assert len(players) == 2
            for player in players:
                taken = batch[player, "action_mask"].gather(
                    -1, batch[player, "action"].unsqueeze(-1)
                )
                assert taken.all()
            # A player who makes an illegal move loses with the reward -1, and the other gets 0.
            rewards = sum(batch["next", player, "reward"] for player in players)
            assert not rewards.any()
            seen |= {"end"} if batch["next", "done"].any() else set()
            seen |= set() if batch[players[0], "action_mask"].all() else {"limit"}
        assert collector.stats()["env_path"] == "array"


def test_the_command_adapts_agents_and_tensors(monkeypatch):
    from trawl.extras.cli.environments import EnvFactory

    class Informing(Walkers):
        def _info(self, agent):
            return {"cost": 0.5}

    class Tensors(NumberedTorchEnv):
        def reset(self, **kwargs):
            obs, info = super().reset(**kwargs)
            return obs, {**info, "cost": torch.zeros(self.num_envs)}

        def step(self, action):
            *results, info = super().step(action)
            return *results, {**info, "cost": torch.ones(self.num_envs)}

    for source, kind in ((Informing, PettingZooEnv), (partial(Tensors, 2), TorchVectorEnv)):
        monkeypatch.setattr(EnvFactory, "find", lambda self, source=source: source)
        env = EnvFactory("module:function", {}, ["cost"])()
        assert isinstance(env, kind)
        assert any("cost" in key for key in env.reset().keys(True, True))
        env.close()
