"""What users do to parameters behind an optimizer's back is noticed."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from harness import World, distributed, pretend_hosts
from inside import ALLOCATE_STAGING, local_of, plan_of, traffic_of
from manners import BUCKET_VIEW, give_gradients, sharded
from models import (
    SMALL_BUCKETS,
    ConvNet,
    MixedNet,
    Mlp,
    TiedNet,
    Twins,
    assert_same_on_all_ranks,
    assert_same_parameters,
    give_equal_gradients,
    params_of_shapes,
)
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

from onecopy import ZeroRedundancyOptimizer
from onecopy.planning.param_groups import Entry
from onecopy.sharding.sharded_params import (
    MemoryWatch,
    ModuleWatch,
    find_names,
    walk,
)


def watched(module: nn.Module) -> MemoryWatch:
    return MemoryWatch(entries(module))


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
    assert not MemoryWatch(entries(module)).has_moved()


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
    watch = MemoryWatch([Entry(param, "weight", 0)])
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
    watch = ModuleWatch(entries(module))
    watch.require_in_place()
    module.load_state_dict(net().state_dict())
    module.double()
    module(torch.ones(13, dtype=torch.float64)).sum().backward()
    watch.require_in_place()


def test_parameters_replaced_by_assignment_are_found_out() -> None:
    module = net()
    held = entries(module)
    watch = ModuleWatch(held)
    module.load_state_dict(net().state_dict(), assign=True)
    assert not any(e.param is new for e, new in zip(held, module.parameters(), strict=True))
    with pytest.raises(RuntimeError, match=r"0.weight is no longer .*assign=True"):
        watch.require_in_place()


@pytest.mark.parametrize(("layer", "name"), [(0, "weight"), (2, "weight"), (2, "bias")])
def test_one_replaced_parameter_is_named(layer: int, name: str) -> None:
    module = net()
    held = entries(module)
    watch = ModuleWatch(held)
    setattr(module[layer], name, twin(getattr(module[layer], name)))
    with pytest.raises(RuntimeError, match=rf"^{layer}\.{name} is no longer the one"):
        watch.require_in_place()


def test_a_new_head_of_another_shape_is_a_replacement_too() -> None:
    module = net()
    held = entries(module)
    watch = ModuleWatch(held)
    module[2].weight = nn.Parameter(torch.zeros(5, 17))
    with pytest.raises(RuntimeError, match=r"2\.weight is no longer"):
        watch.require_in_place()


def test_a_tied_parameter_is_alive_while_one_module_still_holds_it() -> None:
    first, second = nn.Linear(13, 13), nn.Linear(13, 13)
    second.weight = first.weight
    held = [Entry(first.weight, "tied", 0)]
    watch = ModuleWatch(held)
    second.weight = twin(first.weight)
    watch.require_in_place()
    first.weight = second.weight
    with pytest.raises(RuntimeError, match="tied is no longer"):
        watch.require_in_place()


def test_a_tied_parameter_whose_other_module_is_gone_is_watched_all_the_same() -> None:
    first, second = nn.Linear(13, 13), nn.Linear(13, 13)
    second.weight = first.weight
    watch = ModuleWatch([Entry(first.weight, "tied", 0)])
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
    watch = ModuleWatch(held)
    change(module)
    gc.collect()
    watch.require_in_place()


def test_a_model_that_is_gone_is_none_of_our_business_and_is_not_kept_alive() -> None:
    module = net()
    watch = ModuleWatch(entries(module))
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
    watch = ModuleWatch([Entry(param, "mine", 0) for param in make()])
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
    watch = ModuleWatch(held)
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
        watch = ModuleWatch(entries(module))
    assert watch.names.of == ("0.weight", "0.bias", "2.weight", "2.bias")
    watch.require_in_place()
    del odd


def test_the_calls_that_name_many_modules_without_a_common_one_are_linear_in_their_number() -> None:
    def calls(count: int) -> int:
        layers = [nn.Linear(1, 1, bias=False) for _ in range(count)]
        params = [layer.weight for layer in layers]
        events = Counter[str]()
        sys.setprofile(lambda _frame, event, _arg: events.update([event]))
        try:
            names = find_names(params, walk(layers))
        finally:
            sys.setprofile(None)
        assert names.of == ("",) * count
        return events["call"] + events["c_call"]

    assert calls(800) < 9 * calls(100)  # quadratic: 64 times


# ---------------------------------------- copies ----------------------------------------


@distributed(1, 2, 3, 4)
@BUCKET_VIEW
def test_a_copy_of_model_and_optimizer_trains_on_as_the_original_would(
    world: World, bucket_view: bool
) -> None:
    zero = {"parameters_as_bucket_view": bucket_view}
    for model in (Mlp(), TiedNet(), MixedNet(), ConvNet()):
        twins = Twins(world, model, AdamW, ddp=False, zero=zero, lr=0.01)
        twins.train(2)
        original, original_optimizer = twins.model, twins.optimizer
        frozen_in_time = copy.deepcopy(twins.model)
        twins.model, twins.optimizer = copy.deepcopy((twins.model, twins.optimizer))
        twins.ddp = twins.model
        ours = {id(p) for p in twins.model.parameters()}
        listed = {id(p) for group in twins.optimizer.param_groups for p in group["params"]}
        assert listed == ours
        twins.train(3)
        assert_same_parameters(original, frozen_in_time)

        for param in original.parameters():
            param.grad = torch.zeros_like(param)
        original_optimizer.step()  # and the original is still alive
        twins.assert_equal()
        assert not torch.equal(next(original.parameters()), next(frozen_in_time.parameters()))
        assert_same_on_all_ranks(original)


@distributed(1, 2, 3)
@BUCKET_VIEW
def test_a_copy_of_the_optimizer_alone_trains_its_own_parameters(
    world: World, bucket_view: bool
) -> None:
    twins = Twins(world, Mlp(), AdamW, zero={"parameters_as_bucket_view": bucket_view}, lr=0.01)
    lr_scheduler.ExponentialLR(twins.optimizer, 0.5)  # wraps `step` of the original
    twins.train(2)
    calls: list[int] = []
    twins.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    copied = copy.deepcopy(twins.optimizer)
    assert copied.param_groups[0]["params"][0] is not twins.optimizer.param_groups[0]["params"][0]
    before = copy.deepcopy(twins.model)
    for target, source in zip(
        copied.param_groups[0]["params"], twins.model.parameters(), strict=True
    ):
        target.grad = source.grad.clone()
    copied.step()
    assert not calls
    assert_same_parameters(twins.model, before)
    twins.step()
    twins.assert_equal()
    assert calls == [1]
    for copied_param, param in zip(
        copied.param_groups[0]["params"], twins.model.parameters(), strict=True
    ):
        assert torch.equal(copied_param, param)  # both have taken the same step
    copied.consolidate_state_dict()


@distributed(1, 2)
def test_pickling_is_refused_with_advice(world: World) -> None:
    optimizer = sharded(Mlp())
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(optimizer)
    with (
        tempfile.TemporaryFile() as file,
        pytest.raises(TypeError, match="state_dict"),
    ):
        torch.save(optimizer, file)


# ---------------------------------------- behind the optimizer's back ----------------------------


@distributed(1, 2, 3)
@BUCKET_VIEW
def test_another_dtype_after_construction_is_refused_by_name(
    world: World, bucket_view: bool
) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), AdamW, parameters_as_bucket_view=bucket_view, lr=0.01
    )
    model.to(torch.float64)
    give_gradients(model)
    if world.size == 1 and not bucket_view:
        optimizer.step()  # nothing is sharded or moved: the plain class follows
        return
    with pytest.raises(RuntimeError, match=r"first\.weight.*float32.*float64"):
        optimizer.step()


@distributed(2, 3)
@BUCKET_VIEW
def test_one_parameter_of_another_dtype_is_refused_by_name(world: World, bucket_view: bool) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), AdamW, parameters_as_bucket_view=bucket_view, lr=0.01
    )
    give_gradients(model)
    optimizer.step()
    model.second.to(torch.bfloat16)
    give_gradients(model)
    with pytest.raises(RuntimeError, match=r"second\.weight.*float32.*bfloat16"):
        optimizer.step()


@distributed(1, 2, 3, 4)
@BUCKET_VIEW
def test_parameters_that_were_given_other_memory_train_on(world: World, bucket_view: bool) -> None:
    for model in (Mlp(), MixedNet(), ConvNet()):
        twins = Twins(
            world, model, AdamW, ddp=False, zero={"parameters_as_bucket_view": bucket_view}, lr=0.01
        )
        twins.train(2)
        for each, _, _ in twins.both():
            for param in each.parameters():
                param.data = param.data.clone() * 2
        twins.train(2)
        first = next(twins.model.parameters())
        first.data = first.data.clone()
        twins.train(2)
        # In and out of another dtype, with gradients that came in between.
        twins.model.to(torch.float64)
        for param, other in zip(
            twins.model.parameters(), twins.plain_model.parameters(), strict=True
        ):
            param.data = param.data.to(other.dtype)
        twins.train(2)
        twins.assert_moved()
        assert_same_on_all_ranks(twins.model)


@distributed(1, 2, 3)
@BUCKET_VIEW
def test_values_written_into_the_parameters_are_trained_from(
    world: World, bucket_view: bool
) -> None:
    twins = Twins(world, Mlp(), AdamW, zero={"parameters_as_bucket_view": bucket_view}, lr=0.01)
    twins.train(2)
    saved = copy.deepcopy(twins.model.state_dict())
    twins.train(2)
    for model, _, _ in twins.both():
        model.load_state_dict(saved)
    twins.assert_equal()
    twins.train(2)
    for model, _, _ in twins.both():
        nn.init.constant_(model.first.weight, 0.25)
    twins.train(2)


def replaced(model: nn.Module) -> dict[str, torch.Tensor]:
    """What `load_state_dict(..., assign=True)` takes: other tensors with the same values."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@distributed(1, 2, 3)
