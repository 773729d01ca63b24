"""What a run can tell about itself: memory, communication, traces."""

from __future__ import annotations

from typing import Any

from onecopy.ledger import CommStats, comm_stats
from onecopy.memory import MemoryReport, report_on
from onecopy.parts import Parts


class Reports(Parts):
    """``memory_report`` and ``comm_stats``."""

    def memory_report(self) -> MemoryReport:
        """What parameters, gradients and state take of this rank's memory now."""
        return report_on(self._shards, self._attachment)

    def comm_stats(self) -> CommStats:
        """What this rank has sent since the optimizer was built, and how long it waited."""
        return comm_stats(self._transport.ledger, self._transport.traffic, self._steps)

    def _facts(self) -> dict[str, Any]:
        """For the trace of a run."""
        return {
            "world_size": self._transport.world_size,
            "is_attached": self._attachment is not None,
            "memory": self.memory_report().as_dict(),
            "communication": self.comm_stats().as_dict(),
        }
