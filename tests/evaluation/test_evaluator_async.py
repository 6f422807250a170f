"""Evaluations beside training: what they leave alone, how they queue, how they fail."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluation_parts import DiesOnce, Fails, Gate, Walk, linear, stochastic
from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type

from trawl import ExplorationType
from trawl.collectors import Evaluator
from trawl.errors import StateError, WorkerError


@pytest.mark.parametrize("busy", ["skip", "error"])
def test_a_trigger_while_another_is_under_way(busy: str) -> None:
    gate = Gate()
    with Evaluator(gate, linear(), num_trajectories=1, busy_policy=busy) as evaluator:
        assert evaluator.trigger_eval() is True
        assert gate.stepped.wait(60)
        assert evaluator.pending
        assert evaluator.poll() is None
        if busy == "skip":
            assert evaluator.trigger_eval() is False
        else:
            with pytest.raises(RuntimeError, match="an evaluation is still running"):
                evaluator.trigger_eval()
        with pytest.raises(
            RuntimeError, match=r"state_dict\(\) can't be called while an evaluation is running"
        ):
            evaluator.state_dict()
        with pytest.raises(RuntimeError, match="load_state_dict"):
            evaluator.load_state_dict({"step_counter": 3})
        gate.go_on.set()
        first = evaluator.wait()
        assert not evaluator.pending
        assert evaluator.trigger_eval() is True
        second = evaluator.wait()
        assert first is not None
        assert second is not None
        # What was skipped, or refused, has used no number up.
        assert (first["eval/step"], second["eval/step"]) == (0, 1)
        assert evaluator.state_dict() == {"step_counter": 2}


def test_triggers_queue() -> None:
    gate = Gate()
    weights = [linear(seed) for seed in (1, 2, 3)]
    with Evaluator(gate, linear(), num_trajectories=2, busy_policy="queue") as evaluator:
        assert all(evaluator.trigger_eval(one, step) for step, one in enumerate(weights, 7))
        gate.go_on.set()
        blocking = evaluator.evaluate(weights[0])
        results = [evaluator.wait(), evaluator.poll(), evaluator.poll(timeout=1)]
        assert evaluator.poll() is None
        assert evaluator.wait() is None
    assert [result["eval/step"] for result in results if result] == [7, 8, 9]
    assert blocking["eval/step"] == 0
    returns = [result.episodes.returns.tolist() for result in results if result]
    assert returns[0] == blocking.episodes.returns.tolist()
    assert returns[0] != returns[1] != returns[2]


def test_steps_go_on_from_a_state() -> None:
    with Evaluator(Walk, linear(), num_trajectories=1) as evaluator:
        evaluator.load_state_dict({"step_counter": 5})
        assert evaluator.evaluate()["eval/step"] == 5
        assert evaluator.evaluate(step=100)["eval/step"] == 100
        assert evaluator.evaluate()["eval/step"] == 6
        for wrong in ({}, {"step_counter": -1}, {"step_counter": "7"}, {"step_counter": 2**70}):
            with pytest.raises(StateError, match="step_counter"):
                evaluator.load_state_dict(wrong)
        assert evaluator.state_dict() == {"step_counter": 7}


@pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
def test_the_learner_is_left_alone(kind: InteractionType) -> None:
    """All that the whole process shares is as it was, while the evaluation goes on.

    It acts with the weights that the policy had at the call.
    """
    gate, policy = Gate(), stochastic()
    policy.train()
    dropout = next(m for m in policy.modules() if isinstance(m, torch.nn.Dropout))
    options: dict[str, Any] = {"num_trajectories": 3, "exploration_type": kind}
    with Evaluator(Walk, policy, **options) as evaluator:
        expected = evaluator.evaluate().episodes.returns.tolist()
    torch.manual_seed(3)
    np.random.seed(3)
    drawn = torch.rand(5)
    torch.manual_seed(3)
    before = np.random.get_state()[1].tolist()
    with Evaluator(gate, policy, **options) as evaluator:
        evaluator.trigger_eval()
        assert gate.stepped.wait(60)
        # It is amid its episode, and has drawn.
        assert torch.equal(torch.rand(5), drawn)
        assert interaction_type() is None
        assert dropout.training
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.fill_(7.0)
        with set_interaction_type(InteractionType.MEAN):
            gate.go_on.set()
            result = evaluator.wait()
            # Neither sees what the other has set.
            assert interaction_type() is InteractionType.MEAN
        assert result is not None
        assert result.episodes.returns.tolist() == expected
    assert interaction_type() is None
    assert dropout.training
    assert all((parameter == 7.0).all() for parameter in policy.parameters())
    assert np.random.get_state()[1].tolist() == before


class Named(torch.nn.Linear):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation)


def test_a_factory_may_give_the_learners_own_module() -> None:
    policy = Named(2, 1).train()
    weight, state = policy.weight.detach().clone(), torch.get_rng_state()
    with Evaluator(Walk, policy_factory=lambda env: policy, num_trajectories=1) as evaluator:
        # Making it draws nothing.
        assert torch.equal(torch.get_rng_state(), state)
        evaluator.evaluate({"weight": torch.zeros(1, 2), "bias": torch.zeros(1)})
    assert policy.training
    assert torch.equal(policy.weight, weight)
    with Evaluator(Walk, policy_factory=lambda: Named(2, 1), num_trajectories=1):
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_a_failure_is_raised_with_its_traceback(backend: str) -> None:
    with Evaluator(Fails, linear(), num_trajectories=1, backend=backend) as evaluator:
        with pytest.raises(KeyError, match="the pole broke") as raised:
            evaluator.evaluate()
        shown = str(raised.value) + "".join(getattr(raised.value, "__notes__", []))
        shown += "".join(str(entry.path) for entry in raised.traceback)
        assert "evaluation_parts.py" in shown
        evaluator.trigger_eval()
        with pytest.raises(KeyError, match="the pole broke"):
            evaluator.wait()
        # It is raised once.
        assert evaluator.wait() is None


def wait_for(evaluator: Evaluator) -> None:
    """Waits until an evaluation has ended, whose result is not taken."""
    while evaluator.pending:
        threading.Event().wait(0.01)


def test_a_failure_that_nobody_asked_for_is_raised_by_the_next_call_or_warned_of() -> None:
    evaluator = Evaluator(Fails, linear(), num_trajectories=1, busy_policy="queue")
    evaluator.trigger_eval()
    wait_for(evaluator)
    with pytest.raises(KeyError, match="the pole broke"):
        evaluator.trigger_eval()
    assert evaluator.poll() is None
    evaluator.trigger_eval()
    wait_for(evaluator)
    with pytest.warns(RuntimeWarning, match="an evaluation failed: KeyError"):
        evaluator.shutdown()


def test_after_a_failure_environments_are_made_anew() -> None:
    made: list[Walk] = []

    def make() -> Walk:
        made.append(Walk() if made else Fails())
        return made[-1]

    with Evaluator(make, linear(), num_trajectories=2) as evaluator:
        with pytest.raises(KeyError, match="the pole broke"):
            evaluator.evaluate()
        assert evaluator.evaluate()["eval/num_episodes"] == 2
    assert len(made) == 2


def test_a_callback_that_fails_is_heard() -> None:
    def fail(metrics: Any) -> None:
        raise OSError("the disk is full")

    with Evaluator(Walk, linear(), num_trajectories=1, on_result=fail) as evaluator:
        evaluator.trigger_eval()
        with pytest.raises(OSError, match="the disk is full"):
            evaluator.wait()


def test_wrong_weights_are_refused() -> None:
    with Evaluator(Walk, linear(), num_trajectories=1) as evaluator:
        with pytest.raises(TypeError, match="weights must be a module"):
            evaluator.trigger_eval("weights.pt")
        with pytest.raises(KeyError, match="bias"):
            evaluator.evaluate({"module.weight": torch.zeros(1, 2)})
        with pytest.raises(KeyError, match="critic"):
            evaluator.evaluate(weights_dict={"critic": linear()})
        # Nothing else has changed by it.
        assert evaluator.evaluate()["eval/num_episodes"] == 1


def test_a_worker_that_dies_is_replaced_unless_it_always_dies(tmp_path: Path) -> None:
    with Evaluator(Walk, linear(), num_trajectories=5) as evaluator:
        expected = evaluator.evaluate().episodes
    dies = tmp_path / "dies"
    words = "worker 0 was killed by SIGKILL; a new worker takes"
    options = {"num_trajectories": 5, "backend": "process"}
    options |= {"collector_kwargs": {"max_restarts": 1}}
    for always in (False, True):
        dies.touch()
        env = partial(DiesOnce, str(dies), each=always)
        with Evaluator(env, linear(), **options) as evaluator:
            death = pytest.raises(WorkerError, match="SIGKILL") if always else nullcontext()
            with pytest.warns(RuntimeWarning, match=words), death:
                result = evaluator.evaluate().episodes
            assert dies.exists() == always
            dies.unlink(missing_ok=True)
            if always:
                result = evaluator.evaluate().episodes
            assert result.returns.tolist() == expected.returns.tolist()
            assert result.lengths.tolist() == expected.lengths.tolist()


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_shutdown_ends_an_evaluation(backend: str) -> None:
    evaluator = Evaluator(partial(Walk, most=10**9), linear(), num_trajectories=1, backend=backend)
    evaluator.trigger_eval()
    evaluator.shutdown()
    evaluator.shutdown()
    assert not evaluator.pending
    assert evaluator.wait() is None
    for call in (evaluator.evaluate, evaluator.trigger_eval):
        with pytest.raises(RuntimeError, match="the evaluator was shut down"):
            call()


@pytest.mark.parametrize("end", ["closed", "forgotten"])
def test_environments_are_made_stepped_and_closed_by_one_thread(end: str) -> None:
    threads: set[str] = set()
    closed = threading.Event()

    class Watching(Walk):
        def __init__(self) -> None:
            super().__init__()
            threads.add(threading.current_thread().name)

        def step(self, action: Any) -> Any:
            threads.add(threading.current_thread().name)
            return super().step(action)

        def close(self) -> None:
            threads.add(threading.current_thread().name)
            closed.set()

    evaluator = Evaluator(Watching, linear(), num_trajectories=1)
    evaluator.evaluate()
    if end == "closed":
        evaluator.shutdown()
        assert closed.is_set()
    gone = weakref.ref(evaluator)
    del evaluator
    gc.collect()
    assert gone() is None
    assert closed.wait(60)
    assert threads == {"Evaluator"}


def test_errors_of_making_the_environment_come_at_once() -> None:
    def broken() -> Walk:
        raise ImportError("no simulator here")

    for backend in ("thread", "process"):
        with pytest.raises(ImportError, match="no simulator here"):
            Evaluator(broken, linear(), backend=backend)


def test_only_the_newest_result_is_kept_if_a_callback_had_the_others() -> None:
    steps: list[int] = []
    options = {"on_result": lambda metrics: steps.append(metrics["eval/step"])}
    with Evaluator(Walk, linear(), num_trajectories=1, busy_policy="queue", **options) as evaluator:
        for _ in range(4):
            evaluator.trigger_eval()
            wait_for(evaluator)
        last = evaluator.poll()
        assert last is not None
        assert last["eval/step"] == 3
        assert evaluator.poll() is None
    assert steps == [0, 1, 2, 3]
    # A result can be had after the end.
    with Evaluator(Walk, linear(), num_trajectories=1) as evaluator:
        evaluator.trigger_eval()
        wait_for(evaluator)
    assert evaluator.poll() is not None
    assert evaluator.poll() is None
