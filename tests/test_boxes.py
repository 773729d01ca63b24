"""Ranges of a tensor's elements as boxes: together they are the range, and each can be viewed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from onecopy.boxes import Box, boxes_of, storage_order

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


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


@given(ranges())
@example(((), (), 0, 1))
@example(((), (), 0, 0))
@example(((1, 1, 1), (2, 0, 1), 0, 1))
@example(((4, 6), (0, 1), 4, 19))
@quick
def test_boxes_hold_each_element_of_the_range_once_in_order_and_nothing_else(case: Case) -> None:
    shape, order, start, stop = case
    tensor = dense(shape, order)
    found = []
    for box in boxes_of(shape, order, start, stop):
        elements = sorted(part(tensor, box).flatten().tolist())
        assert elements == list(range(box.start, box.stop))  # contiguous in storage
        assert box.numel == len(elements) > 0
        found += elements
    assert found == list(range(start, stop))


@given(ranges())
@quick
def test_a_range_of_an_n_dimensional_tensor_is_at_most_2n_minus_1_boxes(case: Case) -> None:
    shape, order, start, stop = case
    assert len(list(boxes_of(shape, order, start, stop))) <= max(1, 2 * len(shape) - 1)


@given(ranges(), st.integers(0, 7))
@quick
def test_a_view_of_a_box_has_its_elements_where_the_tensor_has_them(case: Case, lead: int) -> None:
    shape, order, start, stop = case
    tensor = dense(shape, order)
    first = max(0, start - lead)  # the memory may begin before the range
    flat = torch.arange(first, stop)
    for box in boxes_of(shape, order, start, stop):
        view = box.view(flat, first, order)
        assert view.shape == box.sizes
        assert torch.equal(view, part(tensor, box))
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@given(ranges())
@quick
def test_the_order_of_storage_can_be_seen_from_the_strides(case: Case) -> None:
    shape, order, start, stop = case
    tensor = dense(shape, order)
    seen = storage_order(tensor.shape, tensor.stride())
    assert sorted(seen) == list(range(len(shape)))
    boxes = list(boxes_of(shape, seen, start, stop))
    assert sorted(i for b in boxes for i in part(tensor, b).flatten().tolist()) == list(
        range(start, stop)
    )


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 2)])
def test_an_empty_tensor_is_one_empty_box(shape: tuple[int, ...]) -> None:
    order = storage_order(shape, torch.empty(shape).stride())
    (box,) = boxes_of(shape, order, 0, 0)
    assert box == Box((0,) * len(shape), shape, 0, 0)
    assert box.numel == 0
    assert box.view(torch.empty(0), 0, order).shape == shape


def test_a_scalar_is_one_box_without_dimensions() -> None:
    (box,) = boxes_of((), (), 0, 1)
    assert box == Box((), (), 0, 1)
    view = box.view(torch.tensor([3.0]), 0, ())
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
def test_an_overlap_is_what_two_boxes_have_in_common_whichever_comes_first(
    pair: tuple[list[tuple[int, int]], list[tuple[int, int]]],
) -> None:
    a, b = (Box(tuple(o for o, _ in corner), tuple(n for _, n in corner), 0, 0) for corner in pair)
    common = a.overlap(b.offsets, b.sizes)
    assert common == b.overlap(a.offsets, a.sizes)
    expected = cells(a.offsets, a.sizes) & cells(b.offsets, b.sizes)
    if common is None:
        assert not expected.any()
    else:
        assert common.numel > 0
        assert torch.equal(cells(common.offsets, common.sizes), expected)
