"""What users do to parameters behind an optimizer's back is noticed."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onecopy.roster import Entry
from onecopy.watch import HomeWatch, MemoryWatch, find_names


def watched(module: nn.Module) -> MemoryWatch:
    watch = MemoryWatch()
    watch.remember(entries(module))
    return watch


def entries(module: nn.Module) -> list[Entry]:
    return [Entry(param, name, 0) for name, param in module.named_parameters()]


# ------------------------------------------------------------------ memory


def test_nothing_has_moved_while_values_change() -> None:
    module = nn.Linear(3, 4)
    watch = watched(module)
    with torch.no_grad():
        module.weight.add_(1)
    module.load_state_dict(nn.Linear(3, 4).state_dict())
    module(torch.ones(3)).sum().backward()
    assert not watch.has_moved()
    watch.require_same_form()


def test_a_watch_that_remembers_nothing_is_content() -> None:
    watch = MemoryWatch()
    assert not watch.has_moved()
    watch.require_same_form()


def test_new_memory_of_the_same_form_is_seen_and_allowed() -> None:
    module = nn.Linear(3, 4)
    watch = watched(module)
    module.bias.data = torch.zeros(4)
    assert watch.has_moved()
    watch.require_same_form()
    watch.remember(entries(module))
    assert not watch.has_moved()


@pytest.mark.parametrize(
    ("change", "name", "was", "now"),
    [
        (lambda m: m.double(), "weight", "torch.float32", "torch.float64"),
        (lambda m: m.bfloat16(), "weight", "torch.float32", "torch.bfloat16"),
        (
            lambda m: setattr(m.weight, "data", m.weight.data.t().contiguous().t()),
            *("weight", r"stride \(3, 1\)", r"stride \(1, 4\)"),
        ),
        (
            lambda m: setattr(m.bias, "data", torch.zeros(7)),
            *("bias", r"shape \(4,\)", r"shape \(7,\)"),
        ),
    ],
    ids=["double", "bfloat16", "strides", "shape"],
)
def test_another_form_is_refused_naming_the_parameter_and_both_forms(
    change: Callable[[nn.Module], Any], name: str, was: str, now: str
) -> None:
    module = nn.Linear(3, 4)
    watch = watched(module)
    change(module)
    assert watch.has_moved()
    with pytest.raises(RuntimeError, match=f"{name} has changed.*{was}.*{now}.*before you build"):
        watch.require_same_form()


class Movable:
    """As much of a parameter as is watched. One machine in a test has one type of device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


def test_another_device_is_refused() -> None:
    param: Any = Movable(torch.zeros(4, 3))
    watch = MemoryWatch()
    watch.remember([Entry(param, "weight", 0)])
    param.tensor = torch.zeros(4, 3, device="meta")
    assert watch.has_moved()
    with pytest.raises(RuntimeError, match=r"weight has changed.* cpu to .* meta"):
        watch.require_same_form()


def test_channels_last_is_another_form() -> None:
    module = nn.Conv2d(3, 4, 2)
    watch = watched(module)
    module.to(memory_format=torch.channels_last)
    assert watch.has_moved()
    with pytest.raises(RuntimeError, match=r"weight has changed.*stride"):
        watch.require_same_form()


# ------------------------------------------------------------------ parameters that were replaced


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(13, 17), nn.ReLU(), nn.Linear(17, 19))


def twin(param: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.zeros_like(param))


def test_parameters_in_their_places_are_fine_whatever_their_values() -> None:
    module = net()
    watch = HomeWatch(entries(module))
    watch.require_in_place()
    module.load_state_dict(net().state_dict())
    module.double()
    module(torch.ones(13, dtype=torch.float64)).sum().backward()
    watch.require_in_place()


def test_parameters_replaced_by_assignment_are_found_out() -> None:
    module = net()
    held = entries(module)
    watch = HomeWatch(held)
    module.load_state_dict(net().state_dict(), assign=True)
    assert not any(e.param is new for e, new in zip(held, module.parameters(), strict=True))
    with pytest.raises(RuntimeError, match=r"0.weight is no longer .*assign=True"):
        watch.require_in_place()


@pytest.mark.parametrize(("layer", "name"), [(0, "weight"), (2, "weight"), (2, "bias")])
def test_one_replaced_parameter_is_named(layer: int, name: str) -> None:
    module = net()
    held = entries(module)
    watch = HomeWatch(held)
    setattr(module[layer], name, twin(getattr(module[layer], name)))
    with pytest.raises(RuntimeError, match=rf"^{layer}\.{name} is no longer the one"):
        watch.require_in_place()


def test_a_new_head_of_another_shape_is_a_replacement_too() -> None:
    module = net()
    held = entries(module)
    watch = HomeWatch(held)
    module[2].weight = nn.Parameter(torch.zeros(5, 17))
    with pytest.raises(RuntimeError, match=r"2\.weight is no longer"):
        watch.require_in_place()


