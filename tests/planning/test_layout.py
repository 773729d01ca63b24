"""Where the elements of a tensor lie: ranges as chunks, dense tensors, flat ranges, overlaps."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from onecopy.planning.layout import (
    Chunk,
    chunks_of,
    fills_its_storage,
    first_overlap,
    flat_range,
    in_layout_of,
    is_dense,
    storage_order,
)

# ------------------------------------------------------------------ chunks


BUSY = [HealthCheck.too_slow]  # a busy machine is no fault of a test
quick = settings(max_examples=100, deadline=None, suppress_health_check=BUSY)


Case = tuple[tuple[int, ...], tuple[int, ...], int, int]


@st.composite
def ranges(draw: Any) -> Case:
    """(shape, order of the dimensions in storage, start, stop), with at least one element."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=5)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, order, start, draw(st.integers(start, numel))


def dense(shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this layout whose elements are their own positions in storage."""
    flat = torch.arange(math.prod(shape))
    back = [order.index(dim) for dim in range(len(order))]
    return flat.view([shape[dim] for dim in order]).permute(back)


def part(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


@given(ranges())
@example(((), (), 0, 1))
@example(((), (), 0, 0))
@example(((1, 1, 1), (2, 0, 1), 0, 1))
@example(((4, 6), (0, 1), 4, 19))
@quick
def test_chunks_hold_each_element_of_the_range_once_in_order_and_nothing_else(case: Case) -> None:
    shape, order, start, stop = case
    tensor = dense(shape, order)
    found = []
    for chunk in chunks_of(shape, order, start, stop):
        elements = sorted(part(tensor, chunk).flatten().tolist())
        assert elements == list(range(chunk.start, chunk.stop))  # contiguous in storage
        assert chunk.numel == len(elements) > 0
        found += elements
    assert found == list(range(start, stop))


@given(ranges())
@quick
def test_a_range_of_an_n_dimensional_tensor_is_at_most_2n_minus_1_chunks(case: Case) -> None:
    shape, order, start, stop = case
    assert len(list(chunks_of(shape, order, start, stop))) <= max(1, 2 * len(shape) - 1)


@given(ranges(), st.integers(0, 7))
@quick
def test_a_view_of_a_chunk_has_its_elements_where_the_tensor_has_them(
    case: Case, lead: int
) -> None:
    shape, order, start, stop = case
    tensor = dense(shape, order)
    first = max(0, start - lead)  # the memory may begin before the range
    flat = torch.arange(first, stop)
    for chunk in chunks_of(shape, order, start, stop):
        view = chunk.view(flat, first, order)
        assert view.shape == chunk.sizes
        assert torch.equal(view, part(tensor, chunk))
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@given(ranges())
@quick
def test_the_order_of_storage_can_be_seen_from_the_strides(case: Case) -> None:
    shape, order, start, stop = case
    tensor = dense(shape, order)
    seen = storage_order(tensor.shape, tensor.stride())
    assert sorted(seen) == list(range(len(shape)))
    chunks = list(chunks_of(shape, seen, start, stop))
    assert sorted(i for b in chunks for i in part(tensor, b).flatten().tolist()) == list(
        range(start, stop)
    )


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 2)])
def test_an_empty_tensor_is_one_empty_chunk(shape: tuple[int, ...]) -> None:
    order = storage_order(shape, torch.empty(shape).stride())
    (chunk,) = chunks_of(shape, order, 0, 0)
    assert chunk == Chunk((0,) * len(shape), shape, 0, 0)
    assert chunk.numel == 0
    assert chunk.view(torch.empty(0), 0, order).shape == shape


def test_a_scalar_is_one_chunk_without_dimensions() -> None:
    (chunk,) = chunks_of((), (), 0, 1)
    assert chunk == Chunk((), (), 0, 1)
    view = chunk.view(torch.tensor([3.0]), 0, ())
    assert view.shape == ()
    assert view.item() == 3.0


Corner = tuple[tuple[int, int], ...]
corners = st.integers(0, 4).flatmap(
    lambda dims: st.tuples(
        *[st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=dims, max_size=dims)]
        * 2
    )
)


def cells(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    marked = torch.zeros((10,) * len(offsets), dtype=torch.bool)
    marked[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = True
    return marked


@given(corners)
@example(([], []))
@quick
def test_an_overlap_is_what_two_chunks_have_in_common_whichever_comes_first(
    pair: tuple[list[tuple[int, int]], list[tuple[int, int]]],
) -> None:
    a, b = (
        Chunk(tuple(o for o, _ in corner), tuple(n for _, n in corner), 0, 0) for corner in pair
    )
    common = a.overlap(b.offsets, b.sizes)
    assert common == b.overlap(a.offsets, a.sizes)
    expected = cells(a.offsets, a.sizes) & cells(b.offsets, b.sizes)
    if common is None:
        assert not expected.any()
    else:
        assert common.numel > 0
        assert torch.equal(cells(common.offsets, common.sizes), expected)


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
