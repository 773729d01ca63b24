"""Where gradients come together in a bucket: small ones at once, with the same result."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inside import ADD_RUN

import onecopy.lanes
from onecopy.buffers import flat_range
from onecopy.hosts import Hosts
from onecopy.kinds import Kind
from onecopy.lanes import Lane, LaneStaging, Place, Stretch
from onecopy.plan import ParamSpec, Plan, make_plan

LARGE = (1 << 14) + 16


class FirstOfTwo:
    """As much of a transport as a lane asks for."""

    rank = 0
    hosts = Hosts.apart(2)
    at_once = False

    def lends(self, *_: Any) -> bool:
        return False

    def is_native(self, *_: Any) -> bool:
        return False

    def sends_one_by_one(self, *_: Any) -> bool:
        return not self.at_once


def planned(
    params: Sequence[torch.Tensor],
    bucket_bytes: int,
    fused: bool = False,
    kind: Kind = Kind.ELEMENTWISE,
) -> Plan:
    specs = [
        ParamSpec(i, p.numel(), "torch.float32", 4, "cpu", kind, fused=fused)
        for i, p in enumerate(params)
    ]
    return make_plan(specs, 2, bucket_bytes / 2**20)


def lanes_of(
    plan: Plan,
    params: Sequence[torch.Tensor],
    wire: torch.dtype | None = None,
    at_once: bool = False,
) -> list[Lane]:
    transport = cast("Any", FirstOfTwo())
    transport.at_once = at_once
    lanes = [Lane.of(plan, b, params, transport, wire, None) for b in range(len(plan.buckets))]
    staging = LaneStaging.of_depth(len(lanes))
    for lane in lanes:
        lane.demand(staging)
    for lane in lanes:
        lane.settle(plan, params, staging)
        lane.outgoing.fill_(float("nan"))
    return lanes


def require_filled(
    lane: Lane, plan: Plan, gradients: dict[int, torch.Tensor], share: float
) -> None:
    for segment in plan.segments(lane.bucket):
        found = lane.outgoing[segment.offset :][: segment.stop - segment.start]
        grad = gradients.get(segment.param)
        expected = torch.zeros_like(found)
        if grad is not None:
            whole = flat_range(grad * share, 0, grad.numel())
            expected = whole[segment.start : segment.stop].to(found.dtype)
        assert torch.equal(found, expected)


shapes = st.sampled_from([(3,), (16,), (4, 5), (2, 3, 4, 5), (), (0,), (7, 1), (LARGE,)])


@given(
    st.lists(shapes, min_size=1, max_size=12),
    st.data(),
    st.sampled_from([None, torch.bfloat16, torch.float64]),
    st.sampled_from([1.0, 0.5, 1 / 3]),
)
@settings(deadline=None, max_examples=60)
def test_every_gradient_comes_to_its_place(
    sizes: list[tuple[int, ...]], data: st.DataObject, wire: torch.dtype | None, share: float
) -> None:
    params = [torch.zeros(shape) for shape in sizes]
    params = [
        p.to(memory_format=torch.channels_last) if p.dim() == 4 and data.draw(st.booleans()) else p
        for p in params
    ]
    bucket_bytes = data.draw(st.sampled_from([64, 1 << 10, 1 << 20]))
    plan = planned(params, bucket_bytes, fused=data.draw(st.booleans()))
    gradients = {i: torch.randn_like(p) for i, p in enumerate(params) if data.draw(st.booleans())}
    if wire is torch.float64:  # as if wider gradients were rounded for the wire
        gradients = {i: grad.double() for i, grad in gradients.items()}
        wire = None
    for lane in lanes_of(plan, params, wire):
        lane.fill(gradients, share)
        require_filled(lane, plan, gradients, share)


@given(
    st.lists(shapes, min_size=1, max_size=12),
    st.sampled_from([Kind.ELEMENTWISE, Kind.WHOLE]),
    st.sampled_from([64, 1 << 20]),
)
@example([(3,), (0,), (5, 2), (1,), (0, 4), (2,)], Kind.WHOLE, 1 << 20)
@settings(deadline=None, max_examples=60)
def test_parts_that_are_exchanged_at_once_lie_side_by_side(
    sizes: list[tuple[int, ...]], kind: Kind, bucket_bytes: int
) -> None:
    """Also whole tensors, with parameters without elements between them: nothing is copied."""
    params = [torch.randn(shape) for shape in sizes]
    plan = planned(params, bucket_bytes, kind=kind)
    gradients = {i: torch.randn_like(p) for i, p in enumerate(params) if i % 3}
    for lane in lanes_of(plan, params, at_once=True):
        lane.fill(gradients, 0.5)
        outgoing, of_owner = lane.parts_in_order()
        assert not outgoing.numel() or outgoing.data_ptr() == lane.outgoing.data_ptr()
        parts = outgoing.split(of_owner)
        for owner, part in enumerate(parts):
            assert part.data_ptr() == lane.part_for(owner, lane.outgoing).data_ptr()
            start, stop = plan.range_of(lane.bucket, owner)
            assert part.numel() == stop - start
            for piece in plan.pieces_in(lane.bucket, owner):
                found = part[piece.offset - start :][: piece.numel]
                grad = gradients.get(piece.param, torch.zeros_like(params[piece.param]))
                assert torch.equal(found, grad.flatten()[piece.start : piece.stop] * 0.5)


def test_what_is_held_is_added_to_the_finished_sum_in_runs() -> None:
    """The contributions are added in the order of the ranks; then the sum to what the slot holds.
    With three of them, in runs of 2^17 elements: the last one is shorter here."""
    numel = 2 * (1 << 17) + 12_345
    torch.manual_seed(0)
    params = [torch.zeros(2 * numel)]
    (lane,) = lanes_of(planned(params, 1 << 30), params)
    first, second, third, held = torch.randn(4, numel).unbind()
    total = (first + second) + third
    assert not torch.equal(total, (second + third) + first)
    lane.add([first, second, third])
    assert lane.holds
    assert torch.equal(lane.slot, total)
    lane.slot.copy_(held)
    lane.add([first, second, third])
    assert torch.equal(lane.slot, held + total)
    assert not torch.equal(lane.slot, ((held + first) + second) + third)
    for contributions, expected in [([first], first), ([first, second], first + second)]:
        lane.slot.copy_(held)
        lane.add(contributions)
        assert torch.equal(lane.slot, held + expected)


def test_runs_that_are_added_up_at_a_time_fit_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 2 * (1 << 17) + 12_345
    params = [torch.zeros(2 * numel)]
    (lane,) = lanes_of(planned(params, 1 << 30), params)
    add, lengths = getattr(*ADD_RUN), []

    def watched(slot: torch.Tensor, *args: Any) -> None:
        lengths.append(slot.numel())
        add(slot, *args)

    monkeypatch.setattr(*ADD_RUN, watched)
    for count, expected in [(2, [numel]), (3, [1 << 17, 1 << 17, 12_345])]:
        lane.add([torch.ones(numel)] * count)
        assert lengths == expected
        lengths.clear()


def test_narrow_gradients_are_widened_before_they_are_scaled() -> None:
    params = [torch.zeros(5), torch.zeros(3)]
    plan = planned(params, 1 << 20)
    (lane,) = lanes_of(plan, params)
    gradients = {0: torch.randn(5).bfloat16(), 1: torch.randn(3)}
    lane.fill(gradients, 1 / 3)
    require_filled(lane, plan, {i: grad.float() for i, grad in gradients.items()}, 1 / 3)


def test_thousands_of_small_tensors_are_a_few_stretches_without_views() -> None:
    params = [torch.zeros(16, 16) for _ in range(1000)]
    (lane,) = lanes_of(planned(params, 1 << 20), params)
    assert all(isinstance(place, Stretch) for place in lane.places)
    assert len(lane.places) == 8


def test_what_is_large_or_cut_or_stored_in_another_order_has_a_place_of_its_own() -> None:
    params = [torch.zeros(LARGE), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    (lane,) = lanes_of(planned(params, 1 << 20), params)
    assert [isinstance(place, Place) for place in lane.places] == [True, True]
    small = [torch.zeros(100)]
    cut = lanes_of(planned(small, 30 * 4), small)
    assert len(cut) > 1
    assert all(isinstance(place, Place) for lane in cut for place in lane.places)


def test_a_gradient_of_another_length_is_an_error_and_changes_no_staging() -> None:
    params = [torch.zeros(5), torch.zeros(3)]
    (lane,) = lanes_of(planned(params, 1 << 20), params)
    with pytest.raises(RuntimeError, match="invalid for input of size 9"):
        lane.fill({0: torch.zeros(6), 1: torch.zeros(3)}, 0.5)
    assert lane.outgoing.numel() == 8


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(onecopy.lanes).failed == 0
