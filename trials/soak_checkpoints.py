"""Checkpoints of a soak, in all the ways there are, and what a leg leaves for the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from inside import params_of, plan_of

if TYPE_CHECKING:
    from soak_job import Job

# optimizer.save, the full state dict, dcp.save of sharded(), and the same in the background.
WAYS = ("own", "full", "dcp", "async")
BY_DCP = ("dcp", "async")


@dataclass(frozen=True)
class Kept:
    """A checkpoint to go back to."""

    way: str
    path: Path
    planned: frozenset[str]  # the parameters that had a place in the plan
    shadow: dict[str, Any]


def planned_by(job: Job) -> frozenset[str]:
    """Those that have been trained at some time."""
    params = params_of(job.optimizer)
    planned = {params[index] for index in plan_of(job.optimizer).params}
    return frozenset(name for name, param in job.net.named_parameters() if param in planned)


class Keeper:
    """Saves a job and brings it back."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.diary: list[str] = []  # of operations, for error messages
        self._directory = directory
        self._rank = rank
        self._under_way: Any = None
        self._own_group: Any = None  # async_save communicates from a thread
        self._kept: Kept | None = None
        self._saved = 0

    # ------------------------------------------------------------------ in a leg

    def keep(self, way: str, job: Job) -> None:
        """Save, and remember the shadow as it is now."""
        self._saved += 1
        path = self._directory / f"leg{job.leg.number}-{self._saved}"
        self.save(way, path, job)
        self._kept = Kept(way, path, planned_by(job), job.shadow.snapshot())

    def forget(self) -> None:
        """What was kept no longer fits: the job has other groups now."""
        self._kept = None

    def can_go_back(self, job: Job) -> bool:
        """DCP reads what it is asked for: what was unfrozen since would be missing."""
        if self._kept is None:
            return False
        unfrozen = {n for n, p in job.net.named_parameters() if p.requires_grad}
        return self._kept.way not in BY_DCP or planned_by(job) | unfrozen == self._kept.planned

    def go_back(self, job: Job) -> None:
        """To what was kept last, which has been trained on since."""
        assert self._kept is not None
        self.finish()
        self.load(self._kept.way, self._kept.path, job)
        job.shadow.restore(self._kept.shadow)

    def finish(self) -> None:
        """Wait for what is saved in the background."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    # ------------------------------------------------------------------ between legs

    def leave(self, job: Job) -> None:
        """What the next leg starts from."""
        path = self.left_by(job.leg.number)
        self.save(job.leg.leaves, path, job)
        self.finish()
        if self._rank == 0:
            left = {**job.shadow.snapshot(), "planned": sorted(planned_by(job))}
            torch.save(left, path / "shadow.pt")
        dist.barrier()

    def left_by(self, leg: int) -> Path:
        return self._directory / f"after{leg}"

    def shadow_left_by(self, leg: int) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(self.left_by(leg) / "shadow.pt", weights_only=True)
        return found

    # ------------------------------------------------------------------ the ways

    def save(self, way: str, path: Path, job: Job) -> None:
        self.finish()  # two at once would meet on their group
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        savers: dict[str, Callable[[Path, Job], None]] = {
            "own": self._save_own,
            "full": self._save_full,
            "dcp": self._save_dcp,
            "async": self._save_async,
        }
        savers[way](path, job)
        job.tally.checkpoints += 1
        dist.barrier()

    def load(self, way: str, path: Path, job: Job) -> None:
        """The model and the optimizer, in one order or the other."""
        if way in BY_DCP:
            form = {"net": job.net.state_dict(), "optim": job.optimizer.sharded(job.net)}
            dcp.load(form, checkpoint_id=path)
            return
        parts = [lambda: self._load_net(path, job)]
        if way == "own":
            parts.append(lambda: job.optimizer.load(path / "optimizer", job.net))
        else:
            parts.append(lambda: job.optimizer.load_state_dict(_read(path / "optimizer.pt")))
        job.random.shuffle(parts)
        for part in parts:
            part()

    def _load_net(self, path: Path, job: Job) -> None:
        job.net.load_state_dict(_read(path / "net.pt"))

    def _save_net(self, path: Path, job: Job) -> None:
        state = job.net.state_dict()
        if self._rank == 0:
            torch.save(state, path / "net.pt")

    def _save_own(self, path: Path, job: Job) -> None:
        job.optimizer.save(path / "optimizer", job.net)
        self._save_net(path, job)

    def _save_full(self, path: Path, job: Job) -> None:
        to = job.random.randrange(job.world.size)
        job.optimizer.consolidate_state_dict(to)
        if self._rank == to:
            torch.save(job.optimizer.state_dict(), path / "optimizer.pt")
        self._save_net(path, job)

    def _save_dcp(self, path: Path, job: Job) -> None:
        form = {"net": job.net.state_dict(), "optim": job.optimizer.sharded(job.net)}
        dcp.save(form, checkpoint_id=path)

    def _save_async(self, path: Path, job: Job) -> None:
        if self._own_group is None:
            self._own_group = dist.new_group()
        form = {"net": job.net.state_dict(), "optim": job.optimizer.sharded(job.net)}
        self._under_way = dcp.async_save(form, checkpoint_id=path, process_group=self._own_group)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found
