"""Mistakes that used to train on, or to raise an error that named something else."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import World, distributed
from inside import SEARCH_FOR_MODULES, is_attached, step_in_backward
from together import FOLLOWS_SET_TIMEOUT, set_timeout
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import Linear, Parameter, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from onecopy import RanksDisagree, ZeroRedundancyOptimizer
from onecopy.sharding.sharded_params import ModuleNames, ModuleWatch

# The rest of the suite ignores the warning of gradients that were not averaged.
pytestmark = pytest.mark.filterwarnings("error:the gradient of")


Groups = Callable[[bool], Any]  # what a rank passes, if it is the odd one or not


def same_on_all_ranks(error: BaseException | None) -> str:
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, f"{type(error).__name__}: {error}")
    assert len(set(texts)) == 1, texts
    return str(error)


def refused(action: Callable[[], Any], *words: str, kind: type[Exception] = RanksDisagree) -> None:
    """All ranks raise the same error, which says these words."""
    with pytest.raises(kind) as caught:
        action()
    text = same_on_all_ranks(caught.value)
    missing = [each for each in words if each not in text]
    assert not missing, (missing, text)


def build(params: Any, cls: Any = SGD, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, cls, lr=0.1, **options)


def twins(seed: int = 0) -> Sequential:
    """Two layers of the same shapes."""
    torch.manual_seed(seed)
    return Sequential(Linear(4, 4), Linear(4, 4))


def swapped(items: Sequence[Any], first: int, second: int) -> list[Any]:
    found = list(items)
    found[first], found[second] = found[second], found[first]
    return found


# ------------------------------------------------------------------ the order of parameters


@distributed(2, 3, 4)
def test_parameters_in_another_order_are_refused_with_both_names(world: World) -> None:
    odd = world.size - 1
    is_odd = world.rank == odd
    usual = f"rank{'s 0-' + str(odd - 1) if odd > 1 else ' 0'}"

    def in_order(params: Any) -> list[Any]:
        return swapped(list(params), 0, 2) if is_odd else list(params)

    names = (f"rank {odd}: parameter 0 is 1.weight", f"{usual}: parameter 0 is 0.weight")
    # Values play no part if there are names: here they differ on all ranks, before DDP.
    module = twins(seed=world.rank)
    refused(lambda: build(in_order(module.parameters())), "same order on all ranks", *names)
    # Wrappers do not count, and may be on one rank only. Parameters that are frozen, to be unfrozen
    # later, are compared like others.
    for layer in module:
        layer.weight.requires_grad_(False)
    wrapped = (
        torch.compile(module, backend="eager") if is_odd else DistributedDataParallelLike(module)
    )
    refused(lambda: build(in_order(wrapped.parameters())), *names)
    # Another parameter of the same shape in its place, no order of which is the same.
    three = Sequential(Linear(4, 4), Linear(4, 4), Linear(4, 4))
    chosen = [three[0].weight, three[2].weight if is_odd else three[1].weight]
    refused(lambda: build(chosen), f"rank {odd}: parameter 1 is 2.weight", "is 1.weight")
    # A group that is added.
    optimizer = build(twins().parameters())
    before = list(optimizer.param_groups)
    added = {"params": in_order(module.parameters())}
    refused(lambda: optimizer.add_param_group(added), f"rank {odd}: parameter 4 is ")
    assert optimizer.param_groups == before
    optimizer.add_param_group({"params": module.parameters()})
    # Without a module: the values.
    vectors = [Parameter(torch.full((5,), float(value))) for value in (1, 2, 3, 0, 0)]
    refused(lambda: build(in_order(vectors)), f"rank {odd}: parameter 0 has the values [3, ...]")
    # Two modules of one class have no common name for their parameters.
    torch.manual_seed(0)
    one, two = Linear(4, 4), Linear(4, 4)
    pair = [two, one] if is_odd else [one, two]
    params = [param for layer in pair for param in layer.parameters()]
    refused(lambda: build(params), f"rank {odd}: parameter 0 has the values")
    assert len(build([*one.parameters(), *two.parameters()]).param_groups[0]["params"]) == 4


class DistributedDataParallelLike(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@distributed(2, 3)
def test_ranks_with_the_same_order_are_not_suspected(world: World) -> None:
    first = world.rank == 0
    # Values that differ, before they are broadcast; equal ones; none.
    build([Parameter(torch.randn(5) + world.rank) for _ in range(3)])
    build([Parameter(torch.zeros(5)) for _ in range(3)])
    build([Parameter(torch.zeros(0)), Parameter(torch.zeros(0)), Parameter(torch.ones(()))])
    build([Parameter(torch.zeros(5) + (i and world.rank)) for i in range(3)])
    build([torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.bfloat16)])
    # Values in another order, but the modules say that all is well.
    module = twins()
    if first:
        with torch.no_grad():
            for one, two in zip(module[0].parameters(), module[1].parameters(), strict=True):
                one.copy_(two.clone()), two.copy_(one.clone())
    build(module.parameters())
    # Another container for the same layers, on one rank, and a wrapper inside the model.
    also = Sequential(module[1], module[0]) if first else None
    build(module.parameters())
    layer = Linear(4, 4)
    measured = Sequential(nn.Identity(), layer) if first else Sequential(layer)
    build(measured.parameters())
    del also
    # A weight that is tied, a parameter that belongs to nobody, a module that contains itself.
    tied = twins()
    tied[1].weight = tied[0].weight
    alone = Parameter(torch.ones(7))
    build([*tied.parameters(), alone])
    tied[0].owner = [tied]
    looping = twins()
    looping[0].add_module("above", looping)
    build([looping[0].weight, looping[1].weight])
    del looping[0].above


class OwnNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(3))

    def named_parameters(self) -> Any:  # without the arguments of the base class
        yield "weight", self.weight


class NoChildren(nn.Module):
    def children(self) -> Any:
        raise NotImplementedError("no children here")


@distributed(2, 3)
def test_methods_that_modules_override_do_not_fail_the_construction(world: World) -> None:
    own = OwnNames()
    unrelated = NoChildren() if world.rank == 0 else None
    module = Sequential(Linear(4, 4), own)
    optimizer = build([*module[0].parameters(), own.weight])
    optimizer.add_param_group({"params": twins().parameters()})
    optimizer = build(own.named_parameters())
    optimizer.attach(own)
    (own.weight.sum() * (world.rank + 1)).backward()
    optimizer.step()
    del unrelated


@distributed(2, 3, pg_timeout=20)
def test_what_the_search_for_modules_raises_is_raised_on_all_ranks(world: World) -> None:
    module, more = twins(), twins()
    optimizer = build(module.parameters())
    before = list(optimizer.param_groups)
    error = IndexError("a module of rank 1")
    broken = mock.patch.object(*SEARCH_FOR_MODULES, side_effect=error)
    with broken if world.rank == 1 else contextlib.nullcontext():
        for action in (
            lambda: build(module.parameters()),
            lambda: optimizer.add_param_group({"params": more.parameters()}),
        ):
            with pytest.raises(IndexError, match="a module of rank 1"):
                action()
    assert optimizer.param_groups == before
    optimizer.add_param_group({"params": more.parameters()})


def names_found(params: Any) -> ModuleNames:
    from onecopy.planning.param_groups import Entry

    return ModuleWatch([Entry(param, "", 0) for param in params]).names


def test_names_come_from_the_innermost_module_that_holds_all() -> None:
    module = twins()
    expected = ("0.weight", "0.bias", "1.weight", "1.bias")
    assert names_found(module.parameters()).of == expected
    outer = DistributedDataParallelLike(Sequential(module))
    assert names_found(module.parameters()) == ModuleNames(expected, tuple(sorted(expected)))
    other = Linear(4, 4)
    both = names_found([*module.parameters(), *other.parameters()])
    assert (both.of[0], both.of[4]) == ("Sequential.0.weight", "Linear.weight")
    again = Sequential(module[1], module[0])
    assert names_found(module.parameters()).of == ("",) * 4  # which of both?
    assert names_found(module[0].parameters()).of == ("weight", "bias")
    assert names_found([Parameter(torch.ones(3)), module[0].bias]).of == ("", "bias")
    assert names_found([]) == ModuleNames((), ())
    del outer, again


class Renamed(nn.Module):
    """Names its layers as it is told."""

    def __init__(self, module: Sequential, *names: str) -> None:
        super().__init__()
        for name, layer in zip(names, module, strict=True):
            self.add_module(name, layer)


@distributed(2, 3)
def test_attach_and_checkpoints_compare_the_names_that_the_module_gives(
    world: World, tmp_path: Path
) -> None:
    is_odd = world.rank == 1
    module = twins()
    optimizer = build(module.parameters(), Adam)
    odd = Renamed(module, *("ba" if is_odd else "ab"))
    words = "rank 1: parameter 0 is called b.weight", "parameter 0 is called a.weight"
    refused(lambda: optimizer.attach(odd), "while attaching", *words)
    assert not is_attached(optimizer)
    refused(lambda: optimizer.save(tmp_path / "odd", odd), "while saving", *words)
    assert not (tmp_path / "odd").exists() or not list((tmp_path / "odd").glob("*.distcp"))
    refused(lambda: optimizer.sharded(odd).state_dict(), *words)
    right = Renamed(module, "a", "b")
    optimizer.save(tmp_path / "right", right)
    refused(lambda: optimizer.load(tmp_path / "right", odd), "while loading", *words)
    assert optimizer.load(tmp_path / "right", right)
    optimizer.attach(right)
    optimizer.detach()


# ------------------------------------------------------------------ gradients never averaged


def differing(params: Any, world: World) -> None:
    for param in params:
        param.grad = torch.full_like(param, 1.0 + world.rank)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def warned(*words: str) -> Iterator[None]:
    with pytest.warns(UserWarning, match="was not averaged") as caught:
        yield
    (one,) = caught
    same_on_all_ranks(one.message)
    assert not [each for each in words if each not in str(one.message)], str(one.message)
    assert one.filename == __file__  # the line that has called step()


FORGOTTEN = (
    "the gradient of parameter 0 (0.weight) is not the same on all ranks, so it was not averaged",
    "rank 0: parameter 0: a gradient, fingerprint",
    "DistributedDataParallel(model)",
    "optimizer.attach(model)",
)


def trained(model: nn.Module, optimizer: Any, world: World, steps: int = 1) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(
            3, 4, generator=torch.Generator().manual_seed(10 * number + world.rank)
        )
        model(inputs).square().sum().backward()
        optimizer.step()


@distributed(2, 3, 4)
def test_gradients_that_were_never_averaged_are_told_once(world: World) -> None:
    module = twins()
    optimizer = build(module.parameters())
    with silent():
        optimizer.step()  # without gradients there is nothing to tell
        optimizer.zero_grad(set_to_none=False)
        for param in module.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
    with warned(*FORGOTTEN):
        trained(module, optimizer, world)
    with silent():
        trained(module, optimizer, world, steps=2)
    # Only no_sync; attached before, so that nothing was looked at then.
    module = twins()
    ddp = DistributedDataParallel(module)
    optimizer = build(module.parameters())
    optimizer.attach(ddp)
    with silent():
        trained(ddp, optimizer, world, steps=2)
    optimizer.detach()
    with warned(*FORGOTTEN), ddp.no_sync():
        trained(ddp, optimizer, world)
    # A closure; a gradient that one rank has, and one that none has.
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(3)), Parameter(torch.ones(2))]
    optimizer = build(params)

    def closure() -> float:
        params[0].grad = torch.full((3,), float("nan"))
        params[1].grad = torch.ones(3) if world.rank == 1 else None
        return 0.0

    with warned(
        "parameter 1 is not", "rank 1: parameter 1: a gradient", "parameter 1: no gradient"
    ):
        optimizer.step(closure)


@distributed(2, 3)
def test_gradients_of_parameters_that_came_later_are_compared_again(world: World) -> None:
    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Linear(4, 4), Linear(4, 4))

    # DDP was built while a layer was frozen, and does not average what is unfrozen then.
    model = layers()
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    optimizer = build(model.parameters())
    with silent():
        trained(ddp, optimizer, world, steps=2)
    model[0].requires_grad_(True)
    with warned("parameter 0 (0.weight) is not the same"):
        trained(ddp, optimizer, world)
    # A layer outside of DDP.
    model = layers()
    ddp = DistributedDataParallel(model[0])
    optimizer = build(model[0].parameters())
    with silent():
        trained(ddp, optimizer, world, steps=2)
    optimizer.add_param_group({"params": model[1].parameters()})
    with warned("parameter 2 (1.weight) is not the same"):
        trained(nn.Sequential(ddp, model[1]), optimizer, world)
    # The bare module, after it was attached.
    model = layers()
    optimizer = build(model.parameters())
    with silent():
        trained(DistributedDataParallel(model), optimizer, world)
        optimizer.attach(model)
        trained(model, optimizer, world)
        optimizer.detach()
    with warned("parameter 0 (0.weight) is not the same"):
        trained(model, optimizer, world)


@distributed(2, 3)
def test_averaged_gradients_in_another_order_are_parameters_in_another_order(world: World) -> None:
    """Which construction cannot tell: two models of one class, from other seeds on each rank."""
    torch.manual_seed(world.rank)
    models = [Linear(4, 4), Linear(4, 4)]
    is_odd = world.rank == 1
    ordered = [*models[is_odd].parameters(), *models[not is_odd].parameters()]
    optimizer = build(ordered)
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(world.rank))
    for number, model in enumerate(models):
        (model(inputs) * (1 + number)).square().sum().backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
    refused(
        optimizer.step,
        "the gradient of parameter 0",
        "is that of another parameter on some ranks",
        "Pass the parameters in the same order on all ranks",
    )


@distributed(2)
def test_equal_experts_of_which_each_rank_uses_another_are_in_the_same_order(world: World) -> None:
    experts = nn.ModuleList(Linear(4, 4) for _ in range(2))
    for param in experts.parameters():
        nn.init.ones_(param)
    for is_zero in (False, True):
        optimizer = build(experts.parameters())
        for param in experts.parameters():
            param.grad = torch.zeros_like(param) if is_zero else None
        experts[world.rank](torch.ones(3, 4)).sum().backward()
        with warned("parameter 0 (0.weight) is not the same"):
            optimizer.step()


@distributed(2, 3)
def test_gradients_that_differ_in_their_places_only_were_not_averaged(world: World) -> None:
    """As those of an embedding, where each rank has seen other tokens."""
    for is_sparse in (False, True):
        table = nn.Embedding(8, 4, sparse=is_sparse)
        other = Linear(4, 4)
        params = [*table.parameters(), *other.parameters()]
        optimizer = build([{"params": params, "partition": "whole"}])
        if is_sparse:  # an empty one says nothing
            with silent():
                table.weight.grad = torch.zeros(8, 4).to_sparse(1)
                optimizer.step()
                optimizer.zero_grad()
        table(torch.tensor([world.rank, world.rank])).sum().backward()
        kind = "a sparse gradient" if is_sparse else "a gradient"
        with warned("parameter 0", f"rank 0: parameter 0: {kind}, fingerprint"):
            optimizer.step()
    # The same rows of a sparse gradient, with other values; then the same, in another order.
    for check in ("", "step"):
        os.environ["ONECOPY_CHECK"] = check
        table = nn.Embedding(8, 4, sparse=True)
        optimizer = build([{"params": table.parameters(), "partition": "whole"}])
        tokens = torch.tensor([1, 5, 1] if world.rank else [5, 1, 1])
        scale = 1.0 + world.rank
        table(tokens).sum().mul(scale).backward()
        if check:
            refused(optimizer.step, "(weight) is not the same on all ranks", "a sparse gradient")
        else:
            with warned("a sparse gradient"):
                optimizer.step()
        optimizer = build([{"params": table.parameters(), "partition": "whole"}])
        with silent():
            for _ in range(2):
                optimizer.zero_grad()
                table(tokens).sum().backward()
                optimizer.step()


@distributed(2)
def test_gradients_that_are_zero_do_not_end_the_comparison(world: World) -> None:
    params = [Parameter(torch.ones(3, 3)), Parameter(torch.ones(2))]
    optimizer = build(params)
    with silent():
        for value in (0.0, -0.0):
            for param in params:
                param.grad = torch.full_like(param, value)
            optimizer.step()
    differing(params, world)
    with warned("parameter 0 is not the same"):
        optimizer.step()


@distributed(2)
def test_the_warning_names_the_line_of_the_user_through_what_wraps_step(world: World) -> None:
    for wrap in ("scheduler", "hook", "profiler"):
        module = twins()
        optimizer = build(module.parameters())
        if wrap == "scheduler":
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        elif wrap == "hook":
            optimizer.register_step_pre_hook(lambda *_: None)
        around = torch.profiler.profile() if wrap == "profiler" else contextlib.nullcontext()
        with warned(*FORGOTTEN), around:
            trained(module, optimizer, world)


@distributed(1, 2, 3)
def test_gradients_that_were_averaged_raise_no_alarm(world: World) -> None:
    for check in ("", "step"):
        os.environ["ONECOPY_CHECK"] = check
        with silent():
            module = twins()
            module[1].bias.requires_grad_(False)
            ddp = DistributedDataParallel(module, find_unused_parameters=True)
            trained(ddp, build(module.parameters()), world, steps=2)
            # Averaged by hand, in another layout on one rank, with a NaN, and sparse.
            weights = Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
            table = Parameter(torch.ones(5, 2))
            params = [weights, Parameter(torch.ones(3, 3).t()), Parameter(torch.ones(())), table]
            optimizer = build([{"params": params, "partition": "whole"}])
            for _ in range(2):
                for param in params:
                    grad = torch.randn(param.shape) * (world.rank + 1)
                    grad.flatten()[0] = float("nan")
                    dist.all_reduce(grad)
                    is_last = world.rank == world.size - 1 and grad.dim() == 4
                    layout = torch.channels_last if is_last else torch.contiguous_format
                    param.grad = grad.contiguous(memory_format=layout)
                table.grad = torch.ones(5, 2).to_sparse(1)
                optimizer.step()
            # Alone, inside Join, and inside backward, nobody looks.
            params = [Parameter(torch.ones(3))]
            optimizer = build(params)
            with Join([optimizer]):
                differing(params, world)
                optimizer.step()
            module = DistributedDataParallel(twins())
            optimizer = build(module.parameters(), overlap_with_ddp=True)
            differing(module.parameters(), world)
            step_in_backward(optimizer)
            if world.size == 1:
                differing(params, world)
                build(params).step()


@distributed(2, 3, 4)
def test_with_the_check_on_gradients_that_differ_are_refused_in_any_step(world: World) -> None:
    os.environ["ONECOPY_CHECK"] = "step"
    module = twins()
    ddp = DistributedDataParallel(module)
    optimizer = build(module.parameters(), Adam)
    trained(ddp, optimizer, world)
    before = [param.detach().clone() for param in module.parameters()]
    for _ in range(2):
        with ddp.no_sync():
            refused(lambda: trained(ddp, optimizer, world), *FORGOTTEN)
    assert all(map(torch.equal, before, module.parameters()))
    trained(ddp, optimizer, world)
    assert not any(map(torch.equal, before, module.parameters()))


# ------------------------------------------------------------------ attached


def steps_alone(optimizer: Any, module: nn.Module, is_odd: bool) -> None:
    for _ in range(3):
        module(torch.ones(2, 4)).sum().backward()
        if is_odd:
            optimizer.step()
    optimizer.step()


@distributed(2, 3, fresh=True, pg_timeout=60 if FOLLOWS_SET_TIMEOUT else 8)
def test_a_step_on_one_rank_alone_is_blamed_on_that_rank(world: World) -> None:
    stepping = 3 - world.size
    module = twins()
    optimizer = build(module.parameters())
    optimizer.attach(module)
    trained(module, optimizer, world)
    dist.barrier()
    set_timeout(timedelta(seconds=3), dist.group.WORLD)
    with pytest.raises(RuntimeError) as caught:
        steps_alone(optimizer, module, world.rank == stepping)
    text = str(caught.value)
    assert f"a collective failed: rank {stepping} did something else than" in text, text
    assert '("in step 2, attached, after 1 backward", not "in backward 2 after step 1")' in text
    assert "ONECOPY_CHECK=step" in text


@distributed(1, 2, 3)
def test_gradients_that_were_not_reduced_have_three_causes(world: World) -> None:
    def refused_here(action: Callable[[], Any], *words: str) -> None:
        refused(action, *words, kind=RuntimeError)

    module = twins()
    optimizer = build(module.parameters())
    optimizer.attach(module)
    ddp = DistributedDataParallel(module)
    name = "parameter 0 (0.weight) has a gradient that "
    inside = (f"{name}DistributedDataParallel averaged", "optimizer.attach(ddp)")
    refused_here(lambda: trained(ddp, optimizer, world), *inside)
    # The DDP is still there, and is not used.
    trained(module, optimizer, world)
    by_hand = (f"{name}no backward since attach(...) has computed", "written by hand")

    def writes() -> None:
        module[0].weight.grad = torch.ones(4, 4)
        optimizer.step()

    refused_here(writes, *by_hand)
    module[0].weight.grad = None
    no_sync = (f"{name}was not averaged, because the last backward was inside no_sync()",)

    def accumulates(context: Any) -> None:
        with context:
            trained(optimizer_module, optimizer, world)

    optimizer_module = module
    refused_here(lambda: accumulates(optimizer.no_sync()), *no_sync)
    # One outside comes first: what the last one left is not averaged either.
    optimizer.zero_grad()
    module(torch.ones(2, 4)).sum().backward()
    with optimizer.no_sync():
        module(torch.ones(2, 4)).sum().backward()
    refused_here(optimizer.step, *no_sync)
    optimizer.zero_grad()
    refused_here(writes, *by_hand)
    module[0].weight.grad = None
    trained(module, optimizer, world)
    optimizer.detach()
    # The same, attached to DDP.
    optimizer.attach(ddp)
    optimizer_module = ddp
    trained(ddp, optimizer, world)
    refused_here(writes, *by_hand)
    optimizer.zero_grad()
    refused_here(lambda: accumulates(ddp.no_sync()), *no_sync)
    optimizer.zero_grad()
    trained(ddp, optimizer, world)
    optimizer.detach()
    # DDP knows none of the parameters that are trained.
    module = twins()
    module[0].requires_grad_(False)
    ddp = DistributedDataParallel(module)
    optimizer = build(module.parameters())
    optimizer.attach(ddp)
    trained(ddp, optimizer, world)
    module[0].requires_grad_(True)
    trained(ddp, optimizer, world)
    module[1].requires_grad_(False)
    module[1].weight.grad = None
    refused_here(lambda: trained(ddp, optimizer, world), f"{name}was not averaged", "DDP was built")


@distributed(1, 2, 3)
def test_gradients_of_a_ddp_built_for_others_and_from_before_attach(world: World) -> None:
    def refused_here(action: Callable[[], Any], *words: str) -> None:
        refused(action, *words, kind=RuntimeError)

    # DDP was built for layer 0, and only layer 1 is trained when the optimizer is attached.
    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        module = twins()
        module[1].requires_grad_(False)
        ddp = DistributedDataParallel(module, **options)
        module[0].requires_grad_(False), module[1].requires_grad_(True)
        optimizer = build(module.parameters())
        optimizer.attach(ddp)
        not_in_ddp = "parameter 2 (1.weight) has a gradient that was not averaged, because none of"
        refused_here(lambda: trained(ddp, optimizer, world), not_in_ddp, "DDP was built with")
        optimizer.detach()
    # A gradient is left from a backward before attach().
    module = twins()
    optimizer = build(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    optimizer.attach(module)
    since = "(0.weight) has a gradient that no backward since attach(...) has computed"
    refused_here(optimizer.step, since, "written by hand, or is left from before attach(...)")
    optimizer.zero_grad()
    trained(module, optimizer, world)


@distributed(1, 2, 3)
def test_a_model_that_was_converted_before_attach_is_refused_there(world: World) -> None:
    module = twins()
    optimizer = build(module.parameters())
    module.to(torch.float64)
    converted = "parameter 0 (0.weight) has changed since the optimizer was built, from torch.float"
    if world.size == 1:  # nothing is cut: it is followed
        optimizer.attach(module)
        module(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return
    refused(lambda: optimizer.attach(module), converted, "before you build", kind=RuntimeError)
    # On one rank only, all are told.
    module = twins()
    optimizer = build(module.parameters())
    if world.rank == 1:
        module[1].bfloat16()
    with pytest.raises(RuntimeError, match=r"parameter 2 \(1\.weight\) has changed since"):
        optimizer.attach(module)
    module.float()
    optimizer.attach(module)
    trained(module, optimizer, world)
