"""Weights in all forms: taken out of a model, and put into one."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from weight_parts import Uniform, Whole, WithState, equal, numbers, tied

from trawl.weight_update import WeightStrategy
from trawl.weight_update.tensors import (
    Weights,
    named_tensors,
    packed_extra,
    unpacked_extra,
    weights_of,
)

BOTH = pytest.mark.parametrize("form", ["tensordict", "state_dict"])


def nested(module: nn.Module) -> dict:
    """A dict of dicts."""
    found: dict = {}
    for name, tensor in named_tensors(module).items():
        *path, last = name.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[last] = tensor
    return found


FORMS = {
    "module": lambda module: module,
    "state dict": lambda module: module.state_dict(),
    "dict with dots": named_tensors,
    "nested dict": nested,
    "TensorDict": TensorDict.from_module,
    "TensorDict of data": lambda module: TensorDict.from_module(module).data,
    "TensorDict with dots": lambda module: TensorDict(named_tensors(module)),
    "dict of TensorDicts": lambda module: dict(TensorDict.from_module(module).items()),
    "extracted": WeightStrategy().extract_weights,
    "extracted flat": WeightStrategy("state_dict").extract_weights,
    "weights": weights_of,
}


# --- taken out


def test_weights_are_extracted_as_a_nested_tensordict():
    model = Uniform(1)
    found = WeightStrategy().extract_weights(model)
    assert isinstance(found, TensorDictBase)
    assert set(found.keys(True, True)) == {("parts", "0"), ("parts", "1"), ("parts", "2"), "count"}
    assert found.batch_size == ()


def test_weights_are_extracted_as_a_flat_dict():
    model = Uniform(1)
    found = WeightStrategy("state_dict").extract_weights(model)
    assert type(found) is dict
    assert set(found) == {"parts.0", "parts.1", "parts.2", "count"}


@BOTH
def test_extracted_weights_are_the_models_own_memory_without_gradients(form):
    model = Uniform(1)
    found = WeightStrategy(form).extract_weights(model)
    leaf = found["parts", "1"] if form == "tensordict" else found["parts.1"]
    assert not leaf.requires_grad
    model.become(2)
    assert (leaf == 2).all()


@BOTH
@pytest.mark.parametrize("name", FORMS)
def test_weights_are_extracted_of_any_form(form, name):
    model = Uniform(3)
    strategy = WeightStrategy(form)
    found = strategy.extract_weights(FORMS[name](model))
    assert equal(
        dict(sorted(weights_of(found).tensors.items())),
        dict(sorted(weights_of(strategy.extract_weights(model)).tensors.items())),
    )


def test_extra_state_is_extracted_beside_the_weights_of_its_module():
    found = WeightStrategy().extract_weights(Whole(1, said={"mean": torch.ones(2), "text": "this"}))
    assert ("part", "__extra_state__", "said", "mean") in found.keys(True, True)
    assert found["part", "__extra_state__", "said", "text"] == "this"
    found = WeightStrategy().extract_weights(WithState(1, said=torch.ones(2)))
    assert found["__extra_state__", "said"].tolist() == [1, 1]
    # And only where there is such.
    assert "__extra_state__" not in WeightStrategy().extract_weights(Uniform()).keys(True)


def test_a_state_dict_has_extra_state_as_pytorchs_does():
    for module in (Whole(1, said="this"), WithState(1, said="this")):
        found = WeightStrategy("state_dict").extract_weights(module)
        assert set(found) == set(module.state_dict())
        module.load_state_dict(found)


class Free(nn.Module):
    """A module whose extra state is any one thing."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


STATES = {
    "tensor": torch.ones(2),
    "dict": {"mean": torch.ones(2), "count": 3, "inner": {"a.b": torch.ones(1), "none": None}},
    "ordered": OrderedDict(mean=torch.ones(2)),
    "empty": {},
    "numbered": {0: torch.ones(2)},
    "list": [torch.ones(2), "x"],
    "number": 3,
    "none": None,
    "tensordict": TensorDict(mean=torch.ones(2)),
    "with a tensordict": {"inner": TensorDict(mean=torch.ones(2))},
    "non-leaf": {"mean": torch.ones(2, requires_grad=True) * 2},
}


def tensors_in(state):
    """All tensors in extra state."""
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, (dict, TensorDictBase)):
        state = list(state.values())
    return [one for part in state for one in tensors_in(part)] if isinstance(state, list) else []


