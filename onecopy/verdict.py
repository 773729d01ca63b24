"""How a backward has ended, on all ranks: said in one small all-reduce, and read when needed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch

from onecopy.pending import Pending
from onecopy.transport import Transport

# Backwards are counted modulo this, so that a byte will do: no rank is that far behind another.
_CYCLE = 101


class Said(NamedTuple):
    """What the ranks have said, all together."""

    present: set[int]  # parameters that had a gradient
    again: list[int]  # buckets that need a second round
    gave_up: list[int]  # ranks
    equally_often: bool  # all have had the same number of backwards


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks say, on its way."""

    # One for each parameter, for each bucket, for each rank, and two for the number of backwards.
    marks: torch.Tensor
    params: int  # how many there were: more may have come since
    buckets: int
    pending: Pending

    @classmethod
    def ask(
        cls,
        transport: Transport,
        *,
        params: int,
        buckets: int,
        backwards: int,
        present: Collection[int],
        late: Collection[int],
        gives_up: bool,
    ) -> Verdict:
        """Say which of the parameters had a gradient on this rank, for which of the buckets one
        came too late, and whether it gives up."""
        marked = [*present, *(params + number for number in late)]
        if gives_up:
            marked.append(params + buckets + transport.rank)
        device = transport.control_device
        length = params + buckets + transport.world_size + 2
        marks = torch.zeros(length, dtype=torch.uint8, device=device)
        # The greatest of both over all ranks add up so only if the ranks have the same.
        count = backwards % _CYCLE
        marks[-2:] = torch.tensor([count, _CYCLE - count])
        if marked:
            marks[torch.tensor(sorted(marked), device=device)] = 1
        return cls(marks, params, buckets, transport.maximum(marks))

    def read(self) -> Said:
        self.pending.wait()
        most, least = self.marks[-2:].tolist()
        said = self.marks[:-2].nonzero().flatten().tolist()
        first_bucket, first_rank = self.params, self.params + self.buckets
        return Said(
            present={mark for mark in said if mark < first_bucket},
            again=[mark - first_bucket for mark in said if first_bucket <= mark < first_rank],
            gave_up=[mark - first_rank for mark in said if mark >= first_rank],
            equally_often=most + least == _CYCLE,
        )
