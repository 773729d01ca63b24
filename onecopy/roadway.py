"""All lanes of a plan side by side, and the memory through which buckets pass in them.

A roadway is built for a plan and for parameters of certain shapes, and never changes: what would
follow another plan is another roadway. Lanes that are in both plans go on in it, with the gradients
that they hold. As long as it is not complete, the one before can still be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch

from onecopy.buffers import Staging, in_layout_of, is_dense, one_of_each
from onecopy.gatherer import IN_FLIGHT, LENT
from onecopy.lanes import Lane, LaneStaging
from onecopy.plan import Plan
from onecopy.transfers import Lendable
from onecopy.transport import Transport

_grad, _layout, _stride = attrgetter("grad"), attrgetter("layout"), torch.Tensor.stride


def forms_of(params: Sequence[torch.Tensor]) -> list[Any]:
    """All of the parameters that a roadway depends on."""
    return one_of_each((param.shape, param.stride(), param.dtype, param.device) for param in params)


@dataclass(frozen=True, slots=True, eq=False)
class Roadway:
    """A lane for each bucket; without any, as long as there is no plan to follow."""

    plan: Plan
    params: Sequence[torch.Tensor] = ()
    forms: list[Any] = field(default_factory=list)  # of the parameters
    lanes: Sequence[Lane] = ()
    lanes_of: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # of what is planned
    are_dense: Sequence[bool] = ()  # by parameter
    # For each piece of this rank in a bucket: its parameter, and where its gradient is.
    views: Sequence[Sequence[tuple[int, torch.Tensor]]] = ()
    staging: LaneStaging = field(default_factory=lambda: LaneStaging.of_depth(IN_FLIGHT))

    @classmethod
    def build(
        cls,
        plan: Plan,
        params: Sequence[torch.Tensor],
        transport: Transport,
        dtypes: tuple[torch.dtype | None, torch.dtype | None],
        kept: Sequence[Lane] = (),
    ) -> Roadway:
        """``kept``: lanes of the first buckets, which go on, as before if memory is lacking.
        ``dtypes``: in which gradients travel, and of the master."""
        new = range(len(kept), len(plan.buckets))
        lanes = [*kept, *(Lane.of(plan, bucket, params, transport, *dtypes) for bucket in new)]
        transport.neighbours.forget()
        staging = LaneStaging.of_depth(IN_FLIGHT, _outgoing_staging(transport))
        for lane in lanes:
            lane.demand(staging)
        for lane in lanes:  # may fail: nothing has been changed yet
            lane.reserve(staging)
        lanes_of: dict[int, tuple[int, ...]] = {}
        for number, lane in enumerate(lanes):
            lane.settle(plan, params, staging)
            alone = (number,)  # the same for nearly all
            for index in lane.params:
                lanes_of[index] = (*lanes_of[index], number) if index in lanes_of else alone
        return cls(
            plan,
            params,
            forms_of(params),
            lanes,
            lanes_of,
            are_dense=list(map(is_dense, params)),
            views=[_views_in(lane, plan, params, transport.rank) for lane in lanes],
            staging=staging,
        )

    def laid_out(self, gradients: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gradients by parameter, each in the order in which the parameter is stored."""
        found, forms = gradients.values(), self.forms
        if (  # nearly always, and there may be thousands
            all(map(is_, map(_layout, found), repeat(torch.strided)))
            and list(map(_stride, found)) == [forms[index][1] for index in gradients]
            and all(map(self.are_dense.__getitem__, gradients))
        ):
            return gradients
        return {index: self._laid_out(index, grad) for index, grad in gradients.items()}

    def _laid_out(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"parameter {index} has a sparse gradient, which cannot be reduced in attached "
                "mode: use sparse=False, or leave out attach(...)"
            )
        param, grad = self.params[index], grad.detach()
        return in_layout_of(param, grad) if self.are_dense[index] else grad.contiguous()

    def not_reduced(self) -> list[int]:
        """The planned parameters that have a gradient of this rank alone."""
        gradients = list(map(_grad, self.params))
        if all(map(is_, gradients, repeat(None))):  # nearly always, and there may be thousands
            return []
        return [index for index in self.lanes_of if gradients[index] is not None]

    def lendable(self, bucket: int, dtype: torch.dtype) -> Lendable | None:
        """The memory through which the gradients of a bucket leave, for the gatherer."""
        lane = self.lanes[bucket]
        if lane.memory is None or lane.wire.dtype != dtype:
            return None
        return Lendable(lane.memory, lane.outgoing)

    @property
    def slot_bytes(self) -> int:
        """Memory of this rank's gradients."""
        return sum(lane.slot.nbytes for lane in self.lanes)

    @property
    def staged_bytes(self) -> int:
        """Memory that buckets pass through; it is kept between the steps."""
        return self.staging.nbytes()


def _outgoing_staging(transport: Transport) -> Staging:
    if not transport.neighbours:
        return Staging(IN_FLIGHT)
    return Staging(LENT, transport.memory_to_lend)


def _views_in(
    lane: Lane, plan: Plan, params: Sequence[torch.Tensor], rank: int
) -> list[tuple[int, torch.Tensor]]:
    return [
        (p.param, lane.view(p, params[p.param], p.param in plan.cut_params))
        for p in plan.pieces_in(lane.bucket, rank)
    ]
