"""A real torch.optim.Optimizer: everything that torch hangs on one works as with the plain class.

Schedulers, averaging, clipping, scaling, hooks, closures, copies; and what users do to a model
behind the optimizer's back is followed, or refused with a reason, on every rank.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import EVERY_FEED, AttachedTwins
from contract import Halving
from harness import World, distributed
from manners import BUCKET_VIEW, give_gradients, sharded
from models import (
    BranchNet,
    Mlp,
    TiedNet,
    Twins,
    assert_equal_params,
    assert_same_on_all_ranks,
    assert_same_parameters,
    give_equal_gradients,
    hooks,
    noise,
    params_of_shapes,
    random_parameter,
    seed_of,
)
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler, swa_utils
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from onecopy import ZeroRedundancyOptimizer


@pytest.mark.smoke
@distributed(1, 2)
def test_it_is_an_optimizer(world: World) -> None:
    optimizer = sharded(Mlp())
    assert isinstance(optimizer, Optimizer)
    assert optimizer.defaults == AdamW(Mlp().parameters(), lr=0.01).defaults
    assert "AdamW" in repr(optimizer) or "ZeroRedundancyOptimizer" in repr(optimizer)
    for name in ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"):
        assert callable(getattr(optimizer, name))


# ---------------------------------------- schedulers and averaging ----------------------------


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, 2, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8, cycle_momentum=True),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def test_all_schedulers_of_torch_are_listed_here() -> None:
    found = {
        name
        for name, cls in vars(lr_scheduler).items()
        if isinstance(cls, type) and hasattr(cls, "get_last_lr") and not name.startswith("_")
    }
    assert found - {"LRScheduler"} == set(SCHEDULERS)


@distributed(1, 3)
@pytest.mark.parametrize("cls", [SGD, AdamW], ids=["SGD", "AdamW"])
def test_every_scheduler_gives_the_same_parameters_as_with_the_plain_class(
    world: World, cls: type[Optimizer]
) -> None:
    for name, schedule in SCHEDULERS.items():
        options = {"momentum": 0.8} if cls is SGD else {}
        twins = Twins(world, Mlp(), cls, ddp=False, lr=0.05, **options)
        schedulers = [schedule(optimizer) for _, _, optimizer in twins.both()]
        rates = set()
        for step in range(6):
            twins.train(1)
            with warnings.catch_warnings():
                # torch 2.6 and its SequentialLR: with the plain class as well.
                warnings.filterwarnings("ignore", "The epoch parameter in", UserWarning)
                for scheduler in schedulers:
                    scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            plain, ours = twins.plain.param_groups[0], twins.optimizer.param_groups[0]
            for key in ("lr", "betas", "momentum", "initial_lr"):
                assert plain.get(key) == ours.get(key), (name, step, key)
            rates.add(ours["lr"])
        assert len(rates) > 1, f"{name} never changed the learning rate"
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
        assert schedulers[0].state_dict().keys() == schedulers[1].state_dict().keys()


@distributed(1, 2, 3)
def test_weight_averaging_gives_the_same_average(world: World) -> None:
    twins = Twins(world, Mlp(), SGD, lr=0.05)
    averages = [swa_utils.AveragedModel(model) for model, _, _ in twins.both()]
    moving = [
        swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        for model, _, _ in twins.both()
    ]
    schedulers = [
        swa_utils.SWALR(optimizer, swa_lr=0.005, anneal_epochs=3)
        for _, _, optimizer in twins.both()
    ]
    for _ in range(5):
        twins.train(1)
        for scheduler in schedulers:
            scheduler.step()
        for pair in (averages, moving):
            for average, (model, _, _) in zip(pair, twins.both(), strict=True):
                average.update_parameters(model)
    assert twins.optimizer.param_groups[0]["lr"] == twins.plain.param_groups[0]["lr"] == 0.005
    for plain, ours in (averages, moving):
        assert_same_parameters(ours.module, plain.module)
        assert not torch.equal(ours.module.first.weight, twins.model.first.weight)


@distributed(1, 2, 3)
def test_a_learning_rate_in_a_tensor_works_as_with_the_plain_class(world: World) -> None:
    for options in ({"foreach": False}, {"fused": True}):
        twins = Twins(world, Mlp(), AdamW, lr=torch.tensor(0.01), **options)
        schedulers = [lr_scheduler.ExponentialLR(o, 0.5) for _, _, o in twins.both()]
        for _ in range(3):
            twins.train(1)
            for scheduler in schedulers:
                scheduler.step()
        rates = [optimizer.param_groups[0]["lr"] for _, _, optimizer in twins.both()]
        assert isinstance(rates[1], torch.Tensor)
        assert torch.equal(rates[0], rates[1])


# ---------------------------------------- gradients ----------------------------------------


@distributed(1, 2, 3, 4)
@BUCKET_VIEW
def test_clipping_by_torch_is_bit_equal(world: World, bucket_view: bool) -> None:
    twins = Twins(world, Mlp(), AdamW, zero={"parameters_as_bucket_view": bucket_view}, lr=0.01)
    for _ in range(3):
        twins.backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e-3) for m, _, _ in twins.both()]
        assert torch.equal(*norms)
        assert norms[0] > 1e-3
        twins.step()
        twins.assert_equal()
    nn.utils.clip_grad_value_(twins.model.parameters(), 1e-6)
    nn.utils.clip_grad_value_(twins.plain_model.parameters(), 1e-6)
    twins.step()
    twins.assert_equal()


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_grad_scaler_skips_on_all_ranks_when_one_has_an_infinity(
    world: World, fused: bool
) -> None:
    twins = Twins(world, Mlp(), AdamW, lr=0.01, fused=fused, foreach=False)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in range(2)]
    scales = []
    for step in range(6):
        batch = twins.batch()
        if step == 2 and world.rank == world.size - 1:
            batch[0, 0] = torch.inf
        before = copy.deepcopy(twins.model)
        for scaler, (_, ddp, optimizer) in zip(scalers, twins.both(), strict=True):
            optimizer.zero_grad()
            scaler.scale(hooks(ddp, batch)).backward()
            if step == 4:  # the user may look at true gradients before the step
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        twins.steps += 1
        twins.assert_equal()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        scales.append(scalers[1].get_scale())
        moved = not torch.equal(before.first.weight, twins.model.first.weight)
        assert moved == (step != 2)
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0]
    assert_same_on_all_ranks(twins.model)


@distributed(1, 2, 3, 4)
@BUCKET_VIEW
def test_gradient_accumulation_with_no_sync_is_bit_equal(world: World, bucket_view: bool) -> None:
    twins = Twins(world, Mlp(), AdamW, zero={"parameters_as_bucket_view": bucket_view}, lr=0.01)
    for step in range(3):
        batches = [twins.model.batch((*seed_of(world, step), part + 1)) for part in range(3)]
        for _, ddp, optimizer in twins.both():
            optimizer.zero_grad()
            with ddp.no_sync():
                for batch in batches[:-1]:
                    (hooks(ddp, batch) / 3).backward()
            (hooks(ddp, batches[-1]) / 3).backward()
        twins.step()
        twins.assert_equal()
    twins.assert_moved()


@distributed(1, 2, 3)
@BUCKET_VIEW
def test_zero_grad_covers_all_parameters_either_way(world: World, bucket_view: bool) -> None:
    twins = Twins(world, TiedNet(), AdamW, zero={"parameters_as_bucket_view": bucket_view}, lr=0.01)
    for set_to_none in (True, False, True):
        twins.train(1)
        for _, _, optimizer in twins.both():
            optimizer.zero_grad(set_to_none=set_to_none)
        for param in twins.model.parameters():
            if set_to_none:
                assert param.grad is None
            else:
                assert param.grad is not None
                assert not param.grad.any()
        twins.step()  # with zero gradients the moments move on; with none nothing does
        twins.assert_equal()


@distributed(1, 2, 3)
def test_gradients_are_left_as_they_were(world: World) -> None:
    for cls in (AdamW, SGD):
        model = Mlp()
        optimizer = sharded(model, cls)
        model(model.batch((world.rank,))).backward()
        grads = [param.grad for param in model.parameters()]
        copies = [grad.clone() for grad in grads]
        optimizer.step()
        for param, grad, copied in zip(model.parameters(), grads, copies, strict=True):
            assert param.grad is grad
            assert torch.equal(grad, copied)


@distributed(1, 2, 3, 4)
@BUCKET_VIEW
def test_backward_through_a_graph_from_before_the_step_is_refused_by_torch(
    world: World, bucket_view: bool
) -> None:
    model = Mlp()
    optimizer = sharded(model, SGD, parameters_as_bucket_view=bucket_view)
    for _ in range(2):
        losses = [(param * param).sum() for param in model.parameters()]
        give_gradients(model)
        optimizer.step()
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


# ---------------------------------------- hooks ----------------------------------------


@distributed(1, 2, 3)
def test_step_hooks_fire_once_per_step_and_can_be_removed(world: World) -> None:
    model = Mlp()
    biases = [p for p in model.parameters() if p.ndim == 1]
    weights = [p for p in model.parameters() if p.ndim == 2]
    optimizer = ZeroRedundancyOptimizer(
        [{"params": weights}, {"params": biases, "optimizer_class": SGD, "lr": 0.1}],
        AdamW,
        lr=0.01,
    )
    calls: list[tuple[str, Any]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda who, *_: calls.append((name, who))

    handles = [
        register_optimizer_step_pre_hook(note("global pre")),
        optimizer.register_step_pre_hook(note("pre")),
        optimizer.register_step_post_hook(note("post")),
        register_optimizer_step_post_hook(note("global post")),
    ]
    try:
        give_gradients(model)
        for _ in range(2):
            optimizer.step()
            assert sorted(name for name, _ in calls) == ["global post", "global pre", "post", "pre"]
            assert all(who is optimizer for _, who in calls)
            before = [name.split()[-1] for name, _ in calls]
            assert before == ["pre", "pre", "post", "post"]
            calls.clear()
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()
    assert not calls


@distributed(1, 2)
def test_a_pre_hook_may_change_the_arguments_of_step(world: World) -> None:
    model = Mlp()
    optimizer = sharded(model)
    optimizer.register_step_pre_hook(lambda _, args, kwargs: ((*args, lambda: 42.0), kwargs))
    give_gradients(model)
    assert optimizer.step() == 42.0


# ---------------------------------------- closures and keywords ----------------------------


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_closure_runs_once_per_step_on_every_rank_and_its_loss_is_returned(
    world: World, implementation: dict[str, bool]
) -> None:
    model = nn.Linear(1, 1, bias=False)  # one element: all ranks but one own nothing
    plain_model = copy.deepcopy(model)
    optimizer = sharded(model, AdamW, **implementation)
    plain = AdamW(plain_model.parameters(), lr=0.01, **implementation)
    calls = 0
    for step in range(3):
        batch = noise(4, 1, seed=seed_of(world, step))

        def closure(model: nn.Module, optimizer: Optimizer) -> torch.Tensor:
            nonlocal calls
            calls += 1
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            dist.all_reduce(model.weight.grad)
            return loss

        loss = optimizer.step(lambda: closure(model, optimizer))
        expected = plain.step(lambda: closure(plain_model, plain))
        assert torch.equal(loss, expected)
        assert_same_parameters(model, plain_model)
    assert calls == 6
    losses: list[Any] = [None] * world.size
    dist.all_gather_object(losses, loss.item())
    assert len(set(losses)) == world.size, "every rank must get its own loss"


@distributed(1, 2, 3)
def test_a_closure_runs_once_for_two_classes_in_one_object(world: World) -> None:
    model = Mlp()
    groups = [
        {"params": model.first.parameters()},
        {"params": model.second.parameters(), "optimizer_class": SGD, "lr": 0.1},
    ]
    optimizer = ZeroRedundancyOptimizer(groups, AdamW, lr=0.01)
    before = copy.deepcopy(model)
    calls: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        calls.append(model(model.batch((world.rank,))))
        calls[-1].backward()
        return calls[-1]

    assert optimizer.step(closure=closure) is calls[0]
    assert len(calls) == 1
    assert not torch.equal(model.first.weight, before.first.weight)
    assert not torch.equal(model.second.weight, before.second.weight)


class NoClosure(Optimizer):
    """Its step takes nothing, as those of some third parties."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])