@pytest.mark.parametrize("inplace", [True, False])
@BOTH
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("path", ["", "0.1"])
def test_extra_state_arrives_as_it_was_and_in_memory_of_its_own(form, inplace, name, path):
    strategy = WeightStrategy(form)
    # Copies by pickle, since the states are used by several tests.
    modules = [Free(copied) for copied in unpacked_extra(packed_extra([STATES[name], 1, 1]))]
    whole = [nn.Sequential(nn.Sequential(nn.Linear(1, 1), one)) if path else one for one in modules]
    given = strategy.extract_weights(whole[0])
    before = repr(given)
    for other in whole[1:]:
        strategy.apply_weights(other, given, inplace)
    for one in modules[1:]:
        assert isinstance(STATES[name], type(one.state))
        assert [t.tolist() for t in tensors_in(one.state)] == [
            t.tolist() for t in tensors_in(STATES[name])
        ]
    tensors = [tensor for one in modules for tensor in tensors_in(one.state)]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    for tensor in tensors:
        tensor.data.zero_()
    assert repr(given) == before


def test_flattened_keys_of_a_tensordict_are_read():
    given = WeightStrategy().extract_weights(Whole(1, said={"mean": torch.ones(2)}))
    target = Whole(0)
    WeightStrategy().apply_weights(target, given.flatten_keys("."))
    assert target.part.said["mean"].tolist() == [1, 1]


def test_extra_state_is_put_into_a_tensordict_in_place():
    model = Whole(1, said={"mean": torch.zeros(2), "text": "this"})
    target = WeightStrategy().extract_weights(model)
    mean = target["part", "__extra_state__", "said", "mean"]
    model.part.said = {"mean": torch.ones(2), "text": "that"}
    for given in (model, WeightStrategy().extract_weights(model)):
        mean.zero_()
        WeightStrategy().apply_weights(target, given)
        assert mean.tolist() == [1, 1]
        assert target["part", "__extra_state__", "said", "text"] == "that"
    assert mean.data_ptr() != model.part.said["mean"].data_ptr()
    model.part.said = {"mean": torch.ones(3)}
    WeightStrategy().apply_weights(target, model)
    assert target["part", "__extra_state__", "said", "mean"].tolist() == [1, 1, 1]
    state = Whole(0, said="this").state_dict()
    WeightStrategy().apply_weights(state, model)
    assert state["part._extra_state"]["said"]["mean"].tolist() == [1, 1, 1]


def test_extra_state_that_cannot_be_copied_is_named():
    with pytest.raises(TypeError, match=r"extra state .* of 'part' can't be pickled: .*lock"):
        WeightStrategy().extract_weights(Whole(1, said=threading.Lock()))


@BOTH
def test_of_nothing_nothing_is_extracted(form):
    assert WeightStrategy(form).extract_weights(None) is None


# --- put in


@BOTH
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_weights_of_any_form_are_put_into_a_module(form, inplace, name):
    target = Uniform(1)
    WeightStrategy(form).apply_weights(target, FORMS[name](Uniform(2)), inplace=inplace)
    assert target.numbers == {2}


@BOTH
@pytest.mark.parametrize("name", ["module", "state dict", "extracted", "extracted flat", "weights"])
@pytest.mark.parametrize("inplace", [True, False])
def test_extra_state_is_put_into_a_module(form, name, inplace):
    target = Whole(1, said="this")
    given = FORMS[name](Whole(2, said="that"))
    WeightStrategy(form).apply_weights(target, given, inplace=inplace)
    assert target.part.said == "that"
    assert target.part.numbers == {2}


def test_extra_state_of_the_whole_is_put_into_a_module():
    for given in (WithState(1, "that"), WithState(1, "that").state_dict()):
        target = WithState(0, "this")
        WeightStrategy().apply_weights(target, given)
        assert target.said == "that"


def test_in_place_the_tensors_stay_and_have_other_values():
    target, source = Uniform(1), Uniform(2)
    before = dict(named_tensors(target))
    WeightStrategy().apply_weights(target, source)
    assert all(before[name] is tensor for name, tensor in named_tensors(target).items())
    source.become(3)
    assert target.numbers == {2}


def test_not_in_place_the_module_gets_the_tensors_that_were_given():
    target, source = Uniform(1), Uniform(2)
    target.parts[0].requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in named_tensors(target).items()}
    held = dict(named_tensors(target))
    WeightStrategy().apply_weights(target, source, inplace=False)
    assert equal(held, before)
    assert [type(part) for part in target.parts] == [nn.Parameter] * 3
    assert [part.requires_grad for part in target.parts] == [False, True, True]
    source.become(3)
    assert target.numbers == {3}


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("left_out", ["", "0.weight", "1.weight"])
def test_what_was_tied_stays_tied(inplace, left_out):
    source, target = tied(), tied()
    weights = {name: value for name, value in source.state_dict().items() if name != left_out}
    WeightStrategy().apply_weights(target, weights, inplace=inplace)
    assert target[0].weight is target[1].weight
    assert torch.equal(target[0].weight, source[0].weight)


