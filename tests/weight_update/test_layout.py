"""How the tensors of any module lie in a buffer, and come there and back."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from weight_parts import Uniform, equal, tied

from trawl.weights.layout import FlatLayout, ModuleWeights, Slot
from trawl.weights.strategy import load_weights
from trawl.weights.tensors import named_tensors, weights_of

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*REAL, torch.complex64, torch.bool, *INTEGERS]
# Real numbers are cast to any precision, integers to those that hold all of them.
WIDER = {
    **{dtype: [*REAL, torch.complex64] for dtype in REAL},
    torch.uint8: INTEGERS[2:],
    torch.int8: INTEGERS[2:],
    torch.int16: INTEGERS[3:],
    torch.int32: INTEGERS[4:],
}


@st.composite
def modules(draw: st.DrawFn) -> nn.Module:
    """A module of nested parts, whose tensors are of all sorts, and some of them tied."""
    root = nn.Module()
    parts = [root]
    for index in range(draw(st.integers(0, 3))):
        part = nn.Module()
        draw(st.sampled_from(parts)).add_module(f"part{index}", part)
        parts.append(part)
    made: dict[bool, list[Any]] = {True: [], False: []}
    for index in range(draw(st.integers(0, 8))):
        part, is_parameter = draw(st.sampled_from(parts)), draw(st.booleans())
        if made[is_parameter] and draw(st.integers(0, 3)) == 0:
            tensor = draw(st.sampled_from(made[is_parameter]))
        else:
            shape = torch.Size(draw(st.lists(st.integers(0, 4), max_size=3)))
            first = draw(st.integers(0, 99))
            numbers = torch.arange(first, first + shape.numel()) % 100
            tensor = numbers.to(draw(st.sampled_from(DTYPES))).reshape(shape)
            if draw(st.booleans()):
                tensor = tensor.permute(tuple(reversed(range(len(shape)))))
            if is_parameter:
                tensor = nn.Parameter(tensor, requires_grad=False)
            made[is_parameter].append(tensor)
        if is_parameter:
            part.register_parameter(f"own{index}", tensor)
        else:
            part.register_buffer(f"own{index}", tensor, persistent=draw(st.booleans()))
    return root


def slot_of(layout: FlatLayout) -> Slot:
    return Slot(layout, bytearray(layout.nbytes))


def filled(live: ModuleWeights) -> Slot:
    slot = slot_of(live.layout)
    live.writer()(slot, 1)
    return slot


def written(live: ModuleWeights) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in filled(live).named().items()}


def blank(module: nn.Module) -> nn.Module:
    """The same module, all zeros."""
    made = copy.deepcopy(module)
    for tensor in named_tensors(made).values():
        tensor.zero_()
    return made


@given(modules())
def test_any_module_goes_through_a_buffer(module):
    named, live, target = named_tensors(module), ModuleWeights(module), blank(module)
    slot = filled(live)
    assert slot.complete
    assert equal(dict(sorted(slot.named().items())), dict(sorted(named.items())))
    other = ModuleWeights(target)
    assert other.layout == live.layout
    assert hash(other.layout) == hash(live.layout)
    other.load(slot.tensors())
    assert equal(named_tensors(target), named)

    # Each tensor lies there once, whatever its names; those of one dtype side by side, aligned.
    layout = live.layout
    assert len(layout.entries) == len({id(tensor) for tensor in named.values()})
    assert sorted(name for entry in layout.entries for name in entry.names) == sorted(named)
    end = 8 * (len(layout.entries) + 1)
    for a, b in layout.runs():
        run = layout.entries[a:b]
        assert len({entry.dtype for entry in run}) == 1
        assert run[0].start % 64 == 0
        assert run[0].start >= end
        assert all(two.start == one.start + one.nbytes for one, two in pairwise(run))
        end = run[-1].start + run[-1].nbytes
    assert layout.nbytes == max(end, 64)


@given(modules(), st.data())
def test_any_module_is_loaded_from_all_forms_even_without_buffers(module, data):
    named, nested = named_tensors(module), TensorDict()
    for name, tensor in named.items():
        nested.set(tuple(name.split(".")), tensor)
    target = blank(module)
    load_weights(target, nested)
    assert equal(named_tensors(target), named)
    target = blank(module)
    load_weights(target, module.state_dict())
    assert equal(target.state_dict(), module.state_dict())

    optional = [entry for entry in FlatLayout.of(module).entries if not entry.required]
    absent = data.draw(st.lists(st.sampled_from(optional), unique=True)) if optional else []
    names = {name for entry in absent for name in entry.names}
    target = blank(module)
    load_weights(target, {name: tensor for name, tensor in named.items() if name not in names})
    for name, tensor in named_tensors(target).items():
        assert torch.equal(tensor, torch.zeros_like(tensor) if name in names else named[name])


@pytest.mark.parametrize("given_dtype", DTYPES, ids=str)
def test_weights_are_cast_where_no_count_or_mask_is_lost(given_dtype):
    weights = {"one": torch.tensor([0, 1, 1, 0]).to(given_dtype)}
    for own in DTYPES:
        module = nn.Module()
        module.register_buffer("one", torch.zeros(4, dtype=own))
        if given_dtype == own or own in WIDER.get(given_dtype, []):
            load_weights(module, weights)
            assert module.one.dtype == own
            assert torch.equal(module.one, weights["one"].to(own))
        else:
            match = f"'one' is {given_dtype}, which is not cast to the policy's {own}.*.to.{own}"
            with pytest.raises(ValueError, match=match):
                load_weights(module, weights)
            assert not module.one.any()


def test_a_module_may_have_no_tensors():
    module = nn.Module()
    module.register_buffer("one", None)
    module.register_parameter("other", None)
    slot = filled(ModuleWeights(module))
    assert slot.named() == {}
    assert slot.complete
    load_weights(module, {})


def test_a_slot_is_completed_by_another():
    layout = FlatLayout({name: torch.zeros(1) for name in "abc"}, [])
    first, second = slot_of(layout), slot_of(layout)
    first.put([torch.tensor([5.0]), torch.tensor([6.0]), None])
    first.extra_number = 3
    second.put([None, torch.tensor([7.0]), None], 2)
    assert not second.complete
    second.complete_by(first)
    assert {name: float(t) for name, t in second.named().items()} == {"a": 5, "b": 7}
    assert list(second.named(since=1)) == ["b"]
    assert second.tensors()[2] is None
    assert (second.newest, second.extra_number) == (2, 3)


# --- what doesn't fit

WEIGHT, BIAS = torch.zeros(2, 3), torch.zeros(2)


@pytest.mark.parametrize(
    ("weights", "kind", "match"),
    [
        ({}, KeyError, r"policy Linear: missing \['bias', 'weight'\], unknown \[\]"),
        ({"weight": WEIGHT}, KeyError, r"missing \['bias'\], unknown \[\]"),
        ({"weight": WEIGHT, "bias": BIAS, "a": BIAS}, KeyError, r"missing \[\], unknown \['a'\]"),
        (
            {"module.weight": WEIGHT, "module.bias": BIAS},
            KeyError,
            "fit without the prefix 'module.': pass the module inside",
        ),
        ({"weight": WEIGHT.T, "bias": BIAS}, ValueError, r"\(3, 2\), but the policy's has \(2, 3"),
        ({"weight": WEIGHT, "bias": BIAS[0]}, ValueError, r"'bias' has shape \(\), but"),
        ({"weight": WEIGHT, "bias": BIAS.to_sparse()}, ValueError, "only dense tensors"),
        (
            {"weight": WEIGHT.to(torch.complex64), "bias": BIAS},
            ValueError,
            "'weight' is torch.complex64, which is not cast to the policy's torch.float32",
        ),
        ({"weight": WEIGHT.to("meta"), "bias": BIAS}, ValueError, "'weight' is on the meta device"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(weights, kind, match):
    module = nn.Linear(3, 2)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(kind, match=match):
        load_weights(module, weights)
    assert equal(module.state_dict(), before)


def test_weights_may_lack_a_wrappers_prefix():
    with pytest.raises(KeyError, match=r"fit with the prefix 'module.': pass the module that cont"):
        load_weights(nn.DataParallel(nn.Linear(3, 2)), {"weight": WEIGHT, "bias": BIAS})


def test_weights_for_a_tied_tensor_come_under_any_of_its_names_and_do_not_contradict():
    for left_out in ("0.weight", "1.weight"):
        target = tied()
        weights = {k: torch.ones_like(v) for k, v in target.state_dict().items() if k != left_out}
        load_weights(target, weights)
        assert target[0].weight is target[1].weight
        assert (target[0].weight == 1).all()
    weights = {name: value.clone() for name, value in target.state_dict().items()}
    load_weights(target, weights)
    weights["1.weight"] += 1
    with pytest.raises(ValueError, match=r"'0.weight', '1.weight' are tied .* different values"):
        load_weights(target, weights)


def test_a_difference_of_layouts_is_described():
    one = FlatLayout({"a": BIAS, "b": BIAS, "c": BIAS, "e": BIAS.double()}, [])
    other = FlatLayout({"b": WEIGHT, "c": BIAS.long(), "d": BIAS, "e": BIAS}, [])
    assert one.difference(other) == (
        "only here ['a'], only in the workers ['d'], with another shape or dtype ['b', 'c']"
    )
    assert one.difference(one) == ""


# --- modules that change


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def twos(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, 2.0))


def plus_one(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor + 1 for name, tensor in module.state_dict().items()}


CHANGES = {
    "replaced": lambda m: setattr(m[0], "weight", twos(4, 4)),
    "replaced deep down": lambda m: m[1][0]._parameters.update(bias=twos(4)),
    "swapped": lambda m: m.__setitem__(1, deep()[1]),
    "stepped": lambda m: m[0].weight.data.add_(1),
    "other memory": lambda m: setattr(m[0].weight, "data", twos(4, 4).data),
    "turned": lambda m: setattr(m[0].weight, "data", m[0].weight.data.t()),
    "another buffer": lambda m: setattr(m[1][1], "running_mean", twos(4).data),
    "loaded": lambda m: m.load_state_dict(plus_one(m)),
    "assigned": lambda m: m.load_state_dict(plus_one(m), assign=True),
    "moved": lambda m: m.share_memory(),
    "cast": lambda m: m.double(),
    "cast in part": lambda m: m[0].half(),
    "tied": lambda m: setattr(m[1][0], "weight", m[0].weight),
    "without a buffer": lambda m: setattr(m[1][1], "num_batches_tracked", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_becomes_of_a_module_is_noticed(change):
    for used in (False, True):
        module = deep()
        live = ModuleWeights(module)
        dtypes = {name: tensor.dtype for name, tensor in named_tensors(module).items()}
        if used:
            written(live)
        CHANGES[change](module)
        now = {
            name: value.detach().to(dtypes[name]) for name, value in named_tensors(module).items()
        }
        # Still, when nothing happens between.
        for _ in range(2):
            assert equal(dict(sorted(written(live).items())), dict(sorted(now.items())))
    if change == "tied":
        return  # It can't be told which of the two values it is to have.
    module = deep()
    live = ModuleWeights(module)
    slot = filled(live)
    CHANGES[change](module)
    live.load(slot.tensors())
    sent = slot.named()
    for name, tensor in named_tensors(module).items():
        assert torch.equal(tensor, sent[name].to(tensor.dtype))


def test_a_part_in_the_memory_of_the_one_before_is_noticed():
    # Objects are known by their addresses, which are given away again.
    for number in range(50):
        module = nn.Sequential(nn.Linear(2, 2))
        live = ModuleWeights(module)
        del module._modules["0"]
        module._modules["0"] = nn.Linear(2, 2)
        with torch.no_grad():
            module[0].weight.fill_(number)
        assert torch.equal(written(live)["0.weight"], module[0].weight)


def pruned_and_cast(module: nn.Linear) -> None:
    module.bias.data = module.bias.data.double()
    module.weight.data = module.weight.data[:1]  # at the same address


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        (lambda m: setattr(m, "bias", None), KeyError, r"Linear: missing \['bias'\], unknown \[\]"),
        (lambda m: setattr(m, "scale", twos(1)), KeyError, r"missing \[\], unknown \['scale'\]"),
        (lambda m: m.register_buffer("count", BIAS), KeyError, r"unknown \['count'\]"),
        (lambda m: setattr(m, "more", tied()[0]), KeyError, r"unknown \['more.bias', 'more.weig"),
        (lambda m: setattr(m, "weight", twos(4, 4)), ValueError, r"has shape \(4, 4\), but the"),
        (lambda m: setattr(m.weight, "data", m.weight.data[:1]), ValueError, r"shape \(1, 3\)"),
        (lambda m: setattr(m.weight, "data", m.weight.data.view(3, 2)), ValueError, r"\(3, 2\)"),
        (pruned_and_cast, ValueError, r"'weight' has shape \(1, 3\)"),
        (lambda m: m.to("meta"), ValueError, "is on the meta device"),
        (lambda m: m.to(torch.complex64), ValueError, "is torch.complex64, which is not cast"),
    ],
)
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
def test_a_module_that_no_longer_fits_is_refused_before_anything_is_written(change, kind, match):
    module = nn.Linear(3, 2)
    live = ModuleWeights(module)
    slot = filled(live)
    before = {name: tensor.clone() for name, tensor in slot.named().items()}
    change(module)
    for _ in range(2):
        with pytest.raises(kind, match=match):
            live.writer()(slot, 1)
    assert equal(slot.named(), before)


def test_a_module_whose_tie_was_undone_is_refused():
    module = tied()
    live = ModuleWeights(module)
    module[1].weight = twos(3, 3)
    with pytest.raises(ValueError, match=r"'0.weight', '1.weight' are tied in the policy"):
        live.writer()


def test_a_module_is_packed_and_loaded_as_another_one():
    first = Uniform(1)
    live = ModuleWeights(Uniform(2), FlatLayout.of(first))
    assert written(live).keys() == named_tensors(first).keys()
    with pytest.raises(KeyError, match="don't fit the policy Linear"):
        ModuleWeights(nn.Linear(1, 1), FlatLayout.of(first))
    # The layout of a slot may be in another order.
    named = named_tensors(Uniform(3))
    other = FlatLayout(dict(reversed(named.items())), named)
    slot = slot_of(other)
    slot.put(other.match(named, ""), 5)
    live.load_slot(slot, 5)
    assert live.module.numbers == {2}
    live.load_slot(slot, 4)
    assert live.module.numbers == {3}
    live.load_slot(filled(ModuleWeights(Uniform(4))), 0)
    assert live.module.numbers == {4}


def test_gradients_have_no_part_in_it():
    module = nn.Linear(2, 2)
    live = ModuleWeights(module)
    with torch.enable_grad():
        slot = filled(live)
        live.load(slot.tensors())
    assert module.weight.requires_grad
    assert module.weight.grad_fn is None
    assert not slot.views[0].requires_grad
    with torch.inference_mode():
        slot = filled(live)
    slot.views[0].zero_()


def test_a_module_with_weights_that_are_no_tensors_gets_and_gives_none():
    with warnings.catch_warnings():
        # PyTorch will take this way of quantization out.
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    for use in (
        ModuleWeights(model).writer,
        lambda: weights_of(model),
        lambda: load_weights(model, {}),
    ):
        with pytest.raises(TypeError, match=r"weights that are not tensors: 0\._packed_params"):
            use()
    with pytest.raises(
        ValueError, match=r"LazyLinear has parameters without shapes.* weight, bias"
    ):
        weights_of(nn.LazyLinear(2))


def test_parameters_in_a_tensordict_are_tensors():
    model = nn.Module()
    model.parameters_ = TensorDictParams(TensorDict(a=torch.ones(2)))
    assert weights_of(model).tensors["parameters_.a"].tolist() == [1, 1]
    load_weights(model, {"parameters_.a": torch.zeros(2)})
    assert model.parameters_["a"].tolist() == [0, 0]
