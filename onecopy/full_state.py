"""The full state on one rank, from when it is gathered until it is out of date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onecopy.agreement import agree
from onecopy.shards import Shards
from onecopy.state import (
    as_plain_dict,
    consolidate,
    has_no_state,
    state_outside_the_plan,
    take_stock,
)
from onecopy.transport import Transport

Groups = Sequence[Mapping[str, Any]]


class FullState:
    def __init__(self, why_not: str | None = None) -> None:
        self._state: dict[Any, Any] | None = None  # by parameter
        # No rank has state of a step or of a load: there is nothing to gather.
        self._is_new = why_not is None
        self._why_not = why_not or "no state dict has been consolidated"

    def forget(self, why: str, is_state_same: bool = False) -> None:
        """``is_state_same``: no rank has other state than before, so that an optimizer that was
        new still has nothing to gather."""
        self._state, self._why_not = None, why
        self._is_new = self._is_new and is_state_same

    def gather(
        self, transport: Transport, shards: Shards, groups: Groups, steps: int, to: int
    ) -> None:
        """Collective."""
        transport.enter(f"consolidating the state to rank {to}")
        stock: Any = None

        def prepare() -> list[str]:
            nonlocal stock
            if type(to) is not int or not 0 <= to < transport.world_size:
                last = transport.world_size - 1
                raise ValueError(f"to must be a rank of the group, 0 to {last}, got {to!r}")
            stock = take_stock(shards.local)
            return [f"to rank {to}", f"after {steps} steps", f"plan {shards.plan.digest}"]

        agree(transport, "consolidating the state", prepare)
        if to == transport.rank:
            self._state = None  # not two of them at once
        params = shards.roster.params
        gathered = consolidate(shards.plan, params, transport, to, stock)
        if gathered is not None:
            self._state = {
                **{params[index]: state for index, state in gathered.items()},
                **state_outside_the_plan(shards.local, shards.roster, shards.plan, groups),
            }
        elif self._state is None:
            self._why_not = f"the state was consolidated to rank {to}"
        transport.company.note("state consolidated")

    @property
    def is_here(self) -> bool:
        return self._state is not None

    def as_plain_dict(self, rank: int, shards: Shards, groups: Groups) -> dict[str, Any]:
        state = self._state
        if state is None and self._is_new and has_no_state(shards.local, shards.roster, groups):
            state = {}  # on every rank: trainers ask for it before the first step
        if state is None:
            raise RuntimeError(
                f"rank {rank} has no state dict: {self._why_not}. Call "
                f"consolidate_state_dict(to={rank}) on all ranks first; or, for "
                "torch.distributed.checkpoint, save optimizer.sharded(), which gathers nothing"
            )
        return as_plain_dict(state, groups)
