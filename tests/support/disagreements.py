"""Rows of the table: differences that are found at once, where something is made or changed."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from inside import RELEASE
from together import Found, Rank, Row, backward, small_model, stepped, vector
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW

import onecopy
from onecopy import GradScaler


def builds(**differing: tuple[Any, Any]) -> Callable[[Rank], Any]:
    """Arguments of the constructor: the usual ones, and those of the odd rank."""
    return lambda rank: rank.build(**{key: rank.either(*pair) for key, pair in differing.items()})


def two_lengths(rank: Rank) -> None:
    rank.build([vector(n) for n in rank.either((10, 12), (12, 10))])


def two_counts(rank: Rank) -> None:
    rank.build([vector() for _ in range(rank.either(2, 3))])


def two_names(rank: Rank) -> None:
    rank.build([(name, vector()) for name in rank.either("ab", "ba")])


def two_shapes(rank: Rank) -> None:
    rank.build([Parameter(torch.ones(rank.either((4, 5), (2, 10))))])


def two_dtypes(rank: Rank) -> None:
    rank.build([Parameter(torch.ones(4, dtype=rank.either(torch.float32, torch.float64)))])


def two_strides(rank: Rank) -> None:
    rank.build([Parameter(rank.either(torch.ones(4, 5), torch.ones(5, 4).t()))])


def two_groupings(rank: Rank) -> None:
    sizes = rank.either((1, 2), (2, 1))
    rank.build([{"params": [vector() for _ in range(size)]} for size in sizes])


def two_classes_in_a_group(rank: Rank) -> None:
    group = {"params": [vector()], "optimizer_class": rank.either(Adam, AdamW)}
    rank.build([{"params": [vector()]}, group])


def frozen_on_one(rank: Rank) -> None:
    rank.build([vector(), vector(requires_grad=not rank.is_odd)])


def checks_on_one(rank: Rank) -> None:
    if rank.is_odd:
        os.environ["ONECOPY_CHECK"] = "step"
    rank.build()


def another_release(rank: Rank) -> None:
    with mock.patch.object(*RELEASE, rank.either(onecopy.__version__, "0.0.0")):
        rank.build()


def another_torch(rank: Rank) -> None:
    release = torch.__version__
    try:
        torch.__version__ = rank.either(release, "1.2.3")
        rank.build()
    finally:
        torch.__version__ = release


BUILDING = (
    Row(
        "order", two_lengths, ("ODD: parameter 0: shape (12,)", "OTHERS: parameter 0: shape (10,)")
    ),
    Row("count", two_counts, ("ODD: group 0", "3 parameters", "2 parameters")),
    Row("names", two_names, ("ODD: parameter 0 (b)", "OTHERS: parameter 0 (a)")),
    Row("shape", two_shapes, ("ODD: parameter 0: shape (2, 10)", "(4, 5)")),
    Row("dtype", two_dtypes, ("ODD: parameter 0", "float64", "float32")),
    Row("strides", two_strides, ("(5, 1)", "(1, 4)", "ODD: parameter 0")),
    Row("groups", two_groupings, ("1 parameters", "2 parameters", "ODD: group 0")),
    Row("class", builds(cls=(Adam, AdamW)), ("Adam,", "ODD: group 0", "AdamW,")),
    Row("class of a group", two_classes_in_a_group, ("Adam,", "AdamW,")),
    Row("frozen", frozen_on_one, ("ODD: parameter 1", "frozen", "trainable")),
    Row("lr", builds(lr=(0.1, 0.2)), ("ODD: group 0: lr = 0.2", "OTHERS: group 0: lr = 0.1")),
    Row("momentum", builds(momentum=(0.5, 0.9)), ("momentum = 0.5", "momentum = 0.9")),
    Row("partition", builds(partition=("auto", "whole")), ("elementwise", "whole")),
    Row("bucket size", builds(bucket_mb=(25, 13)), ("bucket_mb=25", "bucket_mb=13")),
    Row(
        "bucket view",
        builds(parameters_as_bucket_view=(False, True)),
        ("parameters_as_bucket_view=True", "ODD"),
    ),
    Row(
        "master copies",
        builds(master_dtype=(None, torch.float32)),
        ("master_dtype=torch.float32", "ODD"),
    ),
    Row("check_every", builds(check_every=(None, 5)), ("check_every=5", "ODD")),
    Row("overlap", builds(overlap_with_ddp=(False, True)), ("overlap_with_ddp=True", "ODD")),
    Row("ONECOPY_CHECK", checks_on_one, ("ONECOPY_CHECK=step", "ODD")),
    Row("release of onecopy", another_release, ("onecopy 0.0.0", "ODD")),
    Row("release of torch", another_torch, ("torch 1.2.3", "ODD")),
    Row(
        "an option that does not exist",
        lambda rank: rank.build(**rank.either({}, {"no_such_option": 1})),
        ("ODD: raised TypeError", "no_such_option"),
        own="no_such_option",
    ),
    Row(
        "a class that cannot be sharded",
        lambda rank: rank.build(cls=rank.either(SGD, torch.optim.LBFGS)),
        ("ODD: raised ValueError", "LBFGS"),
        own="LBFGS",
    ),
)


# ------------------------------------------------------------------ later


def adds_other_shape(rank: Rank) -> None:
    rank.trained().add_param_group({"params": [vector(rank.either(5, 6))]})


def adds_other_option(rank: Rank) -> None:
    rank.trained().add_param_group({"params": [vector(5)], "lr": rank.either(0.1, 0.3)})


def adds_something_odd(rank: Rank) -> None:
    rank.trained().add_param_group(rank.either({"params": [vector(5)]}, [vector(5)]))


def attaches(
    options: Callable[[Rank], dict[str, Any]] = lambda _: {},
    wrap: Callable[[Rank, Any], Any] = lambda _, module: module,
) -> Callable[[Rank], None]:
    def script(rank: Rank) -> None:
        module = small_model()
        rank.build(module.parameters()).attach(wrap(rank, module), **options(rank))

    return script


def unfreezes_another(rank: Rank) -> None:
    params = [vector(), *(vector(requires_grad=False) for _ in range(2))]
    optimizer = rank.build(params)
    stepped(optimizer)
    params[rank.either(1, 2)].requires_grad_(True)
    stepped(optimizer)


def loads(change: Callable[[dict[str, Any]], Any]) -> Callable[[Rank], None]:
    """The odd rank loads a state dict in which something was changed."""

    def script(rank: Rank) -> None:
        optimizer = rank.build(cls=Adam)
        stepped(optimizer)
        plain = Adam([vector(10), vector(7)], lr=0.1)
        for param in plain.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        plain.step()
        state_dict = copy.deepcopy(plain.state_dict())
        if rank.is_odd:
            change(state_dict)
        optimizer.load_state_dict(state_dict)
        stepped(optimizer)

    return script


def saves_elsewhere(rank: Rank) -> None:
    rank.trained().save(rank.directory / rank.either("here", "there"))


def loads_from_elsewhere(rank: Rank) -> None:
    optimizer = rank.trained()
    optimizer.save(rank.directory / "here")
    optimizer.load(rank.directory / rank.either("here", "there"))


def loads_less_strictly(rank: Rank) -> None:
    optimizer = rank.trained()
    optimizer.save(rank.directory / "here")
    optimizer.load(rank.directory / "here", strict=not rank.is_odd)


def looks(
    usual: Callable[[Any, Any], Any], odd: Callable[[Any, Any], Any]
) -> Callable[[Rank], Any]:
    """At gradients, after a backward."""

    def script(rank: Rank) -> None:
        optimizer, module = rank.attached()
        backward(module, rank.world.rank)
        rank.either(usual, odd)(optimizer, module)

    return script


def scales_otherwise(rank: Rank) -> None:
    optimizer, module = rank.attached()
    scaler = GradScaler("cpu", init_scale=rank.either(8.0, 4.0))
    backward(module, rank.world.rank, scale=scaler.scale)
    scaler.step(optimizer)


def keeps_old_gradients(rank: Rank) -> None:
    optimizer, module = rank.attached()
    backward(module, rank.world.rank)
    if not rank.is_odd:
        optimizer.zero_grad()
    backward(module, rank.world.rank)
    optimizer.step()


def a_scheduler_between_checks(rank: Rank) -> None:
    optimizer = rank.build(check_every=3)
    if rank.is_odd:
        optimizer.param_groups[0]["lr"] = 0.3
    stepped(optimizer, times=3)


def bare_on_one(rank: Rank, module: Any) -> Any:
    ddp = DistributedDataParallel(module)
    return rank.either(ddp, module)


def lr_of(value: float) -> Callable[[dict[str, Any]], Any]:
    return lambda state_dict: state_dict["param_groups"][0].update(lr=value)


CHANGING = (
    Row("a group of another shape", adds_other_shape, ("ODD: parameter 2: shape (6,)", "adding")),
    Row("a group with another lr", adds_other_option, ("ODD: group 1: lr = 0.3", "OTHERS")),
    Row(
        "a group that is none",
        adds_something_odd,
        ("ODD: raised TypeError: a parameter group must be a dict",),
        own="a parameter group must be a dict",
    ),
    Row(
        "reduce_dtype",
        attaches(lambda rank: {"reduce_dtype": rank.either(None, torch.bfloat16)}),
        ("while attaching", "ODD: attach(Sequential, reduce_dtype=torch.bfloat16"),
    ),
    Row(
        "lazy_gather",
        attaches(lambda rank: {"lazy_gather": rank.is_odd}),
        ("ODD: attach(Sequential, reduce_dtype=None, lazy_gather=True)",),
    ),
    Row(
        "DDP or bare",
        attaches(wrap=bare_on_one),
        ("ODD: attach(Sequential", "OTHERS: attach(DistributedDataParallel"),
    ),
    Row(
        "a module of others' parameters",
        attaches(wrap=lambda rank, module: rank.either(module, small_model())),
        ("ODD: raised ValueError: the module has trainable parameters",),
        own="the module has trainable parameters",
    ),
    Row("unfreezing another", unfreezes_another, ("unfrozen", "parameter 1", "ODD", "OTHERS")),
    Row("options that are loaded", loads(lr_of(0.7)), ("ODD: group 0: lr = 0.7", "was loaded")),
    Row(
        "state that is loaded",
        loads(lambda saved: saved["state"][0]["exp_avg"].mul_(2)),
        ("ODD: parameter 0: loaded exp_avg of shape (10,)", "OTHERS: parameter 0: loaded exp_avg"),
    ),
    Row(
        "a step counter that is loaded",
        loads(lambda saved: saved["state"][1]["step"].add_(1)),
        ("ODD: parameter 1: loaded step of shape (): 2", "OTHERS: parameter 1: loaded step"),
    ),
    Row(
        "state that is loaded on the others only",
        loads(lambda saved: saved["state"].pop(0)),
        ("ODD: parameter 1: loaded", "OTHERS: parameter 0: loaded"),
    ),
    Row(
        "target of a consolidation",
        lambda rank: rank.trained().consolidate_state_dict(to=rank.either(0, 1)),
        ("ODD: to rank 1", "OTHERS: to rank 0"),
    ),
    Row(
        "a target that does not exist",
        lambda rank: rank.trained().consolidate_state_dict(to=rank.either(0, 9)),
        ("ODD: raised ValueError: to must be a rank",),
        own="to must be a rank",
    ),
    Row("path of a save", saves_elsewhere, ("there", "here", "ODD: to", "OTHERS: to")),
    Row("path of a load", loads_from_elsewhere, ("there", "here", "ODD: from", "OTHERS: from")),
    Row("strictness of a load", loads_less_strictly, ("ODD: strict=False", "OTHERS: strict=True")),
    Row(
        "max_norm",
        looks(lambda o, _: o.clip_grad_norm_(1.0), lambda o, _: o.clip_grad_norm_(2.0)),
        ("ODD: clip_grad_norm_(2.0", "OTHERS: clip_grad_norm_(1.0"),
    ),
    Row(
        "type of a norm",
        looks(lambda o, _: o.grad_norm(2), lambda o, _: o.grad_norm(float("inf"))),
        ("ODD: grad_norm(inf", "OTHERS: grad_norm(2.0"),
    ),
    Row(
        "clipping and looking",
        looks(lambda o, _: o.clip_grad_norm_(1.0), lambda o, _: o.grad_norm()),
        ("ODD: grad_norm(2.0", "OTHERS: clip_grad_norm_(1.0"),
    ),
    Row(
        "gradient of another parameter",
        looks(lambda o, m: o.full_grad(m[0].bias), lambda o, m: o.full_grad(m[1].bias)),
        ("ODD: full_grad of parameter (3", "OTHERS: full_grad of parameter (1"),
    ),
    Row("scale of the loss", scales_otherwise, ("ODD: GradScaler.unscale_(0.25", "(0.125")),
    Row(
        "zero_grad on the others only",
        keeps_old_gradients,
        ("ODD: with 2 backwards since the last step or zero_grad()", "OTHERS: with 1 backward"),
    ),
    Row(
        "a scheduler on one rank, at the next check_every",
        a_scheduler_between_checks,
        ("ODD: group 0: lr = 0.3", "OTHERS: group 0: lr = 0.1"),
    ),
)

assert all(row.found is Found.AT_ONCE for row in (*BUILDING, *CHANGING))
