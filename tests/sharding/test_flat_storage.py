"""Flat homes for parameters, and staging that is reused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from onecopy.comm.interface import Buffer
from onecopy.planning.layout import first_overlap, flat_range, is_dense, one_of_each
from onecopy.planning.plan import ParamSpec, Plan, make_plan
from onecopy.planning.traits import Kind
from onecopy.sharding.engine import FlatStorage, StagingRequest, allocate_staging

# ------------------------------------------------------------------ remembered of thousands


def test_equal_values_are_one_object() -> None:
    shapes = [torch.zeros(size).shape for size in (3, 4, 3, 3)]
    assert shapes[0] is not shapes[2]
    found = one_of_each(shapes)
    assert found == shapes
    assert found[0] is found[2] is found[3]


# ------------------------------------------------------------------ flat homes


def specs_of(params: Sequence[torch.Tensor], first: int = 0) -> list[ParamSpec]:
    return [
        ParamSpec(
            index,
            param.numel(),
            str(param.dtype),
            param.element_size(),
            kind=Kind.ELEMENTWISE if is_dense(param) else Kind.WHOLE,
        )
        for index, param in enumerate(params)
        if index >= first
    ]


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [
        torch.nn.Parameter(tensor)
        for tensor in (
            torch.randn(5, 3),
            torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
            torch.randn(6, 5).t(),
            torch.randn(()),
            torch.randn(0, 4),
            torch.randn(7, dtype=torch.float64),
            torch.randn(70).bfloat16(),
            torch.randn(3).bfloat16(),
        )
    ]


def check_homes(
    homes: FlatStorage, plan: Plan, params: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> None:
    """Every parameter is where the plan says, with its values, its strides, and gradients."""
    for param, value in zip(params, values, strict=True):
        assert torch.equal(param, value)
        assert param.stride() == value.stride()
        assert param.dtype == value.dtype
    for number, stream in enumerate(plan.streams):
        flat = homes.range(number, 0, stream.stop)
        assert flat is not None
        for index, start, numel in zip(stream.params, stream.starts, stream.numels, strict=True):
            inside = homes.range(number, start, start + numel)
            assert inside is not None
            own = flat_range(params[index].detach(), 0, numel)
            assert torch.equal(inside, own)
            assert numel == 0 or inside.data_ptr() == own.data_ptr()
        padding = flat.clone()
        for start, numel in zip(stream.starts, stream.numels, strict=True):
            padding[start : start + numel] = 0
        assert not padding.any()  # what travels between parameters is never garbage


@pytest.mark.parametrize("world", [1, 3])
def test_homes_keep_objects_values_strides_and_autograd(world: int) -> None:
    params = parameters()
    values = [param.detach().clone() for param in params]
    identities = [id(param) for param in params]
    plan = make_plan(specs_of(params), world)
    homes = FlatStorage()
    homes.adopt(plan, params)
    check_homes(homes, plan, params, values)
    assert [id(param) for param in params] == identities
    assert all(p.is_leaf and p.requires_grad and p.grad_fn is None for p in params)
    (params[1] * 2).sum().backward()
    assert params[1].grad is not None
    assert params[1].grad.unique().tolist() == [2.0]


def test_homes_grow_with_the_plan_and_nobody_moves_twice() -> None:
    params = parameters()
    values = [param.detach().clone() for param in params]
    plan = make_plan(specs_of(params), 2)
    homes = FlatStorage()
    homes.adopt(plan, params)
    addresses = [param.data_ptr() for param in params]

    params += parameters()
    values += [param.detach().clone() for param in params[len(values) :]]
    plan = plan.extended(specs_of(params, first=len(addresses)))
    homes.adopt(plan, params)
    assert [param.data_ptr() for param in params[: len(addresses)]] == addresses
    check_homes(homes, plan, params, values)


def test_a_parameter_that_was_given_other_memory_is_brought_home_with_its_new_values() -> None:
    params = parameters()
    plan = make_plan(specs_of(params), 2)
    homes = FlatStorage()
    homes.adopt(plan, params)
    homed = [param.data_ptr() for param in params]
    params[0].data = torch.full((5, 3), 7.0)
    params[1].data = torch.full_like(params[1], 8.0)
    values = [param.detach().clone() for param in params]
    homes.adopt(plan, params)
    assert [param.data_ptr() for param in params] == homed
    check_homes(homes, plan, params, values)
    assert params[0].unique().tolist() == [7.0]


def test_a_parameter_in_a_shared_storage_stays_where_it_is() -> None:
    storage = torch.randn(10)
    shared = torch.nn.Parameter(storage[2:6])
    gaps = torch.nn.Parameter(torch.randn(6)[::2])
    folded = torch.nn.Parameter(torch.randn(4).as_strided((2, 2), (1, 1)))  # one element is twice
    params = [torch.nn.Parameter(torch.randn(3)), shared, gaps, folded]
    addresses = [param.data_ptr() for param in params]
    plan = make_plan(specs_of(params), 2)
    homes = FlatStorage()
    homes.adopt(plan, params)
    moved = [a != param.data_ptr() for a, param in zip(addresses, params, strict=True)]
    assert moved == [True, False, False, False]
    storage.fill_(3.0)
    assert shared.unique().tolist() == [3.0]
    # Such a stream is not one run of memory, and says so.
    assert [homes.range(n, 0, 1) for n in range(len(plan.streams))] == [None, None]


def test_two_parameters_that_share_a_storage_go_on_sharing_it() -> None:
    storage = torch.randn(8)
    first, second = torch.nn.Parameter(storage[:4]), torch.nn.Parameter(storage[4:])
    homes = FlatStorage()
    homes.adopt(make_plan(specs_of([first, second]), 2), [first, second])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.data_ptr() == storage.data_ptr()


# ------------------------------------------------------------------ staging


def test_staging_is_reused_every_so_many_turns_and_fits_the_largest() -> None:
    like = torch.empty(0)
    wanted = [5, 8, 2, 9, 1, 2, 7]
    buffers = allocate_staging(
        [
            StagingRequest(number % 3, numel, like, Buffer.allocate)
            for number, numel in enumerate(wanted)
        ]
    )
    assert buffers == [buffers[number % 3] for number in range(len(wanted))]
    tensors = [buffer.tensor for buffer in buffers[:3]]
    assert [tensor.dtype for tensor in tensors] == [torch.float32] * 3
    assert [tensor.numel() for tensor in tensors] == [9, 8, 2]  # as large as its largest, no larger
    assert first_overlap(tensors) is None


def test_staging_of_other_dtypes_is_other_memory() -> None:
    narrow, wide = torch.empty(0, dtype=torch.bfloat16), torch.empty(0, dtype=torch.float64)
    requests = [StagingRequest(0, 4, like, Buffer.allocate) for like in (narrow, wide)]
    buffers = [buffer.tensor for buffer in allocate_staging(requests)]
    assert [buffer.dtype for buffer in buffers] == [torch.bfloat16, torch.float64]
    assert first_overlap(buffers) is None


def test_staging_starts_without_garbage() -> None:
    (buffer,) = allocate_staging([StagingRequest(0, 1000, torch.empty(0), Buffer.allocate)])
    assert not buffer.tensor.any()