class Curious(NoClosure):
    """Notes what it is given, and invents an option."""

    @torch.no_grad()
    def step(self, closure: Any = None, *, kwarg: Any = None, factor: float = 1.0) -> Any:
        for group in self.param_groups:
            group["steps_seen"] = group.get("steps_seen", 0) + 1
            group["factor_seen"] = factor
            group["option_seen"] = group.get("my_option")
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * factor)
        if kwarg is not None:
            kwarg.append(5)
        return closure() if callable(closure) else closure


class Greedy(NoClosure):
    """Evaluates its closure twice, as those with a line search do."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
            return closure()
        return None


@distributed(1, 2, 3)
def test_a_class_whose_step_takes_no_closure_works(world: World) -> None:
    twins = Twins(world, Mlp(), NoClosure, lr=0.1)
    twins.train(3)
    twins.assert_moved()
    with pytest.raises(TypeError, match="closure"):
        twins.optimizer.step(lambda: 0.0)


@distributed(1, 2, 3)
def test_keywords_of_step_reach_the_class(world: World) -> None:
    twins = Twins(world, Mlp(), Curious, lr=0.1)
    for closure, factor in ((None, 0.5), (0, 2.0), (lambda: 7.0, 3.0)):
        twins.backward()
        given: list[int] = []
        results = [
            optimizer.step(closure, kwarg=given, factor=factor) for _, _, optimizer in twins.both()
        ]
        assert given == [5, 5]
        assert results[0] == results[1] == (closure() if callable(closure) else closure)
        assert twins.optimizer.param_groups[0]["factor_seen"] == factor
        twins.assert_equal()
    with pytest.raises(TypeError, match="unheard"):
        twins.optimizer.step(unheard=1)


@distributed(1, 2, 3)
def test_a_class_that_evaluates_its_closure_twice_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match=r"Greedy.*closure more than once"):
        sharded(Mlp(), Greedy)
    model = Mlp()
    optimizer = sharded(model, Greedy, partition="whole")
    give_gradients(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match="closure more than once"):
        optimizer.step(lambda: 0.0)


@distributed(1, 2, 3)
def test_options_travel_both_ways(world: World) -> None:
    model = Mlp()
    optimizer = sharded(model, Curious, lr=0.1)
    give_gradients(model)
    group = optimizer.param_groups[0]
    assert "steps_seen" not in group
    optimizer.step()
    assert group["steps_seen"] == 1  # invented by the class
    group["my_option"] = "hello"
    group["lr"] = 0.5
    before = model.first.bias.detach().clone()
    optimizer.step()
    assert group["option_seen"] == "hello"
    assert torch.equal(model.first.bias, before - 0.5)
    del group["lr"]
    optimizer.step()
    assert group["lr"] == 0.5
    assert group["steps_seen"] == 3
    assert torch.equal(model.first.bias, before - 0.5 - 0.5)


# ---------------------------------------- silence ----------------------------------------


@contextlib.contextmanager
def output(file: Any) -> Iterator[None]:
    """Everything that this process prints, also from C++, goes to `file`."""
    kept = [os.dup(1), os.dup(2)]
    try:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        yield
    finally:
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)


@distributed(1, 2, 3)
@BUCKET_VIEW
def test_training_prints_and_logs_nothing(world: World, bucket_view: bool) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        with tempfile.TemporaryFile() as file:
            with output(file):
                model = BranchNet(lambda _: (True, True))
                model.idle.requires_grad_(False)
                optimizer = sharded(model, parameters_as_bucket_view=bucket_view)
                for step in range(3):
                    model.idle.requires_grad_(step == 1)
                    optimizer.zero_grad()
                    hooks(model, model.batch((world.rank, step))).backward()
                    optimizer.step()
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
                optimizer.step()
                optimizer.consolidate_state_dict()
                copy.deepcopy(optimizer).step()
                sharded(Mlp(), Curious)  # probed
            file.seek(0)
            assert file.read() == b""
    finally:
        logging.getLogger().removeHandler(handler)
    assert not records, [record.getMessage() for record in records]


# ---------------------------------------- parameters and gradients of all kinds


def on_all_ranks(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


@distributed(1, 2, 3)
@pytest.mark.parametrize("cls", [SGD, Adam])
def test_a_parameter_unfrozen_before_a_group_is_added_trains(world: World, cls: Any) -> None:
    plain, ours = (params_of_shapes((6,), (5, 7), (4, 3)) for _ in range(2))
    for params in (plain, ours):
        params[1].requires_grad_(False)
    start = ours[1].detach().clone()
    a = cls(plain[:2], lr=0.1)
    b = ZeroRedundancyOptimizer(ours[:2], cls, lr=0.1)
    for params, opt in ((plain, a), (ours, b)):
        params[1].requires_grad_(True)
        opt.add_param_group({"params": [params[2]]})
    for step in range(3):
        give_equal_gradients(step, plain, ours)
        a.step()
        b.step()
        assert_equal_params(ours, plain)
    assert not torch.equal(ours[1], start)
    held = sum(p.numel() for group in b.optim.param_groups for p in group["params"])
    assert sum(on_all_ranks(held)) == 6 + 35 + 12
    b.consolidate_state_dict()
    if world.rank == 0:
        assert b.state_dict()["state"].keys() == a.state_dict()["state"].keys()


@distributed(1, 2, 3)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_of_another_dtype_step_as_in_the_plain_class(
    world: World, momentum: float
) -> None:
    def narrow() -> Parameter:
        param = Parameter(noise(130, seed=(1,), dtype=torch.float32).bfloat16())
        if not hasattr(param, "grad_dtype"):
            pytest.skip("this torch has no grad_dtype")
        param.grad_dtype = torch.float32
        return param

    plain, ours = narrow(), narrow()
    options = {"lr": 0.1, "momentum": momentum}
    a, b = SGD([plain], **options), ZeroRedundancyOptimizer([ours], SGD, **options)
    for step in range(3):
        for param in (plain, ours):
            param.grad = noise(130, seed=(step + 1, 2))
            assert param.grad.dtype is torch.float32
        a.step()
        b.step()
        assert torch.equal(plain, ours)


@distributed(1, 2)
def test_torchscript_modules_train(world: World) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated; the class of the warning depends on torch
        model = torch.jit.script(nn.Linear(3, 2))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    before = model.weight.clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight, before - 0.1)


@distributed(1, 2)
def test_a_frozen_parameter_with_a_gradient_set_by_hand_is_updated(world: World) -> None:
    plain, ours = (params_of_shapes((4,), (3, 2)) for _ in range(2))
    for params in (plain, ours):
        params[0].requires_grad_(False)
    reference = SGD(plain, lr=0.1)
    optimizer = ZeroRedundancyOptimizer(ours, SGD, lr=0.1)
    for step in range(3):
        give_equal_gradients(step, plain, ours)
        if step > 0:
            plain[0].grad, ours[0].grad = torch.ones(4), torch.ones(4)
        reference.step()
        optimizer.step()
        assert_equal_params(ours, plain)


# ------------------------------------------------------------------ attributes and methods


@distributed(2)
def test_a_users_attribute_survives_a_deepcopy(world: World) -> None:
    opt = ZeroRedundancyOptimizer([random_parameter(5)], torch.optim.SGD, lr=0.1)
    opt.my_hooks = [1, 2]  # type: ignore[attr-defined]
    assert copy.deepcopy(opt).my_hooks == [1, 2]


class WithExtras(torch.optim.SGD):
    flavour = "vanilla"

    def first_step(self) -> None:
        raise AssertionError("reached")


@distributed(2)
def test_methods_that_would_see_only_one_ranks_pieces_are_not_passed_on(world: World) -> None:
    opt = ZeroRedundancyOptimizer([random_parameter(5)], WithExtras, lr=0.1)
    assert opt.flavour == "vanilla"
    with pytest.raises(AttributeError, match=r"optim\.first_step"):
        opt.first_step()


# ------------------------------------------------------------------ options


@distributed(1, 2, 3)
@EVERY_FEED
def test_options_of_groups_flow_both_ways_in_every_step(world: World, hooks: str) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        weights = [p for p in model.parameters() if p.ndim > 1]
        biases = [p for p in model.parameters() if p.ndim == 1]
        return [{"params": weights}, {"params": biases, "lr": 0.25}]

    torch.manual_seed(0)
    zero = {"partition": "elementwise"}
    twins = AttachedTwins(world, Mlp(), Halving, hooks, groups=groups, zero=zero, lr=0.5)
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for optimizer in (twins.plain, twins.optimizer)
    ]
    for step in range(1, 5):
        for optimizer in (twins.plain, twins.optimizer):
            optimizer.param_groups[0]["mine"] = step
            if step == 3:
                optimizer.param_groups[1]["lr"] = 0.125
                optimizer.param_groups[1]["steps_seen"] = 10
        twins.train(1)
        pairs = zip(twins.optimizer.param_groups, twins.plain.param_groups, strict=True)
        for group, plain in pairs:
            options = {key: value for key, value in plain.items() if key != "params"}
            assert {key: group[key] for key in options} == options  # "steps_seen" came from inside
        assert twins.optimizer.optim.param_groups[0]["mine"] == step
        for scheduler in schedulers:
            scheduler.step()
