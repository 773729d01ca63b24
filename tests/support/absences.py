"""Rows of the table: ranks that are not where the others are.

Without a comparison in every step that is found when the timeout of the group has passed, from what
the ranks have noted; with `ONECOPY_CHECK=step` at once, if the odd rank does come at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from together import Found, Rank, Row, backward, small_model, stepped, vector
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from onecopy import GradScaler, ZeroRedundancyOptimizer

Do = Callable[[ZeroRedundancyOptimizer, Rank], Any]


def drop_in(usual: Do, odd: Do, **options: Any) -> Callable[[Rank], None]:
    """After a step in drop-in mode, the odd rank does something else than the others."""

    def script(rank: Rank) -> None:
        optimizer = rank.trained(**options)
        rank.part()
        rank.either(usual, odd)(optimizer, rank)

    return script


def steps(optimizer: ZeroRedundancyOptimizer, _: Rank) -> None:
    stepped(optimizer)


def consolidates(optimizer: ZeroRedundancyOptimizer, _: Rank) -> None:
    optimizer.consolidate_state_dict()


def compares(optimizer: ZeroRedundancyOptimizer, _: Rank) -> None:
    optimizer.assert_replicas_equal()


def saves(optimizer: ZeroRedundancyOptimizer, rank: Rank) -> None:
    optimizer.save(rank.directory / "here")


def reads(optimizer: ZeroRedundancyOptimizer, rank: Rank) -> None:
    optimizer.load(rank.directory / "here")


def adds(optimizer: ZeroRedundancyOptimizer, _: Rank) -> None:
    optimizer.add_param_group({"params": [vector(5)]})


def comes_late(optimizer: ZeroRedundancyOptimizer, rank: Rank) -> None:
    rank.stay_away()
    stepped(optimizer)


def builds_another(_: ZeroRedundancyOptimizer, rank: Rank) -> None:
    rank.build([vector()])


def joins(optimizer: ZeroRedundancyOptimizer, _: Rank) -> None:
    with Join([optimizer]):
        stepped(optimizer)


def fails_in_the_closure(optimizer: ZeroRedundancyOptimizer, _: Rank) -> None:
    def closure() -> float:
        raise ZeroDivisionError("the loss has no terms")

    optimizer.step(closure)


def has_a_sparse_gradient(optimizer: ZeroRedundancyOptimizer, _: Rank) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param).to_sparse()
    optimizer.step()


def fails_in_forward(_: ZeroRedundancyOptimizer, __: Rank) -> None:
    raise IndexError("token 50257 is out of range")


def unfreezes_alone(rank: Rank) -> None:
    frozen = vector(requires_grad=False)
    optimizer = rank.trained(params=[vector(), frozen])
    rank.part()
    frozen.requires_grad_(rank.is_odd)
    stepped(optimizer)


def loads_alone(rank: Rank) -> None:
    optimizer = rank.trained(cls=Adam)
    rank.part()
    if rank.is_odd:
        plain = Adam([vector(10), vector(7)], lr=0.1)
        optimizer.load_state_dict(plain.state_dict())
    stepped(optimizer)


def attaches_alone(rank: Rank) -> None:
    module = small_model()
    optimizer = rank.trained(params=module.parameters())
    rank.part()
    if rank.is_odd:
        optimizer.attach(module)
    stepped(optimizer)


def attached(usual: Callable[..., Any], odd: Callable[..., Any]) -> Callable[[Rank], None]:
    """After a step in attached mode, the odd rank does something else than the others."""

    def script(rank: Rank) -> None:
        optimizer, module = rank.attached()
        rank.part()
        rank.either(usual, odd)(optimizer, module, rank)

    return script


def iterates(optimizer: ZeroRedundancyOptimizer, module: Any, rank: Rank) -> None:
    backward(module, rank.world.rank)
    optimizer.step()


def accumulates(optimizer: ZeroRedundancyOptimizer, module: Any, rank: Rank) -> None:
    backward(module, rank.world.rank)
    iterates(optimizer, module, rank)


def leaves_out_backward(optimizer: ZeroRedundancyOptimizer, _: Any, __: Rank) -> None:
    optimizer.step()


def does_not_sync(optimizer: ZeroRedundancyOptimizer, module: Any, rank: Rank) -> None:
    with optimizer.no_sync():
        backward(module, rank.world.rank)
    optimizer.step()


def detaches(optimizer: ZeroRedundancyOptimizer, module: Any, rank: Rank) -> None:
    optimizer.detach()
    iterates(optimizer, module, rank)


def clips(optimizer: ZeroRedundancyOptimizer, module: Any, rank: Rank) -> None:
    backward(module, rank.world.rank)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


def wants_a_gradient(optimizer: ZeroRedundancyOptimizer, module: Any, rank: Rank) -> None:
    backward(module, rank.world.rank)
    optimizer.full_grad(module[0].bias)
    optimizer.step()


def scales(optimizer: ZeroRedundancyOptimizer, module: Any, rank: Rank) -> None:
    scaler = GradScaler("cpu", init_scale=1.0)
    backward(module, rank.world.rank, scale=scaler.scale)
    scaler.step(optimizer)


def fails_in_backward(optimizer: ZeroRedundancyOptimizer, module: Any, rank: Rank) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError("in a hook")

    module[0].bias.register_hook(fail)
    iterates(optimizer, module, rank)


def accumulates_in_no_sync(optimizer: ZeroRedundancyOptimizer, module: Any, rank: Rank) -> None:
    with optimizer.no_sync():
        backward(module, rank.world.rank)
    iterates(optimizer, module, rank)


def accumulates_in_ddp(optimizer: ZeroRedundancyOptimizer, ddp: Any, rank: Rank) -> None:
    with ddp.no_sync():
        backward(ddp, rank.world.rank)
    iterates(optimizer, ddp, rank)


def under_ddp(
    usual: Callable[..., Any], odd: Callable[..., Any], attach: bool = True
) -> Callable[[Rank], None]:
    """The same under DDP, attached to it or drop-in."""

    def script(rank: Rank) -> None:
        module = small_model()
        ddp = DistributedDataParallel(module, process_group=rank.group)
        optimizer = rank.build(module.parameters())
        if attach:
            optimizer.attach(ddp)
        iterates(optimizer, ddp, rank)
        rank.part()
        rank.either(usual, odd)(optimizer, ddp, rank)

    return script


def in_another_order(do: Do) -> Callable[[Rank], None]:
    """Of two optimizers that look the same, the odd rank has the second do it first."""

    def script(rank: Rank) -> None:
        group = rank.group or dist.new_group()  # in which nobody has built one
        pair = [rank.trained(process_group=group) for _ in range(2)]
        rank.part()
        for optimizer in pair[:: rank.either(1, -1)]:
            do(optimizer, rank)

    return script


def steps_in_another_order(rank: Rank) -> None:
    """The same of two that are attached."""
    group = rank.group or dist.new_group()
    pair = [rank.attached(process_group=group) for _ in range(2)]
    for _, module in pair:
        backward(module, rank.world.rank)
    rank.part()
    for optimizer, _ in pair[:: rank.either(1, -1)]:
        optimizer.step()


LOST = Found.IN_TIME
SECOND = "(optimizer 2 of the process group)"

ELSEWHERE = (
    Row(
        "a step less",
        drop_in(steps, consolidates),
        ("in step 2", "ODD: consolidating the state to rank 0", "OTHERS"),
        found=LOST,
    ),
    Row(
        "a step more",
        drop_in(consolidates, steps),
        ("ODD: in step 2", "OTHERS: consolidating the state"),
        found=LOST,
    ),
    Row(
        "a rank that comes when the others have given up",
        drop_in(steps, comes_late),
        ("ODD did not arrive", "ODD: step 1 finished", "OTHERS: in step 2"),
        found=LOST,
        is_about_messages=True,
        asked=LOST,
    ),
    Row(
        "comparing replicas alone",
        drop_in(steps, compares),
        ("ODD: comparing replicas", "OTHERS: in step 2"),
        found=LOST,
    ),
    Row("saving alone", drop_in(steps, saves), ("ODD: saving to", "OTHERS: in step"), found=LOST),
    Row("loading alone", drop_in(steps, reads), ("ODD: loading", "OTHERS: in step"), found=LOST),
    Row(
        "saving and loading",
        drop_in(saves, reads),
        ("ODD: loading a checkpoint", "OTHERS: saving a checkpoint"),
        asked=Found.AT_ONCE,
    ),
    Row(
        "adding a group alone",
        drop_in(steps, adds),
        ("ODD: adding a parameter group", "OTHERS: in step 2"),
        found=LOST,
    ),
    Row(
        "adding a group while others consolidate",
        drop_in(consolidates, adds),
        ("ODD: adding a parameter group", "OTHERS: consolidating the state"),
    ),
    Row(
        "another optimizer alone",
        drop_in(steps, builds_another),
        ("ODD: building", "OTHERS: in step 2"),
        found=LOST,
        asked=Found.AT_ONCE,
    ),
    Row(
        "Join on one rank",
        drop_in(steps, joins),
        ("ODD", "inside Join, before STEP", "OTHERS: in step 2"),
        found=LOST,
        is_about_messages=True,
        asked=LOST,  # torch's own collective comes first
    ),
    Row(
        "an exception in the closure",
        drop_in(steps, fails_in_the_closure),
        ("ODD: the closure of step 2 raised ZeroDivisionError: the loss has no terms",),
        own="the loss has no terms",
        found=LOST,
        is_about_messages=True,
        asked=LOST,
    ),
    Row(
        "an exception in forward",
        drop_in(steps, fails_in_forward),
        ("ODD did not arrive", "ODD: step 1 finished"),
        own="token 50257 is out of range",
        found=LOST,
        is_about_messages=True,
        asked=LOST,
    ),
    Row(
        "a sparse gradient on one rank",
        drop_in(steps, has_a_sparse_gradient),
        ("ODD: in step 2 raised RuntimeError: parameter 0 has a sparse gradient",),
        own="parameter 0 has a sparse gradient",
        found=LOST,
        is_about_messages=True,
        asked=LOST,
    ),
    Row("unfreezing alone", unfreezes_alone, ("ODD", "unfrozen", "step 2"), found=LOST),
    Row("load_state_dict alone", loads_alone, ("ODD", "was loaded", "step 2"), found=LOST),
    Row("attaching alone", attaches_alone, ("ODD: attaching", "OTHERS: in step 2"), found=LOST),
    Row(
        "detaching alone",
        attached(iterates, detaches),
        ("ODD: in step 2,", "OTHERS: in step 2, attached, after 1 backward"),
        found=LOST,
        says_then=("ODD: in step 2", "OTHERS: in backward 1 after step 1"),
    ),
    Row(
        "no backward",
        attached(iterates, leaves_out_backward),
        ("ODD: in step 2, attached, after 0 backwards",),
        found=LOST,
    ),
    Row(
        "a backward more",
        attached(iterates, accumulates),
        ("ODD: in", "after 2 backwards", "OTHERS: in step 2, attached, after 1 backward"),
        found=LOST,
        says_then=("ODD: in backward 2 after step 1", "OTHERS: in step 2"),
    ),
    Row(
        "a backward less",
        attached(accumulates, iterates),
        ("ODD: in step 2, attached, after 1 backward", "OTHERS: in", "after 2 backwards"),
        found=LOST,
        says_then=("ODD: in step 2, attached, after 1 backward", "OTHERS: in backward 2"),
    ),
    Row(
        "no_sync on one rank",
        attached(iterates, does_not_sync),
        ("ODD: in step 2, attached, after 0 backwards raised RuntimeError", "was not averaged"),
        own="was not averaged",
        found=LOST,
        is_about_messages=True,
        says_then=("ODD: in step 2, attached, after 0 backwards", "OTHERS: in backward 1 after"),
    ),
    Row(
        "no_sync on one rank, DDP",
        under_ddp(iterates, does_not_sync),
        ("ODD: in step 2, attached, after 0 backwards raised RuntimeError", "was not averaged"),
        own="was not averaged",
        found=LOST,
        is_about_messages=True,
        says_then=("ODD: in step 2, attached, after 0 backwards", "OTHERS: in backward 1 after"),
    ),
    Row(
        "no_sync not on one rank",
        attached(accumulates_in_no_sync, accumulates),
        ("ODD: in", "after 2 backwards", "OTHERS: in step 2, attached, after 1 backward"),
        found=LOST,
        says_then=("ODD: in backward 2 after step 1", "OTHERS: in step 2"),
    ),
    Row(
        "no_sync not on one rank, DDP",
        under_ddp(accumulates_in_no_sync, accumulates),
        ("ODD: in", "after 2 backwards", "OTHERS: in step 2, attached, after 1 backward"),
        found=LOST,
        says_then=("ODD: in backward 2 after step 1", "OTHERS: in step 2"),
    ),
    Row(
        "no_sync not on one rank, drop-in under DDP",
        under_ddp(accumulates_in_ddp, accumulates, attach=False),
        ("ODD: step 1 finished", "OTHERS: in step 2"),
        own="Timed out waiting",  # gloo's words, in DDP
        found=LOST,
        is_about_messages=True,
        asked=LOST,
    ),
    Row(
        "clipping alone",
        attached(iterates, clips),
        ("ODD: clip_grad_norm_(1.0", "OTHERS: in step 2, attached, after 1 backward"),
        found=LOST,
    ),
    Row(
        "clipping not",
        attached(clips, iterates),
        ("OTHERS: clip_grad_norm_(1.0", "ODD: in step 2, attached, after 1 backward"),
        found=LOST,
    ),
    Row(
        "full_grad alone",
        attached(iterates, wants_a_gradient),
        ("ODD: full_grad of parameter (1,)", "OTHERS: in step 2"),
        found=LOST,
    ),
    Row(
        "GradScaler alone",
        attached(iterates, scales),
        ("ODD: GradScaler.unscale_", "OTHERS: in step 2"),
        found=LOST,
    ),
    Row(
        "an exception in backward",
        attached(iterates, fails_in_backward),
        ("ODD: in backward 1 after step 1",),
        own="in a hook",
        found=LOST,
        is_about_messages=True,
        asked=LOST,
    ),
    Row(
        "two optimizers in another order",
        in_another_order(steps),
        (f"ODD: in step 2 {SECOND}", "OTHERS: in step 2"),
        found=LOST,
        is_about_messages=True,
    ),
    Row(
        "two optimizers in another order, attached",
        steps_in_another_order,
        (f"ODD: in step 2, attached, after 1 backward {SECOND}", "OTHERS: in step 2, attached"),
        found=LOST,
        is_about_messages=True,
    ),
    Row(
        "two optimizers consolidated in another order",
        in_another_order(consolidates),
        ("ODD: consolidating the state", "OTHERS: consolidating the state", SECOND),
    ),
    Row(
        "two optimizers saved in another order",
        in_another_order(saves),
        ("ODD: saving", "OTHERS: saving", SECOND),
    ),
)


# ------------------------------------------------------------------ values that nobody waits for


def with_gradients(change: Do, step: Do = lambda o, _: o.step()) -> Callable[[Rank], None]:
    """All take a step; the odd rank has changed something before, or steps otherwise."""

    def script(rank: Rank) -> None:
        optimizer = rank.trained()
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        if rank.is_odd:
            change(optimizer, rank)
        rank.either(lambda o, _: o.step(), step)(optimizer, rank)

    return script


def first(optimizer: ZeroRedundancyOptimizer) -> Any:
    return optimizer.param_groups[0]["params"][0]


def schedules(optimizer: ZeroRedundancyOptimizer, _: Rank) -> None:
    optimizer.param_groups[0]["lr"] = 0.05


def freezes(optimizer: ZeroRedundancyOptimizer, _: Rank) -> None:
    first(optimizer).requires_grad_(False)


def loses_a_gradient(optimizer: ZeroRedundancyOptimizer, _: Rank) -> None:
    first(optimizer).grad = None


SILENT = (
    Row(
        "a scheduler on one rank",
        with_gradients(schedules),
        ("ODD: group 0: lr = 0.05", "OTHERS: group 0: lr = 0.1", "step 2"),
        found=Found.NEVER,
    ),
    Row(
        "freezing on one rank",
        with_gradients(freezes),
        ("ODD: parameter 0: requires_grad=False", "OTHERS: parameter 0: requires_grad=True"),
        found=Found.NEVER,
    ),
    Row(
        "a gradient that is missing on one rank",
        with_gradients(loses_a_gradient),
        ("ODD: parameter 0: requires_grad=True, no gradient", "OTHERS"),
        found=Found.NEVER,
    ),
    Row(
        "a closure on one rank",
        with_gradients(lambda *_: None, step=lambda o, _: o.step(lambda: 0.0)),
        ("ODD: step with a closure", "OTHERS: step with no closure"),
        found=Found.NEVER,
    ),
)
