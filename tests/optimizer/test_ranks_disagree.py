"""Ranks that were given different things, and ranks that are not there.

A difference raises the same error on every rank, and says which rank holds what. A rank that does
not arrive is named by every other one, with the place where it was last seen, once the timeout of
the process group has passed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from absences import ELSEWHERE, SILENT
from disagreements import BUILDING, CHANGING
from harness import World, distributed
from inside import count_steps
from models import (
    give_equal_gradients,
    params_of_shapes,
    random_parameter,
    train_on_constants,
)
from together import PATIENCE, Found, judge
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW

from onecopy import RanksDisagree, ZeroRedundancyOptimizer

TIMEOUT = 6.0  # seconds, of the process groups in which somebody is missing
SMALL = {"bucket_mb": 0.0005}


def vector(length: int = 10, **kwargs: Any) -> Parameter:
    return Parameter(torch.ones(length), **kwargs)


def matrix(transposed: bool = False) -> Parameter:
    return Parameter(torch.ones(5, 4).t() if transposed else torch.ones(4, 5))


def on_all_ranks(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def require_same_text(error: BaseException) -> str:
    """The text of an error, which must be the same on all ranks."""
    texts = on_all_ranks(f"{type(error).__name__}: {error}")
    assert len(set(texts)) == 1, texts
    return str(error)


def require_working_group(world: World) -> None:
    """Build an optimizer properly and train with it."""
    params = [vector(), matrix()]
    opt = ZeroRedundancyOptimizer(params, SGD, lr=0.5, **SMALL)
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    assert all(torch.equal(param, torch.full_like(param, 0.5)) for param in params)


# ------------------------------------------------------------------ differences at construction


Build = Callable[..., Any]


def build(params: Any = None, cls: Any = SGD, *args: Any, **options: Any) -> None:
    params = [vector(10), matrix()] if params is None else params
    ZeroRedundancyOptimizer(params, cls, *args, **{"lr": 0.1, **options})


def groups(*sizes: int, **options: Any) -> list[dict[str, Any]]:
    return [{"params": [vector(10) for _ in range(size)], **options} for size in sizes]


# What all ranks but one do, what that one does, and what the error must show of either.
DIFFERENCES: dict[str, tuple[Callable[[], None], Callable[[], None], str, str]] = {
    "order": (
        lambda: build([vector(10), vector(12)]),
        lambda: build([vector(12), vector(10)]),
        "(10,)",
        "(12,)",
    ),
    "order of equal shapes with names": (
        lambda: build([("a", vector()), ("b", vector())]),
        lambda: build([("b", vector()), ("a", vector())]),
        "(a)",
        "(b)",
    ),
    "count": (
        lambda: build([vector(), vector()]),
        lambda: build([vector(), vector(), vector()]),
        "2 parameters",
        "3 parameters",
    ),
    "shape": (
        lambda: build([vector(), matrix()]),
        lambda: build([vector(), vector(20)]),
        "(4, 5)",
        "(20,)",
    ),
    "dtype": (
        lambda: build([vector()]),
        lambda: build([Parameter(torch.ones(10, dtype=torch.float64))]),
        "torch.float32",
        "torch.float64",
    ),
    "strides": (
        lambda: build([matrix()]),
        lambda: build([matrix(transposed=True)]),
        "(5, 1)",
        "(1, 4)",
    ),
    "lr": (lambda: build(lr=0.1), lambda: build(lr=0.2), "lr = 0.1", "lr = 0.2"),
    "lr of a group": (
        lambda: build([*groups(1), *groups(1, lr=0.3)]),
        lambda: build([*groups(1), *groups(1, lr=0.4)]),
        "lr = 0.3",
        "lr = 0.4",
    ),
    "betas": (
        lambda: build(cls=Adam, betas=(0.9, 0.99)),
        lambda: build(cls=Adam, betas=(0.9, 0.98)),
        "0.99",
        "0.98",
    ),
    "weight decay": (
        lambda: build(weight_decay=0.0),
        lambda: build(weight_decay=0.5),
        "weight_decay = 0.0",
        "weight_decay = 0.5",
    ),
    "a tensor as lr": (
        lambda: build(cls=Adam, lr=torch.tensor(0.25), foreach=False),
        lambda: build(cls=Adam, lr=torch.tensor(0.5), foreach=False),
        "0.25",
        "0.5",
    ),
    "class": (lambda: build(cls=Adam), lambda: build(cls=AdamW), "Adam,", "AdamW,"),
    "class of a group": (
        lambda: build([*groups(1), *groups(1, optimizer_class=Adam)]),
        lambda: build([*groups(1), *groups(1, optimizer_class=AdamW)]),
        "Adam,",
        "AdamW,",
    ),
    "number of groups": (
        lambda: build(groups(1, 1)),
        lambda: build(groups(1, 1, 1)),
        "parameter 0",
        "group 2",
    ),
    "boundaries of groups": (
        lambda: build(groups(1, 2)),
        lambda: build(groups(2, 1)),
        "1 parameters",
        "2 parameters",
    ),
    "partition": (
        lambda: build(partition="auto"),
        lambda: build(partition="whole"),
        "elementwise",
        "whole",
    ),
    "bucket size": (
        lambda: build(bucket_mb=25),
        lambda: build(bucket_mb=13),
        "25",
        "13",
    ),
    "bucket size that makes the same buckets of a small model": (
        lambda: build(bucket_mb=25),
        lambda: build(bucket_mb=26),
        "25",
        "26",
    ),
    "frozen": (
        lambda: build([vector(), vector()]),
        lambda: build([vector(), vector(requires_grad=False)]),
        "trainable",
        "frozen",
    ),
    "names": (
        lambda: build([("a", vector())]),
        lambda: build([vector()]),
        "(a)",
        "parameter 0",
    ),
    "bucket view": (
        lambda: build(parameters_as_bucket_view=False),
        lambda: build(parameters_as_bucket_view=True),
        "parameters_as_bucket_view",
        "parameters_as_bucket_view",
    ),
    "how often replicas are compared": (
        lambda: build(check_every=None),
        lambda: build(check_every=3),
        "check_every",
        "3",
    ),
}


@distributed(2, 3, 4)
def test_a_difference_raises_the_same_error_on_all_ranks(world: World) -> None:
    unclear = []  # all of them, so that one does not hide the others
    for what, (usual, other, shows, shows_too) in DIFFERENCES.items():
        odd = sum(what.encode()) % world.size  # also rank 0, whose view is the base
        text = refusal_of(other if world.rank == odd else usual)
        views = dict(line.strip().split(": ", 1) for line in text.splitlines()[1:3])
        here = views.pop(f"rank {odd}", "")
        ((others, there),) = views.items() or [("", "")]
        complete = spelled(others) == {*range(world.size)} - {odd}
        if not (complete and shows in there and shows_too in here):
            unclear.append((what, text))
    assert not unclear
    assert issubclass(RanksDisagree, ValueError)
    require_working_group(world)


def refusal_of(construct: Callable[[], None]) -> str:
    """What the ranks disagree about, the same text on all of them; "" if they agreed."""
    try:
        construct()
    except RanksDisagree as error:
        return require_same_text(error)
    texts = on_all_ranks("")
    assert texts == [""] * len(texts), texts
    return ""


def spelled(ranks: str) -> set[int]:
    """The ranks in a text such as "ranks 0-2, 5"."""
    found = [run.split("-") for run in ranks.removeprefix("rank").lstrip("s ").split(", ")]
    return {rank for run in found if run != [""] for rank in range(int(run[0]), int(run[-1]) + 1)}


@distributed(4)
def test_three_views_are_listed_with_their_ranks(world: World) -> None:
    text = refusal_of(lambda: build(lr=[0.1, 0.2, 0.1, 0.3][world.rank]))
    assert "ranks 0, 2: group 0: lr = 0.1" in text
    assert "rank 1: group 0: lr = 0.2" in text
    assert "rank 3: group 0: lr = 0.3" in text
    require_working_group(world)


@distributed(3)
def test_the_first_of_several_differences_is_named(world: World) -> None:
    lengths = {0: (10, 10), 1: (10, 9), 2: (11, 10)}[world.rank]
    text = refusal_of(lambda: build([vector(length) for length in lengths]))
    assert "rank 2: parameter 0: shape (11,)" in text
    assert "ranks 0-1: parameter 0: shape (10,)" in text
    assert "(9,)" not in text


@distributed(2, 3)
def test_a_text_full_of_newlines_and_one_that_is_long_are_told_apart(world: World) -> None:
    for name in ("a\nb", "x" * 2000, "ü" * 500):
        mine = name + str(world.rank == 1)
        assert refusal_of(lambda: build([(mine, vector())]))
    require_working_group(world)


@distributed(2, 3, 4)
def test_bad_input_on_one_rank_is_told_to_the_others(world: World) -> None:
    bad: list[tuple[Callable[[], None], type[Exception], str]] = [
        (lambda: build(3.5), TypeError, "float"),
        (lambda: build([]), ValueError, "empty"),
        (lambda: build([vector() * 2]), ValueError, "non-leaf"),
        (lambda: build(no_such_option=1), TypeError, "no_such_option"),
        (lambda: build(lr=-1.0), ValueError, "-1.0"),
        (lambda: build(cls=torch.optim.LBFGS), ValueError, "LBFGS"),
        (lambda: build(check_every=0), ValueError, "check_every"),
        (lambda: build(bucket_mb=-1), ValueError, "bucket_mb"),
    ]
    for number, (do, expected, shows) in enumerate(bad):
        odd = number % world.size
        if world.rank == odd:
            with pytest.raises(expected, match=shows) as caught:
                do()
            assert type(caught.value) is expected
        else:
            with pytest.raises(RanksDisagree, match=shows) as caught:
                build()
            assert f"rank {odd}: raised {expected.__name__}" in str(caught.value)
    require_working_group(world)


@distributed(2, 3)
def test_bad_input_of_another_kind_on_each_rank_raises_each_its_own(world: World) -> None:
    with pytest.raises(TypeError if world.rank == 0 else ValueError) as caught:
        build(3.5 if world.rank == 0 else [])
    assert not isinstance(caught.value, RanksDisagree)
    require_working_group(world)


# ------------------------------------------------------------------ later


def trained_optimizer(world: World, **options: Any) -> tuple[ZeroRedundancyOptimizer, list[Any]]:
    params = [vector(), matrix()]
    opt = ZeroRedundancyOptimizer(params, SGD, lr=0.5, **SMALL, **options)
    step(opt, params)
    return opt, params


def step(opt: ZeroRedundancyOptimizer, params: list[Any]) -> None:
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()


@distributed(2, 3, 4)
def test_a_different_group_is_refused_everywhere_and_changes_nothing(world: World) -> None:
    opt, params = trained_optimizer(world)
    odd = world.rank == world.size - 1
    later = vector(7)
    differences: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"params": [later]}, {"params": [vector(8)]}, "(8,)"),
        ({"params": [later]}, {"params": [later, vector()]}, "2 parameters"),
        ({"params": [later]}, {"params": [later], "lr": 0.25}, "lr = 0.25"),
        ({"params": [later]}, {"params": [later], "partition": "whole"}, "whole"),
        ({"params": [later]}, {"params": [later], "optimizer_class": Adam}, "Adam"),
        ({"params": [later]}, {"params": [vector(7, requires_grad=False)]}, "frozen"),
    ]
    for usual, other, shows in differences:
        with pytest.raises(RanksDisagree, match="adding a parameter group") as caught:
            opt.add_param_group(other if odd else usual)
        assert shows in require_same_text(caught.value)
        assert len(opt.param_groups) == len(opt.optim.param_groups) == 1
    if odd:
        with pytest.raises(ValueError, match="parameter group") as own:
            opt.add_param_group({"params": [params[0]]})
        assert not isinstance(own.value, RanksDisagree)
    else:
        with pytest.raises(RanksDisagree, match=f"rank {world.size - 1}: raised ValueError"):
            opt.add_param_group({"params": [later]})
    step(opt, params)
    assert params[0].tolist() == [0.0] * 10
    opt.add_param_group({"params": [later]})
    step(opt, [*params, later])
    assert params[0].tolist() == [-0.5] * 10
    assert later.tolist() == [0.5] * 7


@distributed(2, 3, 4)
def test_consolidating_different_things_is_refused_everywhere(world: World) -> None:
    opt, params = trained_optimizer(world)
    with pytest.raises(RanksDisagree) as caught:
        opt.consolidate_state_dict(to=world.rank % 2)
    assert "to rank 0" in require_same_text(caught.value)
    with pytest.raises(RuntimeError, match="has stepped since the last"):
        opt.state_dict()
    if world.rank == 1:
        count_steps(opt, 1)  # as if it had stepped once more; a real step would wait for the others
    with pytest.raises(RanksDisagree) as caught:
        opt.consolidate_state_dict()
    text = require_same_text(caught.value)
    assert "rank 1: after 2 steps" in text
    if world.rank == 1:
        count_steps(opt, -1)
    opt.consolidate_state_dict()
    before = opt.state_dict() if world.rank == 0 else None
    with pytest.raises(RanksDisagree):
        opt.consolidate_state_dict(to=world.rank % 2)
    if world.rank == 0:  # what was consolidated is still there
        assert opt.state_dict() == before
    step(opt, params)
    assert params[0].tolist() == [0.0] * 10


@distributed(2, 3)
def test_unfreezing_different_parameters_is_refused_everywhere(world: World) -> None:
    frozen = [vector(requires_grad=False), vector(requires_grad=False)]
    first = vector()
    opt = ZeroRedundancyOptimizer([first, *frozen], SGD, lr=0.5)
    frozen[world.rank % 2].requires_grad_(True)
    with pytest.raises(RanksDisagree, match="unfrozen") as caught:
        step(opt, [first])
    assert "parameter 1" in require_same_text(caught.value)
    assert torch.equal(first, torch.ones(10))


@distributed(2, 3)
def test_a_scheduler_on_one_rank_only_is_found_when_asked_for(world: World) -> None:
    os.environ["ONECOPY_CHECK"] = "step"
    opt, params = trained_optimizer(world)
    if world.rank == 1:
        opt.param_groups[0]["lr"] = 0.25
    with pytest.raises(RanksDisagree, match=r"lr = 0\.25") as caught:
        step(opt, params)
    require_same_text(caught.value)


# ------------------------------------------------------------------ ranks that are not there


def meet() -> None:
    """So that nobody is late in the tests below for want of a processor."""
    dist.monitored_barrier(timeout=timedelta(seconds=50))


class Elsewhere:
    """Where a rank stays, alive, until the others have had their errors."""

    def __init__(self, world: World, missing: int) -> None:
        self.store = dist.distributed_c10d._get_default_store()
        self.others = [f"rank {r} is done" for r in range(world.size) if r != missing]
        self.mine = f"rank {world.rank} is done"

    def leave(self) -> None:
        self.store.set(self.mine, "")

    def stay(self) -> None:
        self.store.wait(self.others, timedelta(seconds=50))


def require_named(error: BaseException, missing: int, places: tuple[str, ...]) -> None:
    text = str(error)
    assert f"rank {missing} did not arrive" in text, text
    assert all(place in text for place in places), text


@distributed(3, fresh=True, pg_timeout=TIMEOUT)
@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_never_builds_the_optimizer_is_named(world: World, missing: int) -> None:
    meet()
    elsewhere = Elsewhere(world, missing)
    if world.rank == missing:
        elsewhere.stay()
        return
    with pytest.raises(RuntimeError) as caught:
        ZeroRedundancyOptimizer([vector()], SGD, lr=0.1)
    elsewhere.leave()
    require_named(caught.value, missing, ("never seen", "building an optimizer"))


@distributed(3, fresh=True, pg_timeout=TIMEOUT)
def test_a_rank_that_misses_the_second_optimizer_is_named(world: World) -> None:
    meet()
    elsewhere = Elsewhere(world, 1)
    trained_optimizer(world)
    if world.rank == 1:
        elsewhere.stay()
        return
    with pytest.raises(RuntimeError) as caught:
        ZeroRedundancyOptimizer([vector()], SGD, lr=0.1)
    elsewhere.leave()
    require_named(caught.value, 1, ("building an optimizer", "step 1"))


@distributed(3, fresh=True, pg_timeout=TIMEOUT)
@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_misses_a_step_is_named(world: World, missing: int) -> None:
    meet()
    elsewhere = Elsewhere(world, missing)
    opt, params = trained_optimizer(world)
    if world.rank == missing:
        elsewhere.stay()
        return
    with pytest.raises(RuntimeError) as caught:
        step(opt, params)
    elsewhere.leave()
    require_named(caught.value, missing, ("step 1", "step 2"))


@distributed(3, fresh=True, pg_timeout=TIMEOUT)
def test_a_rank_that_misses_the_consolidation_is_named(world: World) -> None:
    meet()
    elsewhere = Elsewhere(world, 1)
    opt, _ = trained_optimizer(world)
    if world.rank == 1:
        elsewhere.stay()
        return
    with pytest.raises(RuntimeError) as caught:
        opt.consolidate_state_dict()
    elsewhere.leave()
    require_named(caught.value, 1, ("step 1", "consolidating"))


@distributed(3, fresh=True, pg_timeout=TIMEOUT)
def test_a_rank_that_adds_no_group_is_named(world: World) -> None:
    meet()
    elsewhere = Elsewhere(world, 1)
    opt, _ = trained_optimizer(world)
    if world.rank == 1:
        elsewhere.stay()
        return
    with pytest.raises(RuntimeError) as caught:
        opt.add_param_group({"params": [vector()]})
    elsewhere.leave()
    require_named(caught.value, 1, ("step 1", "adding a parameter group"))


# With c10d, 16 bytes of parameters for each rank must not meet the 32 bytes of an agreement in an
# all-gather of gloo, which would end a process.
@pytest.mark.also_c10d
@distributed(3, fresh=True, pg_timeout=TIMEOUT)
def test_unfreezing_on_one_rank_only_ends_in_an_error_that_says_who_was_where(
    world: World,
) -> None:
    meet()
    first, frozen = vector(), vector(requires_grad=False)
    opt = ZeroRedundancyOptimizer([first, frozen], SGD, lr=0.5)
    step(opt, [first])
    if world.rank == 1:
        frozen.requires_grad_(True)
    with pytest.raises(RuntimeError) as caught:
        step(opt, [first])
    text = str(caught.value)
    assert "unfrozen" in text, text  # where rank 1 is ...
    assert "rank 1" in text, text
    assert "step 2" in text, text  # ... and where the others are


@pytest.mark.also_c10d
@distributed(3, fresh=True, pg_timeout=TIMEOUT)
def test_building_on_one_rank_while_the_others_step_ends_in_an_error_that_says_who_was_where(
    world: World,
) -> None:
    meet()
    param = vector()
    opt = ZeroRedundancyOptimizer([param], SGD, lr=0.5)
    step(opt, [param])
    with pytest.raises(RuntimeError) as caught:
        build() if world.rank == 1 else step(opt, [param])
    text = str(caught.value)
    assert "building an optimizer" in text, text
    assert "rank 1" in text, text
    assert "step 2" in text, text


@distributed(3, fresh=True, pg_timeout=TIMEOUT)
@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_dies_is_named(world: World, gone: int) -> None:
    meet()
    opt, params = trained_optimizer(world)
    if world.rank == gone:
        os._exit(0)
    with pytest.raises(RuntimeError) as caught:
        step(opt, params)
    require_named(caught.value, gone, ("step 1", "step 2"))


@distributed(3, fresh=True, pg_timeout=TIMEOUT)
def test_a_rank_in_another_group_ends_in_an_error_everywhere(world: World) -> None:
    pair = dist.new_group([1, 2], timeout=timedelta(seconds=TIMEOUT))
    meet()
    with pytest.raises(RuntimeError) as caught:
        build(process_group=pair if world.rank == 2 else None)
    missing = 0 if world.rank == 2 else 2  # by its number in the group
    require_named(caught.value, missing, ("never seen", "building an optimizer"))


# ------------------------------------------------------------------ other dicts and other errors


@distributed(2, pg_timeout=4.0)
@pytest.mark.parametrize(("steps", "expected"), [(0, RanksDisagree), (1, RuntimeError)])
def test_a_state_dict_loaded_on_one_rank_only_is_told(
    world: World, steps: int, expected: type[Exception]
) -> None:
    """At once before the first step, in which all ranks compare gradients; else in the timeout."""
    ours = params_of_shapes((37,), (11, 3))
    b = ZeroRedundancyOptimizer(ours, Adam)
    for _ in range(steps):
        give_equal_gradients(0, ours)
        b.step()
    if world.rank == 1:
        b.load_state_dict(Adam(params_of_shapes((37,), (11, 3)), fused=True).state_dict())
    give_equal_gradients(0, ours)
    with pytest.raises(expected, match="comparing what was loaded"):
        b.step()


@distributed(2, 3, pg_timeout=600.0, timeout=20.0)
def test_different_dicts_on_different_ranks_are_told_at_the_next_step(world: World) -> None:
    ours = params_of_shapes((37,))
    b = ZeroRedundancyOptimizer(ours, Adam)
    b.load_state_dict(Adam(params_of_shapes((37,)), lr=0.1 + world.rank).state_dict())
    give_equal_gradients(0, ours)
    with pytest.raises(RanksDisagree, match=r"lr"):
        b.step()


@distributed(2, 3, pg_timeout=600.0, timeout=20.0)
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_generator_that_raises_on_one_rank_is_told_on_all(world: World, culprit: int) -> None:
    def parameters() -> Iterator[Parameter]:
        yield Parameter(torch.zeros(3))
        if world.rank == culprit:
            raise KeyError("a key of the user's")
        yield Parameter(torch.zeros(3))

    with pytest.raises(KeyError, match="a key of the user's"):
        ZeroRedundancyOptimizer(parameters(), SGD, lr=0.1)
    dist.barrier()
    ZeroRedundancyOptimizer(params_of_shapes((3,)), SGD, lr=0.1)  # nothing is left on the wire


class FailsOnRankOne(torch.optim.SGD):
    def step(self) -> None:  # type: ignore[override]
        if dist.get_rank() == 1 and self.param_groups[0].get("fail"):
            raise ArithmeticError("the sky is falling")
        super().step()


@distributed(2, 3, fresh=True, pg_timeout=5)
def test_the_others_are_told_why_a_rank_does_not_come(world: World) -> None:
    param = random_parameter(9)
    opt = ZeroRedundancyOptimizer([param], FailsOnRankOne, lr=0.1)
    train_on_constants(opt, [param])
    opt.param_groups[0]["fail"] = True
    error, text = (
        (ArithmeticError, "falling") if world.rank == 1 else (RuntimeError, "sky is falling")
    )
    with pytest.raises(error, match=text):
        train_on_constants(opt, [param])


@distributed(2, 3)
def test_ranks_that_loaded_different_dicts_for_frozen_parameters_are_told(world: World) -> None:
    params = [random_parameter(6), random_parameter(7)]
    plain = torch.optim.AdamW(params)
    train_on_constants(plain, params)
    state = plain.state_dict()
    params[1].requires_grad_(False)
    params[1].grad = None
    opt = ZeroRedundancyOptimizer(params, torch.optim.AdamW)
    if world.rank == 0:
        state["state"][1] = {}
        state["param_groups"][0]["lr"] = 0.5
    opt.load_state_dict(state)
    params[0].grad = torch.ones(6)
    with pytest.raises(RanksDisagree, match="lr"):
        opt.step()


# ------------------------------------------------------------------ the table


ROWS = (*BUILDING, *CHANGING, *ELSEWHERE, *SILENT)
LOST = [row for row in ROWS if row.found is Found.IN_TIME]
AT_ONCE = [row for row in ROWS if row.found is Found.AT_ONCE]
ASKED = [row for row in ROWS if row.found is not row.asked]
BATCHES = 6
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_the_table_is_long_and_its_rows_have_names_of_their_own() -> None:
    assert len(ROWS) >= 40
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_the_page_says_how_many_rows_there_are() -> None:
    assert re.findall(r"a table of (\d+) rows", PAGE.read_text()) == [str(len(ROWS))]


@distributed(2, 3, timeout=240, pg_timeout=PATIENCE)
@pytest.mark.parametrize("start", [0, 1])
def test_what_is_made_or_changed_together_is_compared_at_once(
    world: World, start: int, tmp_path: Path
) -> None:
    judge(world, AT_ONCE[start::2], "found", tmp_path)


@distributed(2, 3, timeout=240, pg_timeout=PATIENCE)
@pytest.mark.parametrize("start", [0, 1])
def test_in_every_step_everything_is_compared_if_asked_for(
    world: World, start: int, tmp_path: Path
) -> None:
    judge(world, ASKED[start::2], "asked", tmp_path, checks=True)


@distributed(2, 3, timeout=240, pg_timeout=PATIENCE)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_rank_that_is_elsewhere_is_found_within_the_timeout(
    world: World, batch: int, tmp_path: Path
) -> None:
    judge(world, LOST[batch::BATCHES], "found", tmp_path)


@distributed(2, 3, timeout=240, pg_timeout=PATIENCE)
def test_values_that_nobody_waits_for_are_found_only_if_asked_for(
    world: World, tmp_path: Path
) -> None:
    judge(world, SILENT, "found", tmp_path)