@BUCKET_VIEW
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
def test_replaced_parameters_are_refused_at_the_next_step(
    world: World, bucket_view: bool, set_to_none: bool
) -> None:
    model = Mlp()
    optimizer = sharded(model, parameters_as_bucket_view=bucket_view)
    model(model.batch((world.rank,))).backward()
    optimizer.step()
    model.load_state_dict(replaced(model), assign=True)
    optimizer.zero_grad(set_to_none=set_to_none)
    model(model.batch((world.rank,))).backward()
    with pytest.raises(RuntimeError, match="assign=True"):
        optimizer.step()


@distributed(1, 2, 3)
def test_a_part_of_the_parameters_replaced_is_refused_at_the_next_step(world: World) -> None:
    model = Mlp()
    optimizer = sharded(model)
    model.second.load_state_dict(replaced(model.second), assign=True)
    model(model.batch((world.rank,))).backward()
    with pytest.raises(RuntimeError, match="assign=True"):
        optimizer.step()


@distributed(1, 2, 3)
@BUCKET_VIEW
def test_another_memory_format_after_construction_is_refused_by_name(
    world: World, bucket_view: bool
) -> None:
    model = ConvNet(torch.contiguous_format)
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), AdamW, parameters_as_bucket_view=bucket_view, lr=0.01
    )
    model.to(memory_format=torch.channels_last)
    give_gradients(model)
    if world.size == 1 and not bucket_view:
        optimizer.step()
        return
    with pytest.raises(RuntimeError, match=r"first\.weight.*stride"):
        optimizer.step()