def test_a_recurrent_module_uses_what_it_was_given():
    source, target = nn.LSTM(2, 3), nn.LSTM(2, 3)
    WeightStrategy().apply_weights(target, source, inplace=False)
    given = torch.ones(1, 2)
    assert torch.equal(target(given)[0], source(given)[0])


@pytest.mark.parametrize("name", FORMS)
def test_weights_of_any_form_are_put_into_a_dict_of_tensors(name):
    targets = [Uniform(1).state_dict(), nested(Uniform(1)), TensorDict.from_module(Uniform(1)).data]
    for target in targets:
        WeightStrategy().apply_weights(target, FORMS[name](Uniform(2)))
        assert numbers(weights_of(target).tensors) == {2}


def test_only_some_weights_may_be_put_into_a_tensordict():
    target = TensorDict(a=torch.zeros(2), b=TensorDict(c=torch.zeros(2)))
    WeightStrategy().apply_weights(target, {"b.c": torch.ones(2)})
    assert target["a"].tolist() == [0, 0]
    assert target["b", "c"].tolist() == [1, 1]


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("target", [Uniform(1), {}, TensorDict(), 3])
def test_no_weights_change_nothing(inplace, target):
    WeightStrategy().apply_weights(target, None, inplace=inplace)


# --- errors


@pytest.mark.parametrize("form", ["module", "", None, 3])
def test_another_form_is_refused(form):
    with pytest.raises(ValueError, match="extract_as must be 'tensordict' or 'state_dict', but"):
        WeightStrategy(form)


@pytest.mark.parametrize("source", [3, "weights", lambda: None, [torch.zeros(1)]])
def test_what_has_no_weights_is_refused(source):
    strategy = WeightStrategy()
    with pytest.raises(TypeError, match="weights must be a module, a TensorDict or a dict"):
        strategy.extract_weights(source)
    with pytest.raises(TypeError, match="weights must be a module, a TensorDict or a dict"):
        strategy.apply_weights(Uniform(), source)


@pytest.mark.parametrize(
    "source",
    [{"a": 3}, {"a": {"b": "c"}}, TensorDict(a=torch.zeros(1), b="text")],
    ids=["number", "nested", "TensorDict"],
)
def test_what_is_no_tensor_among_weights_is_refused(source):
    with pytest.raises(TypeError, match=r"weight '(a|a.b|b)' must be a tensor, but"):
        WeightStrategy().extract_weights(source)


@pytest.mark.parametrize("target", [3, "model", [torch.zeros(1)], lambda: None])
def test_another_destination_is_refused(target):
    with pytest.raises(
        ValueError, match=f"destination must be .* but it is {type(target).__name__}"
    ):
        WeightStrategy().apply_weights(target, {"a": torch.zeros(1)})


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(
    ("weights", "kind", "match"),
    [
        ({"weight": torch.ones(1, 1)}, KeyError, r"missing \['bias'\]"),
        ({"a": torch.ones(1)}, KeyError, r"missing \['bias', 'weight'\], unknown \['a'\]"),
        ({"weight": torch.ones(1, 1), "bias": torch.ones(2)}, ValueError, r"'bias' has shape"),
    ],
)
def test_weights_that_do_not_fit_a_module_are_refused(inplace, weights, kind, match):
    target = nn.Linear(1, 1)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(kind, match=match):
        WeightStrategy().apply_weights(target, weights, inplace=inplace)
    assert equal(target.state_dict(), before)


@pytest.mark.parametrize("kind", [dict, TensorDict])
def test_weights_that_do_not_fit_a_dict_are_refused(kind):
    target = kind({"a": torch.zeros(2)})
    with pytest.raises(KeyError, match=r"destination has no weights \['b'\]; it has \['a'\]"):
        WeightStrategy().apply_weights(target, {"b": torch.ones(2)})
    with pytest.raises(ValueError, match=r"'a' has shape \(1,\), but in destination it has"):
        WeightStrategy().apply_weights(target, {"a": torch.ones(1)})
    with pytest.raises(ValueError, match=r"'a' is torch.int64, which is not cast to .*float32"):
        WeightStrategy().apply_weights(target, {"a": torch.ones(2, dtype=torch.int64)})
    assert target["a"].tolist() == [0, 0]


@pytest.mark.parametrize("inplace", [True, False])
def test_extra_state_for_what_is_not_there_is_refused(inplace):
    weights = Weights(named_tensors(Uniform(2)), {"part": {"said": 1}})
    with pytest.raises(KeyError, match="extra state for 'part', but Uniform has no such submodule"):
        WeightStrategy().apply_weights(Uniform(1), weights, inplace=inplace)
