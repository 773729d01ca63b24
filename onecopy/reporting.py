"""What a run can tell about itself: memory, communication, traces."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from onecopy.ledger import CommStats, comm_stats
from onecopy.memory import MemoryReport, report_on
from onecopy.parts import Parts
from onecopy.tracing import Order
from onecopy.version import __version__


class Reports(Parts):
    """``memory_report`` and ``comm_stats``."""

    def memory_report(self) -> MemoryReport:
        """What parameters, gradients and state take of this rank's memory now."""
        return report_on(self._shards, self._attachment)

    def comm_stats(self) -> CommStats:
        """What this rank has sent since the optimizer was built, and how long it waited."""
        return comm_stats(self._transport.ledger, self._transport.traffic, self._steps)

    def _take_trace_order(self) -> Order | None:
        """What the environment asks for. Raises ``ValueError`` if that cannot be."""
        order = Order.from_environment(os.environ)
        if order is not None:
            order.make_directory()
        return order

    def _facts(self) -> dict[str, Any]:
        """For the trace of a run; ``recorded.py`` reads them."""
        stats = self.comm_stats()
        classes = dict.fromkeys(policy.optimizer_class for policy in self._roster.policies)
        return {
            "version": __version__,
            "world_size": self._transport.world_size,
            "is_attached": self._attachment is not None,
            "classes": [optimizer_class.__name__ for optimizer_class in classes],
            "memory": self.memory_report().as_dict(),
            "communication": stats.as_dict(),
            "buckets": [asdict(each) for each in stats.buckets],
        }
