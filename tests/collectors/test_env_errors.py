"""``on_env_error="restart"``: what fails is built anew, and every frame delivered is real."""

import os
import warnings
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import gymnasium
import pytest
from collector_parts import Buffer, by_step
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from trawl.collectors import Collector
from trawl.envs import GymEnv, SerialEnv
from trawl.rollout.restarts import MOST_FAILURES
from trawl.testing import FaultyEnv, NumberedEnv, NumberedTorchEnv, RaggedEnv

MASK, IDS = ("collector", "mask"), ("collector", "traj_ids")
FAILS = pytest.mark.filterwarnings("ignore:environments? .* failed at step:RuntimeWarning")


class Broken(Exception):
    """An environment's own sort of error."""


@dataclass(frozen=True)
class Plan:
    """What the environments made one after the other do.

    Attributes:
        lane: number of the first; those that follow have numbers 10 apart.
        steps: for each environment, the step (of its life) that fails.
        resets: for each environment, the reset after its first that fails.
        lengths: of its episodes.
    """

    lane: int = 0
    steps: tuple[int, ...] = ()
    resets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = (3,)

    def maker(self, kind=NumberedEnv):
        return Maker(self, kind)


@dataclass
class Maker:
    """Makes the environments of a plan, and remembers them."""

    plan: Plan
    kind: type = NumberedEnv
    made: list = field(default_factory=list)

    def __call__(self):
        self.made.append(flaky(self.kind)(self.plan, len(self.made)))
        return self.made[-1]


def flaky(kind):
    class Flaky(kind):
        def __init__(self, plan, index):
            super().__init__(plan.lane + 10 * index, lengths=plan.lengths)
            self.fails_at = plan.steps[index] if index < len(plan.steps) else -1
            self.no_reset = plan.resets[index] if index < len(plan.resets) else -1
            self.was_closed = self.broken = False
            self.seeds = []

        def reset(self, *, seed=None, options=None):
            self.seeds.append(seed)
            if self._episode + 1 == self.no_reset:
                self.broken = True
                raise Broken(f"reset {self.no_reset}")
            return super().reset(seed=seed, options=options)

        def step(self, action):
            if len(self.actions) == self.fails_at:
                self.broken = True
                raise Broken(f"step {self.fails_at}")
            return super().step(action)

        def close(self):
            self.was_closed = True
            if self.broken:
                raise Broken("while closing")

    return Flaky


def collect(source, frames_per_batch, batches, policy=None, **options):
    """Batches and statistics of a collector that goes on after errors."""
    policy = by_step() if policy is None else policy
    with (
        warnings.catch_warnings(),
        Collector(
            source, policy, frames_per_batch=frames_per_batch, on_env_error="restart", **options
        ) as collector,
    ):
        warnings.filterwarnings("ignore", ".* failed at step", RuntimeWarning)
        found = [collector.next() for _ in range(batches)]
        return found, collector.stats()


KINDS = pytest.mark.parametrize("kind", [NumberedEnv, RaggedEnv])


@FAILS
def test_without_a_layout_the_row_of_a_reset_that_fails_is_lost():
    """For a vector as a whole, whose other episodes end before it."""
    numbers = count()

    def make():
        number = next(numbers)
        plans = [Plan(0, lengths=(5,)), Plan(1, resets=(1,))]
        envs = [flaky(RaggedEnv)(plan, number) for plan in plans]
        for env in envs:
            env.close = lambda: None
        return SyncVectorEnv([lambda env=env: env for env in envs])

    (batch,), stats = collect(make, 12, 1)
    assert stats["env_restarts"] == 1
    assert batch[MASK].tolist() == [[True, True, False, True, True, True]] * 2
    assert batch["observation"][..., 0].tolist() == [[0] * 3 + [10] * 3, [1] * 3 + [11] * 3]
    assert batch["next", "truncated"][..., 0].int().tolist() == [[0, 1, 0, 0, 0, 0]] * 2
    ids = batch[IDS]
    assert len(set(ids[:, 0].tolist()) | set(ids[:, 3].tolist())) == 4


def test_a_warning_names_environment_step_and_error():
    makers = [Plan(0).maker(), Plan(1, steps=(5,)).maker()]
    with Collector(makers, by_step(), frames_per_batch=8, on_env_error="restart") as collector:
        collector.next()
        with pytest.warns(RuntimeWarning, match=r"environment 1 failed at step 5 .*Broken: step 5"):
            collector.next()


