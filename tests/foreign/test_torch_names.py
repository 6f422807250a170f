"""What Trawl takes from PyTorch under private names, and what breaks without it."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from trawl.foreign import torch as names


class Seen(Tensor):
    """A tensor without memory that notes the operators that reach it."""

    __torch_function__ = names.no_torch_function
    seen: list[str]

    @staticmethod
    def __new__(cls, like):
        return names.make_wrapper(cls, like.shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        return torch.ones(())


def test_a_tensor_without_memory_gets_operators_and_nothing_else():
    """``StackedFrames`` and its views are such tensors."""
    Seen.seen = []
    made = Seen(torch.zeros(2, 3, dtype=torch.uint8))
    assert (made.shape, made.dtype) == ((2, 3), torch.uint8)
    assert made.sum() == 1
    assert Seen.seen == ["aten.sum.default"]


@pytest.mark.parametrize(
    ("operator", "call"),
    [
        (names.TO_COPY, lambda seen: seen.float()),
        (names.PIN_MEMORY, lambda seen: torch.ops.aten._pin_memory(seen)),
        (names.UNSAFE_VIEW, lambda seen: torch.ops.aten._unsafe_view(seen, [6])),
    ],
)
def test_stacks_handle_operators_by_these_names(operator, call):
    """A handler under another name is never called, and the stacks are computed instead."""
    Seen.seen = []
    call(Seen(torch.zeros(2, 3, dtype=torch.int32)))
    assert Seen.seen == [str(operator)]


def test_an_operator_tells_what_it_changes():
    """Otherwise a change of ``StackedFrames`` in place would be lost."""
    plain, changing = map(names.schema_of, (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor))
    assert (plain.is_mutable, changing.is_mutable) == (False, True)
    assert [one.name for one in changing.arguments] == ["self", "other", "alpha"]
    assert [bool(one.alias_info and one.alias_info.is_write) for one in changing.arguments] == [
        True,
        False,
        False,
    ]
    assert changing.returns[0].alias_info.is_write
    assert plain.name == "aten::add"


def test_many_tensors_are_copied_at_once():
    """Weights are copied into models by it, across dtypes."""
    into = [torch.zeros(3), torch.zeros(2, dtype=torch.float64)]
    names.copy_all(into, [torch.ones(3), torch.ones(2)])
    assert all(one.eq(1).all() for one in into)


def test_writes_are_counted():
    """Without it, nobody is told that weights were changed but never sent."""
    parameter = nn.Parameter(torch.zeros(2))
    before = names.writes_of(parameter)
    with torch.no_grad():
        parameter.add_(1)
    assert names.writes_of(parameter) == before + 1


def test_pytrees_are_mapped():
    assert names.tree_map(lambda one: one + 1, [1, (2, {"a": 3})]) == [2, (3, {"a": 4})]


def test_a_mode_sees_each_operator():
    """An isolated evaluation finds by it what draws random numbers."""
    found = []

    class Mode(names.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.rand(2)
    assert torch.ops.aten.rand.default in found


@pytest.mark.parametrize("name", names.SAMPLERS)
def test_distributions_draw_by_these_functions(name):
    """An evaluation would draw from the learner's generator instead of its own."""
    kinds = {
        "_standard_gamma": torch.distributions.Gamma(torch.ones(2), torch.ones(2)),
        "_sample_dirichlet": torch.distributions.Dirichlet(torch.ones(3)),
    }
    called = []

    class Mode(names.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Mode():
        kinds[name].sample()
    assert getattr(torch.ops.aten, name) in called
    assert callable(getattr(torch, name))


def test_a_module_has_its_entries_in_tables():
    """A replaced entry is noticed in them, and a trial call puts entries back into them."""
    module = nn.BatchNorm1d(2)
    module.inner = nn.Linear(1, 1)
    parameters, buffers, modules = names.entries_of(module)
    assert list(parameters) == ["weight", "bias"]
    assert list(modules) == ["inner"]
    assert buffers is names.buffers_of(module)
    buffers["running_mean"] = torch.full((2,), 7.0)
    assert module.running_mean.eq(7).all()
    assert {*names.ENTRIES, *names.HOOKS} <= vars(module).keys()


@pytest.mark.parametrize("name", names.HOOKS)
def test_a_module_has_its_hooks_in_tables(name):
    """A module with hooks is called, and not only its ``forward``."""
    module = nn.Linear(1, 1)
    register = {
        "_forward_hooks": module.register_forward_hook,
        "_forward_pre_hooks": module.register_forward_pre_hook,
        "_backward_hooks": module.register_full_backward_hook,
        "_backward_pre_hooks": module.register_full_backward_pre_hook,
    }
    assert not getattr(module, name)
    register[name](lambda *given: None)
    assert list(getattr(module, name))
    assert set(names.FORWARD_HOOKS) < set(names.HOOKS)


def test_hooks_of_all_modules_are_noticed():
    assert not names.has_global_hook()
    hook = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        assert names.has_global_hook()
    finally:
        hook.remove()
    assert not names.has_global_hook()


def test_a_module_that_saves_its_state_in_another_way_is_noticed():
    """Its weights may be no tensors, which an update would not change."""

    class Special(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            destination[prefix + "packed"] = (1, 2)

    special = Special(1, 1)
    assert special.state_dict() == {"packed": (1, 2)}
    assert names.saves_specially(special)
    assert not names.saves_specially(nn.Linear(1, 1))


def test_what_was_compiled_is_noticed():
    """It may not be pickled, nor called step by step."""
    module = nn.Linear(1, 1)

    def function(value):
        return value

    compiled = torch.compile(function, backend="eager")
    compiled_module = torch.compile(module, backend="eager")
    assert all(hasattr(compiled_module, name) for name in names.COMPILED)
    assert names.is_compiled(compiled_module)
    assert names.is_compiled(compiled)
    assert names.uncompiled(compiled) is function
    assert names.uncompiled(function) is function
    assert not names.is_compiled(module)
    assert not names.is_compiled(function)
    own = copy.deepcopy(module)
    assert not names.has_compiled_call(own)
    own.compile(backend="eager")
    assert names.has_compiled_call(own)


def test_whether_distributions_check_is_known():
    """It is set back after samples were recorded."""
    before = names.validates(Distribution)
    assert isinstance(before, bool)
    try:
        for value in (True, False):
            Distribution.set_default_validate_args(value)
            assert names.validates(Distribution) is value
    finally:
        Distribution.set_default_validate_args(before)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_a_typed_storage_has_an_untyped_one_and_tells_without_a_warning(recwarn):
    """Memory that is pickled twice is sent once."""
    tensor = torch.zeros(3)
    typed = tensor.storage()
    recwarn.clear()
    found = names.untyped(typed)
    assert isinstance(found, torch.UntypedStorage)
    assert found.data_ptr() == tensor.data_ptr()
    assert names.untyped(found) is found
    assert not recwarn
