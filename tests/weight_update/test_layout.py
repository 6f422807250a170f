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

from trawl.weight_update.layout import FlatLayout, ModuleWeights, Slot
from trawl.weight_update.strategy import load_weights
from trawl.weight_update.tensors import named_tensors, weights_of

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
REAL = DTYPES[:5]
# What each is cast to: real numbers to any precision, integers to those that hold all of them.
WIDER = {
    **dict.fromkeys(REAL[:4], REAL),
    torch.complex64: [],
    torch.bool: [],
    torch.uint8: [torch.int16, torch.int32, torch.int64],
    torch.int8: [torch.int16, torch.int32, torch.int64],
    torch.int16: [torch.int32, torch.int64],
    torch.int32: [torch.int64],
    torch.int64: [],
}


def values(shape: tuple[int, ...], dtype: torch.dtype, first: int, turned: bool) -> Tensor:
    """Small numbers that each dtype can hold, which lie in memory in one order or another."""
    count = torch.Size(shape).numel()
    flat = (torch.arange(first, first + count) % 100).to(dtype)
    if not turned:
        return flat.reshape(shape)
    return flat.reshape(shape[::-1]).permute(tuple(reversed(range(len(shape)))))


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
            shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
            dtype = draw(st.sampled_from(DTYPES))
            tensor = values(shape, dtype, draw(st.integers(0, 99)), draw(st.booleans()))
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


def blank(module: nn.Module) -> nn.Module:
    """The same module, all zeros."""
    made = copy.deepcopy(module)
    for tensor in named_tensors(made).values():
        tensor.zero_()
    return made


# --- any module


@given(modules())
def test_the_tensors_of_any_module_come_back_from_a_buffer(module):
    live = ModuleWeights(module)
    slot = slot_of(live.layout)
    live.writer()(slot, 1)
    assert slot.complete
    found = slot.named()
    assert equal(dict(sorted(found.items())), dict(sorted(named_tensors(module).items())))


@given(modules())
def test_any_module_can_be_loaded_from_a_buffer(module):
    live, target = ModuleWeights(module), blank(module)
    slot = slot_of(live.layout)
    live.writer()(slot, 1)
    other = ModuleWeights(target)
    assert other.layout == live.layout
    assert hash(other.layout) == hash(live.layout)
    other.load(slot.tensors())
    assert equal(named_tensors(target), named_tensors(module))


@given(modules())
def test_each_tensor_is_packed_once_whatever_its_names(module):
    entries = FlatLayout.of(module).entries
    named = named_tensors(module)
    assert len(entries) == len({id(tensor) for tensor in named.values()})
    assert sorted(name for entry in entries for name in entry.names) == sorted(named)


@given(modules())
def test_tensors_of_one_dtype_lie_side_by_side_and_are_aligned(module):
    layout = FlatLayout.of(module)
    end = 8 * (len(layout.entries) + 1)
    for a, b in layout.runs():
        run = layout.entries[a:b]
        assert len({entry.dtype for entry in run}) == 1
        assert run[0].start % 64 == 0
        assert run[0].start >= end
        for one, next_one in pairwise(run):
            assert next_one.start == one.start + one.nbytes
        end = run[-1].start + run[-1].nbytes
    assert layout.nbytes == max(end, 64)


@given(modules(), st.data())
def test_buffers_that_are_not_given_stay_as_they_are(module, data):
    optional = [
        entry
        for entry in FlatLayout.of(module).entries
        if not entry.required and all("own" in name for name in entry.names)
    ]
    absent = data.draw(st.lists(st.sampled_from(optional), unique=True)) if optional else []
    names = {name for entry in absent for name in entry.names}
    weights = {n: tensor for n, tensor in named_tensors(module).items() if n not in names}
    target = blank(module)
    load_weights(target, weights)
    for name, tensor in named_tensors(target).items():
        assert torch.equal(tensor, torch.zeros_like(tensor) if name in names else weights[name])