def of_torchrl(env):
    """The same as an environment of TorchRL."""
    return pytest.importorskip("torchrl.envs").GymWrapper(env)


class FailingTensors(NumberedTorchEnv):
    """Fails in each step."""

    def step(self, actions):
        raise Broken("step")


def again_and_again(kind):
    maker = Plan(steps=(2, *[0] * 50)).maker()
    if kind == "torchrl":
        return lambda: of_torchrl(maker())
    return partial(FailingTensors, 3, [4, 3, 5]) if kind == "tensors" else [maker]


@pytest.mark.parametrize("kind", ["list", "torchrl", "tensors"])
@FAILS
def test_what_fails_again_and_again_is_raised(kind):
    options = {"frames_per_batch": 99, "on_env_error": "restart"}
    with Collector(again_and_again(kind), **options) as collector:
        with pytest.raises(Exception, match="step") as caught:
            collector.next()
        assert "failed 10 times" in "".join(caught.value.__notes__)
        assert collector.stats()["env_restarts"] == MOST_FAILURES - 1


@KINDS
@FAILS
def test_good_steps_in_between_end_the_count(kind):
    maker = Plan(steps=(1,) * 50).maker(kind)
    _, stats = collect(maker, 1, 60)
    assert stats["env_restarts"] == len(maker.made) - 1 == 30
    assert stats["frames"] == 30
    # Errors while they are closed are ignored.
    assert all(env.was_closed for env in maker.made[:-1])


def again(maker, then):
    """A function that makes an environment of a plan, and does something else after that."""
    return lambda: then() if maker.made else maker()


def raises():
    raise OSError("no more licences")


@KINDS
def test_an_error_of_building_anew_comes_with_the_first_one(kind):
    for resets, then, cause in (
        ((), raises, "no more licences"),
        ((-1, 0), None, "reset 0"),
        ((), lambda: gymnasium.make("Pendulum-v1"), "was made again with full_observation_spec"),
    ):
        maker = Plan(steps=(2,), resets=resets).maker(kind)
        made = again(maker, then or maker)
        with Collector(made, by_step(), frames_per_batch=4, on_env_error="restart") as collector:
            with pytest.raises(Broken, match="step 2") as caught:
                collector.next()
            assert cause in str(caught.value.__cause__)
            assert "could not be rebuilt after this error: " in caught.value.__notes__[0]
            assert collector.closed


@pytest.mark.parametrize("env", [FaultyEnv(2, Broken("the motor is off")), FailingTensors(3)])
def test_a_function_that_gives_the_same_object_again_is_refused(env):
    with (
        Collector(lambda: env, frames_per_batch=12, on_env_error="restart") as collector,
        pytest.raises(Broken) as caught,
    ):
        collector.next()
    told = [str(caught.value.__cause__), *getattr(caught.value, "__notes__", [])]
    assert "returned the same object again" in "".join(told)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@KINDS
def test_what_ends_the_program_passes(kind, error):
    class Ending(kind):
        def step(self, action):
            raise error

    with (
        Collector(lambda: Ending(), frames_per_batch=4, on_env_error="restart") as collector,
        pytest.raises(error),
    ):
        collector.next()
    assert collector.stats()["env_restarts"] == 0


def test_another_value_is_refused():
    with pytest.raises(ValueError, match=r"on_env_error must be 'raise' or 'restart'.*'ignore'"):
        Collector("CartPole-v1", frames_per_batch=4, on_env_error="ignore")


@pytest.mark.parametrize(
    ("source", "which"),
    [
        (lambda: NumberedEnv(), "create_env_fn"),
        (lambda: GymEnv(NumberedEnv()), "create_env_fn"),
        (lambda: [NumberedEnv, NumberedEnv(1)], "environment 1 of the batch"),
        (lambda: SerialEnv(2, [NumberedEnv(), NumberedEnv(1)]), "environment 0 of the batch"),
        (lambda: SyncVectorEnv([NumberedEnv]), "create_env_fn"),
        (lambda: NumberedTorchEnv(2), "create_env_fn"),
        (lambda: of_torchrl(NumberedEnv()), "create_env_fn"),
    ],
)
def test_what_was_made_already_is_refused(source, which):
    with pytest.raises(
        ValueError, match=rf"on_env_error='restart'.*{which} is an existing environment"
    ):
        Collector(source(), frames_per_batch=4, on_env_error="restart")