@distributed(2, 3, timeout=40, pg_timeout=8)
@BUCKET_VIEW
@pytest.mark.parametrize("cls", [SGD, AdamW])
def test_another_dtype_before_detach_is_refused_at_the_next_step(
    world: World, cls: type[Optimizer], bucket_view: bool
) -> None:
    model = Mlp()
    optimizer = sharded(model, cls, parameters_as_bucket_view=bucket_view)
    optimizer.attach(model)
    model(model.batch((world.rank,))).backward()
    optimizer.step()
    model.double()
    optimizer.detach()
    assert all(param.dtype is torch.float64 for param in model.parameters())
    model(model.batch((world.rank,)).double()).backward()
    with pytest.raises(RuntimeError, match="has changed since the optimizer was built"):
        optimizer.step()
    assert all(param.dtype is torch.float64 for param in model.parameters())


@distributed(2)
def test_a_compiled_module_trains_the_same(world: World) -> None:
    twins = Twins(world, Mlp(), AdamW, lr=0.01)
    twins.plain_ddp, twins.ddp = (torch.compile(ddp, backend="eager") for _, ddp, _ in twins.both())
    twins.train(2)
    twins.assert_moved()


# ---------------------------------------- cost ----------------------------------------


@distributed(2, 3, 4)
@BUCKET_VIEW
def test_a_step_sends_what_was_planned_and_no_more(world: World, bucket_view: bool) -> None:
    pretend_hosts(world)  # else a rank may pass on what others own
    model = Mlp()
    model.norm.requires_grad_(False)
    for bucket_mb in (SMALL_BUCKETS, 25):
        optimizer = sharded(model, bucket_mb=bucket_mb, parameters_as_bucket_view=bucket_view)
        shards = list(plan_of(optimizer).shards(world.rank))
        traffic = traffic_of(optimizer)
        for _ in range(2):
            model.zero_grad()
            model(model.batch((world.rank,))).backward()
            messages, sent = traffic.messages, traffic.bytes
            optimizer.step()
            share = sum(4 * shard.numel for shard in shards)
            assert traffic.bytes - sent == share * (world.size - 1)
            buckets = {shard.bucket for shard in shards}
            assert traffic.messages - messages == len(buckets) * (world.size - 1)
        total = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
        assert abs(share - total / world.size) <= 4
    assert len(buckets) == 1


