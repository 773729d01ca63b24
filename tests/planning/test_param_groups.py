"""What the user hands over: every form that is accepted, and every one that is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import World, distributed
from models import params_of_shapes, random_parameter, train_on_constants
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from onecopy import ZeroRedundancyOptimizer
from onecopy.planning.param_groups import (
    GroupPolicy,
    ParamRegistry,
    PartitionPolicy,
    Settings,
    as_groups,
    check_class,
    check_tensors,
    device_names,
    is_trainable,
    take_groups,
)
from onecopy.planning.plan import ParamSpec, make_plan
from onecopy.planning.traits import Kind, options_of


def param(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, **options))


def policy(
    cls: type[Optimizer] = torch.optim.SGD,
    kind: Kind = Kind.ELEMENTWISE,
    fused: bool = False,
) -> GroupPolicy:
    return GroupPolicy(cls, f"{cls.__module__}.{cls.__qualname__}", kind, fused)


def registry_of(params: list[torch.Tensor], **policies: Any) -> ParamRegistry:
    """Of one group."""
    return ParamRegistry().with_group({"params": params}, policy(**policies))


def spec_of(tensor: torch.Tensor, **policies: Any) -> ParamSpec:
    (spec,) = registry_of([tensor], **policies).specs([0])
    return spec


P, Q = param(2), param(3)


# ------------------------------------------------------------------ forms of `params`


@pytest.mark.parametrize(
    "make",
    [
        lambda: [P, Q],
        lambda: (P, Q),
        lambda: iter([P, Q]),
        lambda: (p for p in [P, Q]),
        lambda: dict.fromkeys([P, Q]),
        lambda: [{"params": [P, Q]}],
        lambda: [{"params": (p for p in [P, Q])}],
        lambda: ({"params": iter(group)} for group in [[P, Q]]),
    ],
)
def test_parameters_come_in_any_iterable(make: Callable[[], Any]) -> None:
    (group,) = as_groups(make())
    assert isinstance(group["params"], list)
    assert [id(p) for p in group["params"]] == [id(P), id(Q)]


def test_names_are_kept() -> None:
    module = nn.Linear(2, 3)
    (group,) = as_groups(module.named_parameters())
    assert [name for name, _ in group["params"]] == ["weight", "bias"]
    (group,) = as_groups([{"params": module.named_parameters(), "lr": 3}])
    assert [name for name, _ in group["params"]] == ["weight", "bias"]
    assert group["lr"] == 3


def test_groups_are_copied_and_the_callers_are_left_alone() -> None:
    given: list[dict[str, Any]] = [{"params": P, "lr": 0.1}, {"params": [Q], "weight_decay": 0}]
    kept = [dict(group) for group in given]
    groups = as_groups(given)
    assert [group["params"] for group in groups] == [[P], [Q]]
    groups[0]["lr"] = 7
    groups[1]["params"].append(P)
    assert given[0] == kept[0]
    assert len(given[1]["params"]) == 1


def test_an_empty_group_among_others_is_accepted() -> None:
    groups = as_groups([{"params": []}, {"params": [P]}])
    assert [len(group["params"]) for group in groups] == [0, 1]


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        (P, TypeError, r"pass \[tensor\]"),
        (P.data, TypeError, r"pass \[tensor\]"),
        (0.5, TypeError, "float"),
        (None, TypeError, "NoneType"),
        ([], ValueError, "empty"),
        (iter(()), ValueError, "empty"),
        ([P, {"params": [Q]}], TypeError, "Parameter, dict"),
        ([{"params": [Q]}, P], TypeError, "Parameter, dict"),
        ([P, 3], TypeError, "Parameter, int"),
        ([3], TypeError, "int"),
        ([None], TypeError, "NoneType"),
        ("parameters", TypeError, "str"),
        ({"params": [P]}, TypeError, "str"),
        ([[P, Q]], TypeError, "list"),
        ([("a", 3)], TypeError, "tuple"),
        ([("a", P, Q)], TypeError, "tuple"),
        ([P, ("b", Q)], ValueError, "entry 0 of params is a Parameter"),
        ([{"lr": 1}], ValueError, r'"params".*lr'),
        ([{"params": [P]}, {}], ValueError, '"params"'),
        ([{"params": 3}], TypeError, "int"),
        ([{"params": None}], TypeError, "NoneType"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_not_parameters_is_refused(bad: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        as_groups(bad)


@pytest.mark.parametrize(
    "empty", [[{"params": []}], [{"params": []}, {"params": ()}], [{"params": iter(())}]], ids=len
)
def test_groups_that_hold_no_parameter_at_all_are_refused(empty: Any) -> None:
    _, refusal = take_groups(empty, SGD)
    assert isinstance(refusal, ValueError)
    assert "none of the parameter groups" in str(refusal)
    groups, refusal = take_groups([*as_groups([{"params": []}]), {"params": [P]}], SGD)
    assert refusal is None
    assert [len(group["params"]) for group in groups] == [0, 1]


def test_an_error_of_something_not_iterable_shows_where_it_came_from() -> None:
    with pytest.raises(TypeError) as caught:
        as_groups(3.0)
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_error_inside_a_generator_is_not_swallowed() -> None:
    def broken() -> Any:
        yield P
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        as_groups(broken())


@pytest.mark.parametrize("params", [{P, Q}, [{"params": {P, Q}}], [{"params": frozenset([P])}]])
def test_a_set_is_refused(params: Any) -> None:
    with pytest.raises(TypeError, match=r"ordered collections.* order would differ between ranks"):
        as_groups(params)


# ------------------------------------------------------------------ tensors


def test_any_mix_of_dense_floating_dtypes_is_accepted() -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    check_tensors([{"params": [param(2, dtype=dtype) for dtype in dtypes]}])
    check_tensors([{"params": [("a", P)]}, {"params": [torch.zeros(3), Q]}, {"params": []}])


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_parameter_is_refused_wherever_it_stands(
    layout: torch.layout, named: bool
) -> None:
    sparse = torch.eye(3).to_sparse(layout=layout)
    entry = ("name", sparse) if named else sparse
    for groups, where in (
        ([{"params": [entry]}], "parameter 0 of group 0"),
        ([{"params": [P]}, {"params": [P, Q, entry]}], "parameter 2 of group 1"),
    ):
        with pytest.raises(ValueError, match=f"{where} is sparse"):
            check_tensors(groups)


def test_devices_of_two_types_are_refused() -> None:
    groups = [{"params": [P]}, {"params": [Q, param(2, device="meta")]}]
    with pytest.raises(ValueError, match=r"parameter 1 of group 1 is on meta.*first.* cpu"):
        check_tensors(groups)


def test_a_dtensor_is_refused() -> None:
    class Distributed(torch.Tensor):
        device_mesh = "a mesh"

    with pytest.raises(ValueError, match="parameter 1 of group 0 is a DTensor"):
        check_tensors([{"params": [P, torch.zeros(3).as_subclass(Distributed)]}])


def test_different_parameters_in_the_same_memory_are_refused_by_name() -> None:
    storage, nothing = torch.zeros(10), make_plan([], 2)
    registry_of([storage[:5], storage[5:], torch.zeros(3)]).extend(nothing, [0, 1, 2])
    overlapping = registry_of([storage[:5], torch.zeros(3), storage[4:]])
    both = "parameter 0 and parameter 2 are different parameters in the same memory"
    with pytest.raises(ValueError, match=both):
        overlapping.extend(nothing, [0, 1, 2])
    with pytest.raises(ValueError, match=both):
        overlapping.extend(overlapping.extend(nothing, [0, 1]), [2])
    overlapping.extend(make_plan([], 1), [0, 1, 2])


# ------------------------------------------------------------------ classes and kinds


@pytest.mark.parametrize("bad", ["AdamW", None, torch.optim.SGD([P], lr=1.0), torch.optim, 3])
def test_what_is_not_a_class_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match="must be a class such as"):
        check_class(bad)


@pytest.mark.parametrize("bad", [int, nn.Linear, type("_FunctionalAdam", (), {})])
def test_a_class_that_is_no_optimizer_is_refused_by_name(bad: type) -> None:
    with pytest.raises(ValueError, match=bad.__name__):
        check_class(bad)


def policy_for(
    group: dict[str, Any],
    defaults: dict[str, Any] | None = None,
    partition: str = "auto",
    world_size: int = 1,
) -> GroupPolicy:
    """Of a group in an optimizer whose own class is SGD."""
    policies = PartitionPolicy(torch.optim.SGD, Settings(partition), {}, world_size)
    return policies.of({"params": [P], **group}, defaults or {})


def is_fused(*args: Any) -> bool:
    return policy_for(*args).fused


def is_differentiable(*args: Any) -> bool:
    """What is cannot be sharded."""
    policy_for(*args)
    try:
        policy_for(*args, world_size=2)
    except ValueError as error:
        return "differentiable=True" in str(error)
    return False


def test_the_class_and_partition_of_a_group_come_before_those_of_the_constructor() -> None:
    adafactor = torch.optim.Adafactor
    assert policy_for({}, {"lr": 1}) == policy()
    assert policy_for({}, partition="whole").kind is Kind.WHOLE
    assert policy_for({"partition": "whole"}).kind is Kind.WHOLE
    assert policy_for({"partition": "elementwise"}, partition="whole").kind is Kind.ELEMENTWISE
    assert policy_for({"optimizer_class": adafactor}) == policy(adafactor, Kind.WHOLE)


@pytest.mark.parametrize(
    ("option", "is_on"), [("fused", is_fused), ("differentiable", is_differentiable)]
)
def test_options_that_planning_must_know_come_from_the_group_or_the_constructor(
    option: str, is_on: Callable[..., bool]
) -> None:
    assert is_on({}, {option: True})
    assert is_on({option: True})
    assert not is_on({option: False}, {option: True})
    assert not is_on({option: None})
    other = {"optimizer_class": torch.optim.AdamW}
    assert not is_on(other, {option: True})


def test_keywords_of_the_constructor_reach_only_groups_of_its_class() -> None:
    seen = []

    class Picky(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
            seen.append(options)
            super().__init__(params, lr)

    policy_for({"optimizer_class": Picky}, {"momentum": 0.9})
    assert seen
    assert all(options == {} for options in seen)
    seen.clear()
    group = {"mine": 1, "params": [P], "param_names": ["a"]}
    PartitionPolicy(Picky, Settings(), {}).of(group, {"theirs": 2})
    assert seen
    assert all(options == {"mine": 1, "theirs": 2} for options in seen)


def test_a_class_is_tried_out_on_the_dtypes_of_the_group() -> None:
    class Scaled(torch.optim.SGD):
        """Scales narrow gradients by their largest element."""

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.dtype == torch.bfloat16:
                    p.grad.div_(p.grad.abs().max())
            return super().step(closure)

    wide, narrow = param(3), param(3, dtype=torch.bfloat16)
    for params, kind in (
        ([wide], Kind.ELEMENTWISE),
        ([narrow], Kind.WHOLE),
        ([wide, narrow], Kind.WHOLE),
        ([], Kind.ELEMENTWISE),
    ):
        assert policy_for({"params": params, "optimizer_class": Scaled}).kind is kind


@pytest.mark.parametrize(
    ("group", "error", "says"),
    [
        ({"optimizer_class": "SGD"}, TypeError, "class"),
        ({"optimizer_class": nn.Linear}, ValueError, "Linear"),
        ({"optimizer_class": torch.optim.LBFGS}, ValueError, "LBFGS cannot be sharded"),
        ({"partition": "rows"}, ValueError, "rows"),
        (
            {"optimizer_class": torch.optim.Adafactor, "partition": "elementwise"},
            ValueError,
            "Adafactor",
        ),
    ],
    ids=str,
)
def test_a_group_with_a_bad_class_or_partition_is_refused(
    group: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        policy_for(group, {"lr": 0.1})


def test_options_are_what_is_neither_ours_nor_torchs() -> None:
    group: dict[str, Any] = {"params": [P], "param_names": ["a"], "lr": 1, "initial_lr": 2}
    group |= {"optimizer_class": Optimizer, "partition": "auto"}
    assert options_of(group) == {"lr": 1, "initial_lr": 2}
    assert "params" in group


# ------------------------------------------------------------------ for the planner


def test_frozen_parameters_are_left_out_and_plain_tensors_are_not() -> None:
    frozen = param(2)
    frozen.requires_grad_(False)
    assert is_trainable(P)
    assert not is_trainable(frozen)
    frozen.grad = torch.ones(2)  # somebody will want it applied
    assert is_trainable(frozen)
    assert is_trainable(torch.zeros(3))
    assert is_trainable(torch.zeros(3, dtype=torch.complex64))
    assert not is_trainable(torch.zeros(3, dtype=torch.int64))
    assert not is_trainable(nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False))


def test_a_spec_says_what_the_planner_needs() -> None:
    tensor = param(3, 5, dtype=torch.bfloat16)
    _, spec = registry_of([P, tensor], fused=True).specs([0, 1])
    assert (spec.index, spec.numel, spec.dtype, spec.itemsize) == (1, 15, "bfloat16", 2)
    assert (spec.device, spec.kind, spec.cost, spec.fused) == (
        *("cpu #0", Kind.ELEMENTWISE),
        *(15, True),
    )


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.zeros(3, 4).t(), Kind.ELEMENTWISE),
        (torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), Kind.ELEMENTWISE),
        (torch.zeros(8)[::2], Kind.WHOLE),
        (torch.zeros(4, 4)[:, :2], Kind.WHOLE),
        (torch.zeros(1).expand(3), Kind.WHOLE),
    ],
    ids=lambda value: str(value.stride()) if torch.is_tensor(value) else value.value,
)
def test_a_tensor_with_gaps_is_kept_whole(tensor: torch.Tensor, kind: Kind) -> None:
    assert spec_of(tensor).kind is kind


def test_the_cost_of_muon_enters_the_spec() -> None:
    Muon = type("Muon", (torch.optim.SGD,), {})
    assert spec_of(param(3, 5), cls=Muon, kind=Kind.WHOLE).cost == 5 * 3 * 3


def test_devices_are_named_by_the_order_in_which_they_appear() -> None:
    """Rank 0 is on cuda:0 and rank 1 on cuda:1, and their plans must be equal."""

    class On:
        def __init__(self, device: str) -> None:
            self.device = torch.device(device)

    mine = device_names([On(d) for d in ("cuda:1", "cuda:3", "cuda:1")])  # type: ignore[misc]
    theirs = device_names([On(d) for d in ("cuda:0", "cuda:2", "cuda:0")])  # type: ignore[misc]
    assert list(mine.values()) == list(theirs.values()) == ["cuda #0", "cuda #1"]
    assert mine[torch.device("cuda:3")] == "cuda #1"


# ------------------------------------------------------------------ for agreement


def param_line(
    tensor: torch.Tensor, name: str = "p", planned: bool = True, with_storage: bool = True
) -> str:
    """A parameter in the description that ranks compare."""
    group = {"params": [tensor], "param_names": [name]}
    registry = ParamRegistry().with_group(group, policy())
    plan = registry.extend(make_plan([], 1), [0] if planned else [])
    (line,) = (
        line
        for line in registry.description([group], plan, with_storage)
        if line.startswith("parameter 0")
    )
    return line


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 2),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(2, 3, 1),
    ],
    ids=lambda value: f"{tuple(value.shape)} {value.stride()} {value.dtype}",
)
def test_whatever_differs_between_two_parameters_shows(other: torch.Tensor) -> None:
    lines = [param_line(tensor) for tensor in (torch.zeros(2, 3), other)]
    assert lines[0] != lines[1]
    assert all(line.startswith("parameter 0 (p): ") for line in lines)


def test_the_description_of_a_parameter_shows_device_trainability_and_sharing() -> None:
    tensor, part = torch.zeros(2), torch.zeros(4)[:2]
    lines = {
        param_line(tensor),
        param_line(torch.zeros(2, device="meta")),
        param_line(tensor, planned=False),
        param_line(part),
        param_line(tensor, name="q"),
    }
    assert len(lines) == 5
    # Without flat storage it does not matter who else lives in the storage.
    assert param_line(tensor, with_storage=False) == param_line(part, with_storage=False)


def describe(options: dict[str, Any], cls: type[Optimizer] = torch.optim.SGD) -> list[str]:
    group = {"params": [P, Q], **options}
    registry = ParamRegistry().with_group({"params": []}, policy()).with_group(group, policy(cls))
    lines = registry.description([{"params": []}, group], make_plan([], 1), with_storage=False)
    return [line for line in lines if line.startswith("group 1: ")]


def test_the_description_of_a_group_names_class_kind_count_and_every_option() -> None:
    first, *options = describe({"lr": 0.1, "betas": (0.9, 0.999), "flag": None, "name": "x"})
    assert first.startswith("group 1: torch.optim.sgd.SGD, elementwise, 2 parameters")
    assert options == [
        "group 1: betas = (0.9, 0.999)",
        "group 1: flag = None",
        "group 1: lr = 0.1",
        "group 1: name = 'x'",
    ]
    assert describe({}) != describe({}, torch.optim.Adam)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (0.1, 0.1 + 1e-17 + 1e-16),
        (1, "1"),
        (True, 1),
        ((1, 2), (1, 3)),
        (torch.tensor(0.1), torch.tensor(0.2)),
        (torch.ones(3), torch.ones(4)),
        (torch.ones(30), torch.ones(31)),
        (float("nan"), 0.0),
        (1j, 2j),
        (abs, [abs]),
    ],
    ids=str,
)
def test_whatever_differs_between_two_option_values_shows(a: Any, b: Any) -> None:
    assert describe({"option": a}) != describe({"option": b})
    assert describe({"option": a}) == describe({"option": a})


def test_a_value_that_prints_its_address_does_not_make_ranks_differ() -> None:
    class Schedule:
        pass

    assert describe({"x": Schedule()}) == describe({"x": Schedule()})
    assert describe({"x": [lambda: 0]}) == describe({"x": [lambda: 0]})
    assert describe({"b": 1, "a": 2}) == describe({"a": 2, "b": 1})


# ---------------------------------------- groups that are changed or added


@distributed(1, 2)
def test_a_parameter_exchanged_in_its_group_is_refused(world: World) -> None:
    old, new = random_parameter(5), random_parameter(6)
    opt = ZeroRedundancyOptimizer([old], torch.optim.SGD, lr=0.1)
    opt.param_groups[0]["params"][0] = new
    with pytest.raises(RuntimeError, match="add_param_group"):
        train_on_constants(opt, [old, new])


@distributed(1, 2, 3)
def test_an_empty_group_can_be_added(world: World) -> None:
    param = random_parameter(9)
    opt = ZeroRedundancyOptimizer([param], torch.optim.AdamW)
    opt.add_param_group({"params": []})
    train_on_constants(opt, [param])
    assert len(opt.optim.param_groups) == 2


@distributed(1, 2)
def test_keywords_that_no_group_uses_are_refused(world: World) -> None:
    group = {"params": params_of_shapes((4, 4)), "optimizer_class": SGD, "lr": 0.1}
    with pytest.raises(ValueError, match="bogus"):
        ZeroRedundancyOptimizer([group], AdamW, bogus=1)
    with pytest.raises(ValueError, match=r"betas|lr"):
        ZeroRedundancyOptimizer([group], AdamW, lr=5.0, betas=(0.5, 0.5))
    ZeroRedundancyOptimizer([group], AdamW)
    ZeroRedundancyOptimizer([group, {"params": params_of_shapes((3,))}], AdamW, betas=(0.5, 0.5))


@distributed(1, 2)
def test_another_class_in_a_group_by_hand_is_refused(world: World) -> None:
    params = params_of_shapes((3, 3))
    optimizer = ZeroRedundancyOptimizer([{"params": params, "optimizer_class": SGD}], SGD, lr=0.1)
    optimizer.param_groups[0]["optimizer_class"] = AdamW
    with pytest.raises(RuntimeError, match="group 0 was built with SGD and now says AdamW"):
        optimizer.step()
