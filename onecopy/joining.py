"""Uneven inputs, as ``torch.distributed.algorithms.Join`` sees the optimizer."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook

from onecopy.join import OptimizerJoinHook, Party, Turn, find_party, same_call
from onecopy.parts import Parts
from onecopy.reducer import GradientsDropped
from onecopy.torch_private import join_config, leave_join


class Joins(Parts):
    """A ``Joinable`` that takes part in what the others do when this rank has no inputs left."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``torch.distributed.algorithms.Join``. With ``divide_by_initial_world_size=False``
        an attached optimizer averages over the ranks that still have inputs, as DDP does."""
        if self._attachment is not None:
            self._attachment.divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        if self._steps_in_backward:  # when DDP has had its turn: see ``ddp_hooks.py``
            return OptimizerJoinHook(lambda: None, self._leave_join)
        return OptimizerJoinHook(self._take_part_joined, self._leave_join)

    def _leave_join(self) -> None:
        """A step outside of the context must not pay for it."""
        leave_join(self)

    @property
    def join_device(self) -> torch.device:
        return self._roster.params[0].device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    def _announce(self, turn: Turn) -> Party | None:
        """Tell joined ranks, if there may be any, what comes."""
        if join_config(self).enable:
            self._company.add_to_note(f"inside Join, before {turn.name}")
        with self._company.naming_absentees():  # also those outside of the context
            work = Join.notify_join_context(self)
        if work is not None:
            self._company.wait_for([work])
        return find_party(self._transport, turn) if join_config(self).enable else None

    def _take_part_joined(self) -> None:
        """What the others do, on a rank that has run out of inputs."""
        while True:
            party = find_party(self._transport, Turn.JOINED)
            assert party is not None
            with contextlib.suppress(GradientsDropped):  # who has inputs is told
                self._take_turn(party)
            # Who comes first in Join(...) calls this for every turn, others once per iteration.
            if join_config(self).is_first_joinable or party.turn in (Turn.STEP, Turn.SKIP):
                return

    def _take_turn(self, party: Party) -> None:
        """In the order of what the others do."""
        if party.turn is Turn.STEP:
            self._step(None, {}, party)
        elif party.turn is Turn.SKIP:
            self._drop_gradients()
        elif party.turn is Turn.BACKWARD:
            self._attached("join").shadow_backward(party)
        else:
            self._attached("join").judge()
            self._company.note("looking at gradients with the others, joined", is_joined=True)
            self._follow_changes(party)
            method, *args = same_call(self._transport, party, ())
            getattr(self._attached("join"), method)(*args)