@given(modules())
def test_any_module_may_be_loaded_from_its_state_dict(module):
    target = blank(module)
    load_weights(target, module.state_dict())
    kept = module.state_dict()
    assert equal(target.state_dict(), kept)


@given(modules())
def test_any_module_may_be_loaded_from_a_nested_tensordict(module):
    target, nested = blank(module), TensorDict()
    for name, tensor in named_tensors(module).items():
        nested.set(tuple(name.split(".")), tensor)
    load_weights(target, nested)
    assert equal(named_tensors(target), named_tensors(module))


@pytest.mark.parametrize("own", DTYPES, ids=str)
@pytest.mark.parametrize("given_dtype", DTYPES, ids=str)
def test_weights_are_cast_where_no_count_or_mask_is_lost(given_dtype, own):
    module = nn.Module()
    module.register_buffer("one", torch.zeros(4, dtype=own))
    weights = {"one": torch.tensor([0, 1, 1, 0]).to(given_dtype)}
    if given_dtype == own or own in WIDER[given_dtype]:
        load_weights(module, weights)
        assert module.one.dtype == own
        assert torch.equal(module.one, weights["one"].to(own))
    else:
        match = rf"'one' is {given_dtype}, which is not cast to the policy's {own}.*\.to\({own}\)"
        with pytest.raises(ValueError, match=match):
            load_weights(module, weights)
        assert not module.one.any()


def test_a_module_may_have_no_tensors():
    live = ModuleWeights(nn.ReLU())
    slot = slot_of(live.layout)
    live.writer()(slot, 1)
    assert slot.named() == {}
    assert slot.complete
    load_weights(nn.ReLU(), {})


def test_a_buffer_may_be_none_and_is_no_tensor():
    module = nn.Module()
    module.register_buffer("one", None)
    module.register_parameter("other", None)
    assert FlatLayout.of(module).entries == []


def test_a_slot_is_completed_by_another():
    tensors = {name: torch.tensor([float(i)]) for i, name in enumerate("abc")}
    layout = FlatLayout(tensors, [])
    first, second = slot_of(layout), slot_of(layout)
    first.put([torch.tensor([5.0]), torch.tensor([6.0]), None])
    second.put([None, torch.tensor([7.0]), None])
    assert not second.complete
    second.complete_by(first)
    assert {name: float(t) for name, t in second.named().items()} == {"a": 5, "b": 7}
    assert second.tensors()[2] is None


# --- what doesn't fit


@pytest.mark.parametrize(
    ("weights", "kind", "match"),
    [
        ({}, KeyError, r"policy Linear: missing \['bias', 'weight'\], unknown \[\]"),
        ({"weight": torch.zeros(2, 3)}, KeyError, r"missing \['bias'\], unknown \[\]"),
        (
            {"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "a": torch.zeros(1)},
            KeyError,
            r"missing \[\], unknown \['a'\]",
        ),
        (
            {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)},
            ValueError,
            r"'weight' has shape \(3, 2\), but the policy's has \(2, 3\)",
        ),
        (
            {"weight": torch.zeros(2, 3), "bias": torch.zeros(())},
            ValueError,
            r"'bias' has shape \(\), but",
        ),
        (
            {"weight": torch.zeros(2, 3, dtype=torch.complex64), "bias": torch.zeros(2)},
            ValueError,
            r"'weight' is torch.complex64, which is not cast to the policy's torch.float32",
        ),
        (
            {"weight": torch.zeros(2, 3, device="meta"), "bias": torch.zeros(2)},
            ValueError,
            r"'weight' is on the meta device",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(weights, kind, match):
    module = nn.Linear(3, 2)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(kind, match=match):
        load_weights(module, weights)
    assert equal(module.state_dict(), before)


def test_weights_for_a_tied_tensor_may_come_under_any_of_its_names():
    for left_out in ("0.weight", "1.weight"):
        target = tied()
        weights = {k: torch.ones_like(v) for k, v in target.state_dict().items() if k != left_out}
        load_weights(target, weights)
        assert target[0].weight is target[1].weight
        assert (target[0].weight == 1).all()


def test_weights_for_a_tied_tensor_must_not_contradict_each_other():
    target = tied()
    weights = {name: value.clone() for name, value in target.state_dict().items()}
    load_weights(target, weights)
    weights["1.weight"] += 1
    with pytest.raises(ValueError, match=r"'0.weight', '1.weight' are tied .* different values"):
        load_weights(target, weights)


# --- modules that change


def written(live: ModuleWeights) -> dict[str, Tensor]:
    slot = slot_of(live.layout)
    live.writer()(slot, 1)
    return {name: tensor.clone() for name, tensor in slot.named().items()}


def replaced(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(torch.full((4, 4), 2.0))


def replaced_deep_down(module: nn.Sequential) -> None:
    module[1][0]._parameters["bias"] = nn.Parameter(torch.full((4,), 2.0))


def swapped(module: nn.Sequential) -> None:
    module[1] = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def stepped(module: nn.Sequential) -> None:
    with torch.no_grad():
        module[0].weight += 1


def of_other_memory(module: nn.Sequential) -> None:
    module[0].weight.data = torch.full((4, 4), 2.0)


def turned(module: nn.Sequential) -> None:
    module[0].weight.data = module[0].weight.data.t()


def with_another_buffer(module: nn.Sequential) -> None:
    module[1][1].running_mean = torch.full((4,), 2.0)


def loaded(module: nn.Sequential) -> None:
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})


def assigned(module: nn.Sequential) -> None:
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()}, assign=True)


