"""Weights in all forms: taken out of a model, and put into one."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from itertools import product

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from weight_parts import Uniform, Whole, WithState, equal, numbers, tied

from trawl.weight_update import WeightStrategy
from trawl.weights.tensors import (
    Weights,
    named_tensors,
    packed_extra,
    unpacked_extra,
    weights_of,
)

STRATEGIES = [WeightStrategy(), WeightStrategy("state_dict")]
INPLACE = pytest.mark.parametrize("inplace", [True, False])


def apply(target, given, inplace=True, strategy=STRATEGIES[0]):
    strategy.apply_weights(target, given, inplace=inplace)
    return target


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
    "extracted": STRATEGIES[0].extract_weights,
    "extracted flat": STRATEGIES[1].extract_weights,
    "weights": weights_of,
    "dict with dots": named_tensors,
    "nested dict": nested,
    "TensorDict": TensorDict.from_module,
    "TensorDict of data": lambda module: TensorDict.from_module(module).data,
    "TensorDict with dots": lambda module: TensorDict(named_tensors(module)),
    "dict of TensorDicts": lambda module: dict(TensorDict.from_module(module).items()),
}


def test_extracted_weights_are_the_models_own_memory_without_gradients():
    model = Uniform(1)
    tree, flat = (strategy.extract_weights(model) for strategy in STRATEGIES)
    assert isinstance(tree, TensorDictBase)
    assert set(tree.keys(True, True)) == {("parts", "0"), ("parts", "1"), ("parts", "2"), "count"}
    assert tree.batch_size == ()
    assert type(flat) is dict
    assert set(flat) == {"parts.0", "parts.1", "parts.2", "count"}
    model.become(2)
    for leaf in (tree["parts", "1"], flat["parts.1"]):
        assert not leaf.requires_grad
        assert (leaf == 2).all()
    assert [strategy.extract_weights(None) for strategy in STRATEGIES] == [None, None]


@pytest.mark.parametrize("name", FORMS)
def test_weights_of_any_form_are_taken_and_put_into_what_has_weights(name):
    given = FORMS[name](Uniform(2))
    for strategy in STRATEGIES:
        found = weights_of(strategy.extract_weights(given)).tensors
        assert equal(dict(sorted(found.items())), dict(sorted(named_tensors(Uniform(2)).items())))
        for inplace in (True, False):
            assert apply(Uniform(1), given, inplace, strategy).numbers == {2}
    targets = [Uniform(1).state_dict(), nested(Uniform(1)), TensorDict.from_module(Uniform(1)).data]
    for target in targets:
        assert numbers(weights_of(apply(target, given)).tensors) == {2}


# --- extra state


@pytest.mark.parametrize("name", list(FORMS)[:5])
@INPLACE
def test_extra_state_is_put_into_a_module_of_its_own_or_deep_down(name, inplace):
    for strategy in STRATEGIES:
        target = apply(Whole(1, "this"), FORMS[name](Whole(2, "that")), inplace, strategy)
        assert (target.part.said, target.part.numbers) == ("that", {2})
        assert (
            apply(WithState(0, "this"), FORMS[name](WithState(1, "that")), inplace).said == "that"
        )


def test_extra_state_is_extracted_beside_the_weights_of_its_module():
    tree = STRATEGIES[0].extract_weights(Whole(1, {"mean": torch.ones(2), "text": "this"}))
    assert ("part", "__extra_state__", "said", "mean") in tree.keys(True, True)
    assert tree["part", "__extra_state__", "said", "text"] == "this"
    assert apply(Whole(0), tree.flatten_keys(".")).part.said["mean"].tolist() == [1, 1]
    tree = STRATEGIES[0].extract_weights(WithState(1, torch.ones(2)))
    assert tree["__extra_state__", "said"].tolist() == [1, 1]
    # And only where there is such.
    assert "__extra_state__" not in STRATEGIES[0].extract_weights(Uniform()).keys(True)
    for module in (Whole(1, "this"), WithState(1, "this")):
        flat = STRATEGIES[1].extract_weights(module)
        assert set(flat) == set(module.state_dict())
        module.load_state_dict(flat)


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


@pytest.mark.parametrize("name", STATES)
def test_extra_state_arrives_as_it_was_and_in_memory_of_its_own(name):
    for strategy, inplace, deep in product(STRATEGIES, (True, False), (True, False)):
        # Copies by pickle, since the states are used several times.
        modules = [Free(copied) for copied in unpacked_extra(packed_extra([STATES[name], 1, 1]))]
        whole = [nn.Sequential(nn.Sequential(nn.Linear(1, 1), m)) if deep else m for m in modules]
        given = strategy.extract_weights(whole[0])
        before = repr(given)
        for other in whole[1:]:
            strategy.apply_weights(other, given, inplace)
        wanted = [tensor.tolist() for tensor in tensors_in(STATES[name])]
        for one in modules[1:]:
            assert isinstance(STATES[name], type(one.state))
            assert [tensor.tolist() for tensor in tensors_in(one.state)] == wanted
        tensors = [tensor for one in modules for tensor in tensors_in(one.state)]
        assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
        for tensor in tensors:
            tensor.data.zero_()
        assert repr(given) == before


def test_extra_state_is_put_into_a_tensordict_in_place():
    model = Whole(1, {"mean": torch.zeros(2), "text": "this"})
    target = STRATEGIES[0].extract_weights(model)
    place = ("part", "__extra_state__", "said")
    mean = target[(*place, "mean")]
    model.part.said = {"mean": torch.ones(2), "text": "that"}
    for given in (model, STRATEGIES[0].extract_weights(model)):
        mean.zero_()
        apply(target, given)
        assert mean.tolist() == [1, 1]
        assert target[(*place, "text")] == "that"
    assert mean.data_ptr() != model.part.said["mean"].data_ptr()
    model.part.said = {"mean": torch.ones(3)}
    assert apply(target, model)[(*place, "mean")].tolist() == [1, 1, 1]
    state = apply(Whole(0, "this").state_dict(), model)
    assert state["part._extra_state"]["said"]["mean"].tolist() == [1, 1, 1]
    # Where there is no place for it, it is left out.
    assert set(apply(Uniform(0).state_dict(), WithState(1, "that"))) == set(Uniform().state_dict())


@INPLACE
def test_extra_state_without_a_place_or_copy_is_refused(inplace):
    with pytest.raises(TypeError, match=r"extra state .* of 'part' can't be pickled: .*lock"):
        STRATEGIES[0].extract_weights(Whole(1, threading.Lock()))
    for path, match in (("part", "Uniform has no such submodule"), ("", "takes no extra state")):
        weights = Weights(named_tensors(Uniform(2)), {path: {"said": 1}})
        with pytest.raises(KeyError, match=f"extra state for '{path}', but .*{match}"):
            apply(Uniform(1), weights, inplace)


# --- put in


def test_in_place_the_tensors_stay_and_have_other_values():
    target, source = Uniform(1), Uniform(2)
    before = dict(named_tensors(target))
    apply(target, source)
    assert all(before[name] is tensor for name, tensor in named_tensors(target).items())
    source.become(3)
    assert target.numbers == {2}


def test_not_in_place_the_module_gets_the_tensors_that_were_given():
    target, source = Uniform(1), Uniform(2)
    target.parts[0].requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in named_tensors(target).items()}
    held = dict(named_tensors(target))
    apply(target, source, inplace=False)
    assert equal(held, before)
    assert [type(part) for part in target.parts] == [nn.Parameter] * 3
    assert [part.requires_grad for part in target.parts] == [False, True, True]
    source.become(3)
    assert target.numbers == {3}
    # A recurrent module uses what it was given.
    source, target, given = nn.LSTM(2, 3), nn.LSTM(2, 3), torch.ones(1, 2)
    assert torch.equal(apply(target, source, inplace=False)(given)[0], source(given)[0])


def test_some_or_no_weights_may_be_put_into_a_tensordict():
    target = TensorDict(a=torch.zeros(2), b=TensorDict(c=torch.zeros(2)))
    apply(target, {"b.c": torch.ones(2)})
    assert [target["a"].tolist(), target["b", "c"].tolist()] == [[0, 0], [1, 1]]
    for anything in (Uniform(1), {}, TensorDict(), 3):
        apply(anything, None)


# --- errors

NO_WEIGHTS = "weights must be a module, a TensorDict or a dict of tensors, but they are "


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (3, NO_WEIGHTS + "int"),
        ("weights", NO_WEIGHTS + "str"),
        (lambda: None, NO_WEIGHTS + "function"),
        ([torch.zeros(1)], NO_WEIGHTS + "list"),
        ({"a": 3}, "weight 'a' must be a tensor, but it is int"),
        ({"a": {"b": "c"}}, "weight 'a.b' must be a tensor, but"),
        (TensorDict(a=torch.zeros(1), b="text"), "weight 'b' must be a tensor, but"),
    ],
)
def test_what_has_no_weights_is_refused(source, match):
    for use in (STRATEGIES[0].extract_weights, lambda given: apply(Uniform(), given), weights_of):
        with pytest.raises(TypeError, match=match):
            use(source)


def test_another_form_or_destination_is_refused():
    for form in ("module", "", None, 3):
        with pytest.raises(
            ValueError, match="extract_as must be 'tensordict' or 'state_dict', but"
        ):
            WeightStrategy(form)
    for target in (3, "model", [torch.zeros(1)], lambda: None):
        match = f"destination must be .* but it is {type(target).__name__}"
        with pytest.raises(ValueError, match=match):
            apply(target, {"a": torch.zeros(1)})


@pytest.mark.parametrize("left_out", ["", "0.weight", "1.weight"])
def test_what_was_tied_stays_tied_and_what_does_not_fit_changes_nothing(left_out):
    """Also where a module gets other tensors; in place, the tests of layouts show it."""
    source, target = tied(), tied()
    weights = {name: value for name, value in source.state_dict().items() if name != left_out}
    apply(target, weights, inplace=False)
    assert target[0].weight is target[1].weight
    assert torch.equal(target[0].weight, source[0].weight)
    before = copy.deepcopy(target.state_dict())
    for given, kind, match in (
        ({}, KeyError, "missing"),
        ({**weights, "0.bias": torch.ones(1)}, ValueError, "'0.bias' has shape"),
    ):
        with pytest.raises(kind, match=match):
            apply(target, given, inplace=False)
    assert equal(target.state_dict(), before)


@pytest.mark.parametrize("kind", [dict, TensorDict])
def test_weights_that_do_not_fit_a_dict_are_refused(kind):
    target = kind({"a": torch.zeros(2)})
    for given, error, match in (
        ({"b": torch.ones(2)}, KeyError, r"destination has no weights \['b'\]; it has \['a'\]"),
        ({"a": torch.ones(1)}, ValueError, r"'a' has shape \(1,\), but in destination it has"),
        ({"a": torch.ones(2).long()}, ValueError, "'a' is torch.int64, which is not cast to .*32"),
    ):
        with pytest.raises(error, match=match):
            apply(target, given)
    assert target["a"].tolist() == [0, 0]
