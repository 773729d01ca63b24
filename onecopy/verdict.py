"""How a backward has ended, on all ranks: said in one small all-reduce, and read when needed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import compress, count
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
        said = bytearray(params + buckets + transport.world_size)
        for index in present:
            said[index] = 1
        for bucket in late:
            said[params + bucket] = 1
        if gives_up:
            said[params + buckets + transport.rank] = 1
        # The greatest of both over all ranks add up so only if the ranks have the same.
        number = backwards % _CYCLE
        said += bytes([number, _CYCLE - number])
        marks = torch.frombuffer(said, dtype=torch.uint8).to(transport.control_device)
        return cls(marks, params, buckets, transport.maximum(marks))

    def read(self) -> Said:
        self.pending.wait()
        *marks, most, least = self.marks.tolist()
        first_bucket, first_rank = self.params, self.params + self.buckets
        said = list(compress(count(), marks))
        return Said(
            present={mark for mark in said if mark < first_bucket},
            again=[mark - first_bucket for mark in said if first_bucket <= mark < first_rank],
            gave_up=[mark - first_rank for mark in said if mark >= first_rank],
            equally_often=most + least == _CYCLE,
        )
