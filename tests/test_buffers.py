"""Flat ranges of dense tensors, flat homes for parameters, reused staging."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onecopy.buffers import (
    FlatHomes,
    Staging,
    fills_its_storage,
    first_overlap,
    flat_range,
    in_layout_of,
    is_dense,
    one_of_each,
)
from onecopy.kinds import Kind
from onecopy.plan import ParamSpec, Plan, make_plan

BUSY = [HealthCheck.too_slow]  # a busy machine is no fault of a test
anything = settings(deadline=None, max_examples=100, suppress_health_check=BUSY)


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=dtype).reshape(shape)


@st.composite
def dense_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Numbered in storage order, with dimensions in any order and strides of 1-sizes at random."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    tensor = numbered(*shape).permute(order)
    strides = [
        draw(st.integers(0, 99)) if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    offset = draw(st.integers(0, 3))  # it need not begin where its storage begins
    storage = torch.cat([torch.full((offset,), -1.0), numbered(tensor.numel()), torch.ones(2)])
    return storage.as_strided(tensor.shape, strides, offset)


# ------------------------------------------------------------------ remembered of thousands


def test_equal_values_are_one_object() -> None:
    shapes = [torch.zeros(size).shape for size in (3, 4, 3, 3)]
    assert shapes[0] is not shapes[2]
    found = one_of_each(shapes)
    assert found == shapes
    assert found[0] is found[2] is found[3]


# ------------------------------------------------------------------ dense


@given(dense_tensors())
@anything
def test_every_order_of_dimensions_is_dense(tensor: torch.Tensor) -> None:
    assert is_dense(tensor)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.empty(3, 4), True),
        (torch.empty(3, 4).t(), True),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), True),
        (torch.empty(7, 1, 1, 1).to(memory_format=torch.channels_last), True),
        (torch.empty(()), True),
        (torch.empty(0), True),
        (torch.empty(5, 0, 3), True),
        (torch.empty(9)[2:5], True),
        (torch.empty(1, 4).expand(1, 4), True),
        (torch.empty(6, 4)[:, :1].squeeze(1)[:1], True),  # one element, whatever its stride
        (torch.empty(9)[::2], False),
        (torch.empty(3, 4)[:, :3], False),
        (torch.empty(3, 4)[::2], False),
        (torch.empty(1, 4).expand(3, 4), False),
        (torch.empty(()).expand(3), False),
        (torch.empty(6).as_strided((2, 2), (1, 1)), False),
        (torch.empty(8).as_strided((2, 3), (3, 2)), False),
    ],
    ids=lambda value: f"{tuple(value.shape)} {value.stride()}" if torch.is_tensor(value) else "",
)
def test_dense_means_one_gapless_run_of_memory(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) is dense


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=3),
)
@anything
def test_dense_agrees_with_counting_the_addresses(dims: list[tuple[int, int]]) -> None:
    shape, stride = [size for size, _ in dims], [step for _, step in dims]
    tensor = torch.empty(200).as_strided(shape, stride)
    places = [
        sum(i * step for i, step in zip(index, stride, strict=True))
        for index in itertools.product(*map(range, shape))
    ]
    assert is_dense(tensor) is (sorted(places) == list(range(len(places))))


# ------------------------------------------------------------------ ranges


@given(dense_tensors(), st.data())
@anything
def test_a_flat_range_is_the_memory_itself_in_storage_order(
    tensor: torch.Tensor, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    part = flat_range(tensor, start, stop)
    assert part.tolist() == list(range(start, stop))
    assert part.is_contiguous()
    part.fill_(-5)
    assert (tensor == -5).sum() == stop - start
    rest = [*range(start), *range(stop, tensor.numel())]
    assert sorted(tensor[tensor != -5].tolist()) == rest


@given(dense_tensors(), st.randoms(use_true_random=False))
@anything
def test_bringing_a_gradient_into_the_layout_of_its_parameter_pairs_the_elements(
    param: torch.Tensor, rng: random.Random
) -> None:
    order = list(range(param.ndim))
    rng.shuffle(order)
    inverse = [order.index(i) for i in range(param.ndim)]
    gradient = param.double().permute(order).contiguous().permute(inverse)
    assert torch.equal(gradient, param.double())

    brought = in_layout_of(param, gradient)
    assert torch.equal(brought, gradient)
    assert brought.dtype == torch.float64
    assert is_dense(brought)
    # Now a range of the one belongs to the same range of the other.
    n = param.numel()
    assert flat_range(brought, 0, n).tolist() == flat_range(param, 0, n).tolist()


def test_a_gradient_that_lies_right_is_not_copied() -> None:
    weight = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
    for gradient in (torch.zeros_like(weight), torch.zeros(4, 2, 2, 3).permute(0, 3, 1, 2)):
        assert in_layout_of(weight, gradient) is gradient
    pointwise = torch.empty(4, 3, 1, 1).to(memory_format=torch.channels_last)
    gradient = torch.empty(4, 3, 1, 1)
    assert gradient.stride() != pointwise.stride()
    assert in_layout_of(pointwise, gradient) is gradient


def test_a_contiguous_gradient_of_a_channels_last_weight_is_reordered() -> None:
    weight = numbered(2, 3, 2, 2).to(memory_format=torch.channels_last)
    gradient = numbered(2, 3, 2, 2) * 10
    brought = in_layout_of(weight, gradient)
    assert torch.equal(flat_range(brought, 5, 11), flat_range(weight, 5, 11) * 10)
    assert not torch.equal(flat_range(gradient, 5, 11), flat_range(weight, 5, 11) * 10)


# ------------------------------------------------------------------ shared memory


def test_a_tensor_fills_its_storage_if_nothing_else_can_live_there() -> None:
    whole = torch.empty(3, 4)
    assert fills_its_storage(whole)
    assert fills_its_storage(whole.t())
    assert fills_its_storage(torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last))
    assert not fills_its_storage(whole[1:])
    assert not fills_its_storage(whole[:2])
    assert not fills_its_storage(torch.empty(1).expand(4))


def test_the_first_two_tensors_that_share_memory_are_found() -> None:
    storage = torch.empty(100)
    apart = [storage[:10], storage[10:20], torch.empty(5), storage[30:40], torch.empty(5)]
    assert first_overlap(apart) is None
    assert first_overlap([]) is None
    assert first_overlap([*apart, storage[39:41]]) == (3, 5)
    assert first_overlap([storage[15:16], *apart]) == (0, 2)
    assert first_overlap([*apart, storage]) == (0, 5)
    assert first_overlap([storage[50:], storage[:51]]) == (0, 1)
    assert first_overlap([storage[::2], storage[99:]]) is None
    assert first_overlap([storage[::2], storage[97:]]) == (0, 1)
    assert first_overlap([torch.ones(1), apart[0], torch.ones(1), apart[0].view(2, 5)]) == (1, 3)


def test_tensors_without_memory_share_none() -> None:
    empty = torch.empty(0)
    meta = torch.empty(5, device="meta")
    assert first_overlap([empty, empty, meta, meta.view(5), torch.empty(3)[1:1]]) is None


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 6)), max_size=7))
@anything
def test_overlaps_are_found_exactly_where_they_are(spans: list[tuple[int, int]]) -> None:
    storage = torch.empty(100, dtype=torch.float64)
    tensors = [storage[start : start + length] for start, length in spans]
    held = [set(range(start, start + length)) for start, length in spans]
    pairs = {(i, j) for i, j in itertools.combinations(range(len(spans)), 2) if held[i] & held[j]}
    found = first_overlap(tensors)
    assert found in pairs if pairs else found is None


def test_interleaved_columns_of_one_storage_share_nothing() -> None:
    both = torch.empty(4, 6)
    assert first_overlap([both[:, :3], both[:, 3:]]) is None
    assert first_overlap([both[:, :3], both[:, 3:], both[3:]]) in ((0, 2), (1, 2))
    assert first_overlap([both[:, :4], both[:, 3:]]) == (0, 1)
    # The outer one ends behind both of the others, and shares with the later of them only.
    assert first_overlap([both[:, 0], both[1, 1:3], both[2, :2]]) == (0, 2)


def test_an_expanded_tensor_overlaps_what_it_was_expanded_from() -> None:
    row = torch.empty(6)
    assert first_overlap([row[:1].expand(3), row[1:]]) is None
    assert first_overlap([row[:2].expand(3, 2), row[1:]]) == (0, 1)
    assert first_overlap([row[2:3].expand(4), torch.empty(2), row]) == (0, 2)


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
    homes: FlatHomes, plan: Plan, params: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
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
    homes = FlatHomes()
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
    homes = FlatHomes()
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
    homes = FlatHomes()
    homes.adopt(plan, params)
    homed = [param.data_ptr() for param in params]
    params[0].data = torch.full((5, 3), 7.0)
    params[1].data = torch.full_like(params[1], 8.0)
    values = [param.detach().clone() for param in params]
    homes.bring_home(params)
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
    homes = FlatHomes()
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
    homes = FlatHomes()
    homes.adopt(make_plan(specs_of([first, second]), 2), [first, second])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.data_ptr() == storage.data_ptr()


# ------------------------------------------------------------------ staging


def test_staging_is_reused_every_so_many_turns_and_fits_the_largest() -> None:
    like = torch.empty(0)
    staging = Staging(depth=3)
    wanted = [5, 8, 2, 9, 1, 2, 7]
    for turn, numel in enumerate(wanted):
        staging.demand(turn, numel, like)
    buffers = [staging.reserve(turn, numel, like) for turn, numel in enumerate(wanted)]
    assert [buffer.numel() for buffer in buffers] == wanted
    assert [buffer.dtype for buffer in buffers] == [torch.float32] * len(wanted)
    for i, j in itertools.combinations(range(len(wanted)), 2):
        same_memory = buffers[i].data_ptr() == buffers[j].data_ptr()
        assert same_memory is ((j - i) % 3 == 0)
    assert first_overlap(buffers[:3]) is None
    storages = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in buffers}
    assert sum(storages.values()) == 4 * (9 + 8 + 2)  # each as large as its largest, no larger


def test_staging_of_other_dtypes_is_other_memory() -> None:
    staging = Staging(depth=2)
    narrow, wide = torch.empty(0, dtype=torch.bfloat16), torch.empty(0, dtype=torch.float64)
    for like in (narrow, wide):
        staging.demand(0, 4, like)
    buffers = [staging.reserve(0, 4, like) for like in (narrow, wide)]
    assert [buffer.dtype for buffer in buffers] == [torch.bfloat16, torch.float64]
    assert first_overlap(buffers) is None


def test_staging_starts_without_garbage() -> None:
    staging = Staging(depth=1)
    staging.demand(0, 1000, torch.empty(0))
    assert not staging.reserve(0, 1000, torch.empty(0)).any()