def test_a_tied_parameter_is_alive_while_one_module_still_holds_it() -> None:
    first, second = nn.Linear(13, 13), nn.Linear(13, 13)
    second.weight = first.weight
    held = [Entry(first.weight, "tied", 0)]
    watch = HomeWatch(held)
    second.weight = twin(first.weight)
    watch.require_in_place()
    first.weight = second.weight
    with pytest.raises(RuntimeError, match="tied is no longer"):
        watch.require_in_place()


def test_a_tied_parameter_whose_other_module_is_gone_is_watched_all_the_same() -> None:
    first, second = nn.Linear(13, 13), nn.Linear(13, 13)
    second.weight = first.weight
    watch = HomeWatch([Entry(first.weight, "tied", 0)])
    del second
    gc.collect()
    watch.require_in_place()
    first.weight = twin(first.weight)
    with pytest.raises(RuntimeError, match="tied is no longer"):
        watch.require_in_place()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: delattr(m[2], "bias"),
        lambda m: setattr(m[2], "bias", None),
        lambda m: m.__delitem__(2),
        lambda m: m.append(nn.Linear(17, 19)),
    ],
    ids=["deleted", "none", "module removed", "module added"],
)
def test_surgery_on_the_model_is_no_replacement(change: Callable[[nn.Sequential], Any]) -> None:
    module = net()
    held = entries(module)
    watch = HomeWatch(held)
    change(module)
    gc.collect()
    watch.require_in_place()


def test_a_model_that_is_gone_is_none_of_our_business_and_is_not_kept_alive() -> None:
    module = net()
    watch = HomeWatch(entries(module))
    gone = weakref.ref(module[0])
    del module
    gc.collect()
    assert gone() is None
    other = net()
    watch.require_in_place()
    del other


@pytest.mark.parametrize(
    "make",
    [lambda: [nn.Parameter(torch.zeros(17))], lambda: [torch.zeros(17, 13)], list],
    ids=["parameters", "tensors", "nothing"],
)
def test_what_never_belonged_to_a_module_cannot_have_been_replaced_there(
    make: Callable[[], list[torch.Tensor]],
) -> None:
    watch = HomeWatch([Entry(param, "mine", 0) for param in make()])
    module = net()
    module(torch.ones(13)).sum().backward()
    watch.require_in_place()


# ------------------------------------------------------------------ modules that cannot be walked


class RaisesWhenWalked(nn.Module):
    """Its ``children`` and ``named_parameters`` raise or take other arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.weight = nn.Parameter(torch.zeros(5))

    def children(self) -> Any:
        raise NotImplementedError("no children here")

    named_children = modules = named_modules = parameters = children

    def named_parameters(self) -> Any:
        raise NotImplementedError("no names here")


class CannotBeRead(nn.Module):
    """Raises when attributes are read whose names end like this."""

    locked: tuple[str, ...] = ()

    def __getattribute__(self, name: str) -> Any:
        if CannotBeRead.locked and name.endswith(CannotBeRead.locked):
            raise ValueError(f"{name} is locked")
        return super().__getattribute__(name)


def test_modules_with_methods_of_their_own_are_walked_all_the_same() -> None:
    module = RaisesWhenWalked()
    held = [Entry(param, name, 0) for name, param in nn.Module.named_parameters(module.layer)]
    held.append(Entry(module.weight, "weight", 0))
    watch = HomeWatch(held)
    assert watch.names.of == ("layer.weight", "layer.bias", "weight")
    module.weight = twin(module.weight)
    with pytest.raises(RuntimeError, match="weight is no longer"):
        watch.require_in_place()


@pytest.mark.parametrize("locked", ["modules", ""], ids=["children", "everything"])
def test_a_module_that_cannot_be_walked_names_nothing(
    locked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, odd = net(), CannotBeRead()
    with monkeypatch.context() as patch:
        patch.setattr(CannotBeRead, "locked", (locked,))
        watch = HomeWatch(entries(module))
    assert watch.names.of == ("0.weight", "0.bias", "2.weight", "2.bias")
    watch.require_in_place()
    del odd


def test_many_modules_without_a_common_one_are_named_in_linear_time() -> None:
    def seconds(count: int) -> float:
        layers = [nn.Linear(1, 1, bias=False) for _ in range(count)]
        modules: Any = [(layer, dict(layer.named_parameters())) for layer in layers]
        params = [layer.weight for layer in layers]
        before = time.thread_time()
        assert find_names(params, modules).of == ("",) * count
        return time.thread_time() - before

    few, many = min(seconds(1000) for _ in range(3)), min(seconds(8000) for _ in range(2))
    assert many < 30 * few, (few, many)  # quadratic: 64 times
