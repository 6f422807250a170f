"""A recorded function gives what the function gives, bit for bit, or there is none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as d

from trawl.rollout.policy.sampling import NotRecordable, record

NORMAL, LOGITS, PROBS = ("loc", "scale"), ("logits",), ("probs",)
DISTRIBUTIONS = {
    "normal": (d.Normal, NORMAL),
    "laplace": (d.Laplace, NORMAL),
    "categorical": (d.Categorical, LOGITS),
    "categorical by probabilities": (d.Categorical, PROBS),
    "one-hot": (d.OneHotCategorical, LOGITS),
    "straight-through": (d.OneHotCategoricalStraightThrough, LOGITS),
    "bernoulli": (d.Bernoulli, LOGITS),
    "independent": (lambda loc, scale: d.Independent(d.Normal(loc, scale), 1), NORMAL),
    "log-normal": (d.LogNormal, NORMAL),
}


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Distributions that check their parameters read the values of tensors."""
    monkeypatch.setattr(d.Distribution, "_validate_args", False)


def drawing(name):
    cls, names = DISTRIBUTIONS[name]

    def draw(*parameters):
        dist = cls(**dict(zip(names, parameters, strict=True)))
        sample = dist.rsample() if dist.has_rsample else dist.sample()
        return sample, dist.log_prob(sample)

    return draw, names


def parameters(names, shape, dtype=torch.float32):
    found = {name: torch.randn(shape, dtype=dtype) for name in names}
    return [one.exp() if name in ("scale", "probs") else one for name, one in found.items()]


def after(seed, function, *arguments):
    torch.manual_seed(seed)
    with torch.no_grad():
        return *function(*arguments), torch.get_rng_state()


def assert_same(function, recorded, *arguments):
    ours, theirs = (after(3, one, *arguments) for one in (recorded, function))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@torch.no_grad()
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@settings(max_examples=20, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), max_size=2).map(tuple),
    size=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_samples_and_log_probabilities_are_the_same(name, shape, size, dtype):
    draw, names = drawing(name)
    recorded = record(draw, parameters(names, (*shape, size), dtype))
    for _ in range(3):
        assert_same(draw, recorded, *parameters(names, (*shape, size), dtype))


def test_the_random_generator_is_left_alone():
    draw, names = drawing("normal")
    given_to = parameters(names, (3,))
    before = torch.get_rng_state()
    record(draw, given_to)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_numbers_that_nobody_uses_are_drawn_as_well():
    def draw(x):
        torch.rand(3)
        return (x + torch.rand(()),)

    x = torch.ones(2)
    assert_same(draw, record(draw, [x]), x)


def test_tensors_of_the_function_may_be_changed_in_place():
    def double(x):
        return (x.clone().mul_(2).add_(torch.ones(())),)

    x = torch.ones(2)
    assert_same(double, record(double, [x]), x)


def test_parts_of_a_result_may_be_used():
    def highest(x):
        values, indices = x.max(-1)
        return indices, torch.stack([values, values])

    x = torch.randn(3, 4)
    assert_same(highest, record(highest, [x]), x)


def test_what_does_not_depend_on_the_arguments_is_computed_once():
    calls = []

    def add(x):
        calls.append(1)
        return (x + torch.arange(3).sum(),)

    recorded = record(add, [torch.ones(2)])
    count = len(calls)
    recorded(torch.ones(2))
    assert len(calls) == count


REFUSED = {
    "reads a number": (lambda x: (x * x.sum().item(),), "item, which uses"),
    "branches": (lambda x: (x if x.sum() > 0 else -x,), "__bool__, which uses"),
    "leaves torch": (lambda x: (torch.from_numpy(x.numpy() * 2) + x,), "numpy, which uses"),
    "changes an argument": (lambda x: (x.mul_(2),), "in place with mul_"),
    "writes elsewhere": (lambda x: (torch.add(x, 1, out=torch.empty(2)),), "out="),
    "returns a constant": (lambda x: (x, torch.ones(2)), "does not depend"),
    "assigns": (lambda x: (x.clone().__setitem__(0, x[1]) or x,), "__setitem__, which uses"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_might_differ_is_refused(name):
    function, words = REFUSED[name]
    with pytest.raises(NotRecordable, match=words):
        record(function, [torch.ones(2)])


def test_what_changes_from_call_to_call_is_refused():
    calls = []

    def count(x):
        calls.append(1)
        return (x * len(calls),)

    with pytest.raises(NotRecordable, match="results differ"):
        record(count, [torch.ones(2)])
