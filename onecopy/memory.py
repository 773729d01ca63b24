"""What an optimizer and its gradients take of this rank's memory, from what is really there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from onecopy.attachment import Attachment
from onecopy.blueprint import tensors_in
from onecopy.shards import Shards

_MB = 10**6


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes on this rank. ``print(report)`` shows a table, ``as_dict()`` is for loggers."""

    parameters: int
    # In `param.grad`; if attached, also of this rank's pieces, and accumulated inside no_sync().
    gradients: int
    state: Mapping[str, int]  # of this rank's pieces, by key
    master_copies: int
    staging: int  # buffers that buckets pass through, kept between the steps
    # DDP's own copy of all gradients, which it keeps when we are attached to it. With its option
    # lazy_bucket_allocation it has one during backward only.
    ddp_buckets: int

    @property
    def total(self) -> int:
        return sum(self.as_dict().values())

    def as_dict(self) -> dict[str, int]:
        """Flat, for TensorBoard and the like: ``{"parameters": ..., "state/exp_avg": ...}``."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            **{f"state/{key}": count for key, count in self.state.items()},
            "master_copies": self.master_copies,
            "staging": self.staging,
            "ddp_buckets": self.ddp_buckets,
        }

    @classmethod
    def from_dict(cls, counts: Mapping[str, int]) -> MemoryReport:
        """The inverse of ``as_dict``."""
        state = {k.removeprefix("state/"): n for k, n in counts.items() if k.startswith("state/")}
        return cls(
            parameters=counts["parameters"],
            gradients=counts["gradients"],
            state=state,
            master_copies=counts["master_copies"],
            staging=counts["staging"],
            ddp_buckets=counts["ddp_buckets"],
        )

    def __str__(self) -> str:
        rows = [*self.as_dict().items(), ("total", self.total)]
        return "\n".join(f"{name:20}{count / _MB:12.3f} MB" for name, count in rows)


def report_on(shards: Shards, attachment: Attachment | None) -> MemoryReport:
    params = shards.roster.params
    staging = shards.gatherer.staged_bytes
    gradients, ddp_buckets = _nbytes(p.grad for p in params if p.grad is not None), 0
    if attachment is not None:
        gradients += attachment.reducer.roadway.slot_bytes + attachment.reducer.accumulated_bytes
        staging += attachment.reducer.roadway.staged_bytes
        ddp_buckets = attachment.feed.foreign_bytes
    return MemoryReport(
        parameters=_nbytes(params),
        gradients=gradients,
        state=_state_bytes(shards),
        master_copies=_nbytes(o.tensor for o in shards.local.pieces if o.has_master),
        staging=staging,
        ddp_buckets=ddp_buckets,
    )


def _state_bytes(shards: Shards) -> dict[str, int]:
    found: dict[str, int] = {}
    for state in shards.local.state.values():
        entries: Mapping[Any, Any] = state if isinstance(state, Mapping) else {"other": state}
        for key, value in entries.items():
            found[str(key)] = found.get(str(key), 0) + _nbytes(tensors_in(value))
    return {key: count for key, count in sorted(found.items()) if count}


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
