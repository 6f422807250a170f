"""What Trawl takes from tensordict under private names, and what breaks without it."""

import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    set_interaction_type,
)
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from trawl.foreign import tensordict as names


def test_tensordicts_are_made_without_checks():
    """Each step of some environments makes one, and takes much longer if it is checked."""
    assert names.new_tensordict.__name__ == "_new_unsafe"
    size = torch.Size([2])
    made = names.new_tensordict({"a": torch.zeros(2, 3)}, batch_size=size, names=["time"])
    assert type(made) is TensorDict
    assert made.batch_size == (2,)
    assert made.names == ["time"]
    assert made["a"].shape == (2, 3)


def test_the_type_of_interaction_is_in_one_object():
    """Otherwise a thread that evaluates would change how another one explores."""
    before = names.types_holder()

    class Holder:
        def __init__(self):
            self.asked = 0

        def __getattr__(self, name):
            self.asked += 1
            return getattr(before, name)

    holder = Holder()
    names.replace_types_holder(holder)
    try:
        with set_interaction_type(InteractionType.MODE):
            assert interaction_type() is InteractionType.MODE
        assert holder.asked
    finally:
        names.replace_types_holder(before)
    assert names.types_holder() is before


def test_a_module_that_calls_or_writes_in_its_own_way_is_noticed():
    """A plan that calls the module inside would leave that out."""
    called = []

    class Calls(TensorDictModule):
        def _call_module(self, *args, **kwargs):
            called.append("call")
            return super()._call_module(*args, **kwargs)

    class Writes(TensorDictModule):
        def _write_to_tensordict(self, *args, **kwargs):
            called.append("write")
            return super()._write_to_tensordict(*args, **kwargs)

    for kind in (Calls, Writes):
        assert names.overrides_calls(kind)
        kind(nn.Linear(1, 1), ["a"], ["b"])(TensorDict(a=torch.zeros(1)))
    assert called == ["call", "write"]
    assert not names.overrides_calls(TensorDictModule)


def test_a_module_that_draws_in_its_own_way_is_noticed():
    """A recorded sample would not be drawn in that way."""

    def make(kind, **options):
        return kind(["loc"], ["action"], distribution_class=torch.distributions.Normal, **options)

    class Draws(ProbabilisticTensorDictModule):
        def _dist_sample(self, dist, interaction_type=None, **options):
            return torch.full((2,), 7.0)

    stock, drawn = make(ProbabilisticTensorDictModule), make(Draws)
    assert names.draws_specially(drawn)
    assert not names.draws_specially(stock)
    normal = torch.distributions.Normal(torch.zeros(2), 1.0)
    assert names.drawing(drawn)(normal, InteractionType.MODE).eq(7).all()
    assert names.drawing(stock)(normal, InteractionType.MODE).eq(0).all()
    for option in (
        {"generator": torch.Generator()},
        {"generator": "key"},
    ):
        assert names.draws_specially(make(ProbabilisticTensorDictModule, **option))