# ------------------------------------------------------------------ another form, other memory


@distributed(1, 2)
@pytest.mark.parametrize("change", ["turn", "cut"])
@pytest.mark.parametrize("flat", [False, True])
def test_another_form_at_the_same_address_is_noticed(world: World, change: str, flat: bool) -> None:
    params = params_of_shapes((3, 3), (5,))
    optimizer = ZeroRedundancyOptimizer(params, SGD, parameters_as_bucket_view=flat, lr=0.1)
    give_equal_gradients(0, params)
    optimizer.step()
    params[0].grad = None
    data = params[0].data
    params[0].data = data.t() if change == "turn" else data[:2]
    if world.size == 1 and not flat:
        optimizer.step()  # the plain class, which does not mind
    else:
        with pytest.raises(RuntimeError, match="parameter 0 has changed since"):
            optimizer.step()


def to_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


@pytest.mark.also_c10d
@distributed(1)
@pytest.mark.parametrize("change", [to_channels_last, nn.Module.double])
def test_one_rank_follows_a_module_that_changes_its_form(world: World, change: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(128, 2))
    plain_model = copy.deepcopy(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    plain = SGD(plain_model.parameters(), lr=0.1)
    for step in range(3):
        if step == 1:
            change(model)
            change(plain_model)
        x = torch.randn(2, 3, 6, 6).to(next(model.parameters()).dtype)
        for net, opt in ((model, optimizer), (plain_model, plain)):
            net(x).square().sum().backward()
            opt.step()
            opt.zero_grad()
        for mine, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


class Replacing(torch.optim.Optimizer):
    """Gives its parameters other memory in every step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad


@pytest.mark.also_c10d
@distributed(1, 2, 3)
@pytest.mark.parametrize("master_dtype", [None, torch.float32])
def test_a_class_that_gives_parameters_other_memory(world: World, master_dtype: Any) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if master_dtype is None else torch.bfloat16
    model = Mlp().to(dtype)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), Replacing, bucket_mb=0.0005, master_dtype=master_dtype, lr=0.5
    )
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    optimizer.assert_replicas_equal()
    for param, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param.float(), (old.float() - 1.0), rtol=0.01, atol=0.01)


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(x)
        return result


@distributed(1)
def test_ddp_around_a_torchscript_module_is_watched_too(world: World) -> None:
    x = torch.ones(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated
        ddp = nn.parallel.DistributedDataParallel(torch.jit.trace(HalfUsed(), x))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1)
    ddp(x).sum().backward()
    with pytest.raises(RuntimeError, match="under DDP has not come to its end"):
        optimizer.step()


class ChoosesASubclass(SGD):
    def __new__(cls, *_: Any, **__: Any) -> ChoosesASubclass:
        return object.__new__(Chosen)


class Chosen(ChoosesASubclass):
    pass


@distributed(1, 2)
def test_a_class_whose_constructor_chooses_a_subclass(world: World) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = ZeroRedundancyOptimizer(
        first.parameters(), ChoosesASubclass, partition="elementwise", lr=0.1
    )
    assert optimizer.defaults["momentum"] == 0
    optimizer.add_param_group({"params": second.parameters()})
    assert len(optimizer.optim.param_groups) == 2
    (only,) = local_of(optimizer).inners
    assert type(only.optimizer) is Chosen


class Lost(RuntimeError):
    """What a failed collective raises."""


def lost(*_: Any) -> Any:
    raise Lost


@pytest.mark.also_c10d
@distributed(1)
def test_a_conversion_for_which_memory_is_lacking_can_be_taken_back(world: World) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    optimizer.attach(model)
    batch = model.batch((world.rank + 1, 1))
    model.double()
    with mock.patch.object(*ALLOCATE_STAGING, lost), pytest.raises(Lost):
        model(batch.double()).backward()
    model.float()
    optimizer.zero_grad()
    before = [param.detach().clone() for param in model.parameters()]
    model(batch).backward()
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
