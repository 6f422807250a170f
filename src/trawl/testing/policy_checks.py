"""Checks a user's policy against what collectors expect of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, stack
from tensordict.nn import InteractionType
from torch import Tensor, nn

from trawl.backends.processes.payload import packed
from trawl.checks import check_number, did_you_mean
from trawl.collectors import Collector, MultiSyncCollector
from trawl.envs.batches.serial import batch_source, given_envs
from trawl.envs.types import is_list
from trawl.keys import Key, as_key, show_key, show_keys
from trawl.rollout.checks import name_of
from trawl.rollout.policy.exploration import exploring
from trawl.rollout.policy.kinds import resolve
from trawl.rollout.trial import trial
from trawl.testing.env_checks import Subject, act_randomly, difference, seeded
from trawl.testing.findings import CheckReport, Findings

# Number of rows with which a policy is called, and of calls that are timed.
_ROWS, _CALLS = 4, 20
# Names of layers that act differently in training.
_TRAINING = ("Dropout", "AlphaDropout", "FeatureAlphaDropout", "BatchNorm", "SyncBatchNorm")


def check_policy(
    policy: Any,
    env: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    steps: int = 50,
    seed: int = 0,
    worker: bool = True,
) -> CheckReport:
    """Checks a policy of your own against what collectors expect of it.

    Afterwards, the policy is as it was before: its parameters, buffers, attributes and generators.

    Args:
        policy: the policy, in any form that :class:`~trawl.collectors.Collector` accepts.
        env: the environment that it acts in, as in :func:`check_env`. It should pass that check.
        kwargs: arguments for the function that makes the environment.
        steps: number of steps that the policy acts for.
        seed: seed of the environment and the policy.
        worker: False to leave out the check in a worker process.

    Returns:
        A report with all findings; nothing is raised for them.

    Examples:
        >>> from tensordict.nn import TensorDictModule
        >>> from torch import nn
        >>> from trawl.testing import check_policy
        >>> policy = TensorDictModule(nn.Linear(3, 2), ["observation"], ["action"])
        >>> report = check_policy(policy, "Pendulum-v1", worker=False)
        >>> report.ok, report.findings[0].topic
        (False, 'collection')
        >>> policy = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
        >>> check_policy(policy, "Pendulum-v1", worker=False).ok
        True
    """
    steps = check_number("steps", steps, least=1)
    findings = Findings()
    subject = Subject(env, kwargs, findings)
    with findings.quietly(seed):
        try:
            _PolicyChecks(policy, subject, findings, steps, seed).run(worker)
        finally:
            subject.end()
    return findings.report(_name(policy))


def _name(policy: Any) -> str:
    try:
        return str(name_of(policy))
    except Exception:
        return type(policy).__name__


class _PolicyChecks:
    """The checks of one policy, each of which adds its findings."""

    def __init__(
        self, policy: Any, subject: Subject, findings: Findings, steps: int, seed: int
    ) -> None:
        self.policy = policy
        self.subject = subject
        self.findings = findings
        self.steps = steps
        self.seed = seed
        self._module = policy if isinstance(policy, nn.Module) else None

    def run(self, worker: bool) -> None:
        """Runs all checks; most are left out if the policy can't act at all."""
        env = None
        with self.findings.catching(
            "environment", "making and resetting the environment", "see check_env"
        ):
            env = self.subject.build()
            roots = self._roots(env)
        if env is None or self.findings.has_errors:
            return
        self._frames = max(1, env.batch_size.numel()) * self.steps
        parameters = self._parameters()
        try:
            with trial(self.policy):
                self._check_training()
                self._check_collection(env, roots[0])
                if self.findings.has_errors:
                    return
                self._check_calls(env, roots)
                self._check_several()
                if worker:
                    self._check_worker()
                else:
                    self.findings.not_checked.append("worker processes: worker=False")
        finally:
            self._put_back(parameters)
            with suppress(Exception):
                self.subject.close(env)

    def _roots(self, env: Any) -> list[TensorDictBase]:
        """Returns the observations of some steps, each as a policy gets them."""
        with suppress(Exception):
            env.set_seed(self.seed)
        root = env.reset()
        roots = [root.clone()]
        for step in range(_ROWS - 1):
            _, root = env.step_and_maybe_reset(act_randomly(env, root, self.seed + step))
            roots.append(root.exclude("action").clone())
        return roots

    def _parameters(self) -> dict[str, Tensor]:
        if self._module is None:
            return {}
        with suppress(Exception):  # lazy parameters
            return {k: v.detach().clone() for k, v in self._module.named_parameters()}
        return {}

    def _put_back(self, before: Mapping[str, Tensor]) -> None:
        if self._module is None:
            return
        for name, parameter in self._module.named_parameters():
            if name in before and not torch.equal(parameter.detach(), before[name]):
                with torch.no_grad():
                    parameter.copy_(before[name])

    def _check_training(self) -> None:
        if self._module is None:
            return
        found = sorted(
            {
                type(part).__name__
                for part in self._module.modules()
                if part.training and type(part).__name__.rstrip("123d") in _TRAINING
            }
        )
        if found:
            self.findings.add(
                "warning",
                "training mode",
                f"the policy has {', '.join(found)} in training mode, so that actions depend on "
                "chance or on the other environments of a batch: call policy.eval() to collect",
            )

    # --- in a collector

    def _collect(self, source: Any, make: Any = Collector, several: int = 1) -> TensorDictBase:
        kwargs: Any = self.subject.kwargs
        if make is not Collector:
            source, kwargs = [source], None if kwargs is None else [kwargs]
        with make(
            source,
            self.policy,
            frames_per_batch=self._frames * several,
            create_env_kwargs=kwargs,
        ) as collector:
            with suppress(Exception):  # some environments take no seed
                collector.set_seed(self.seed)
            batch: TensorDictBase = collector.next().clone()
        return batch

    def _check_collection(self, env: Any, root: TensorDictBase) -> None:
        """Collects a batch in this process, and looks at the actions."""
        try:
            batch = self._collect(self.subject.another())
        except (Exception, SystemExit) as error:
            self._check_keys(root)
            self.findings.failed(
                "collection",
                "a collection with the policy",
                "mend the policy, so that it accepts the observations and writes the actions",
                error,
            )
            return
        self._batch = batch.select(*env.action_keys)
        for name in env.action_keys:
            self._check_actions(as_key(name), env.full_action_spec[name], batch.get(name, None))

    def _check_keys(self, root: TensorDictBase) -> None:
        """Names the keys that the policy reads, but nothing provides."""
        declared = [as_key(key) for key in getattr(self.policy, "in_keys", None) or ()]
        written = {as_key(key) for key in getattr(self.policy, "out_keys", None) or ()}
        known = {as_key(key) for key in root.keys(True, True)}
        nested = {key[:length] for key in known for length in range(1, len(key))}
        missing = [key for key in declared if key not in known | nested | written]
        if missing:
            hint = did_you_mean([key[-1] for key in missing], {key[-1] for key in known})
            self.findings.add(
                "error",
                "keys",
                f"the policy reads {show_keys(missing)}, but the environment provides "
                f"{show_keys(sorted(known))}{hint}: name one of these in its in_keys",
            )

    def _check_actions(self, key: Key, spec: Any, actions: Any) -> None:
        if not isinstance(actions, Tensor):
            return
        what = f"the action {show_key(key)}"
        low, high = getattr(spec, "low", None), getattr(spec, "high", None)
        if low is not None and high is not None:
            wrong = (~((actions >= low - 1e-5) & (actions <= high + 1e-5))).nonzero()
            if len(wrong):
                value = actions[tuple(wrong[0])].item()
                self._add(
                    "warning",
                    "actions",
                    f"{what} is {value:.4g} at {wrong[0].tolist()} of a batch, outside of its "
                    f"space from {low.min().item():.4g} to {high.max().item():.4g}, and the "
                    "environment gets it unchanged: squash it (tanh), clip it, or wrap the "
                    "environment in gymnasium.wrappers.ClipAction",
                )
        elif not spec.is_in(actions.to(spec.dtype)):
            self._add(
                "error",
                "actions",
                f"{what} is not in its spec {' '.join(repr(spec).split())}: write one-hot vectors "
                "if the spec is one-hot, and otherwise indices below n",
            )

    def _add(self, level: Any, topic: str, message: str) -> None:
        self.findings.add(level, topic, message, message)

    def _check_several(self) -> None:
        """Collects a batch from two environments."""
        source = self.subject.source
        if is_list(source) or not self.subject.is_copied:
            return
        if given_envs(source):
            two: Any = [self.subject.another(), self.subject.another()]
        else:
            two = batch_source(source, 2, self.subject.kwargs)
        remedy = (
            "let it act for any number of environments, whose rows are the first dimensions of "
            "its inputs and outputs"
        )
        with self.findings.catching("several", "a collection from two environments", remedy):
            self._collect(two, several=2)

    def _check_worker(self) -> None:
        remedy = "pass policy_factory, a function that makes the policy in the worker"
        with self.findings.catching("workers", "sending the policy to a worker process", remedy):
            packed(self.policy)
        if self.findings.has("workers") or not self.subject.is_copied:
            return
        with self.findings.catching("workers", "a collection in a worker process", remedy):
            batch = self._collect(self.subject.another(), MultiSyncCollector)
            actions = batch.reshape(self._batch.shape).select(*self._batch.keys(True, True))
            found = difference([self._batch], [actions])
            if found is not None and not self.findings.has("calls"):
                self.findings.add(
                    "warning",
                    "workers",
                    f"the same seed gives other actions in a worker process ({found}): see if "
                    "check_env finds the same without the policy, and let no action depend on the "
                    "process",
                )

    # --- single calls

    def _check_calls(self, env: Any, roots: list[TensorDictBase]) -> None:
        """Calls the policy by itself, and looks at what that changes."""
        remedy = "let it act without a collector, too"
        with self.findings.catching("calls", "a call of the policy", remedy, "warning"):
            if self.policy is None:
                return
            act = resolve(self.policy, env, False)
            root = roots[0]
            before, buffers = self._parameters(), self._buffers()
            given = root.clone()
            first = self._call(act, given, _SEED)
            self._compare_inputs(root, given, first)
            self._check_gradients(first)
            again = self._call(act, root.clone(), _SEED)
            self._compare_weights(before, buffers)
            self._compare_answers(first, again)
            self._compare_rows(act, env, roots)
            durations = []
            for _ in range(_CALLS):
                begun = time.perf_counter()
                self._call(act, root.clone(), _SEED)
                durations.append(time.perf_counter() - begun)
            self.findings.figures["microseconds per call"] = 1e6 * float(np.median(durations))

    def _call(self, act: Any, root: TensorDictBase, seed: int) -> TensorDictBase:
        with seeded(seed), torch.no_grad(), exploring(InteractionType.RANDOM):
            result: TensorDictBase = act(root)
        return result.clone()

    def _check_gradients(self, result: TensorDictBase) -> None:
        recorded = [as_key(key) for key, value in result.items(True, True) if _has_graph(value)]
        if recorded:
            self.findings.add(
                "note",
                "gradients",
                f"the policy records a graph of gradients of {show_keys(recorded)}, although it is "
                "called without gradients: batches don't have it, so leave out "
                "torch.enable_grad() to save the time",
            )

    def _buffers(self) -> dict[str, Tensor]:
        if self._module is None:
            return {}
        return {name: value.clone() for name, value in self._module.named_buffers()}

    def _compare_inputs(
        self, root: TensorDictBase, given: TensorDictBase, result: TensorDictBase
    ) -> None:
        changed = [
            as_key(key)
            for key in root.keys(True, True)
            if difference([root.select(key)], [given.select(key)]) is not None
        ]
        if changed:
            self.findings.add(
                "warning",
                "inputs",
                f"the policy changes its input {show_keys(changed)}: write results under other "
                "keys, and compute them without operations in place",
            )

    def _compare_weights(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> None:
        for kind, before, now, level, remedy in (
            (
                "parameter",
                parameters,
                self._parameters(),
                "error",
                "learn outside of the collector, and send the weights to it",
            ),
            (
                "buffer",
                buffers,
                self._buffers(),
                "warning",
                "call policy.eval(), or keep what must last from step to step in entries that it "
                "reads and writes",
            ),
        ):
            changed = [k for k in before if k in now and not _same(before[k], now[k])]
            if changed:
                self._add(
                    level,
                    "weights",
                    f"a call of the policy changes its {kind} {', '.join(changed[:3])}, which "
                    f"each worker does by itself, and the next weights overwrite: {remedy}",
                )

    def _compare_answers(self, first: TensorDictBase, again: TensorDictBase) -> None:
        found = difference([first], [again])
        if found is not None:
            self.findings.add(
                "warning",
                "calls",
                f"two calls with the same input and the same seed gave other results ({found}): "
                "keep recurrent states in entries that the policy reads and writes, and draw "
                "from the global generators, which set_seed seeds",
            )

    def _compare_rows(self, act: Any, env: Any, roots: list[TensorDictBase]) -> None:
        """Compares what the policy does for a row alone and among others."""
        if self.findings.has("calls") or self.findings.has("weights"):
            return
        with suppress(Exception):  # it may act for one batch size only
            rows: Any = roots[0] if env.batch_size else stack(roots, 0)
            if rows.shape[0] < 2:
                return
            with exploring(InteractionType.DETERMINISTIC), torch.no_grad():
                results: list[Any] = []
                for part in (rows, rows, rows[:1]):
                    with seeded(_SEED + len(results)):
                        results.append(act(part.clone()))
            together, other, alone = results
            if difference([together], [other]) is not None:
                return  # actions are random
            for name in env.action_keys:
                a, b = together.get(name)[:1], alone.get(name)
                if a.shape != b.shape or not torch.allclose(
                    a.double(), b.double(), rtol=1e-3, atol=1e-4
                ):
                    self.findings.add(
                        "warning",
                        "batches",
                        f"the action for one environment differs if others are in the batch "
                        f"({_numbers(a)}, alone {_numbers(b)}): compute each row by itself, and "
                        "call policy.eval() if it has BatchNorm",
                    )


# Seed of the global generators in calls.
_SEED = 1


def _numbers(values: Tensor) -> str:
    return ", ".join(f"{one:.4g}" for one in values.flatten()[:3].tolist())


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None