def moved(module: nn.Sequential) -> None:
    module.to(memory_format=torch.preserve_format).share_memory()


def cast(module: nn.Sequential) -> None:
    module.double()


def cast_in_part(module: nn.Sequential) -> None:
    module[0].half()


def tied_later(module: nn.Sequential) -> None:
    module[1][0].weight = module[0].weight


def without_a_buffer(module: nn.Sequential) -> None:
    module[1][1].num_batches_tracked = None


CHANGES = [
    replaced,
    replaced_deep_down,
    swapped,
    stepped,
    of_other_memory,
    turned,
    with_another_buffer,
    loaded,
    assigned,
    moved,
    cast,
    cast_in_part,
    tied_later,
    without_a_buffer,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("used", [False, True], ids=["before the first", "later"])
def test_what_becomes_of_a_module_is_noticed(change, used):
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    live = ModuleWeights(module)
    dtypes = {name: tensor.dtype for name, tensor in named_tensors(module).items()}
    if used:
        written(live)
    change(module)
    found, now = written(live), named_tensors(module)
    assert found.keys() == now.keys()
    for name, tensor in now.items():
        assert found[name].dtype == dtypes[name]
        assert torch.equal(found[name], tensor.detach().to(dtypes[name]))
    # Still, when nothing happens between.
    assert equal(written(live), found)


@pytest.mark.parametrize(
    "change",
    # Of a tie it can't be told which of the two values it is to have.
    [change for change in CHANGES if change is not tied_later],
    ids=lambda change: change.__name__,
)
def test_weights_are_loaded_into_what_has_become_of_a_module(change):
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    live = ModuleWeights(module)
    slot = slot_of(live.layout)
    live.writer()(slot, 1)
    sent = {name: tensor.clone() for name, tensor in slot.named().items()}
    change(module)
    live.load(slot.tensors())
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


def without_a_parameter(module: nn.Linear) -> None:
    module.bias = None


def with_another_parameter(module: nn.Linear) -> None:
    module.scale = nn.Parameter(torch.ones(1))


def with_a_new_buffer(module: nn.Linear) -> None:
    module.register_buffer("count", torch.ones(1))


def with_another_part(module: nn.Linear) -> None:
    module.more = nn.Linear(1, 1)


def wider(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.zeros(4, 4))


def pruned(module: nn.Linear) -> None:
    module.weight.data = module.weight.data[:1]  # at the same address


def reshaped(module: nn.Linear) -> None:
    module.weight.data = module.weight.data.view(3, 2)


def pruned_and_cast(module: nn.Linear) -> None:
    module.bias.data = module.bias.data.double()
    module.weight.data = module.weight.data[:1]


def on_no_device(module: nn.Linear) -> None:
    module.to("meta")


def complex_(module: nn.Linear) -> None:
    module.to(torch.complex64)


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        (without_a_parameter, KeyError, r"Linear: missing \['bias'\], unknown \[\]"),
        (with_another_parameter, KeyError, r"missing \[\], unknown \['scale'\]"),
        (with_a_new_buffer, KeyError, r"missing \[\], unknown \['count'\]"),
        (with_another_part, KeyError, r"unknown \['more.bias', 'more.weight'\]"),
        (wider, ValueError, r"'weight' has shape \(4, 4\), but the policy's has \(2, 3\)"),
        (pruned, ValueError, r"'weight' has shape \(1, 3\), but the policy's has \(2, 3\)"),
        (reshaped, ValueError, r"'weight' has shape \(3, 2\), but the policy's has \(2, 3\)"),
        (pruned_and_cast, ValueError, r"'weight' has shape \(1, 3\)"),
        (on_no_device, ValueError, r"is on the meta device"),
        (complex_, ValueError, r"is torch.complex64, which is not cast"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
def test_a_module_that_no_longer_fits_is_refused_before_anything_is_written(change, kind, match):
    module = nn.Linear(3, 2)
    live = ModuleWeights(module)
    slot = slot_of(live.layout)
    live.writer()(slot, 1)
    before = {name: tensor.clone() for name, tensor in slot.named().items()}
    change(module)
    for _ in range(2):
        with pytest.raises(kind, match=match):
            live.writer()(slot, 1)
        with pytest.raises(kind, match=match):
            live.writer()
    assert equal(slot.named(), before)


def test_a_module_whose_tie_was_undone_is_refused():
    module = tied()
    live = ModuleWeights(module)
    module[1].weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"'0.weight', '1.weight' are tied in the policy"):
        live.writer()


def test_a_module_may_be_packed_as_another_one():
    first = Uniform(1)
    live = ModuleWeights(Uniform(2), FlatLayout.of(first))
    assert written(live).keys() == named_tensors(first).keys()
    with pytest.raises(KeyError, match="don't fit the policy Linear"):
        ModuleWeights(nn.Linear(1, 1), FlatLayout.of(first))


def test_gradients_have_no_part_in_it():
    module = nn.Linear(2, 2)
    live = ModuleWeights(module)
    slot = slot_of(live.layout)
    with torch.enable_grad():
        live.writer()(slot, 1)
        live.load(slot.tensors())
    assert module.weight.requires_grad
    assert module.weight.grad_fn is None
    assert not slot.views[0].requires_grad


def test_weights_are_told_apart_from_what_is_none():
    for wrong in (3, "weights", [torch.zeros(1)], None):
        with pytest.raises(TypeError, match=f"weights must be a module.*{type(wrong).__name__}"):
            weights_of(wrong)


def quantized() -> nn.Module:
    """A model whose weights are no tensors."""
    with warnings.catch_warnings():
        # PyTorch will take this way of quantization out.
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def test_a_module_with_weights_that_are_no_tensors_gets_and_gives_none():
    model = quantized()
    for use in (
        ModuleWeights(model).writer,
        lambda: weights_of(model),
        lambda: load_weights(model, {}),
    ):
        with pytest.raises(TypeError, match=r"weights that are not tensors: 0\._packed_params"):
            use()


def test_parameters_in_a_tensordict_are_tensors():
    model = nn.Module()
    model.parameters_ = TensorDictParams(TensorDict(a=torch.ones(2)))
    assert weights_of(model).tensors["parameters_.a"].tolist() == [1, 1]
    load_weights(model, {"parameters_.a": torch.zeros(2)})
    assert model.parameters_["a"].tolist() == [0, 0]