@pytest.mark.parametrize(
    "source",
    [
        "CartPole-v1",
        lambda: "CartPole-v1",
        ["CartPole-v1"] * 2,
        lambda: GymEnv("CartPole-v1", num_envs=2),
        lambda: gymnasium.make("CartPole-v1"),
        lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")),
    ],
)
def test_ids_and_functions_of_every_sort_are_built_anew(source):
    with Collector(source, frames_per_batch=8, on_env_error="restart") as collector:
        collector.set_seed(1)
        first = collector.env.parts[0]
        before, batch = first.env, collector.next()
        first.rebuild()
        assert first.env is not before
        collector.reset()
        assert not (collector.next()["observation"] == batch["observation"]).all()
        collector.set_seed(1)
        assert (collector.next()["observation"] == batch["observation"]).all()
    # So are their arguments.
    options = {"create_env_kwargs": {"frame_skip": 2, "max_episode_steps": 7}}
    with Collector("CartPole-v1", frames_per_batch=8, on_env_error="restart", **options) as one:
        (part,) = one.env.parts
        part.rebuild()
        assert part.env.env.spec.max_episode_steps == 7
        assert "_FrameSkip" in repr(part.env)


def seeds_of(kind, seed):
    makers = [Plan(i, steps=(3, 2, 1)).maker(kind) for i in range(2)]
    with (
        warnings.catch_warnings(),
        Collector(makers, by_step(), frames_per_batch=20, on_env_error="restart") as collector,
    ):
        warnings.simplefilter("ignore", RuntimeWarning)
        if seed is not None:
            collector.set_seed(seed)
        collector.next()
    return [[next((s for s in env.seeds if s is not None), None) for env in m.made] for m in makers]


@KINDS
def test_what_is_built_anew_is_seeded_from_the_same_seed(kind):
    first, again, other = (seeds_of(kind, seed) for seed in (1, 1, 2))
    assert first == again
    every = [seed for seeds in (*first, *other) for seed in seeds]
    assert len(set(every)) == len(every) == 16
    assert None not in every
    assert seeds_of(kind, None) == [[None] * 4] * 2


@FAILS
def test_single_steps_in_a_buffer_are_frames_only():
    buffer = Buffer()
    makers = [Plan(0, (0, 2, 0, 0)).maker(), Plan(1, (3,)).maker()]
    collect(makers, 20, 2, replay_buffer=buffer, extend_buffer=False)
    assert len(buffer) == 40 - 5
    frames = buffer.content()
    assert (frames["next", "observation"][:, 3] == frames["observation"][:, 3] + 1).all()


@FAILS
def test_a_batch_that_ends_early_goes_on_from_the_new_environment():
    answers = iter([False, False, True, *[False] * 20])
    plan = Plan(steps=(2,))
    batches, stats = collect(plan.maker(), 6, 2, interruptor=lambda: next(answers))
    assert batches[0][MASK].tolist() == [True, True, False, False, False, False]
    assert batches[1]["observation"][:, 0].tolist() == [10] * 6
    assert batches[1]["observation"][0, 2] == 0
    assert stats["frames"] == 8


class Dying(NumberedEnv):
    """Ends its own process."""

    def step(self, action):
        if len(self.actions) == 3:
            os._exit(1)
        return super().step(action)


@pytest.mark.parametrize("kind", [FaultyEnv, Dying])
@pytest.mark.filterwarnings("ignore:.*ERROR. Re:UserWarning")
@pytest.mark.filterwarnings("ignore:.*ERROR. Traceback:UserWarning")
@FAILS
def test_processes_of_a_vector_environment_are_replaced(kind):
    made = []

    def make():
        arguments = {"at": 3, "fault": Broken("off")} if kind is FaultyEnv else {}
        second = NumberedEnv if made else lambda: kind(**arguments)
        made.append(AsyncVectorEnv([NumberedEnv, second], context="fork"))
        return made[-1]

    (batch,), stats = collect(make, 12, 1)
    assert batch[MASK].tolist() == [[True] * 3 + [False] + [True] * 2] * 2
    assert batch["observation"][:, :, 3].tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    assert stats["env_restarts"] == 1
    assert not any(process.is_alive() for env in made for process in env.processes)
