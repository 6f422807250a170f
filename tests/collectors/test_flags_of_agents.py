"""Flags of agents and flags of the episode: what ends, and what is truncated."""

import pytest
import torch
from collector_parts import Buffer

from tests.envs.agents import Turns, Walkers
from trawl import Collector, MultiSyncCollector
from trawl.data import MultiStep
from trawl.envs import PettingZooEnv
from trawl.observe import EpisodeStats


def walkers():
    """The first walker dies in step 3 of 6."""
    return PettingZooEnv(Walkers(late=False), done_on_any=False)


def turns():
    """The first agent dies in step 4 of 8."""
    return PettingZooEnv(Turns(), done_on_any=False)


def last_of(source, frames, collector=Collector, **options):
    with collector(source, frames_per_batch=frames, **options) as found:
        found.set_seed(1)
        return found.next()[..., -1]["next"]


def truncated(plain):
    """What the flags of a step become if it is truncated."""
    expected = plain.clone()
    for key in plain.keys(True, True):
        if key == "truncated":
            expected[key] = expected["done"] = torch.ones_like(plain[key])
        elif key[-1] == "truncated":
            done = (*key[:-1], "done")
            expected[key] = plain[key] | ~plain[done]
            expected[done] = torch.ones_like(plain[done])
    return expected


@pytest.mark.parametrize(
    ("kind", "frames", "place"),
    [
        (walkers, 3, "list"),
        (walkers, 5, "worker"),
        (walkers, 6, "alone"),
        (turns, 3, "alone"),
        (turns, 5, "list"),
    ],
)
def test_a_batch_end_truncates_the_agents_that_are_not_done(kind, frames, place):
    source = {"alone": kind, "list": [kind] * 2, "worker": [kind]}[place]
    options = {"frames": frames * (1 + (place == "list"))}
    if place == "worker":
        options |= {"collector": MultiSyncCollector, "start_method": "inline"}
    found = last_of(source, set_truncated=True, **options)
    assert (found == truncated(last_of(source, **options))).all()


def test_so_does_the_end_of_exact_frames():
    options = {"total_frames": 5, "exact_frames": True, "set_truncated": True}
    with Collector([walkers] * 2, frames_per_batch=16, **options) as collector:
        flags = collector.next()["next", "walker"]
    assert flags["done"][[0, 1], [2, 1]].all()
    # The first walker dies in the third step.
    assert flags["truncated"][0, 2].flatten().tolist() == [False, True]
    assert flags["truncated"][1, 1].flatten().tolist() == [True, True]


def test_so_does_the_last_of_single_steps():
    buffer = Buffer()
    options = {"replay_buffer": buffer, "extend_buffer": False, "set_truncated": True}
    with Collector(walkers, frames_per_batch=2, total_frames=2, **options) as collector:
        list(collector)
    flags = buffer.content()["next", "walker", "truncated"]
    assert not flags[0].any()
    assert flags[1].all()


@pytest.mark.parametrize(("kind", "frames"), [(walkers, 1), (walkers, 24), (turns, 4)])
def test_an_agent_that_dies_ends_no_trajectory(kind, frames):
    length, stats = {walkers: 6, turns: 8}[kind], EpisodeStats()
    with Collector(kind, frames_per_batch=frames, total_frames=48) as collector:
        for batch in collector:
            stats.update(batch)
        assert stats.count == collector.stats()["episodes"] == 48 // length
        assert stats.recent_length == length
    options = {"trajs_per_batch": 1, "traj_format": "cat"}
    with Collector(kind, frames_per_batch=frames, total_frames=48, **options) as collector:
        assert [len(batch) for batch in collector] == [length] * (48 // length)


def test_nor_does_it_shorten_combined_steps():
    with Collector(walkers, frames_per_batch=6, postproc=MultiStep(0.9, 3)) as collector:
        batch = collector.next()
    assert batch["steps_to_next_obs"].tolist() == [3, 3, 3, 3, 2, 1]
    # The other agents are truncated.
    assert batch["nonterminal"].all()
